"""The delay queue on a Redis of its own: leased release, at least once, always under the same id."""

from __future__ import annotations

import asyncio
from collections import Counter
from itertools import pairwise

import pytest
from arq import Retry
from arq.connections import RedisSettings
from arq.constants import default_queue_name, in_progress_key_prefix, job_key_prefix
from arq.jobs import JobStatus
from arq.utils import timestamp_ms

from delayadapters import Batch, Outcome
from delayadapters.arq import DelaySettings, migrate
from delayadapters.arq.releasing import ArqPublisher
from delayadapters.arq.worker import make_releaser, stop_releaser
from delaytests import RedisServer, wait_until_async


@pytest.fixture
def other(start_redis):
    """The Redis where jobs wait."""
    return start_redis()


@pytest.fixture
def away(other: RedisServer) -> DelaySettings:
    return DelaySettings(redis=other.url, timeout=30)


@pytest.fixture
async def pool(make_pool, away):
    return await make_pool(delay_settings=away)


async def add(ctx, a, b=1):
    return a + b


async def test_jobs_wait_there_and_run_here(pool, work, other, server, away):
    job = await pool.enqueue_job("add", 1, _defer_by=600)
    assert not pool.delay_direct
    assert await job.status() is JobStatus.deferred
    assert server.client().keys("*") == []
    assert other.client().zcard("{delayadapters:arq:0}:due") == 1
    work(add, delay_settings=away)
    await job.release_now()
    assert await job.result(timeout=40, poll_delay=0.01) == 2
    assert server.client().keys("{*") == []


async def test_the_same_address_given_twice_is_direct(make_pool, server):
    for redis in (server.url, RedisSettings(port=server.port), f"redis://127.0.0.1:{server.port}"):
        pool = await make_pool(delay_settings=DelaySettings(redis=redis))
        assert pool.delay_direct
    pool = await make_pool(delay_settings=DelaySettings(redis=f"redis://127.0.0.1:{server.port}/3"))
    assert not pool.delay_direct, "another database"


async def test_as_on_one_redis(pool, work, away, stock):
    """Uniqueness, expiry, replacing, aborting, other due times, lists, retries."""
    tries = []

    async def flaky(ctx):
        tries.append((ctx["job_try"], timestamp_ms()))
        if ctx["job_try"] < 3:
            raise Retry(defer=0.1)
        return "ok"

    first = await pool.enqueue_job("add", 1, _job_id="one", _defer_by=60)
    assert await pool.enqueue_job("add", 1, _job_id="one") is None
    assert await pool.enqueue_job("add", 1, _job_id="one", _defer_by=1) is None
    again = await pool.enqueue_job("add", 5, _job_id="one", _defer_by=60, _if_exists="replace")
    assert (await first.info()).args == (5,)
    assert [job.job_id for job in await pool.queued_jobs()] == ["one"]
    assert await again.reschedule(delay=70) is Outcome.RESCHEDULED
    assert await again.release_now() is Outcome.RESCHEDULED
    gone = await pool.enqueue_job("add", 1, _job_id="gone", _defer_by=60)
    assert await gone.abort() is True
    with pytest.raises(asyncio.CancelledError):
        await gone.result(timeout=1)
    dies = await pool.enqueue_job("add", 1, _job_id="dies", _defer_by=0.3, _expires=0.1)
    work(add, flaky, delay_settings=away)
    assert await again.result(timeout=40, poll_delay=0.01) == 6
    with pytest.raises(Exception, match="job expired"):
        await dies.result(timeout=40, poll_delay=0.01)
    job = await pool.enqueue_job("flaky", _job_id="flaky", _defer_by=0.05)
    assert await job.result(timeout=40, poll_delay=0.01) == "ok"
    assert [number for number, _ in tries] == [1, 2, 3]
    assert all(b[1] - a[1] >= 99 for a, b in pairwise(tries))
    queued = await pool.enqueue_job("add", 1, _job_id="queued", _queue_name="nobody")
    assert await queued.abort() is True
    await pool.enqueue_job("add", 1, _job_id="replaced", _queue_name="nobody")
    assert await pool.enqueue_job("add", 2, _job_id="replaced", _queue_name="nobody", _if_exists="replace") is not None
    assert not await stock.exists(in_progress_key_prefix + "replaced")


async def test_migration(pool, stock):
    for i in range(5):
        await stock.enqueue_job("add", i, _job_id=f"job-{i}", _defer_by=60)
    report = await migrate(pool, dry_run=False)
    assert report.moved == 5
    assert await stock.zcard(default_queue_name) == 0
    assert (await pool.delay_queue.stats()).waiting == 5
    assert (await migrate(pool, dry_run=False)).found == 0


# ------------------------------------------------------------ the publisher


