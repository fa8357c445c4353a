"""What metrics are read with."""

from __future__ import annotations

import pytest

from delaytests import http

pytest.importorskip("prometheus_client")


@pytest.fixture
def fetch():
    return http.fetch
