"""``DelayJob``, and the list of queued jobs."""

from __future__ import annotations

import asyncio
from datetime import datetime, timedelta, timezone

import pytest
from arq.constants import (
    abort_jobs_ss,
    default_queue_name,
    in_progress_key_prefix,
    job_key_prefix,
    result_key_prefix,
    retry_key_prefix,
)
from arq.jobs import Job, JobStatus, ResultNotFound
from arq.utils import timestamp_ms

from delayadapters import Outcome
from delayadapters.arq import DelayJob, DelaySettings
from delaytests import wait_until_async


async def add(ctx, a, b=1):
    return a + b


async def fail(ctx):
    raise ValueError("as it should")


# ------------------------------------------------------------ looking


async def test_a_job_seen_through_its_life(pool, work):
    job = await pool.enqueue_job("add", 1, _defer_by=600)
    assert await job.status() is JobStatus.deferred
    info = await job.info()
    assert (info.function, info.args) == ("add", (1,))
    assert 500_000 < info.score - timestamp_ms() <= 600_001
    assert await job.result_info() is None
    assert await job.reschedule(delay=0.001) is Outcome.RESCHEDULED
    await asyncio.sleep(0.01)
    assert await job.status() is JobStatus.queued, "due, and nobody has released it"
    await pool.delay_queue.claim()
    assert await job.status() is JobStatus.queued, "in arq's queue"
    assert (await job.info()).score <= timestamp_ms()
    work(add)
    assert await job.result(timeout=40, poll_delay=0.01) == 2
    assert await job.status() is JobStatus.complete
    assert (await job.result_info()).result == 2
    assert (await job.info()).success


async def test_the_result_of_a_deferred_job_is_waited_for(pool, work):
    """arq's own Job looks into arq's queue only, and raises at once."""
    work(add, fail)
    good = await pool.enqueue_job("add", 40, b=2, _defer_by=0.3)
    bad = await pool.enqueue_job("fail", _defer_by=0.3)
    late = await pool.enqueue_job("add", 1, _defer_by=60)
    assert await good.result(timeout=40, poll_delay=0.02) == 42
    with pytest.raises(ValueError, match="as it should"):
        await bad.result(timeout=40, poll_delay=0.02)
    with pytest.raises(asyncio.TimeoutError):
        await late.result(timeout=0.05, poll_delay=0.02)


async def test_a_job_that_is_nowhere(pool):
    job = DelayJob("nobody", pool)
    assert await job.status() is JobStatus.not_found
    assert await job.info() is None
    with pytest.raises(ResultNotFound):
        await job.result(timeout=1)
    assert await job.abort() is False
    assert await job.reschedule(delay=5) is Outcome.NOT_FOUND
    assert await job.release_now() is Outcome.NOT_FOUND


async def test_looking_while_jobs_move_never_finds_nothing(pool, work):
    """From the delay queue to arq's, and back by retries."""
    from arq import Retry

    async def flaky(ctx):
        if ctx["job_try"] < 10:
            raise Retry(defer=0.02)
        return "ok"

    work(flaky, max_tries=20)
    job = await pool.enqueue_job("flaky", _defer_by=0.02)
    seen = []
    while (status := await job.status()) is not JobStatus.complete:
        seen.append(status)
    assert JobStatus.not_found not in seen
    assert await job.result(timeout=40) == "ok"


# ------------------------------------------------------------ abort


async def test_abort_of_a_deferred_job(pool, work, stock):
    """arq with allow_abort_jobs=False runs it at once."""
    worker = work(add)
    job = await pool.enqueue_job("add", 1, b=2, _defer_by=60)
    begin = timestamp_ms()
    assert await job.abort() is True
    assert timestamp_ms() - begin < 30_000, "not at its due time"
    assert await job.status() is JobStatus.complete
    with pytest.raises(asyncio.CancelledError):
        await job.result(timeout=1)
    info = await job.result_info()
    assert (info.function, info.args, info.kwargs, info.success) == ("add", (1,), {"b": 2}, False)
    assert (info.job_id, info.queue_name) == (job.job_id, default_queue_name)
    assert await stock.zcard(abort_jobs_ss) == 0
    assert await pool.delay_queue.get(job.job_id) is None
    assert await pool.enqueue_job("add", 1, _job_id=job.job_id) is None, "its id is taken while its result is kept"
    assert 3_500_000 < await stock.pttl(result_key_prefix + job.job_id) <= 3_600_000
    assert await job.abort() is True, "as before: it was"
    assert worker.jobs_complete == worker.jobs_failed == 0


