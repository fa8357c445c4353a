"""The metrics: their names, kinds and meanings, once for Prometheus and OpenTelemetry. docs/reference/metrics.md
explains them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from ..release.settings import ReleaserStats
from .reading import Snapshot

__all__ = [
    "BATCH_SIZE",
    "CLAIM_DURATION",
    "COUNTERS",
    "GAUGES",
    "LATENESS",
    "LOOP_COUNTERS",
    "UP",
    "Metric",
    "every_name",
]

PREFIX: Final = "delayadapters_"


@dataclass(frozen=True, slots=True)
class Metric:
    """``name`` as exported. ``value`` reads it; of a histogram, nothing does."""

    name: str
    help: str
    value: Callable[[Any], float] = lambda _: 0.0


def _gauge(name: str, help: str, value: Callable[[Snapshot], float]) -> Metric:
    return Metric(PREFIX + name, help, value)


def _counter(name: str, help: str, field: str | None = None) -> Metric:
    attribute = field or name
    return Metric(f"{PREFIX}{name}_total", help, lambda seen: float(getattr(seen.counters, attribute)))


def _of_loop(name: str, help: str, field: str) -> Metric:
    def value(stats: ReleaserStats) -> float:
        return float(getattr(stats, field))

    return Metric(f"{PREFIX}{name}_total", help, value)


UP: Final = Metric(PREFIX + "up", "1: Redis answered this scrape; 0: it did not, and nothing is known of the queue.")

GAUGES: Final = (
    _gauge("waiting", "Jobs that wait, those due included.", lambda seen: seen.stats.waiting),
    _gauge("due_unclaimed", "Jobs that are due and not claimed yet; near 0 when healthy.", lambda seen: seen.stats.due),
    _gauge(
        "oldest_overdue_seconds",
        "Seconds the first waiting job is past its due time; 0 when healthy.",
        lambda seen: seen.stats.oldest_overdue,
    ),
    _gauge("leased", "Jobs being released right now.", lambda seen: seen.stats.leased),
    _gauge("dead", "Dead jobs: set aside after repeated failures.", lambda seen: seen.stats.dead),
    _gauge("loops_alive", "Release loops heard of lately; with shards, each once a shard.", lambda seen: seen.alive),
)

COUNTERS: Final = (
    _counter("scheduled", "Entries stored."),
    _counter("replaced", "Entries that made way for another of their id."),
    _counter("cancelled", "Entries cancelled."),
    _counter("rescheduled", "Entries given another due time."),
    _counter("released", "Jobs handed to the broker."),
    _counter("released_direct", "Of those, by the release script itself: exactly once.", "direct"),
    _counter("requeued", "Leases that passed: a crash, or a loop that was stopped."),
    _counter("given_back", "Claims returned unpublished: the broker was down, or the loop stopped."),
    _counter("failed", "Releases that failed through the job's own fault."),
    _counter("died", "Jobs that died.", "dead"),
    _counter("replayed", "Dead jobs made to wait again."),
    _counter("discarded", "Dead jobs deleted."),
    _counter("dropped", "Entries found without a record."),
)

LATENESS: Final = Metric(PREFIX + "lateness_seconds", "Release instant minus due time.")

LOOP_COUNTERS: Final = (
    _of_loop("redis_faults", "Redis requests of this process's loop that failed and were repeated.", "faults"),
    _of_loop("broker_pauses", "Times this process's loop found the broker down.", "pauses"),
    _of_loop("stale_acks", "Acks of this process's loop refused because its lease had passed.", "stale_acks"),
)

CLAIM_DURATION: Final = Metric(PREFIX + "claim_duration_seconds", "Of a claim, request to answer; of this process.")
BATCH_SIZE: Final = Metric(PREFIX + "batch_size", "Jobs a claim brought, when it brought any; of this process.")


def every_name() -> frozenset[str]:
    """Every name as a query says it: a histogram by its three series."""
    plain = {one.name for one in (UP, *GAUGES, *COUNTERS, *LOOP_COUNTERS)}
    histograms = (LATENESS, CLAIM_DURATION, BATCH_SIZE)
    return frozenset(plain | {one.name + end for one in histograms for end in ("_bucket", "_sum", "_count")})
