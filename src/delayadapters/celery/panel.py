"""The worker's side of remote control: revokes reach the delay queue whoever sends them, and ``inspect delayed``.

Imported in workers and by the ``celery`` command, which shows and checks the names of commands in its own process.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from threading import Thread
from typing import Any, Final

from celery import Celery
from celery.utils.log import get_logger
from celery.worker.control import Panel, inspect_command

from ..errors import DelayError

__all__ = ["delayed"]

logger = get_logger(__name__)

TIMEOUT: Final = 2.0
"""Seconds for which a worker's main thread, which does nothing else meanwhile, may wait for the delay Redis."""
MOST_SHOWN: Final = 1_000


def _also(name: str, cancel: Callable[..., None]) -> None:
    """Let a control command of Celery's call ``cancel`` first, in apps that have us."""
    native = Panel.data[name]

    @wraps(native)
    def command(state: Any, *args: Any, **kwargs: Any) -> Any:
        from .fixup import installed

        if installed(state.app) is not None:
            try:
                cancel(state, *args, **kwargs)
            except Exception:
                logger.exception("Could not cancel delayed tasks")
        return native(state, *args, **kwargs)

    Panel.data[name] = command


def _by_id(state: Any, task_id: Any, *_: Any, **__: Any) -> None:
    from .revoke import revoke_ids

    with _queue(state.app) as queue:
        for one in revoke_ids(queue, task_id):
            _send_event(state, one)


def _terminate(state: Any, signal: Any, task_id: Any, **_: Any) -> None:
    _by_id(state, task_id)


def _by_stamp(state: Any, headers: Any, *_: Any, **options: Any) -> None:
    """In a thread: it reads the whole queue. Of a caller that has done so itself nothing is left to do."""
    from .revoke import CANCELLED_BY_CALLER, revoke_stamped

    if options.get(CANCELLED_BY_CALLER):
        return

    def run() -> None:
        try:
            with _queue(state.app, timeout=None) as queue:
                revoke_stamped(queue, headers)
        except Exception:
            logger.exception("Could not cancel delayed tasks")

    Thread(target=run, name="delay-revoke", daemon=True).start()


def _queue(app: Celery, timeout: float | None = TIMEOUT) -> Any:
    from .settings import make_queue

    return make_queue(app, timeout=timeout)


def _send_event(state: Any, task_id: str) -> None:
    dispatcher = getattr(state.consumer, "event_dispatcher", None)
    if dispatcher is not None and dispatcher.enabled and not state.app.conf.task_send_sent_event:
        dispatcher.send("task-revoked", uuid=task_id, terminated=False, signum=None, expired=False)


@inspect_command(signature="[N=10]", args=[("limit", int)])
def delayed(state: Any, limit: int = 10, **_: Any) -> dict[str, Any]:
    """Tasks that wait in the delay queue: numbers, and the first N."""
    from ..views import job_view, stats_view
    from .fixup import installed

    if installed(state.app) is None:
        return {"error": "delayadapters is not installed in this app"}
    try:
        with _queue(state.app) as queue:
            view = stats_view(queue.name, queue.stats())
            shown = min(int(limit), MOST_SHOWN)
            jobs = queue.jobs(limit=shown).jobs if shown > 0 else []
            return {**view, "jobs": [job_view(job) for job in jobs]}
    except (DelayError, ValueError) as error:
        return {"error": str(error)}


_also("revoke", _by_id)
_also("terminate", _terminate)
_also("revoke_by_stamped_headers", _by_stamp)
