"""taskiq's delays on a delay queue in Redis, for every broker.

::

    from taskiq_redis import ListQueueBroker
    from delayadapters.taskiq import DelayMiddleware

    broker = ListQueueBroker("redis://localhost", socket_timeout=None).with_middlewares(
        DelayMiddleware("redis://localhost")
    )

    await task.kicker().with_labels(delay=30).kiq()

The workers release what is due; ``taskiq delay-release module:broker`` does so in a process of its own.
"""

from __future__ import annotations

from .errors import BrokerNotStarted, DelayLabelError, TaskCancelled
from .middleware import DelayMiddleware
from .migrate import Migrated, migrate_schedules
from .source import DelayScheduleSource

__all__ = [
    "BrokerNotStarted",
    "DelayLabelError",
    "DelayMiddleware",
    "DelayScheduleSource",
    "Migrated",
    "TaskCancelled",
    "migrate_schedules",
]
