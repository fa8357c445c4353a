"""examples/arq_worker: its commands do what its README says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(300)
EXAMPLE = Path(__file__).parents[3] / "examples" / "arq_worker"


def test_the_one_command():
    done = subprocess.run(
        [sys.executable, "run.py"], cwd=EXAMPLE, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "reminder aborted: True" in done.stdout
    assert "reminder 1" not in done.stdout
    assert "all jobs ran, once" in done.stdout


@pytest.mark.slow
def test_the_demo_accounts_for_every_job(tmp_path):
    """Worker and Redis are killed in it. Another framework's key of the report stays."""
    report = tmp_path / "report.json"
    report.write_text('{"other": {"lost": 0}}')
    command = [sys.executable, "demo.py", "--quick", "--report", str(report)]
    done = subprocess.run(command, cwd=EXAMPLE, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    whole = json.loads(report.read_text())
    seen = whole["arq"]
    assert whole["other"] == {"lost": 0}
    assert (seen["scheduled"], seen["executed"], seen["lost"], seen["early"]) == (215, 200, 0, 0)
    assert (seen["cancelled"], seen["cancelled_but_run"], seen["waiting"]) == (5, 0, 10)
    assert [kill["what"] for kill in seen["kills"]] == ["the worker's process tree", "Redis"]
