"""``kiq`` with a delay: what is stored, what is released, what the task sees."""

from __future__ import annotations

import asyncio
import json
import time
from datetime import datetime, timedelta, timezone

import pytest
from taskiq import Context, InMemoryBroker, TaskiqDepends, TaskiqMessage, TaskiqMiddleware, async_shared_broker
from taskiq.formatters.json_formatter import JSONFormatter
from taskiq.serializers import (
    CBORSerializer,
    JSONSerializer,
    MSGPackSerializer,
    ORJSONSerializer,
    PickleSerializer,
)
from taskiq_redis import ListQueueBroker, RedisStreamBroker

from delayadapters import AsyncDelayQueue, Outcome
from delayadapters.taskiq import DelayMiddleware
from delaytests import count_commands, wait_until_async
from delaytests.taskiqs import started, working


class Hooks(TaskiqMiddleware):
    """Counts the hooks, and leaves a label."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def pre_send(self, message):
        self.seen.append("pre_send")
        message.labels["trace"] = "abc"
        return message

    def post_send(self, message):
        self.seen.append(f"post_send delay={message.labels.get('delay')}")

    def pre_execute(self, message):
        self.seen.append("pre_execute")
        return message


def raw(client, queue_name):
    return [json.loads(message) for message in client.lrange(queue_name, 0, -1)]


async def test_a_delayed_task_waits_in_redis_and_comes_on_time(make_broker, client, queue_name):
    broker = make_broker()

    @broker.task
    async def late(due):
        return time.time() - due

    async with working(broker):
        task = await late.kicker().with_labels(delay=0.4).kiq(time.time() + 0.4)
        job = await broker.delay.queue.get(task.task_id)
        assert job.meta == {"task": late.task_name, "queue": queue_name}
        assert client.llen(queue_name) == 0
        result = await task.wait_result(check_interval=0.01, timeout=30)
    assert result.return_value > -0.001
    assert not result.is_err


@pytest.mark.parametrize("label", ["delay", "x_delay", "delay_until"])
async def test_the_message_carries_no_delay(make_broker, client, queue_name, label):
    broker = make_broker()

    @broker.task
    async def nothing(): ...

    value = datetime.now(timezone.utc) + timedelta(seconds=0.05) if label == "delay_until" else 0.05
    broker.delay.release_here = True
    async with started(broker):
        await nothing.kicker().with_labels(**{label: value}, other=1).kiq()
        (message,) = await wait_until_async(lambda: raw(client, queue_name))
    assert message["labels"] == {"other": "1"}
    assert message["labels_types"] == {"other": 2}


async def test_label_types_arguments_and_ids_survive(make_broker):
    broker = make_broker()
    seen = []

    @broker.task
    async def look(a, *, b, context: Context = TaskiqDepends()):
        seen.append((a, b, context.message.labels, context.message.task_id))

    labels = {"i": 1, "f": 1.5, "s": "x", "t": True, "b": b"\x00a"}
    async with working(broker):
        kicker = look.kicker().with_labels(delay=0.05, **labels).with_task_id("my-id")
        task = await kicker.kiq({"x": [1, None]}, b="ü")
        assert task.task_id == "my-id"
        await task.wait_result(check_interval=0.01, timeout=30)
    assert seen == [({"x": [1, None]}, "ü", labels, "my-id")]


@pytest.mark.parametrize(
    "serializer",
    [JSONSerializer(), ORJSONSerializer(), PickleSerializer(), MSGPackSerializer(), CBORSerializer()],
    ids=lambda s: type(s).__name__,
)
@pytest.mark.parametrize("direct", [True, False], ids=["direct", "leased"])
async def test_every_serializer(make_broker, serializer, direct):
    broker = make_broker(delay={"direct": direct}).with_serializer(serializer)

    @broker.task
    async def echo(value):
        return value

    async with working(broker):
        task = await echo.kicker().with_labels(delay=0.05).kiq({"a": [1, 2.5, "ü"]})
        result = await task.wait_result(check_interval=0.01, timeout=30)
    assert result.return_value == {"a": [1, 2.5, "ü"]}


class Reversed(JSONFormatter):
    """A formatter of somebody's own."""

    def dumps(self, message):
        out = super().dumps(message)
        out.message = out.message[::-1]
        return out

    def loads(self, message):
        return super().loads(message[::-1])


class Sealed(JSONFormatter):
    """The client can write what only workers can read."""

    sealed = True

    def loads(self, message):
        if self.sealed:
            raise PermissionError("no key")
        return super().loads(message)


async def test_a_custom_formatter(make_broker):
    broker = make_broker().with_formatter(Reversed())

    @broker.task
    async def echo(value):
        return value

    async with working(broker):
        task = await echo.kicker().with_labels(delay=0.05).kiq(7)
        assert (await task.wait_result(check_interval=0.01, timeout=30)).return_value == 7


