"""Every request to Redis, built and read back. No I/O: an executor sends it and hands the reply in."""

from __future__ import annotations

import base64
import binascii
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Final, Generic, TypeVar

import msgpack

from ..errors import RecordUnreadable
from ..jobs import LATENESS_BOUNDS, Claim, Counters, IfExists, Job, Lateness, Loop, Outcome, State
from . import records
from .keys import ShardKeys
from .scripts import Script, load

__all__ = ["Call", "Claimed", "Extras", "Peek", "Plain", "Row"]

T = TypeVar("T")
PAGE_BYTES: Final = 1 << 20
"""Claims and pages end early when their records pass this many bytes."""


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """A script call: repeatable, with the same effect and answer."""

    script: Script
    keys: list[bytes]
    args: list[bytes]
    parse: Callable[[Any], T]
    shard: ShardKeys


@dataclass(frozen=True, slots=True)
class Plain(Generic[T]):
    """Plain commands in one round trip. Reads and such writes as may be repeated."""

    commands: list[tuple[bytes | str | int, ...]]
    parse: Callable[[list[Any]], T]
    shard: ShardKeys
    forgiving: bool = False
    """Errors are handed to ``parse`` among the replies."""


def token() -> bytes:
    """Names one call, so that Redis knows a repeated one."""
    return secrets.token_bytes(16)


def _now(now: int | None) -> bytes | int:
    return b"" if now is None else now


# ---------------------------------------------------------------- schedule


@dataclass(frozen=True, slots=True)
class Stored:
    """One job of a schedule call: when it is due (``When.micros``, negated when relative), and its record."""

    id: str
    raw_id: bytes
    when: int
    flags: int
    tail: bytes
    payload: bytes
    meta: Mapping[str, str]

    def due(self, now: int) -> int:
        return max(self.when, now) if self.when > 0 else now - self.when


@dataclass(frozen=True, slots=True)
class Extras:
    """What an adapter can add to a schedule call (``queue._run(queue._verbs.schedule(…, extras))``).

    Keys and commands are outside the queue, so this is not for Redis Cluster.

    ``distinct``: with ``"add"``, keep a live entry with the same meta and payload (a redelivered attempt schedules its
    retry again); a field of the meta: keep one with the same value there. ``unless``: keys; when one exists the job
    counts as existing. ``expect``: Redis commands and the reply each must give (``""``: nil), else the job counts as
    existing. ``alongside``: Redis commands to run in the same step, before anything is stored; when one fails nothing
    is stored.
    """

    distinct: bool | str = False
    unless: Sequence[str | bytes] = ()
    expect: Sequence[tuple[Sequence[str | bytes], str | bytes]] = ()
    alongside: Sequence[Sequence[str | bytes]] = ()


NO_EXTRAS: Final = Extras()


def schedule(
    keys: ShardKeys,
    jobs: Sequence[Stored],
    if_exists: IfExists,
    now: int | None = None,
    extras: Extras = NO_EXTRAS,
    *,
    touch: bool = False,
) -> Call[list[Job] | list[str] | int]:
    """Stores all of ``jobs`` or none. Answers the jobs; or, nothing being stored, the ids that were taken, or how many
    from the front to ask for alone, since what is there under these ids is large.

    ``touch``: a WAIT follows, which counts the replicas that have this connection's last write: write in any case.
    """
    flat: list[Any] = []
    for job in jobs:
        flat += (job.raw_id, job.when, job.flags, job.tail)

    def parse(reply: Any) -> list[Job] | list[str] | int:
        at, _, special = msgpack.unpackb(reply, raw=True, strict_map_key=False)
        if special and special[0][1] == b"split":
            return int(special[0][0])
        if special and special[0][1] == b"exists":
            return [jobs[row[0] - 1].id for row in special]
        out = [
            Job(job.id, job.due(at), job.payload, job.meta, State.WAITING, 0, 0, None, Outcome.SCHEDULED)
            for job in jobs
        ]
        for index, what, *more in special:
            one = out[index - 1]
            if what == b"kept":
                out[index - 1] = _job(one.id, more[0], more[2], Outcome.KEPT)
            elif what == b"same":
                out[index - 1] = replace(out[more[0] - 1], outcome=Outcome.KEPT)
            else:
                outcome = Outcome(what.decode())
                out[index - 1] = Job(one.id, one.due, one.payload, one.meta, outcome=outcome)
        return out

    packed = msgpack.packb(flat, use_bin_type=False)
    script = load("schedule")
    bound = script.bind(
        keys,
        now=_now(now),
        call=token(),
        mode=if_exists,
        distinct=extras.distinct if isinstance(extras.distinct, str) else int(extras.distinct),
        unless=_packed_list(extras.unless),
        expect=_packed_list(extras.expect),
        alongside=_packed_list(extras.alongside),
        touch=int(touch),
        wake=keys.wake,
        jobs=packed,
    )
    return Call(script, *bound, parse, keys)


