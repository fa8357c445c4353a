"""The ledger of what ran: written by the workers, read by the demo."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

BEFORE_KILL = 0.1  # seconds; what was due so shortly before a kill may still have been on its way
CAUGHT_UP = 0.1  # seconds; a backlog is worked off when nothing waits that has been due for longer


def note(file: str, line: str) -> None:
    """One write, appended: it survives a SIGKILL right after it."""
    fd = os.open(os.environ["DEMO_FOLDER"] + "/" + file, os.O_APPEND | os.O_CREAT | os.O_WRONLY, 0o644)
    try:
        os.write(fd, line.encode())
    finally:
        os.close(fd)


def note_execution(number: int, due: float) -> None:
    """A task's first line."""
    note("executions", f"{number} {due:.6f} {time.time():.6f}\n")


def note_ready() -> None:
    """A worker that has started."""
    note("ready", f"{time.time():.6f}\n")


class Execution(NamedTuple):
    number: int
    due: float
    start: float


def executions(folder: Path) -> list[Execution]:
    """Every execution so far; a line that is just being written is left out."""
    try:
        text = (folder / "executions").read_text()
    except FileNotFoundError:
        return []
    lines = text[: text.rfind("\n") + 1].splitlines()
    return [Execution(int(n), float(due), float(start)) for n, due, start in (line.split() for line in lines)]


def outage(kill: float, starts: dict[int, float], dues: dict[int, float]) -> tuple[float, float]:
    """From just before a kill until what fell due meanwhile has been worked off.

    That is the first moment after it at which a job starts that is not late because others are ahead of it. What the
    framework's worker had in its hands at the kill comes back later than that, and was due before the kill.
    """
    begin = kill - BEFORE_KILL
    missed = [number for number in starts if dues[number] > kill + BEFORE_KILL]
    for number in sorted(missed, key=dues.__getitem__):
        moment = dues[number]
        running = any(kill + BEFORE_KILL < start <= moment for start in starts.values())
        if running and all(starts[other] <= moment for other in missed if dues[other] < moment - CAUGHT_UP):
            return begin, moment
    return begin, time.time()


def percentiles(values: Sequence[float]) -> dict[str, float | None]:
    """p50, p99 and max in milliseconds, of seconds."""
    ordered = sorted(values)

    def at(share: float) -> float | None:
        return round(ordered[round(share * (len(ordered) - 1))] * 1_000, 1) if ordered else None

    return {"p50": at(0.5), "p99": at(0.99), "max": at(1.0)}
