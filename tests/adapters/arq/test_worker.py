"""``DelayWorker``: on time, retries, burst, several workers, a graceful stop. Woken where poll_delay is 20 s."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import signal
import time
from datetime import datetime
from itertools import pairwise

import pytest
from arq import Retry, cron, func
from arq.connections import ArqRedis, RedisSettings
from arq.constants import default_queue_name, in_progress_key_prefix, job_key_prefix, retry_key_prefix
from arq.jobs import Job
from arq.utils import timestamp_ms
from arq.worker import Worker
from redis.exceptions import ConnectionError as RedisConnectionError

from delayadapters import AsyncDelayQueue
from delayadapters.arq import DelayArqRedis, DelaySettings, DelayWorker
from delayadapters.arq.settings import EXPIRES_PREFIX
from delaytests import wait_until_async


async def add(ctx, a, b=1):
    return a + b


# ------------------------------------------------------------ on time


async def test_never_early_and_woken(pool, work):
    """All run long before the next poll, so each was woken for."""
    starts = {}

    async def note(ctx, due):
        starts[ctx["job_id"]] = time.time() - due

    work(note, max_jobs=3)
    begin = time.monotonic()
    for i in range(30):
        delay = 0.05 + 0.02 * (i % 10)
        await pool.enqueue_job("note", time.time() + delay, _defer_by=delay)
    await wait_until_async(lambda: len(starts) == 30)
    assert min(starts.values()) >= 0
    assert time.monotonic() - begin < 19, "before the next poll"


async def test_a_job_for_now_wakes_too(pool, work):
    work(add)
    await asyncio.sleep(0.1)
    job = await pool.enqueue_job("add", 1)
    assert await job.result(timeout=40, poll_delay=0.01) == 2


async def test_a_full_worker_takes_the_next_as_soon_as_it_can(pool, work):
    async def nap(ctx):
        await asyncio.sleep(0.01)

    worker = work(nap, max_jobs=2)
    for _ in range(40):
        await pool.enqueue_job("nap", _defer_by=0.05)
    await wait_until_async(lambda: worker.jobs_complete == 40)


async def test_a_release_by_another_process_wakes_too(pool, work):
    work(add, delay_settings=DelaySettings(embed=False))
    await asyncio.sleep(0.1)
    from delayadapters.arq import release_jobs

    releasing = asyncio.create_task(release_jobs(pool))
    job = await pool.enqueue_job("add", 1, _defer_by=0.1)
    assert await job.result(timeout=40, poll_delay=0.01) == 2
    releasing.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await releasing


async def test_a_worker_whose_clock_is_behind(pool, work, monkeypatch):
    """The server's clock decides when a job is released; the worker comes back when its own has got there."""
    import arq.worker

    import delayadapters.arq.worker as ours

    behind = lambda: timestamp_ms() - 300  # noqa: E731
    monkeypatch.setattr(arq.worker, "timestamp_ms", behind)
    monkeypatch.setattr(ours, "timestamp_ms", behind)
    work(add)
    job = await pool.enqueue_job("add", 1, _defer_by=0.05)
    assert await job.result(timeout=40, poll_delay=0.01) == 2


async def test_without_the_wake_channel_jobs_are_polled(pool, work, stock):
    """Its subscription cut again and again, a worker is as late as arq's own, and loses nothing."""
    worker = work(add, poll_delay=0.05)
    job = await pool.enqueue_job("add", 1, _defer_by=0.2)
    for _ in range(5):
        await stock.client_kill_filter(_type="pubsub")
        await asyncio.sleep(0.05)
    assert await job.result(timeout=40, poll_delay=0.01) == 2
    assert worker.jobs_complete == 1


# ------------------------------------------------------------ retries


