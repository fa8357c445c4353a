"""What each verb does, written once for the sync and the asyncio queue, as generators of requests.

A verb yields a :class:`~.commands.Call` or :class:`~.commands.Plain`, is sent its parsed answer, returns its result;
:mod:`.sync` and :mod:`.aio` are the two executors.
"""

from __future__ import annotations

import heapq
import os
import time
import uuid
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import datetime
from itertools import count
from typing import Any, Final, TypeAlias, TypeVar

from ..due import (
    MAX_CLAIM,
    MAX_PAGE,
    Delay,
    check_id,
    check_if_exists,
    check_items,
    check_limit,
    check_max_payload,
    check_meta,
    check_moment,
    check_payload,
    check_reason,
    lease_micros,
    pause_micros,
    resolve,
)
from ..errors import JobExists, RedisFault, ReplicationTimeout
from ..jobs import Claim, Command, Counters, IfExists, Job, Lateness, Loop, NewJob, Outcome, Page, Stats
from . import commands, records
from .commands import NO_EXTRAS, Asker, Call, Cursor, Extras, Plain, Row, Stored, Verdict
from .keys import ShardKeys, check_name, shard_of

__all__ = ["Steps", "Verbs"]

T = TypeVar("T")
Steps: TypeAlias = Generator["Call[Any] | Plain[Any]", Any, T]

CHUNK_JOBS: Final = 200
"""A script of so many holds Redis for about a millisecond."""
CHUNK_BYTES: Final = 1 << 20
PAGE_ROWS: Final = 200


