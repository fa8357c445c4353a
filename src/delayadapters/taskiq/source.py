"""``DelayScheduleSource``: ``schedule_by_time`` on the delay queue, for any number of schedulers, or none."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

from taskiq import AsyncBroker, ScheduledTask, ScheduleSource
from taskiq.kicker import AsyncKicker

from ..jobs import IfExists
from ..redis.commands import NO_EXTRAS, Extras
from .labels import DELAY_LABELS, DELAY_UNTIL, RETRIES, X_DELAY
from .middleware import DelayMiddleware, Override, override

__all__ = ["DelayScheduleSource", "middleware_of"]


def middleware_of(broker: AsyncBroker) -> DelayMiddleware:
    """The broker's DelayMiddleware.

    Raises:
        RuntimeError: it has none.
    """
    for middleware in broker.middlewares:
        if isinstance(middleware, DelayMiddleware):
            return middleware
    raise RuntimeError(
        f"{type(broker).__name__} has no DelayMiddleware: broker.with_middlewares(DelayMiddleware('redis://...'))"
    )


class DelayScheduleSource(ScheduleSource):
    """Schedules by time, stored in the queue of a broker's :class:`DelayMiddleware` and released by its loops.

    ``schedule_by_time(source, time, …)`` stores the task, ``unschedule()`` and ``delete_schedule(id)`` cancel it. A
    schedule id that is scheduled again replaces the task that waits under it. Without ``with_task_id``, the task's id
    is the schedule's. ``taskiq scheduler`` may list this source beside others, but nothing depends on its running:
    ``get_schedules`` is always empty.

    The message is made, and the send hooks of the broker's middlewares run, when the task is scheduled.

    Args:
        broker: with a DelayMiddleware, or that middleware.
    """

    def __init__(self, broker: AsyncBroker | DelayMiddleware) -> None:
        if not isinstance(broker, (AsyncBroker, DelayMiddleware)):
            raise TypeError(f"DelayScheduleSource takes a broker with a DelayMiddleware, got {broker!r}")
        self._of = broker

    @property
    def middleware(self) -> DelayMiddleware:
        return self._of if isinstance(self._of, DelayMiddleware) else middleware_of(self._of)

    async def get_schedules(self) -> list[ScheduledTask]:
        """Nothing: the release loops send what is due."""
        return []

    async def add_schedule(self, schedule: ScheduledTask) -> None:
        """Stores a task until ``schedule.time``; a naive time is UTC, as for taskiq's scheduler.

        Raises:
            ValueError: a schedule by cron or interval.
            SendTaskError: it could not be stored.
        """
        if schedule.cron is not None or schedule.interval is not None or schedule.time is None:
            what = "cron" if schedule.cron is not None else "interval"
            raise ValueError(
                f"DelayScheduleSource takes schedules by time, got {what}={getattr(schedule, what)!r} for task "
                f"{schedule.task_name}; use taskiq's LabelScheduleSource, or taskiq_redis.ListRedisScheduleSource, "
                "beside it for cron and interval schedules"
            )
        time = schedule.time
        if time.utcoffset() is None:
            time = time.replace(tzinfo=timezone.utc)
        await self.store(schedule, time)

    async def store(
        self, schedule: ScheduledTask, time: datetime, mode: IfExists = "replace", extras: Extras = NO_EXTRAS
    ) -> None:
        """Stores a task until ``time`` (aware), whatever the schedule says; part of :func:`migrate_schedules`."""
        labels: dict[str, Any] = {k: v for k, v in schedule.labels.items() if k not in DELAY_LABELS}
        retry = RETRIES in labels and schedule.task_id is not None
        task_id = schedule.task_id or schedule.schedule_id
        # Nobody knows the schedule id of SmartRetryMiddleware's retries; their task's id, its owner does.
        job_id = task_id if retry else schedule.schedule_id
        if_exists: IfExists = "add" if retry else mode
        labels["schedule_id"] = schedule.schedule_id
        if retry:
            # SmartRetryMiddleware has just added its delay to this machine's clock. The delay is what counts.
            labels[X_DELAY] = max(0.0, (time - datetime.now(timezone.utc)).total_seconds())
        else:
            labels[DELAY_UNTIL] = time
        # Not with_labels(): a datetime label is as good as a float, but not to its type hints.
        kicker: AsyncKicker[Any, Any] = AsyncKicker(schedule.task_name, self.middleware.broker, labels)
        token = override.set(Override(task_id, job_id, if_exists, extras))
        try:
            await kicker.with_task_id(task_id).kiq(*schedule.args, **schedule.kwargs)
        finally:
            override.reset(token)

    async def delete_schedule(self, schedule_id: str) -> None:
        """Cancels a schedule that waits; one that is gone already is none, as with taskiq's own sources."""
        await self.middleware.cancel_job(schedule_id)
