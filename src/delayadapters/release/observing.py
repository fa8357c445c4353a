"""What a release loop tells to whoever measures it, and how late the jobs of a batch were."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple, Protocol

from ..jobs import LATENESS_BOUNDS
from ..redis.commands import LATE_COUNTS, LATE_SUM
from .telling import short

__all__ = ["Late", "Observer", "Observers", "lateness_of", "to_count"]

log: Final = logging.getLogger("delayadapters.release")
_BOUNDS: Final = tuple(round(bound * 1e6) for bound in LATENESS_BOUNDS)


class Late(NamedTuple):
    """So many jobs of one batch in one bucket of ``LATENESS_BOUNDS``; ``micros``: their lateness together."""

    bucket: int
    jobs: int
    micros: int


class Observer(Protocol):
    """Told by the loop, in its own thread or task: quick, please."""

    def claimed(self, seconds: float, jobs: int) -> None:
        """A claim took ``seconds`` from request to answer and brought ``jobs``, those released by it included."""

    def released(self, late: Sequence[Late]) -> None:
        """Jobs were handed to the broker."""


class Observers:
    """Those of one releaser. One that raises is logged the first time, and stops nothing."""

    def __init__(self) -> None:
        self._all: tuple[Observer, ...] = ()
        self._complained = False

    def add(self, observer: Observer) -> None:
        self._all = (*self._all, observer)

    def claimed(self, seconds: float, jobs: int) -> None:
        for one in self._all:
            try:
                one.claimed(seconds, jobs)
            except Exception as error:
                self._complain(error)

    def released(self, late: Sequence[Late]) -> None:
        for one in self._all:
            try:
                one.released(late)
            except Exception as error:
                self._complain(error)

    def _complain(self, error: Exception) -> None:
        if not self._complained:
            self._complained = True
            log.warning("an observer of the release loop raised, release goes on: error=%s", short(error))


def lateness_of(dues: Iterable[int], now: int) -> list[Late]:
    """How late jobs due then are ``now``, both in microseconds. By bisection: a job costs some 50 ns."""
    ordered = sorted(dues)
    end, found = len(ordered), []
    while end:
        # The bucket of the one that is least late of those left, and all that fall into it.
        bucket = bisect_left(_BOUNDS, now - ordered[end - 1])
        start = 0 if bucket == len(_BOUNDS) else bisect_left(ordered, now - _BOUNDS[bucket], 0, end)
        found.append(Late(bucket, end - start, max(0, now * (end - start) - sum(ordered[start:end]))))
        end = start
    return found


def to_count(late: Iterable[Late], into: Mapping[str, int] | None = None) -> dict[str, int]:
    """As additions to the queue's counters."""
    out = dict(into or {})
    for one in late:
        out[LATE_COUNTS[one.bucket]] = out.get(LATE_COUNTS[one.bucket], 0) + one.jobs
        out[LATE_SUM] = out.get(LATE_SUM, 0) + one.micros
    return out
