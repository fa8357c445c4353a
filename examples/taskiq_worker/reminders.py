"""The broker and its tasks; the API (api.py) and the worker share them."""

from __future__ import annotations

import os
import time

from taskiq import Context, SmartRetryMiddleware, TaskiqDepends
from taskiq_redis import ListQueueBroker, RedisAsyncResultBackend

from delayadapters.taskiq import DelayMiddleware

URL = os.environ.get("REDIS_URL", "redis://localhost:6379/0")

# socket_timeout=None: redis-py 8 gives up after 5 s, and an idle ListQueueBroker with it.
delay = DelayMiddleware(URL)
broker = (
    ListQueueBroker(URL, queue_name="reminders", socket_timeout=None)
    .with_middlewares(delay, SmartRetryMiddleware(default_delay=1, use_delay_exponent=True))
    .with_result_backend(RedisAsyncResultBackend(URL, result_ex_time=3600))
)


@broker.task(task_name="remind")
async def remind(text: str, due: float) -> dict[str, float | str]:
    """Would send a message; answers how late it was, in milliseconds."""
    late = (time.time() - due) * 1000
    print(f"reminder: {text!r}, {late:.1f} ms late", flush=True)
    return {"text": text, "late_ms": round(late, 1)}


@broker.task(task_name="charge", retry_on_error=True, max_retries=4, delay=0.5)
async def charge(order: int, context: Context = TaskiqDepends()) -> str:
    """A payment that is refused twice: asked for again after 0.5, then 1 second (``delay`` is that of the retries)."""
    attempt = int(context.message.labels.get("_retries", 0)) + 1
    print(f"charge: order {order}, attempt {attempt}", flush=True)
    if attempt < 3:
        raise ConnectionError("the bank does not answer")
    return f"order {order} paid at attempt {attempt}"