class Verbs:
    """The verbs of one queue. Holds names and limits, no connection."""

    def __init__(self, name: str, shards: int, max_payload: int | None, *, waiting: bool = False) -> None:
        if isinstance(shards, bool) or not isinstance(shards, int) or shards < 1:
            raise ValueError(f"shards must be a positive int, got {shards!r}")
        self.name = check_name(name)
        self.shards = tuple(ShardKeys.of(name, n) for n in range(shards))
        self.max_payload = check_max_payload(max_payload)
        self.clock: Callable[[], int] | None = None
        """Tests only: microseconds to use in place of the server's clock."""
        self._waiting = waiting
        self._turns = count()
        self._askers = _Askers()

    def now(self) -> int | None:
        return self.clock() if self.clock else None

    def _of(self, raw_id: bytes) -> ShardKeys:
        return self.shards[shard_of(raw_id, len(self.shards))]

    def _shard_at(self, entry: bytes) -> ShardKeys:
        return self._of(entry[6:])

    # ------------------------------------------------------------ schedule

    def new_job(self, job: NewJob, now: int) -> Stored:
        """Checks one job's arguments; see :func:`~delayadapters.due.resolve` and friends for what they raise."""
        when = resolve(job.delay, job.at, now=now)
        check_payload(job.payload, self.max_payload)
        id = str(uuid.uuid4()) if job.id is None else job.id
        raw_id = check_id(id)
        meta = check_meta(job.meta)
        flags, tail = records.pack(job.payload, meta, job.release)
        return Stored(id, raw_id, -when.micros if when.relative else when.micros, flags, tail, job.payload, meta)

    def schedule_many(
        self,
        jobs: Iterable[NewJob],
        if_exists: IfExists,
        extras: Extras = NO_EXTRAS,
        out: list[Job | None] | None = None,
    ) -> Steps[list[Job]]:
        """``out`` is filled as jobs are known to be stored: who raises half-way still tells which ones are."""
        check_if_exists(if_exists)
        now = time.time_ns() // 1000
        ready = [self.new_job(job, now) for job in check_items(jobs, NewJob, "jobs")]
        out = [] if out is None else out
        out[:] = [None] * len(ready)
        shards: dict[ShardKeys, list[int]] = {}
        for index, job in enumerate(ready):
            shards.setdefault(self._of(job.raw_id), []).append(index)
        unconfirmed: ReplicationTimeout | None = None
        for keys, indexes in shards.items():
            parts = list(_chunks(indexes, ready))[::-1]
            while parts:
                chunk = parts.pop()
                jobs_of = [ready[i] for i in chunk]
                try:
                    answer = yield commands.schedule(keys, jobs_of, if_exists, self.now(), extras, touch=self._waiting)
                except ReplicationTimeout as error:
                    # Stored, only not confirmed: the rest must be stored, too, before the caller hears of it.
                    unconfirmed = unconfirmed or error
                    continue
                if isinstance(answer, int):
                    parts += [chunk[answer:], chunk[:answer]]
                    continue
                if answer and isinstance(answer[0], str):
                    raise JobExists(answer)
                for i, stored in zip(chunk, answer, strict=True):
                    out[i] = stored
        if unconfirmed is not None:
            raise unconfirmed
        return [job for job in out if job is not None]

    def schedule(
        self,
        payload: bytes,
        delay: Delay | None,
        at: datetime | None,
        id: str | None,
        meta: Mapping[str, str] | None,
        if_exists: IfExists,
        release: Sequence[Command] | None,
        extras: Extras = NO_EXTRAS,
    ) -> Steps[Job]:
        jobs = yield from self.schedule_many([NewJob(payload, delay, at, id, meta, release)], if_exists, extras)
        return jobs[0]

    # ------------------------------------------------------------ one id

    def cancel(self, id: str) -> Steps[Outcome]:
        raw = check_id(id)
        outcome: Outcome = yield commands.cancel(self._of(raw), raw, self.now())
        return outcome

    def reschedule(self, id: str, delay: Delay | None, at: datetime | None) -> Steps[Outcome]:
        raw = check_id(id)
        when = resolve(delay, at, now=time.time_ns() // 1000)
        micros = -when.micros if when.relative else when.micros
        outcome: Outcome = yield commands.reschedule(self._of(raw), raw, micros, self.now())
        return outcome

    def revive(self, id: str, verb: str) -> Steps[Outcome]:
        raw = check_id(id)
        outcome: Outcome = yield commands.revive(self._of(raw), raw, verb, self.now())
        return outcome

    def get(self, id: str) -> Steps[Job | None]:
        raw = check_id(id)
        job: Job | None = yield commands.get(self._of(raw), raw)
        return job

    # ------------------------------------------------------------ many

    def page(self, which: str, due_before: datetime | None, limit: int, cursor: str | None) -> Steps[Page]:
        check_limit(limit, MAX_PAGE)
        before = None if due_before is None else check_moment(due_before, "due_before")
        after = Cursor.read(cursor) if cursor is not None else None
        rows, more = yield from self.rows(which, limit, after, before)
        return Page([row.job() for row in rows], str(rows[-1].place) if rows and more else None)

    def rows(self, which: str, limit: int, after: Cursor | None, before: int | None) -> Steps[tuple[list[Row], bool]]:
        """Up to ``limit`` entries behind ``after`` in the order of all shards, and whether there are more.

        ``which``: due or dead. ``before``: microseconds; only scores below it.
        """
        more, parts = False, []
        horizon: Cursor | None = None
        for keys in self.shards:
            found: list[Row] = []
            start, unfinished, size = after, True, 0
            while unfinished and len(found) < limit and size < commands.PAGE_BYTES:
                # A script stalls every client: few rows each.
                step = min(PAGE_ROWS, limit - len(found))
                unfinished, some = yield commands.page(keys, which, step, start, before)
                found += some
                size += sum(len(row.record) for row in some)
                start = some[-1].place if some else start
                if not some:
                    break
            parts.append(found)
            if unfinished:
                more = True
                if found and (horizon is None or _place(found[-1].place) < _place(horizon)):
                    horizon = found[-1].place
        merged = list(heapq.merge(*parts, key=lambda row: _place(row.place)))
        # A shard that stopped early may have more before what another shard gave.
        kept = [row for row in merged if horizon is None or _place(row.place) <= _place(horizon)][:limit]
        return kept, more or len(kept) < len(merged)

    def stats(self) -> Steps[Stats]:
        rows = []
        for keys in self.shards:
            rows.append((yield commands.stats(keys, self.now())))
        heads = [row.head for row in rows if row.head is not None]
        overdue = max((row.now - row.head for row in rows if row.head is not None), default=0)
        return Stats(
            waiting=sum(row.waiting for row in rows),
            due=sum(row.due for row in rows),
            leased=sum(row.leased for row in rows),
            dead=sum(row.dead for row in rows),
            next_due=min(heads) if heads else None,
            oldest_overdue=max(0, overdue) / 1e6,
        )

    def counters(self) -> Steps[Counters]:
        rows = []
        for keys in self.shards:
            rows.append((yield commands.counters(keys)))
        return _sum(rows)

    def loops(self) -> Steps[list[Loop]]:
        found: list[Loop] = []
        for number, keys in enumerate(self.shards):
            found += yield commands.loops(keys, number, self.now())
        return found

    def purge(self) -> Steps[None]:
        for keys in self.shards:
            yield commands.purge(keys)

    # ------------------------------------------------------------ claims

    def claim(self, limit: int, lease: float) -> Steps[list[Claim]]:
        check_limit(limit, MAX_CLAIM)
        length = lease_micros(lease)
        out: list[Claim] = []
        fault: RedisFault | None = None
        for keys in self._in_turn():
            try:
                out += yield from self._claim(keys, limit - len(out), length)
            except RedisFault as error:
                fault = fault or error
            if len(out) == limit or (out and fault):
                break
        # What another shard gave is leased now, so the caller must have it; the next call raises, if the fault lasts.
        if fault is not None and not out:
            raise fault
        return out

    def _claim(self, keys: ShardKeys, limit: int, length: int) -> Steps[list[Claim]]:
        while True:
            asking = self._askers.for_claim(keys)
            again, answered = asking.lost, False
            try:
                got = yield commands.claim(keys, asking.asker, asking.call, lease=length, limit=limit, now=self.now())
                answered = True
            finally:
                self._askers.back(keys, asking, answered)
            verdicts = [Verdict(entry, "dead", 0, reason) for entry, reason in got.unreadable.items()]
            # The batch of an earlier request, which may have asked for more.
            verdicts += [Verdict(one.entry, "back") for one in got.claims[limit:]]
            if verdicts:
                yield commands.settle(keys, got.lease, verdicts, self.now())
            if got.claims or not again:
                return list(got.claims[:limit])

    def _in_turn(self) -> tuple[ShardKeys, ...]:
        """The shards, each call beginning with another: a busy one must not starve the others."""
        turn = next(self._turns) % len(self.shards)
        return self.shards[turn:] + self.shards[:turn]

    def settle(self, claims: Iterable[Claim], verb: str, pause: int = 0, reason: str = "") -> Steps[int]:
        groups: dict[tuple[ShardKeys, int], list[Verdict]] = {}
        for one in check_items(claims, Claim, "claims"):
            groups.setdefault((self._shard_at(one.entry), one.lease), []).append(
                Verdict(one.entry, verb, one.due if verb == "ack" else pause, reason)
            )
        done = 0
        for (keys, fence), verdicts in groups.items():
            for at in range(0, len(verdicts), CHUNK_JOBS):
                done += yield commands.settle(keys, fence, verdicts[at : at + CHUNK_JOBS], self.now())
        return done

    def fail(self, claims: Iterable[Claim], reason: str, retry_in: Delay | None) -> Steps[int]:
        check_reason(reason)
        if retry_in is None:
            return (yield from self.settle(claims, "dead", 0, reason))
        pause = pause_micros(retry_in, now=time.time_ns() // 1000)
        return (yield from self.settle(claims, "retry", pause, reason))

    def renew(self, claims: Iterable[Claim], lease: float) -> Steps[list[Claim]]:
        length = lease_micros(lease)
        groups: dict[tuple[ShardKeys, int], list[Claim]] = {}
        for one in check_items(claims, Claim, "claims"):
            groups.setdefault((self._shard_at(one.entry), one.lease), []).append(one)
        out = []
        for (keys, fence), group in groups.items():
            asking = self._askers.for_renewal(keys)
            try:
                deadline, held = yield commands.renew(
                    keys,
                    asking.asker,
                    asking.call,
                    lease=length,
                    fence=fence,
                    entries=[one.entry for one in group],
                    now=self.now(),
                )
            finally:
                self._askers.back(keys, asking, answered=True)
            out += [replace(one, lease=deadline) for one in group if one.entry in held]
        return out


def _sum(rows: Sequence[Counters]) -> Counters:
    """The counters of all shards together."""
    counts = tuple(map(sum, zip(*(row.lateness.counts for row in rows), strict=True)))
    late = Lateness(counts, sum(row.lateness.sum for row in rows))
    names = [field.name for field in fields(Counters) if field.name != "lateness"]
    return Counters(**{name: sum(getattr(row, name) for row in rows) for name in names}, lateness=late)


@dataclass(slots=True)
class _Asking:
    """Somebody who claims, and the number of the next request. ``lost``: a request of that number was not answered."""

    asker: Asker
    call: int = 1
    lost: bool = False


class _Askers:
    """Who claims and renews in this process: a request under way has an asker of its own, for Redis knows a repeated
    one by its being the asker's last.

    A claim without an answer may have taken a batch. So the next claim, whoever makes it, is that one repeated.
    """

    def __init__(self) -> None:
        self._start()

    def _start(self) -> None:
        self._free: dict[ShardKeys, list[_Asking]] = {}
        self._lost: dict[ShardKeys, list[_Asking]] = {}
        self._pid = os.getpid()  # the last: another thread that sees it must not find the parent's

    def for_claim(self, keys: ShardKeys) -> _Asking:
        if self._pid != os.getpid():
            self._start()  # forked: the parent goes on with these
        return _pop(self._lost, keys) or self.for_renewal(keys)

    def for_renewal(self, keys: ShardKeys) -> _Asking:
        if self._pid != os.getpid():
            self._start()
        return _pop(self._free, keys) or _Asking(Asker.new("claim()"))

    def back(self, keys: ShardKeys, asking: _Asking, answered: bool) -> None:
        asking.lost = not answered
        asking.call += answered
        (self._free if answered else self._lost).setdefault(keys, []).append(asking)


def _pop(askings: dict[ShardKeys, list[_Asking]], keys: ShardKeys) -> _Asking | None:
    try:
        return askings[keys].pop()
    except (KeyError, IndexError):  # not asked before: another thread may be quicker
        return None


def _place(cursor: Cursor) -> tuple[int, bytes]:
    return cursor.score, cursor.entry


def _chunks(indexes: Sequence[int], jobs: Sequence[Stored]) -> Iterable[list[int]]:
    chunk: list[int] = []
    size = 0
    for i in indexes:
        length = len(jobs[i].tail) + len(jobs[i].raw_id)
        if chunk and (len(chunk) == CHUNK_JOBS or size + length > CHUNK_BYTES):
            yield chunk
            chunk, size = [], 0
        chunk.append(i)
        size += length
    if chunk:
        yield chunk
