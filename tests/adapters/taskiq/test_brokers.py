"""Every broker, end to end, and what a direct release writes."""

from __future__ import annotations

import asyncio
import time
import uuid

import pytest
import redis.asyncio
import taskiq_redis
from taskiq import InMemoryBroker
from taskiq.exceptions import SendTaskError
from taskiq_redis import ListQueueBroker, PubSubBroker, RedisStreamBroker

from delayadapters import AsyncDelayQueue
from delayadapters.taskiq import BrokerNotStarted, DelayMiddleware
from delaytests import RedisServer, redis_binaries, wait_until_async
from delaytests.taskiqs import started, working
from delaytests.topology import Sentinel, cluster_of_one, cluster_port


def add_task(broker):
    @broker.task(task_name="late")
    async def late(due):
        return time.time() - due

    return late


async def delayed(broker, task, count=5, **labels):
    """Sends some delayed tasks; answers how late they ran."""
    tasks = [
        await task.kicker().with_labels(delay=0.2 + n / 50, **labels).kiq(time.time() + 0.2 + n / 50)
        for n in range(count)
    ]
    results = [await one.wait_result(check_interval=0.01, timeout=40) for one in tasks]
    return [result.return_value for result in results]


@pytest.mark.parametrize(
    ("cls", "direct"),
    [(ListQueueBroker, True), (RedisStreamBroker, True), (PubSubBroker, False)],
    ids=["list", "stream", "pubsub"],
)
async def test_redis_brokers(make_broker, cls, direct):
    broker = make_broker(cls)
    task = add_task(broker)
    async with working(broker):
        lateness = await delayed(broker, task)
        stats = broker.delay.releaser_stats
    assert min(lateness) > -0.001
    assert (stats.direct, stats.released) == ((5, 0) if direct else (0, 5))


@pytest.mark.parametrize("cls", [ListQueueBroker, RedisStreamBroker], ids=["list", "stream"])
@pytest.mark.parametrize("delay", [{"direct": False}, {"db": 5}, {"url": "alias"}], ids=["asked", "database", "host"])
async def test_leased_release_into_redis_brokers(make_broker, cls, delay, server):
    """Asked for, another database, or a server by another name: only the broker's own kick is right."""
    if delay == {"url": "alias"}:
        delay = {"url": server.url.replace("127.0.0.1", "127.1")}
    elif "db" in delay:
        delay = {"url": server.url.replace("/0", "/5")}
    broker = make_broker(cls, delay=delay)
    task = add_task(broker)
    async with working(broker):
        await delayed(broker, task)
        assert (broker.delay.releaser_stats.direct, broker.delay.releaser_stats.released) == (0, 5)


@pytest.mark.parametrize("direct", [True, False])
async def test_a_released_message_equals_a_native_one(make_broker, client, queue_name, direct):
    for cls in (ListQueueBroker, RedisStreamBroker):
        broker = make_broker(cls, delay={"direct": direct}, queue_name=f"{queue_name}-{cls.__name__}")
        task = add_task(broker)
        broker.delay.release_here = True
        key = broker.queue_name

        def messages(cls=cls, key=key):
            if cls is ListQueueBroker:
                return client.lrange(key, 0, -1)
            return [fields for _, fields in client.xrange(key)]

        async with started(broker):
            await task.kicker().with_task_id("same").kiq(1)
            await task.kicker().with_labels(delay=0.05).with_task_id("same").kiq(1)
            await wait_until_async(lambda messages=messages: len(messages()) == 2)
            native, released = messages()
            assert native == released


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize(("maxlen", "approximate"), [(3, False), (3, True)])
async def test_stream_options(make_broker, client, queue_name, maxlen, approximate, direct):
    broker = make_broker(RedisStreamBroker, maxlen=maxlen, approximate=approximate, delay={"direct": direct})
    task = add_task(broker)
    broker.delay.release_here = True
    async with started(broker):
        for n in range(10):
            await task.kicker().with_labels(delay=0.01).kiq(n)
        await wait_until_async(lambda: client.xinfo_stream(queue_name)["entries-added"] == 10)
        assert client.xlen(queue_name) == (10 if approximate else 3)


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("cls", [ListQueueBroker, RedisStreamBroker])
async def test_the_queue_name_label(make_broker, client, queue_name, cls, direct):
    broker = make_broker(cls, delay={"direct": direct})
    task = add_task(broker)
    broker.delay.release_here = True
    async with started(broker):
        sent = await task.kicker().with_labels(delay=0.3, queue_name=f"{queue_name}-b").kiq(1)
        assert (await broker.delay.queue.get(sent.task_id)).meta["queue"] == f"{queue_name}-b"
        await wait_until_async(lambda: client.exists(f"{queue_name}-b"))
        size = client.llen if cls is ListQueueBroker else client.xlen
        assert (size(f"{queue_name}-b"), size(queue_name) if client.exists(queue_name) else 0) == (1, 0)