def _packed_list(items: Sequence[Any]) -> bytes:
    packed: bytes = msgpack.packb(list(items), use_bin_type=False) if items else b""
    return packed


def _job(id: str, state: bytes, record: bytes, outcome: Outcome | None = None) -> Job:
    try:
        due, payload, meta, attempts, requeues, reason = records.unpack(record)
    except RecordUnreadable as error:
        return Job(id, 0, record, state=State(state.decode()), reason=str(error), outcome=outcome)
    return Job(id, due, payload, meta, State(state.decode()), attempts, requeues, reason, outcome)


# ---------------------------------------------------------------- one id


def _outcome(reply: Any) -> Outcome:
    return Outcome(reply.decode())


def cancel(keys: ShardKeys, id: bytes, now: int | None = None) -> Call[Outcome]:
    """CANCELLED, IN_FLIGHT, RELEASED or NOT_FOUND."""
    script = load("cancel")
    return Call(script, *script.bind(keys, now=_now(now), call=token(), id=id), _outcome, keys)


def reschedule(keys: ShardKeys, id: bytes, when: int, now: int | None = None) -> Call[Outcome]:
    """RESCHEDULED, IN_FLIGHT, RELEASED or NOT_FOUND. ``when`` as in :class:`Stored`."""
    script = load("reschedule")
    bound = script.bind(keys, now=_now(now), call=token(), id=id, when=when, wake=keys.wake)
    return Call(script, *bound, _outcome, keys)


def revive(keys: ShardKeys, id: bytes, verb: str, now: int | None = None) -> Call[Outcome]:
    """``verb`` replay or discard: REPLAYED, DISCARDED or NOT_FOUND."""
    script = load("revive")
    bound = script.bind(keys, now=_now(now), call=token(), id=id, verb=verb, wake=keys.wake)
    return Call(script, *bound, _outcome, keys)


def get(keys: ShardKeys, id: bytes) -> Call[Job | None]:
    """The earliest waiting entry of an id, else a leased one, else a dead one."""

    def parse(reply: Any) -> Job | None:
        return _job(id.decode(), reply[0], reply[2]) if reply else None

    script = load("get")
    return Call(script, *script.bind(keys, id=id), parse, keys)


# ---------------------------------------------------------------- many


@dataclass(frozen=True, slots=True)
class Cursor:
    """Where a page ended: the score and entry of its last job, a place in the order of every shard."""

    score: int
    entry: bytes

    def __str__(self) -> str:
        return base64.urlsafe_b64encode(self.score.to_bytes(8, "big") + self.entry).decode()

    @classmethod
    def read(cls, text: str) -> Cursor:
        """Raises ValueError for anything :meth:`__str__` did not make."""
        try:
            raw = base64.b64decode(text, altchars=b"-_", validate=True)
        except (binascii.Error, ValueError, TypeError) as error:
            raise ValueError(f"cursor must be one that a Page gave, got {text!r}") from error
        if len(raw) < 8:
            raise ValueError(f"cursor must be one that a Page gave, got {text!r}")
        return cls(int.from_bytes(raw[:8], "big"), raw[8:])


@dataclass(frozen=True, slots=True)
class Row:
    """A waiting or dead entry: its place, and its record as stored."""

    place: Cursor
    state: State
    record: bytes

    @property
    def id(self) -> str:
        return records.id_of(self.place.entry)

    def job(self) -> Job:
        """The job in it. An unreadable record is one with ``due`` 0, the record as its payload, and the reason."""
        return _job(self.id, self.state.value.encode(), self.record)


def page(
    keys: ShardKeys, which: str, limit: int, after: Cursor | None, before: int | None
) -> Call[tuple[bool, list[Row]]]:
    """``which`` due or dead: whether there are more, and the entries."""
    state = State.DEAD if which == "dead" else State.WAITING

    def parse(reply: Any) -> tuple[bool, list[Row]]:
        rows = [Row(Cursor(int(reply[i + 1]), reply[i]), state, reply[i + 2]) for i in range(1, len(reply), 3)]
        return reply[0] == b"1", rows

    script = load("page")
    bound = script.bind(
        keys,
        which=which,
        limit=limit,
        max_bytes=PAGE_BYTES,
        after_score=after.score if after else b"",
        after_entry=after.entry if after else b"",
        before=b"" if before is None else before,
    )
    return Call(script, *bound, parse, keys)


