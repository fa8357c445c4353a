"""What the taskiq adapter raises, beside the core's errors.

``kiq`` wraps whatever a broker raises in taskiq's ``SendTaskError`` (kicker.py); the errors here are its ``__cause__``
then. A delay that cannot be understood is noticed before, and is a ``SendTaskError`` itself.
"""

from __future__ import annotations

from taskiq.exceptions import SendTaskError

from ..errors import DelayError

__all__ = ["BrokerNotStarted", "DelayLabelError", "TaskCancelled"]


class DelayLabelError(SendTaskError, ValueError):
    """A delay label holds something that is no delay: named, with what it held. Nothing was sent."""

    __template__ = "{reason}"
    reason: str


class BrokerNotStarted(SendTaskError, RuntimeError):
    """A delayed task was sent through a broker whose ``startup()`` has not been awaited, and would wait for ever."""

    __template__ = "{reason}"
    reason: str


class TaskCancelled(DelayError):
    """The error of the result of a task that :meth:`DelayMiddleware.cancel` cancelled while it waited."""
