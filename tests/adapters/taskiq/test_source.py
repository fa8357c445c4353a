"""``DelayScheduleSource``: schedules by time, without a scheduler or beside one."""

from __future__ import annotations

import asyncio
import time
from datetime import datetime, timedelta, timezone

import pytest
from taskiq import Context, ScheduledTask, TaskiqDepends, TaskiqScheduler
from taskiq.api import run_scheduler_task
from taskiq.exceptions import SendTaskError

from delayadapters import Outcome
from delayadapters.taskiq import DelayScheduleSource
from delaytests.taskiqs import started, working

UTC = timezone.utc


def soon(seconds=0.2):
    return datetime.now(UTC) + timedelta(seconds=seconds)


@pytest.fixture
def broker(make_broker):
    broker = make_broker()

    @broker.task(task_name="look")
    async def look(value, context: Context = TaskiqDepends()):
        return [value, context.message.task_id, context.message.labels]

    broker.look = look
    broker.source = DelayScheduleSource(broker)
    return broker


@pytest.mark.parametrize("naive", [False, True])
async def test_schedule_by_time_without_a_scheduler(broker, naive):
    due = soon()
    async with working(broker):
        when = due.replace(tzinfo=None) if naive else due
        kicker = broker.look.kicker().with_task_id("my-task").with_labels(a=1)
        created = await kicker.schedule_by_time(broker.source, when, 7)
        job = await broker.delay.queue.get(created.schedule_id)
        assert job.due_at >= due, "or now, when that has passed meanwhile"
        assert job.meta["task"] == "look"
        from taskiq import AsyncTaskiqTask

        task = AsyncTaskiqTask("my-task", broker.result_backend)
        result = await task.wait_result(check_interval=0.01, timeout=30)
        assert datetime.now(UTC) >= due
    assert result.return_value == [7, "my-task", {"a": "1", "schedule_id": created.schedule_id}], "text, as natively"


async def test_unschedule(broker):
    async with started(broker):
        created = await broker.look.schedule_by_time(broker.source, soon(60), 1)
        await created.unschedule()
        assert (await broker.delay.queue.stats()).waiting == 0
        await created.unschedule()
        await broker.source.delete_schedule("never-heard-of")


async def test_by_the_schedule_id_from_another_process(broker, make_broker):
    async with started(broker):
        await (
            broker.look.kicker()
            .with_schedule_id("invoice-5")
            .with_task_id("t")
            .schedule_by_time(broker.source, soon(60), 1)
        )
        await DelayScheduleSource(make_broker()).delete_schedule("invoice-5")
        assert (await broker.delay.queue.stats()).waiting == 0


async def test_middleware_cancel_takes_a_schedule(broker):
    async with started(broker):
        created = await broker.look.schedule_by_time(broker.source, soon(60), 1)
        assert await broker.delay.cancel(created) is Outcome.CANCELLED


async def test_a_schedule_id_again_replaces(broker):
    async with started(broker):
        for minutes in (10, 20):
            kicker = broker.look.kicker().with_schedule_id("same")
            await kicker.schedule_by_time(broker.source, soon(60 * minutes), minutes)
        page = await broker.delay.queue.jobs()
    assert [job.id for job in page.jobs] == ["same"]
    assert b"[20]" in page.jobs[0].payload


async def test_without_a_task_id_the_schedules_id_is_the_tasks(broker):
    async with started(broker):
        created = await broker.look.schedule_by_time(broker.source, soon(60), 1)
        job = await broker.delay.queue.get(created.schedule_id)
        assert f'"task_id": "{created.schedule_id}"'.encode() in job.payload


@pytest.mark.parametrize("leased", [True, False])
async def test_a_leased_schedule_keeps_its_task_id(make_broker, leased):
    broker = make_broker(delay={"direct": not leased})
    kicked = []
    if leased:
        native = broker.delay._native_kick

        async def kick(message):
            kicked.append(message.task_id)
            await native(message)

        broker.delay._native_kick = kick

    @broker.task
    async def look(context: Context = TaskiqDepends()):
        return context.message.task_id

    async with working(broker):
        await look.kicker().with_task_id("the-task").schedule_by_time(DelayScheduleSource(broker), soon(0.05))
        from taskiq import AsyncTaskiqTask

        result = await AsyncTaskiqTask("the-task", broker.result_backend).wait_result(0.01, 30)
    assert result.return_value == "the-task"
    assert kicked == (["the-task"] if leased else [])


@pytest.mark.parametrize("label", ["delay", "x_delay"])
async def test_the_time_wins_over_delay_labels(make_broker, label):
    broker = make_broker()

    @broker.task(**{label: 3600})
    async def look(): ...

    due = soon(60)
    async with started(broker):
        created = await look.schedule_by_time(DelayScheduleSource(broker), due)
        assert (await broker.delay.queue.get(created.schedule_id)).due_at == due


async def test_cron_and_interval_are_refused(broker):
    with pytest.raises(ValueError, match=r"got cron='\* \* \* \* \*' for task look; use taskiq's LabelScheduleSource"):
        await broker.look.schedule_by_cron(broker.source, "* * * * *", 1)
    with pytest.raises(ValueError, match=r"got interval=5.*ListRedisScheduleSource"):
        await broker.look.schedule_by_interval(broker.source, 5, 1)
    both = ScheduledTask(task_name="x", labels={}, args=[], kwargs={}, time=soon(), cron="* * * * *")
    with pytest.raises(ValueError, match=r"cron"):
        await broker.source.add_schedule(both)


async def test_a_time_after_2250_is_refused(broker):
    with pytest.raises(SendTaskError, match=r"2250"):
        await broker.look.schedule_by_time(broker.source, datetime(2300, 1, 1, tzinfo=UTC), 1)


async def test_beside_the_stock_scheduler_nothing_is_sent_twice(broker):
    assert await broker.source.get_schedules() == []
    scheduler = TaskiqScheduler(broker, [broker.source])
    async with working(broker):
        stock = [asyncio.create_task(run_scheduler_task(scheduler)) for _ in range(2)]
        created = await broker.look.schedule_by_time(broker.source, soon(0.3), 1)
        from taskiq import AsyncTaskiqTask

        await AsyncTaskiqTask(created.schedule_id, broker.result_backend).wait_result(0.01, 30)
        assert broker.delay.releaser_stats.direct == 1
        began = time.time()
        assert (await broker.delay.queue.stats()).waiting == 0
        assert time.time() - began < 5
        for task in stock:
            task.cancel()


def test_bad_arguments(server):
    with pytest.raises(TypeError, match=r"DelayScheduleSource takes a broker with a DelayMiddleware, got 'redis"):
        DelayScheduleSource(server.url)
    from taskiq import InMemoryBroker

    with pytest.raises(RuntimeError, match=r"InMemoryBroker has no DelayMiddleware: broker.with_middlewares"):
        _ = DelayScheduleSource(InMemoryBroker()).middleware
