"""arq's deferred jobs on a delay queue in Redis: on time, with their payload, cancellable.

::

    from delayadapters.arq import create_pool, delayed

    redis = await create_pool()                          # in place of arq's
    await redis.enqueue_job("send_email", 7, _defer_by=60)

    @delayed
    class WorkerSettings:
        functions = [send_email]

Run the worker with ``delayadapters arq module.WorkerSettings`` (in place of ``arq …``): then delays are milliseconds
late, and ``Retry(defer=…)`` waits in the delay queue too. See docs/how-to/arq.md.
"""

from __future__ import annotations

from .client import DelayArqRedis, create_pool
from .decorator import delayed
from .job import DelayJob
from .migration import MigrationReport, migrate
from .settings import DelaySettings
from .worker import DelayWorker, create_worker, release_jobs, run_worker

__all__ = [
    "DelayArqRedis",
    "DelayJob",
    "DelaySettings",
    "DelayWorker",
    "MigrationReport",
    "create_pool",
    "create_worker",
    "delayed",
    "migrate",
    "release_jobs",
    "run_worker",
]
