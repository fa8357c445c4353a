"""examples/arq_worker: its one command does what its README says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[3] / "examples" / "arq_worker"


def test_the_demo():
    done = subprocess.run(
        [sys.executable, "demo.py"], cwd=EXAMPLE, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "reminder aborted: True" in done.stdout
    assert "reminder 1" not in done.stdout
    assert "all jobs ran, once" in done.stdout
