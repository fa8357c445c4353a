"""delayadapters.testing for arq: no Redis but in the test that compares the simulated one with a real one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from typing import Any
from unittest.mock import AsyncMock

import pytest
import redis
from arq import ArqRedis, Retry
from arq.jobs import Job, JobStatus
from arq.worker import JobExecutionFailed, func

from delayadapters import Outcome
from delayadapters.arq import DelayArqRedis, delayed
from delayadapters.testing import ClockMismatch, ManualClock
from delayadapters.testing.arq import DelayedArq
from delayadapters.testing.keys import Keyspace, NotSimulated
from delaytests.docs import run_example

pytest_plugins = ["pytester"]
Make = Callable[..., DelayedArq]


async def note(ctx: Any, value: Any = None, **more: Any) -> Any:
    ctx["ran"].append((value, ctx["job_try"]))
    return value


async def flaky(ctx: Any, tries: int, defer: float = 5) -> str:
    ctx["ran"].append(("flaky", ctx["job_try"]))
    if ctx["job_try"] < tries:
        raise Retry(defer=defer)
    return "done"


async def tick(ctx: Any) -> None:
    ctx["ran"].append("tick")
    await ctx["redis"].enqueue_job("tick", _defer_by=10)
    await ctx["redis"].enqueue_job("note", "inside")
    ctx["ran"].append("tock")


async def bad(ctx: Any) -> None:
    raise ValueError("bad")


async def look(ctx: Any) -> None:
    ctx["ran"].append(sorted(str(key) for key in ctx))


async def startup(ctx: Any) -> None:
    ctx["ran"].append("startup")


async def shutdown(ctx: Any) -> None:
    ctx["ran"].append("shutdown")


async def job_start(ctx: Any) -> None:
    ctx["ran"].append("start")


class Plain:
    functions = [note, flaky, tick, bad, func(look, name="looks")]
    on_startup = startup
    on_shutdown = shutdown
    keep_result = 600


@delayed
class Decorated:
    functions = Plain.functions
    on_startup = startup
    on_shutdown = shutdown
    keep_result = 600


@pytest.fixture
def ran() -> list[Any]:
    return []


@pytest.fixture(params=[Plain, Decorated], ids=["plain", "decorated"])
def jobs(request: pytest.FixtureRequest, delayed_arq: Make, ran: list[Any]) -> DelayedArq:
    return delayed_arq(request.param, ctx={"ran": ran})


async def test_a_deferred_job_waits_and_runs_when_the_clock_gets_there(jobs: DelayedArq, ran: list[Any]) -> None:
    job = await jobs.redis.enqueue_job("note", "a", urgent=True, _defer_by=60)
    jobs.assert_scheduled(note, delay=60, args=["a"], kwargs={"urgent": True}, id=job.job_id, queue="arq:queue")
    jobs.assert_scheduled("note", delay=timedelta(minutes=1), times=1)
    assert await job.status() is JobStatus.deferred
    assert (await job.info()).score == (jobs.clock.micros + 60_000_000) // 1000
    assert [found.function for found in await jobs.redis.queued_jobs()] == ["note"]
    assert await jobs.advance(59.999) == []
    assert ran == []
    assert [released.task for released in await jobs.advance(1)] == ["note"]
    assert ran == [("a", 1)]
    assert await job.status() is JobStatus.complete
    assert await job.result() == "a"
    jobs.assert_nothing_scheduled()
    jobs.assert_released("note", delay=60)


async def test_nobody_waits_for_a_result_that_only_the_clock_can_bring(jobs: DelayedArq) -> None:
    job = await jobs.redis.enqueue_job("note", _defer_by=60, _job_id="x")
    with pytest.raises(asyncio.TimeoutError, match=r"job x has not run yet; it is due in 60 s, advance\(\) to that"):
        await job.result()


async def test_the_stand_in_is_a_pool_like_any_other(jobs: DelayedArq, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(jobs.redis, DelayArqRedis)
    assert isinstance(jobs.redis, ArqRedis)
    assert await jobs.create_pool("settings", retry=3) is jobs.redis
    await jobs.redis.enqueue_job("note", 7, _job_id="x")
    assert await Job("x", jobs.redis).result(timeout=0) == 7
    assert [result.result for result in await jobs.redis.all_job_results()] == [7]
    assert await jobs.redis.ping()
    for use in (lambda: jobs.redis.lpush("a", "b"), lambda: jobs.redis.pubsub().subscribe("a")):
        with pytest.raises(NotSimulated, match="simulated"):
            await use()
    await jobs.redis.aclose()


async def test_every_way_to_name_a_time(jobs: DelayedArq) -> None:
    hour = timedelta(hours=1)
    then = jobs.clock.now() + hour
    await jobs.redis.enqueue_job("note", _defer_by=hour)
    await jobs.redis.enqueue_job("note", _defer_until=then)
    await jobs.redis.enqueue_job("note", _defer_until=then.astimezone().replace(tzinfo=None))
    jobs.assert_scheduled(delay=hour, times=3)
    await jobs.redis.enqueue_job("note", 1, _defer_until=jobs.clock.now() - hour, _job_id="past")
    jobs.assert_not_scheduled(id="past")


async def test_a_time_of_the_machine_that_the_clock_has_passed_is_warned_of(jobs: DelayedArq) -> None:
    await jobs.advance(86_400)
    with pytest.warns(ClockMismatch, match="note was scheduled for"):
        await jobs.redis.enqueue_job("note", _defer_until=datetime.now(timezone.utc) + timedelta(hours=1))


async def test_what_a_job_enqueues_runs_after_it_and_is_released_in_the_window(
    jobs: DelayedArq, ran: list[Any]
) -> None:
    await jobs.redis.enqueue_job("tick", _defer_by=10)
    await jobs.advance(25)
    assert ran == ["tick", "tock", ("inside", 1)] * 2
    jobs.assert_scheduled("tick", due_in=5)


async def test_retries_are_deferred_by_what_they_say(jobs: DelayedArq, ran: list[Any]) -> None:
    job = await jobs.redis.enqueue_job("flaky", 3, 7.5)
    for n in (1, 2):
        jobs.assert_scheduled("flaky", delay=7.5, id=job.job_id, times=1)
        assert ran[-1] == ("flaky", n)
        await jobs.advance_to_next()
    assert await job.result() == "done"
    assert await jobs.advance_to_next() == []
    at_once = await jobs.redis.enqueue_job("flaky", 2, 0)
    assert await at_once.result() == "done"


async def test_a_test_can_give_up_waiting_for_a_job(delayed_arq: Make) -> None:
    """Its cancellation is the test's own; the job is not run again for it."""
    runs = []

    async def hangs(ctx: Any) -> None:
        runs.append(ctx["job_try"])
        await asyncio.sleep(1000)

    async with delayed_arq({"functions": [func(hangs, name="hangs")]}) as jobs:
        await jobs.redis.enqueue_job("hangs", _defer_by=5)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(jobs.advance(6), 0.3)
        assert runs == [1]


