"""Taking over what arq has deferred itself."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest
from arq.constants import default_queue_name, in_progress_key_prefix, job_key_prefix, retry_key_prefix
from arq.jobs import JobStatus
from arq.utils import timestamp_ms

from delayadapters.arq import DelayJob, migrate
from delaytests import wait_until_async


async def add(ctx, a, b=1):
    return a + b


async def fill(stock, count, **options):
    for i in range(count):
        await stock.enqueue_job("add", i, _job_id=f"job-{i}", **{"_defer_by": 600 + i, **options})


async def test_dry_run_changes_nothing(pool, stock, server):
    await fill(stock, 5)
    before = {key: server.client().dump(key) for key in server.client().keys("*")}
    report = await migrate(pool)
    assert (report.dry_run, report.found, report.moved, report.gone) == (True, 5, 5, 0)
    assert (report.last_due - report.first_due).total_seconds() == pytest.approx(4, abs=2)
    assert {key: server.client().dump(key) for key in server.client().keys("*")} == before


async def test_jobs_move_with_due_time_payload_and_id(pool, stock, work):
    await fill(stock, 3)
    scores = {f"job-{i}": await stock.zscore(default_queue_name, f"job-{i}") for i in range(3)}
    report = await migrate(pool, dry_run=False)
    assert (report.found, report.moved) == (3, 3)
    assert await stock.zcard(default_queue_name) == 0
    assert not await stock.exists(*(job_key_prefix + name for name in scores))
    assert {job.job_id: job.score for job in await pool.queued_jobs()} == scores
    again = await migrate(pool, dry_run=False)
    assert (again.found, again.moved) == (0, 0)
    work(add)
    job = DelayJob("job-2", pool)
    await job.release_now()
    assert await job.result(timeout=40, poll_delay=0.01) == 3


async def test_two_at_once_move_each_job_once(make_pool, stock):
    await fill(stock, 300)
    pools = [await make_pool() for _ in range(3)]
    reports = await asyncio.gather(*(migrate(pool, dry_run=False) for pool in pools))
    assert sum(report.moved for report in reports) == 300
    assert (await pools[0].delay_queue.stats()).waiting == 300


async def test_what_is_left_alone(pool, stock, make_pool):
    await stock.enqueue_job("add", 1, _job_id="now")
    await stock.enqueue_job("add", 1, _job_id="soon", _defer_by=2)
    await fill(stock, 3)
    await stock.delete(job_key_prefix + "job-0")
    await stock.set(job_key_prefix + "job-1", b"not a pickle")
    await stock.set(in_progress_key_prefix + "job-2", b"1")
    report = await migrate(pool, dry_run=False)
    assert (report.found, report.moved, report.gone) == (3, 0, 1)
    assert (report.lost, report.unreadable) == (["job-0"], ["job-1"])
    assert await stock.zcard(default_queue_name) == 5


async def test_a_job_that_changes_while_we_look_is_left_alone(pool, stock, monkeypatch):
    """Aborted, or enqueued anew, between the look and the move."""
    await fill(stock, 2)
    import delayadapters.arq.migration as module

    original = module._take_over

    async def meddle(redis, native, *args):
        if native.job_id == "job-0":
            await stock.zrem(default_queue_name, "job-0")
        else:
            await stock.set(job_key_prefix + "job-1", b"another payload")
        return await original(redis, native, *args)

    monkeypatch.setattr(module, "_take_over", meddle)
    report = await migrate(pool, dry_run=False)
    assert (report.moved, report.gone) == (0, 2)
    assert (await pool.delay_queue.stats()).waiting == 0
    assert await stock.get(job_key_prefix + "job-1") == b"another payload"


async def test_expiry_and_tries_are_kept(pool, stock):
    await stock.enqueue_job("add", 1, _job_id="usual", _defer_by=100)
    await stock.enqueue_job("add", 1, _job_id="dies", _defer_by=100, _expires=200)
    await stock.enqueue_job("add", 1, _job_id="retry", _defer_by=100)
    await stock.set(retry_key_prefix + "retry", 3)
    await migrate(pool, dry_run=False)
    for job_id in ("usual", "dies", "retry"):
        await pool.delay_queue.release_now(job_id)
    await pool.delay_queue.claim()
    assert 86_000_000 < await stock.pttl(job_key_prefix + "usual") <= 86_400_000
    assert 190_000 < await stock.pttl(job_key_prefix + "dies") <= 200_000
    assert await stock.get(retry_key_prefix + "retry") == b"3"


async def test_progress_and_another_queue(pool, stock):
    await fill(stock, 450, _queue_name="other")
    seen = []
    report = await migrate(
        pool, queue_name="other", dry_run=False, progress=lambda done, total: seen.append((done, total))
    )
    assert report.moved == 450
    assert seen == [(200, 450), (400, 450), (450, 450)]
    assert await DelayJob("job-7", pool, _queue_name="other").status() is JobStatus.deferred
    assert len(await pool.queued_jobs(queue_name="other")) == 450


async def test_while_workers_run(pool, stock, work):
    """Stock workers go on starting what becomes due; whoever has a job runs it, once."""
    from arq.worker import Worker

    ran = []

    async def note(ctx):
        ran.append(ctx["job_id"])

    work(note, cls=Worker, poll_delay=0.01)
    work(note)
    begin = timestamp_ms()
    for i in range(100):
        await stock.enqueue_job("note", _job_id=f"job-{i}", _defer_by=0.3 + 0.005 * i)
    while timestamp_ms() < begin + 600:
        await migrate(pool, dry_run=False, margin=0)
        await asyncio.sleep(0.01)
    await wait_until_async(lambda: len(ran) >= 100, timeout=60)
    assert sorted(ran) == sorted(f"job-{i}" for i in range(100))


async def test_the_command(pool, stock, server):
    await fill(stock, 3)
    await stock.delete(job_key_prefix + "job-0")

    async def run(*options):
        command = [str(Path(sys.executable).parent / "delayadapters"), "arq-migrate", "jobs.Plain", *options]
        env = os.environ | {"REDIS_PORT": str(server.port)}
        return await asyncio.to_thread(
            subprocess.run,
            command,
            cwd=Path(__file__).parent / "app",
            env=env,
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )

    dry = await run()
    assert "3 jobs deferred by arq; 2 would be moved" in dry.stdout
    assert "1 have lost their payload" in dry.stdout
    assert "--yes moves them" in dry.stdout
    assert await stock.zcard(default_queue_name) == 3
    done = await run("--yes")
    assert "2 moved" in done.stdout
    assert await stock.zcard(default_queue_name) == 1
