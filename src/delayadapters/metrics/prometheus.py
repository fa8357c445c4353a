"""A Prometheus collector over delay queues."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

try:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
    from prometheus_client.registry import Collector
except ImportError as error:
    raise ImportError("these metrics need prometheus-client: pip install 'delayadapters[metrics]'") from error

from ..jobs import LATENESS_BOUNDS
from ..redis.aio import AsyncDelayQueue
from ..redis.sync import DelayQueue
from ..release.telling import short
from . import names
from .measuring import Measures, SomeReleaser
from .reading import Snapshot, reader_of

__all__ = ["QueueCollector"]

log: Final = logging.getLogger("delayadapters.metrics")


class QueueCollector(Collector):
    """The metrics of a queue, read from Redis at each scrape, and of a release loop in this process.

    ::

        REGISTRY.register(QueueCollector(queue, releaser))

    While Redis does not answer, a scrape says ``delayadapters_up 0`` and raises nothing. It takes as long as the
    queue's client does to give up: for a queue of its own, ``DelayQueue.from_url(url, timeout=2)`` is good.

    Args:
        queue: a DelayQueue; or an AsyncDelayQueue, then ``loop`` is its event loop (default: the running one).
        releaser: of this process, if it has one.

    Raises:
        TypeError, RuntimeError: see :func:`~delayadapters.metrics.reading.reader_of`.
    """

    def __init__(
        self,
        queue: DelayQueue | AsyncDelayQueue,
        releaser: SomeReleaser | None = None,
        *,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self._sources: list[_Source] = []
        self.add(queue, releaser, loop=loop)

    def add(
        self,
        queue: DelayQueue | AsyncDelayQueue,
        releaser: SomeReleaser | None = None,
        *,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        """Another queue. One registry takes one collector: two would tell of the same metrics twice."""
        self._sources.append(_Source(queue, releaser, loop))

    def describe(self) -> Iterable[Metric]:
        """Nothing: else registering would ask Redis."""
        return ()

    def collect(self) -> Iterator[Metric]:
        seen = [(source, source.read()) for source in self._sources]
        up = GaugeMetricFamily(names.UP.name, names.UP.help, labels=["queue"])
        for source, snapshot in seen:
            up.add_metric([source.name], 0 if snapshot is None else 1)
        yield up
        there = [(source.name, snapshot) for source, snapshot in seen if snapshot is not None]
        yield from _families(GaugeMetricFamily, names.GAUGES, there)
        yield from _families(CounterMetricFamily, names.COUNTERS, there)
        late = HistogramMetricFamily(names.LATENESS.name, names.LATENESS.help, labels=["queue"])
        for name, snapshot in there:
            lateness = snapshot.counters.lateness
            late.add_metric([name], _buckets(LATENESS_BOUNDS, lateness.counts), lateness.sum)
        yield late
        loops = [source for source in self._sources if source.releaser is not None]
        if loops:
            stats = [(source.name, source.releaser.stats) for source in loops if source.releaser is not None]
            yield from _families(CounterMetricFamily, names.LOOP_COUNTERS, stats)
            yield _histogram(names.CLAIM_DURATION, [(one.name, one.measures.durations) for one in loops])
            yield _histogram(names.BATCH_SIZE, [(one.name, one.measures.batches) for one in loops])


class _Source:
    """One queue, and the loop of this process that releases it."""

    def __init__(
        self,
        queue: DelayQueue | AsyncDelayQueue,
        releaser: SomeReleaser | None,
        loop: asyncio.AbstractEventLoop | None,
    ) -> None:
        self._ask = reader_of(queue, loop)
        self.name = queue.name
        self.releaser = releaser
        self.measures = Measures()
        if releaser is not None:
            releaser.observe(self.measures)
        self._lock = threading.Lock()
        self._down = False

    def read(self) -> Snapshot | None:
        """None: Redis does not answer. Said in the log once, and once when it does again."""
        try:
            snapshot = self._ask()
        except Exception as error:
            self._tell(error)
            return None
        self._tell(None)
        return snapshot

    def _tell(self, error: Exception | None) -> None:
        down = error is not None
        with self._lock:
            changed, self._down = down is not self._down, down
        if changed and error is not None:
            log.warning("metrics queue=%s up=0 error=%s", self.name, short(error))
        elif changed:
            log.info("metrics queue=%s up=1", self.name)


def _families(
    family: Callable[..., Any], metrics: Iterable[names.Metric], seen: Sequence[tuple[str, Any]]
) -> Iterator[Metric]:
    for one in metrics:
        made = family(one.name, one.help, labels=["queue"])
        for name, source in seen:
            made.add_metric([name], one.value(source))
        yield made


def _histogram(metric: names.Metric, seen: Sequence[tuple[str, Any]]) -> Metric:
    family = HistogramMetricFamily(metric.name, metric.help, labels=["queue"])
    for name, histogram in seen:
        family.add_metric([name], _buckets(histogram.bounds, list(histogram.counts)), histogram.sum)
    return family


def _buckets(bounds: Sequence[float], counts: Sequence[int]) -> list[tuple[str, float]]:
    """Cumulative, as Prometheus has them."""
    out, total = [], 0
    for bound, count in zip((*map(str, bounds), "+Inf"), counts, strict=True):
        total += count
        out.append((bound, float(total)))
    return out
