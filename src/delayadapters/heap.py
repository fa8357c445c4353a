"""Where the entries of the in-process queue are: waiting, leased or dead. No clock, no waiting, no asyncio.

Waiting entries are a heap of ``(when, sequence, ticket, entry)``, leased ones a heap of ``(deadline, ticket, entry)``.
Whatever moves an entry gives it a new ticket, which makes its old place in a heap stale: stale places are skipped when
they come up, and swept out when they outnumber the others. Times are microseconds of the queue's clock.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from typing import Final, TypeAlias

from .jobs import Claim, Job, Outcome, State

__all__ = ["Entries", "Entry", "Place"]

_SWEEP: Final = 64
"""Stale places in a heap that are never worth a sweep."""

Place: TypeAlias = tuple[int, int]
"""A place in the order of waiting or of dead entries: the time, and the sequence that settles ties."""


class Entry:
    """One scheduling of a job. ``ticket`` names its place in a heap; 0: it has none."""

    __slots__ = (
        "attempts", "deadline", "died", "due", "id", "meta", "payload", "reason", "requeues", "sequence", "shift",
        "state", "ticket", "when",
    )  # fmt: skip

    def __init__(self, sequence: int, id: str, payload: bytes, meta: Mapping[str, str]) -> None:
        self.sequence = sequence
        self.id = id
        self.payload = payload
        self.meta = meta
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


class Entries:
    """All entries of a queue, each in one state, found by id, by name and in order."""

    def __init__(self) -> None:
        self._sequence = 0
        self._tickets = 0
        self._due: list[tuple[int, int, int, Entry]] = []
        self._leases: list[tuple[int, int, Entry]] = []
        self._leased: dict[bytes, Entry] = {}
        self._dead: dict[int, Entry] = {}
        self._by_id: dict[str, list[Entry]] = {}
        self.waiting = 0
        """How many wait."""

    @property
    def leased(self) -> int:
        """How many are leased."""
        return len(self._leased)

    @property
    def dead(self) -> int:
        """How many are dead."""
        return len(self._dead)

    @property
    def places(self) -> int:
        """Places in the heaps, stale ones included."""
        return len(self._due) + len(self._leases)

    def clear(self) -> None:
        """Forgets everything, but no number: an entry of before is not mistaken for one of after."""
        self._due.clear()
        self._leases.clear()
        self._leased.clear()
        self._dead.clear()
        self._by_id.clear()
        self.waiting = 0

    # -- moving one ---------------------------------------------------------------------------------------------------

    def add(self, id: str, payload: bytes, meta: Mapping[str, str]) -> Entry:
        """A new entry, to be told at once when to :meth:`wait` for."""
        self._sequence += 1
        entry = Entry(self._sequence, id, payload, meta)
        self._by_id.setdefault(id, []).append(entry)
        return entry

    def wait(self, entry: Entry, when: int) -> None:
        self._leave(entry)
        entry.state, entry.when = State.WAITING, when
        self.waiting += 1
        heapq.heappush(self._due, (when, entry.sequence, self._ticket(entry), entry))
        if len(self._due) > 2 * self.waiting + _SWEEP:
            self._sweep()

    def lease(self, entry: Entry, deadline: int) -> None:
        self._leave(entry)
        if deadline == entry.deadline:  # taken twice in a microsecond: the deadline is the fence, so it must differ
            deadline += 1
        entry.state, entry.deadline = State.LEASED, deadline
        self._leased[entry.name] = entry
        heapq.heappush(self._leases, (deadline, self._ticket(entry), entry))
        if len(self._leases) > 2 * len(self._leased) + _SWEEP:
            self._leases = [place for place in self._leases if place[1] == place[2].ticket]
            heapq.heapify(self._leases)

    def bury(self, entry: Entry, now: int) -> None:
        self._leave(entry)
        entry.state, entry.died = State.DEAD, now
        self._dead[entry.sequence] = entry

    def forget(self, entry: Entry) -> None:
        self._leave(entry)
        entries = self._by_id[entry.id]
        entries.remove(entry)
        if not entries:
            del self._by_id[entry.id]

    def pop(self, now: int) -> Entry | None:
        """The head if it is due, out of the heap; the caller leases or forgets it."""
        head = self.head()
        if head is None or head.when > now:
            return None
        heapq.heappop(self._due)
        return head

    def expire(self, now: int) -> None:
        """Whose lease has passed waits again, in its old place."""
        while (entry := self._first_lease()) and entry.deadline <= now:
            heapq.heappop(self._leases)
            entry.requeues += 1
            self.wait(entry, entry.first_when)

    def _leave(self, entry: Entry) -> None:
        if entry.state is State.LEASED:
            del self._leased[entry.name]
        elif entry.state is State.DEAD:
            del self._dead[entry.sequence]
        elif entry.ticket:
            self.waiting -= 1
        entry.ticket = 0

    def _ticket(self, entry: Entry) -> int:
        self._tickets += 1
        entry.ticket = self._tickets
        return self._tickets

    # -- finding ------------------------------------------------------------------------------------------------------

    def known(self, id: str) -> bool:
        """Whether the id has an entry, in whatever state."""
        return id in self._by_id

    def live(self, id: str) -> list[Entry]:
        """The live entries of an id: the waiting ones in due order, then the leased ones by deadline."""
        live = [entry for entry in self._by_id.get(id, ()) if entry.state is not State.DEAD]
        if len(live) > 1:
            live.sort(key=lambda entry: (entry.state is State.LEASED, _score(entry), entry.sequence))
        return live

    def dead_of(self, id: str) -> list[Entry]:
        """The dead entries of an id, in order of death."""
        dead = [entry for entry in self._by_id.get(id, ()) if entry.state is State.DEAD]
        return sorted(dead, key=lambda entry: (entry.died, entry.sequence))

    def held(self, claim: Claim) -> Entry | None:
        """The entry of a claim, if the claim still holds it."""
        entry = self._leased.get(claim.entry)
        return entry if entry is not None and entry.deadline == claim.lease else None

    def head(self) -> Entry | None:
        """The first to be released."""
        while self._due:
            _, _, ticket, entry = self._due[0]
            if ticket == entry.ticket:
                return entry
            heapq.heappop(self._due)
        return None

    def next_event(self) -> int | None:
        """When there will be something to take: the head is due, or a lease passes."""
        head = self.head()
        lease = self._first_lease()
        if head is None or (lease is not None and lease.deadline < head.when):
            return lease.deadline if lease else None
        return head.when

    def _first_lease(self) -> Entry | None:
        while self._leases:
            _, ticket, entry = self._leases[0]
            if ticket == entry.ticket:
                return entry
            heapq.heappop(self._leases)
        return None

    def count_due(self, now: int) -> int:
        """How many wait that are due; looks only at those, and at the places next to them in the heap."""
        count, look = 0, [0]
        while look:
            at = look.pop()
            if at < len(self._due) and self._due[at][0] <= now:
                count += self._due[at][2] == self._due[at][3].ticket
                look += (2 * at + 1, 2 * at + 2)
        return count

    def page_of_waiting(
        self, limit: int, after: Place | None, before: int | None
    ) -> tuple[Sequence[Entry], Place | None]:
        """Up to ``limit`` behind ``after``, of those before ``before``; the place of the last, when there are more."""
        self._sweep()
        self._due.sort()  # a sorted list is a heap; from the second page on it is sorted already
        end = len(self._due) if before is None else bisect_left(self._due, before, key=lambda place: place[0])
        start = bisect_right(self._due, after, key=lambda place: place[:2]) if after else 0
        stop = min(start + limit, end)
        page = self._due[start:stop]
        return [place[3] for place in page], page[-1][:2] if page and stop < end else None

    def page_of_dead(self, limit: int, after: Place | None) -> tuple[Sequence[Entry], Place | None]:
        """The same of the dead, in order of death."""
        dead = sorted((entry.died, sequence) for sequence, entry in self._dead.items())
        start = bisect_right(dead, after) if after else 0
        page = dead[start : start + limit]
        more = start + limit < len(dead)
        return [self._dead[sequence] for _, sequence in page], page[-1] if page and more else None

    def _sweep(self) -> None:
        if len(self._due) > self.waiting:
            self._due = [place for place in self._due if place[2] == place[3].ticket]
            heapq.heapify(self._due)


def _score(entry: Entry) -> int:
    return entry.deadline if entry.state is State.LEASED else entry.when
