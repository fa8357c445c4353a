"""examples/demo_kit: what the demos count, and that a killed demo leaves no process behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from delaytests import wait_until

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def story(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    from demo_kit import story

    return story


def account(story, folder, rows, cancelled=()):
    """What a run says that has these executions: (number, due, start)."""
    framework = story.Framework("x", (), folder, list, lambda jobs: set(), lambda: 0)
    run = story.Run(framework, story.Plan(near=4, far=1, cancelled=1), folder)
    (folder / "executions").write_text("".join(f"{number} {due} {start}\n" for number, due, start in rows))
    run.kills = [("Redis", 200.0)]
    return run.account(100.0, set(cancelled))


def test_every_job_is_accounted_for(story, tmp_path):
    """0 is the far one, 1 is cancelled, 2 to 5 are near."""
    found = account(story, tmp_path, [(2, 101.0, 101.5), (3, 102.0, 102.001), (3, 102.0, 109.0), (4, 103.0, 103.002)])
    counted = {key: found[key] for key in ("scheduled", "executed", "lost", "duplicated", "early", "cancelled_but_run")}
    assert counted == {"scheduled": 6, "executed": 3, "lost": 1, "duplicated": 1, "early": 0, "cancelled_but_run": 0}
    assert found["lateness_ms"] == {"p50": 2.0, "p99": 500.0, "max": 500.0}
    assert story.broken(found) == ["1 lost"]


def test_early_and_cancelled_ones_that_ran_break_a_promise(story, tmp_path):
    rows = [(2, 101.0, 100.9), (3, 102.0, 102.0), (4, 103.0, 103.0), (5, 104.0, 104.0), (1, 105.0, 105.0)]
    found = account(story, tmp_path, rows, cancelled={1})
    assert story.broken(found) == ["1 early", "1 run although cancelled"]
    assert story.broken(account(story, tmp_path, [*rows[1:4], (2, 101.0, 101.0)], cancelled={1})) == []


def test_what_a_kill_touched_is_not_in_the_lateness(story, tmp_path):
    rows = [(2, 150.0, 150.002), (3, 200.5, 203.0), (4, 203.2, 203.203), (5, 204.0, 204.001)]
    found = account(story, tmp_path, rows)
    assert found["kills"] == [{"what": "Redis", "at_s": 100.0, "touched_s": [99.9, 103.2]}]
    assert (found["untouched"], found["excluded"]) == (2, 2)
    assert found["lateness_ms"]["max"] == 2.0
    assert found["lateness_all_ms"]["max"] == 2500.0


def test_a_killed_demo_leaves_no_process(tmp_path):
    code = (
        "import subprocess, sys, time; from demo_kit.servers import Undertaker\n"
        "undertaker = Undertaker()\n"
        "redis = subprocess.Popen(['sleep', '600']); undertaker.told(f'redis {redis.pid}')\n"
        "worker = subprocess.Popen(['sh', '-c', 'sleep 600 & wait'], start_new_session=True)\n"
        "undertaker.told(f'worker {worker.pid}')\n"
        "print(redis.pid, worker.pid, flush=True); time.sleep(600)"
    )
    demo = subprocess.Popen([sys.executable, "-c", code], cwd=EXAMPLES, stdout=subprocess.PIPE, text=True)
    assert demo.stdout is not None
    redis, worker = map(int, demo.stdout.readline().split())
    os.kill(demo.pid, signal.SIGKILL)
    demo.wait()
    demo.stdout.close()
    wait_until(lambda: not alive(redis) and not group_alive(worker), timeout=30)


def alive(pid: int) -> bool:
    listing = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False).stdout
    return bool(listing.strip()) and not listing.startswith("Z")


def group_alive(group: int) -> bool:
    listing = subprocess.run(["ps", "-A", "-o", "pgid=,stat="], capture_output=True, text=True, check=True).stdout
    return any(row.split()[0] == str(group) and row.split()[1][0] != "Z" for row in listing.splitlines())
