"""Processes killed with SIGKILL, and what is left: every job accounted for."""

from __future__ import annotations

import asyncio
import collections
import time

import pytest
from arq.connections import RedisSettings
from arq.constants import default_queue_name, in_progress_key_prefix
from arq.utils import timestamp_ms

from delayadapters import DelayQueue, Outcome
from delayadapters.arq import DelaySettings, create_pool
from delaytests import wait_until, wait_until_async

JOBS = 500


async def defer(port, count, function="record", *args, settings=None, **options):
    settings = settings or DelaySettings(timeout=60)
    pool = await create_pool(RedisSettings(port=port), delay_settings=settings)
    for at in range(0, count, 100):
        await asyncio.gather(
            *(pool.enqueue_job(function, *args, _job_id=f"job-{i}", **options) for i in range(at, min(count, at + 100)))
        )
    await pool.aclose()


def bring_forward(server, seconds=0.5):
    """Deferred for long, so that none begins too soon on a busy machine, they are due in ``seconds`` now."""
    with DelayQueue.from_url(f"redis://127.0.0.1:{server.port}/0", name="delayadapters:arq", timeout=60) as queue:
        for i in range(JOBS):
            assert queue.reschedule(f"job-{i}", delay=seconds) is Outcome.RESCHEDULED


def test_worker_killed_while_500_are_deferred(server, start_worker, ledger):
    first = start_worker().wait_ready()
    asyncio.run(defer(server.port, JOBS, _defer_by=600))
    first.kill()
    assert ledger.ids() == ["startup-DelayArqRedis"], "all were still deferred"
    start_worker().wait_ready()
    begin = time.time()
    bring_forward(server)
    wait_until(lambda: sum(name.startswith("job-") for name in ledger.ids()) >= JOBS, timeout=90)
    counts = collections.Counter(name for name in ledger.ids() if name.startswith("job-"))
    assert counts == {f"job-{i}": 1 for i in range(JOBS)}
    assert time.time() - begin >= 0.5


def test_redis_killed_and_back_with_its_append_only_file(start_redis, start_worker, tmp_path):
    server = start_redis(aof="always")
    worker = start_worker(REDIS_PORT=str(server.port)).wait_ready()
    asyncio.run(defer(server.port, JOBS, _defer_by=600))
    server.kill()
    worker.kill()  # arq's worker does not outlive its Redis
    server.start()
    assert server.client().zcard("{delayadapters:arq:0}:due") == JOBS
    start_worker(REDIS_PORT=str(server.port)).wait_ready()
    bring_forward(server)

    def ran():
        return [row.split()[0].decode() for row in server.client().lrange("ledger", 0, -1) if row.startswith(b"job-")]

    wait_until(lambda: len(ran()) >= JOBS, timeout=90)
    assert sorted(ran()) == sorted(f"job-{i}" for i in range(JOBS))


def test_workers_killed_at_any_moment_lose_nothing(server, start_worker, ledger):
    """Killed again and again while jobs are released, started and retried. A job that was running is run again when its
    in-progress key passes, which is arq's rule; no other runs twice."""
    asyncio.run(defer(server.port, 120, "flaky", 2, 0.2, _defer_by=0.5))
    client = server.client()
    killed = 0
    deadline = time.monotonic() + 60
    running_at_kill = set()
    while time.monotonic() < deadline:
        done = {row.split()[0] for row in ledger.runs() if row.startswith("job-") and int(row.split()[1]) >= 2}
        if len(done) == 120 and not client.zcard(default_queue_name):
            break
        worker = start_worker("Plain").wait_ready()
        time.sleep(0.05 + 0.1 * killed)
        if killed < 6:
            worker.kill()
            killed += 1
            running_at_kill |= {key.decode().removeprefix(in_progress_key_prefix) for key in running(client)}
            for key in running(client):
                client.delete(key)  # as if job_timeout + 10 s had passed
        else:
            wait_until(lambda: not left(client), timeout=90)
            break
    assert killed >= 1, "six times on a quiet machine"
    runs = collections.Counter(row for row in ledger.runs() if row.startswith("job-"))
    assert {row.split()[0] for row in runs} == {f"job-{i}" for i in range(120)}
    for i in range(120):
        tries = sorted(int(row.split()[1]) for row in runs.elements() if row.split()[0] == f"job-{i}")
        if f"job-{i}" not in running_at_kill:
            assert tries == [1, 2], f"job-{i}: {tries}"
        assert tries[-1] >= 2


def running(client):
    return client.keys(in_progress_key_prefix + "*")


def left(client):
    return client.zcard(default_queue_name) + client.zcard("{delayadapters:arq:0}:due")


