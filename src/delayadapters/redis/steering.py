"""Many jobs at once: steered, moved to another server or looked over, in batches that no other client feels.

Generators of requests, as in :mod:`.verbs`; no I/O.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Literal, TypeAlias

import msgpack

from ..due import Delay, check_id, resolve
from ..jobs import Outcome, State
from . import commands, records
from .commands import Call, Plain, Row
from .keys import ShardKeys, shard_of
from .scripts import load
from .verbs import PAGE_ROWS, Steps, Verbs

__all__ = [
    "BATCH",
    "Disagreements",
    "Incoming",
    "Steer",
    "beyond",
    "disagreements",
    "falling_due",
    "orphans",
    "restore",
    "server_time",
    "steer_ids",
    "steer_rows",
]

Steer: TypeAlias = Literal["cancel", "reschedule", "replay", "discard"]

BATCH: Final = 100
"""Entries a script call: it holds Redis for well under a millisecond."""
BATCH_BYTES: Final = 1 << 20
KEEP_TOKENS_MS: Final = 7 * 86_400_000
"""How long an import is remembered after its last batch."""
_PATIENCE: Final = 40
_DONE: Final = {
    "cancel": Outcome.CANCELLED,
    "reschedule": Outcome.RESCHEDULED,
    "replay": Outcome.REPLAYED,
    "discard": Outcome.DISCARDED,
}
_SAID: Final = {"f": Outcome.IN_FLIGHT, "r": Outcome.RELEASED, "n": Outcome.NOT_FOUND}


# ------------------------------------------------------------------------------------------------------------ steering


def _steer(
    keys: ShardKeys, verb: Steer, by: str, items: Sequence[bytes], when: int, patient: bool, now: int | None
) -> Call[list[Outcome] | None]:
    """Outcomes of as many items, from the front, as were done; None: ask again."""

    def parse(reply: Any) -> list[Outcome] | None:
        letters = reply.decode()
        return [_SAID.get(letter) or _DONE[verb] for letter in letters] or None

    script = load("steer")
    bound = script.bind(
        keys,
        items,
        now=b"" if now is None else now,
        call=commands.token(),
        verb=verb,
        by=by,
        when=when,
        patient=int(patient),
        wake=keys.wake,
    )
    return Call(script, *bound, parse, keys)


def _steer_all(verbs: Verbs, verb: Steer, by: str, items: Sequence[bytes], when: int) -> Steps[list[Outcome]]:
    """All of ``items``, of whatever shards, in batches."""
    out: dict[int, Outcome] = {}
    shards: dict[ShardKeys, list[int]] = {}
    for index, item in enumerate(items):
        raw_id = item if by == "id" else item[6:]
        shards.setdefault(verbs.shards[shard_of(raw_id, len(verbs.shards))], []).append(index)
    for keys, indexes in shards.items():
        at = asked = 0
        while at < len(indexes):
            chunk = indexes[at : at + BATCH]
            said = yield _steer(keys, verb, by, [items[i] for i in chunk], when, asked < _PATIENCE, verbs.now())
            asked += 1
            if said:
                out.update(zip(chunk, said, strict=False))
                at += len(said)
                asked = 0
    return [out[i] for i in range(len(items))]


def steer_ids(
    verbs: Verbs, verb: Steer, ids: Iterable[str], delay: Delay | None = 0, at: datetime | None = None
) -> Steps[list[Outcome]]:
    """What the verb does to one id, for many; outcomes in their order. An id given twice has one outcome.

    Raises:
        TypeError, ValueError: a bad id or time; nothing was done.
    """
    if isinstance(ids, (str, bytes)) or not isinstance(ids, Iterable):
        raise TypeError(f"ids must be an iterable of ids, got {ids!r}")
    raw = [check_id(id) for id in ids]
    when = resolve(delay, at, now=time.time_ns() // 1000)
    once = list(dict.fromkeys(raw))
    outcomes = yield from _steer_all(verbs, verb, "id", once, -when.micros if when.relative else when.micros)
    by_id = dict(zip(once, outcomes, strict=True))
    return [by_id[one] for one in raw]


def steer_rows(verbs: Verbs, verb: Steer, some: Sequence[Row], at: int = 0) -> Steps[list[Outcome]]:
    """For exactly these entries, whatever else their ids have waiting. ``at``: microseconds; 0: now.

    NOT_FOUND: it is no more there; IN_FLIGHT: it is being released.
    """
    return (yield from _steer_all(verbs, verb, "entry", [row.place.entry for row in some], at))


# ------------------------------------------------------------------------------------------------------------- numbers


def server_time(verbs: Verbs) -> Steps[int]:
    """Microseconds since the epoch on the Redis server's clock."""
    given = verbs.now()
    if given is not None:
        return given
    keys = verbs.shards[0]
    now: int = yield Plain([("TIME",)], lambda replies: int(replies[0][0]) * 1_000_000 + int(replies[0][1]), keys)
    return now