async def test_direct_commands_are_what_the_broker_sends(make_broker, client, server):
    """A new version of taskiq-redis that writes otherwise must fail here: MONITOR shows what it does write."""
    from delayadapters.taskiq.brokers import direct_commands

    variants = [
        (ListQueueBroker, {}),
        (RedisStreamBroker, {}),
        (RedisStreamBroker, {"maxlen": 5}),
        (RedisStreamBroker, {"maxlen": 5, "approximate": False}),
    ]
    for number, (cls, options) in enumerate(variants):
        broker = make_broker(cls, queue_name=f"contract-{number}", **options)
        task = add_task(broker)
        with client.monitor() as monitor:
            await task.kiq(1)
            seen = next(c["command"] for c in monitor.listen() if c["command"].startswith(("LPUSH", "XADD")))
        words = ["?" if not isinstance(word, str) else word for word in direct_commands(broker, {})[0]]
        assert seen.split(" ")[: len(words) - 1] == words[:-1]


# ------------------------------------------------------------------------------------------------ Sentinel, Cluster


@pytest.mark.parametrize("kind", ["ListQueueSentinelBroker", "RedisStreamSentinelBroker", "PubSubSentinelBroker"])
@pytest.mark.parametrize("own", [True, False], ids=["broker's Redis", "a queue of ours"])
async def test_sentinel_brokers(start_redis, kind, own):
    primary = start_redis()
    with Sentinel(primary, primary.binary) as sentinel:
        options = {"queue_name": "q", "socket_timeout": None}
        if "Stream" in kind:
            options["xread_block"] = 200
        broker = getattr(taskiq_redis, kind)([("127.0.0.1", sentinel.port)], sentinel.name, **options)
        given = None
        if not own:
            manager = redis.asyncio.Sentinel([("127.0.0.1", sentinel.port)], socket_timeout=5)
            given = AsyncDelayQueue(manager.master_for(sentinel.name), name="mine", max_payload=None)
        broker.delay = DelayMiddleware(given)
        broker.with_middlewares(broker.delay)
        broker.with_result_backend(taskiq_redis.RedisAsyncResultBackend(primary.url))
        task = add_task(broker)
        async with working(broker):
            await delayed(broker, task, 3)
            stats = broker.delay.releaser_stats
        assert (stats.direct, stats.released) == ((0, 3) if "PubSub" in kind else (3, 0))
        if given is not None:
            await given.client.aclose()


@pytest.mark.parametrize("kind", ["ListQueueClusterBroker", "RedisStreamClusterBroker"])
@pytest.mark.parametrize("own", [True, False], ids=["broker's cluster", "another Redis"])
async def test_cluster_brokers(start_redis, server, kind, own):
    binary = next(iter(redis_binaries()))
    port = cluster_port()
    with RedisServer(binary, port=port, args=("--cluster-enabled", "yes")) as node:
        cluster_of_one(node)
        options = {"xread_block": 200} if "Stream" in kind else {}
        broker = getattr(taskiq_redis, kind)(node.url, queue_name="q", socket_timeout=None, **options)
        broker.delay = DelayMiddleware(None if own else server.url)
        broker.with_middlewares(broker.delay)
        broker.with_result_backend(taskiq_redis.RedisAsyncResultBackend(server.url))
        task = add_task(broker)
        async with working(broker):
            await delayed(broker, task, 3)
            stats = broker.delay.releaser_stats
        assert (stats.direct, stats.released) == (0, 3), "the broker's key is in another slot"


# ------------------------------------------------------------------------------------------------ in memory, custom


@pytest.mark.parametrize("inplace", [True, False])
async def test_in_memory(server, inplace):
    broker = InMemoryBroker(await_inplace=inplace).with_middlewares(DelayMiddleware(server.url))
    task = add_task(broker)
    async with started(broker):
        assert min(await delayed(broker, task)) > -0.001


async def test_in_memory_in_place_a_long_task_holds_up_no_other(server):
    broker = InMemoryBroker(await_inplace=True).with_middlewares(DelayMiddleware(server.url))
    ran = []

    @broker.task
    async def sleep(seconds):
        await asyncio.sleep(seconds)
        ran.append(seconds)

    async with started(broker):
        for seconds in (0.6, 0):
            await sleep.kicker().with_labels(delay=0.05).kiq(seconds)
        await wait_until_async(lambda: len(ran) == 2)
    assert ran == [0, 0.6]


async def test_in_memory_not_started(server):
    broker = InMemoryBroker().with_middlewares(DelayMiddleware(server.url))
    task = add_task(broker)
    with pytest.raises(SendTaskError) as caught:
        await task.kicker().with_labels(delay=5).kiq(0)
    assert isinstance(caught.value.__cause__, BrokerNotStarted)
    assert "InMemoryBroker was not started" in str(caught.value.__cause__)


class Custom(InMemoryBroker):
    """Somebody's own broker: a list in this process, which can be down."""

    def __init__(self):
        super().__init__()
        self.kicked = []
        self.error = None

    async def kick(self, message):
        if self.error is not None:
            raise self.error
        self.kicked.append(message)


