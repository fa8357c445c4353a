"""The end of a worker, at every step of a job: what is done stays done, what was not begun is free, the hooks run.

Jobs have one try here: an end that used it up would lose them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal

import pytest
from arq import func
from arq.constants import default_queue_name, in_progress_key_prefix, retry_key_prefix
from arq.jobs import JobStatus

from delayadapters.arq import DelayWorker


class Ending:
    """A worker in this process, told to end as a signal tells it, and what it has done."""

    def __init__(self, settings, cls=DelayWorker, **options):
        self.ran, self.ended = [], 0
        self.worker = cls(
            self.functions, redis_settings=settings, poll_delay=20, max_tries=1, on_shutdown=self._shutdown, **options
        )
        self.running = asyncio.create_task(self.worker.async_run())

    @property
    def functions(self):
        async def add(ctx, a, b=1):
            self.ran.append(ctx["job_id"])
            return a + b

        return [func(add, name="add")]

    async def _shutdown(self, ctx):
        self.ended += 1

    def tell(self):
        self.worker.handle_sig(signal.SIGTERM)

    async def over(self):
        """As ``run()`` ends it."""
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(self.running, 40)
        await asyncio.wait_for(self.worker.close(), 40)
        assert self.ended == 1
        assert self.worker.releaser is None
        assert all(task.done() for task in self.worker.tasks.values())

    async def leaves_free(self, pool, job, settings):
        """The job was not begun, and a next worker runs it at once."""
        assert job.job_id not in self.ran
        assert not await pool.exists(in_progress_key_prefix + job.job_id, retry_key_prefix + job.job_id)
        assert await job.status() is JobStatus.queued
        following = DelayWorker(self.functions, redis_settings=settings, handle_signals=False, burst=True, max_tries=1)
        await asyncio.wait_for(following.async_run(), 20)
        await following.close()
        assert self.ran.count(job.job_id) == 1
        assert await job.result(timeout=1, poll_delay=0.01) == 2

    async def leaves_done(self, pool, job):
        assert not await pool.exists(in_progress_key_prefix + job.job_id)
        assert await job.status() is JobStatus.complete
        assert await pool.zcard(default_queue_name) == 0
        assert self.ran.count(job.job_id) <= 1


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("step", ["start_jobs", "run_job", "finish_job", "finish_failed_job"])
async def test_while_redis_has_yet_to_answer(server, settings, pool, step, times, caplog):
    caplog.set_level(logging.WARNING, "arq.worker")
    armed, reached = [], asyncio.Event()

    class Interrupted(DelayWorker):
        pass

    async def interrupted(self, *args):
        if armed and not reached.is_set():
            reached.set()
            server.pause()
        await getattr(DelayWorker, step)(self, *args)

    setattr(Interrupted, step, interrupted)
    ending = Ending(settings, Interrupted)
    first = await pool.enqueue_job("add", 1)  # Redis knows the scripts then
    await first.result(timeout=40, poll_delay=0.01)
    armed.append(True)
    # It may be begun before we hear that it is stored.
    enqueuing = asyncio.create_task(pool.enqueue_job("unknown" if step == "finish_failed_job" else "add", 1))
    await reached.wait()
    await asyncio.sleep(0.1)  # the request is on its way
    for _ in range(times):
        ending.tell()
        await asyncio.sleep(0.1)
    waits = not ending.running.done()
    server.resume()
    assert waits or times == 2, "it waits for Redis"
    await ending.over()
    job = await enqueuing
    if step in ("finish_job", "finish_failed_job"):
        await ending.leaves_done(pool, job)
    else:
        await ending.leaves_free(pool, job, settings)
    assert "could not be written" not in caplog.text


@pytest.mark.parametrize("hook", ["on_job_start", "on_job_end", "after_job_end"])
async def test_in_a_hook(settings, pool, hook):
    reached, go = asyncio.Event(), asyncio.Event()

    async def slow(ctx):
        if not reached.is_set():
            reached.set()
            await go.wait()

    ending = Ending(settings, **{hook: slow})
    job = await pool.enqueue_job("add", 1)
    await reached.wait()
    ending.tell()
    await asyncio.sleep(0.05)
    go.set()
    await ending.over()
    if hook == "on_job_start":
        await ending.leaves_free(pool, job, settings)
    else:
        await ending.leaves_done(pool, job)
        assert await job.result(timeout=1, poll_delay=0.01) == 2


async def test_before_the_first_step(settings, pool):
    """The signal comes between the making of the job's task and its start."""

    class Interrupted(DelayWorker):
        async def _mark(self, *args):
            found = await super()._mark(*args)
            if found:
                self.loop.call_soon(self.handle_sig, signal.SIGTERM)
            return found

    ending = Ending(settings, Interrupted)
    job = await pool.enqueue_job("add", 1)
    await ending.over()
    await ending.leaves_free(pool, job, settings)


async def test_while_the_function_runs(settings, pool):
    """arq's rule: it is cancelled, and runs again."""
    reached, times = asyncio.Event(), []

    async def slow(ctx):
        times.append(ctx["job_try"])
        if len(times) == 1:
            reached.set()
            await asyncio.sleep(60)
        return "done"

    worker = DelayWorker([func(slow, name="slow")], redis_settings=settings, poll_delay=20)
    running = asyncio.create_task(worker.async_run())
    job = await pool.enqueue_job("slow")
    await reached.wait()
    worker.handle_sig(signal.SIGTERM)
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(running, 40)
    await asyncio.wait_for(worker.close(), 40)
    assert not await pool.exists(in_progress_key_prefix + job.job_id)
    worker = DelayWorker([func(slow, name="slow")], redis_settings=settings, handle_signals=False, burst=True)
    await asyncio.wait_for(worker.async_run(), 20)
    await worker.close()
    assert await job.result(timeout=1, poll_delay=0.01) == "done"
    assert times == [1, 2]


async def test_before_the_worker_has_begun(settings):
    reached = asyncio.Event()

    async def up(ctx):
        reached.set()
        await asyncio.sleep(60)

    worker = DelayWorker([func(up, name="up")], redis_settings=settings, handle_signals=False, on_startup=up)
    running = asyncio.create_task(worker.async_run())
    await reached.wait()
    await asyncio.wait_for(worker.close(), 40)
    with pytest.raises(asyncio.CancelledError):
        await running
    assert (worker.releaser, worker._pool) == (None, None)


async def test_a_closed_worker_that_had_a_job_in_hand_runs_again(settings, pool):
    """As ``--watch`` has it: what the end cancelled is not met again."""
    reached = asyncio.Event()

    async def slow(ctx):
        reached.set()
        await asyncio.sleep(0 if ctx["job_try"] > 1 else 60)

    worker = DelayWorker([func(slow, name="slow")], redis_settings=settings, handle_signals=False, poll_delay=20)
    job = await pool.enqueue_job("slow")
    for _ in range(2):
        reached.clear()
        running = asyncio.create_task(worker.async_run())
        await reached.wait()
        if await job.status() is not JobStatus.complete and worker.jobs_retried:
            await job.result(timeout=20, poll_delay=0.01)
        await asyncio.wait_for(worker.close(), 40)
        with contextlib.suppress(asyncio.CancelledError):
            await running
    assert await job.status() is JobStatus.complete
