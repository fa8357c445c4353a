"""The benchmarks run and report in the promised form. What they measure is not asserted: machines differ."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

RUN = Path(__file__).parents[2] / "benchmarks" / "run.py"


def bench(*args):
    return subprocess.run([sys.executable, RUN, *args], capture_output=True, text=True, timeout=100)


@pytest.mark.slow
def test_a_quick_run_writes_json_and_prints_one_table(tmp_path):
    done = bench("--quick", "--only", "schedule", "--only", "leased", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    for name in ("schedule", "leased"):
        result = json.loads((tmp_path / f"{name}.json").read_text())
        assert result["benchmark"] == name
        assert result["command"].startswith("benchmarks/run.py --quick")
        assert {"python", "redis_py", "hiredis", "redis", "cpus"} <= set(result["machine"])
        assert result["rows"]
        for row in result["rows"]:
            assert set(row) == {"what", "measured", "floor", "ratio", "target", "met", "values", "runs"}
            assert row["what"] in done.stdout
            assert row["met"] in (True, False, None)
            assert all(row["runs"].values()), "the raw runs are kept"
            assert row["values"]["ratio"] == pytest.approx(row["values"]["jobs_per_s"] / row["values"]["floor_per_s"])
    table = [line for line in done.stdout.splitlines() if line.startswith("|")]
    assert [cell.strip() for cell in table[0].strip("|").split("|")] == [
        "what", "measured", "floor, same run", "ratio", "target", "met",
    ]  # fmt: skip
    assert len({len(line) for line in table}) == 1, "the columns are aligned"
    assert (tmp_path / "table.md").read_text() in done.stdout


def test_an_unknown_row_is_refused(tmp_path):
    done = bench("--only", "nonsense", "--out", str(tmp_path))
    assert done.returncode == 2
    assert "nonsense" in done.stderr
    assert not list(tmp_path.iterdir())
