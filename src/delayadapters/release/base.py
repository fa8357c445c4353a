"""What a releaser of threads and one of asyncio have in common: their arguments, and what they tell of themselves."""

from __future__ import annotations

import os
import socket
import time
from typing import Final, Generic, Protocol, TypeVar

from .loop import ReleaseLoop
from .observing import Observer, Observers
from .settings import ReleaserStats, ReleaseSettings

__all__ = ["BaseReleaser", "clock"]


def clock() -> float:
    """Seconds on a clock that runs on while the machine sleeps, where the system has one."""
    return _read_clock()


def _boot_clock() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


_read_clock: Final = _boot_clock if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic


class _Looping(Protocol):
    loop: ReleaseLoop


Queue = TypeVar("Queue")
Sink = TypeVar("Sink")
Shard = TypeVar("Shard", bound=_Looping)


class BaseReleaser(Generic[Queue, Sink, Shard]):
    """See :class:`~delayadapters.Releaser` for the arguments and what they promise."""

    def __init__(
        self,
        queue: Queue,
        publisher: Sink,
        *,
        lease: float = 30.0,
        patience: float = 120.0,
        batch: int = 500,
        max_attempts: int = 8,
        backoff: float = 1.0,
        backoff_cap: float = 300.0,
        name: str | None = None,
    ) -> None:
        self._settings = ReleaseSettings(
            lease=lease,
            patience=patience,
            batch=batch,
            max_attempts=max_attempts,
            backoff=backoff,
            backoff_cap=backoff_cap,
        )
        if not callable(getattr(publisher, "publish", None)):
            raise TypeError(f"publisher must have a method publish(claims), got {publisher!r}")
        self._queue = queue
        self._publisher = publisher
        self._name = name or f"{socket.gethostname()}:{os.getpid()}"
        self._shards: list[Shard] = []
        self._stopped = False
        self.stats = ReleaserStats()
        self._observers = Observers()
        self._prepare()

    def _prepare(self) -> None:
        """What else a new one has."""

    def observe(self, observer: Observer) -> None:
        """Tells ``observer`` of every claim and release from now on. It runs in the loop: it should be quick."""
        self._observers.add(observer)

    @property
    def heard_ago(self) -> float:
        """Seconds since Redis last answered the loop (with shards: the loop that has waited longest); 0 before start.
        An idle loop asks every two seconds, one that publishes at a third of its lease."""
        return max((clock() - shard.loop.heard_at for shard in self._shards), default=0.0)

    @property
    def lease(self) -> float:
        """Of a claim, seconds."""
        return self._settings.lease
