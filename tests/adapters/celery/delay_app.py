"""The Celery application of these tests, in their own process (``make_app``) and in workers (``app``).

Workers have everything from the environment. ``DELAY_TEST_CONF``: JSON for ``app.conf.update``; ``DELAY_TEST_OUT``: the
file to which each execution is written, as one line of JSON.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Mapping
from typing import Any

from celery import Celery

from delayadapters.celery import install


def make_app(conf: Mapping[str, Any], installed: bool = True, name: str = "tests") -> Celery:
    app = Celery(name, set_as_current=False)
    app.conf.update(conf)
    if installed:
        install(app)
    for function, options in TASKS.items():
        app.task(function, bind=True, name=function.__name__, **options)
    return app


def record(task: Any, **what: Any) -> None:
    """One line, written at once (O_APPEND), so that it survives whatever happens to the process next."""
    request = task.request
    line = {
        "task": task.name,
        "id": request.id,
        "at": time.time(),
        "pid": os.getpid(),
        "retries": request.retries,
        "eta": request.eta,
        "headers": request.headers,
        **what,
    }
    fd = os.open(os.environ["DELAY_TEST_OUT"], os.O_APPEND | os.O_CREAT | os.O_WRONLY, 0o644)
    try:
        os.write(fd, json.dumps(line).encode() + b"\n")
    finally:
        os.close(fd)


def note(self: Any, *args: Any, **kwargs: Any) -> Any:
    record(self, args=args, kwargs=kwargs)
    return args[0] if args else None


def again(self: Any, times: int, countdown: float) -> None:
    """Fails and asks to be retried, ``times`` times."""
    record(self, args=[times])
    if self.request.retries < times:
        raise self.retry(countdown=countdown)


def auto(self: Any, times: int) -> None:
    record(self, args=[times])
    if self.request.retries < times:
        raise ValueError("not yet")


def total(self: Any, numbers: list[int]) -> int:
    record(self, args=[numbers])
    return sum(numbers)


def dies_retried(self: Any) -> None:
    """Takes its process along, the first time."""
    record(self)
    if self.request.retries == 0:
        os.kill(os.getpid(), signal.SIGKILL)


def dies_rejected(self: Any) -> None:
    record(self)
    if not self.request.delivery_info["redelivered"]:
        os.kill(os.getpid(), signal.SIGKILL)


TASKS: dict[Any, dict[str, Any]] = {
    note: {},
    again: {"max_retries": 5},
    auto: {"autoretry_for": (ValueError,), "retry_backoff": 1, "retry_jitter": False, "max_retries": 3},
    total: {},
    dies_retried: {"retry_on_worker_lost": True, "default_retry_delay": 0.5},
    dies_rejected: {"acks_late": True, "reject_on_worker_lost": True},
}

if "DELAY_TEST_CONF" in os.environ:
    app = make_app(json.loads(os.environ["DELAY_TEST_CONF"]))
