"""The in-process queue: for delays that are short and may be lost with the process (retries in a request, debounce).

Verbs, arguments, errors and outcomes are those of :class:`AsyncDelayQueue`; the same contract tests run on both. A
consumer either claims and acks, or just calls :meth:`MemoryDelayQueue.get`.

How it works: waiting entries are a heap of ``(due, sequence, ticket, entry)``, leased ones a heap of ``(deadline,
ticket, entry)``. Whatever moves an entry gives it a new ticket, which makes its old place in a heap stale: stale places
are skipped when they come up, and swept out when they outnumber the others. Of all waiting consumers none runs a timer:
the queue has one, set for the next thing to happen, and it wakes one consumer, who wakes the next if there is more.
"""

from __future__ import annotations

import asyncio
import heapq
import uuid
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from types import TracebackType
from typing import Final, NamedTuple, get_args, overload

from .clock import Clock, InjectedClock, ManualClock, SystemClock
from .due import LATEST_DUE, Delay, When, check_id, check_payload, resolve, seconds_to_micros, to_micros
from .errors import DelayError, JobExists
from .jobs import Claim, Command, IfExists, Job, NewJob, Outcome, Page, State, Stats

__all__ = ["ManualClock", "MemoryDelayQueue"]

_IF_EXISTS: Final = get_args(IfExists)
_RECENT: Final = 10_000
"""Released ids remembered, so that cancel can tell RELEASED from NOT_FOUND."""
_SWEEP: Final = 64
"""Stale places in a heap that are never worth a sweep."""
_LONGEST_TIMER: Final = 86_400.0


class _Entry:
    """One scheduling of a job. ``ticket`` names its place in a heap; 0: it has none."""

    __slots__ = (
        "attempts", "deadline", "died", "due", "id", "meta", "payload", "reason", "requeues", "sequence", "shift",
        "state", "ticket", "when",
    )  # fmt: skip

    def __init__(self, sequence: int, new: _Checked) -> None:
        self.sequence = sequence
        self.id = new.id
        self.payload = new.payload
        self.meta = new.meta
        self.due = 0
        self.shift = 0  # due, less this, is the clock's microsecond: they part company when the wall clock is set
        self.when = 0  # the clock's microsecond at which to release it: when due, or the next try after a failure
        self.state = State.WAITING
        self.attempts = 0
        self.requeues = 0
        self.reason: str | None = None
        self.ticket = 0
        self.deadline = 0
        self.died = 0

    def put_off(self, due: int, shift: int) -> int:
        """Takes a due time of the clock, and gives it back."""
        self.due, self.shift = due + shift, shift
        return due

    @property
    def first_when(self) -> int:
        """Its place in due order, whatever retries put in between."""
        return self.due - self.shift

    @property
    def name(self) -> bytes:
        return self.sequence.to_bytes(8, "big") + self.id.encode()

    def job(self, outcome: Outcome | None = None) -> Job:
        return Job(
            self.id, self.due, self.payload, self.meta, self.state, self.attempts, self.requeues, self.reason, outcome
        )

    def claim(self) -> Claim:
        return Claim(self.name, self.deadline, self.id, self.due, self.payload, self.meta, self.attempts, self.requeues)


class _Checked(NamedTuple):
    """The arguments of a schedule, found good."""

    id: str
    payload: bytes
    meta: Mapping[str, str]
    when: When


