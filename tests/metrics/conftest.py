"""What metrics are read from: a queue on the session's server, and HTTP."""

from __future__ import annotations

import urllib.error
import urllib.request
from typing import NamedTuple

import pytest

pytest.importorskip("prometheus_client")


class Answer(NamedTuple):
    status: int
    text: str
    kind: str


def fetch(port: int, path: str = "/metrics", *, accept: str = "") -> Answer:
    """What a process answers on the loopback."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers={"Accept": accept})
    try:
        with urllib.request.urlopen(request, timeout=30) as reply:
            return Answer(reply.status, reply.read().decode(), reply.headers["Content-Type"])
    except urllib.error.HTTPError as error:
        return Answer(error.code, error.read().decode(), error.headers["Content-Type"])


@pytest.fixture(name="fetch")
def _fetch():
    return fetch
