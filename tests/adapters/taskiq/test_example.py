"""examples/taskiq_worker, by its one command, and its API in this process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[3] / "examples" / "taskiq_worker"


def test_the_one_command(server):
    done = subprocess.run(
        [sys.executable, "run.py"],
        cwd=EXAMPLE,
        env=os.environ | {"REDIS_URL": server.url},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    said = done.stdout
    assert done.returncode == 0, said + done.stderr
    assert "'remind', 'remind']" in said
    assert "cancelled: cancelled" in said
    assert "reminder: 'drink water'" in said
    assert "(remind) was cancelled before it was due" in said
    assert [f"attempt {n}" in said for n in (1, 2, 3)] == [True] * 3
    assert "'result': 'order 7 paid at attempt 3'" in said
    assert "still waiting: []" in said
