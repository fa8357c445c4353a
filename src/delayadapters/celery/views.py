"""What a stored message says, as plain values; for what every job has see :mod:`delayadapters.views`."""

from __future__ import annotations

from typing import Any

from ..errors import DelayError
from ..jobs import Job
from .message import Message

__all__ = ["message_view"]


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