@pytest.fixture
async def claims(pool):
    """Three claimed jobs."""
    for i in range(3):
        await pool.enqueue_job("add", i, _job_id=f"job-{i}", _defer_by=0.001)
    await asyncio.sleep(0.01)
    return await pool.delay_queue.claim(lease=30)


def publisher(client):
    return ArqPublisher(client, "delayadapters:arq", queue=default_queue_name, expires_ms=1000)


async def test_published_twice_is_there_once(claims, stock, pool):
    """A crash between the publish and the ack."""
    for _ in range(2):
        assert await publisher(stock).publish(Batch(claims)) is None
    assert await stock.zcard(default_queue_name) == 3
    assert await stock.zscore(default_queue_name, "job-1") == claims[1].due // 1000
    await stock.set("arq:result:job-0", b"ran")
    await stock.zrem(default_queue_name, "job-0")
    await stock.delete(job_key_prefix + "job-0")
    await publisher(stock).publish(Batch(claims))
    assert await stock.zcard(default_queue_name) == 2, "what has a result is not run again"


@pytest.mark.parametrize("published", [False, True], ids=["before the publish", "before the ack"])
async def test_killed_in_each_gap_of_a_leased_release(pool, away, work, published):
    """Nothing more of that process happens: its lease passes, the next one releases, each job runs once."""
    ran = Counter()

    async def note(ctx):
        ran[ctx["job_id"]] += 1

    for i in range(5):
        await pool.enqueue_job("note", _job_id=f"job-{i}", _defer_by=0.001)
    await asyncio.sleep(0.01)
    claims = await pool.delay_queue.claim(lease=1.0)
    assert len(claims) == 5
    if published:
        await publisher(pool).publish(Batch(claims))
    worker = work(note, delay_settings=away)
    await wait_until_async(lambda: len(ran) == 5, timeout=40)

    async def settled():
        stats = await pool.delay_queue.stats()
        return stats.waiting + stats.leased == 0

    await wait_until_async(settled, timeout=40)
    assert worker.releaser.stats.released == 5
    await asyncio.sleep(0.1)
    assert set(ran.values()) == {1}, "under one id, whose result is kept: run once"


async def test_one_bad_job_stops_nothing(claims, stock):
    await stock.set("arq:elsewhere", "a string, no queue")
    bad = claims[1]
    bad.meta["queue"] = "arq:elsewhere"
    claims[2].meta["expires_ms"] = "soon"
    said = await publisher(stock).publish(Batch(claims))
    assert set(said.failed) == {claims[1].entry, claims[2].entry}
    assert "WRONGTYPE" in said.failed[claims[1].entry]
    assert "expires_ms" in said.failed[claims[2].entry]
    assert said.broker_down is None
    assert await stock.zcard(default_queue_name) == 1


async def test_a_broker_that_is_down_or_full_burns_no_attempts(claims, stock, server):
    server.client().config_set("maxmemory", "1")
    said = await publisher(stock).publish(Batch(claims))
    assert "maxmemory" in said.broker_down
    assert set(said.unpublished) == {claim.entry for claim in claims}
    server.client().config_set("maxmemory", "0")
    server.kill()
    said = await publisher(stock).publish(Batch(claims))
    assert said.broker_down
    assert set(said.unpublished) == {claim.entry for claim in claims}
    assert not said.failed


async def test_arqs_redis_away_and_back(pool, away, start_redis):
    """Release pauses, nothing is lost, no attempt is counted."""
    arq_server = start_redis(aof="always")
    from delayadapters.arq import create_pool

    client = await create_pool(RedisSettings(port=arq_server.port), delay_settings=away)
    for i in range(20):
        await client.enqueue_job("add", i, _job_id=f"job-{i}", _defer_by=0.3)
    releaser = make_releaser(client)
    await releaser.start()
    arq_server.kill()
    await wait_until_async(lambda: releaser.stats.pauses > 0)
    arq_server.start()
    await wait_until_async(lambda: arq_server.client().zcard(default_queue_name) == 20, timeout=90)
    assert releaser.stats.failed == 0
    assert releaser.stats.dead == 0
    await stop_releaser(releaser)
    await client.aclose()


async def test_the_delay_redis_gone_does_not_end_a_worker(work, away, other, stock):
    """A retry that cannot be stored there is left to arq."""

    async def flaky(ctx):
        if ctx["job_try"] < 2:
            raise Retry(defer=0.05)
        return "ok"

    worker = work(flaky, delay_settings=away, poll_delay=0.02)
    await wait_until_async(lambda: worker.releaser is not None)
    other.kill()
    job = await stock.enqueue_job("flaky")
    assert await job.result(timeout=40, poll_delay=0.02) == "ok"