async def test_retries_are_never_early_and_counted(pool, work, stock):
    seen = []

    async def flaky(ctx, x):
        seen.append((ctx["job_try"], time.time(), x))
        if ctx["job_try"] < 5:
            seen[-1] = (*seen[-1], time.time())
            raise Retry(defer=0.05)
        return "kept"

    worker = work(flaky)
    job = await pool.enqueue_job("flaky", {"a": 1}, _job_id="one")
    assert await job.result(timeout=40, poll_delay=0.01) == "kept"
    assert [row[0] for row in seen] == [1, 2, 3, 4, 5]
    assert all(row[2] == {"a": 1} for row in seen)
    assert all(after[1] - before[3] >= 0.05 for before, after in pairwise(seen))
    assert (await job.result_info()).job_try == 5
    assert (worker.jobs_complete, worker.jobs_retried) == (1, 4)
    left = {key.decode() for key in await stock.keys("arq:*")} - {"arq:result:one", worker.health_check_key}
    assert left == set()


async def test_defer_counts_from_the_raise(pool, work):
    """A hook that takes its time must not add to it."""
    raised = []

    async def flaky(ctx):
        raised.append(time.time())
        raise Retry(defer=60)

    async def dawdle(ctx):
        await asyncio.sleep(2)

    work(flaky, on_job_end=dawdle)
    await pool.enqueue_job("flaky", _job_id="one")
    waiting = await wait_until_async(lambda: pool.waiting("one"))
    assert 60 <= waiting.due / 1e6 - raised[0] < 61.9


async def test_a_retry_waits_with_us_in_one_place(pool, work, stock):
    async def flaky(ctx):
        raise Retry(defer=3600)

    work(flaky)
    await pool.enqueue_job("flaky", _job_id="one")
    await wait_until_async(lambda: pool.waiting("one"))
    assert await stock.zscore(default_queue_name, "one") is None
    assert not await stock.exists(in_progress_key_prefix + "one")
    assert await stock.get(retry_key_prefix + "one") == b"1"
    assert await stock.ttl(retry_key_prefix + "one") > 88_400
    assert await stock.ttl(job_key_prefix + "one") > 86_400, "stock clients find the id taken"
    assert await stock.enqueue_job("flaky", _job_id="one") is None
    assert (await pool.waiting("one")).meta == {"task": "flaky", "queue": default_queue_name}


async def test_no_death_by_ttl(make_pool, work, stock):
    """A retry deferred for longer than a payload lives, and than arq remembers its tries."""
    pool = await make_pool(expires_extra_ms=20_000)
    tries = []

    async def flaky(ctx):
        tries.append(ctx["job_try"])
        if ctx["job_try"] < 3:
            raise Retry(defer=0.6)
        return "alive"

    work(flaky, redis_pool=pool)
    job = await pool.enqueue_job("flaky", _job_id="one")
    await wait_until_async(lambda: pool.waiting("one"))
    # What TTLs would do within days: both keys are gone before the job is due.
    await stock.delete(job_key_prefix + "one", retry_key_prefix + "one")
    assert await job.result(timeout=40, poll_delay=0.01) == "alive"
    assert tries == [1, 2, 3]


async def test_expires_outlives_a_retry(pool, work, stock):
    """`_expires`: do not start *or retry* a job after this duration."""
    tries = []

    async def flaky(ctx):
        tries.append(ctx["job_try"])
        raise Retry(defer=1.0)

    work(flaky, max_tries=100)
    now = await pool.enqueue_job("flaky", _expires=2.5)
    later = await pool.enqueue_job("flaky", _expires=2.5, _defer_by=0.1)
    for job in (now, later):
        with pytest.raises(Exception, match="job expired"):
            await job.result(timeout=40, poll_delay=0.02)
    assert 2 <= len(tries) <= 6, "three times each, on a busy machine fewer"
    assert not await stock.keys(EXPIRES_PREFIX + "*")


async def test_max_tries_is_arqs(pool, work):
    async def flaky(ctx):
        raise Retry(defer=0.01)

    work(flaky, max_tries=3)
    job = await pool.enqueue_job("flaky", _defer_by=0.01)
    with pytest.raises(Exception, match="max 3 retries exceeded"):
        await job.result(timeout=40, poll_delay=0.01)


async def test_retry_without_defer_and_of_cancelled_jobs_is_arqs(pool, work):
    async def flaky(ctx):
        if ctx["job_try"] == 1:
            raise Retry
        if ctx["job_try"] == 2:
            raise asyncio.CancelledError
        return ctx["job_try"]

    work(flaky, poll_delay=0.02)
    job = await pool.enqueue_job("flaky")
    assert await job.result(timeout=40, poll_delay=0.01) == 3


