"""``enqueue_job``: arq's meaning for every argument, the payload's life, uniqueness, replacing, bad input."""

from __future__ import annotations

import asyncio
import functools
import json
from collections import Counter
from datetime import datetime, timedelta, timezone

import msgpack
import pytest
from arq.connections import ArqRedis, RedisSettings
from arq.constants import default_queue_name, in_progress_key_prefix, job_key_prefix, result_key_prefix
from arq.jobs import Job, JobStatus, SerializationError
from arq.utils import timestamp_ms

from delayadapters import RedisUnavailable
from delayadapters.arq import DelayArqRedis, DelayJob, DelaySettings, create_pool
from delaytests import wait_until_async
from delaytests.server import free_port

DAY = 86_400


async def foobar(ctx, *args, **kwargs):
    return (args, kwargs)


def keys(server):
    return {key.decode() for key in server.client().keys("arq:*")}


# ------------------------------------------------------------ now


async def test_a_job_for_now_is_what_arq_makes_of_it(pool, stock, server):
    """Key by key: the same payload, score, life and queue."""
    await stock.enqueue_job("foobar", 1, b=2, _job_id="theirs", _job_try=3)
    await pool.enqueue_job("foobar", 1, b=2, _job_id="ours", _job_try=3)
    theirs, ours = [await Job(name, stock).info() for name in ("theirs", "ours")]
    for field in ("function", "args", "kwargs", "job_try"):
        assert getattr(ours, field) == getattr(theirs, field)
    assert abs((ours.enqueue_time - theirs.enqueue_time).total_seconds()) < 5
    assert abs(ours.score - theirs.score) < 5000
    assert ours.score == round(ours.enqueue_time.timestamp() * 1000)
    lives = [await stock.pttl(job_key_prefix + name) for name in ("theirs", "ours")]
    assert abs(lives[0] - lives[1]) < 5000
    assert keys(server) == {default_queue_name, job_key_prefix + "ours", job_key_prefix + "theirs"}


async def test_a_job_for_now_on_another_queue(pool, stock):
    job = await pool.enqueue_job("foobar", _queue_name="other", _expires=10)
    assert await stock.zscore("other", job.job_id) is not None
    assert 9000 < await stock.pttl(job_key_prefix + job.job_id) <= 10000


@pytest.mark.parametrize("defer", [{"_defer_by": -2}, {"_defer_by": timedelta(seconds=-2)}, {"_defer_by": 0}])
async def test_a_negative_or_no_delay_is_now(pool, stock, defer):
    job = await pool.enqueue_job("foobar", **defer)
    assert await job.status() is JobStatus.queued
    assert await stock.zscore(default_queue_name, job.job_id) <= timestamp_ms()


@pytest.mark.parametrize("ago", [1, 2 * DAY, 400 * DAY])
async def test_a_time_in_the_past_runs_now(pool, work, ago):
    """arq raises when it is longer ago than its payload would live."""
    work(foobar)
    job = await pool.enqueue_job("foobar", _defer_until=datetime.now(timezone.utc) - timedelta(seconds=ago))
    assert await job.result(timeout=40, poll_delay=0.01) == ((), {})


# ------------------------------------------------------------ later


async def test_a_deferred_job_waits_outside_of_arq(pool, server):
    job = await pool.enqueue_job("foobar", 1, _defer_by=60)
    assert isinstance(job, DelayJob)
    assert isinstance(job, Job)
    assert await job.status() is JobStatus.deferred
    assert keys(server) == set()
    waiting = await pool.delay_queue.get(job.job_id)
    assert waiting.meta == {"task": "foobar", "queue": default_queue_name}
    for key in server.client().keys("{*"):
        if key.endswith((b":due", b":entries")):
            assert server.client().ttl(key) == -1, "what waits has no time to live"


async def test_due_and_payload_are_exact(pool, work):
    seen = []

    async def look(ctx, *args, **kwargs):
        seen.append((ctx["job_id"], ctx["score"], ctx["job_try"], args, kwargs, timestamp_ms()))

    work(look)
    due = datetime.now(timezone.utc) + timedelta(milliseconds=300)
    job = await pool.enqueue_job("look", 1, "ü", b={"c": [None]}, _defer_until=due, _job_try=2)
    await job.result(timeout=40, poll_delay=0.01)
    [(job_id, score, job_try, args, kwargs, when)] = seen
    assert (job_id, job_try, args, kwargs) == (job.job_id, 2, (1, "ü"), {"b": {"c": [None]}})
    assert score == int(due.timestamp() * 1000), "arq shows the due time, as with a native job"
    assert when >= score