@dataclass(frozen=True, slots=True)
class ShardStats:
    now: int
    waiting: int
    due: int
    leased: int
    dead: int
    head: int | None


def stats(keys: ShardKeys, server_now: int | None = None) -> Call[ShardStats]:
    """Counts; ``head`` is the microsecond at which the first waiting job is to be released."""

    def parse(reply: Any) -> ShardStats:
        now, waiting, due, leased, dead = (int(n) for n in reply[:5])
        return ShardStats(now, waiting, due, leased, dead, int(reply[5]) if reply[5] else None)

    script = load("stats")
    return Call(script, *script.bind(keys, now=_now(server_now)), parse, keys)


_COUNTS: Final = tuple(field.name for field in fields(Counters) if field.name != "lateness")
LATE_COUNTS: Final = (*(f"late:{round(bound * 1e6)}" for bound in LATENESS_BOUNDS), "late:inf")
"""The counters of the lateness histogram's buckets."""
LATE_SUM: Final = "late:sum"
"""And of their sum, microseconds."""


def counters(keys: ShardKeys) -> Call[Counters]:
    """What was ever counted in this shard."""

    def parse(reply: Any) -> Counters:
        have = {reply[i].decode(): int(reply[i + 1]) for i in range(0, len(reply), 2)}
        numbers = {name: have.get(name, 0) for name in _COUNTS}
        numbers["released"] += numbers["direct"]  # the scripts count those apart
        late = Lateness(tuple(have.get(name, 0) for name in LATE_COUNTS), have.get(LATE_SUM, 0) / 1e6)
        return Counters(**numbers, lateness=late)

    script = load("counters")
    return Call(script, *script.bind(keys), parse, keys)


def loops(keys: ShardKeys, shard: int, server_now: int | None = None) -> Call[list[Loop]]:
    """The release loops of this shard, the one heard of last first."""

    def parse(reply: Any) -> list[Loop]:
        now, watcher, flat = int(reply[0]), reply[1], reply[2]
        have = {flat[i]: flat[i + 1] for i in range(0, len(flat), 2)}
        found = []
        for owner, entry in have.items():
            words = entry.split(b" ", 3)
            if owner.startswith(_BEAT) or len(words) != 4:
                continue
            seen = max(int(words[2]), int(have.get(_BEAT + owner, 0)))
            name = words[3].decode("utf-8", "replace")
            found.append(Loop(name, max(0, now - seen) / 1e6, owner == watcher, shard))
        return sorted(found, key=lambda loop: (loop.seen_ago, loop.name))

    script = load("loops")
    return Call(script, *script.bind(keys, now=_now(server_now)), parse, keys)


def purge(keys: ShardKeys) -> Plain[int]:
    """Removes every key of the shard."""
    return Plain([("UNLINK", *keys.stored())], lambda replies: int(replies[0]), keys)


def types(keys: ShardKeys) -> Plain[dict[bytes, str]]:
    """What kind of value each key holds, to name the one at fault."""
    stored = keys.stored()

    def parse(replies: list[Any]) -> dict[bytes, str]:
        return {k: v.decode() if isinstance(v, bytes) else str(v) for k, v in zip(stored, replies, strict=True)}

    return Plain([("TYPE", key) for key in stored], parse, keys)


_KINDS: Final = {
    "due": "zset",
    "leased": "zset",
    "dead": "zset",
    "seq": "string",
    "watch": "string",
    "entries": "hash",
    "loops": "hash",
    "calls": "hash",
    "calls_old": "hash",
    "released": "set",
    "released_old": "set",
    "released_new": "list",
    "counts": "hash",
    "imported": "set",
}


def wrong_types(keys: ShardKeys, found: Mapping[bytes, str]) -> str:
    """Names the keys that hold a value of another type than ours."""
    return ", ".join(list_wrong_types(keys, found)) or "only our own types now"


def list_wrong_types(keys: ShardKeys, found: Mapping[bytes, str]) -> list[str]:
    """Of each such key: its name, what it holds and what it should."""
    wrong = []
    for name, kind in _KINDS.items():
        key = getattr(keys, name)
        if found.get(key, "none") not in (kind, "none"):
            wrong.append(f"{key.decode(errors='replace')}: {found[key]}, expected {kind}")
    return wrong


# ---------------------------------------------------------------- claims


@dataclass(frozen=True, slots=True)
class Asker:
    """Who claims. ``about`` is shown to operators: host, process, kind."""

    owner: bytes
    about: bytes = b"-"

    @classmethod
    def new(cls, about: str = "-") -> Asker:
        return cls(secrets.token_hex(8).encode(), about.encode())