async def test_a_retry_that_the_delay_queue_refuses_is_left_to_arq(pool, work, server, caplog):
    """Its keys hold another type of value: the job must not be lost, nor the worker end."""

    async def flaky(ctx):
        if ctx["job_try"] < 3:
            raise Retry(defer=0.05)
        return ctx["job_try"]

    worker = work(flaky, poll_delay=0.02, delay_settings=DelaySettings(name="broken", embed=False))
    server.client().set("{broken:0}:due", "a string")
    job = await pool.enqueue_job("flaky")
    assert await job.result(timeout=40, poll_delay=0.01) == 3
    assert "left to arq" in caplog.text
    assert worker.jobs_retried == 2


async def test_a_retry_of_a_job_that_has_left_arqs_queue_is_not_stored(pool, work, stock):
    """Ended elsewhere while it ran here (its in-progress key had passed): it must not come to life again."""
    begun, go = asyncio.Event(), asyncio.Event()

    async def flaky(ctx):
        begun.set()
        await go.wait()
        raise Retry(defer=5)

    worker = work(flaky)
    await pool.enqueue_job("flaky", _job_id="one")
    await asyncio.wait_for(begun.wait(), 40)
    await stock.zrem(default_queue_name, "one")
    await stock.delete(job_key_prefix + "one")
    go.set()
    await wait_until_async(lambda: not worker.job_tasks and worker.jobs_retried == 1)
    await asyncio.sleep(0.05)
    assert await pool.waiting("one") is None


# ------------------------------------------------------------ from inside a worker


async def test_ctx_redis_defers_through_us(pool, work):
    done = []

    async def chain(ctx, left):
        done.append(left)
        assert isinstance(ctx["redis"], DelayArqRedis)
        if left:
            await ctx["redis"].enqueue_job("chain", left - 1, _defer_by=0.02)

    work(chain)
    await pool.enqueue_job("chain", 5)
    await wait_until_async(lambda: done == [5, 4, 3, 2, 1, 0])


async def test_cron_jobs_stay_arqs_and_defer_through_us(pool, work, stock):
    ran, followed = [], []

    async def tick(ctx):
        ran.append((ctx["job_id"], time.time(), ctx["score"]))
        await ctx["redis"].enqueue_job("follow", _defer_by=0.01, _job_id=f"after-{ctx['job_id']}")

    async def follow(ctx):
        followed.append(ctx["job_id"])

    every_second = set(range(60))
    work(
        func(follow, name="follow"),
        cron_jobs=[cron(tick, name="tick", second=every_second, microsecond=0)],
        poll_delay=0.3,
    )
    await wait_until_async(lambda: len(ran) >= 2 and followed)
    for job_id, start, score in ran:
        name, _, stamp = job_id.partition(":")
        assert (name, int(stamp) % 1000) == ("tick", 0), "arq's id: a stock worker enqueues the same"
        assert start * 1000 >= score >= int(stamp)
    assert len({job_id for job_id, *_ in ran}) == len(ran)
    assert all(job_id.startswith("after-tick:") for job_id in followed)


# ------------------------------------------------------------ burst


async def burst(settings, *functions, **options):
    worker = DelayWorker(
        [func(f, name=f.__name__) for f in functions],
        redis_settings=settings,
        burst=True,
        handle_signals=False,
        poll_delay=0.05,
        **options,
    )
    try:
        await asyncio.wait_for(worker.async_run(), 20)
    finally:
        await worker.close()
    return worker


async def test_burst_waits_for_deferred_jobs_as_arq_does(pool, settings):
    async def flaky(ctx):
        if ctx["job_try"] < 3:
            raise Retry(defer=0.1)

    await pool.enqueue_job("add", 1, _defer_by=0.5)
    await pool.enqueue_job("flaky")
    await pool.enqueue_job("add", 1, _defer_by=60, _queue_name="other")
    worker = await burst(settings, add, flaky)
    assert (worker.jobs_complete, worker.jobs_retried) == (2, 2)
    assert [job.function for job in await pool.queued_jobs(queue_name="other")] == ["add"]


