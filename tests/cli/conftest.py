"""``run("ls", "--json")`` calls the command in this process, on the test's own queue."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from click.testing import CliRunner, Result

from delayadapters import DelayQueue
from delayadapters.cli import main

Run = Callable[..., Result]


def invoke(*arguments: str, **options: Any) -> Result:
    """The command as a user without a terminal calls it; an exception that is no exit is raised."""
    result = CliRunner().invoke(main, list(arguments), **options)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.fixture
def run(redis_server: Any, queue: DelayQueue) -> Run:
    """On the queue of the fixture ``queue``."""

    def call(*arguments: str, name: str | None = None, **options: Any) -> Result:
        return invoke("--url", redis_server.url, "--name", name or queue.name, *arguments, **options)

    return call


@pytest.fixture
def read(run: Run) -> Callable[..., Any]:
    """``read("status")``: what ``status --json`` says; its exit status must be 0."""

    def call(*arguments: str, **options: Any) -> Any:
        result = run(*arguments, "--json", **options)
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)

    return call


def kill_one(queue: DelayQueue, id: str, reason: str = "no exchange 'x'", task: str = "shop.broken") -> None:
    """A dead job."""
    queue.schedule(b"dead", delay=0, id=id, meta={"task": task})
    assert queue.fail(queue.claim(), reason, retry_in=None) == 1
