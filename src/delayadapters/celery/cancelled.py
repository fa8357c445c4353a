"""What a cancelled task's surroundings hear: as if a worker had received it and found it revoked.

Celery's own words for it are in ``Request._announce_revoked`` (celery/worker/request.py): the result becomes REVOKED,
the chord which waits for the task is told, ``task_revoked`` is sent; all with a request made from the stored message.
"""

# mypy: disallow-untyped-calls=False
# (kombu says that it is typed, and most of it is not)

from __future__ import annotations

from typing import Any

from celery import Celery, signals, states
from celery.app.task import Context
from celery.backends.base import DisabledBackend
from celery.backends.rpc import RPCBackend
from celery.utils.log import get_logger
from kombu.compression import decompress
from kombu.serialization import loads, prepare_accept_content

from ..jobs import Job
from .message import Message, with_due
from .signals import announce, task_delay_cancelled

__all__ = ["announce_cancelled", "request_of"]

logger = get_logger(__name__)


def announce_cancelled(app: Celery, job: Job) -> None:
    """Tell everybody that this task was cancelled while it waited. Raises nothing: what fails is logged."""
    name = job.meta.get("task", "?")
    announce(task_delay_cancelled, job.id, job.due_at, job.meta)
    try:
        request = request_of(app, job)
    except Exception as error:
        logger.error(
            "Task %s[%s] is cancelled, but its message cannot be read: a chord that waits for it is not told: %r",
            name, job.id, error,
        )  # fmt: skip
        request = Context(id=job.id, task=name)
    task = app.tasks.get(name)
    try:
        _mark(app.backend if task is None else task.backend, job.id, request)
    except Exception as error:
        logger.error("Task %s[%s] is cancelled, but the result backend was not told: %r", name, job.id, error)
    if task is not None:
        signals.task_revoked.send(sender=task, request=request, terminated=False, signum=None, expired=False)
    if app.conf.task_send_sent_event:  # what makes a client send events
        try:
            with app.events.default_dispatcher() as dispatcher:
                dispatcher.send("task-revoked", uuid=job.id, terminated=False, signum=None, expired=False)
        except Exception as error:
            logger.warning("Task %s[%s] is cancelled, but its event was not sent: %r", name, job.id, error)
    logger.debug("Task %s[%s] cancelled while it waited", name, job.id)


def _mark(backend: Any, task_id: str, request: Context) -> None:
    if isinstance(backend, DisabledBackend):
        return
    # A result that is there already stays: a worker of another version may have revoked it just now (then only its
    # chord has not been told), or a chord's error handler has failed it (celery/worker/control.py, _revoke).
    # An rpc:// backend knows only the results that were sent to this process.
    store = isinstance(backend, RPCBackend) or backend.get_state(task_id) not in states.READY_STATES
    backend.mark_as_revoked(task_id, "revoked", request=request, store_result=store)


def request_of(app: Celery, job: Job) -> Context:
    """The task request that a worker would have made of the stored message (protocol 1 or 2)."""
    message = Message.unpack(job.payload)
    body: Any = message.body
    headers = with_due(message.headers, job.due_at.isoformat())
    if headers.get("compression"):
        body = decompress(body, headers["compression"])
    accept = prepare_accept_content(app.conf.accept_content)
    content = loads(body, message.content_type, message.content_encoding, accept=accept)
    if "task" in headers:
        args, kwargs, embed = content
        fields = {**headers, **(embed or {}), "args": args, "kwargs": kwargs}
    else:
        fields = {**content, "group": content.get("taskset"), "headers": headers}
    fields.update(
        id=job.id,
        reply_to=message.properties.get("reply_to"),
        correlation_id=message.properties.get("correlation_id"),
        delivery_info={"exchange": message.exchange, "routing_key": message.routing_key},
    )
    return Context(fields)
