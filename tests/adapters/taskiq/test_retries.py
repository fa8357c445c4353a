"""SmartRetryMiddleware, SimpleRetryMiddleware, requeue: right delays, one task id, nothing twice."""

from __future__ import annotations

import asyncio
import itertools
import time

import pytest
from taskiq import Context, SimpleRetryMiddleware, SmartRetryMiddleware, TaskiqDepends, TaskiqMiddleware
from taskiq.message import TaskiqMessage
from taskiq.result import TaskiqResult
from taskiq_redis import ListQueueBroker, ListRedisScheduleSource

from delayadapters.taskiq import DelayScheduleSource
from delaytests import wait_until_async
from delaytests.taskiqs import started, working


class Delays(TaskiqMiddleware):
    """Notes every delay that is asked for."""

    def __init__(self):
        super().__init__()
        self.asked = []

    def post_send(self, message):
        self.asked.append(message.labels.get("delay") or message.labels.get("delay_until"))


def smart(**options):
    return SmartRetryMiddleware(**{"default_delay": 0.1, "default_retry_count": 4} | options)


async def run(broker, kicker):
    """Runs a task that always fails until its retries are used up; answers when it ran, and its last result."""
    async with working(broker):
        task = await kicker.kiq()
        return await task.wait_result(check_interval=0.01, timeout=40)


def failing(broker, times, ids, **labels):
    @broker.task(**{"retry_on_error": True, **labels})
    async def fail(context: Context = TaskiqDepends()):
        times.append(time.time())
        ids.append(context.message.task_id)
        raise ValueError("always")

    return fail


def gaps(times):
    return [round(b - a, 2) for a, b in itertools.pairwise(times)]


def close(measured, wanted):
    """Never early; late as a slow machine may be."""
    return len(measured) == len(wanted) and all(w - 0.01 <= m for m, w in zip(measured, wanted, strict=True))


async def test_smart_retries(make_broker):
    delays, times, ids = Delays(), [], []
    broker = make_broker(ListQueueBroker, smart(), delays)
    result = await run(broker, failing(broker, times, ids).kicker())
    assert isinstance(result.error, ValueError)
    assert delays.asked == [None, "0.1", "0.1", "0.1"]
    assert close(gaps(times), [0.1, 0.1, 0.1]), gaps(times)
    assert len(set(ids)) == 1, "every retry has the task's id"


async def test_exponential_is_not_factorial(make_broker):
    """Left in the message, a retry's own delay would be multiplied again: 0.1, 0.2, 0.6."""
    delays, times, ids = Delays(), [], []
    broker = make_broker(ListQueueBroker, smart(use_delay_exponent=True), delays)
    await run(broker, failing(broker, times, ids).kicker())
    assert delays.asked == [None, "0.1", "0.2", "0.30000000000000004"]
    assert close(gaps(times), [0.1, 0.2, 0.3]), gaps(times)


async def test_the_tasks_own_delay_is_that_of_its_retries(make_broker, caplog):
    delays, times, ids = Delays(), [], []
    broker = make_broker(ListQueueBroker, smart(default_delay=9, use_delay_exponent=True), delays)
    await run(broker, failing(broker, times, ids, delay=0.15).kicker())
    assert [float(d) for d in delays.asked] == pytest.approx([0.15, 0.15, 0.3, 0.45])
    assert close(gaps(times), [0.15, 0.3, 0.45]), gaps(times)
    assert caplog.text.count("is taken for the delay of its retries") == 1


async def test_x_delay_for_the_send_delay_for_the_retries(make_broker):
    times, ids = [], []
    broker = make_broker(ListQueueBroker, smart(default_delay=9, default_retry_count=2))
    began = time.time()
    await run(broker, failing(broker, times, ids, delay=0.1).kicker().with_labels(x_delay=0.4))
    assert close(gaps([began, *times]), [0.4, 0.1]), gaps([began, *times])


async def test_decorator_delay_of_sends(make_broker):
    times, ids = [], []
    broker = make_broker(ListQueueBroker, smart(default_retry_count=2), delay={"decorator_delay": "send"})
    began = time.time()
    await run(broker, failing(broker, times, ids, delay=0.4).kicker())
    assert close(gaps([began, *times]), [0.4, 0.1]), gaps([began, *times])


async def test_jitter(make_broker):
    delays, times, ids = Delays(), [], []
    broker = make_broker(ListQueueBroker, smart(use_jitter=True, default_retry_count=2), delays)
    await run(broker, failing(broker, times, ids).kicker())
    assert 0.1 <= float(delays.asked[1]) < 1.1
    assert close(gaps(times), [float(delays.asked[1])])


async def test_a_delayed_task_retries_by_the_retry_delay(make_broker):
    delays, times, ids = Delays(), [], []
    broker = make_broker(ListQueueBroker, smart(default_retry_count=2), delays)
    began = time.time()
    await run(broker, failing(broker, times, ids).kicker().with_labels(delay=0.5))
    assert close(gaps([began, *times]), [0.5, 0.1]), gaps([began, *times])
    assert delays.asked == ["0.5", "0.1"], "not the delay of its send again"


