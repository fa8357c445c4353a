"""One run of a job in a worker, and how far it is: what the worker's end does to it depends on that.

arq's own ``close`` cancels a job wherever it is. One that was about to begin has then used a try, and waits for its
in-progress key to pass; one that was about to be finished runs twice; and the ``CancelledError`` ends ``close`` itself,
before ``on_shutdown``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from enum import Enum, auto
from typing import Any, Final

__all__ = ["CURRENT", "Run", "Step", "ending", "starting"]

Hook = Callable[[dict[Any, Any]], Awaitable[None]]


class Step(Enum):
    """Where a run is."""

    LOADING = auto()
    """Before the worker's ``on_job_start``, or failed there for good: its last request is answered soon."""
    STARTING = auto()
    """In ``on_job_start``."""
    RUNNING = auto()
    """The function runs. arq catches its being cancelled, and has the job run again."""
    ENDING = auto()
    """The function has returned or raised: ``on_job_end``, the result, ``after_job_end``."""


class Run:
    """The run of a job; :data:`CURRENT` in all that it calls."""

    def __init__(self, job_id: str, score: int) -> None:
        self.job_id = job_id
        self.score = score
        self.step = Step.LOADING
        self.leaving = False
        """The worker ends."""

    @property
    def begun(self) -> bool:
        """Whether its function has been called."""
        return self.step in (Step.RUNNING, Step.ENDING)

    async def end(self, task: asyncio.Task[None]) -> None:
        """The worker ends while ``task`` carries the run out: sees to it that it ends, however often that is asked."""
        self.leaving = True
        while not task.done():
            if self.step in (Step.STARTING, Step.RUNNING):
                task.cancel()
            try:
                await asyncio.wait({task})
            except asyncio.CancelledError:
                continue


CURRENT: Final[ContextVar[Run | None]] = ContextVar("delayadapters_arq_run", default=None)


def starting(hook: Hook | None) -> Hook:
    """``on_job_start``, which notes that the function is called next; or does not let it, when the worker ends."""

    async def on_job_start(ctx: dict[Any, Any]) -> None:
        run = CURRENT.get()
        if run is not None and not run.leaving:
            run.step = Step.STARTING
        if hook is not None and (run is None or not run.leaving):
            await hook(ctx)
        if run is not None:
            if run.leaving:
                raise asyncio.CancelledError
            run.step = Step.RUNNING

    return on_job_start


def ending(hook: Hook | None) -> Hook:
    """``on_job_end``, which notes that the function is over."""

    async def on_job_end(ctx: dict[Any, Any]) -> None:
        run = CURRENT.get()
        if run is not None:
            run.step = Step.ENDING
        if hook is not None:
            await hook(ctx)

    return on_job_end
