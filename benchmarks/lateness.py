"""Lateness at hand-off: from a job's due time to the publisher's call, 1,000 jobs on an idle queue."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

import redis.asyncio
from floors import HeapQueue
from harness import Bench, Row, interleave, medians, progress, spread, times, triple

from delayadapters import AsyncDelayQueue, AsyncReleaser, Batch, MemoryDelayQueue, NewJob, Releaser

Delays = list[float]
CONSUMERS = 4


def delays(count: int, low: float, high: float) -> Delays:
    rnd = random.Random(3)
    return [low + (high - low) * rnd.random() for _ in range(count)]


class Recorder:
    """A publisher that does nothing but note how late each job is (milliseconds)."""

    def __init__(self, count: int) -> None:
        self._count = count
        self.late: list[float] = []
        self.done = threading.Event()

    def note(self, claims: Batch) -> None:
        now = time.time_ns() / 1000
        self.late += [(now - claim.due) / 1000 for claim in claims]
        if len(self.late) >= self._count:
            self.done.set()

    def publish(self, claims: Batch) -> None:
        self.note(claims)


class AsyncRecorder(Recorder):
    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.finished = asyncio.Event()

    async def publish(self, claims: Batch) -> None:
        self.note(claims)
        if self.done.is_set():
            self.finished.set()


async def seed_heap(waits: Delays) -> list[float]:
    queue, late, done = HeapQueue(), [], asyncio.Event()

    async def consume() -> None:
        while True:
            due, _, _ = await queue.get()
            late.append((time.monotonic() - due) * 1000)
            if len(late) == len(waits):
                done.set()

    consumers = [asyncio.create_task(consume()) for _ in range(CONSUMERS)]
    await asyncio.sleep(0)
    for i, wait in enumerate(waits):
        queue.put(i, time.monotonic() + wait)
    await asyncio.wait_for(done.wait(), max(waits) + 30)
    for consumer in consumers:
        consumer.cancel()
    return late


async def memory_queue(waits: Delays) -> list[float]:
    late, done = [], asyncio.Event()
    async with MemoryDelayQueue() as queue:

        async def consume() -> None:
            while True:
                claim = await queue.get()
                late.append((time.time_ns() / 1000 - claim.due) / 1000)
                if len(late) == len(waits):
                    done.set()

        consumers = [asyncio.create_task(consume()) for _ in range(CONSUMERS)]
        await asyncio.sleep(0)
        for wait in waits:
            await queue.schedule(b"", delay=wait)
        await asyncio.wait_for(done.wait(), max(waits) + 30)
        for consumer in consumers:
            consumer.cancel()
        await asyncio.gather(*consumers, return_exceptions=True)
    return late


def async_releaser(bench: Bench) -> Callable[[Delays], Coroutine[Any, Any, list[float]]]:
    async def run(waits: Delays) -> list[float]:
        client = redis.asyncio.Redis(port=bench.port)
        queue = AsyncDelayQueue(client, name="late")
        recorder = AsyncRecorder(len(waits))
        async with AsyncReleaser(queue, recorder):
            await asyncio.sleep(0.1)  # subscribed, and idle
            await queue.schedule_many([NewJob(b"", delay=wait) for wait in waits])
            await asyncio.wait_for(recorder.finished.wait(), max(waits) + 30)
        await queue.purge()
        await client.aclose()
        return recorder.late

    return run


def thread_releaser(bench: Bench, waits: Delays) -> list[float]:
    queue = bench.queue("late")
    recorder = Recorder(len(waits))
    with Releaser(queue, recorder):
        time.sleep(0.1)
        queue.schedule_many([NewJob(b"", delay=wait) for wait in waits])
        assert recorder.done.wait(max(waits) + 30)
    queue.purge()
    queue.client.close()
    return recorder.late


def loops() -> dict[str, Callable[[Coroutine[Any, Any, Any]], Any]]:
    """The event loops at hand: how to run a coroutine on each."""
    found: dict[str, Callable[[Coroutine[Any, Any, Any]], Any]] = {"asyncio": asyncio.run}
    try:
        import uvloop
    except ImportError:
        return found
    found["uvloop"] = uvloop.run
    return found


def lateness(bench: Bench) -> list[Row]:
    """The peers' workload (due in 1 to 4 s) and the seed's burst (due within 0.2 s): as it is, which also measures how
    long storing 1,000 jobs takes, and stored in time, 0.1 s before the first is due."""
    rows = []
    count = bench.size(1000, 200)
    workloads = {
        "burst, due in 0.1–0.3 s": (delays(count, 0.1, 0.3), bench.size(7, 2)),
        "burst, due in 0–0.2 s, some while others are stored": (delays(count, 0, 0.2), bench.size(7, 2)),
    }
    spread_out = delays(count, 1, 4) if not bench.quick else delays(count, 0.2, 0.8)
    workloads[f"due in {'0.2–0.8' if bench.quick else '1–4'} s"] = (spread_out, bench.repeats)
    for label, (waits, repeats) in workloads.items():
        for loop, run in loops().items():
            progress(f"lateness: {label}, {loop}")
            results = interleave(
                repeats,
                heap=lambda run=run, waits=waits: run(seed_heap(waits)),
                releaser=lambda run=run, waits=waits: run(async_releaser(bench)(waits)),
                memory=lambda run=run, waits=waits: run(memory_queue(waits)),
                **({"thread": lambda waits=waits: thread_releaser(bench, waits)} if loop == "asyncio" else {}),
            )
            figures = {name: [spread(late) for late in lates] for name, lates in results.items()}
            early = {name: sum(x < 0 for late in lates for x in late) for name, lates in results.items()}
            names = {
                "releaser": f"AsyncReleaser, {loop}",
                "thread": "Releaser (thread)",
                "memory": f"MemoryDelayQueue.get(), {loop}",
            }
            for name, title in names.items():
                if name in figures:
                    rows.append(_row(f"{title}, {label}", figures[name], figures["heap"], early[name], name))
    return rows


def _row(what: str, runs: list[dict[str, float]], heap: list[dict[str, float]], early: int, name: str) -> Row:
    ours, floor = medians(runs), medians(heap)
    p99, largest = ours["p99"] / floor["p99"], ours["max"] / floor["max"]
    durable = name in ("releaser", "thread")
    return Row(
        what=f"lateness, ms p50/p99/max: {what}",
        measured=triple(ours),
        floor=f"{triple(floor)} (seed's heap)",
        ratio=f"p99 {times(p99)}, max {times(largest)}",
        target="p99 and max ≤ the heap's" if durable else "–",
        met=(p99 <= 1 and largest <= 1 and early == 0) if durable else None,
        values={"ours_ms": ours, "heap_ms": floor, "p99_ratio": p99, "max_ratio": largest, "early": early},
        runs={"ours_ms": runs, "heap_ms": heap},
    )