def falling_due(verbs: Verbs, edges: Sequence[int]) -> Steps[list[int]]:
    """How many entries wait up to the first edge, between each two, and from the last on. Edges: microseconds, rising.

    A few ZCOUNTs a shard, however long the queue.
    """
    bounds = ["-inf", *(f"({edge}" for edge in edges)], [*(str(edge) for edge in edges), "+inf"]
    totals = [0] * (len(edges) + 1)
    for keys in verbs.shards:
        asked: list[tuple[bytes | str | int, ...]] = [
            ("ZCOUNT", keys.due, low, high) for low, high in zip(*bounds, strict=True)
        ]
        counts = yield Plain(asked, lambda replies: [int(reply) for reply in replies], keys)
        totals = [a + b for a, b in zip(totals, counts, strict=True)]
    return totals


def beyond(verbs: Verbs) -> Steps[str | None]:
    """The key that shows that the queue has more shards than we were told; None: it has not."""
    seq = ShardKeys.of(verbs.name, len(verbs.shards)).seq
    # Through a key of another slot than those of `shard`: a plain command finds its own way in a cluster.
    kind = yield Plain([("TYPE", seq)], lambda replies: replies[0], verbs.shards[0])
    return None if kind in (b"none", "none") else seq.decode()


# -------------------------------------------------------------------------------------------------------------- moving


@dataclass(frozen=True, slots=True)
class Incoming:
    """A job of another server. ``token`` names the entry it was there; ``score``: as in :class:`Row`."""

    raw_id: bytes
    token: bytes
    state: State
    score: int
    due: int
    flags: int
    tail: bytes


def restore(verbs: Verbs, jobs: Sequence[Incoming]) -> Steps[int]:
    """Stores those that this queue has not been given before, in their order; answers how many that were.

    Whether a job came before is known by its token, remembered in the step that stores it: a job that was taken in and
    released or cancelled meanwhile does not come back.
    """
    taken = 0
    shards: dict[ShardKeys, list[Incoming]] = {}
    for job in jobs:
        shards.setdefault(verbs.shards[shard_of(job.raw_id, len(verbs.shards))], []).append(job)
    for keys, some in shards.items():
        for chunk in _chunks(some):
            taken += yield _restore(keys, chunk, verbs.now())
    return taken


def _chunks(jobs: Iterable[Incoming]) -> Iterator[list[Incoming]]:
    chunk: list[Incoming] = []
    size = 0
    for job in jobs:
        if chunk and (len(chunk) == BATCH or size + len(job.tail) > BATCH_BYTES):
            yield chunk
            chunk, size = [], 0
        chunk.append(job)
        size += len(job.tail)
    if chunk:
        yield chunk


def _restore(keys: ShardKeys, jobs: Sequence[Incoming], now: int | None) -> Call[int]:
    flat: list[Any] = []
    for job in jobs:
        flat += (job.raw_id, job.token, job.state.value, job.score, job.due, job.flags, job.tail)
    script = load("restore")
    bound = script.bind(
        keys,
        now=b"" if now is None else now,
        call=commands.token(),
        keep=KEEP_TOKENS_MS,
        wake=keys.wake,
        jobs=msgpack.packb(flat, use_bin_type=False),
    )
    return Call(script, *bound, lambda reply: reply.count(b"i"), keys)