async def test_a_naive_time_is_local(pool, monkeypatch):
    import time

    monkeypatch.setenv("TZ", "America/St_Johns")
    time.tzset()
    try:
        naive = datetime.now().replace(microsecond=0) + timedelta(hours=1)
        job = await pool.enqueue_job("foobar", _defer_until=naive)
        assert (await job.info()).score == round(naive.timestamp() * 1000)
    finally:
        monkeypatch.undo()
        time.tzset()


async def test_an_aware_time_of_any_zone(pool):
    at = datetime(2200, 1, 1, 12, tzinfo=timezone(timedelta(hours=5, minutes=45)))
    job = await pool.enqueue_job("foobar", _defer_until=at)
    assert (await job.info()).score == round(at.timestamp() * 1000)


async def test_a_timedelta_and_a_float(pool):
    for defer in (timedelta(days=2, milliseconds=1), 2 * DAY + 0.001):
        job = await pool.enqueue_job("foobar", _defer_by=defer)
        left = (await job.info()).score - timestamp_ms()
        assert 2 * DAY * 1000 - 5000 < left <= 2 * DAY * 1000 + 1


async def test_custom_serializers(make_pool, work):
    options = {"job_serializer": msgpack.packb, "job_deserializer": functools.partial(msgpack.unpackb, raw=False)}
    pool = await make_pool(**options)
    work(foobar, **options)
    job = await pool.enqueue_job("foobar", 1, _defer_by=0.05)
    assert await job.result(timeout=40, poll_delay=0.01) == [[1], {}]
    job = await pool.enqueue_job("foobar", 1, a="b", _defer_by=50)
    assert (await job.info()).args == [1]
    assert [j.kwargs for j in await pool.queued_jobs()] == [{"a": "b"}]
    with pytest.raises(SerializationError, match="foobar"):
        await pool.enqueue_job("foobar", object(), _defer_by=1)


async def test_defaults_of_the_pool(make_pool, stock, work):
    pool = await make_pool(default_queue_name="other", expires_extra_ms=7_000)
    work(foobar, queue_name="another")  # any worker releases for every queue
    job = await pool.enqueue_job("foobar", _defer_by=0.05)
    await wait_until_async(lambda: stock.zscore("other", job.job_id))
    assert 5_000 < await stock.pttl(job_key_prefix + job.job_id) <= 7_000


async def test_a_large_payload(pool, work):
    """arq has no limit of its own, so neither have we."""
    work(foobar)
    text = "x" * 3_000_000
    job = await pool.enqueue_job("foobar", text, _defer_by=0.05)
    assert await job.result(timeout=40, poll_delay=0.05) == ((text,), {})


# ------------------------------------------------------------ expiry


async def test_expires_before_due_is_recorded_as_expired_at_its_due_time(pool, work):
    ran = []

    async def never(ctx):
        ran.append(ctx["job_id"])

    work(never)
    begin = timestamp_ms()
    job = await pool.enqueue_job("never", _defer_by=2, _expires=1)
    with pytest.raises(Exception, match="job expired"):
        await job.result(timeout=40, poll_delay=0.01)
    assert timestamp_ms() - begin >= 2000
    assert ran == []


async def test_expires_after_due(pool, work, stock):
    work(foobar, queue_name="nobody")
    job = await pool.enqueue_job("foobar", _defer_by=0.1, _expires=timedelta(seconds=60))
    await wait_until_async(lambda: stock.zscore(default_queue_name, job.job_id))
    assert 50_000 < await stock.pttl(job_key_prefix + job.job_id) <= 60_000


async def test_thirty_days_with_a_payload_life_of_a_day(make_pool, work, stock):
    """Its payload's life counts from its release. The month is skipped by an injected clock."""
    pool = await make_pool(expires_extra_ms=DAY * 1000)
    job = await pool.enqueue_job("foobar", 1, _defer_by=timedelta(days=30))
    assert await job.status() is JobStatus.deferred
    now = (await job.info()).score * 1000 - 1
    pool.delay_queue._clock = lambda: now
    assert await pool.delay_queue.claim() == []
    assert await stock.zscore(default_queue_name, job.job_id) is None
    now += 1000
    assert await pool.delay_queue.claim() == []  # a direct release hands nothing out
    assert DAY * 1000 - 10_000 < await stock.pttl(job_key_prefix + job.job_id) <= DAY * 1000
    assert await stock.zscore(default_queue_name, job.job_id) == (now - 999) // 1000
    # The worker's own clock is not there yet: bring the score back to today.
    await stock.zadd(default_queue_name, {job.job_id: timestamp_ms()})
    work(foobar, poll_delay=0.01)
    assert await job.result(timeout=40, poll_delay=0.01) == ((1,), {})


# ------------------------------------------------------------ one job an id