async def test_burst_need_not_wait(pool, settings):
    later = await pool.enqueue_job("add", 1, _defer_by=60)
    await pool.enqueue_job("add", 1)
    worker = await burst(settings, add, burst_deferred=False)
    assert worker.jobs_complete == 1
    assert await pool.waiting(later.job_id) is not None


async def test_max_burst_jobs(pool, settings):
    for _ in range(5):
        await pool.enqueue_job("add", 1)
    assert (await burst(settings, add, max_burst_jobs=3)).jobs_complete == 3


async def test_run_check(pool):
    """Of arq: what its users' tests call."""
    await pool.enqueue_job("add", 1, _defer_by=0.1)
    worker = DelayWorker(
        [add], redis_pool=ArqRedis(pool.connection_pool), burst=True, handle_signals=False, poll_delay=0
    )
    assert await worker.run_check() == 1
    await worker.close()


# ------------------------------------------------------------ several workers


async def test_two_workers_and_a_stock_one_on_a_queue(pool, stock, work):
    ran = collections.Counter()
    at_work = set()

    async def note(ctx):
        ran[ctx["job_id"]] += 1
        at_work.add(ctx["who"])
        await wait_until_async(lambda: len(at_work) == 3)  # nobody does another one's share

    async def flaky(ctx):
        if ctx["job_try"] < 3:
            raise Retry(defer=0.05)
        ran[ctx["job_id"]] += 1

    workers = [
        work(note, flaky, max_jobs=5, poll_delay=0.3, ctx={"who": "one"}),
        work(note, flaky, max_jobs=5, poll_delay=0.3, ctx={"who": "two"}),
        work(note, flaky, cls=Worker, max_jobs=5, poll_delay=0.03, ctx={"who": "stock"}),
    ]
    wanted = set()
    for i in range(60):
        client = stock if i % 3 == 0 else pool
        options = [{}, {"_defer_by": 0.2}, {"_defer_by": 0.01 * i}][i % 3 if i % 2 else 1]
        job = await client.enqueue_job("flaky" if i % 5 == 0 else "note", _job_id=f"job-{i}", **options)
        wanted.add(job.job_id)
    await wait_until_async(lambda: set(ran) == wanted, timeout=90)
    await wait_until_async(lambda: sum(worker.jobs_complete for worker in workers) == 60)
    assert set(ran.values()) == {1}
    assert all(worker.jobs_failed == 0 for worker in workers)
    assert all(worker.jobs_complete for worker in workers)


async def test_other_frameworks_on_one_redis_keep_what_is_theirs(pool, work, server):
    """Under the names which the other adapters choose by themselves."""
    theirs = ["delayadapters", "delayadapters:celery:redis:0", "delayadapters:taskiq:list:0:taskiq"]
    queues = [AsyncDelayQueue.from_url(server.url, name=name) for name in theirs]
    for queue in queues:
        await queue.schedule(b"no job of arq's", delay=0, id="theirs", meta={"queue": default_queue_name})
    worker = work(add)
    job = await pool.enqueue_job("add", 1, _defer_by=0.3)
    assert await job.result(timeout=40, poll_delay=0.01) == 2
    assert worker.jobs_complete == 1
    assert await pool.zcard(default_queue_name) == 0
    for queue in queues:
        stats = await queue.stats()
        assert (stats.waiting, stats.due, stats.leased, stats.dead) == (1, 1, 0, 0), queue.name
        await queue.aclose()


# ------------------------------------------------------------ stopping


async def test_nothing_is_left_running_after_close(settings, pool):
    before = asyncio.all_tasks()
    worker = DelayWorker([add], redis_settings=settings, handle_signals=False)
    task = asyncio.create_task(worker.async_run())
    await wait_until_async(lambda: worker.releaser is not None and worker.releaser.running)
    await worker.close()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    await asyncio.sleep(0.05)
    assert asyncio.all_tasks() == before
    clients = [c for c in await pool.client_list() if c["id"] != str(await pool.client_id())]
    assert clients == [], "no connection stays"
    assert worker._pool is None


