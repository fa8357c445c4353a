"""Sentry and OpenTelemetry, the real ones: both see one publish of a delayed task; a worker goes on with the trace."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("traced.py")


def traced(which: str, url: str) -> dict[str, Any]:
    command = [sys.executable, "-W", "ignore", str(SCRIPT), which, url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=220, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def path(spans: list[dict[str, Any]], span: dict[str, Any]) -> list[str]:
    """The names of what a span is in, from itself up to the trace's root."""
    parents = {one["id"]: one for one in spans}
    names = []
    while span is not None:
        names.append(f"{span['op']} {span['name']}")
        span = parents.get(span["parent"])
    return names


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("which", "publish", "run"),
    [
        # Sentry patches both Task.apply_async and Celery.send_task: one in the other.
        ("sentry", ["queue.submit.celery traced.again"] * 2, "queue.task.celery traced.again"),
        ("opentelemetry", ["PRODUCER apply_async/traced.again"], "CONSUMER run/traced.again"),
    ],
    ids=["sentry", "opentelemetry"],
)
def test_one_publish_and_one_trace(redis_broker: Any, which: str, publish: list[str], run: str) -> None:
    found = traced(which, redis_broker.url)
    spans = found["spans"]
    assert len({span["trace"] for span in spans}) == 1, spans
    kinds = [f"{span['op']} {span['name']}" for span in spans]
    assert kinds.count(run) == 3
    assert kinds.count(publish[0]) == 3 * len(publish), "the call and each of two retries, once"
    [last] = [way for span in spans if (way := path(spans, span))[0] == run and way.count(run) == 3]
    assert [name for name in last if name in (run, publish[0])] == [run, *publish] * 3, last
    assert "request" in last[-1]
    # What the tracer puts into headers does not hide ours, nor is a retry shown the due time of the call before it.
    assert [one["retries"] for one in found["runs"]] == [0, 1, 2]
    assert [one["mine"] for one in found["runs"]] == ["x"] * 3
    due = [datetime.fromisoformat(one["due"]) for one in found["runs"]]
    assert due == sorted(set(due))
