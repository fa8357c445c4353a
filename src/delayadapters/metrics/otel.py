"""The metrics as OpenTelemetry instruments."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

try:
    from opentelemetry.metrics import CallbackOptions, Meter, Observation, get_meter
except ImportError as error:
    raise ImportError("these metrics need opentelemetry-api: pip install 'delayadapters[metrics]'") from error

from ..jobs import LATENESS_BOUNDS
from ..redis.aio import AsyncDelayQueue
from ..redis.sync import DelayQueue
from ..release.observing import Late
from . import names
from .measuring import BATCH_BOUNDS, CLAIM_BOUNDS, SomeReleaser
from .reading import Snapshot, reader_of

__all__ = ["instrument"]

_FRESH: Final = 1.0
"""Seconds for which a reading serves: an export asks once an instrument."""


def instrument(
    queue: DelayQueue | AsyncDelayQueue,
    releaser: SomeReleaser | None = None,
    *,
    meter: Meter | None = None,
    loop: asyncio.AbstractEventLoop | None = None,
) -> None:
    """Makes the instruments of a queue, under the names that Prometheus has (docs/reference/metrics.md).

    Gauges and counters are read from Redis when they are exported; while it does not answer there is
    ``delayadapters_up`` 0 alone. OpenTelemetry has no histogram that is read: ``delayadapters_lateness_seconds`` holds
    the releases of *this* process, so add up those of all. A release is recorded as the average of its bucket in its
    batch: with the bucket bounds that the instrument advises, buckets and sum are exact.

    Args:
        queue, releaser, loop: as for :class:`~delayadapters.metrics.QueueCollector`.
        meter: default ``get_meter("delayadapters")`` of the global provider.
    """
    source = _Source(queue, loop)
    made = meter or get_meter("delayadapters")
    made.create_observable_gauge(names.UP.name, [source.up], description=names.UP.help)
    for one in names.GAUGES:
        made.create_observable_gauge(one.name, [source.callback(one)], description=one.help)
    for one in names.COUNTERS:
        made.create_observable_counter(one.name, [source.callback(one)], description=one.help)
    if releaser is None:
        return
    for one in names.LOOP_COUNTERS:
        made.create_observable_counter(one.name, [_of_loop(one, releaser, source.labels)], description=one.help)
    releaser.observe(_Recorder(made, source.labels))


class _Source:
    """A queue, read once an export."""

    def __init__(self, queue: DelayQueue | AsyncDelayQueue, loop: asyncio.AbstractEventLoop | None) -> None:
        self._ask = reader_of(queue, loop)
        self.labels = {"queue": queue.name}
        self._lock = threading.Lock()
        self._last: Snapshot | None = None
        self._until = float("-inf")

    def read(self) -> Snapshot | None:
        with self._lock:
            if time.monotonic() > self._until:
                try:
                    self._last = self._ask()
                except Exception:
                    self._last = None  # delayadapters_up says so
                self._until = time.monotonic() + _FRESH
            return self._last

    def up(self, options: CallbackOptions) -> Iterable[Observation]:
        return [Observation(0 if self.read() is None else 1, self.labels)]

    def callback(self, metric: names.Metric) -> Callable[[CallbackOptions], Iterable[Observation]]:
        def observe(options: CallbackOptions) -> Iterable[Observation]:
            seen = self.read()
            return [] if seen is None else [Observation(metric.value(seen), self.labels)]

        return observe


def _of_loop(
    metric: names.Metric, releaser: SomeReleaser, labels: dict[str, str]
) -> Callable[[CallbackOptions], Iterable[Observation]]:
    return lambda options: [Observation(metric.value(releaser.stats), labels)]


class _Recorder:
    """An observer that records."""

    def __init__(self, meter: Meter, labels: dict[str, str]) -> None:
        self._labels = labels
        self._lateness = _histogram(meter, names.LATENESS, "s", LATENESS_BOUNDS)
        self._durations = _histogram(meter, names.CLAIM_DURATION, "s", CLAIM_BOUNDS)
        self._batches = _histogram(meter, names.BATCH_SIZE, "{job}", BATCH_BOUNDS)

    def claimed(self, seconds: float, jobs: int) -> None:
        self._durations.record(seconds, self._labels)
        if jobs:
            self._batches.record(jobs, self._labels)

    def released(self, late: Sequence[Late]) -> None:
        for one in late:
            average = one.micros / max(1, one.jobs) / 1e6
            for _ in range(one.jobs):
                self._lateness.record(average, self._labels)


def _histogram(meter: Meter, metric: names.Metric, unit: str, bounds: Sequence[float]) -> Any:
    try:
        return meter.create_histogram(metric.name, unit, metric.help, explicit_bucket_boundaries_advisory=list(bounds))
    except TypeError:  # opentelemetry-api before 1.30 takes no advice
        return meter.create_histogram(metric.name, unit, metric.help)
