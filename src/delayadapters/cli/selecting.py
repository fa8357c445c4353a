"""Which jobs a command means: filters, and going through a queue of any length in bounded pages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Final, Literal

if TYPE_CHECKING:
    from ..jobs import Job
    from ..redis.commands import Cursor, Row
    from ..redis.sync import DelayQueue

__all__ = ["Filter", "find", "pages"]

PAGE: Final = 500
"""Jobs looked at in one go; Redis is asked for 200 a script call."""


@dataclass(frozen=True)
class Filter:
    """What must hold of a job; everything that is None or empty does."""

    pattern: str | None = None
    """Of the task's name; ``*`` and ``?`` are wild."""
    due_before: datetime | None = None
    due_after: datetime | None = None
    id_prefix: str = ""
    reason: str | None = None
    """Pattern of a dead job's reason."""

    def __bool__(self) -> bool:
        return self != Filter()

    @property
    def narrow(self) -> bool:
        """Whether jobs of the due window may fail it."""
        return bool(self.pattern is not None or self.id_prefix or self.reason is not None)

    def matches(self, job: Job) -> bool:
        return (
            (self.pattern is None or fnmatchcase(job.meta.get("task", ""), self.pattern))
            and job.id.startswith(self.id_prefix)
            and (self.reason is None or fnmatchcase(job.reason or "", self.reason))
        )


def pages(
    queue: DelayQueue,
    wanted: Filter,
    which: Literal["due", "dead"] = "due",
    *,
    after: Cursor | None = None,
    before: int | None = None,
    size: int = PAGE,
) -> Iterator[tuple[list[tuple[Row, Job]], bool]]:
    """Page by page what matches, and whether the queue goes on behind it. A page may hold nothing.

    ``before``: microseconds; only scores below it, whatever the filter says.
    """
    from ..due import to_micros
    from ..redis.commands import Cursor

    bounds = [before, None if wanted.due_before is None else to_micros(wanted.due_before)]
    before = min((bound for bound in bounds if bound is not None), default=None)
    if after is None and wanted.due_after is not None:
        after = Cursor(max(to_micros(wanted.due_after), 0), b"")
    more = True
    while more:
        rows, more = queue._run(queue._verbs.rows(which, size, after, before))
        yield [(row, job) for row in rows if wanted.matches(job := row.job())], more
        if not rows:
            return
        after = rows[-1].place


def find(
    queue: DelayQueue,
    wanted: Filter,
    limit: int,
    cursor: str | None = None,
    which: Literal["due", "dead"] = "due",
) -> tuple[list[Job], str | None]:
    """Up to ``limit`` jobs, and the cursor behind the last of them (None: there are no more).

    Without their payloads: a listing shows none, and thousands of jobs of a megabyte each would fill the memory.
    """
    from ..redis.commands import Cursor

    after = None if cursor is None else Cursor.read(cursor)
    found: list[tuple[Cursor, Job]] = []
    for page, more in pages(queue, wanted, which, after=after, size=PAGE if wanted.narrow else limit):
        left = limit - len(found)
        found += [(row.place, replace(job, payload=b"")) for row, job in page[:left]]
        if len(found) == limit:
            place = found[-1][0]
            if len(queue._verbs.shards) == 1:
                # Behind this entry's number: as good, and short enough to be typed however long the id.
                number = int.from_bytes(place.entry[:6], "big") + 1
                place = Cursor(place.score, number.to_bytes(6, "big"))
            return [job for _, job in found], str(place) if more or len(page) > left else None
    return [job for _, job in found], None
