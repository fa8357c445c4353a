"""examples/celery_worker, by its one command."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[3] / "examples" / "celery_worker"


@pytest.mark.timeout(240)
def test_the_one_command(run_example: Callable[[Path], str]) -> None:
    said = run_example(EXAMPLE)
    assert "her reminder is cancelled" in said
    assert "proj.tasks.send_reminder" in said
    assert said.count("order 17 is not paid yet") == 2
    assert said.count("order 17 is paid") == 1
    assert said.count("reminder for ada") == 1
    assert "grace:" not in said
