"""``run("ls", "--json")`` calls the command in this process, on the test's own queue."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from click.testing import CliRunner, Result

from delayadapters import DelayQueue
from delayadapters.cli import main
from delaytests.raw import keys_of

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


_FILL = """
local record, from, count = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
for i = from, from + count - 1 do
  local number = struct.pack('>I6', 2 * (i + 10))
  local due = 4000000000000000 + (i % 997) * 1000000
  redis.call('ZADD', KEYS[1], string.format('%.0f', due), number .. i)
  redis.call('HSET', KEYS[2], i,
    string.sub(record, 1, 1) .. number .. struct.pack('>I7', due) .. string.sub(record, 15) .. i)
end
return redis.call('INCRBY', KEYS[3], count)
"""


def fill_fast(queue: DelayQueue, count: int, *, task: str = "t") -> None:
    """So many waiting jobs, of ids of their own, written as a schedule call would; by a script, because 200,000
    calls' worth of Python would be most of a test."""
    keys = keys_of(queue)
    queue.schedule(b"x" * 100, delay=60, id="model", meta={"task": task})
    record = queue.client.hget(keys.entries, "model")
    assert queue.cancel("model").value == "cancelled"
    for start in range(0, count, 10_000):
        size = min(10_000, count - start)
        queue.client.eval(_FILL, 3, keys.due, keys.entries, keys.seq, record, start, size)
    assert queue.stats().waiting == count


def kill_one(queue: DelayQueue, id: str, reason: str = "no exchange 'x'", task: str = "shop.broken") -> None:
    """A dead job."""
    queue.schedule(b"dead", delay=0, id=id, meta={"task": task})
    assert queue.fail(queue.claim(), reason, retry_in=None) == 1
