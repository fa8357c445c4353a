"""The queue against a model of lists and dicts: random histories, everything visible compared after each step.

The model knows nothing of Redis or heaps; it is the contract written down a second time. Clocks jump both ways, claims
are kept and used again long after they went stale.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from delayadapters import DelayQueue, JobExists, MemoryDelayQueue, NewJob, Outcome, State
from delaytests import FakeClock
from delaytests.queues import BlockingFace

IDS = ("a", "é")
SECOND = 1_000_000

# ----------------------------------------------------------------------------------------------------------- the model


@dataclass(eq=False)
class Entry:
    number: int
    id: str
    payload: bytes
    due: int
    when: int
    state: State = State.WAITING
    attempts: int = 0
    requeues: int = 0
    reason: str | None = None
    deadline: int = 0
    died: int = 0

    def seen(self) -> tuple[Any, ...]:
        """What a Job shows of it."""
        return self.id, self.due, self.payload, self.state, self.attempts, self.requeues, self.reason


@dataclass
class Model:
    """``requeues_all``: whether a claim re-queues every lease that has passed, or (Redis) as many as it may claim."""

    requeues_all: bool
    entries: list[Entry] = field(default_factory=list)
    released: set[str] = field(default_factory=set)
    numbers: Iterable[int] = field(default_factory=itertools.count)

    def those(self, state: State, id: str | None = None) -> list[Entry]:
        """Entries in a state, in that state's own order."""
        order = {State.WAITING: "when", State.LEASED: "deadline", State.DEAD: "died"}[state]
        found = [one for one in self.entries if one.state is state and id in (None, one.id)]
        return sorted(found, key=lambda one: (getattr(one, order), one.number))

    def live(self, id: str) -> list[Entry]:
        return self.those(State.WAITING, id) + self.those(State.LEASED, id)

    def get(self, id: str) -> Entry | None:
        found = self.live(id) + self.those(State.DEAD, id)
        return found[0] if found else None

    def taken(self, ids: list[str]) -> list[str]:
        return [id for n, id in enumerate(ids) if id in ids[:n] or self.live(id)]

    def schedule(self, id: str, payload: bytes, due: int, mode: str) -> tuple[Entry, Outcome]:
        live, outcome = self.live(id), Outcome.SCHEDULED
        if live and mode == "keep":
            return live[0], Outcome.KEPT
        if live and mode == "replace":
            outcome = Outcome.IN_FLIGHT if live[-1].state is State.LEASED else Outcome.REPLACED
            self.entries = [one for one in self.entries if one not in live]
        entry = Entry(next(self.numbers), id, payload, due, due)
        self.entries.append(entry)
        return entry, outcome

    def change(self, id: str, done: Outcome) -> tuple[list[Entry], Outcome]:
        """The waiting entries a verb is about, and its answer."""
        waiting, leased = self.those(State.WAITING, id), self.those(State.LEASED, id)
        if leased:
            return waiting, Outcome.IN_FLIGHT
        if waiting:
            return waiting, done
        return [], Outcome.RELEASED if id in self.released else Outcome.NOT_FOUND

    def requeue(self, now: int, limit: int) -> None:
        passed = [one for one in self.those(State.LEASED) if one.deadline <= now]
        for one in passed if self.requeues_all else passed[:limit]:
            one.state, one.when = State.WAITING, one.due
            one.requeues += 1

    def claimable(self, now: int, limit: int) -> list[Entry]:
        return [one for one in self.those(State.WAITING) if one.when <= now][:limit]

    def remove(self, entry: Entry) -> None:
        self.entries.remove(entry)


# --------------------------------------------------------------------------------------------------------- the machine


@dataclass(eq=False)
class Held:
    """A claim, perhaps long stale, and what the model knows it by."""

    claim: Any
    entry: Entry