async def test_how_long_an_aborted_id_is_taken_is_a_setting(make_pool):
    pool = await make_pool(delay_settings=DelaySettings(keep_aborted=0))
    job = await pool.enqueue_job("add", 1, _job_id="one", _defer_by=60)
    assert await job.abort() is True
    assert await pool.enqueue_job("add", 1, _job_id="one", _defer_by=60) is not None


@pytest.mark.parametrize("native", [True, False])
async def test_abort_of_a_job_in_arqs_queue(pool, stock, work, native):
    """Also of one that arq itself has deferred."""
    if native:
        await stock.enqueue_job("add", 1, _job_id="one", _defer_by=0.5)
    else:
        await pool.enqueue_job("add", 1, _job_id="one")
    assert await DelayJob("one", pool).abort() is True
    assert await stock.zcard(default_queue_name) == 0
    assert not await stock.exists(job_key_prefix + "one", in_progress_key_prefix + "one")
    worker = work(add)
    await asyncio.sleep(0.7)
    assert worker.jobs_complete == worker.jobs_failed == 0


async def test_abort_of_a_running_job(pool, work, stock):
    begun = asyncio.Event()

    async def sleep(ctx):
        begun.set()
        await asyncio.sleep(60)

    work(sleep, allow_abort_jobs=True)
    job = await pool.enqueue_job("sleep", _defer_by=0.01)
    await asyncio.wait_for(begun.wait(), 40)
    assert await job.abort(timeout=40, poll_delay=0.02) is True
    with pytest.raises(asyncio.CancelledError):
        await job.result(timeout=1)
    assert await stock.zcard(abort_jobs_ss) == 0


async def test_abort_of_a_running_job_where_the_worker_does_not_allow_it(pool, work, stock):
    begun, go = asyncio.Event(), asyncio.Event()

    async def sleep(ctx):
        begun.set()
        await go.wait()

    work(sleep)
    job = await pool.enqueue_job("sleep")
    await asyncio.wait_for(begun.wait(), 40)
    with pytest.raises(asyncio.TimeoutError):
        await job.abort(timeout=0, poll_delay=0.01)
    go.set()
    assert await job.abort(timeout=40, poll_delay=0.02) is False
    assert await stock.zcard(abort_jobs_ss) == 0, "arq never takes such a request out"


async def test_who_gives_up_an_abort_is_not_told_that_it_has_happened(pool, work):
    go = asyncio.Event()

    async def slow(ctx):
        await go.wait()

    work(slow)  # which does not allow aborts
    job = await pool.enqueue_job("slow")
    await wait_until_async(lambda: in_progress(job))
    aborting = asyncio.create_task(job.abort(poll_delay=0.01))
    await wait_until_async(lambda: pool.zscore(abort_jobs_ss, job.job_id))
    await asyncio.sleep(0.05)
    aborting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await aborting
    go.set()
    await job.result(timeout=20, poll_delay=0.01)


async def in_progress(job):
    return await job.status() is JobStatus.in_progress


async def test_abort_of_a_finished_job(pool, work):
    work(add)
    job = await pool.enqueue_job("add", 1)
    assert await job.result(timeout=40, poll_delay=0.01) == 2
    assert await job.abort(timeout=1) is False
    assert await job.result(timeout=1) == 2


