"""The worker of a small shop. Run it with ``delayadapters arq jobs.WorkerSettings``."""

from __future__ import annotations

import logging
import os

from arq import Retry
from arq.connections import RedisSettings

from delayadapters.arq import delayed

log = logging.getLogger("arq.shop")
REDIS = RedisSettings.from_dsn(os.environ.get("REDIS_URL", "redis://localhost:6379/0"))


async def remind(ctx: dict, order: int) -> str:
    """Sent a while after an order was left unpaid; cancelled when it is paid."""
    await ctx["redis"].rpush("shop:sent", f"reminder {order}")
    return f"order {order} reminded"


async def charge(ctx: dict, order: int) -> str:
    """Asks the bank, which is down for the first two times. The pauses wait in Redis, not in this process."""
    await ctx["redis"].rpush("shop:sent", f"charge {order} try {ctx['job_try']}")
    if ctx["job_try"] < 3:
        raise Retry(defer=0.2 * 2 ** ctx["job_try"])
    # A follow-up from inside a job: ctx["redis"] defers through the delay queue, too.
    await ctx["redis"].enqueue_job("thank", order, _defer_by=0.5)
    return f"order {order} charged"


async def thank(ctx: dict, order: int) -> None:
    await ctx["redis"].rpush("shop:sent", f"thanks {order}")


async def reindex(ctx: dict, product: str, price: int) -> None:
    """Costly, so it runs once things have been quiet for a moment, with the latest price."""
    await ctx["redis"].rpush("shop:sent", f"index {product}={price}")


async def startup(ctx: dict) -> None:
    log.info("the shop is open")


@delayed
class WorkerSettings:
    functions = (remind, charge, thank, reindex)
    redis_settings = REDIS
    on_startup = startup
    job_timeout = 30