async def test_a_formatter_that_only_workers_can_read(make_broker, caplog):
    broker = make_broker().with_formatter(Sealed())

    @broker.task
    async def labels(context: Context = TaskiqDepends()):
        return sorted(context.message.labels)

    async with started(broker):
        task = await labels.kicker().with_labels(delay=0.05, other=1).kiq()
    assert "cannot read its own messages" in caplog.text
    broker.formatter.sealed = False
    async with working(broker):
        assert (await task.wait_result(check_interval=0.01, timeout=30)).return_value == ["other"]


async def test_send_hooks_run_once_at_scheduling(make_broker):
    hooks = Hooks()
    broker = make_broker(ListQueueBroker, hooks)

    @broker.task
    async def trace(context: Context = TaskiqDepends()):
        return context.message.labels

    async with working(broker):
        task = await trace.kicker().with_labels(delay=0.05).kiq()
        assert hooks.seen == ["pre_send", "post_send delay=0.05"], "an admin sees the delay"
        result = await task.wait_result(check_interval=0.01, timeout=30)
    assert result.return_value == {"trace": "abc"}
    assert hooks.seen == ["pre_send", "post_send delay=0.05", "pre_execute"]


async def test_decorator_labels(make_broker):
    broker = make_broker()

    @broker.task(delay=0.3)
    async def late(due):
        return time.time() - due

    async with working(broker):
        task = await late.kiq(time.time() + 0.3)
        assert await broker.delay.queue.get(task.task_id) is not None
        assert (await task.wait_result(check_interval=0.01, timeout=30)).return_value > -0.001


@pytest.mark.parametrize("labels", [{}, {"delay": None}, {"delay": 0}, {"delay": -3}, {"x_delay": "None"}])
async def test_no_delay_goes_straight_to_the_broker(make_broker, client, queue_name, labels):
    broker = make_broker()

    @broker.task
    async def now(): ...

    async with started(broker):
        await now.kicker().with_labels(**labels).kiq()
        assert len(raw(client, queue_name)) == 1
        assert (await broker.delay.queue.stats()).waiting == 0


@pytest.mark.parametrize("delay", [30 * 86400, "5", 5, timedelta(days=30)])
async def test_due_times(make_broker, delay):
    broker = make_broker()

    @broker.task
    async def later(): ...

    async with started(broker):
        before = datetime.now(timezone.utc)
        task = await later.kicker().with_labels(delay=delay).kiq()
        job = await broker.delay.queue.get(task.task_id)
        span = delay if isinstance(delay, timedelta) else timedelta(seconds=float(delay))
        assert timedelta(0) <= job.due_at - before - span < timedelta(seconds=5)


async def test_absolute_times_to_the_microsecond(make_broker):
    broker = make_broker()

    @broker.task
    async def later(): ...

    async with started(broker):
        for when in (datetime(2040, 1, 2, 3, 4, 5, 678901, timezone.utc), datetime(2040, 1, 2, 3, 4, 5, 678901)):
            task = await later.kicker().with_labels(delay_until=when).kiq()
            job = await broker.delay.queue.get(task.task_id)
            assert job.due_at == datetime(2040, 1, 2, 3, 4, 5, 678901, timezone.utc)


async def test_a_past_time_runs_at_once(make_broker):
    broker = make_broker()

    @broker.task
    async def ran():
        return True

    async with working(broker):
        task = await ran.kicker().with_labels(delay_until=datetime(2001, 1, 1, tzinfo=timezone.utc)).kiq()
        assert (await task.wait_result(check_interval=0.01, timeout=30)).return_value is True


async def test_shared_tasks_and_with_broker(make_broker, queue_name):
    one = make_broker()
    other = make_broker(queue_name=f"{queue_name}-other")

    @async_shared_broker.task(task_name=f"shared-{queue_name}")
    async def shared():
        return "ran"

    async_shared_broker.default_broker(one)
    try:
        async with started(one), working(other):
            first = await shared.kicker().with_labels(delay=0.05).kiq()
            assert (await one.delay.queue.get(first.task_id)).meta["queue"] == queue_name
            second = await shared.kicker().with_broker(other).with_labels(delay=0.05).kiq()
            result = await second.wait_result(check_interval=0.01, timeout=30)
            assert result.return_value == "ran"
            assert await one.delay.queue.get(first.task_id) is not None, "nobody works for this one"
    finally:
        async_shared_broker.default_broker(None)


async def test_many_at_once_are_stored_together_and_in_order(make_broker, client):
    broker = make_broker()

    @broker.task
    async def later(n): ...

    async with started(broker):
        with count_commands(client) as calls:
            kickers = [later.kicker().with_labels(delay=60).with_task_id(f"{n}") for n in range(1200)]
            await asyncio.gather(*(kicker.kiq(n) for n, kicker in enumerate(kickers)))
        assert calls["evalsha"] + calls["eval"] <= 10
        page = await broker.delay.queue.jobs(limit=1200)
    assert [job.id for job in page.jobs] == [str(n) for n in range(1200)]


