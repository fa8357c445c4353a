"""examples/taskiq_worker, by its one command, and its API in this process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(300)
EXAMPLE = Path(__file__).parents[3] / "examples" / "taskiq_worker"


def test_the_one_command(server):
    done = subprocess.run(
        [sys.executable, "run.py"],
        cwd=EXAMPLE,
        env=os.environ | {"REDIS_URL": server.url},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    said = done.stdout
    assert done.returncode == 0, said + done.stderr
    assert "'remind']" in said, "one waits for an hour; the other for a second, which may be over by now"
    assert "cancelled: cancelled" in said
    assert "reminder: 'drink water'" in said
    assert "(remind) was cancelled before it was due" in said
    assert [f"attempt {n}" in said for n in (1, 2, 3)] == [True] * 3
    assert "'result': 'order 7 paid at attempt 3'" in said
    assert "still waiting: []" in said


@pytest.mark.slow
def test_the_demo_accounts_for_every_job(tmp_path):
    """Worker and Redis are killed in it. Another framework's key of the report stays."""
    report = tmp_path / "report.json"
    report.write_text('{"other": {"lost": 0}}')
    command = [sys.executable, "demo.py", "--quick", "--report", str(report)]
    done = subprocess.run(command, cwd=EXAMPLE, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    whole = json.loads(report.read_text())
    seen = whole["taskiq"]
    assert whole["other"] == {"lost": 0}
    assert (seen["scheduled"], seen["executed"], seen["lost"], seen["early"]) == (215, 200, 0, 0)
    assert (seen["cancelled"], seen["cancelled_but_run"], seen["waiting"]) == (5, 0, 10)
    assert [kill["what"] for kill in seen["kills"]] == ["the worker's process tree", "Redis"]