def test_a_chain_of_jobs_that_defer_each_other_outlives_its_workers(server, start_worker, ledger):
    asyncio.run(defer(server.port, 1, "chain", 12, _defer_by=0.1))
    wanted = {"job-0", *(f"chain-{i}" for i in range(12))}
    for _ in range(3):
        worker = start_worker().wait_ready()
        time.sleep(0.3)
        worker.kill()
        for key in running(server.client()):
            server.client().delete(key)
    start_worker().wait_ready()
    wait_until(lambda: wanted <= set(ledger.ids()), timeout=90)


# ------------------------------------------------------------ on two Redis: between any two steps


@pytest.fixture
def other(start_redis):
    return start_redis()


def test_a_releaser_killed_with_leases_in_hand(server, other, start_worker, ledger):
    """The delay queue is elsewhere, so a batch is leased: what was not acked comes back, under the same ids."""
    settings = DelaySettings(redis=other.url, lease=1.0, timeout=60)
    asyncio.run(defer(server.port, JOBS, settings=settings, _defer_by=1.0))
    workers = [start_worker("Elsewhere", DELAY_URL=other.url).wait_ready() for _ in range(2)]
    wait_until(lambda: len(ledger.ids()) > 5, timeout=90)
    workers[0].kill()
    for key in running(server.client()):
        server.client().delete(key)
    wait_until(lambda: len(set(ledger.ids())) == JOBS, timeout=90)
    doubled = [name for name, count in collections.Counter(ledger.ids()).items() if count > 1]
    assert len(doubled) <= 60, "only what ran at the moment of the kill"


async def test_between_storing_a_retry_and_leaving_arqs_queue(server, other, make_pool, work, monkeypatch):
    """Two Redis, two steps. A crash between them leaves the job in both: run again under one id, not lost."""
    settings = DelaySettings(redis=other.url, timeout=60)
    pool = await make_pool(delay_settings=settings)
    from arq import Retry

    from delayadapters.arq import DelayArqRedis

    class Killed(BaseException):
        pass

    tries = []
    original = DelayArqRedis.store

    async def store_and_die(self, *args):
        await original(self, *args)
        monkeypatch.undo()
        raise Killed  # nothing of the second step happens

    async def flaky(ctx):
        tries.append(ctx["job_try"])
        if ctx["job_try"] == 1:
            monkeypatch.setattr(DelayArqRedis, "store", store_and_die)
            raise Retry(defer=600)
        return "ok"

    worker = work(flaky, delay_settings=settings)
    job = await pool.enqueue_job("flaky", _job_id="one")
    await wait_until_async(lambda: pool.waiting("one"))
    assert await pool.zscore(default_queue_name, "one") is not None, "in both"
    with pytest.raises(Killed):
        await asyncio.gather(*worker.tasks.values())
    worker.tasks.clear()
    await pool.delete(in_progress_key_prefix + "one")  # as if its time had passed
    worker._be_told()
    assert await job.result(timeout=40, poll_delay=0.02) == "ok"
    await job.release_now()

    async def released():
        return await pool.waiting("one") is None

    await wait_until_async(released, timeout=40)
    await asyncio.sleep(0.1)
    assert tries == [1, 2], "its result kept the second copy from running"


# ------------------------------------------------------------ a lost answer


async def test_a_repeated_enqueue_answers_as_the_first(settings, make_proxy, server):
    """With a client that repeats commands, a lost answer must not turn into None."""
    from redis.asyncio.retry import Retry as RedisRetry
    from redis.backoff import NoBackoff
    from redis.exceptions import ConnectionError as RedisConnectionError

    from delayadapters.arq import DelayArqRedis

    pool = DelayArqRedis(
        port=server.port, retry=RedisRetry(NoBackoff(), 3), retry_on_error=[RedisConnectionError], retry_on_timeout=True
    )
    sent = []
    connection_class = pool.connection_pool.connection_class

    class Flaky(connection_class):
        async def read_response(self, *args, **kwargs):
            answer = await super().read_response(*args, **kwargs)
            if sent and sent.pop():
                await self.disconnect(nowait=True)
                raise RedisConnectionError("the answer was lost")
            return answer

    await pool.enqueue_job("record", _job_id="warm-up")
    pool.connection_pool.connection_class = Flaky
    await pool.connection_pool.disconnect()
    pool.connection_pool.reset()
    for options in ({}, {"_defer_by": 60}):
        await pool.ping()
        sent.append(True)
        assert await pool.enqueue_job("record", _job_id=f"one{len(options)}", **options) is not None
        assert await pool.enqueue_job("record", _job_id=f"one{len(options)}", **options) is None
    await pool.aclose()


async def test_a_repeated_abort_answers_as_the_first(pool):
    from delayadapters.redis.aio import execute
    from delayadapters.redis.commands import Call

    job = await pool.enqueue_job("record", _defer_by=60)
    calls = []
    original = type(pool).on_arq

    async def twice(self, call: Call):
        calls.append(call)
        await execute(self, call)
        return await original(self, call)

    type(pool).on_arq = twice
    try:
        assert await job.abort() is True
    finally:
        type(pool).on_arq = original
    assert calls
    assert timestamp_ms()