async def test_too_many_tries_and_other_errors_are_raised(jobs: DelayedArq, ran: list[Any]) -> None:
    await jobs.redis.enqueue_job("flaky", 100)
    with pytest.raises(JobExecutionFailed, match="max 5 retries exceeded"):
        await jobs.advance(3600)
    assert len(ran) == 5
    with pytest.raises(ValueError, match="bad"):
        await jobs.redis.enqueue_job("bad")
    await jobs.redis.enqueue_job("nowhere", _defer_by=1)
    with pytest.raises(JobExecutionFailed, match="function 'nowhere' not found"):
        await jobs.advance(1)


async def test_errors_can_be_left_in_the_results(delayed_arq: Make, ran: list[Any]) -> None:
    jobs = delayed_arq([bad], ctx={"ran": ran}, propagate=False)
    job = await jobs.redis.enqueue_job("bad", _defer_by=1)
    await jobs.advance(1)
    assert not (await job.result_info()).success


async def test_ids_are_unique_until_the_result_is_gone(jobs: DelayedArq, ran: list[Any]) -> None:
    enqueue = jobs.redis.enqueue_job
    assert await enqueue("note", 1, _job_id="x", _defer_by=60)
    assert await enqueue("note", 2, _job_id="x", _defer_by=5) is None
    assert await enqueue("note", 3, _job_id="x") is None
    await jobs.advance(60)
    assert await enqueue("note", 4, _job_id="x") is None, "its result is kept"
    await jobs.advance(600)
    assert await enqueue("note", 5, _job_id="x")
    assert await enqueue("note", 6, _job_id="x", _defer_by=5, _if_exists="replace")
    assert await enqueue("note", 7, _job_id="x", _defer_by=9, _if_exists="replace")
    jobs.assert_scheduled("note", args=[7], delay=9, times=1)
    await jobs.advance(9)
    assert [value for value, _ in ran] == [1, 5, 7]