@pytest.mark.parametrize("exponent", [False, True])
async def test_smart_retries_through_the_schedule_source(make_broker, exponent):
    times, ids = [], []
    broker = make_broker()
    source = DelayScheduleSource(broker)
    broker.add_middlewares(smart(use_delay_exponent=exponent, schedule_source=source))
    result = await run(broker, failing(broker, times, ids, delay=0.15).kicker())
    assert isinstance(result.error, ValueError)
    assert close(gaps(times), [0.15, 0.3, 0.45] if exponent else [0.15] * 3), gaps(times)
    assert len(set(ids)) == 1


async def test_smart_retries_through_taskiqs_own_source_are_not_delayed_twice(make_broker, server, client, queue_name):
    """The scheduler sends the retry with the task's own delay label still in it."""
    from taskiq import TaskiqScheduler

    times, ids = [], []
    broker = make_broker()
    source = ListRedisScheduleSource(server.url, prefix=queue_name)
    broker.add_middlewares(smart(schedule_source=source))
    fail = failing(broker, times, ids, delay=0.2)
    async with working(broker):
        await fail.kiq()
        schedule = await wait_until_async(lambda: _first(source))
        assert schedule.labels["delay"] == "0.2 (retry)"
        before = (await broker.delay.queue.stats()).waiting
        await TaskiqScheduler(broker, [source]).on_ready(source, schedule)
        assert before == (await broker.delay.queue.stats()).waiting == 0
        await wait_until_async(lambda: len(times) == 2)
        assert len(set(ids)) == 1


async def _first(source):
    keys = [key async for key in _redis(source).scan_iter(f"{source._prefix}:data:*")]
    if not keys:
        return None
    from taskiq import ScheduledTask

    return ScheduledTask.model_validate(source._serializer.loadb(await _redis(source).get(keys[0])))


def _redis(source):
    from redis.asyncio import Redis

    return Redis(connection_pool=source._connection_pool)


@pytest.mark.parametrize("labels", [{}, {"delay": 0.3}])
async def test_simple_retries_are_at_once(make_broker, labels):
    delays, times, ids = Delays(), [], []
    broker = make_broker(ListQueueBroker, SimpleRetryMiddleware(default_retry_count=3), delays)
    result = await run(broker, failing(broker, times, ids).kicker().with_labels(**labels))
    assert isinstance(result.error, ValueError)
    assert delays.asked == [labels.get("delay") and "0.3", None, None]
    assert len(times) == 3
    assert len(set(ids)) == 1


async def test_simple_retries_of_a_task_with_a_delay_for_retries_are_at_once(make_broker):
    times, ids = [], []
    broker = make_broker(ListQueueBroker, SimpleRetryMiddleware(default_retry_count=3))
    await run(broker, failing(broker, times, ids, delay=30).kicker())
    assert len(times) == 3


@pytest.mark.parametrize("decorator", [{}, {"delay": 30, "retry_on_error": True}])
async def test_requeue_does_not_delay_again(make_broker, decorator):
    broker = make_broker(ListQueueBroker, smart())
    ran = []

    @broker.task(**decorator)
    async def again(context: Context = TaskiqDepends()):
        ran.append((time.time(), context.message.labels.get("X-Taskiq-requeue"), context.message.task_id))
        if len(ran) == 1:
            await context.requeue()
        return "done"

    async with working(broker):
        task = await again.kicker().with_labels(x_delay=0.3).kiq()
        result = await task.wait_result(check_interval=0.01, timeout=30)
    assert result.return_value == "done"
    assert [count for _, count, _ in ran] == [None, "1"]
    assert len({id for _, _, id in ran}) == 1


class Trace(TaskiqMiddleware):
    """What OpenTelemetry's middleware does: other bytes every time."""

    def pre_send(self, message):
        message.labels["traceparent"] = f"{time.time_ns()}"
        return message


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("source", [True, False])
async def test_a_redelivered_attempt_does_not_retry_twice(make_broker, direct, source):
    """A worker dies between its retry and its ack; the broker delivers the attempt again, and it fails again."""
    broker = make_broker(ListQueueBroker, Trace(), delay={"direct": direct})
    retry = smart(default_delay=60, schedule_source=DelayScheduleSource(broker) if source else None)
    broker.add_middlewares(retry)
    failing(broker, [], [])

    async def attempt(args, task_id="task-1", retries=0):
        labels = {"retry_on_error": "True"} | ({"_retries": retries} if retries else {})
        message = TaskiqMessage(task_id=task_id, task_name="t", labels=labels, args=args, kwargs={})
        result = TaskiqResult(is_err=True, return_value=None, execution_time=0)
        await retry.on_error(message, result, ValueError())

    async with started(broker):
        for _ in range(3):
            await attempt([1])
        assert (await broker.delay.queue.stats()).waiting == 1
        await attempt([1], retries=1)
        assert (await broker.delay.queue.stats()).waiting == 2, "the next attempt is another one"
        await attempt([2])
        assert (await broker.delay.queue.stats()).waiting == 3, "another call under the same id is not dropped"
        await asyncio.gather(*(attempt([3]) for _ in range(5)))
        assert (await broker.delay.queue.stats()).waiting == 4