@dataclass(frozen=True, slots=True)
class Claimed:
    """The answer to a claim. Times are microseconds on the server's clock; ``watching``: True, False, or None when it
    was not asked; ``watch_left``: milliseconds until another loop's watch lapses. ``spent``: of the script."""

    now: int
    head: int | None
    expires: int | None
    watching: bool | None
    watch_left: int
    lease: int
    acked: int
    requeued: int
    direct: int
    latest: int
    spent: int
    notes: Sequence[tuple[str, str, str]]
    claims: Sequence[Claim]
    unreadable: Mapping[bytes, str]
    late: Sequence[tuple[int, int, int]] = ()
    """Of the direct releases: bucket of ``LATENESS_BOUNDS``, jobs, and microseconds late together."""


def claim(
    keys: ShardKeys,
    asker: Asker,
    call: int,
    *,
    lease: int,
    limit: int,
    max_bytes: int = PAGE_BYTES,
    watch_ms: int = 0,
    help: bool = False,
    retry_base: int = 1_000_000,
    retry_cap: int = 300_000_000,
    max_attempts: int = 8,
    fence: int = 0,
    acks: Sequence[bytes] = (),
    late: Mapping[str, int] | None = None,
    now: int | None = None,
) -> Call[Claimed]:
    """One turn of a loop: acks, re-queues, claims. ``call`` numbers the request; repeated, it gets its batch again.
    ``late``: to add to the lateness counters, for what ``acks`` names."""

    def parse(reply: Any) -> Claimed:
        header, notes, taken, raw = reply
        at, head, expires, watching, deadline, acked, requeued, direct, latest, spent, late = msgpack.unpackb(header)
        claims, unreadable = [], {}
        unpack, plain, number = records.unpack, records.PLAIN, int.from_bytes
        for entry, record in zip(taken, raw, strict=True):
            try:
                if record and record[0] == plain and len(record) >= 14:
                    # What unpack does with most records, without the call.
                    claims.append(Claim(entry, deadline, entry[6:].decode(), number(record[7:14], "big"), record[14:]))
                    continue
                due, payload, meta, attempts, requeues, _ = unpack(record or b"")
                claims.append(Claim(entry, deadline, entry[6:].decode(), due, payload, meta, attempts, requeues))
            except (RecordUnreadable, UnicodeDecodeError) as error:
                unreadable[entry] = str(error)
        return Claimed(
            now=at,
            head=None if head < 0 else head,
            expires=None if expires < 0 else expires,
            watching=None if watch_ms == 0 else watching == 1,
            watch_left=max(0, -watching),
            lease=deadline,
            acked=acked,
            requeued=requeued,
            direct=direct,
            latest=latest,
            spent=spent,
            notes=_notes(notes) if len(notes) > 1 else (),
            claims=claims,
            unreadable=unreadable,
            late=[(late[i], late[i + 1], late[i + 2]) for i in range(0, len(late), 3)],
        )

    script = load("claim")
    bound = script.bind(
        keys,
        acks,
        now=_now(now),
        owner=asker.owner,
        call=call,
        about=asker.about,
        length=lease,
        limit=limit,
        max_bytes=max_bytes,
        watch_ms=watch_ms,
        help=int(help),
        retry_base=retry_base,
        retry_cap=retry_cap,
        max_attempts=max_attempts,
        wake=keys.wake,
        fence=fence,
        late=_packed_list([word for pair in late.items() for word in pair]) if late else b"",
    )
    return Call(script, *bound, parse, keys)


