"""The names of a queue's keys; nowhere else are they built. All keys of a shard share one hash tag (Redis Cluster)."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, fields

__all__ = ["ShardKeys", "check_name", "shard_of"]


@dataclass(frozen=True, slots=True)
class ShardKeys:
    """The keys and the channel of one shard.

    ====================  ======  ===================================================================================
    ``{n:s}:due``         zset    entry → the microsecond at which to release it (due, or the next try after a failure)
    ``{n:s}:leased``      zset    entry → lease deadline, microseconds; also the fence
    ``{n:s}:dead``        zset    entry → time of death, microseconds
    ``{n:s}:entries``     hash    id → packed record (see ``records.py``)
    ``{n:s}:seq``         string  counter from which entries are minted
    ``{n:s}:watch``       string  the loop that sleeps precisely for this shard; expires
    ``{n:s}:loops``       hash    loop → its last call and lease, so that a repeated call gets the same answer; and
                                  ``beat:`` loop → when it last said that it lives
    ``{n:s}:calls``       hash    call token → answer, for calls that changed something; expires (and ``:calls-old``)
    ``{n:s}:released``    set     ids released recently; expires (and ``:released-old``)
    ``{n:s}:released-new``  list  ids released many at once, recently; expires
    ``{n:s}:counts``      hash    what was ever done, in numbers: the counters of the metrics
    ``{n:s}:imported``    set     tokens of the jobs taken in by an import; expires
    ``{n:s}:wake``        channel the head changed, or help is wanted
    ====================  ======  ===================================================================================
    """

    due: bytes
    leased: bytes
    dead: bytes
    entries: bytes
    seq: bytes
    watch: bytes
    loops: bytes
    calls: bytes
    calls_old: bytes
    released: bytes
    released_old: bytes
    released_new: bytes
    counts: bytes
    imported: bytes
    wake: bytes

    @classmethod
    def of(cls, name: str, shard: int) -> ShardKeys:
        """The keys of shard number ``shard`` of the queue ``name``."""
        tag = f"{{{name}:{shard}}}:"
        return cls(**{field.name: (tag + field.name.replace("_", "-")).encode() for field in fields(cls)})

    def stored(self) -> list[bytes]:
        """Every key that may exist in Redis (the channel is none)."""
        return [getattr(self, field.name) for field in fields(self) if field.name != "wake"]


def check_name(name: str) -> str:
    """A queue name: a non-empty str without braces, which would change the hash tag.

    Raises:
        TypeError, ValueError: anything else.
    """
    if not isinstance(name, str):
        raise TypeError(f"name must be a str, got {name!r}")
    if not name or "{" in name or "}" in name:
        raise ValueError(f"name must be non-empty and without braces, got {name!r}")
    return name


def shard_of(id: bytes, shards: int) -> int:
    """The shard an id lives in."""
    return zlib.crc32(id) % shards if shards > 1 else 0
