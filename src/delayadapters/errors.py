"""Everything that can go wrong, as one tree.

::

    DelayError
    ├── JobExists            a live job already has this id (``if_exists="error"``)
    ├── PayloadTooLarge      (also ValueError)
    ├── RecordUnreadable     a stored record we cannot parse
    ├── LeaseLost            a claim is no longer ours
    ├── BrokerDown           (also ConnectionError) for publishers to raise: nothing can be published now
    ├── ReplicationTimeout   stored, but fewer replicas/disks than asked confirmed it in time
    └── RedisFault           Redis did not do what was asked
        ├── RedisUnavailable     not reachable, closing, loading, or it did not answer in time
        │   └── OutcomeUnknown   …after the command was sent: it may have been carried out
        ├── OutOfMemory          ``maxmemory`` reached under ``noeviction``
        ├── ReadOnlyReplica      connected to a replica
        ├── WrongKeyType         a key of ours holds something else
        ├── PermissionDenied     the ACL user lacks a command, key or channel
        └── ScriptFailed         any other error reply

The redis-py exception is always the ``__cause__``. A request that raises has stored nothing, except where
:class:`OutcomeUnknown` or :class:`ReplicationTimeout` says otherwise; ``schedule_many`` may need several requests, and
those before the one that raises are done.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = [
    "BrokerDown",
    "DelayError",
    "JobExists",
    "LeaseLost",
    "OutOfMemory",
    "OutcomeUnknown",
    "PayloadTooLarge",
    "PermissionDenied",
    "ReadOnlyReplica",
    "RecordUnreadable",
    "RedisFault",
    "RedisUnavailable",
    "ReplicationTimeout",
    "ScriptFailed",
    "WrongKeyType",
]


class DelayError(Exception):
    """Base of every error this package raises on purpose, bad arguments (TypeError/ValueError) aside."""


class JobExists(DelayError):
    """A live job already has this id and ``if_exists="error"`` was asked (the default). Nothing was stored."""

    def __init__(self, ids: Sequence[str]) -> None:
        self.ids = list(ids)
        shown = ", ".join(repr(i) for i in self.ids[:5]) + (", …" if len(self.ids) > 5 else "")
        super().__init__(
            f"a job with id {shown} is already waiting or being released; "
            'pass if_exists="keep", "replace" or "add" to say what should happen'
        )

    def __reduce__(self) -> tuple[type[JobExists], tuple[list[str]]]:
        return (type(self), (self.ids,))


class PayloadTooLarge(DelayError, ValueError):
    """The payload is larger than the queue's ``max_payload`` (bytes). Nothing was stored."""


class RecordUnreadable(DelayError, ValueError):
    """A stored record is not one of ours, or was written by a newer version. The job is set aside as dead."""


class LeaseLost(DelayError):
    """The lease on a claim has passed, or somebody else holds it now: do not publish it."""


class BrokerDown(DelayError, ConnectionError):
    """Raised by a publisher: the broker takes nothing now. The batch is given back, and no job is charged with it."""


class ReplicationTimeout(DelayError):
    """The job is stored, but ``wait_replicas``/``wait_aof`` was not confirmed in time. It will still be released."""


class RedisFault(DelayError):
    """Redis did not do what was asked. The redis-py exception is ``__cause__``."""


class RedisUnavailable(RedisFault):
    """Redis could not be reached, is loading its data, or refused the connection. Nothing was stored."""


class OutcomeUnknown(RedisUnavailable):
    """The command was sent but no answer came in time: it may or may not have been carried out."""


class OutOfMemory(RedisFault):
    """Redis has reached ``maxmemory`` under ``noeviction``. Nothing was stored; release goes on and frees memory."""


class ReadOnlyReplica(RedisFault):
    """The server is a read-only replica: connect to the primary (for Sentinel: ``master_for``)."""


class WrongKeyType(RedisFault):
    """A key of this queue holds a value of another type: another program writes under the same name."""


class PermissionDenied(RedisFault):
    """The Redis ACL user lacks a command, a key pattern or a channel; ``docs/reference/acl.md`` lists all of them."""


class ScriptFailed(RedisFault):
    """Redis answered with an error that fits no other class."""
