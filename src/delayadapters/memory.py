"""The in-process queue: for delays that are short and may be lost with the process (retries in a request, debounce).

Verbs, arguments, errors and outcomes are those of :class:`AsyncDelayQueue`; the same contract tests run on both. A
consumer either claims and acks, or just calls :meth:`MemoryDelayQueue.get`.

Where the entries are, :mod:`.heap` knows. Of all waiting consumers none runs a timer: the queue has one, set for the
next thing to happen, and it wakes one consumer, who wakes the next if there is more.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from types import TracebackType
from typing import Final, NamedTuple, overload

from .clock import Clock, InjectedClock, ManualClock, SystemClock
from .due import (
    MAX_CLAIM,
    MAX_PAGE,
    Delay,
    When,
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
from .errors import DelayError, JobExists
from .heap import Entries, Entry, Place
from .jobs import Claim, Command, IfExists, Job, NewJob, Outcome, Page, State, Stats

__all__ = ["ManualClock", "MemoryDelayQueue"]

_RECENT: Final = 10_000
"""Released ids remembered, so that cancel can tell RELEASED from NOT_FOUND."""
_LONGEST_TIMER: Final = 86_400.0


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
        self.max_payload = check_max_payload(max_payload)
        self._clock: Clock = SystemClock() if clock is None else InjectedClock(clock)
        self._timed = not isinstance(clock, ManualClock)
        if isinstance(clock, ManualClock):
            clock.notify(self._clock_moved)
        self._entries = Entries()
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
        if if_exists == "error" and self._entries.known(new.id):
            self._check_free((new.id,))
        job = self._store(new, if_exists)
        self._attend()
        return job

    async def schedule_many(self, items: Iterable[NewJob], *, if_exists: IfExists = "error") -> list[Job]:
        """Stores many jobs, in order: all of them, or none when it raises. Arguments and errors are schedule's."""
        self._check_open()
        checked = [self._check(item, if_exists) for item in check_items(items, NewJob, "jobs")]
        await self._give_way()
        if if_exists == "error":
            self._check_free(new.id for new in checked)
        jobs = [self._store(new, if_exists) for new in checked]
        self._attend()
        return jobs

    def _check(self, new: NewJob, if_exists: IfExists) -> _Checked:
        check_if_exists(if_exists)
        if new.release is not None:
            raise TypeError("release is for a queue in Redis: an in-process queue has no Redis to run the commands")
        when = resolve(new.delay, new.at, now=self._clock.now())
        check_payload(new.payload, self.max_payload)
        name = str(uuid.uuid4()) if new.id is None else new.id
        check_id(name)
        return _Checked(name, new.payload, check_meta(new.meta), when)

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
            if one in seen or self._entries.live(one):
                taken.append(one)
            seen.add(one)
        if taken:
            raise JobExists(taken)

    def _store(self, new: _Checked, if_exists: IfExists) -> Job:
        outcome = Outcome.SCHEDULED
        live = self._entries.live(new.id)
        if live and if_exists == "keep":
            return live[0].job(Outcome.KEPT)
        if live and if_exists == "replace":
            # Forgetting a leased entry disowns it: its ack, its failure and the end of its lease all find nothing.
            outcome = Outcome.IN_FLIGHT if any(one.state is State.LEASED for one in live) else Outcome.REPLACED
            for one in live:
                self._entries.forget(one)
        entry = self._entries.add(new.id, new.payload, new.meta)
        self._entries.wait(entry, entry.put_off(*self._place(new.when)))
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
            self._entries.forget(entry)
        if waiting:
            self._released.pop(id, None)
            self._attend()
        return outcome or Outcome.CANCELLED

    async def reschedule(self, id: str, *, delay: Delay | None = None, at: datetime | None = None) -> Outcome:
        """Gives every waiting entry of ``id`` a new due time: RESCHEDULED, IN_FLIGHT, RELEASED or NOT_FOUND."""
        when = resolve(delay, at, now=self._clock.now())
        waiting, outcome = self._waiting_of(id)
        for entry in waiting:
            self._entries.wait(entry, entry.put_off(*self._place(when)))
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

    def _waiting_of(self, id: str) -> tuple[list[Entry], Outcome | None]:
        """The waiting entries of an id, and what is to be answered unless a verb has done all it could."""
        check_id(id)
        live = self._entries.live(id)
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
        entries = self._entries.live(id) or self._entries.dead_of(id)
        return entries[0].job() if entries else None

    # -- looking and tidying ------------------------------------------------------------------------------------------

    async def jobs(self, *, due_before: datetime | None = None, limit: int = 100, cursor: str | None = None) -> Page:
        """Up to ``limit`` waiting jobs, in due order, due before ``due_before``; ``cursor`` continues a page."""
        check_limit(limit, MAX_PAGE)
        before = None if due_before is None else check_moment(due_before, "due_before") - self._clock.shift()
        return _page(*self._entries.page_of_waiting(limit, _after(cursor), before))

    async def dead_jobs(self, *, limit: int = 100, cursor: str | None = None) -> Page:
        """Up to ``limit`` dead jobs in order of death; ``cursor`` continues a page."""
        check_limit(limit, MAX_PAGE)
        return _page(*self._entries.page_of_dead(limit, _after(cursor)))

    async def replay(self, id: str) -> Outcome:
        """Every dead entry of ``id`` waits again, due now, attempts from zero: REPLAYED or NOT_FOUND."""
        check_id(id)
        dead = self._entries.dead_of(id)
        now, shift = self._clock.now(), self._clock.shift()
        for entry in dead:
            entry.attempts, entry.reason = 0, None
            self._entries.wait(entry, entry.put_off(now, shift))
        if dead:
            self._attend()
        return Outcome.REPLAYED if dead else Outcome.NOT_FOUND

    async def discard(self, id: str) -> Outcome:
        """Deletes every dead entry of ``id``: DISCARDED or NOT_FOUND."""
        check_id(id)
        dead = self._entries.dead_of(id)
        for entry in dead:
            self._entries.forget(entry)
        return Outcome.DISCARDED if dead else Outcome.NOT_FOUND

    async def purge(self) -> None:
        """Deletes every job: waiting, leased and dead. Waiting consumers go on waiting."""
        self._entries.clear()
        self._released.clear()
        self._attend()

    async def stats(self) -> Stats:
        """The queue in numbers."""
        now = self._clock.now()
        head = self._entries.head()
        return Stats(
            waiting=self._entries.waiting,
            due=self._entries.count_due(now),
            leased=self._entries.leased,
            dead=self._entries.dead,
            next_due=head.when if head else None,
            oldest_overdue=max(now - head.when, 0) / 1_000_000 if head else 0.0,
        )

    # -- consumers ----------------------------------------------------------------------------------------------------

    async def claim(self, limit: int = 100, *, lease: float = 30.0) -> list[Claim]:
        """Takes up to ``limit`` due jobs for ``lease`` seconds. Leases that have passed are re-queued first, in their
        original due order."""
        check_limit(limit, MAX_CLAIM)
        span = lease_micros(lease)
        now = self._clock.now()
        self._entries.expire(now)
        claims: list[Claim] = []
        while len(claims) < limit and (entry := self._entries.pop(now)):
            self._entries.lease(entry, now + span)
            claims.append(entry.claim())
        self._attend()
        return claims

    async def ack(self, claims: Iterable[Claim]) -> int:
        """Forgets released jobs. Returns how many were still ours; the others are left alone."""
        count = 0
        for entry in self._ours(claims):
            self._entries.forget(entry)
            self._remember(entry.id)
            count += 1
        return count

    async def give_back(self, claims: Iterable[Claim]) -> int:
        """They wait again, in their original due order, and no attempt is counted. Returns how many were still ours."""
        count = 0
        for entry in self._ours(claims):
            self._entries.wait(entry, entry.first_when)
            count += 1
        self._attend()
        return count

    async def fail(self, claims: Iterable[Claim], reason: str, *, retry_in: Delay | None) -> int:
        """Counts a failed attempt: tried again in ``retry_in`` seconds, or dead at once (None). Returns how many were
        still ours."""
        check_reason(reason)
        now = self._clock.now()
        again = None if retry_in is None else now + pause_micros(retry_in, now=now)
        count = 0
        for entry in self._ours(claims):
            entry.attempts += 1
            entry.reason = reason
            if again is None:
                self._entries.bury(entry, now)
            else:
                # Never before its due time, even when the clock was set back since the claim.
                self._entries.wait(entry, max(again, entry.first_when))
            count += 1
        self._attend()
        return count

    async def renew(self, claims: Iterable[Claim], *, lease: float = 30.0) -> list[Claim]:
        """Extends the leases to ``lease`` seconds from now. Returns those still ours, with the new lease."""
        deadline = self._clock.now() + lease_micros(lease)
        renewed = []
        for entry in self._ours(claims):
            self._entries.lease(entry, deadline)
            renewed.append(entry.claim())
        self._attend()
        return renewed

    def _ours(self, claims: Iterable[Claim]) -> Iterator[Entry]:
        for claim in check_items(claims, Claim, "claims"):
            entry = self._entries.held(claim)
            if entry is not None:
                yield entry

    async def _take(self) -> Claim:
        loop = asyncio.get_running_loop()
        again = False
        while True:
            self._check_open()
            now = self._clock.now()
            self._entries.expire(now)
            entry = self._entries.pop(now)
            if entry is not None:
                self._entries.forget(entry)
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
        when = None if consumer is None or self._called is not None else self._entries.next_event()
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
        has = self._entries
        return f"<MemoryDelayQueue waiting={has.waiting} leased={has.leased} dead={has.dead}>"


def _ids(ids: Iterable[str]) -> list[str]:
    """Them all, checked before anything is done."""
    if isinstance(ids, (str, bytes)) or not isinstance(ids, Iterable):
        raise TypeError(f"ids must be an iterable of ids, got {ids!r}")
    listed = list(ids)
    for id in listed:
        check_id(id)
    return listed


def _page(entries: Sequence[Entry], place: Place | None) -> Page:
    return Page([entry.job() for entry in entries], f"{place[0]}-{place[1]}" if place else None)


def _after(cursor: str | None) -> Place | None:
    if cursor is None:
        return None
    try:
        when, sequence = cursor.split("-")
        return int(when), int(sequence)
    except (AttributeError, ValueError):
        raise ValueError(f"cursor must be one that a page gave, got {cursor!r}") from None
