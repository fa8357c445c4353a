"""What the helpers of all frameworks have in common: looking, asserting, and finding what falls due."""

from __future__ import annotations

from collections.abc import Generator
from datetime import timedelta
from types import TracebackType
from typing import Any, Final, TypeVar

from typing_extensions import Self

from ..clock import ManualClock
from ..due import Delay, from_micros, seconds_to_micros
from ..jobs import Claim, Job
from .errors import ReleaseFailed
from .jobs import ANY, ScheduledJob, Wanted, listing, span
from .verbs import Broker, MemoryVerbs, at_once

__all__ = ["Delayed"]

T = TypeVar("T", bound="Delayed")
_AT_ONE_INSTANT: Final = 10_000
"""Releases without the clock moving that are taken for an endless loop."""
_LEASE: Final = 86_400.0


class Delayed:
    """Delayed jobs of one app, in memory, on a clock that the test moves.

    ``clock`` is the clock, ``released`` what was released so far, in order. ``undo()``, or leaving the context, gives
    the app back as it was.
    """

    def __init__(self, clock: ManualClock | None = None, broker: Broker | None = None) -> None:
        if clock is not None and not isinstance(clock, ManualClock):
            raise TypeError(f"clock must be a ManualClock, got {clock!r}")
        self.clock = clock or ManualClock()
        self.released: list[ScheduledJob] = []
        self._verbs = MemoryVerbs(self.clock, broker)
        self._advancing = False
        self._over = False

    # ------------------------------------------------------------ looking

    @property
    def scheduled(self) -> list[ScheduledJob]:
        """What waits, in due order."""
        return [self._view(job) for job in self._verbs.waiting()]

    def assert_scheduled(
        self,
        task: Any = ANY,
        *,
        delay: Any = ANY,
        due_in: Any = ANY,
        due: Any = ANY,
        args: Any = ANY,
        kwargs: Any = ANY,
        id: Any = ANY,
        queue: Any = ANY,
        times: int | None = None,
    ) -> ScheduledJob:
        """Fails unless such a job waits; answers the first one. What is not given may be anything.

        Args:
            task: its name (what follows the last dot or colon will do), or the task itself.
            delay: from the call that scheduled it to its due time: seconds, a timedelta, or ``pytest.approx`` of one.
            due_in: the same, from now.
            due: an aware datetime.
            args, kwargs: all of its arguments, as the task will get them.
            id: of the task or job. queue: of the framework.
            times: so many of them wait, not just one or more.
        """
        __tracebackhide__ = True
        wanted = Wanted(task, delay, due_in, due, args, kwargs, id, queue)
        return self._expect(wanted, self.scheduled, "scheduled", times)

    def assert_not_scheduled(
        self,
        task: Any = ANY,
        *,
        delay: Any = ANY,
        due_in: Any = ANY,
        due: Any = ANY,
        args: Any = ANY,
        kwargs: Any = ANY,
        id: Any = ANY,
        queue: Any = ANY,
    ) -> None:
        """Fails when such a job waits; arguments as for :meth:`assert_scheduled`."""
        __tracebackhide__ = True
        wanted = Wanted(task, delay, due_in, due, args, kwargs, id, queue)
        found = [job for job in self.scheduled if not wanted.differences(job)]
        if found:
            raise AssertionError(f"expected not to be scheduled: {wanted}\nbut there is\n{listing(found)}")

    def assert_nothing_scheduled(self) -> None:
        """Fails when anything waits."""
        __tracebackhide__ = True
        if found := self.scheduled:
            raise AssertionError(f"expected nothing to be scheduled, but there is\n{listing(found)}")

    def assert_released(
        self,
        task: Any = ANY,
        *,
        delay: Any = ANY,
        due: Any = ANY,
        args: Any = ANY,
        kwargs: Any = ANY,
        id: Any = ANY,
        queue: Any = ANY,
        times: int | None = None,
    ) -> ScheduledJob:
        """Fails unless such a job was released; answers the first one. Arguments as for :meth:`assert_scheduled`."""
        __tracebackhide__ = True
        wanted = Wanted(task, delay, ANY, due, args, kwargs, id, queue)
        now = self.clock.now()
        released = [_seen_from(job, (job.due - now).total_seconds()) for job in self.released]
        return self._expect(wanted, released, "released", times)

    def _expect(self, wanted: Wanted, jobs: list[ScheduledJob], what: str, times: int | None) -> ScheduledJob:
        __tracebackhide__ = True
        if times is not None and (isinstance(times, bool) or not isinstance(times, int) or times < 1):
            raise ValueError(f"times must be a positive int, got {times!r}; for none there is assert_not_scheduled")
        found = [job for job in jobs if not wanted.differences(job)]
        if found and times in (None, len(found)):
            return found[0]
        lines = [f"expected to be {what}: {wanted}"]
        if found:
            lines[0] += f", {times} times; found {len(found)}"
        if not jobs:
            lines.append(f"but nothing was {what}" if what == "released" else "but nothing is scheduled")
        else:
            notes = {at: "; ".join(wanted.differences(job)) for at, job in enumerate(jobs) if wanted.differences(job)}
            lines += [f"{what} at {self.clock.now().isoformat(sep=' ')} on the test's clock:", listing(jobs, notes)]
        if what == "scheduled" and self.released:
            lines += ["released before:", listing([_seen_from(j, self._ago(j)) for j in self.released])]
        raise AssertionError("\n".join(lines))

    def _ago(self, job: ScheduledJob) -> float:
        return (job.due - self.clock.now()).total_seconds()

    def _view(self, job: Job | Claim) -> ScheduledJob:
        due = from_micros(job.due)
        note = ""
        try:
            task, args, kwargs, id = self._read(job)
        except Exception as error:
            task, args, kwargs, id = job.meta.get("task", "?"), (), {}, job.id
            note = f": {type(error).__name__}: {error}"
        return ScheduledJob(
            task,
            tuple(args),
            dict(kwargs),
            self._verbs.delay_of(job),
            (job.due - self.clock.micros) / 1_000_000,
            due,
            id,
            job.meta.get("queue"),
            note,
        )

    def _read(self, job: Job | Claim) -> tuple[str, Any, Any, str]:
        """The task's name, args, kwargs and id, from a stored job."""
        raise NotImplementedError

    # ------------------------------------------------------------ releasing

    def _span_to_next(self) -> timedelta | None:
        """How long until the next job is due; None: nothing waits."""
        due = self._verbs.next_due()
        return None if due is None else timedelta(microseconds=max(0, due - self.clock.micros))

    def _falling_due(self, seconds: Delay) -> Generator[Claim, None, None]:
        """Each job that falls due while the clock advances, with the clock at its due time; in the end the clock is
        where it was told to be. Whoever takes one releases it before asking for the next."""
        length = seconds_to_micros(seconds, "seconds")
        if length < 0:
            raise ValueError(f"advance goes forward only, got seconds={seconds!r}; clock.advance() can go back")
        if self._over:
            raise RuntimeError("this helper was undone; the app is its own again")
        if self._advancing:
            raise RuntimeError("advance() was called by a task that advance() is running; tests move the clock")
        end, at, released = self.clock.micros + length, -1, 0
        self._advancing = True
        try:
            while (due := self._verbs.next_due()) is not None and due <= end:
                self._move_to(due)
                released = released + 1 if self.clock.micros == at else 0
                at = self.clock.micros
                claim = at_once(self._verbs.memory.claim(1, lease=_LEASE))[0]
                if released > _AT_ONE_INSTANT:
                    raise RuntimeError(
                        f"{released} releases at one instant, of {self._view(claim).call}; an endless loop?"
                    )
                yield claim
            self._move_to(end)
        finally:
            self._advancing = False

    def _move_to(self, micros: int) -> None:
        if micros > self.clock.micros:
            self.clock.advance(timedelta(microseconds=micros - self.clock.micros))

    def _done(self, claim: Claim) -> ScheduledJob:
        """The broker has it."""
        at_once(self._verbs.memory.ack([claim]))
        view = self._view(claim)
        self.released.append(view)
        return view

    def _failed(self, claim: Claim, why: BaseException | str) -> ReleaseFailed:
        """It could not be handed on; the error to raise."""
        at_once(self._verbs.memory.fail([claim], str(why), retry_in=None))
        return ReleaseFailed(f"{self._view(claim).call} [id {claim.id}] could not be released: {why}")

    # ------------------------------------------------------------ life

    def undo(self) -> None:
        """Gives the app back as it was; what waits is forgotten. May be called again."""
        if not self._over:
            self._over = True
            self._undo()

    def _undo(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()

    def __repr__(self) -> str:
        waiting = self._verbs.waiting()
        next_due = "" if not waiting else f", next due in {span((waiting[0].due - self.clock.micros) / 1e6)}"
        return f"<{type(self).__name__} scheduled={len(waiting)}{next_due}>"


def _seen_from(job: ScheduledJob, due_in: float) -> ScheduledJob:
    return ScheduledJob(job.task, job.args, job.kwargs, job.delay, due_in, job.due, job.id, job.queue, job.note)
