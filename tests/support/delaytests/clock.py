"""A clock that stands still until told otherwise."""

from __future__ import annotations

import threading
from datetime import datetime, timedelta, timezone

__all__ = ["FakeClock"]

_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_START = datetime(2030, 1, 1, tzinfo=timezone.utc)


class FakeClock:
    """Called, it answers microseconds since the epoch (what ``queue._clock`` wants); :meth:`seconds` answers a float
    (what ``MemoryDelayQueue(clock=…)`` wants). Starts at 2030-01-01 UTC. Safe to use from several threads."""

    def __init__(self, start: datetime | int = _START) -> None:
        self._lock = threading.Lock()
        self._now = 0
        self.set(start)

    def __call__(self) -> int:
        with self._lock:
            return self._now

    def seconds(self) -> float:
        return self() / 1_000_000

    @property
    def datetime(self) -> datetime:
        """Now, as an aware UTC datetime."""
        return _EPOCH + timedelta(microseconds=self())

    def advance(self, seconds: float | timedelta = 0, *, micros: int = 0) -> int:
        """Move by ``seconds`` (negative: back) and ``micros``; answers the new now in microseconds."""
        if isinstance(seconds, timedelta):
            micros += seconds // timedelta(microseconds=1)
        else:
            micros += round(seconds * 1_000_000)
        with self._lock:
            self._now += micros
            return self._now

    def set(self, moment: datetime | int) -> None:
        """Jump to an aware datetime or to microseconds since the epoch."""
        micros = moment if isinstance(moment, int) else (moment - _EPOCH) // timedelta(microseconds=1)
        with self._lock:
            self._now = micros
