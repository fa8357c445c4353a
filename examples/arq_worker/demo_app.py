"""The demo's worker; where everything is comes from the environment that ``demo.py`` sets."""

from __future__ import annotations

import os

from arq import func
from arq.connections import RedisSettings
from demo_kit.ledger import note_execution, note_ready

from delayadapters.arq import delayed

REDIS = RedisSettings.from_dsn(os.environ.get("DEMO_REDIS", "redis://localhost:6379/0"))


async def task(ctx: dict, number: int, due: float) -> None:
    note_execution(number, due)


async def ready(ctx: dict) -> None:
    note_ready()


@delayed
class WorkerSettings:
    # A job that ran when its worker was killed runs again 10 s after its time is up: arq's rule, hence the short time.
    functions = (func(task, timeout=1),)
    redis_settings = REDIS
    on_startup = ready
    job_timeout = 1
    max_jobs = 20
