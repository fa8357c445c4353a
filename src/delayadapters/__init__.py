"""A durable, exact delay queue on Redis for the task framework you already have. See README.md."""

from .errors import (
    BrokerDown,
    DelayError,
    JobExists,
    LeaseLost,
    OutcomeUnknown,
    OutOfMemory,
    PayloadTooLarge,
    PermissionDenied,
    ReadOnlyReplica,
    RecordUnreadable,
    RedisFault,
    RedisUnavailable,
    ReplicationTimeout,
    ScriptFailed,
    WrongKeyType,
)
from .jobs import Claim, Counters, Job, Lateness, Loop, NewJob, Outcome, Page, Payload, State, Stats
from .memory import ManualClock, MemoryDelayQueue
from .redis.aio import AsyncDelayQueue
from .redis.sync import DelayQueue
from .release.aio import AsyncReleaser
from .release.publisher import AsyncPublisher, Batch, Published, Publisher
from .release.settings import ReleaserStats
from .release.threads import Releaser

__version__ = "0.1.0"

__all__ = [
    "AsyncDelayQueue",
    "AsyncPublisher",
    "AsyncReleaser",
    "Batch",
    "BrokerDown",
    "Claim",
    "Counters",
    "DelayError",
    "DelayQueue",
    "Job",
    "JobExists",
    "Lateness",
    "LeaseLost",
    "Loop",
    "ManualClock",
    "MemoryDelayQueue",
    "NewJob",
    "OutOfMemory",
    "Outcome",
    "OutcomeUnknown",
    "Page",
    "Payload",
    "PayloadTooLarge",
    "PermissionDenied",
    "Published",
    "Publisher",
    "ReadOnlyReplica",
    "RecordUnreadable",
    "RedisFault",
    "RedisUnavailable",
    "Releaser",
    "ReleaserStats",
    "ReplicationTimeout",
    "ScriptFailed",
    "State",
    "Stats",
    "WrongKeyType",
]
