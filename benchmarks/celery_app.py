"""The application of the Celery benchmarks; ours or stock, and on which broker, is in the environment."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from celery import Celery, signals

from delayadapters.celery import install

OUT = os.environ.get("BENCH_OUT", "")
QUEUE = os.environ.get("BENCH_QUEUE", "bench")
_out = -1


def make_app(broker: str, redis_url: str, ours: bool, direct: bool = True) -> Celery:
    app = Celery("bench", broker=broker, set_as_current=False)
    app.conf.update(
        task_ignore_result=True,
        task_default_queue=QUEUE,
        broker_connection_retry_on_startup=True,
        worker_hijack_root_logger=True,
        delayadapters_redis_url=redis_url,
        delayadapters_direct=direct,
    )
    if ours:
        install(app)
    app.task(note, name="note")
    return app


def note(number: int, due: float) -> None:
    global _out
    late = time.time() - due
    if _out < 0:
        _out = os.open(OUT, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(_out, f"{number} {late!r}\n".encode())


if "BENCH_BROKER" in os.environ:
    app = make_app(
        os.environ["BENCH_BROKER"],
        os.environ["BENCH_URL"],
        os.environ["BENCH_KIND"] != "native",
        os.environ["BENCH_KIND"] == "direct",
    )

    @signals.worker_ready.connect
    def ready(**_: Any) -> None:
        Path(OUT + ".ready").touch()