# --------------------------------------------------------------------------------------------------------- looking over


@dataclass(frozen=True, slots=True)
class Disagreements:
    """``lost``: entries without a record of their own. ``unseen``: more records than entries account for (ids with
    several entries have a field more each). ``looked_at``: entries; fewer than there are when ``limit`` ended it."""

    lost: Sequence[str]
    unseen: int
    looked_at: int


def disagreements(verbs: Verbs, limit: int) -> Steps[Disagreements]:
    """Looks over up to ``limit`` entries a shard and set: 200 a script call, nothing is changed."""
    lost: list[str] = []
    unseen = looked = 0
    for keys in verbs.shards:
        records_, members = 0, 0
        for which in ("due", "leased", "dead"):
            at = 0
            while at < limit:
                fields, total, count, bad = yield _inspect(keys, which, at, min(PAGE_ROWS, limit - at))
                records_, members = fields, total
                lost += [records.id_of(entry) for entry in bad]
                looked += count
                at += count
                if count == 0:
                    break
        unseen += max(0, records_ - members)
    return Disagreements(lost, unseen, looked)


def _inspect(keys: ShardKeys, which: str, at: int, count: int) -> Call[tuple[int, int, int, list[bytes]]]:
    def parse(reply: Any) -> tuple[int, int, int, list[bytes]]:
        return int(reply[0]), int(reply[1]), int(reply[2]), list(reply[3:])

    script = load("inspect")
    return Call(script, *script.bind(keys, which=which, start=at, count=count), parse, keys)


def orphans(verbs: Verbs, limit: int) -> Steps[list[str]]:
    """Ids of records that no entry has, among the first ``limit`` of each shard.

    HSCAN by the fifty, and of what looks like one a second look: an entry may have moved between two sets meanwhile.
    """
    found: list[str] = []
    for keys in verbs.shards:
        cursor, seen = b"0", 0
        while seen < limit:
            cursor, fields = yield _scan(keys, cursor)
            seen += len(fields)
            for entry in [entry for entry in fields if entry is not None]:
                if not (yield _is_there(keys, entry)):
                    job = yield commands.get(keys, entry[6:])
                    if job is None and (yield _has_record(keys, entry)):
                        found.append(records.id_of(entry))
            if cursor in (b"0", 0, "0"):
                break
    return found


def _scan(keys: ShardKeys, cursor: Any) -> Plain[tuple[Any, list[bytes | None]]]:
    """Entries by their records' fields; None for the lists of an id's further entries."""

    def parse(replies: list[Any]) -> tuple[Any, list[bytes | None]]:
        following, content = replies[0]
        pairs = content.items() if isinstance(content, dict) else zip(content[::2], content[1::2], strict=True)
        return following, [_entry_of(field, record) for field, record in pairs]

    return Plain([("HSCAN", keys.entries, cursor, "COUNT", 50)], parse, keys)


def _entry_of(field: bytes, record: bytes) -> bytes | None:
    if field[:1] == b"\xff":
        return None
    return field[1:] if field[:1] == b"\xfe" else record[1:7] + field


def _is_there(keys: ShardKeys, entry: bytes) -> Plain[bool]:
    asked: list[tuple[bytes | str | int, ...]] = [("ZSCORE", key, entry) for key in (keys.due, keys.leased, keys.dead)]
    return Plain(asked, lambda replies: any(reply is not None for reply in replies), keys)


def _has_record(keys: ShardKeys, entry: bytes) -> Plain[bool]:
    field = b"\xfe" + entry if entry[5] % 2 else entry[6:]
    return Plain([("HGET", keys.entries, field)], lambda replies: (replies[0] or b"")[1:7] == entry[:6], keys)
