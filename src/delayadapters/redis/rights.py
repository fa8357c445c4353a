"""Which Redis commands this package needs, and how to try each without doing anything. No I/O.

Redis checks rights before it looks at the keys: a command on a key of another type, or of none, tells whether it is
allowed and changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from .keys import ShardKeys
from .scripts import commands_of

__all__ = ["CHANNEL_ONLY", "PRODUCER", "RELEASER", "Trial", "trials"]

Words = tuple["bytes | str | int", ...]

PRODUCER_SCRIPTS: Final = (
    "cancel", "counters", "get", "loops", "page", "reschedule", "revive", "schedule", "stats", "steer",
)  # fmt: skip
RELEASER_SCRIPTS: Final = ("claim", "leave", "renew", "settle")
CHANNEL_ONLY: Final = frozenset({"publish", "subscribe", "unsubscribe", "hincrby"})
"""Without these everything works: wake-ups are lost (a second late at most), or nothing is counted."""


def _of(scripts: tuple[str, ...], *more: str) -> frozenset[str]:
    # exists is for jobs that ask for it, and then for their keys.
    return frozenset({command for name in scripts for command in commands_of(name)} | set(more)) - {"exists"}


PRODUCER: Final = _of(PRODUCER_SCRIPTS, "evalsha", "eval", "unlink", "type", "publish")
"""To schedule, look, cancel, reschedule, replay, discard and purge."""
RELEASER: Final = _of(RELEASER_SCRIPTS, "evalsha", "eval", "type", "getex", "publish", "subscribe", "unsubscribe")
"""To claim, renew, ack and fail."""


class Trial(NamedTuple):
    """``words``: a command that does nothing but show whether it is allowed."""

    name: str
    words: Words


def trials(keys: ShardKeys) -> list[Trial]:
    """One a command, on a key of the shard that nobody uses; the first creates it for ten seconds, the last deletes it.

    ``subscribe`` and ``unsubscribe`` are not among them: they need a connection of their own.
    """
    scratch = keys.due.rsplit(b":", 1)[0] + b":doctor"
    arguments: Mapping[str, Words] = {
        "del": (),
        "evalsha": (),
        "get": (),
        "getex": (),
        "hdel": ("f",),
        "hget": ("f",),
        "hgetall": (),
        "hincrby": ("f", 0),
        "hlen": (),
        "hmget": ("f",),
        "hset": ("f", "v"),
        "incrby": (0,),
        "llen": (),
        "lpop": (),
        "lpos": ("v",),
        "lrem": (0, "v"),
        "ltrim": (0, -1),
        "pexpire": (10_000,),
        "pttl": (),
        "rpush": ("v",),
        "sadd": ("v",),
        "scard": (),
        "sismember": ("v",),
        "srem": ("v",),
        "type": (),
        "zadd": (0, "v"),
        "zcard": (),
        "zcount": (0, 0),
        "zmscore": ("v",),
        "zrange": (0, 0),
        "zrem": ("v",),
        "zremrangebyrank": (0, 0),
        "zscore": ("v",),
    }
    special: Mapping[str, Words] = {
        "eval": ("EVAL", "return 1", 1, scratch),
        "evalsha": ("EVALSHA", "0" * 40, 1, scratch),
        "publish": ("PUBLISH", keys.wake, "doctor"),
        "rename": ("RENAME", scratch, scratch),
        "time": ("TIME",),
    }
    first = [Trial("set", ("SET", scratch, "0", "PX", 10_000))]
    plain = [
        Trial(name, special.get(name, (name.upper(), scratch, *arguments.get(name, ()))))
        for name in sorted({*arguments, *special} - {"del"})
    ]
    return [*first, *plain, Trial("del", ("DEL", scratch)), Trial("unlink", ("UNLINK", scratch))]
