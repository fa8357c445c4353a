"""A delay queue in memory behind the very interface that the adapters use: ``queue._run(queue._verbs.…)``.

A verb is a generator of requests to Redis (redis/verbs.py). Those of :class:`MemoryVerbs` ask for nothing: they are
done by the time they have begun, on a :class:`MemoryDelayQueue`. So a ``DelayQueue`` or ``AsyncDelayQueue`` with
them works as always, from a thread or an event loop, and no adapter has to know.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any, Final, NoReturn, Protocol, TypeVar

from ..clock import ManualClock
from ..due import Delay
from ..errors import JobExists
from ..jobs import Claim, Command, IfExists, Job, NewJob, Outcome, Page, State, Stats
from ..memory import MemoryDelayQueue
from ..redis.commands import NO_EXTRAS, Extras
from ..redis.verbs import Steps, Verbs
from .errors import warn_if_passed

__all__ = ["NAME", "Broker", "MemoryVerbs", "NoRedis", "at_once"]

T = TypeVar("T")
NAME: Final = "delayadapters:testing"
"""The name of every queue in memory."""


class Broker(Protocol):
    """What a direct release and :class:`Extras` need of the framework's own Redis."""

    def run(self, command: Sequence[Any]) -> Any:
        """One Redis command."""

    def release(self, commands: Sequence[Command], claim: Claim) -> None:
        """The commands of a direct release, in order, with the job's values in place of the stand-ins."""


class NoRedis:
    """The client of a queue in memory: whoever asks it for anything hears that there is none."""

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"this delay queue is in memory (delayadapters.testing): it has no Redis client ({name})")


