"""What this process's release loop measures: histograms of its claims."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Sequence
from typing import Final, Protocol

from ..release.observing import Late, Observer
from ..release.settings import ReleaserStats

__all__ = ["BATCH_BOUNDS", "CLAIM_BOUNDS", "Histogram", "Measures", "SomeReleaser"]

CLAIM_BOUNDS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
"""Seconds."""
BATCH_BOUNDS: Final = (1.0, 2.0, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0, 1000.0)
"""Jobs."""


class SomeReleaser(Protocol):
    """What is asked of a Releaser or an AsyncReleaser."""

    stats: ReleaserStats

    def observe(self, observer: Observer) -> None: ...
    @property
    def running(self) -> bool: ...
    @property
    def heard_ago(self) -> float: ...
    @property
    def lease(self) -> float: ...


class Histogram:
    """Counts by upper bound; the last is for all above."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


class Measures:
    """An observer of one releaser."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # a loop has a thread a shard
        self.durations = Histogram(CLAIM_BOUNDS)
        self.batches = Histogram(BATCH_BOUNDS)

    def claimed(self, seconds: float, jobs: int) -> None:
        with self._lock:
            self.durations.add(seconds)
            if jobs:
                self.batches.add(jobs)

    def released(self, late: Sequence[Late]) -> None:
        """Counted in Redis."""
