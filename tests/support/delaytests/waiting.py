"""Waiting for a condition instead of sleeping."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

__all__ = ["wait_until", "wait_until_async"]

T = TypeVar("T")


def wait_until(
    condition: Callable[[], T], timeout: float = 30, interval: float = 0.005, message: str | None = None
) -> T:
    """Ask ``condition`` every ``interval`` seconds until it answers something true; answers that.

    The time-out only says when to give up, so it is generous: on a busy machine a process takes seconds to start.
    An ``AssertionError`` raised by the condition counts as "not yet"; any other error passes through.

    Raises:
        AssertionError: not within ``timeout`` seconds; says what was waited for and its last answer.
    """
    deadline = time.monotonic() + timeout
    while True:
        last: Any
        try:
            last = condition()
            if last:
                return last
        except AssertionError as error:
            last = error
        if time.monotonic() >= deadline:
            raise AssertionError(_complaint(condition, timeout, last, message))
        time.sleep(interval)


async def wait_until_async(
    condition: Callable[[], T | Awaitable[T]], timeout: float = 30, interval: float = 0.005, message: str | None = None
) -> T:
    """:func:`wait_until` on an event loop; the condition may be a coroutine function."""
    deadline = time.monotonic() + timeout
    while True:
        last: Any
        try:
            last = condition()
            if inspect.isawaitable(last):
                last = await last
            if last:
                return last  # type: ignore[no-any-return]
        except AssertionError as error:
            last = error
        if time.monotonic() >= deadline:
            raise AssertionError(_complaint(condition, timeout, last, message))
        await asyncio.sleep(interval)


def _complaint(condition: Callable[[], Any], timeout: float, last: Any, message: str | None) -> str:
    what = message
    if what is None:
        try:
            what = inspect.getsource(condition).strip()
        except (OSError, TypeError):
            what = repr(condition)
    return f"waited {timeout} s in vain for: {what}\nlast answer: {last!r}"
