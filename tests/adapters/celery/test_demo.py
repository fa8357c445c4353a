"""`make demo` as a user runs it, and the example project beside it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[3] / "examples" / "celery_worker"


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_the_demo_loses_nothing_and_says_so(tmp_path):
    """Worker and Redis are killed in it, so this is the whole claim in one run."""
    report = tmp_path / "report.json"
    command = [sys.executable, str(EXAMPLE / "demo.py"), "--report", str(report)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=170, check=False, env={**os.environ, "NO_COLOR": "1"}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    seen = json.loads(report.read_text())["celery"]
    assert {"scheduled", "executed", "lost", "duplicated", "early", "waiting", "lateness_ms"} <= seen.keys()
    assert seen["lateness_ms"].keys() == {"p50", "p99", "max"}
    assert (seen["scheduled"], seen["executed"], seen["lost"], seen["early"]) == (1070, 1000, 0, 0)
    assert (seen["cancelled"], seen["cancelled_but_run"], seen["waiting"]) == (20, 0, 50)
    assert [kill["what"] for kill in seen["kills"]] == ["the worker's process tree", "Redis"]
    for word in ("scheduled", "executed", "lost", "duplicated", "early", "waiting"):
        assert word in done.stdout
    wide = [line for line in done.stdout.splitlines() if len(line) > 80 and not line.startswith("Report: ")]
    assert wide == []
