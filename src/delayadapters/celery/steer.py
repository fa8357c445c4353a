"""``celery -A proj delay status | ls | show | cancel | …``: see the waiting tasks and steer them.

The verbs are those of the ``delayadapters`` command (:mod:`delayadapters.cli`), at a desk of Celery's: the app's queue,
what a stored message says, and a cancel that tells the result backend.

Imported by every ``celery`` call: click and the standard library only, the rest when a command runs.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import click

from ..cli.acting import cancel, dead, release_now, reschedule
from ..cli.desk import Desk, sit_down
from ..cli.looking import ls, show, status

if TYPE_CHECKING:
    from ..jobs import Job
    from ..redis.sync import DelayQueue

__all__ = ["add_commands", "sit_down_at_celery"]

_SAID: Final[Mapping[str, str]] = {
    "in_flight": "being released right now; celery control revoke reaches it in a worker",
    "released": "already released; celery control revoke reaches it in a worker",
    "not_found": "no such task in the delay queue",
}
_CANCEL: Final = """Cancel waiting tasks, for good. Their result is REVOKED; a chord that waits for one fails.

Give ids, - to read them from standard input, or a filter. Workers are not told: what has left the delay queue is for
celery control revoke."""


def add_commands(group: click.Group) -> None:
    """Add them all to ``celery delay``."""
    telling = copy.copy(cancel)
    telling.help = _CANCEL
    for command in (status, ls, show, telling, reschedule, release_now, dead):
        group.add_command(command)


def sit_down_at_celery(ctx: click.Context) -> None:
    """Let the verbs work on the app's queue."""
    sit_down(
        ctx,
        Desk(
            _open,
            noun="task",
            command="celery delay",
            said=_SAID,
            details=_details,
            before_cancel=_import_tasks,
            cancelled=_tell,
        ),
    )


@contextmanager
def _open(ctx: click.Context) -> Iterator[DelayQueue]:
    from celery.exceptions import ImproperlyConfigured

    from .fixup import installed
    from .settings import make_queue

    app = ctx.obj.app
    if installed(app) is None:
        raise click.UsageError("this app has no delay queue: call delayadapters.celery.install(app) where it is made")
    app.set_current()
    try:
        queue = make_queue(app)
    except ImproperlyConfigured as error:
        raise click.ClickException(str(error)) from error
    try:
        yield queue
    finally:
        queue.close()


def _details(job: Job) -> dict[str, Any]:
    from .views import message_view

    return {"message": message_view(job)}


def _import_tasks(ctx: click.Context) -> None:
    """A task may have a result backend, or receivers, of its own."""
    ctx.obj.app.loader.import_default_modules()


def _tell(queue: DelayQueue, jobs: Sequence[Job]) -> None:
    from .cancelled import announce_cancelled
    from .queue import TaskQueue

    if isinstance(queue, TaskQueue) and queue.app is not None:
        for job in jobs:
            announce_cancelled(queue.app, job)
