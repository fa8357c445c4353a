"""Scheduled jobs as a test sees them: readable, and comparable with what it expects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Final

__all__ = ["ANY", "ScheduledJob", "Wanted", "listing", "span"]


class _Any:
    def __repr__(self) -> str:
        return "anything"


ANY: Final[Any] = _Any()
"""What an argument of an assertion is when it was not given."""
_SHOWN: Final = 20


@dataclass(frozen=True)
class ScheduledJob:
    """One scheduled job.

    ``delay``: seconds from the call that scheduled it (or rescheduled it) to its due time; ``due_in``: seconds from now
    to its due time, when this was made. All on the test's clock. ``id`` is the framework's id of the task or job.
    """

    task: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    delay: float
    due_in: float
    due: datetime
    id: str
    queue: str | None = None
    note: str = field(default="", compare=False)
    """Why the arguments are not known."""

    @property
    def call(self) -> str:
        """``task(args, name=value)``."""
        return _call(self.task, self.args, self.kwargs) if not self.note else f"{self.task}(…{self.note})"

    def __str__(self) -> str:
        when = f"in {span(self.due_in)}" if self.due_in >= 0 else f"{span(-self.due_in)} ago"
        asked = "" if self.delay == self.due_in else f", delay {span(self.delay)}"
        queue = "" if self.queue is None else f", queue {self.queue}"
        return f"{when}: {self.call}  [id {self.id}{queue}{asked}]"


@dataclass(frozen=True)
class Wanted:
    """What a test looks for; :data:`ANY` where it does not care."""

    task: Any = ANY
    delay: Any = ANY
    due_in: Any = ANY
    due: Any = ANY
    args: Any = ANY
    kwargs: Any = ANY
    id: Any = ANY
    queue: Any = ANY

    def is_the_task(self, job: ScheduledJob) -> bool:
        """A task may be named by what follows the last dot or colon of its name."""
        if self.task is ANY:
            return True
        name = task_name(self.task)
        return job.task == name or job.task.replace(":", ".").endswith(f".{name}")

    def differences(self, job: ScheduledJob) -> list[str]:
        """In what the job is not what is wanted."""
        found = [] if self.is_the_task(job) else ["another task"]
        for name in ("delay", "due_in"):
            wanted, seconds = getattr(self, name), getattr(job, name)
            if wanted is not ANY and not _same_span(wanted, seconds):
                found.append(f"{name} is {span(seconds)}")
        if self.due is not ANY and not _same(self.due, job.due):
            found.append(f"due is {job.due.isoformat()}")
        if job.note and not (self.args is ANY and self.kwargs is ANY):
            return [*found, f"its arguments cannot be read{job.note}"]
        if self.args is not ANY and not _same(tuple(self.args), job.args):
            found.append(f"args are {job.args!r}")
        if self.kwargs is not ANY and not _same(self.kwargs, job.kwargs):
            found.append(f"kwargs are {dict(job.kwargs)!r}")
        for name in ("id", "queue"):
            if getattr(self, name) is not ANY and not _same(getattr(self, name), getattr(job, name)):
                found.append(f"{name} is {getattr(job, name)}")
        return found

    def __str__(self) -> str:
        name = "a job" if self.task is ANY else task_name(self.task)
        parts = [
            f"{key}={_shown(getattr(self, key))}"
            for key in ("args", "kwargs", "delay", "due_in", "due", "id", "queue")
            if getattr(self, key) is not ANY
        ]
        return f"{name} with {', '.join(parts)}" if parts else str(name)


def task_name(task: Any) -> str:
    """The name of a task: of a Celery task, a taskiq task, an arq function, or the name itself."""
    if isinstance(task, str):
        return task
    for attribute in ("task_name", "name", "__qualname__"):
        name = getattr(task, attribute, None)
        if isinstance(name, str):
            return name
    raise TypeError(f"task must be a name or a task, got {task!r}")


def listing(jobs: Sequence[ScheduledJob], notes: Mapping[int, str] | None = None) -> str:
    """The jobs, one a line; ``notes`` by position."""
    lines = [
        f"  {job}" + (f"\n      but {notes[at]}" if notes and at in notes else "")
        for at, job in enumerate(jobs[:_SHOWN])
    ]
    if len(jobs) > _SHOWN:
        lines.append(f"  … and {len(jobs) - _SHOWN} more")
    return "\n".join(lines)


def span(seconds: float) -> str:
    """``90 s``, ``86400 s (1 day, 0:00:00)``."""
    text = f"{seconds:.6f}".rstrip("0").rstrip(".")
    return f"{text} s" if abs(seconds) < 120 else f"{text} s ({timedelta(seconds=round(seconds))})"


def _call(task: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    parts = [repr(value) for value in args] + [f"{key}={value!r}" for key, value in kwargs.items()]
    return f"{task}({', '.join(parts)})"


def _same_span(wanted: Any, seconds: float) -> bool:
    """``wanted``: seconds, a timedelta, or pytest's approx() of one."""
    if isinstance(wanted, timedelta):
        return wanted == timedelta(seconds=seconds)
    try:
        if wanted == seconds:
            return True
    except TypeError:  # approx(timedelta)
        pass
    if isinstance(wanted, (int, float)):
        return False
    try:
        return bool(wanted == timedelta(seconds=seconds))
    except TypeError:  # approx(number)
        return False


def _same(wanted: Any, found: Any) -> bool:
    """Equality, where a list is as good as a tuple: serializers know one of them only."""
    if isinstance(wanted, (list, tuple)) and isinstance(found, (list, tuple)):
        return len(wanted) == len(found) and all(map(_same, wanted, found))
    if isinstance(wanted, Mapping) and isinstance(found, Mapping):
        return wanted.keys() == found.keys() and all(_same(value, found[key]) for key, value in wanted.items())
    return bool(wanted == found)


def _shown(value: Any) -> str:
    if isinstance(value, timedelta):
        return span(value.total_seconds())
    return value.isoformat() if isinstance(value, datetime) else repr(value)
