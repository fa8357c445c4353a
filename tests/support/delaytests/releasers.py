"""Releasers for tests of faults: in this process, by either shell, and in processes of their own that can be killed."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import queue as queues
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["SHELLS", "FileLedger", "Ledger", "Line", "ReleasingProcess", "Running", "allowance"]

SHELLS = ("thread", "asyncio")


def allowance() -> float:
    """Seconds to add to an upper bound of time: none on a quiet machine, more the more processes wait for its CPUs.

    The load of the last minute says little of a machine that has just become busy: who wants to run now counts as well.
    """
    load = os.getloadavg()[0]
    with contextlib.suppress(OSError):  # Linux
        load = max(load, float(Path("/proc/loadavg").read_text().split()[3].split("/")[0]))
    return 0.25 * max(0.0, load / (os.cpu_count() or 1) - 1.0)


class Line(NamedTuple):
    """One message that reached the "broker"."""

    id: str
    entry: bytes
    at: float
    """Wall clock, seconds."""
    lateness: float
    """Seconds after the job's due time."""
    requeues: int
    attempts: int
    process: int


class Ledger:
    """A publisher which only writes down what it is given; ``before`` runs before each batch and may raise."""

    def __init__(self, before: Callable[[Any], Any] | None = None) -> None:
        self.before = before
        self.lines: list[Line] = []
        self.batches: list[int] = []
        self._lock = threading.Lock()

    def __call__(self, batch: Any) -> Any:
        result = self.before(batch) if self.before is not None else None
        left_out = set() if result is None else {*result.failed, *result.unpublished}
        for claim in batch:
            if claim.entry not in left_out:
                self.write(claim)
        with self._lock:
            self.batches.append(len(batch))
        return result

    def write(self, claim: Any) -> None:
        now = time.time()
        with self._lock:
            self.lines.append(
                Line(claim.id, claim.entry, now, now - claim.due / 1e6, claim.requeues, claim.attempts, os.getpid())
            )

    @property
    def ids(self) -> list[str]:
        with self._lock:
            return [line.id for line in self.lines]

    @property
    def counts(self) -> Counter[str]:
        return Counter(self.ids)

    def __len__(self) -> int:
        return len(self.lines)

    def lateness(self, id: str) -> float:
        """Of the only release of this job."""
        (line,) = (line for line in self.lines if line.id == id)
        return line.lateness


class FileLedger:
    """What releasing processes wrote, each line in one append, so that SIGKILL cannot tear it.

    A reader can: it may see the front of a write under way, so only whole lines count.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def lines(self) -> list[Line]:
        if not self.path.exists():
            return []
        text = self.path.read_text()
        rows = (json.loads(row) for row in text[: text.rfind("\n") + 1].splitlines())
        return [Line(row[0], bytes.fromhex(row[1]), *row[2:]) for row in rows]

    @property
    def ids(self) -> list[str]:
        return [line.id for line in self.lines]

    @property
    def counts(self) -> Counter[str]:
        return Counter(self.ids)

    def __len__(self) -> int:
        return self.path.read_bytes().count(b"\n") if self.path.exists() else 0

    def lateness(self, id: str) -> float:
        (line,) = (line for line in self.lines if line.id == id)
        return line.lateness


class _Publisher:
    def __init__(self, publish: Callable[[Any], Any]) -> None:
        self.publish = publish


class _AsyncPublisher:
    """The same function in a thread of its own each time, so that it may block or hang."""

    def __init__(self, publish: Callable[[Any], Any]) -> None:
        self._publish = publish

    async def publish(self, batch: Any) -> Any:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()

        def report(result: Any, error: BaseException | None) -> None:
            if not future.done():
                future.set_exception(error) if error is not None else future.set_result(result)

        def work() -> None:
            result, error = None, None
            try:
                result = self._publish(batch)
            except Exception as problem:
                error = problem
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(report, result, error)

        threading.Thread(target=work, name="publish", daemon=True).start()
        return await future


class Running:
    """A releaser of either shell, running in a thread of this process.

    Args:
        shell: ``"thread"`` or ``"asyncio"``.
        publish: takes a Batch; for asyncio it runs in a thread, so it may block.
        clock: a FakeClock for the scripts.
        thorough: how often an idle watcher looks at the clock, seconds.
        settings: the releaser's.
    """

    def __init__(
        self,
        shell: str,
        url: str,
        name: str,
        publish: Callable[[Any], Any],
        *,
        clock: Any = None,
        shards: int = 1,
        thorough: float = 4.0,
        **settings: Any,
    ) -> None:
        self.shell = shell
        self._thorough = thorough
        self._releaser: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        if shell == "thread":
            from delayadapters import DelayQueue, Releaser

            self._queue = DelayQueue.from_url(url, name=name, shards=shards)
            self._queue._clock = clock
            self._releaser = Releaser(self._queue, _Publisher(publish), **settings)
            self._adjust()
            self._releaser.start()
        else:
            ready = threading.Event()
            self._thread = threading.Thread(
                target=lambda: asyncio.run(self._main(ready, url, name, publish, clock, shards, settings)),
                name="asyncio-releaser",
                daemon=True,
            )
            self._thread.start()
            assert ready.wait(30)

    async def _main(
        self, ready: threading.Event, url: str, name: str, publish: Any, clock: Any, shards: int, settings: Any
    ) -> None:
        from delayadapters import AsyncDelayQueue, AsyncReleaser

        async with AsyncDelayQueue.from_url(url, name=name, shards=shards) as queue:
            queue._clock = clock
            self._releaser = AsyncReleaser(queue, _AsyncPublisher(publish), **settings)
            self._adjust()
            self._loop = asyncio.get_running_loop()
            self._stopped = asyncio.Event()
            await self._releaser.start()
            ready.set()
            await self._stopped.wait()

    def _adjust(self) -> None:
        self._releaser._settings = dataclasses.replace(self._releaser._settings, thorough=self._thorough)

    @property
    def stats(self) -> Any:
        return self._releaser.stats

    @property
    def running(self) -> bool:
        return bool(self._releaser.running)

    def stop(self, timeout: float | None = 30) -> bool:
        """As the releaser's ``stop``."""
        if self.shell == "thread":
            ended: bool = self._releaser.stop(timeout)
            if ended:
                self._queue.close()
            return ended
        assert self._loop is not None
        assert self._thread is not None
        if not self._thread.is_alive():
            return True
        ended = asyncio.run_coroutine_threadsafe(self._releaser.stop(timeout), self._loop).result(60)
        self._loop.call_soon_threadsafe(self._stopped.set)
        self._thread.join(30)
        return ended