def at_once(verb: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that never waits."""
    try:
        verb.send(None)
    except StopIteration as stop:
        result: T = stop.value
        return result
    verb.close()
    raise RuntimeError("the queue of this test is being waited for with get(); release its jobs with advance() only")


class MemoryVerbs(Verbs):
    """The verbs on a :class:`MemoryDelayQueue`; holds one shard and takes payloads of any size.

    Args:
        clock: whose time it is.
        broker: the framework's own Redis, simulated. None: jobs have no direct release.
    """

    def __init__(self, clock: ManualClock, broker: Broker | None = None) -> None:
        super().__init__(NAME, 1, None)
        self.memory = MemoryDelayQueue(max_payload=None, clock=clock)
        self.clock: Callable[[], int] | None = lambda: clock.micros
        self._time = clock
        self._broker = broker
        self._releases: dict[str, Sequence[Command]] = {}
        self._asked: dict[tuple[str, int], int] = {}

    def delay_of(self, job: Job | Claim) -> float:
        """Seconds from the job's scheduling (or rescheduling) to its due time."""
        return (job.due - self._asked.get((job.id, job.due), job.due)) / 1_000_000

    def next_due(self) -> int | None:
        """When the head of the queue is to be released, microseconds; None: nothing waits."""
        return at_once(self.memory.stats()).next_due

    def waiting(self) -> list[Job]:
        """Everything that waits, in due order."""
        found: list[Job] = []
        page = at_once(self.memory.jobs(limit=10_000))
        while True:
            found += page.jobs
            if page.cursor is None:
                return found
            page = at_once(self.memory.jobs(limit=10_000, cursor=page.cursor))

    def live(self, id: str) -> list[Job]:
        """What waits, or is being released, under an id."""
        return [entry.job() for entry in self.memory._entries.live(id)]

    def release(self, claim: Claim) -> None:
        """The direct release of a claimed job."""
        if self._broker is not None and claim.id in self._releases:
            self._broker.release(self._releases.pop(claim.id), claim)

    # ------------------------------------------------------------ schedule

    def schedule_many(
        self,
        jobs: Iterable[NewJob],
        if_exists: IfExists,
        extras: Extras = NO_EXTRAS,
        out: list[Job | None] | None = None,
    ) -> Steps[list[Job]]:
        yield from ()
        stored = self._schedule(list(jobs) if isinstance(jobs, Iterable) else jobs, if_exists, extras)
        if out is not None:
            out[:] = stored
        return stored

    def _schedule(self, jobs: Sequence[NewJob], if_exists: IfExists, extras: Extras) -> list[Job]:
        if self._refused(extras):
            raise JobExists([job.id or "" for job in jobs])
        stored = []
        if extras.distinct is False:
            plain = [replace(job, release=None) if isinstance(job, NewJob) else job for job in jobs]
            stored = at_once(self.memory.schedule_many(plain, if_exists=if_exists))
        else:
            for job in jobs:
                stored.append(self._same(job, extras.distinct) or self._schedule([job], if_exists, NO_EXTRAS)[0])
        for made, new in zip(stored, jobs, strict=True):
            if made.outcome is Outcome.KEPT:
                continue
            self._note(made)
            warn_if_passed(new.at, self._time, made.meta.get("task", made.id))
            if new.release is not None and self._broker is not None:
                self._releases[made.id] = new.release
        for command in extras.alongside:
            self._need_broker().run(command)
        return stored

    def _refused(self, extras: Extras) -> bool:
        if any(self._need_broker().run(("EXISTS", key)) for key in extras.unless):
            return True
        for command, wanted in extras.expect:
            found = self._need_broker().run(command)
            if _text(found) != _text(wanted):
                return True
        return False

    def _same(self, new: NewJob, distinct: bool | str) -> Job | None:
        """A live job of the same id that makes this one a repetition."""
        meta: Mapping[str, str] = new.meta or {}
        for job in self.live(new.id or ""):
            if distinct is True:
                same = dict(job.meta) == dict(meta) and job.payload == new.payload
            else:
                same = job.meta.get(str(distinct)) == meta.get(str(distinct))
            if same:
                return replace(job, outcome=Outcome.KEPT)
        return None

    def _need_broker(self) -> Broker:
        if self._broker is None:
            raise TypeError("extras with Redis commands need a broker in Redis, and this queue is in memory")
        return self._broker

    def _note(self, job: Job) -> None:
        self._asked[job.id, job.due] = self._time.micros

    # ------------------------------------------------------------ one id

    def cancel(self, id: str) -> Steps[Outcome]:
        yield from ()
        return at_once(self.memory.cancel(id))

    def reschedule(self, id: str, delay: Delay | None, at: datetime | None) -> Steps[Outcome]:
        yield from ()
        outcome = at_once(self.memory.reschedule(id, delay=delay, at=at))
        for job in self.live(id):
            if job.state is State.WAITING:
                self._note(job)
        return outcome

    def revive(self, id: str, verb: str) -> Steps[Outcome]:
        yield from ()
        return at_once(self.memory.replay(id) if verb == "replay" else self.memory.discard(id))

    def get(self, id: str) -> Steps[Job | None]:
        yield from ()
        return at_once(self.memory.get(id))

    # ------------------------------------------------------------ many

    def page(self, which: str, due_before: datetime | None, limit: int, cursor: str | None) -> Steps[Page]:
        yield from ()
        if which == "due":
            return at_once(self.memory.jobs(due_before=due_before, limit=limit, cursor=cursor))
        return at_once(self.memory.dead_jobs(limit=limit, cursor=cursor))

    def stats(self) -> Steps[Stats]:
        yield from ()
        return at_once(self.memory.stats())

    def purge(self) -> Steps[None]:
        yield from ()
        self._releases.clear()
        at_once(self.memory.purge())

    # ------------------------------------------------------------ claims

    def claim(self, limit: int, lease: float) -> Steps[list[Claim]]:
        yield from ()
        return at_once(self.memory.claim(limit, lease=lease))

    def settle(self, claims: Iterable[Claim], verb: str, pause: int = 0, reason: str = "") -> Steps[int]:
        yield from ()
        if verb == "ack":
            return at_once(self.memory.ack(claims))
        if verb == "back":
            return at_once(self.memory.give_back(claims))
        again = timedelta(microseconds=pause) if verb == "retry" else None
        return at_once(self.memory.fail(claims, reason, retry_in=again))

    def renew(self, claims: Iterable[Claim], lease: float) -> Steps[list[Claim]]:
        yield from ()
        return at_once(self.memory.renew(claims, lease=lease))


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):  # a score
        return f"{value:.17g}"
    return value.decode() if isinstance(value, bytes) else str(value)
