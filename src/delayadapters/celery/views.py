"""Jobs and numbers as plain values, for ``--json`` and for remote control."""

from __future__ import annotations

from typing import Any

from ..due import from_micros
from ..errors import DelayError
from ..jobs import Job, Stats
from .message import Message

__all__ = ["job_view", "message_view", "stats_view"]


def stats_view(name: str, stats: Stats) -> dict[str, Any]:
    """The queue in numbers."""
    return {
        "queue": name,
        "waiting": stats.waiting,
        "due": stats.due,
        "leased": stats.leased,
        "dead": stats.dead,
        "next_due": None if stats.next_due is None else from_micros(stats.next_due).isoformat(),
        "oldest_overdue": stats.oldest_overdue,
    }


def job_view(job: Job) -> dict[str, Any]:
    """A job without its payload."""
    return {
        "id": job.id,
        "task": job.meta.get("task"),
        "queue": job.meta.get("queue"),
        "due": job.due_at.isoformat(),
        "state": job.state.value,
        "attempts": job.attempts,
        "requeues": job.requeues,
        "reason": job.reason,
    }


_SHOWN = (
    "argsrepr", "kwargsrepr", "retries", "expires", "root_id", "parent_id", "group", "origin", "timelimit", "stamps",
)  # fmt: skip
_NOTHING: tuple[Any, ...] = (None, {}, [None, None])


def message_view(job: Job) -> dict[str, Any]:
    """What the stored message says about itself; protocol 1 keeps all but this in its body."""
    try:
        message = Message.unpack(job.payload)
    except DelayError as error:
        return {"unreadable": str(error)}
    view: dict[str, Any] = {name: message.headers[name] for name in _SHOWN if message.headers.get(name) not in _NOTHING}
    view["routing_key"] = message.routing_key
    if message.exchange:
        view["exchange"] = message.exchange
    if message.properties.get("priority") is not None:
        view["priority"] = message.properties["priority"]
    view["bytes"] = len(job.payload)
    return view