async def test_a_message_may_be_large(make_broker):
    broker = make_broker()

    @broker.task
    async def size(text):
        return len(text)

    async with working(broker):
        task = await size.kicker().with_labels(delay=0.05).kiq("x" * 3_000_000)
        assert (await task.wait_result(check_interval=0.01, timeout=40)).return_value == 3_000_000


async def test_a_queue_of_ones_own(make_broker, server, queue_name):
    async with AsyncDelayQueue.from_url(server.url, name="mine") as queue:
        broker = make_broker(delay={"url": queue})

        @broker.task
        async def ran():
            return True

        assert broker.delay.name == "mine"
        async with working(broker):
            task = await ran.kicker().with_labels(delay=0.05).kiq()
            assert (await task.wait_result(check_interval=0.01, timeout=30)).return_value is True
        assert await queue.stats(), "the queue is its owner's to close"


async def test_the_brokers_own_redis_is_the_default(make_broker, server):
    for cls in (ListQueueBroker, RedisStreamBroker):
        broker = make_broker(cls, delay={"url": None}, queue_name=f"own-{cls.__name__}")

        @broker.task
        async def ran():
            return True

        async with working(broker):
            task = await ran.kicker().with_labels(delay=0.05).kiq()
            assert (await task.wait_result(check_interval=0.01, timeout=30)).return_value is True


def test_names_tell_brokers_apart_and_processes_not(server, queue_name):
    def name(cls, url=server.url, **options):
        broker = cls(url, **options).with_middlewares(DelayMiddleware(server.url))
        return broker.middlewares[0].name

    host = server.url.rsplit("/", 1)[0]
    names = {
        name(ListQueueBroker),
        name(ListQueueBroker, queue_name="b"),
        name(RedisStreamBroker),
        name(ListQueueBroker, f"{host}/3"),
    }
    assert len(names) == 4
    assert name(ListQueueBroker) == "delayadapters:taskiq:list:0:taskiq"
    assert name(ListQueueBroker, "redis://another-name:6379/0") == name(ListQueueBroker)
    assert name(ListQueueBroker, queue_name="{a}") == "delayadapters:taskiq:list:0:%7Ba%7D"


async def test_two_brokers_on_one_redis_release_only_their_own(make_broker, client, queue_name):
    one, other = make_broker(delay={"direct": False}), make_broker(queue_name="other", delay={"direct": False})

    @one.task(task_name="one")
    async def task(): ...

    other.delay.release_here = True
    async with started(one), started(other):
        sent = await task.kicker().with_labels(delay=0.05).kiq()
        await asyncio.sleep(0.5)
        assert client.llen("other") == client.llen(queue_name) == 0
        assert await one.delay.queue.cancel(sent.task_id) is Outcome.CANCELLED


async def test_other_frameworks_on_one_redis_keep_what_is_theirs(make_broker, server):
    """Under the names which the other adapters choose by themselves."""
    theirs = ["delayadapters", "delayadapters:arq", "delayadapters:celery:redis:0", "delayadapters:taskiq:stream:0:x"]
    queues = [AsyncDelayQueue.from_url(server.url, name=name) for name in theirs]
    for queue in queues:
        await queue.schedule(b"not a message of taskiq's", delay=0, id="theirs")
    broker = make_broker()

    @broker.task
    async def ran():
        return True

    async with working(broker):
        task = await ran.kicker().with_labels(delay=0.3).kiq()
        assert (await task.wait_result(check_interval=0.01, timeout=30)).return_value is True
    for queue in queues:
        stats = await queue.stats()
        assert (stats.waiting, stats.due, stats.leased, stats.dead) == (1, 1, 0, 0), queue.name
        await queue.aclose()


async def test_a_subclass_with_its_own_kick_is_released_through_it(make_broker, client, queue_name):
    class Mine(ListQueueBroker):
        kicked = 0

        async def kick(self, message):
            self.kicked += 1
            await super().kick(message)

    Mine.__module__ = "taskiq_redis.mine"  # so that make_broker gives it an address
    broker = make_broker(Mine)

    @broker.task
    async def ran():
        return True

    async with working(broker):
        task = await ran.kicker().with_labels(delay=0.05).kiq()
        assert (await task.wait_result(check_interval=0.01, timeout=30)).return_value is True
    assert broker.kicked == 1


def test_a_second_middleware_or_a_second_broker_is_refused(make_broker, server):
    broker = make_broker()
    with pytest.raises(RuntimeError, match=r"has a DelayMiddleware already"):
        broker.with_middlewares(DelayMiddleware(server.url))
    with pytest.raises(RuntimeError, match=r"make one for each broker"):
        InMemoryBroker().with_middlewares(broker.delay)


def test_message_labels_of_a_task_that_was_natively_delayed_before(make_broker):
    """Sent before the middleware was there: the label is in the message, and must not act a second time."""
    broker = make_broker()
    message = TaskiqMessage(
        task_id="x", task_name="y", labels={"delay": 30}, labels_types={"delay": 2}, args=[], kwargs={}
    )
    assert broker.delay.pre_execute(message).labels == {}
    assert message.labels_types == {}
