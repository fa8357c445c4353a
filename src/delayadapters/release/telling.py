"""What a release loop writes to its log: a line for a change of state, never one for each job, and no payload.

A line is a sentence and then ``key=value`` fields, the queue's always; programs find the same fields in the record's
``delay``. What can happen to many jobs in a row is told at the first, and then once in a while with a number.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final

__all__ = ["Telling", "short"]

log: Final = logging.getLogger("delayadapters.release")
AGAIN: Final = 10.0
"""Seconds between two lines about the same thing."""
_MOST: Final = 200
_KINDS: Final = 100


def short(error: BaseException | str) -> str:
    """An error in one line of bounded length. Not its ``repr``: a UnicodeDecodeError's has the bytes it met."""
    text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
    line = " ".join(text.split())
    return line if len(line) <= _MOST else line[: _MOST - 1] + "…"


class Telling:
    """The log of the loop of one shard, ``queue``: ``name:shard``."""

    def __init__(self, queue: str, clock: Callable[[], float]) -> None:
        self._queue = queue
        self._clock = clock
        self._next: dict[tuple[str, str], float] = {}
        self._held: dict[tuple[str, str], tuple[int, int, dict[str, Any]]] = {}

    def say(self, level: int, text: str, **fields: Any) -> None:
        """One line."""
        if not log.isEnabledFor(level):
            return
        fields = {"queue": self._queue, **fields}
        words = " ".join(f"{key}={value}" for key, value in fields.items())
        log.log(level, "%s: %s", text, words, extra={"delay": fields})

    def tally(self, level: int, text: str, kind: str, jobs: int = 1, **fields: Any) -> None:
        """A line that may be called for by many jobs; ``kind`` tells apart what is worth telling apart (a reason)."""
        key = (text, kind)
        now = self._clock()
        if now < self._next.get(key, float("-inf")):
            held = self._held[key][1] if key in self._held else 0
            self._held[key] = (level, held + jobs, fields)
            return
        if len(self._next) >= _KINDS:  # reasons with a number in them: forget the old ones
            self.flush(force=True)
            self._next.clear()
        self._next[key] = now + AGAIN
        jobs += self._held.pop(key, (0, 0, {}))[1]
        self.say(level, text, jobs=jobs, **fields)

    def flush(self, *, force: bool = False) -> None:
        """Tells what was held back long enough."""
        if not self._held:
            return
        now = self._clock()
        for key in [key for key in self._held if force or now >= self._next.get(key, now)]:
            level, jobs, fields = self._held.pop(key)
            self._next[key] = now + AGAIN
            self.say(level, key[0], jobs=jobs, **fields)