async def test_an_id_is_taken_while_waiting_queued_running_and_finished(pool, work):
    begun, go = asyncio.Event(), asyncio.Event()

    async def hold(ctx):
        begun.set()
        await go.wait()

    async def taken():
        """By a job for now, one for later, and one due long ago."""
        old = datetime.now(timezone.utc) - timedelta(days=3)
        tries = [{}, {"_defer_by": 10}, {"_defer_by": 0.001}, {"_defer_until": old}, {"_queue_name": "other"}]
        return [await pool.enqueue_job("hold", _job_id="one", **options) for options in tries] == [None] * 5

    job = await pool.enqueue_job("hold", _job_id="one", _defer_by=60)
    assert await taken()
    await job.release_now()
    assert await taken()
    worker = work(hold)
    await asyncio.wait_for(begun.wait(), 40)
    assert await job.status() is JobStatus.in_progress
    assert await taken()
    go.set()
    await job.result(timeout=40, poll_delay=0.01)
    assert await job.status() is JobStatus.complete
    assert await taken()
    assert worker.jobs_complete == 1


async def test_of_many_at_once_one_wins(pool):
    made = await asyncio.gather(
        *(pool.enqueue_job("foobar", i, _job_id="one", _defer_by=[None, 5][i % 2]) for i in range(40))
    )
    assert sum(job is not None for job in made) == 1
    assert len(await pool.queued_jobs()) == 1


async def test_of_two_clients_at_once_one_wins(make_pool, work):
    """Many ids, two clients that begin together, jobs for now and for later, workers that take them at once."""
    ran = Counter()

    async def note(ctx):
        ran[ctx["job_id"]] += 1

    pools = [await make_pool(), await make_pool()]
    worker = work(note, max_jobs=50)
    together = asyncio.Barrier(2) if hasattr(asyncio, "Barrier") else None

    async def client(pool, defers):
        made = []
        for i in range(100):
            if together is not None:
                await together.wait()
            defer = defers[i % len(defers)]
            made.append(await pool.enqueue_job("note", _job_id=f"job-{i}", _defer_by=defer) is not None)
        return made

    one, other = await asyncio.gather(client(pools[0], [None, 0.05, 0.001]), client(pools[1], [0.05, None]))
    assert [a + b for a, b in zip(one, other, strict=True)] == [1] * 100
    await wait_until_async(lambda: len(ran) == 100, timeout=40)
    await wait_until_async(lambda: worker.jobs_complete == 100, timeout=40)
    assert set(ran.values()) == {1}


async def test_of_two_clients_that_replace_at_once_one_job_is_left(make_pool):
    pools = [await make_pool(), await make_pool()]
    made = await asyncio.gather(
        *(
            pools[i % 2].enqueue_job(
                "foobar", i, _job_id="save", _defer_by=[60, None][i % 3 == 0], _if_exists="replace"
            )
            for i in range(60)
        )
    )
    assert all(made)
    [job] = await pools[0].queued_jobs()
    assert job.job_id == "save"


async def test_stock_arq_and_we_agree_on_what_is_queued(pool, stock):
    assert await stock.enqueue_job("foobar", _job_id="one") is not None
    assert await pool.enqueue_job("foobar", _job_id="one", _defer_by=1) is None
    assert await pool.enqueue_job("foobar", _job_id="two") is not None
    assert await stock.enqueue_job("foobar", _job_id="two") is None


# ------------------------------------------------------------ debounce


async def test_replace_while_it_waits(pool, work):
    work(foobar)
    for i in range(5):
        job = await pool.enqueue_job("foobar", i, _job_id="save", _defer_by=600, _if_exists="replace")
    await job.release_now()
    assert await job.result(timeout=40, poll_delay=0.01) == ((4,), {})
    assert [r.args for r in await pool.all_job_results()] == [(4,)]


async def test_replace_one_that_is_queued(pool, work, stock):
    await pool.enqueue_job("foobar", 1, _job_id="save")
    job = await pool.enqueue_job("foobar", 2, _job_id="save", _defer_by=0.2, _if_exists="replace")
    assert await stock.zcard(default_queue_name) == 0
    work(foobar)
    assert await job.result(timeout=40, poll_delay=0.01) == ((2,), {})


async def test_replace_one_that_has_finished(pool, work):
    work(foobar)
    first = await pool.enqueue_job("foobar", 1, _job_id="save")
    await first.result(timeout=40, poll_delay=0.01)
    again = await pool.enqueue_job("foobar", 2, _job_id="save", _if_exists="replace")
    assert await again.result(timeout=40, poll_delay=0.01) == ((2,), {})


async def test_one_that_runs_is_not_replaced(pool, stock):
    await pool.enqueue_job("foobar", 1, _job_id="save")
    await stock.set(in_progress_key_prefix + "save", b"1")
    assert await pool.enqueue_job("foobar", 2, _job_id="save", _defer_by=1, _if_exists="replace") is None
    assert (await Job("save", stock).info()).args == (1,)