class MemoryDelayQueue:
    """A delay queue inside this process and event loop; what waits is gone when the process ends.

    Args:
        max_payload: largest payload in bytes; None: no limit.
        clock: seconds since the epoch, for tests. With a :class:`ManualClock` nothing waits in real time; any other
            callable is taken to run about as fast as real time. Default: the monotonic clock, numbered from the wall
            clock's time at construction, so that setting the wall clock neither releases nor holds up what waits.

    One event loop at a time uses it; it is not for several threads. Closing ends every waiting and later :meth:`get`
    and refuses new jobs with a DelayError; what is left can still be looked at, claimed or cancelled.
    """

    def __init__(self, *, max_payload: int | None = 1 << 20, clock: Callable[[], float] | None = None) -> None:
        self.max_payload = max_payload
        self._clock: Clock = SystemClock() if clock is None else InjectedClock(clock)
        self._timed = not isinstance(clock, ManualClock)
        if isinstance(clock, ManualClock):
            clock.notify(self._clock_moved)
        self._sequence = 0
        self._tickets = 0
        self._due: list[tuple[int, int, int, _Entry]] = []
        self._leases: list[tuple[int, int, _Entry]] = []
        self._leased: dict[bytes, _Entry] = {}
        self._waiting = 0
        self._dead: dict[int, _Entry] = {}
        self._by_id: dict[str, list[_Entry]] = {}
        self._released: OrderedDict[str, None] = OrderedDict()
        self._consumers: OrderedDict[asyncio.Future[None], None] = OrderedDict()
        self._called: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0
        self._closed = False

    # -- scheduling ---------------------------------------------------------------------------------------------------

    async def schedule(
        self,
        payload: bytes,
        *,
        delay: Delay | None = None,
        at: datetime | None = None,
        id: str | None = None,
        meta: Mapping[str, str] | None = None,
        if_exists: IfExists = "error",
        release: Sequence[Command] | None = None,
    ) -> Job:
        """Stores a job, due after ``delay`` (seconds or timedelta) or at ``at`` (an aware datetime).

        ``id`` defaults to a random one. ``if_exists`` says what happens when a live job has this id: see :class:`Job`'s
        ``outcome`` for what did happen.

        Raises:
            JobExists: with ``if_exists="error"``. Nothing was stored.
            PayloadTooLarge: above ``max_payload``.
            TypeError, ValueError: a bad argument, by name; ``release`` always, as there is no Redis to run it.
        """
        self._check_open()
        new = self._check(NewJob(payload, delay, at, id, meta, release), if_exists)
        await self._give_way()
        if if_exists == "error" and new.id in self._by_id:
            self._check_free((new.id,))
        job = self._store(new, if_exists)
        self._attend()
        return job

    async def schedule_many(self, items: Iterable[NewJob], *, if_exists: IfExists = "error") -> list[Job]:
        """Stores many jobs, in order: all of them, or none when it raises. Arguments and errors are schedule's."""
        self._check_open()
        if not isinstance(items, Iterable):
            raise TypeError(f"schedule_many takes an iterable of NewJob items, got {items!r}")
        checked = [self._check(item, if_exists) for item in items]
        await self._give_way()
        if if_exists == "error":
            self._check_free(new.id for new in checked)
        jobs = [self._store(new, if_exists) for new in checked]
        self._attend()
        return jobs

    def _check(self, new: NewJob, if_exists: IfExists) -> _Checked:
        if if_exists not in _IF_EXISTS:
            raise ValueError(f"if_exists must be one of {_IF_EXISTS}, got {if_exists!r}")
        if not isinstance(new, NewJob):
            raise TypeError(f"schedule_many takes NewJob items, got {new!r}")
        if new.release is not None:
            raise TypeError("release is for a queue in Redis: an in-process queue has no Redis to run the commands")
        when = resolve(new.delay, new.at, now=self._clock.now())
        check_payload(new.payload, self.max_payload)
        name = str(uuid.uuid4()) if new.id is None else new.id
        check_id(name)
        return _Checked(name, new.payload, _meta(new.meta), when)

    async def _give_way(self) -> None:
        """Lets a consumer have what is due: a producer in a tight loop would otherwise never come to wait for anything.

        Before anything is stored, so that a producer cancelled here has stored nothing.
        """
        if self._timer is not None and self._timer_at <= self._clock.now():
            self._timer.cancel()
            self._ring()
        if self._called is not None:
            await asyncio.sleep(0)
            self._check_open()

    def _check_free(self, ids: Iterable[str]) -> None:
        seen: set[str] = set()
        taken = []
        for one in ids:
            if one in seen or self._live(one):
                taken.append(one)
            seen.add(one)
        if taken:
            raise JobExists(taken)

    def _store(self, new: _Checked, if_exists: IfExists) -> Job:
        outcome = Outcome.SCHEDULED
        live = self._live(new.id)
        if live and if_exists == "keep":
            return live[0].job(Outcome.KEPT)
        if live and if_exists == "replace":
            # Forgetting a leased entry disowns it: its ack, its failure and the end of its lease all find nothing.
            outcome = Outcome.IN_FLIGHT if any(one.state is State.LEASED for one in live) else Outcome.REPLACED
            for one in live:
                self._forget(one)
        self._sequence += 1
        entry = _Entry(self._sequence, new)
        self._by_id.setdefault(new.id, []).append(entry)
        self._wait(entry, entry.put_off(*self._place(new.when)))
        return entry.job(outcome)

    def _place(self, when: When) -> tuple[int, int]:
        """A due time in the clock's microseconds, and by how much the wall clock was set since the clock began."""
        shift = self._clock.shift()
        if when.relative:
            at = when.on(self._clock.start() if when.micros else self._clock.now())
        else:
            at = max(when.micros - shift, self._clock.now())
        return at, shift

    # -- by id --------------------------------------------------------------------------------------------------------

    async def cancel(self, id: str) -> Outcome:
        """Cancels every waiting entry of ``id``. CANCELLED is final; else IN_FLIGHT, RELEASED or NOT_FOUND."""
        waiting, outcome = self._waiting_of(id)
        for entry in waiting:
            self._forget(entry)
        if waiting:
            self._released.pop(id, None)
            self._attend()
        return outcome or Outcome.CANCELLED

    async def reschedule(self, id: str, *, delay: Delay | None = None, at: datetime | None = None) -> Outcome:
        """Gives every waiting entry of ``id`` a new due time: RESCHEDULED, IN_FLIGHT, RELEASED or NOT_FOUND."""
        when = resolve(delay, at, now=self._clock.now())
        waiting, outcome = self._waiting_of(id)
        for entry in waiting:
            self._wait(entry, entry.put_off(*self._place(when)))
        if waiting:
            self._attend()
        return outcome or Outcome.RESCHEDULED

    async def release_now(self, id: str) -> Outcome:
        """Makes every waiting entry of ``id`` due now: RESCHEDULED, IN_FLIGHT, RELEASED or NOT_FOUND."""
        return await self.reschedule(id, delay=0)

    async def cancel_many(self, ids: Iterable[str]) -> list[Outcome]:
        """:meth:`cancel` for each of ``ids``; outcomes in their order. An id given twice counts once."""
        asked = _ids(ids)
        once = {id: await self.cancel(id) for id in dict.fromkeys(asked)}
        return [once[id] for id in asked]

    async def reschedule_many(
        self, ids: Iterable[str], *, delay: Delay | None = None, at: datetime | None = None
    ) -> list[Outcome]:
        """:meth:`reschedule` for each of ``ids``; outcomes in their order. An id given twice counts once."""
        asked = _ids(ids)
        resolve(delay, at, now=self._clock.now())
        once = {id: await self.reschedule(id, delay=delay, at=at) for id in dict.fromkeys(asked)}
        return [once[id] for id in asked]

    def _waiting_of(self, id: str) -> tuple[list[_Entry], Outcome | None]:
        """The waiting entries of an id, and what is to be answered unless a verb has done all it could."""
        check_id(id)
        live = self._live(id)
        waiting = [entry for entry in live if entry.state is State.WAITING]
        if len(waiting) < len(live):
            return waiting, Outcome.IN_FLIGHT
        if waiting:
            return waiting, None
        return waiting, Outcome.RELEASED if id in self._released else Outcome.NOT_FOUND

    @overload
    async def get(self) -> Claim: ...
    @overload
    async def get(self, id: str) -> Job | None: ...
    async def get(self, id: str | None = None) -> Claim | Job | None:
        """With an id: the job (the earliest waiting entry, else a leased one, else a dead one) or None.

        Without: waits for the next due job and takes it; nothing is left to ack. Never early. Jobs come in due order;
        among waiting consumers the one who came first is served first. Cancelling a waiting ``get`` loses no job.

        Raises:
            DelayError: the queue was closed.
        """
        if id is None:
            return await self._take()
        check_id(id)
        entries = self._live(id) or sorted(self._by_id.get(id, ()), key=lambda entry: (entry.died, entry.sequence))
        return entries[0].job() if entries else None

    # -- looking and tidying ------------------------------------------------------------------------------------------

    async def jobs(self, *, due_before: datetime | None = None, limit: int = 100, cursor: str | None = None) -> Page:
        """Up to ``limit`` waiting jobs, in due order, due before ``due_before``; ``cursor`` continues a page."""
        limit = _limit(limit, 10_000)
        after = _after(cursor)
        self._sweep()
        self._due.sort()  # a sorted list is a heap; from the second page on it is sorted already
        end = len(self._due)
        if due_before is not None:
            before = _aware(due_before) - self._clock.shift()
            end = bisect_left(self._due, before, key=lambda place: place[0])
        start = bisect_right(self._due, after, key=lambda place: place[:2]) if after else 0
        stop = min(start + limit, end)
        page = self._due[start:stop]
        more = stop < end and page
        return Page([place[3].job() for place in page], _cursor(page[-1][:2]) if more else None)

    async def dead_jobs(self, *, limit: int = 100, cursor: str | None = None) -> Page:
        """Up to ``limit`` dead jobs in order of death; ``cursor`` continues a page."""
        limit = _limit(limit, 10_000)
        after = _after(cursor) or (-1, 0)
        dead = sorted((entry.died, sequence) for sequence, entry in self._dead.items())
        start = bisect_right(dead, after)
        page = dead[start : start + limit]
        more = start + limit < len(dead)
        return Page([self._dead[sequence].job() for _, sequence in page], _cursor(page[-1]) if more else None)

    async def replay(self, id: str) -> Outcome:
        """Every dead entry of ``id`` waits again, due now, attempts from zero: REPLAYED or NOT_FOUND."""
        dead = self._dead_of(id)
        now, shift = self._clock.now(), self._clock.shift()
        for entry in dead:
            entry.attempts, entry.reason = 0, None
            self._wait(entry, entry.put_off(now, shift))
        if dead:
            self._attend()
        return Outcome.REPLAYED if dead else Outcome.NOT_FOUND

    async def discard(self, id: str) -> Outcome:
        """Deletes every dead entry of ``id``: DISCARDED or NOT_FOUND."""
        dead = self._dead_of(id)
        for entry in dead:
            self._forget(entry)
        return Outcome.DISCARDED if dead else Outcome.NOT_FOUND

    def _dead_of(self, id: str) -> list[_Entry]:
        check_id(id)
        return [entry for entry in self._by_id.get(id, ()) if entry.state is State.DEAD]

    async def purge(self) -> None:
        """Deletes every job: waiting, leased and dead. Waiting consumers go on waiting."""
        self._due.clear()
        self._leases.clear()
        self._leased.clear()
        self._dead.clear()
        self._by_id.clear()
        self._released.clear()
        self._waiting = 0
        self._attend()

    async def stats(self) -> Stats:
        """The queue in numbers."""
        now = self._clock.now()
        head = self._head()
        return Stats(
            waiting=self._waiting,
            due=self._count_due(now),
            leased=len(self._leased),
            dead=len(self._dead),
            next_due=head.when if head else None,
            oldest_overdue=max(now - head.when, 0) / 1_000_000 if head else 0.0,
        )

    # -- consumers ----------------------------------------------------------------------------------------------------

    async def claim(self, limit: int = 100, *, lease: float = 30.0) -> list[Claim]:
        """Takes up to ``limit`` due jobs for ``lease`` seconds. Leases that have passed are re-queued first, in their
        original due order."""
        limit = _limit(limit, 1000)
        span = _span(lease)
        now = self._clock.now()
        self._expire(now)
        claims: list[Claim] = []
        while len(claims) < limit and (entry := self._pop(now)):
            self._lease(entry, now + span)
            claims.append(entry.claim())
        self._attend()
        return claims

    async def ack(self, claims: Iterable[Claim]) -> int:
        """Forgets released jobs. Returns how many were still ours; the others are left alone."""
        count = 0
        for entry in self._ours(claims):
            self._forget(entry)
            self._remember(entry.id)
            count += 1
        return count

    async def give_back(self, claims: Iterable[Claim]) -> int:
        """They wait again, in their original due order, and no attempt is counted. Returns how many were still ours."""
        count = 0
        for entry in self._ours(claims):
            self._wait(entry, entry.first_when)
            count += 1
        self._attend()
        return count

    async def fail(self, claims: Iterable[Claim], reason: str, *, retry_in: Delay | None) -> int:
        """Counts a failed attempt: tried again in ``retry_in`` seconds, or dead at once (None). Returns how many were
        still ours."""
        if not isinstance(reason, str):
            raise TypeError(f"reason must be a str, got {reason!r}")
        now = self._clock.now()
        again = None if retry_in is None else now + max(seconds_to_micros(retry_in, "retry_in"), 0)
        if again is not None and again > LATEST_DUE:
            raise ValueError(f"retry_in={retry_in!r} would be due later than the year 2250")
        count = 0
        for entry in self._ours(claims):
            entry.attempts += 1
            entry.reason = reason
            if again is None:
                self._bury(entry, now)
            else:
                # Never before its due time, even when the clock was set back since the claim.
                self._wait(entry, max(again, entry.first_when))
            count += 1
        self._attend()
        return count

    async def renew(self, claims: Iterable[Claim], *, lease: float = 30.0) -> list[Claim]:
        """Extends the leases to ``lease`` seconds from now. Returns those still ours, with the new lease."""
        deadline = self._clock.now() + _span(lease)
        renewed = []
        for entry in self._ours(claims):
            self._lease(entry, deadline)
            renewed.append(entry.claim())
        self._attend()
        return renewed

    def _ours(self, claims: Iterable[Claim]) -> Iterator[_Entry]:
        if not isinstance(claims, Iterable):
            raise TypeError(f"claims must be an iterable of Claim objects, got {claims!r}")
        for claim in claims:
            if not isinstance(claim, Claim):
                raise TypeError(f"claims must be Claim objects, got {claim!r}")
            entry = self._leased.get(claim.entry)
            if entry is not None and entry.deadline == claim.lease:
                yield entry

    async def _take(self) -> Claim:
        loop = asyncio.get_running_loop()
        again = False
        while True:
            self._check_open()
            now = self._clock.now()
            self._expire(now)
            entry = self._pop(now)
            if entry is not None:
                self._forget(entry)
                self._remember(entry.id)
                self._attend()
                return entry.claim()
            consumer = loop.create_future()
            self._consumers[consumer] = None
            if again:  # called, but somebody else was quicker: keep the place at the front
                self._consumers.move_to_end(consumer, last=False)
            self._attend()
            try:
                await consumer
            except BaseException:
                self._consumers.pop(consumer, None)
                if self._called is consumer:
                    self._called = None
                self._attend()  # a call this consumer can no longer answer goes to the next
                raise
            self._called = None
            again = True

    def _attend(self) -> None:
        """Sees to it that one consumer is called when there is something to take: now, or by the timer.

        One call is out at a time. Who answers it attends again, whether there is more to take or nothing left.
        """
        consumer = self._first_consumer()
        when = None if consumer is None or self._called is not None else self._next_event()
        if self._timer is not None:
            if when == self._timer_at:
                return
            self._timer.cancel()
            self._timer = None
        if consumer is None or when is None:
            return
        wait = when - self._clock.now()
        if wait <= 0:
            del self._consumers[consumer]
            self._called = consumer
            consumer.set_result(None)
        elif self._timed:
            # A loop's timer may fire early (uvloop counts in milliseconds): _ring looks at the clock again.
            self._timer = consumer.get_loop().call_later(min(wait / 1_000_000, _LONGEST_TIMER), self._ring)
            self._timer_at = when

    def _ring(self) -> None:
        self._timer = None
        self._attend()

    def _clock_moved(self) -> None:
        self._attend()

    def _first_consumer(self) -> asyncio.Future[None] | None:
        while self._consumers:
            consumer = next(iter(self._consumers))
            if not consumer.done():
                return consumer
            del self._consumers[consumer]  # cancelled; its task has not run since
        return None

    def _next_event(self) -> int | None:
        """When there will be something to take: the head is due, or a lease passes."""
        head = self._head()
        lease = self._first_lease()
        if head is None or (lease is not None and lease.deadline < head.when):
            return lease.deadline if lease else None
        return head.when

    # -- where an entry is --------------------------------------------------------------------------------------------

    def _wait(self, entry: _Entry, when: int) -> None:
        self._leave(entry)
        entry.state, entry.when = State.WAITING, when
        self._waiting += 1
        heapq.heappush(self._due, (when, entry.sequence, self._ticket(entry), entry))
        if len(self._due) > 2 * self._waiting + _SWEEP:
            self._sweep()

    def _lease(self, entry: _Entry, deadline: int) -> None:
        self._leave(entry)
        if deadline == entry.deadline:  # taken twice in a microsecond: the deadline is the fence, so it must differ
            deadline += 1
        entry.state, entry.deadline = State.LEASED, deadline
        self._leased[entry.name] = entry
        heapq.heappush(self._leases, (deadline, self._ticket(entry), entry))
        if len(self._leases) > 2 * len(self._leased) + _SWEEP:
            self._leases = [place for place in self._leases if place[1] == place[2].ticket]
            heapq.heapify(self._leases)

    def _bury(self, entry: _Entry, now: int) -> None:
        self._leave(entry)
        entry.state, entry.died = State.DEAD, now
        self._dead[entry.sequence] = entry

    def _forget(self, entry: _Entry) -> None:
        self._leave(entry)
        entries = self._by_id[entry.id]
        entries.remove(entry)
        if not entries:
            del self._by_id[entry.id]

    def _leave(self, entry: _Entry) -> None:
        if entry.state is State.LEASED:
            del self._leased[entry.name]
        elif entry.state is State.DEAD:
            del self._dead[entry.sequence]
        elif entry.ticket:
            self._waiting -= 1
        entry.ticket = 0

    def _ticket(self, entry: _Entry) -> int:
        self._tickets += 1
        entry.ticket = self._tickets
        return self._tickets

    def _expire(self, now: int) -> None:
        while (entry := self._first_lease()) and entry.deadline <= now:
            heapq.heappop(self._leases)
            entry.requeues += 1
            self._wait(entry, entry.first_when)

    def _pop(self, now: int) -> _Entry | None:
        """The head if it is due, out of the heap; the caller leases or forgets it."""
        head = self._head()
        if head is None or head.when > now:
            return None
        heapq.heappop(self._due)
        return head

    def _head(self) -> _Entry | None:
        while self._due:
            _, _, ticket, entry = self._due[0]
            if ticket == entry.ticket:
                return entry
            heapq.heappop(self._due)
        return None

    def _first_lease(self) -> _Entry | None:
        while self._leases:
            _, ticket, entry = self._leases[0]
            if ticket == entry.ticket:
                return entry
            heapq.heappop(self._leases)
        return None

    def _sweep(self) -> None:
        if len(self._due) > self._waiting:
            self._due = [place for place in self._due if place[2] == place[3].ticket]
            heapq.heapify(self._due)

    def _count_due(self, now: int) -> int:
        """How many wait that are due; looks only at those, and at the places next to them in the heap."""
        count, look = 0, [0]
        while look:
            at = look.pop()
            if at < len(self._due) and self._due[at][0] <= now:
                count += self._due[at][2] == self._due[at][3].ticket
                look += (2 * at + 1, 2 * at + 2)
        return count

    def _live(self, id: str) -> list[_Entry]:
        """The live entries of an id: the waiting ones in due order, then the leased ones by deadline."""
        live = [entry for entry in self._by_id.get(id, ()) if entry.state is not State.DEAD]
        if len(live) > 1:
            live.sort(key=lambda entry: (entry.state is State.LEASED, _score(entry), entry.sequence))
        return live

    def _remember(self, id: str) -> None:
        self._released[id] = None
        self._released.move_to_end(id)
        if len(self._released) > _RECENT:
            self._released.popitem(last=False)

    # -- closing ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Ends waiting consumers and takes no more jobs. May be called again."""
        self._closed = True
        consumers = list(self._consumers)
        self._consumers.clear()
        for consumer in consumers:
            if not consumer.done():
                consumer.set_result(None)
        self._attend()

    async def aclose(self) -> None:
        """:meth:`close`, under the name it has on an :class:`AsyncDelayQueue`."""
        self.close()

    async def __aenter__(self) -> MemoryDelayQueue:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise DelayError("this MemoryDelayQueue is closed")

    def __repr__(self) -> str:
        return f"<MemoryDelayQueue waiting={self._waiting} leased={len(self._leased)} dead={len(self._dead)}>"