class ReleasingProcess:
    """``python -m delaytests.releasing``: a releaser in a process of its own, which publishes into a file.

    Args:
        pause: where it pauses once, says so, and waits for :meth:`go`: ``"claimed"`` (before it publishes), ``"half"``
            (of the batch is published), ``"published"`` (before the ack) or ``"acked"``.
        check: whether the publisher asks ``held`` before each job.
        each: seconds that publishing one job takes.
        brief: write one byte a job, and nothing else.
        hold: when it is ready, wait for :meth:`go` before it begins.
        settings: the releaser's.
    """

    def __init__(
        self,
        shell: str,
        url: str,
        name: str,
        ledger: Path,
        *,
        pause: str | None = None,
        check: bool = True,
        each: float = 0.0,
        brief: bool = False,
        hold: bool = False,
        shards: int = 1,
        **settings: Any,
    ) -> None:
        job = {
            "shell": shell,
            "url": url,
            "name": name,
            "ledger": str(ledger),
            "pause": pause,
            "check": check,
            "each": each,
            "brief": brief,
            "hold": hold,
            "shards": shards,
            "settings": settings,
        }
        self._events: queues.Queue[dict[str, Any] | None] = queues.Queue()
        self.process = run_module("delaytests.releasing", json.dumps(job))
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._events.put(json.loads(line))
        self._events.put(None)

    @property
    def pid(self) -> int:
        return self.process.pid

    def expect(self, event: str, timeout: float = 120) -> dict[str, Any]:
        """Waits for the next thing it says, which must be this."""
        try:
            heard = self._events.get(timeout=timeout)
        except queues.Empty:
            raise AssertionError(f"the releasing process did not say {event!r} within {timeout} s") from None
        assert heard is not None, f"the releasing process ended ({self.process.wait(5)}) before it said {event!r}"
        assert heard["event"] == event, heard
        return heard

    def go(self) -> None:
        """Ends its pause."""
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        """SIGKILL."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(30)

    def stop(self, timeout: float = 60) -> dict[str, Any]:
        """SIGTERM: answers what it said at its end, the stats."""
        self.process.send_signal(signal.SIGTERM)
        heard = self.expect("ended", timeout)
        assert self.process.wait(timeout) == 0
        stats: dict[str, Any] = heard["stats"]
        return stats

    def suspend(self) -> None:
        """SIGSTOP."""
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        self.process.send_signal(signal.SIGCONT)

    def rss(self) -> int:
        """Resident memory, bytes (Linux)."""
        fields = Path(f"/proc/{self.pid}/statm").read_text().split()
        return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(30)
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()


def run_module(module: str, *arguments: str) -> subprocess.Popen[str]:
    """``python -m module`` with this process's import path and pipes."""
    import delayadapters

    paths: Sequence[str] = [
        str(Path(__file__).parents[1]),
        str(Path(delayadapters.__file__).parents[1]),
        *filter(None, [os.environ.get("PYTHONPATH")]),
    ]
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )
