"""The application of the taskiq benchmarks: one broker with the middleware, one without, and the stock scheduler's."""

from __future__ import annotations

import os
import time

from taskiq import TaskiqScheduler
from taskiq_redis import ListQueueBroker, ListRedisScheduleSource

from delayadapters.taskiq import DelayMiddleware

URL = os.environ["BENCH_URL"]
OUT = os.environ["BENCH_OUT"]

# redis-py 8's socket time-out of 5 s would end an idle ListQueueBroker, stock or not.
broker = ListQueueBroker(URL, queue_name="ours", socket_timeout=None)
broker.with_middlewares(DelayMiddleware(URL, embed=os.environ.get("EMBED", "1") == "1"))
stock = ListQueueBroker(URL, queue_name="stock", socket_timeout=None)
source = ListRedisScheduleSource(URL, socket_timeout=None)
scheduler = TaskiqScheduler(stock, [source])
_out = -1


def note(number: int, due: float) -> None:
    global _out
    late = time.time() - due
    if _out < 0:
        _out = os.open(OUT, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(_out, f"{number} {late!r}\n".encode())


@broker.task(task_name="ours")
async def ours(number: int, due: float) -> None:
    note(number, due)


@stock.task(task_name="stock")
async def native(number: int, due: float) -> None:
    note(number, due)
