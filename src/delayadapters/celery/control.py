"""``app.control`` of an installed app: a revoke also cancels what waits, whichever way it was asked for.

``AsyncResult.revoke``, ``GroupResult.revoke``, ``Control.revoke``, ``terminate``, ``revoke_by_stamped_headers`` and
``celery control …`` all end in ``Control.broadcast``. Workers are told as always: a task may have left the queue.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Final

from celery import Celery
from celery.utils.log import get_logger
from kombu.utils.imports import symbol_by_name

__all__ = ["ControlMaker", "install_control"]

logger = get_logger(__name__)

_BY_ID: Final = ("revoke", "terminate")
_BY_STAMP: Final = "revoke_by_stamped_headers"


def install_control(app: Celery) -> None:
    """Let ``app.control`` be ours, made from the class it would have had."""
    if not isinstance(app.control_cls, ControlMaker):
        app.control_cls = ControlMaker(app.control_cls)
        vars(app).pop("control", None)


@dataclass(frozen=True)
class ControlMaker:
    """Stands in ``app.control_cls`` and makes the control object. Pickles with the app, unlike a class made here."""

    base: Any

    def __call__(self, app: Celery) -> Any:
        return _control_class(symbol_by_name(self.base))(app=app)  # type: ignore[no-untyped-call]  # kombu's


@lru_cache(maxsize=16)
def _control_class(base: Any) -> Any:
    return type(base.__name__, (_Control, base), {"__doc__": base.__doc__})


class _Control:
    app: Any

    def broadcast(self, command: str, arguments: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Celery's own; a revoke is broadcast and the waiting task cancelled, even when one of the two fails."""
        if command in _BY_ID:
            try:
                return super().broadcast(command, arguments, *args, **kwargs)  # type: ignore[misc]  # Control's
            finally:
                self._cancel((arguments or {}).get("task_id", kwargs.get("task_id")))
        if command == _BY_STAMP:
            arguments = self._cancel_stamped(dict(arguments or {}))
        return super().broadcast(command, arguments, *args, **kwargs)  # type: ignore[misc]  # Control's

    def _cancel(self, ids: Any) -> None:
        from .revoke import revoke_ids

        try:
            revoke_ids(_queue(self.app), ids)
        except Exception:
            logger.exception("Could not cancel delayed tasks")

    def _cancel_stamped(self, arguments: dict[str, Any]) -> dict[str, Any]:
        from .revoke import CANCELLED_BY_CALLER, revoke_stamped

        try:
            if revoke_stamped(_queue(self.app), arguments.get("headers")) is not None:
                arguments[CANCELLED_BY_CALLER] = True
        except Exception:
            logger.exception("Could not cancel delayed tasks")
        return arguments

    @cached_property
    def inspect(self) -> Any:
        """Celery's own, and ``delayed(limit=10)``: what waits, as each worker sees it."""
        native = super().inspect  # type: ignore[misc]  # Control's
        return type(native.__name__, (_Inspect, native), {"__doc__": native.__doc__, "__module__": __name__})


class _Inspect:
    def delayed(self, limit: int = 10) -> Any:
        """The delay queue in numbers and its first ``limit`` tasks, as each worker sees them."""
        return self._request("delayed", limit=limit)  # type: ignore[attr-defined]  # Inspect's


def _queue(app: Any) -> Any:
    from .fixup import installed

    fixup = installed(app)
    if fixup is None:
        raise RuntimeError("delayadapters is not installed in this app")
    return fixup.queue()