async def test_an_aborted_job_does_not_run(jobs: DelayedArq, ran: list[Any]) -> None:
    job = await jobs.redis.enqueue_job("note", 1, _defer_by=60)
    assert await job.abort()
    jobs.assert_nothing_scheduled()
    await jobs.advance(60)
    assert ran == []
    with pytest.raises(asyncio.CancelledError):
        await job.result()
    finished = await jobs.redis.enqueue_job("note", 2)
    assert not await finished.abort()


async def test_a_job_is_rescheduled(jobs: DelayedArq) -> None:
    job = await jobs.redis.enqueue_job("note", 1, _defer_by=60)
    await jobs.advance(10)
    assert await job.reschedule(delay=100) is Outcome.RESCHEDULED
    jobs.assert_scheduled("note", delay=100, due_in=100)
    assert await job.release_now() is Outcome.RESCHEDULED
    await jobs.advance(0)
    assert await job.reschedule(delay=1) is Outcome.RELEASED


async def test_a_job_expires_by_the_clock_of_the_test(jobs: DelayedArq, ran: list[Any]) -> None:
    await jobs.redis.enqueue_job("note", "early", _defer_by=60, _expires=90)
    await jobs.redis.enqueue_job("note", "late", _defer_by=60, _expires=30)
    with pytest.raises(JobExecutionFailed, match="job expired"):
        await jobs.advance(60)
    assert ran == [("early", 1)]


@pytest.mark.parametrize("settings", [Plain, Decorated])
async def test_startup_and_shutdown_and_hooks(settings: type, ran: list[Any]) -> None:
    own = {**{name: value for name, value in vars(settings).items() if name[0] != "_"}, "on_job_start": job_start}
    async with DelayedArq(own, ctx={"ran": ran}) as jobs:
        await jobs.redis.enqueue_job("looks", _defer_by=1)
        await jobs.advance(1)
    assert ran[:2] == ["startup", "start"]
    assert {"job_id", "job_try", "enqueue_time", "score", "redis", "ran"} <= set(ran[2])
    assert ran[3:] == ["shutdown"]
    with pytest.raises(RuntimeError, match="undone"):
        await jobs.redis.enqueue_job("note")


async def test_handed_to_another_pool_at_the_due_time(delayed_arq: Make) -> None:
    pool = AsyncMock(ArqRedis)
    jobs = delayed_arq(Plain, release_to=pool)
    await jobs.redis.enqueue_job("note", 1, _job_id="now")
    pool.enqueue_job.assert_awaited_once_with("note", 1, _job_id="now", _queue_name="arq:queue", _job_try=None)
    job = await jobs.redis.enqueue_job("other", 2, a=3, _defer_by=60, _queue_name="elsewhere", _job_try=2)
    await jobs.advance(59)
    assert pool.enqueue_job.await_count == 1
    await jobs.advance(1)
    pool.enqueue_job.assert_awaited_with("other", 2, _job_id=job.job_id, _queue_name="elsewhere", _job_try=2, a=3)


async def test_a_job_of_another_queue_is_released_and_runs_nowhere(jobs: DelayedArq, ran: list[Any]) -> None:
    await jobs.redis.enqueue_job("note", 1, _defer_by=60, _queue_name="elsewhere")
    await jobs.advance(60)
    jobs.assert_released("note", queue="elsewhere")
    assert ran == []
    assert [job.function for job in await jobs.redis.queued_jobs(queue_name="elsewhere")] == ["note"]


