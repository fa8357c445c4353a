"""Which waiting tasks a revoke means, and cancelling them. Used by clients (``control``) and workers (``panel``)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from celery.utils.functional import maybe_list
from celery.utils.log import get_logger

from ..errors import DelayError
from ..jobs import Job
from .message import Message
from .queue import TaskQueue

__all__ = ["CANCELLED_BY_CALLER", "has_stamp", "revoke_ids", "revoke_stamped"]

logger = get_logger(__name__)

CANCELLED_BY_CALLER = "delayadapters_cancelled"
"""An argument of a broadcast: the caller has gone through the whole queue already, workers need not."""

_PAGE = 500


def revoke_ids(queue: TaskQueue, ids: Any) -> list[str]:
    """Cancel those of the tasks that wait; answers their ids. A Redis that is down is logged, not raised."""
    wanted = list(dict.fromkeys(str(one) for one in maybe_list(ids) or ()))
    cancelled: list[str] = []
    for done, one in enumerate(wanted):
        try:
            if queue.revoke(one):
                cancelled.append(one)
        except ValueError:  # no id that we could have stored
            continue
        except DelayError as error:
            logger.error(
                "Could not look for %d of %d revoked tasks among the delayed ones; those that wait will be released, "
                "and discarded only by workers that remember the revoke: %s", len(wanted) - done, len(wanted), error,
            )  # fmt: skip
            break
    return cancelled


def revoke_stamped(queue: TaskQueue, headers: Any) -> list[str] | None:
    """Cancel every waiting task with one of these stamps; answers their ids, None when the queue cannot be read.

    Stamps have no index: this reads the whole queue, page by page.
    """
    wanted = _as_mapping(headers)
    cancelled: list[str] = []
    cursor: str | None = None
    try:
        while True:
            page = queue.jobs(limit=_PAGE, cursor=cursor)
            cancelled += [job.id for job in page.jobs if has_stamp(job, wanted) and queue.revoke(job.id)]
            cursor = page.cursor
            if cursor is None:
                return cancelled
    except DelayError as error:
        logger.error("Could not look for tasks with the stamps %s among the delayed ones: %s", wanted, error)
        return None


def _as_mapping(headers: Any) -> Mapping[str, Any]:
    if isinstance(headers, Mapping):
        return headers
    pairs: Iterable[str] = headers or ()  # "key=value", from the command line
    return {key: value for key, _, value in (pair.partition("=") for pair in pairs)}


def has_stamp(job: Job, wanted: Mapping[str, Any]) -> bool:
    """Whether a worker that received the job would find it revoked by these stamps (Request.revoked)."""
    try:
        headers = Message.unpack(job.payload).headers
    except DelayError:
        return False
    stamps = headers.get("stamps") or {}
    for key in headers.get("stamped_headers") or ():
        value, revoked = stamps.get(key), wanted.get(key)
        if value is None or revoked is None:
            continue
        values = value if isinstance(value, (list, tuple)) else [value]
        if value == revoked or any(one in (maybe_list(revoked) or ()) for one in values):
            return True
    return False
