"""A process that releases, to be killed in each gap: see :class:`~delaytests.releasers.ReleasingProcess`.

It says ``ready``, ``paused`` and ``ended`` on stdout, a JSON object a line.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from typing import Any

from delayadapters import AsyncDelayQueue, AsyncReleaser, DelayQueue, Published, Releaser
from delayadapters.release.loop import ReleaseLoop


def say(event: str, **more: Any) -> None:
    sys.stdout.write(json.dumps({"event": event, **more}) + "\n")
    sys.stdout.flush()


class Publisher:
    """Appends a line a job."""

    def __init__(self, job: dict[str, Any]) -> None:
        self._file = os.open(job["ledger"], os.O_APPEND | os.O_CREAT | os.O_WRONLY, 0o600)
        self._pause = job["pause"]
        self._check = job["check"]
        self._each = job["each"]
        self._brief = job["brief"]

    def pause(self, where: str) -> None:
        if self._pause == where:
            self._pause = None
            say("paused", at=where)
            sys.stdin.readline()

    def publish(self, batch: Any) -> Published | None:
        if self._brief:
            os.write(self._file, b"." * len(batch))
            return None
        self.pause("claimed")
        for number, claim in enumerate(batch):
            if number == len(batch) // 2:
                self.pause("half")
            if self._check and not batch.held():
                return Published(unpublished=[left.entry for left in batch[number:]])
            if self._each:
                time.sleep(self._each)
            now = time.time()
            row = (claim.id, claim.entry.hex(), now, now - claim.due / 1e6, claim.requeues, claim.attempts, os.getpid())
            os.write(self._file, (json.dumps(row) + "\n").encode())
        self.pause("published")
        return None


class AsyncPublisher:
    def __init__(self, publisher: Publisher) -> None:
        self._publisher = publisher

    async def publish(self, batch: Any) -> Published | None:
        return await asyncio.to_thread(self._publisher.publish, batch)


def pause_after_ack(publisher: Publisher) -> None:
    """There is no hook after an ack, and needs none but here."""
    answered = ReleaseLoop.answered

    def watched(self: ReleaseLoop, *args: Any) -> None:
        before = self.stats.released
        answered(self, *args)
        if self.stats.released > before:
            publisher.pause("acked")

    ReleaseLoop.answered = watched  # type: ignore[method-assign]


def ready(job: dict[str, Any]) -> None:
    say("ready")
    if job["hold"]:
        sys.stdin.readline()


def stats_of(releaser: Any) -> dict[str, Any]:
    return {name: getattr(releaser.stats, name) for name in type(releaser.stats).__slots__}


def run(job: dict[str, Any], publisher: Publisher) -> None:
    with DelayQueue.from_url(job["url"], name=job["name"], shards=job["shards"]) as queue:
        releaser = Releaser(queue, publisher, **job["settings"])
        signal.signal(signal.SIGTERM, lambda *_: releaser.stop(0))
        ready(job)
        releaser.run()
        say("ended", stats=stats_of(releaser))


async def run_async(job: dict[str, Any], publisher: Publisher) -> None:
    async with AsyncDelayQueue.from_url(job["url"], name=job["name"], shards=job["shards"]) as queue:
        releaser = AsyncReleaser(queue, AsyncPublisher(publisher), **job["settings"])
        running = asyncio.create_task(releaser.run())
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, running.cancel)
        ready(job)
        with contextlib.suppress(asyncio.CancelledError):
            await running
        say("ended", stats=stats_of(releaser))


def main() -> None:
    job = json.loads(sys.argv[1])
    publisher = Publisher(job)
    pause_after_ack(publisher)
    if job["shell"] == "thread":
        run(job, publisher)
    else:
        asyncio.run(run_async(job, publisher))


if __name__ == "__main__":
    main()
