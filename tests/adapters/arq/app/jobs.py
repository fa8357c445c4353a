"""Jobs of the tests that run workers as processes."""

from __future__ import annotations

import asyncio
import os

from arq import Retry
from arq.connections import RedisSettings

from delayadapters.arq import DelaySettings, delayed


async def record(ctx, *args):
    await ctx["redis"].rpush("ledger", f"{ctx['job_id']} {ctx['job_try']}")
    return "done"


async def slow(ctx, seconds):
    await record(ctx)
    await asyncio.sleep(seconds)
    await ctx["redis"].rpush("ledger", f"{ctx['job_id']}-end {ctx['job_try']}")


async def flaky(ctx, times, defer):
    await record(ctx)
    if ctx["job_try"] < times:
        raise Retry(defer=defer)
    return ctx["job_try"]


async def chain(ctx, left):
    """Defers its successor from inside a worker."""
    await record(ctx)
    if left:
        await ctx["redis"].enqueue_job("chain", left - 1, _defer_by=0.1, _job_id=f"chain-{left - 1}")


async def startup(ctx):
    await ctx["redis"].rpush("ledger", f"startup-{type(ctx['redis']).__name__} 0")


async def shutdown(ctx):
    await ctx["redis"].rpush("ledger", "shutdown 0")


REDIS = RedisSettings(port=int(os.environ.get("REDIS_PORT", "6379")))


class Plain:
    """Without @delayed."""

    functions = [record, slow, flaky, chain]
    redis_settings = REDIS
    max_jobs = 50
    job_completion_wait = int(os.environ.get("COMPLETION_WAIT", "0"))
    max_tries = 10


@delayed
class Settings:
    functions = [record, slow, flaky, chain]
    redis_settings = REDIS
    max_jobs = 50
    max_tries = 10
    on_startup = startup
    on_shutdown = shutdown


AsDict = delayed({"functions": [record], "redis_settings": REDIS, "on_startup": startup})


@delayed(delay_settings=DelaySettings(redis=os.environ.get("DELAY_URL"), lease=1.0))
class Elsewhere:
    functions = [record, flaky]
    redis_settings = REDIS
    max_tries = 10


LOG = {
    "version": 1,
    "handlers": {"custom": {"class": "logging.StreamHandler", "formatter": "custom"}},
    "formatters": {"custom": {"format": "CUSTOM %(message)s"}},
    "loggers": {"arq": {"handlers": ["custom"], "level": "INFO"}},
}
