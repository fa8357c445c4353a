"""Jobs, loops and numbers as plain values: what ``--json`` prints and what a worker answers to remote control."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .due import from_micros
from .jobs import LATENESS_BOUNDS, Job, Lateness, Loop, Stats

__all__ = ["job_view", "lateness_view", "loop_view", "quantile", "stats_view"]


def stats_view(name: str, stats: Stats) -> dict[str, Any]:
    """The queue in numbers."""
    return {
        "queue": name,
        "waiting": stats.waiting,
        "due": stats.due,
        "leased": stats.leased,
        "dead": stats.dead,
        "next_due": None if stats.next_due is None else from_micros(stats.next_due).isoformat(),
        "oldest_overdue": stats.oldest_overdue,
    }


def job_view(job: Job) -> dict[str, Any]:
    """A job without its payload."""
    meta: Mapping[str, str] = job.meta
    return {
        "id": job.id,
        "task": meta.get("task"),
        "queue": meta.get("queue"),
        "due": job.due_at.isoformat(),
        "state": job.state.value,
        "attempts": job.attempts,
        "requeues": job.requeues,
        "reason": job.reason,
    }


def loop_view(loop: Loop) -> dict[str, Any]:
    """A release loop: when it was last heard of, whether it is taken for alive and whether it watches."""
    return {
        "name": loop.name,
        "shard": loop.shard,
        "seen_ago": round(loop.seen_ago, 3),
        "alive": loop.alive,
        "watching": loop.watching,
    }


def quantile(lateness: Lateness, share: float) -> float | None:
    """Seconds which that share of all released jobs was not later than, as far as the buckets tell.

    None: nothing was released, or it was later than the last bound.
    """
    wanted, seen = share * lateness.count, 0
    if not lateness.count:
        return None
    counts: Sequence[int] = lateness.counts
    for bound, count in zip(LATENESS_BOUNDS, counts, strict=False):
        seen += count
        if seen >= wanted:
            return bound
    return None


def lateness_view(lateness: Lateness) -> dict[str, Any]:
    """How late releases were, of all that were ever counted: upper bounds, seconds."""
    return {
        "released": lateness.count,
        "mean": round(lateness.sum / lateness.count, 6) if lateness.count else None,
        "p50": quantile(lateness, 0.5),
        "p99": quantile(lateness, 0.99),
    }
