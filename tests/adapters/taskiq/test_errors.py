"""What goes wrong, and what its user is told."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from collections import Counter

import pytest
import redis
from taskiq import InMemoryBroker, SmartRetryMiddleware, async_shared_broker
from taskiq.exceptions import SendTaskError
from taskiq_redis import ListQueueBroker, RedisStreamBroker

from delayadapters import (
    AsyncDelayQueue,
    DelayQueue,
    OutcomeUnknown,
    OutOfMemory,
    PayloadTooLarge,
    RedisUnavailable,
    WrongKeyType,
)
from delayadapters.taskiq import DelayLabelError, DelayMiddleware
from delaytests import wait_until_async
from delaytests.taskiqs import started, working


def add_task(broker):
    @broker.task(task_name="task")
    async def task(n=0): ...

    return task


@pytest.mark.parametrize("value", [float("nan"), "soon", True, float("inf")])
async def test_garbage_is_refused_before_anything_is_sent(make_broker, client, queue_name, value):
    broker = make_broker()
    task = add_task(broker)
    async with started(broker):
        with pytest.raises(DelayLabelError, match=r"label delay must be a (finite )?number of seconds, got") as caught:
            await task.kicker().with_labels(delay=value).kiq()
        assert isinstance(caught.value, SendTaskError)
        assert client.keys("*") == []


async def test_redis_down(make_broker, start_redis):
    server = start_redis()
    broker = make_broker(url=server.url, delay={"url": server.url, "timeout": 2.0})
    task = add_task(broker)
    async with started(broker):
        server.kill()
        began = time.monotonic()
        with pytest.raises(SendTaskError) as caught:
            await task.kicker().with_labels(delay=5).kiq()
        assert time.monotonic() - began < 20
        assert isinstance(caught.value.__cause__, RedisUnavailable)
        assert "check the URL, the server and the network" in str(caught.value.__cause__)
        outcomes = await asyncio.gather(
            *(task.kicker().with_labels(delay=5).kiq(n) for n in range(300)), return_exceptions=True
        )
        assert all(isinstance(outcome, SendTaskError) for outcome in outcomes), "every caller is told"
        server.restart()
        await task.kicker().with_labels(delay=5).kiq()
        assert (await broker.delay.queue.stats()).waiting == 1, "nothing of the failed ones"


@pytest.mark.parametrize("cls", [ListQueueBroker, RedisStreamBroker], ids=["list", "stream"])
async def test_a_retry_that_cannot_be_stored_is_said_and_lost_only_where_nothing_is_acknowledged(
    make_broker, start_redis, cls, caplog
):
    """The delays' Redis is away, the broker's is not. taskiq itself leaves the error to a task nobody awaits."""
    away = start_redis()
    options = {"idle_timeout": 100, "xread_block": 100, "unacknowledged_lock_timeout": 5.0}
    broker = make_broker(
        cls,
        SmartRetryMiddleware(default_delay=0.1, default_retry_count=2),
        delay={"url": away.url, "timeout": 1.0, "embed": False},
        **(options if cls is RedisStreamBroker else {}),
    )
    ran = []

    @broker.task(task_name="fail", retry_on_error=True)
    async def fail():
        ran.append(time.monotonic())
        raise ValueError

    @broker.task(task_name="other")
    async def other():
        return "ran"

    def said():
        return [r for r in caplog.records if r.name == "delayadapters.taskiq" and r.levelname == "ERROR"]

    async with working(broker):
        away.kill()
        sent = await fail.kiq()
        (record, *_) = await wait_until_async(said, timeout=20)
        assert time.monotonic() - ran[0] < 20, "within the time-out, on a busy machine"
        assert f"retry 1 of task {sent.task_id} (fail) could not be stored" in record.getMessage()
        assert "RedisUnavailable" in record.getMessage()

        async def delivered_again():
            assert (await (await other.kiq()).wait_result(0.02, 10)).return_value == "ran", "the worker goes on"
            return len(ran) > 1

        if cls is RedisStreamBroker:
            await wait_until_async(delivered_again, timeout=20, interval=0.1)
        else:
            assert not await delivered_again()
            assert not await sent.is_ready()
    gc.collect()  # the error that nobody awaited is told about here, and not in another test


async def test_redis_full(make_broker, start_redis):
    server = start_redis(maxmemory="4mb")
    broker = make_broker(url=server.url, delay={"url": server.url})
    task = add_task(broker)
    async with started(broker):
        filler = server.client()
        with contextlib.suppress(redis.exceptions.OutOfMemoryError):
            for n in range(1000):
                filler.set(f"ballast-{n}", b"x" * 50_000)
        with pytest.raises(SendTaskError) as caught:
            await task.kicker().with_labels(delay=5).kiq("x" * 300_000)
        assert isinstance(caught.value.__cause__, OutOfMemory)
        assert (await broker.delay.queue.stats()).waiting == 0


async def test_a_key_of_another_type(make_broker, client):
    broker = make_broker()
    task = add_task(broker)
    async with started(broker):
        client.set(f"{{{broker.delay.name}:0}}:due", "mine")
        with pytest.raises(SendTaskError) as caught:
            await task.kicker().with_labels(delay=5).kiq()
        assert isinstance(caught.value.__cause__, WrongKeyType)


async def test_one_bad_of_many_at_once_spoils_no_other(make_broker, server):
    queue = AsyncDelayQueue.from_url(server.url, name="bounded", max_payload=1000)
    broker = make_broker(delay={"url": queue})
    task = add_task(broker)
    async with started(broker), queue:
        texts = ["x" * (2000 if n == 7 else 1) for n in range(20)]
        outcomes = await asyncio.gather(
            *(task.kicker().with_labels(delay=60).kiq(text) for text in texts), return_exceptions=True
        )
        assert [n for n, outcome in enumerate(outcomes) if isinstance(outcome, Exception)] == [7]
        assert isinstance(outcomes[7].__cause__, PayloadTooLarge)
        assert (await queue.stats()).waiting == 19


async def test_of_many_at_once_each_is_told_of_its_own_task(make_broker, start_redis):
    """Redis is full half-way: who hears of an error has stored nothing, who hears of none has."""
    server = start_redis()
    client = server.client()
    broker = make_broker(url=server.url, delay={"url": server.url, "embed": False})
    task = add_task(broker)
    async with started(broker):
        ids = [f"task-{n}" for n in range(1500)]
        in_part = 0
        for more in range(1, 9):
            client.config_set("maxmemory", client.info("memory")["used_memory"] + more * 1_000_000)
            outcomes = await asyncio.gather(
                *(task.kicker().with_labels(delay=60).with_task_id(one).kiq("x" * 4000) for one in ids),
                return_exceptions=True,
            )
            client.config_set("maxmemory", 0)
            told = {one for one, outcome in zip(ids, outcomes, strict=True) if not isinstance(outcome, Exception)}
            in_part += 0 < len(told) < len(ids)
            assert {type(outcome.__cause__) for outcome in outcomes if isinstance(outcome, Exception)} <= {OutOfMemory}
            queue = broker.delay.queue
            stored = [one for one in ids if await queue.get(one) is not None]
            assert set(stored) == told
            await queue.purge()
        assert in_part


async def test_many_at_once_all_hear_within_the_timeout(make_broker, start_redis):
    """Not one round after the other, each with a time-out of its own."""
    server = start_redis()
    broker = make_broker(url=server.url, delay={"url": server.url, "timeout": 1.5, "embed": False})
    task = add_task(broker)
    async with started(broker):
        await task.kicker().with_labels(delay=60).kiq(0)
        with server.paused():
            began = time.monotonic()
            sends = [asyncio.create_task(task.kicker().with_labels(delay=60).kiq(n)) for n in range(6000)]
            outcomes = await asyncio.gather(*sends, return_exceptions=True)
            assert time.monotonic() - began < 10, "13 rounds of 1.5 s would be 19"
        assert all(isinstance(outcome.__cause__, RedisUnavailable) for outcome in outcomes)


async def test_a_caller_whose_time_is_over_is_told_that_nothing_was_sent(make_broker, start_redis):
    server = start_redis()
    broker = make_broker(url=server.url, delay={"url": server.url, "timeout": 1.0, "embed": False})
    task = add_task(broker)
    async with started(broker):
        await task.kicker().with_labels(delay=60).kiq(0)
        with server.paused():
            sends = [asyncio.create_task(task.kicker().with_labels(delay=60).kiq(n)) for n in range(600)]
            await asyncio.sleep(0.3)
            time.sleep(1.5)  # the program is busy
            outcomes = await asyncio.gather(*sends, return_exceptions=True)
        causes = Counter(type(outcome.__cause__) for outcome in outcomes)
        assert causes.keys() == {OutcomeUnknown, RedisUnavailable}
        assert "not sent" in str(outcomes[-1].__cause__)
        assert (await broker.delay.queue.stats()).waiting <= 1 + causes[OutcomeUnknown]


async def test_a_cancelled_caller_takes_no_other_with_it(make_broker):
    broker = make_broker()
    task = add_task(broker)
    async with started(broker):
        sends = [asyncio.create_task(task.kicker().with_labels(delay=60).kiq(n)) for n in range(10)]
        await asyncio.sleep(0)
        sends[0].cancel()
        results = await asyncio.gather(*sends, return_exceptions=True)
        assert sum(isinstance(result, Exception) for result in results) == 0
        assert isinstance(results[0], asyncio.CancelledError)


def test_unsupported_brokers():
    with pytest.raises(TypeError, match=r"cannot work on the shared broker.*add it to the broker"):
        async_shared_broker.with_middlewares(DelayMiddleware("redis://localhost"))

    class ZeroMQBroker(InMemoryBroker):
        pass

    with pytest.raises(TypeError, match=r"ZeroMQBroker's workers cannot send.*embed_in_client=True"):
        ZeroMQBroker().with_middlewares(DelayMiddleware("redis://localhost"))
    ZeroMQBroker().with_middlewares(DelayMiddleware("redis://localhost", embed_in_client=True))
    with pytest.raises(TypeError, match=r"InMemoryBroker has no Redis of its own"):
        InMemoryBroker().with_middlewares(DelayMiddleware())


@pytest.mark.parametrize(
    ("arguments", "options", "kind", "complaint"),
    [
        ((5,), {}, TypeError, "takes a Redis URL or an AsyncDelayQueue, got 5"),
        (("redis://localhost",), {"decorator_delay": "x"}, ValueError, "decorator_delay must be one of .* got 'x'"),
        (("http://localhost",), {}, ValueError, "URL"),
        (("redis://localhost",), {"name": "{x}"}, ValueError, "name must be non-empty and without braces, got '{x}'"),
        (("redis://localhost",), {"shards": 0}, ValueError, "shards must be a positive int, got 0"),
        (("redis://localhost",), {"timeout": 0}, ValueError, "timeout must be a positive number of seconds, got 0"),
        (("redis://localhost",), {"lease": 0}, ValueError, "lease must be between"),
        (("redis://localhost",), {"max_attempts": 0}, ValueError, "max_attempts must be an int"),
    ],
)
def test_bad_arguments(arguments, options, kind, complaint):
    """At the line where they are written, not in a worker later."""
    with pytest.raises(kind, match=complaint):
        ListQueueBroker("redis://localhost").with_middlewares(DelayMiddleware(*arguments, **options))


def test_a_queue_has_its_own_settings():
    queue = AsyncDelayQueue.from_url("redis://localhost")
    with pytest.raises(TypeError, match=r"got name, db as well"):
        DelayMiddleware(queue, name="x", db=3)
    with pytest.raises(TypeError, match=r"got <.*DelayQueue"):
        DelayMiddleware(DelayQueue.from_url("redis://localhost"))


def test_a_middleware_without_a_broker():
    with pytest.raises(RuntimeError, match=r"has no broker yet: broker.with_middlewares"):
        _ = DelayMiddleware("redis://localhost").queue
