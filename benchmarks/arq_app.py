"""The worker of the arq benchmarks. Its jobs write down when they ran."""

from __future__ import annotations

import os
import time

from arq import Retry
from arq.connections import RedisSettings

_out = (
    os.open(os.environ["BENCH_OUT"], os.O_APPEND | os.O_CREAT | os.O_WRONLY, 0o644) if "BENCH_OUT" in os.environ else 1
)


def write(*words: object) -> None:
    os.write(_out, (" ".join(map(str, words)) + "\n").encode())


async def rec(ctx: dict, number: int, due: str) -> None:
    write("ran", number, due.strip("x"), f"{time.time():.6f}")


async def flaky(ctx: dict, number: int) -> None:
    write("try", number, ctx["job_try"], f"{time.time():.6f}")
    if ctx["job_try"] < 6:
        write("raised", number, ctx["job_try"], f"{time.time():.6f}")
        raise Retry(defer=0.05)


class WorkerSettings:
    functions = (rec, flaky)
    redis_settings = RedisSettings(port=int(os.environ.get("BENCH_PORT", "6379")))
    max_jobs = 50
    max_tries = 10
    keep_result = 0
    poll_delay = float(os.environ.get("POLL", "0.5"))
