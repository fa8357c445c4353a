"""The numbers of a release loop, and its counters."""

from __future__ import annotations

from dataclasses import dataclass

from ..due import lease_micros, seconds_to_micros

__all__ = ["ReleaseSettings", "ReleaserStats"]


@dataclass(frozen=True, slots=True)
class ReleaseSettings:
    """How a loop behaves. Times in seconds.

    Raises:
        TypeError, ValueError: naming the argument.
    """

    lease: float = 30.0
    """A claim's lease, renewed at a third while its release goes on. After a crash a job waits at most this long."""
    patience: float = 120.0
    """A publisher without progress for this long hangs: its leases are left to pass, and another loop takes over."""
    batch: int = 500
    """At most so many jobs a claim (1 to 1,000); the loop finds the size whose script takes half a millisecond."""
    max_attempts: int = 8
    """Failed releases that are a job's own fault before it is dead."""
    backoff: float = 1.0
    """Before the first retry of a failed release; doubles each time, with jitter."""
    backoff_cap: float = 300.0
    poll: float = 0.95
    """The safety poll: what a lost wake-up costs at most."""
    watch: float = 1.85
    """The watch lease. With ``slack`` it is what the crash of the watching loop costs at most: 2 s."""
    slack: float = 0.14
    """Other loops look this long after the lapse: a little more than two polls after the renewal they saw, so that they
    always come just after one, and each asks once in two polls."""
    thorough: float = 4.0
    """How often an idle watcher also looks at the clock and at other loops' leases."""
    target: int = 500
    """Microseconds that a claim script should take. Another client waits for one script, at times for two."""
    pause_base: float = 0.2
    """First pause while the broker is down; doubles up to ``pause_cap``, with jitter."""
    pause_cap: float = 15.0
    fault_base: float = 0.05
    """First pause after a Redis fault; doubles up to ``fault_cap``, with jitter."""
    fault_cap: float = 2.0

    def __post_init__(self) -> None:
        lease_micros(self.lease)
        for name, low, high in (("batch", 1, 1000), ("max_attempts", 1, 1_000_000)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
                raise ValueError(f"{name} must be an int from {low} to {high}, got {value!r}")
        for name in ("patience", "backoff", "backoff_cap", "poll", "watch", "slack", "thorough"):
            if seconds_to_micros(getattr(self, name), name) <= 0:
                raise ValueError(f"{name} must be a positive number of seconds, got {getattr(self, name)!r}")


@dataclass(slots=True)
class ReleaserStats:
    """What a loop has done since it started. Counts of jobs, unless said otherwise."""

    released: int = 0
    """Published and acked."""
    direct: int = 0
    """Moved into the broker by the release script."""
    failed: int = 0
    """Releases that failed through the job's own fault."""
    dead: int = 0
    given_back: int = 0
    requeued: int = 0
    """Taken back from a lease that had passed, whoever held it."""
    stale_acks: int = 0
    """Acks refused because the lease was no longer ours: each may be a duplicate."""
    dropped: int = 0
    """Entries without a record (keys edited by hand)."""
    claims: int = 0
    """Claim requests answered."""
    peeks: int = 0
    faults: int = 0
    """Redis requests that failed and were repeated."""
    pauses: int = 0
    """Times the broker was found down."""
    latest: float = 0.0
    """Greatest lateness of a direct release, seconds."""
    batch: int = 100
    """The batch size the loop has arrived at."""
