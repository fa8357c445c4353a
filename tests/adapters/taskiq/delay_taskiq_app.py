"""The application of the process tests. BROKER, BROKER_URL, QUEUE, DELAY_URL, LEASE say which broker,
KILL_AT where a releasing process ends."""

from __future__ import annotations

import os
import signal
import time

import redis.asyncio
import taskiq_redis
from taskiq import TaskiqMessage, TaskiqMiddleware, TaskiqResult, TaskiqScheduler
from taskiq.middlewares import SmartRetryMiddleware
from taskiq.schedule_sources import LabelScheduleSource

from delayadapters.taskiq import DelayMiddleware, DelayScheduleSource

DELAY_URL = os.environ["DELAY_URL"]
kind = os.environ["BROKER"]
options: dict = {}
if kind == "AioPikaBroker":
    from taskiq_aio_pika import AioPikaBroker, Exchange, Queue

    broker = AioPikaBroker(
        os.environ["BROKER_URL"],
        exchange=Exchange(name=os.environ["QUEUE"]),
        task_queues=[Queue(name=os.environ["QUEUE"])],
        dead_letter_queue=Queue(name=os.environ["QUEUE"] + "-dead"),
    )
else:
    if kind == "RedisStreamBroker":
        options = {"idle_timeout": int(os.environ.get("IDLE", "600000")), "xread_block": 200}
        options["unacknowledged_lock_timeout"] = 5.0
    if os.environ.get("SOCKET_TIMEOUT") != "default":
        options["socket_timeout"] = None
    broker = getattr(taskiq_redis, kind)(os.environ["BROKER_URL"], queue_name=os.environ["QUEUE"], **options)
delay = DelayMiddleware(
    DELAY_URL, lease=float(os.environ.get("LEASE", "10")), embed=os.environ.get("EMBED", "1") == "1", timeout=60
)
broker.with_middlewares(delay, SmartRetryMiddleware(default_delay=1.0))
broker.with_result_backend(taskiq_redis.RedisAsyncResultBackend(DELAY_URL))

if gap := os.environ.get("KILL_AT"):
    native = delay._native_kick

    async def killed(message):
        """A leased release, and the process ends: "claimed", before the broker has it; "kicked", before the ack."""
        if gap == "kicked":
            await native(message)
        os.kill(os.getpid(), signal.SIGKILL)

    delay._native_kick = killed

source = DelayScheduleSource(broker)
scheduler = TaskiqScheduler(broker, [source, LabelScheduleSource(broker)])
ledger = redis.asyncio.Redis.from_url(DELAY_URL)


@broker.task(task_name="note")
async def note(number: int, due: float = 0.0) -> float:
    """Writes down that it ran, and how late."""
    late = time.time() - due
    await ledger.rpush("ran", f"{number} {late:.6f}")
    return late


@broker.task(task_name="hang", retry_on_error=True, max_retries=3, delay=600)
async def hang(number: int, due: float = 0.0) -> None:
    """Fails. With KILL_BEFORE_ACK its worker's process ends as soon as the retry is stored, before the ack."""
    await ledger.rpush("failed", str(number))
    raise ValueError(number)


if os.environ.get("KILL_BEFORE_ACK"):

    class Kill(TaskiqMiddleware):
        async def post_execute(self, message: TaskiqMessage, result: TaskiqResult) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

    broker.add_middlewares(Kill())