async def test_a_worker_between_seeing_and_starting_a_job_lets_a_replaced_one_go(pool, stock):
    """arq watches the in-progress key, looks into the queue, then starts: a replacement in between must stop it, or it
    would find no payload and record that the job expired."""
    await pool.enqueue_job("foobar", 1, _job_id="save")
    async with stock.pipeline(transaction=True) as pipe:
        await pipe.watch(in_progress_key_prefix + "save")
        assert not await pipe.exists(in_progress_key_prefix + "save")
        assert await pipe.zscore(default_queue_name, "save")
        await pool.enqueue_job("foobar", 2, _job_id="save", _defer_by=30, _if_exists="replace")
        pipe.multi()
        pipe.psetex(in_progress_key_prefix + "save", 1000, b"1")
        with pytest.raises(Exception, match=r"[Ww]atch"):
            await pipe.execute()


# ------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"_defer_by": float("nan")}, ValueError, "_defer_by"),
        ({"_defer_by": float("inf")}, ValueError, "_defer_by"),
        ({"_defer_by": True}, TypeError, "_defer_by"),
        ({"_defer_by": "5"}, TypeError, "_defer_by"),
        ({"_defer_by": 1e12}, ValueError, "_defer_by"),
        ({"_defer_until": "tomorrow"}, TypeError, "_defer_until"),
        ({"_defer_until": datetime(2300, 1, 1, tzinfo=timezone.utc)}, ValueError, "_defer_until"),
        ({"_defer_by": 1, "_expires": -1}, ValueError, "_expires"),
        ({"_defer_by": 1, "_expires": float("nan")}, ValueError, "_expires"),
        ({"_defer_by": 1, "_if_exists": "add"}, ValueError, "_if_exists"),
        ({"_defer_by": 1, "_defer_until": datetime.now(timezone.utc)}, RuntimeError, "defer_until"),
    ],
)
async def test_bad_arguments_name_the_argument(pool, options, error, says):
    with pytest.raises(error, match=says):
        await pool.enqueue_job("foobar", **options)
    assert await pool.queued_jobs() == []


async def test_redis_cluster_is_refused(start_redis):
    # A cluster's own port is 10,000 higher.
    port = next(port for port in iter(free_port, None) if port < 55_000)
    server = start_redis(port=port, args=("--cluster-enabled", "yes"))
    with pytest.raises(RuntimeError, match="Redis Cluster"):
        await create_pool(RedisSettings(port=server.port))
    pool = DelayArqRedis(port=server.port)
    with pytest.raises(RuntimeError, match="Redis Cluster"):
        await pool.enqueue_job("foobar", _defer_by=1)
    await pool.aclose()


async def test_a_redis_that_is_gone(settings, server):
    pool = await create_pool(settings, delay_settings=DelaySettings(timeout=1.0))
    server.kill()
    with pytest.raises(RedisUnavailable):
        await pool.enqueue_job("foobar", _defer_by=1)
    await pool.aclose()


async def test_a_redis_that_hangs_is_noticed(settings, server):
    pool = await create_pool(settings, delay_settings=DelaySettings(timeout=0.5))
    with server.paused(), pytest.raises(RedisUnavailable):
        await pool.enqueue_job("foobar", _defer_by=1)
    await pool.aclose()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"redis": 5}, "redis"),
        ({"name": ""}, "name"),
        ({"shards": 0}, "shards"),
        ({"keep_aborted": -1}, "keep_aborted"),
        ({"lease": 0}, "lease"),
        ({"timeout": 0}, "timeout"),
    ],
)
def test_bad_settings_name_the_field(options, says):
    with pytest.raises((TypeError, ValueError), match=says):
        DelaySettings(**options)


def test_what_is_no_settings():
    with pytest.raises(TypeError, match="delay_settings"):
        DelayArqRedis(delay_settings={"name": "x"})
    with pytest.raises(TypeError, match="create_pool"):
        DelayArqRedis.of(object())
    with pytest.raises(TypeError, match="DelayArqRedis"):
        DelayJob("id", ArqRedis())


async def test_the_result_key_is_untouched_by_a_second_release(pool, stock):
    """Another client ran the id meanwhile, one that does not know of us: ours is not run again."""
    await pool.enqueue_job("foobar", _job_id="one", _defer_by=0.01)
    await stock.set(result_key_prefix + "one", json.dumps("theirs"))
    await asyncio.sleep(0.02)
    await pool.delay_queue.claim()
    assert await stock.zscore(default_queue_name, "one") is None
    assert await pool.waiting("one") is None
