"""One face for the three queues, so that a contract is tested once."""

from __future__ import annotations

import functools
from typing import Any

__all__ = ["AsyncFace"]


class AsyncFace:
    """A :class:`DelayQueue` with async verbs. Each runs in the caller's thread, and blocks the event loop meanwhile."""

    def __init__(self, queue: Any) -> None:
        self.wrapped = queue

    def __getattr__(self, verb: str) -> Any:
        method = getattr(self.wrapped, verb)

        @functools.wraps(method)
        async def call(*args: Any, **kwargs: Any) -> Any:
            return method(*args, **kwargs)

        return call