def _notes(packed: bytes) -> list[tuple[str, str, str]]:
    rows = msgpack.unpackb(packed, raw=True)
    return [tuple(word.decode("utf-8", "replace") for word in row) for row in rows]


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a claim ends. ``verb``: ack, back, retry or dead; ``pause`` in microseconds (for an ack, when it was due)."""

    entry: bytes
    verb: str
    pause: int = 0
    reason: str = ""


def settle(keys: ShardKeys, fence: int, verdicts: Sequence[Verdict], now: int | None = None) -> Call[int]:
    """Ends claims otherwise than published. Answers how many were still ours."""
    flat: list[Any] = []
    for one in verdicts:
        flat += (one.entry, one.verb, one.pause, one.reason.encode("utf-8", "replace")[:2000])
    script = load("settle")
    packed = msgpack.packb(flat, use_bin_type=False)
    bound = script.bind(keys, now=_now(now), call=token(), fence=fence, verdicts=packed, wake=keys.wake)
    return Call(script, *bound, int, keys)


def renew(
    keys: ShardKeys,
    asker: Asker,
    call: int,
    *,
    lease: int,
    fence: int,
    entries: Sequence[bytes],
    now: int | None = None,
) -> Call[tuple[int, frozenset[bytes]]]:
    """Extends leases. Answers the new deadline and the entries still ours."""

    def parse(reply: Any) -> tuple[int, frozenset[bytes]]:
        return int(reply[0]), frozenset(reply[1:])

    script = load("renew")
    bound = script.bind(
        keys, entries, now=_now(now), owner=asker.owner, call=call, about=asker.about, length=lease, fence=fence
    )
    return Call(script, *bound, parse, keys)


def leave(keys: ShardKeys, asker: Asker, *, ends: bool = True, now: int | None = None) -> Call[bool]:
    """Gives up the watch (True: it was held). ``ends``: strikes this loop off the list; else it pauses."""
    script = load("leave")
    bound = script.bind(keys, now=_now(now), owner=asker.owner, wake=keys.wake, ends=int(ends))
    return Call(script, *bound, lambda reply: reply == b"1", keys)


# ---------------------------------------------------------------- looking without a script


@dataclass(frozen=True, slots=True)
class Peek:
    """What an idle watcher looks at once a second. Plain commands: a script and its inner commands would cost more."""

    watching: bool
    head: int | None
    now: int | None = None
    expires: int | None = None


_BEAT: Final = b"beat:"


def _beat(keys: ShardKeys, asker: Asker, at: int) -> tuple[bytes | str | int, ...]:
    """A sign of life. Apart from the loop's entry: one that comes late must not undo what a later claim wrote."""
    return ("HSET", keys.loops, _BEAT + asker.owner, at)


def peek(keys: ShardKeys, asker: Asker, *, watch_ms: int, thorough: bool, beat: int | None = None) -> Plain[Peek]:
    """Renews the watch and reads the head; ``thorough``: also the server's clock and the first lease to expire.
    ``beat``: also says that this loop lives; the server's clock, as far as it is known.

    GETEX extends the key whoever holds it. Only a loop that held the watch a moment ago peeks, so at worst the watch of
    a loop that has just taken it over lives a little longer.
    """
    commands: list[tuple[bytes | str | int, ...]] = [
        ("GETEX", keys.watch, "PX", watch_ms),
        ("ZRANGE", keys.due, 0, 0, "WITHSCORES"),
    ]
    if thorough:
        commands += [("TIME",), ("ZRANGE", keys.leased, 0, 0, "WITHSCORES")]
    needed = len(commands)
    if beat is not None:
        commands.append(_beat(keys, asker, beat))

    def parse(replies: list[Any]) -> Peek:
        _raise_first(replies[:needed])
        now = expires = None
        if thorough:
            now = _micros(replies[2])
            expires = _score(replies[3])
        return Peek(replies[0] == asker.owner, _score(replies[1]), now, expires)

    return Plain(commands, parse, keys, forgiving=True)


@dataclass(frozen=True, slots=True)
class Probe:
    """What an idle loop that does not watch looks at: milliseconds until the watch lapses (0: nobody holds it)."""

    left: int
    now: int | None = None


def probe(keys: ShardKeys, asker: Asker, *, beat: int | None = None, timed: bool = False) -> Plain[Probe]:
    """How long the watch lasts. ``beat``: as for :func:`peek`; ``timed``: also reads the server's clock."""
    commands: list[tuple[bytes | str | int, ...]] = [("PTTL", keys.watch)]
    if timed:
        commands.append(("TIME",))
    needed = len(commands)
    if beat is not None:
        commands.append(_beat(keys, asker, beat))

    def parse(replies: list[Any]) -> Probe:
        _raise_first(replies[:needed])
        return Probe(max(0, int(replies[0])), _micros(replies[1]) if timed else None)

    return Plain(commands, parse, keys, forgiving=True)


def _raise_first(replies: list[Any]) -> None:
    """A full server (maxmemory) refuses a sign of life; that is no reason for the rest to fail."""
    for reply in replies:
        if isinstance(reply, Exception):
            raise reply


def _micros(time: Any) -> int:
    return int(time[0]) * 1_000_000 + int(time[1])


def _score(reply: Any) -> int | None:
    """The score of ``ZRANGE … WITHSCORES`` with one member: flat strings in RESP2, nested with a float in RESP3."""
    while isinstance(reply, (list, tuple)) and reply:
        reply = reply[-1]
    return None if reply is None or reply == [] or reply == () else int(float(reply))