def _score(entry: _Entry) -> int:
    return entry.deadline if entry.state is State.LEASED else entry.when


def _ids(ids: Iterable[str]) -> list[str]:
    """Them all, checked before anything is done."""
    if isinstance(ids, (str, bytes)) or not isinstance(ids, Iterable):
        raise TypeError(f"ids must be an iterable of ids, got {ids!r}")
    listed = list(ids)
    for id in listed:
        check_id(id)
    return listed


def _limit(limit: object, most: int) -> int:
    if isinstance(limit, bool) or not isinstance(limit, int) or not 1 <= limit <= most:
        raise ValueError(f"limit must be an int from 1 to {most}, got {limit!r}")
    return limit


def _span(lease: float) -> int:
    micros = seconds_to_micros(lease, "lease")
    if not 1000 <= micros <= 86_400_000_000:
        raise ValueError(f"lease must be between 0.001 s and a day, got {lease!r}")
    return micros


def _aware(moment: object) -> int:
    if not isinstance(moment, datetime) or moment.utcoffset() is None:
        raise ValueError(f"due_before must be an aware datetime, got {moment!r}")
    return to_micros(moment)


def _meta(meta: Mapping[str, str] | None) -> Mapping[str, str]:
    if meta is None:
        return {}
    if not isinstance(meta, Mapping):
        raise TypeError(f"meta must be a mapping of str to str, got {meta!r}")
    for pair in meta.items():
        if not all(isinstance(word, str) for word in pair):
            raise TypeError(f"meta must map str to str, got {pair[0]!r}: {pair[1]!r}")
        try:
            "".join(pair).encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"meta must be encodable as UTF-8, got {pair[0]!r}: {pair[1]!r}") from error
    return dict(meta) if meta else {}


def _cursor(place: tuple[int, int]) -> str:
    return f"{place[0]}-{place[1]}"


def _after(cursor: str | None) -> tuple[int, int] | None:
    if cursor is None:
        return None
    try:
        when, sequence = cursor.split("-")
        return int(when), int(sequence)
    except (AttributeError, ValueError):
        raise ValueError(f"cursor must be one that a page gave, got {cursor!r}") from None