async def test_a_closed_worker_can_run_again(settings, pool):
    """As ``--watch`` does."""
    worker = DelayWorker([add], redis_settings=settings, handle_signals=False, poll_delay=20)
    for number in range(2):
        task = asyncio.create_task(worker.async_run())
        job = await pool.enqueue_job("add", number, _defer_by=0.05)
        assert await job.result(timeout=40, poll_delay=0.01) == number + 1
        await worker.close()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def test_sigterm_is_graceful(start_worker, server, ledger):
    """arq: a running job is cancelled and will be run again; hooks run, and nothing deferred is touched."""
    from delaytests import wait_until

    enqueue(server, "slow", 30, _job_id="running")
    enqueue(server, "record", _job_id="deferred", _defer_by=60)
    process = start_worker().wait_ready()
    wait_until(lambda: "running" in ledger.ids())
    assert process.stop() == 0
    assert ledger.runs()[0] == "startup-DelayArqRedis 0"
    assert ledger.runs()[-1] == "shutdown 0"
    client = server.client()
    assert client.zscore(default_queue_name, "running") is not None
    assert not client.exists(in_progress_key_prefix + "running")
    assert client.zcard("{delayadapters:arq:0}:due") == 1
    assert not client.exists("{delayadapters:arq:0}:watch"), "the watch was handed over"


def test_job_completion_wait(start_worker, server, ledger):
    from delaytests import wait_until

    enqueue(server, "slow", 1.0, _job_id="running")
    process = start_worker("Plain", COMPLETION_WAIT="20").wait_ready()
    wait_until(lambda: "running" in ledger.ids())
    process.signal(signal.SIGTERM)
    wait_until(lambda: "shutdown on SIGTERM" in process.log())
    enqueue(server, "record", _job_id="next")
    assert process.wait() == 0
    assert "running-end" in ledger.ids(), "it was allowed to end"
    assert "next" not in ledger.ids(), "and nothing new was begun"
    assert server.client().zscore(default_queue_name, "next") is not None


@pytest.mark.parametrize("cls", [DelayWorker, Worker], ids=["ours", "arq's"])
async def test_a_worker_ends_with_its_redis_as_arqs_does(start_redis, cls):
    """By redis-py's error, which the command shows, and within a bounded time: whoever supervises it starts another."""
    server = start_redis()
    worker = cls(
        [func(add, name="add")],
        redis_settings=RedisSettings(port=server.port),
        handle_signals=False,
        poll_delay=0.05,
    )
    running = asyncio.create_task(worker.async_run())
    await wait_until_async(lambda: server.client().exists(worker.health_check_key))
    server.kill()
    with pytest.raises(RedisConnectionError):
        await asyncio.wait_for(running, 40)
    pool = worker._pool
    with pytest.raises(RedisConnectionError):
        await worker.close()
    await pool.aclose(close_connection_pool=True)


def enqueue(server, function, *args, **options):
    from delayadapters.arq import create_pool

    async def go():
        pool = await create_pool(RedisSettings(port=server.port))
        job = await pool.enqueue_job(function, *args, **options)
        await pool.aclose()
        return job and job.job_id

    return asyncio.run(go())


async def test_bad_arguments():
    with pytest.raises(TypeError, match="delay_settings"):
        DelayWorker([add], delay_settings=5, handle_signals=False)
    with pytest.raises(TypeError, match="nonsense"):
        DelayWorker([add], nonsense=5, handle_signals=False)


async def test_health_check_says_what_arqs_does(work, stock, caplog):
    caplog.set_level(logging.INFO)
    worker = work(add)
    value = await wait_until_async(lambda: stock.get(worker.health_check_key))
    assert b"j_complete=0" in value
    assert datetime.now().strftime("%b") in value.decode()


async def test_info_of_a_running_job_is_arqs(pool, work, stock):
    begun = asyncio.Event()

    async def hold(ctx):
        begun.set()
        await asyncio.sleep(60)

    work(hold)
    job = await pool.enqueue_job("hold", _defer_by=0.01)
    await asyncio.wait_for(begun.wait(), 40)
    assert await job.status() == await Job(job.job_id, stock).status()
    assert await job.info() == await Job(job.job_id, stock).info()
