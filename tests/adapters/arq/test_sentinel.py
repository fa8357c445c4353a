"""arq on a primary that a Sentinel watches, and a failover while jobs wait."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
import redis
from arq import Retry
from arq.connections import RedisSettings
from arq.constants import default_queue_name
from arq.jobs import JobStatus

from delayadapters import Outcome
from delayadapters.arq import DelaySettings, release_jobs
from delaytests import RedisServer, wait_until, wait_until_async
from delaytests.topology import Sentinel

DUE = "{delayadapters:arq:0}:due"


@pytest.fixture
def primary(start_redis) -> RedisServer:
    return start_redis(args=("--repl-diskless-sync-delay", "0"))


@pytest.fixture
def replica(primary, start_redis) -> RedisServer:
    made = start_redis(args=("--replicaof", "127.0.0.1", str(primary.port)))
    wait_until(lambda: made.client().info("replication")["master_link_status"] == "up", timeout=40)
    return made


@pytest.fixture
def sentinel(primary, request):
    if "replica" in request.fixturenames:
        request.getfixturevalue("replica")  # it would hear of a later one within 10 s only
    with Sentinel(primary, primary.binary) as watcher:
        yield watcher


@pytest.fixture
def settings(sentinel) -> RedisSettings:
    return RedisSettings(host=[("127.0.0.1", sentinel.port)], sentinel=True, sentinel_master=sentinel.name)


@pytest.fixture(params=["arq's own", "a Sentinel's", "arq's own is a Sentinel's, another Redis"])
def delay_settings(request, settings, start_redis):
    if request.param == "arq's own":
        return DelaySettings()
    return DelaySettings(redis=settings if request.param == "a Sentinel's" else start_redis().url)


async def add(ctx, a):
    return a + 1


async def flaky(ctx):
    if ctx["job_try"] < 3:
        raise Retry(defer=0.05)
    return ctx["job_try"]


async def test_deferred_jobs_retries_and_aborts(make_pool, work, delay_settings):
    pool = await make_pool(delay_settings=delay_settings)
    assert pool.delay_direct is (delay_settings.redis is None), "which primary a Sentinel names is not known beforehand"
    work(add, flaky, delay_settings=delay_settings)
    job = await pool.enqueue_job("add", 1, _defer_by=0.2)
    assert await job.result(timeout=40, poll_delay=0.02) == 2
    assert await (await pool.enqueue_job("flaky", _defer_by=0.02)).result(timeout=40, poll_delay=0.02) == 3
    gone = await pool.enqueue_job("add", 1, _defer_by=600)
    assert await gone.status() is JobStatus.deferred
    assert await gone.abort() is True
    assert (await pool.delay_queue.stats()).waiting == 0


async def test_a_failover_while_jobs_wait(make_pool, work, primary, replica, sentinel):
    """A client and a release loop live on and find the new primary by themselves. (A worker that is just asking for
    jobs then ends with redis-py's error, as arq's does.)"""
    pool = await make_pool()
    releasing = asyncio.create_task(release_jobs(await make_pool()))
    jobs = [await pool.enqueue_job("add", i, _defer_by=600) for i in range(20)]
    wait_until(lambda: replica.client().zcard(DUE) == 20, timeout=40)
    with redis.Redis(port=sentinel.port) as ask:

        def begun():
            try:
                return ask.execute_command("SENTINEL", "FAILOVER", sentinel.name)
            except redis.ResponseError as error:  # it has not heard of the replica yet
                raise AssertionError(str(error)) from error

        def over():
            return ask.execute_command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", sentinel.name)[1] == b"%d" % replica.port

        await wait_until_async(begun, timeout=40, interval=0.2)
        await wait_until_async(over, timeout=40, interval=0.05)
    primary.kill()
    for job in jobs:
        assert await job.release_now() is Outcome.RESCHEDULED
    await wait_until_async(lambda: replica.client().zcard(default_queue_name) == 20, timeout=40)
    assert replica.client().zcard(DUE) == 0
    worker = work(add)
    assert [await job.result(timeout=40, poll_delay=0.05) for job in jobs] == list(range(1, 21))
    assert worker.jobs_complete == 20, "each once"
    assert not releasing.done()
    releasing.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await releasing