def test_bad_arguments() -> None:
    with pytest.raises(TypeError, match="takes a WorkerSettings class or dict or a list of functions, got 7"):
        DelayedArq(7)
    with pytest.raises(TypeError, match="release_to must be an arq pool"):
        DelayedArq(Plain, release_to=7)


COMMANDS = [
    ("SET", "a", "1"), ("GET", "a"), ("GET", "none"), ("MGET", "a", "none"), ("EXISTS", "a", "none", "a"),
    ("INCRBY", "a", 1), ("INCRBY", "n", 1), ("SET", "a", "2", "NX"), ("SET", "none", "2", "XX"), ("DEL", "a", "none"),
    ("SETEX", "b", 100, "x"), ("PSETEX", "c", 100_000, b"y"), ("EXPIRE", "b", 100), ("PEXPIRE", "none", 100),
    ("PTTL", "none"), ("PTTL", "n"), ("SET", "e", "x", "PX", 1000), ("GET", "e"),
    ("ZADD", "z", 2, "m"), ("ZADD", "z", "NX", 3, "m"), ("ZADD", "z", 1.5, "k", 2, "l"), ("ZSCORE", "z", "m"),
    ("ZSCORE", "z", "none"), ("ZCARD", "z"), ("ZINCRBY", "z", 2, "k"), ("ZRANGE", "z", 0, -1), ("ZRANGE", "z", 0, 0),
    ("ZRANGEBYSCORE", "z", 2, 3), ("ZRANGEBYSCORE", "z", 0, 9, "LIMIT", 1, 1), ("ZREM", "z", "m", "none"),
    ("ZREM", "z", "k", "l"), ("EXISTS", "z"), ("ZCARD", "z"), ("KEYS", "b*"), ("PUBLISH", "ch", "1"), ("PING",),
]  # fmt: skip


@pytest.mark.leftover_ok("*")
def test_the_simulated_redis_answers_as_a_real_one(redis_client: redis.Redis) -> None:
    keys = Keyspace(ManualClock())
    for command in COMMANDS:
        assert keys.run(command) == redis_client.execute_command(*command), command
    assert keys.run(("ZADD", "z", 1, "a")) == 1
    redis_client.execute_command("ZADD", "z", 1, "a")
    assert keys.run(("ZRANGE", "z", 0, -1, "WITHSCORES")) == redis_client.zrange("z", 0, -1, withscores=True)


def test_what_the_simulated_redis_keeps_expires_by_the_clock() -> None:
    clock = ManualClock()
    keys = Keyspace(clock)
    keys.run(("SET", "a", "1", "EX", 10))
    keys.run(("SET", "b", "1", "PXAT", clock.micros // 1000 + 20_000))
    clock.advance(9.999)
    assert keys.run(("EXISTS", "a", "b")) == 2
    clock.advance(0.001)
    assert keys.run(("EXISTS", "a", "b")) == 1
    assert keys.run(("PTTL", "b")) == 10_000
    assert keys.run(("TIME",)) == divmod(clock.micros, 1_000_000)


def test_the_plugin(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("""
        async def remind(ctx, what): ...

        async def test_first(delayed_arq, delay_clock):
            delayed = delayed_arq([remind])
            await delayed.redis.enqueue_job("remind", "a", _defer_by=60)
            assert delayed.clock is delay_clock
            delayed.assert_scheduled(remind, delay=60)

        async def test_fails(delayed_arq):
            delayed = delayed_arq([remind])
            await delayed.redis.enqueue_job("remind", "a", _defer_by=60)
            delayed.assert_scheduled("remind", delay=61)
    """)
    options = ("-p", "no:cacheprovider", "-o", "asyncio_default_fixture_loop_scope=function", "--asyncio-mode=auto")
    done = pytester.runpytest_inprocess(*options)
    done.assert_outcomes(passed=1, failed=1)
    done.stdout.fnmatch_lines(["E*expected to be scheduled: remind with delay=61", "E*in 60 s: remind('a')*"])


def test_the_test_file_in_the_docs_passes(pytester: pytest.Pytester) -> None:
    run_example(pytester, "arq")
