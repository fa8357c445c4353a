"""The value types. All are frozen; times are integer microseconds since the epoch on the Redis server's clock."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final, TypeAlias

from .due import Delay, IfExists, from_micros

__all__ = [
    "Claim",
    "Command",
    "Counters",
    "IfExists",
    "Job",
    "Lateness",
    "Loop",
    "NewJob",
    "Outcome",
    "Page",
    "Payload",
    "State",
    "Stats",
]


class Outcome(str, enum.Enum):
    """What a verb did, or found instead."""

    SCHEDULED = "scheduled"
    """A new entry is stored."""
    KEPT = "kept"
    """``if_exists="keep"``: the job that was there stays; nothing was stored."""
    REPLACED = "replaced"
    """``if_exists="replace"``: the new entry is stored, the waiting one is gone."""
    CANCELLED = "cancelled"
    """The job will not be released. Final."""
    RESCHEDULED = "rescheduled"
    """The job waits for its new due time; a ``release_now`` makes it due at once."""
    IN_FLIGHT = "in_flight"
    """The job is being released right now. For ``replace``: the new entry is stored; the old may still go out once."""
    RELEASED = "released"
    """The job was released recently (the last 10,000 or so are remembered)."""
    NOT_FOUND = "not_found"
    """No such job, or it was released long ago."""
    REPLAYED = "replayed"
    """A dead job waits again, due now, its attempts counted from zero."""
    DISCARDED = "discarded"
    """A dead job was deleted."""


class State(str, enum.Enum):
    """Where a job is."""

    WAITING = "waiting"
    LEASED = "leased"
    DEAD = "dead"


class Payload(enum.IntEnum):
    """Stand-ins in a :data:`Command`, filled in by the release script: nothing is stored twice or goes stale."""

    BYTES = 0
    """The job's payload."""
    DUE_MS = 1
    """The job's due time, milliseconds since the epoch (follows a reschedule)."""
    NOW_MS = 2
    """The server's clock at release, milliseconds since the epoch."""
    UNIQUE = 3
    """32 hexadecimal characters, different for every release."""
    UNLESS_EXISTS = 4
    """First word of a guard, ``(Payload.UNLESS_EXISTS, key)``: when the key exists, no command after it is run."""
    ID = 5
    """The job's id."""
    DUE_ISO = 6
    """The job's due time as ``Job.due_at.isoformat()`` writes it (follows a reschedule)."""


Command: TypeAlias = Sequence["str | bytes | int | Payload"]
"""One Redis command of a direct release, for example ``("LPUSH", "queue", Payload.BYTES)``."""


@dataclass(frozen=True, slots=True)
class NewJob:
    """One item for ``schedule_many``; the fields are ``schedule``'s arguments.

    ``release`` makes it a direct release: these Redis commands put the job into a broker on the same server, in the
    step that removes the entry. They run in order; one that fails leaves the job waiting for a retry at that command.
    """

    payload: bytes
    delay: Delay | None = None
    at: datetime | None = None
    id: str | None = None
    meta: Mapping[str, str] | None = None
    release: Sequence[Command] | None = None


@dataclass(frozen=True, slots=True)
class Job:
    """A job as stored.

    ``due`` is the instant before which it is never released. ``attempts`` counts failed releases that were the
    job's own fault, ``requeues`` the leases that passed. ``reason`` says why the last release failed. ``outcome`` is
    set on what ``schedule``/``schedule_many`` return.
    """

    id: str
    due: int
    payload: bytes
    meta: Mapping[str, str] = field(default_factory=dict)
    state: State = State.WAITING
    attempts: int = 0
    requeues: int = 0
    reason: str | None = None
    outcome: Outcome | None = None

    @property
    def due_at(self) -> datetime:
        """``due`` as an aware UTC datetime."""
        return from_micros(self.due)


@dataclass(frozen=True, slots=True)
class Claim:
    """A due job in the hands of a releaser until its lease passes.

    ``entry`` names this one scheduling of the job; ``lease`` is the deadline (microseconds) and the fence: an ack
    quotes it, and a stale one is refused.
    """

    entry: bytes
    lease: int
    id: str
    due: int
    payload: bytes
    meta: Mapping[str, str] = field(default_factory=dict)
    attempts: int = 0
    requeues: int = 0


@dataclass(frozen=True, slots=True)
class Page:
    """Some jobs, in due order (dead jobs: in order of death). ``cursor`` continues; None: there are no more."""

    jobs: Sequence[Job]
    cursor: str | None


@dataclass(frozen=True, slots=True)
class Stats:
    """The queue in numbers. ``waiting`` includes ``due``, the number due but unclaimed; ``next_due`` is microseconds
    since the epoch, None when nothing waits; ``oldest_overdue`` the seconds the head is past its due time (0 when
    healthy)."""

    waiting: int
    due: int
    leased: int
    dead: int
    next_due: int | None
    oldest_overdue: float


LATENESS_BOUNDS: Final = (
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
    300.0,
)
"""Upper bounds of the lateness histogram's buckets, seconds; a last bucket has none."""


@dataclass(frozen=True, slots=True)
class Lateness:
    """How late released jobs were.

    ``counts[i]`` jobs were at most ``LATENESS_BOUNDS[i]`` seconds late and more than the bound before; the last of
    ``counts`` is for all that were later. ``sum``: seconds, of all together.
    """

    counts: Sequence[int] = (0,) * (len(LATENESS_BOUNDS) + 1)
    sum: float = 0.0

    @property
    def count(self) -> int:
        """Jobs measured."""
        return sum(self.counts)


@dataclass(frozen=True, slots=True)
class Counters:
    """What was ever done to a queue's entries, by whatever process; from 0 again after ``purge``.

    Every entry that was scheduled is waiting, leased or dead now, or was released, cancelled, replaced, discarded or
    dropped: the sums agree.
    """

    scheduled: int = 0
    """Entries stored."""
    replaced: int = 0
    """Entries that made way for another of their id (``if_exists="replace"``)."""
    cancelled: int = 0
    rescheduled: int = 0
    released: int = 0
    """Handed to the broker."""
    direct: int = 0
    """Of those, by the release script itself."""
    requeued: int = 0
    """Leases that passed: each may have been a duplicate release, or a crash."""
    given_back: int = 0
    """Claims returned unpublished: the broker was down, or the loop stopped."""
    failed: int = 0
    """Releases that failed through the job's own fault."""
    dead: int = 0
    """Jobs that died."""
    replayed: int = 0
    discarded: int = 0
    dropped: int = 0
    """Entries found without a record (keys edited by hand)."""
    lateness: Lateness = Lateness()
    """Release instant minus due time, of every released job."""


@dataclass(frozen=True, slots=True)
class Loop:
    """A release loop of one shard.

    ``name`` is what it calls itself (host:process, unless told otherwise). ``seen_ago``: seconds since it was heard of,
    by the server's clock: a loop at work is heard of all the time, an idle one at least every :data:`BEAT` seconds.
    ``watching``: it is the one that sleeps precisely for its shard.
    """

    name: str
    seen_ago: float
    watching: bool
    shard: int = 0

    @property
    def alive(self) -> bool:
        """Whether it was heard of in the last :data:`ALIVE` seconds. One that was killed is alive until then."""
        return self.seen_ago <= ALIVE


BEAT: Final = 20.0
"""Seconds between the heartbeats of an idle loop; the one that watches says it lives about every 5 s."""
ALIVE: Final = 45.0
"""A loop not heard of for so many seconds is taken for gone: two heartbeats, and some."""
