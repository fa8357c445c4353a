"""examples/celery_worker, by its one command."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLE = Path(__file__).parents[3] / "examples" / "celery_worker"


@pytest.mark.timeout(240)
def test_the_one_command(redis_broker: Any) -> None:
    done = subprocess.run(
        [sys.executable, "run.py"],
        cwd=EXAMPLE,
        env=os.environ | {"REDIS_URL": redis_broker.redis.url, "C_FORCE_ROOT": "1"},
        capture_output=True,
        text=True,
        timeout=220,
        check=False,
    )
    said = done.stdout
    assert done.returncode == 0, said + done.stderr
    assert "her reminder is cancelled" in said
    assert "proj.tasks.send_reminder" in said
    assert said.count("order 17 is not paid yet") == 2
    assert said.count("order 17 is paid") == 1
    assert said.count("reminder for ada") == 1
    assert "grace:" not in said
