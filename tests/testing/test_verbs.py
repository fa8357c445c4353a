"""The queue in memory behind the adapters: the verbs of a DelayQueue and an AsyncDelayQueue, and no Redis."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from delayadapters import AsyncDelayQueue, DelayQueue, JobExists, ManualClock, NewJob, Outcome, State
from delayadapters.redis.commands import Extras
from delayadapters.testing.verbs import MemoryVerbs, NoRedis


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def queue(clock: ManualClock) -> DelayQueue:
    queue = DelayQueue(NoRedis(), max_payload=None)
    queue._verbs = MemoryVerbs(clock)
    return queue


def test_every_verb_of_a_delay_queue(queue: DelayQueue, clock: ManualClock) -> None:
    queue.schedule(b"1", delay=10, id="a", meta={"task": "t"})
    with pytest.raises(JobExists):
        queue.schedule(b"2", delay=10, id="a")
    assert queue.schedule(b"2", delay=5, id="a", if_exists="add").due == clock.micros + 5_000_000
    queue.schedule_many([NewJob(b"3", delay=1, id="b"), NewJob(b"4", delay=2, id="c")])
    assert [job.payload for job in queue.jobs().jobs] == [b"3", b"4", b"2", b"1"]
    assert [job.payload for job in queue.jobs(limit=3).jobs] == [b"3", b"4", b"2"]
    assert queue.cancel("b") is Outcome.CANCELLED
    assert queue.reschedule("c", delay=3) is Outcome.RESCHEDULED
    assert queue.get("c").due == clock.micros + 3_000_000
    assert queue.stats().waiting == 3
    assert queue.claim() == []
    clock.advance(4)
    (claim,) = queue.claim()
    assert claim.id == "c"
    assert queue.get("c").state is State.LEASED
    assert queue.give_back([claim]) == 1
    (claim,) = queue.renew(queue.claim(), lease=60)
    assert queue.ack([claim]) == 1
    assert queue.cancel("c") is Outcome.RELEASED
    clock.advance(1)
    assert queue.fail(queue.claim(), "why", retry_in=1) == 1
    clock.advance(1)
    assert queue.fail(queue.claim(), "why", retry_in=None) == 1
    assert [job.reason for job in queue.dead_jobs().jobs] == ["why"]
    assert queue.replay("a") is Outcome.REPLAYED
    assert queue.release_now("a") is Outcome.RESCHEDULED
    assert len(queue.claim()) == 2
    queue.purge()
    assert queue.stats().leased == 0
    with pytest.raises(TypeError, match="id must be a str"):
        queue.cancel(7)  # type: ignore[arg-type]


async def test_an_async_queue_has_them_too(clock: ManualClock) -> None:
    queue = AsyncDelayQueue(NoRedis(), max_payload=None)
    queue._verbs = MemoryVerbs(clock)
    await queue.schedule(b"1", delay=timedelta(days=1), id="a")
    clock.advance(86_400)
    assert [claim.id for claim in await queue.claim()] == ["a"]
    await queue.aclose()


def test_there_is_no_redis_to_ask(queue: DelayQueue) -> None:
    with pytest.raises(AttributeError, match=r"in memory .*no Redis client .execute_command"):
        queue.client.execute_command("PING")
    assert getattr(queue.client, "connection_pool", None) is None
    with pytest.raises(TypeError, match="need a broker in Redis"):
        queue._run(queue._verbs.schedule(b"", 1, None, "a", None, "error", None, Extras(unless=["key"])))


@pytest.mark.parametrize(("distinct", "kept"), [(False, False), ("attempt", True), (True, False)])
def test_a_repeated_attempt_is_kept_once(queue: DelayQueue, distinct: Any, kept: bool) -> None:
    for payload in (b"1", b"2"):
        (job,) = queue._run(
            queue._verbs.schedule_many(
                [NewJob(payload, delay=1, id="a", meta={"attempt": "1"})], "add", Extras(distinct=distinct)
            )
        )
    assert (job.outcome is Outcome.KEPT) is kept
    assert queue.stats().waiting == (1 if kept else 2)


async def test_a_consumer_of_its_own_is_told_that_this_is_not_the_way(queue: DelayQueue, clock: ManualClock) -> None:
    import asyncio

    waiting = asyncio.ensure_future(queue._verbs.memory.get())  # type: ignore[attr-defined]
    await asyncio.sleep(0)
    queue.schedule(b"1", delay=1, id="a")
    clock.advance(1)
    with pytest.raises(RuntimeError, match="release its jobs with advance"):
        queue.schedule(b"2", delay=1, id="b")
    waiting.cancel()