async def test_abort_of_a_job_that_waits_for_its_retry(pool, work, stock):
    from arq import Retry

    async def again(ctx):
        raise Retry(defer=60)

    worker = work(again)
    job = await pool.enqueue_job("again", _job_id="one")
    await wait_until_async(lambda: pool.waiting("one"))
    assert await job.status() is JobStatus.deferred
    assert await stock.exists(job_key_prefix + "one"), "stock clients find the id taken"
    assert await job.abort() is True
    assert not await stock.exists(job_key_prefix + "one", retry_key_prefix + "one")
    assert worker.jobs_retried == 1


async def test_either_the_abort_or_the_release_wins(pool, work):
    """Aborts at the very moment of release: a job told to be aborted has not run."""
    ran = set()

    async def note(ctx):
        ran.add(ctx["job_id"])

    work(note, max_jobs=100)
    jobs = [await pool.enqueue_job("note", _defer_by=0.2 + i * 0.003) for i in range(100)]

    async def abort_at_due(job, delay):
        await asyncio.sleep(delay)
        try:
            return await job.abort(timeout=0, poll_delay=0.01)
        except asyncio.TimeoutError:
            return False

    aborted = await asyncio.gather(*(abort_at_due(job, 0.15 + i * 0.003) for i, job in enumerate(jobs)))

    async def finished():
        return all([await job.status() is JobStatus.complete for job in jobs])

    await wait_until_async(finished)
    won = {job.job_id for job, yes in zip(jobs, aborted, strict=True) if yes}
    assert not won & ran
    assert won | ran == {job.job_id for job in jobs}


# ------------------------------------------------------------ other due times


async def test_reschedule_and_release_now(pool, work):
    work(add)
    job = await pool.enqueue_job("add", 1, _defer_by=600)
    assert await job.reschedule(delay=timedelta(hours=1)) is Outcome.RESCHEDULED
    assert 3_500_000 < (await job.info()).score - timestamp_ms() <= 3_600_001
    at = datetime.now(timezone.utc) + timedelta(hours=2)
    assert await job.reschedule(at=at) is Outcome.RESCHEDULED
    assert (await job.info()).score == int(at.timestamp() * 1000)
    naive = datetime.now() + timedelta(hours=3)
    assert await job.reschedule(at=naive) is Outcome.RESCHEDULED
    assert (await job.info()).score == int(naive.timestamp() * 1000)
    assert await job.release_now() is Outcome.RESCHEDULED
    assert await job.result(timeout=40, poll_delay=0.01) == 2
    assert await job.release_now() is Outcome.RELEASED
    queued = await pool.enqueue_job("add", 1, _queue_name="nobody")
    assert await queued.reschedule(delay=1) is Outcome.RELEASED
    with pytest.raises(ValueError, match="delay"):
        await job.reschedule(delay=float("nan"))


# ------------------------------------------------------------ lists


async def test_queued_jobs_has_waiting_ones_and_tolerates_gaps(pool, stock):
    await pool.enqueue_job("add", 1, _job_id="now")
    await pool.enqueue_job("add", 2, _job_id="later", _defer_by=60)
    await pool.enqueue_job("add", 3, _job_id="soon", _defer_by=30)
    await pool.enqueue_job("add", 4, _job_id="elsewhere", _defer_by=30, _queue_name="other")
    await stock.zadd(default_queue_name, {"gone": 5})  # natively: RuntimeError, 'job "…" not found'
    jobs = await pool.queued_jobs()
    assert [(job.job_id, job.args) for job in jobs] == [("now", (1,)), ("soon", (3,)), ("later", (2,))]
    assert all(job.score for job in jobs)
    assert [job.job_id for job in await pool.queued_jobs(queue_name="other")] == ["elsewhere"]


async def test_more_queued_jobs_than_a_page(pool):
    for i in range(0, 1100, 100):
        await asyncio.gather(*(pool.enqueue_job("add", n, _defer_by=60) for n in range(i, i + 100)))
    assert len(await pool.queued_jobs()) == 1100


async def test_arqs_own_job_of_a_waiting_one(pool, stock):
    """What the docs say of it: it sees nothing until the release."""
    job = await pool.enqueue_job("add", 1, _defer_by=60)
    assert await Job(job.job_id, stock).status() is JobStatus.not_found