def custom(server, **options):
    broker = Custom()
    broker.delay = DelayMiddleware(server.url, name=f"custom-{uuid.uuid4().hex}", **options)
    return broker.with_middlewares(broker.delay)


async def test_a_custom_broker_gets_the_whole_message(server):
    broker = custom(server)
    task = add_task(broker)
    async with started(broker):
        await task.kicker().with_labels(priority=3, t=True).with_task_id("id-1").kiq(1)
        await task.kicker().with_labels(priority=3, t=True, delay=0.05).with_task_id("id-1").kiq(1)
        await wait_until_async(lambda: len(broker.kicked) == 2)
    assert broker.kicked[0] == broker.kicked[1]


class NatsConnectionClosedError(Exception):
    pass


class Busy(Exception):
    pass


@pytest.mark.parametrize("error", [ConnectionRefusedError("down"), NatsConnectionClosedError("down"), Busy("down")])
async def test_an_outage_burns_nobodys_attempts(server, error):
    broker = custom(server, broker_down=(Busy,))
    task = add_task(broker)
    broker.error = error
    async with started(broker):
        for n in range(3):
            await task.kicker().with_labels(delay=0.01).with_task_id(str(n)).kiq(n)
        await wait_until_async(lambda: broker.delay.releaser_stats.pauses >= 2)
        assert all(job.attempts == 0 for job in (await broker.delay.queue.jobs()).jobs)
        broker.error = None
        await wait_until_async(lambda: len(broker.kicked) == 3, timeout=20)
    assert [message.task_id for message in broker.kicked] == ["0", "1", "2"], "in due order"


async def test_a_broker_that_does_not_answer_is_down(server, monkeypatch, caplog):
    monkeypatch.setattr("delayadapters.taskiq.publisher.KICK_TIMEOUT", 0.2)
    broker = custom(server)
    task = add_task(broker)

    async def never(message):
        await asyncio.sleep(60)

    broker.delay._native_kick = never
    async with started(broker):
        await task.kicker().with_labels(delay=0.01).kiq(1)
        await wait_until_async(lambda: broker.delay.releaser_stats.pauses >= 1)
        assert [job.attempts for job in (await broker.delay.queue.jobs()).jobs] in ([0], [])
    assert "TimeoutError: no answer within 0.2 s" in caplog.text


async def test_a_shutdown_does_not_wait_for_a_broker_that_hangs(server, monkeypatch, caplog):
    """taskiq gives a worker's shutdown 5 s in all. What the loop held comes back by its lease."""
    monkeypatch.setattr("delayadapters.taskiq.middleware.STOP_TIMEOUT", 0.2)
    broker = custom(server)
    task = add_task(broker)
    kicked = asyncio.Event()

    async def never(message):
        kicked.set()
        await asyncio.sleep(600)

    broker.delay._native_kick = never
    async with started(broker):
        await task.kicker().with_labels(delay=0.01).kiq(1)
        await asyncio.wait_for(kicked.wait(), 30)
        await asyncio.wait_for(broker.shutdown(), 30)
        assert "not ended within 0.2 s" in caplog.text
        stats = await broker.delay.queue.stats()
        assert stats.waiting + stats.leased == 1


async def test_a_message_that_is_refused_is_retried_then_dead_and_stops_no_other(server):
    broker = custom(server, max_attempts=1)
    task = add_task(broker)
    broker.error = ValueError("no such routing key")
    async with started(broker):
        await task.kicker().with_labels(delay=0.01).with_task_id("bad").kiq(1)
        queue = broker.delay.queue

        async def dead():
            return (await queue.dead_jobs()).jobs

        (job,) = await wait_until_async(dead)
        assert job.reason == "ValueError: no such routing key"
        broker.error = None
        await task.kicker().with_labels(delay=0.01).with_task_id("good").kiq(1)
        await wait_until_async(lambda: len(broker.kicked) == 1)
        await queue.replay("bad")
        await wait_until_async(lambda: len(broker.kicked) == 2)


async def test_a_custom_broker_has_no_redis_of_its_own():
    with pytest.raises(TypeError, match=r'Custom has no Redis of its own.*DelayMiddleware\("redis://host'):
        Custom().with_middlewares(DelayMiddleware())


async def test_a_redis_broker_that_is_down_is_waited_for(make_broker, server, make_proxy, client, queue_name):
    """Another server than the delays': here the broker's connection is cut, the delays' is not."""
    proxy = make_proxy(server.port)
    broker = make_broker(url=f"redis://127.0.0.1:{proxy.port}/0")
    task = add_task(broker)
    broker.delay.release_here = True
    async with started(broker):
        proxy.refuse()
        await task.kicker().with_labels(delay=0.05).kiq(1)
        await wait_until_async(lambda: broker.delay.releaser_stats.pauses >= 1)
        (job,) = (await broker.delay.queue.jobs()).jobs
        assert (job.attempts, client.llen(queue_name)) == (0, 0)
