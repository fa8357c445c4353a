"""Cancelling, and seeing what waits."""

from __future__ import annotations

import pytest
from taskiq import AsyncTaskiqTask, InMemoryBroker
from taskiq.serializers import JSONSerializer
from taskiq_redis import RedisAsyncResultBackend

from delayadapters import Outcome
from delayadapters.taskiq import DelayMiddleware, TaskCancelled
from delaytests import wait_until_async
from delaytests.taskiqs import started, working


def add_task(broker, name="mail"):
    @broker.task(task_name=name)
    async def task(n=0):
        return n

    return task


@pytest.mark.parametrize("by", [lambda task: task, lambda task: task.task_id], ids=["task", "id"])
async def test_cancel_and_its_result(make_broker, by):
    broker = make_broker()
    task = add_task(broker)
    async with started(broker):
        sent = await task.kicker().with_labels(delay=60).kiq()
        assert await broker.delay.cancel(by(sent)) is Outcome.CANCELLED
        result = await sent.wait_result(timeout=40)
        assert result.is_err
        assert isinstance(result.error, TaskCancelled)
        assert str(result.error) == f"delayed task {sent.task_id} (mail) was cancelled before it was due"
        with pytest.raises(TaskCancelled):
            result.raise_for_error()
        assert await broker.delay.cancel(by(sent)) is Outcome.NOT_FOUND


async def test_the_error_result_survives_a_json_backend(make_broker, server):
    broker = make_broker()
    broker.with_result_backend(RedisAsyncResultBackend(server.url, serializer=JSONSerializer()))
    task = add_task(broker)
    async with started(broker):
        sent = await task.kicker().with_labels(delay=60).kiq()
        await broker.delay.cancel(sent)
        assert isinstance((await sent.wait_result(timeout=40)).error, TaskCancelled)


async def test_what_cannot_be_cancelled(make_broker):
    broker = make_broker()
    task = add_task(broker)
    async with working(broker):
        sent = await task.kicker().with_labels(delay=0.02).kiq(5)
        assert (await sent.wait_result(0.01, 30)).return_value == 5
        assert await broker.delay.cancel(sent) is Outcome.RELEASED
        assert await broker.delay.cancel("unheard-of") is Outcome.NOT_FOUND
        assert (await sent.get_result()).return_value == 5, "its result is left alone"
    with pytest.raises(TypeError, match=r"cancel takes a task, its id or a schedule, got 5"):
        await broker.delay.cancel(5)


async def test_cancel_takes_every_waiting_entry_of_an_id(make_broker):
    broker = make_broker()
    task = add_task(broker)
    async with started(broker):
        for _ in range(3):
            await task.kicker().with_labels(delay=60).with_task_id("same").kiq()
        assert (await broker.delay.queue.stats()).waiting == 3
        assert await broker.delay.cancel("same") is Outcome.CANCELLED
        assert (await broker.delay.queue.stats()).waiting == 0


async def test_a_result_backend_that_is_down_does_not_undo_it(make_broker, caplog):
    broker = make_broker()
    task = add_task(broker)

    async def down(*_):
        raise ConnectionError("no")

    async with started(broker):
        sent = await task.kicker().with_labels(delay=60).kiq()
        broker.result_backend.set_result = down
        assert await broker.delay.cancel(sent) is Outcome.CANCELLED
    assert "its waiters were not told" in caplog.text


async def test_in_memory(server):
    delay = DelayMiddleware(server.url)
    broker = InMemoryBroker().with_middlewares(delay)
    task = add_task(broker)
    async with started(broker):
        sent = await task.kicker().with_labels(delay=60).kiq()
        await delay.cancel(sent)
        assert (await sent.wait_result(timeout=40)).is_err


async def test_see_move_and_hurry(make_broker):
    broker = make_broker()
    mail, report = add_task(broker), add_task(broker, "report")
    async with working(broker):
        first = await mail.kicker().with_labels(delay=60).kiq(1)
        await report.kicker().with_labels(delay=30, queue_name="slow").kiq(2)
        queue = broker.delay.queue
        page = await queue.jobs()
        assert [(job.meta["task"], job.meta["queue"]) for job in page.jobs] == [
            ("report", "slow"),
            ("mail", broker.queue_name),
        ]
        assert await queue.reschedule(first.task_id, delay=90) is Outcome.RESCHEDULED
        assert await queue.release_now(first.task_id) is Outcome.RESCHEDULED
        assert (await first.wait_result(0.01, 30)).return_value == 1


async def test_a_waiting_retry_is_cancelled_by_its_tasks_id(make_broker):
    from taskiq import SmartRetryMiddleware

    broker = make_broker()
    broker.add_middlewares(SmartRetryMiddleware(default_delay=60))

    @broker.task(retry_on_error=True)
    async def fail():
        raise ValueError

    async with working(broker):
        sent = await fail.kiq()

        async def waiting():
            return (await broker.delay.queue.stats()).waiting == 1

        await wait_until_async(waiting)
        assert await broker.delay.cancel(sent) is Outcome.CANCELLED
        task: AsyncTaskiqTask = sent
        assert isinstance((await task.wait_result(timeout=40)).error, TaskCancelled)
