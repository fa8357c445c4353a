"""The demo's broker and task; where everything is comes from the environment that ``demo.py`` sets."""

from __future__ import annotations

import os

from demo_kit.ledger import note_execution, note_ready
from taskiq import TaskiqEvents, TaskiqState
from taskiq_redis import RedisStreamBroker

from delayadapters.taskiq import DelayMiddleware

URL = os.environ.get("DEMO_REDIS", "redis://localhost:6379/0")

delay = DelayMiddleware(URL)
# A stream, because a list has nobody who would bring back what a killed worker had taken from it. What was not
# acknowledged comes back after 3 s; that is safe, since no message lies in a worker for the length of its delay.
broker = RedisStreamBroker(
    URL,
    queue_name="demo",
    xread_block=200,
    idle_timeout=3000,
    unacknowledged_lock_timeout=3.0,
    socket_timeout=None,
).with_middlewares(delay)


@broker.task(task_name="task")
async def task(number: int, due: float) -> None:
    note_execution(number, due)


@broker.on_event(TaskiqEvents.WORKER_STARTUP)
async def ready(state: TaskiqState) -> None:
    note_ready()
