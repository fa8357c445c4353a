"""Signals of our own, beside Celery's; connect to them like to Celery's.

========================  ===========================================  =================================================
signal                    sent by                                      when
========================  ===========================================  =================================================
``task_delayed``          the process that called ``apply_async``      the delayed task is stored, once a scheduling
``task_released``         the process that runs the release loop       the broker has the message. Leased release only:
                                                                       a direct one happens inside Redis
``task_delay_cancelled``  the process whose cancel took it out         the task will not be released; once a task
========================  ===========================================  =================================================

``sender`` is the task's name. All have ``id`` (the task's), ``due`` (an aware datetime) and ``queue`` (where the
message goes, or would have gone). As with all of Celery's signals, an error in a receiver is logged and stops nothing.

::

    from delayadapters.celery.signals import task_delayed

    @task_delayed.connect
    def note(sender, id, due, queue, **kwargs): ...
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Final

from celery.utils.dispatch import Signal

__all__ = ["announce", "task_delay_cancelled", "task_delayed", "task_released"]

_ARGUMENTS: Final = frozenset({"id", "due", "queue"})

task_delayed = Signal(name="task_delayed", providing_args=_ARGUMENTS)
task_released = Signal(name="task_released", providing_args=_ARGUMENTS)
task_delay_cancelled = Signal(name="task_delay_cancelled", providing_args=_ARGUMENTS)


def announce(signal: Signal, id: str, due: datetime, meta: Mapping[str, str]) -> None:
    """Send one of ours. Costs next to nothing when nobody listens."""
    if signal.receivers:
        signal.send(sender=meta.get("task"), id=id, due=due, queue=meta.get("queue"))
