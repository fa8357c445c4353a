"""One face for the three queues, so that a contract is tested once."""

from __future__ import annotations

import functools
from typing import Any

__all__ = ["AsyncFace", "BlockingFace"]


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


class BlockingFace:
    """A :class:`MemoryDelayQueue` with plain verbs, for tests without an event loop: while nobody waits in ``get()``,
    its verbs have nothing to wait for."""

    def __init__(self, queue: Any) -> None:
        self.wrapped = queue

    def __getattr__(self, verb: str) -> Any:
        method = getattr(self.wrapped, verb)

        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            coroutine = method(*args, **kwargs)
            try:
                coroutine.send(None)
            except StopIteration as stop:
                return stop.value
            coroutine.close()
            raise AssertionError(f"{verb} waited for something")

        return call