class Machine(RuleBasedStateMachine):
    """``make`` gives a queue on a clock, with plain verbs; ``left`` what it still stores when every job is gone."""

    ids = st.sampled_from(IDS)
    modes = st.sampled_from(["error", "keep", "replace", "add"])
    # Few values, so that ties and coincidences are common.
    delays = st.sampled_from([-3, 0, 0.000001, 1, 1, 2, 5, timedelta(seconds=10)])
    leases = st.sampled_from([1, 2, 5, 30])
    # Claims, by how long ago they were made, whatever became of them since; None: all that are good now.
    some = st.none() | st.lists(st.integers(0, 9), min_size=1, max_size=4, unique=True)

    def __init__(self, make: Any, left: Any, requeues_all: bool) -> None:
        super().__init__()
        self.clock = FakeClock()
        self.left = left
        self.queue = make(self.clock)
        self.model = Model(requeues_all)
        self.payloads = (b"%d" % n for n in itertools.count())
        self.names: dict[bytes, Entry] = {}
        self.held: list[Held] = []

    def teardown(self) -> None:
        if sys.exc_info()[0] is None:  # else the failure is what matters
            self.get_rid_of_all()
        self.queue.purge()
        self.queue.aclose() if isinstance(self.queue, BlockingFace) else self.queue.close()

    def get_rid_of_all(self) -> None:
        """Every job can be got rid of, and then nothing is left of any."""
        self.clock.advance(timedelta(days=400))
        assert self.queue.ack(self.queue.claim()) == len(
            self.model.those(State.WAITING) + self.model.those(State.LEASED)
        )
        for id in IDS:
            self.queue.discard(id)
        assert not self.left(self.queue)

    def after(self, delay: Any) -> int:
        return self.clock() + max(span_of(delay) // timedelta(microseconds=1), 0)

    # ------------------------------------------------------------ scheduling

    items = st.lists(st.tuples(ids, delays, st.booleans()), min_size=1, max_size=4)

    @initialize(items=items)
    def begin(self, items: list[tuple[str, Any, bool]]) -> None:
        self.schedule(items, "add")

    @rule(items=items, mode=modes)
    def schedule(self, items: list[tuple[str, Any, bool]], mode: str) -> None:
        new, dues = [], []
        for id, delay, absolute in items:
            due = self.after(delay)
            payload = next(self.payloads)
            if absolute:
                new.append(NewJob(payload, at=self.clock.datetime + span_of(delay), id=id))
            else:
                new.append(NewJob(payload, delay=delay, id=id))
            dues.append(due)
        taken = self.model.taken([job.id for job in new]) if mode == "error" else []
        try:
            if len(new) == 1:
                one = new[0]
                jobs = [self.queue.schedule(one.payload, delay=one.delay, at=one.at, id=one.id, if_exists=mode)]
            else:
                jobs = self.queue.schedule_many(new, if_exists=mode)
        except JobExists as error:
            assert error.ids == taken
            return
        assert not taken
        assert len(jobs) == len(new)
        for job, asked, due in zip(jobs, new, dues, strict=True):
            entry, outcome = self.model.schedule(asked.id, asked.payload, due, mode)
            assert (seen(job), job.outcome) == (entry.seen(), outcome)

    @precondition(lambda self: self.model.entries or self.model.released)
    @rule(id=ids, verb=st.sampled_from(["cancel", "reschedule", "release_now"]), delay=delays, absolute=st.booleans())
    def change(self, id: str, verb: str, delay: Any, absolute: bool) -> None:
        done = Outcome.CANCELLED if verb == "cancel" else Outcome.RESCHEDULED
        waiting, outcome = self.model.change(id, done)
        options: dict[str, Any] = {}
        if verb == "reschedule":
            options = {"at": self.clock.datetime + span_of(delay)} if absolute else {"delay": delay}
        assert getattr(self.queue, verb)(id, **options) is outcome
        for entry in waiting:
            if verb == "cancel":
                self.model.remove(entry)
                self.model.released.discard(id)
            else:
                entry.due = entry.when = self.after(delay) if verb == "reschedule" else self.clock()

    @precondition(lambda self: self.model.those(State.DEAD))
    @rule(id=ids, verb=st.sampled_from(["replay", "discard"]))
    def revive(self, id: str, verb: str) -> None:
        dead = self.model.those(State.DEAD, id)
        done = Outcome.REPLAYED if verb == "replay" else Outcome.DISCARDED
        assert getattr(self.queue, verb)(id) is (done if dead else Outcome.NOT_FOUND)
        for entry in dead:
            if verb == "discard":
                self.model.remove(entry)
            else:
                entry.state, entry.attempts, entry.reason = State.WAITING, 0, None
                entry.due = entry.when = self.clock()

    # ------------------------------------------------------------ claims

    @rule(limit=st.sampled_from([1, 2, 100]), lease=leases, when_there_is_something=st.booleans())
    def claim(self, limit: int, lease: int, when_there_is_something: bool) -> None:
        if when_there_is_something:
            self.clock.set(max(self.clock(), min(self.events(), default=0)))
        now = self.clock()
        self.model.requeue(now, limit)
        expected = self.model.claimable(now, limit)
        claims = self.queue.claim(limit, lease=lease)
        note(f"claimed {[claim.payload for claim in claims]}")
        assert [claim.payload for claim in claims] == [one.payload for one in expected]
        elsewhere = {one.deadline for one in self.model.those(State.LEASED)}
        for claim, entry in zip(claims, expected, strict=True):
            assert claim.due <= now, "early"
            assert (claim.id, claim.due, claim.attempts, claim.requeues) == (
                entry.id,
                entry.due,
                entry.attempts,
                entry.requeues,
            )
            assert self.names.setdefault(claim.entry, entry) is entry, "an entry's name is its own"
            # The deadline is a fence as well, so it may be a few microseconds later than asked.
            assert 0 <= claim.lease - (now + lease * SECOND) <= len(elsewhere) + 1
            entry.state, entry.deadline = State.LEASED, claim.lease
            self.held.append(Held(claim, entry))

    def pick(self, ages: list[int] | None) -> list[Held]:
        if ages is None:  # one good claim on each leased entry that has one
            return list({one.entry.number: one for one in self.ours(self.held)}.values())
        return [self.held[-1 - age] for age in ages if age < len(self.held)]

    def ours(self, held: list[Held]) -> list[Held]:
        return [
            one
            for one in held
            if one.entry in self.model.entries
            and one.entry.state is State.LEASED
            and one.entry.deadline == one.claim.lease
        ]

    def once(self, held: list[Held]) -> list[Entry]:
        """Two claims on one entry may carry the same fence, when the clock stood still or was set back."""
        return list({one.entry.number: one.entry for one in self.ours(held)}.values())

    @precondition(lambda self: self.held)
    @rule(
        ages=some,
        verb=st.sampled_from(["ack", "ack", "give_back", "retry", "bury"]),
        pause=st.sampled_from([0, 1, 7.5]),
    )
    def settle(self, ages: list[int] | None, verb: str, pause: float) -> None:
        held = self.pick(ages)
        claims, ours = [one.claim for one in held], self.once(held)
        reason = f"{verb} 🦆"
        if verb in ("ack", "give_back"):
            count = getattr(self.queue, verb)(claims)
        else:
            count = self.queue.fail(claims, reason, retry_in=pause if verb == "retry" else None)
        assert count == len(ours)
        for entry in ours:
            if verb == "ack":
                self.model.remove(entry)
                self.model.released.add(entry.id)
                continue
            entry.state, entry.when = State.WAITING, entry.due
            if verb != "give_back":
                entry.attempts += 1
                entry.reason = reason
            if verb == "retry":
                entry.when = max(self.after(pause), entry.due)
            if verb == "bury":
                entry.state, entry.died = State.DEAD, self.clock()

    @precondition(lambda self: self.held)
    @rule(ages=some, lease=leases)
    def renew(self, ages: list[int] | None, lease: int) -> None:
        held = list({one.entry.number: one for one in self.pick(ages)}.values())
        ours = self.ours(held)
        elsewhere = {one.deadline for one in self.model.those(State.LEASED)}
        renewed = self.queue.renew([one.claim for one in held], lease=lease)
        by_name = {claim.entry: claim for claim in renewed}
        assert len(renewed) == len(by_name)
        assert by_name.keys() == {one.claim.entry for one in ours}
        for one in ours:
            claim = by_name[one.claim.entry]
            assert 0 <= claim.lease - (self.clock() + lease * SECOND) <= len(elsewhere) + 1
            assert (claim.id, claim.payload, claim.due) == (one.claim.id, one.claim.payload, one.claim.due)
            one.entry.deadline = claim.lease
            self.held.append(Held(claim, one.entry))

    # ------------------------------------------------------------ time

    @rule(seconds=st.sampled_from([0, 1, 1, 2, 5, 40, 3600, -1, -7, -3600]), micros=st.sampled_from([-1, 0, 0, 1]))
    def time_passes_or_the_clock_is_set(self, seconds: int, micros: int) -> None:
        self.clock.advance(seconds, micros=micros)

    def events(self) -> list[int]:
        """When jobs fall due and leases pass, to the microsecond."""
        waiting, leased = self.model.those(State.WAITING), self.model.those(State.LEASED)
        return [one.when for one in waiting] + [one.deadline for one in leased]

    # ------------------------------------------------------------ everything visible

    @invariant()
    def stats_agree(self) -> None:
        now, waiting = self.clock(), self.model.those(State.WAITING)
        stats = self.queue.stats()
        assert (stats.waiting, stats.leased, stats.dead) == (
            len(waiting),
            len(self.model.those(State.LEASED)),
            len(self.model.those(State.DEAD)),
        )
        assert stats.due == sum(one.when <= now for one in waiting)
        assert stats.next_due == (waiting[0].when if waiting else None)
        assert stats.oldest_overdue == (max(now - waiting[0].when, 0) / SECOND if waiting else 0)

    @invariant()
    def pages_agree(self) -> None:
        for pages, state in ((self.queue.jobs, State.WAITING), (self.queue.dead_jobs, State.DEAD)):
            expected = [one.seen() for one in self.model.those(state)]
            found, cursor = [], None
            while True:
                page = pages(limit=3, cursor=cursor)
                found += [seen(job) for job in page.jobs]
                cursor = page.cursor
                if cursor is None:
                    break
            assert found == expected

    @invariant()
    def ids_agree(self) -> None:
        for id in IDS:
            entry, job = self.model.get(id), self.queue.get(id)
            assert (entry and entry.seen()) == (job and seen(job))


def span_of(delay: Any) -> timedelta:
    return delay if isinstance(delay, timedelta) else timedelta(seconds=delay)


def seen(job: Any) -> tuple[Any, ...]:
    return job.id, job.due, job.payload, job.state, job.attempts, job.requeues, job.reason


RUNS = settings(
    max_examples=70,
    stateful_step_count=40,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    phases=[Phase.explicit, Phase.generate],  # shrinking takes minutes: add Phase.shrink to study a failure
)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_redis_agrees_with_the_model(redis_server: Any, queue_name: str) -> None:
    names = itertools.count()

    def make(clock: FakeClock) -> DelayQueue:
        queue = DelayQueue.from_url(redis_server.url, name=f"{queue_name}-{next(names)}")
        queue._clock = clock
        return queue

    def left(queue: DelayQueue) -> Any:
        return queue.client.hgetall(f"{{{queue.name}:0}}:entries")

    run_state_machine_as_test(
        lambda: Machine(make, left, requeues_all=False),
        settings=RUNS,
    )


def test_memory_agrees_with_the_model() -> None:
    def make(clock: FakeClock) -> BlockingFace:
        return BlockingFace(MemoryDelayQueue(clock=clock.seconds))

    def left(queue: BlockingFace) -> Any:
        entries = queue.wrapped._entries
        return any(map(entries.known, IDS)) or entries.leased or entries.dead

    run_state_machine_as_test(
        lambda: Machine(make, left, requeues_all=True),
        settings=RUNS,
    )
