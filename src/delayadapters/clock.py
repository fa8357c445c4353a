"""The clocks of the in-process queue: the machine's, and one that a test turns by hand."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime
from typing import Final, Protocol
from weakref import WeakMethod

from .due import Delay, from_micros, seconds_to_micros, to_micros

__all__ = ["Clock", "InjectedClock", "ManualClock", "SystemClock"]

_NOISE: Final = 1_000_000
"""Nanoseconds by which two readings may differ because the process was interrupted between them."""


class Clock(Protocol):
    """What the queue reads. Every time is in microseconds since the epoch, but runs on whatever the wall clock does."""

    def now(self) -> int:
        """Now, rounded down: a job is due once ``now()`` reaches its due time."""

    def start(self) -> int:
        """Now, rounded up: where a delay begins, so that rounding never makes it shorter."""

    def shift(self) -> int:
        """By how much the wall clock was set since this clock began (0: it was not); converts an absolute time."""


class SystemClock:
    """The monotonic clock, numbered from what the wall clock said at construction.

    A wall clock that is set later moves no job that already waits. It does count for the absolute times which are
    converted after that: :meth:`shift` is their correction.
    """

    __slots__ = ("_offset",)

    def __init__(self) -> None:
        self._offset = _wall_offset()

    def now(self) -> int:
        return (time.monotonic_ns() + self._offset) // 1000

    def start(self) -> int:
        return -(-(time.monotonic_ns() + self._offset) // 1000)

    def shift(self) -> int:
        if abs(time.time_ns() - time.monotonic_ns() - self._offset) < _NOISE:
            return 0
        shift = _wall_offset() - self._offset
        return shift // 1000 if abs(shift) > _NOISE else 0


class InjectedClock:
    """A clock the caller brought: seconds since the epoch."""

    __slots__ = ("_seconds",)

    def __init__(self, seconds: Callable[[], float]) -> None:
        self._seconds = seconds

    def now(self) -> int:
        return round(self._seconds() * 1_000_000)

    start = now

    def shift(self) -> int:
        return 0


class ManualClock:
    """A clock that stands still until a test moves it; a :class:`MemoryDelayQueue` built on it delivers "tomorrow" now.

    ::

        clock = ManualClock()
        async with MemoryDelayQueue(clock=clock) as queue:
            await queue.schedule(b"report", delay=86_400)
            clock.advance(86_400)
            claim = await queue.get()

    Calling it gives seconds since the epoch. ``start`` is where it begins (an aware datetime or seconds; default: the
    present), so that ``at=datetime.now(timezone.utc) + …`` means what it says.
    """

    def __init__(self, start: datetime | float | None = None) -> None:
        if start is None:
            self._micros = time.time_ns() // 1000
        elif isinstance(start, datetime):
            if start.utcoffset() is None:
                raise ValueError(f"start must be an aware datetime (with a timezone); got the naive {start!r}")
            self._micros = to_micros(start)
        else:
            self._micros = seconds_to_micros(start, "start")
        self._moved: list[WeakMethod[Callable[[], None]]] = []
        self._followers: list[Callable[[datetime], object]] = []

    def __call__(self) -> float:
        return self._micros / 1_000_000

    @property
    def micros(self) -> int:
        """Microseconds since the epoch."""
        return self._micros

    def now(self) -> datetime:
        """Now, as an aware UTC datetime."""
        return from_micros(self._micros)

    def advance(self, seconds: Delay) -> None:
        """Moves the clock, exactly to the microsecond, and tells the queues built on it: whoever waits for a job that
        is due now gets it at the event loop's next turn. A negative value sets the clock back."""
        self._micros += seconds_to_micros(seconds, "seconds")
        for follower in self._followers:
            follower(self.now())
        for reference in list(self._moved):
            moved = reference()
            if moved is None:
                self._moved.remove(reference)
            else:
                moved()

    def follow(self, move_to: Callable[[datetime], object]) -> None:
        """Keeps another clock in step: calls ``move_to`` with the time, now and after each :meth:`advance`.

        The ``move_to`` of a time-machine or freezegun traveller is one: then ``datetime.now()`` is this clock's time.
        """
        move_to(self.now())
        self._followers.append(move_to)

    def notify(self, moved: Callable[[], None]) -> None:
        """Calls the bound method ``moved`` after each :meth:`advance`, for as long as its object lives."""
        self._moved.append(WeakMethod(moved))


def _wall_offset() -> int:
    """Wall clock minus monotonic clock, in nanoseconds, from the closest pair of a few readings."""
    best_gap, best = None, 0
    for _ in range(5):
        before = time.monotonic_ns()
        wall = time.time_ns()
        gap = time.monotonic_ns() - before
        if best_gap is None or gap < best_gap:
            best_gap, best = gap, wall - before
        if gap < 10_000:
            break
    return best
