"""Moving the pending schedules of ``ListRedisScheduleSource``."""

from __future__ import annotations

import asyncio
from datetime import datetime, timedelta, timezone

import pytest
from taskiq.exceptions import SendTaskError
from taskiq_redis import ListRedisScheduleSource

from delayadapters.taskiq import DelayScheduleSource, Migrated, migrate_schedules
from delaytests.taskiqs import started

UTC = timezone.utc


def in_minutes(minutes):
    return datetime.now(UTC) + timedelta(minutes=minutes)


@pytest.fixture(params=["same server", "two servers"])
async def sources(request, make_broker, server, queue_name):
    """``(old, new, task)``; the old source in the queue's own database, or in another."""
    url = server.url if request.param == "same server" else server.url.replace("/0", "/4")
    old = ListRedisScheduleSource(url, prefix=f"{queue_name}:[old]")
    broker = make_broker()

    @broker.task(task_name="invoice")
    async def invoice(number): ...

    new = DelayScheduleSource(broker)
    async with started(broker):
        yield old, new, invoice
    await old._connection_pool.disconnect()


async def fill(old, task):
    ids = []
    for number in range(5):
        due = in_minutes(number - 2)
        kicker = task.kicker().with_labels(a=1).with_task_id(f"task-{number}")
        ids.append(await kicker.schedule_by_time(old, due if number % 2 else due.replace(tzinfo=None), number))
    await task.schedule_by_cron(old, "0 0 1 1 *", 99)
    await task.schedule_by_interval(old, 3600, 98)
    return ids


def keys(server, client, old):
    from redis import Redis

    with Redis(port=server.port, db=int(old._connection_pool.connection_kwargs["db"])) as other:
        return sorted(key.decode() for key in other.keys("*old*"))


async def test_each_is_moved_once(sources, server, client):
    old, new, task = sources
    created = await fill(old, task)
    done = await migrate_schedules(old, new)
    assert sorted(done.moved) == sorted(one.schedule_id for one in created)
    assert (done.taken, done.unclear) == ([], [])
    queue = new.middleware.queue
    for one in created:
        job = await queue.get(one.schedule_id)
        wanted = one.task.time if one.task.time.tzinfo else one.task.time.replace(tzinfo=UTC)
        assert job.due_at == max(wanted, job.due_at if wanted < datetime.now(UTC) else wanted)
        assert job.meta["task"] == "invoice"
    left = await old.get_schedules()
    assert sorted(s.args[0] for s in left) == [98, 99], "cron and interval stay"
    assert all(":data:" in key or key.endswith((":cron", ":interval")) for key in keys(server, client, old))
    assert await migrate_schedules(old, new) == Migrated()


async def test_two_moves_at_once(sources):
    old, new, task = sources
    created = await fill(old, task)
    outcomes = await asyncio.gather(*(migrate_schedules(old, new) for _ in range(4)))
    moved = [id for outcome in outcomes for id in outcome.moved]
    assert sorted(moved) == sorted(one.schedule_id for one in created)
    assert (await new.middleware.queue.stats()).waiting == len(created)


async def test_a_failure_leaves_the_rest_where_it_was(sources, monkeypatch):
    old, new, task = sources
    created = await fill(old, task)
    real, count = new.middleware._store, 0

    async def sometimes(*arguments):
        nonlocal count
        count += 1
        if count == 3:
            raise ConnectionError("the delays' Redis is away")
        await real(*arguments)

    monkeypatch.setattr(new.middleware, "_store", sometimes)
    with pytest.raises(SendTaskError):
        await migrate_schedules(old, new)
    assert (await new.middleware.queue.stats()).waiting == 2
    done = await migrate_schedules(old, new)
    assert len(done.moved) == len(created) - 2
    assert (await new.middleware.queue.stats()).waiting == len(created)


async def test_killed_between_two_servers(make_broker, server, queue_name, monkeypatch):
    """Set aside, and then: stored or not, nobody can say after a while. Never twice."""
    old = ListRedisScheduleSource(server.url.replace("/0", "/4"), prefix=queue_name)
    broker = make_broker()

    @broker.task(task_name="invoice")
    async def invoice(number): ...

    new = DelayScheduleSource(broker)
    async with started(broker):
        stored = await invoice.schedule_by_time(old, in_minutes(5), 1)
        from redis.asyncio import Redis

        real_delete = Redis.delete

        async def killed(*_):
            raise KeyboardInterrupt

        monkeypatch.setattr(Redis, "delete", killed)
        with pytest.raises(KeyboardInterrupt):
            await migrate_schedules(old, new)
        monkeypatch.setattr(Redis, "delete", real_delete)
        assert (await migrate_schedules(old, new)).moved == [stored.schedule_id]

        lost = await invoice.schedule_by_time(old, in_minutes(5), 2)
        monkeypatch.setattr(new, "store", killed)
        with pytest.raises(KeyboardInterrupt):
            await migrate_schedules(old, new)
        monkeypatch.undo()
        assert await migrate_schedules(old, new) == Migrated(unclear=[lost.schedule_id])
        assert (await new.middleware.queue.stats()).waiting == 1
        client = Redis(connection_pool=old._connection_pool)
        await client.rename(f"{queue_name}:moving:{lost.schedule_id}", f"{queue_name}:data:{lost.schedule_id}")
        assert (await migrate_schedules(old, new)).moved == [lost.schedule_id]
    await old._connection_pool.disconnect()


async def test_bad_arguments(make_broker, server):
    with pytest.raises(TypeError, match=r"takes a taskiq_redis.ListRedisScheduleSource, got 5"):
        await migrate_schedules(5, DelayScheduleSource(make_broker()))
    with pytest.raises(TypeError, match=r"moves to a DelayScheduleSource, got 5"):
        await migrate_schedules(ListRedisScheduleSource(server.url), 5)
