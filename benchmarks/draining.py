"""Draining due jobs with a publisher that does nothing, and what another client's PING sees meanwhile."""

from __future__ import annotations

import asyncio
import multiprocessing
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import redis.asyncio
from floors import ACK, CLAIM, MOVE
from harness import (
    Bench,
    Row,
    Template,
    fill,
    fill_bare,
    interleave,
    median,
    medians,
    progress,
    queue_template,
    rate,
    spread,
    times,
    triple,
)

from delayadapters import AsyncDelayQueue, AsyncReleaser, Batch, Payload, Releaser

DIRECT = [("LPUSH", "broker", Payload.BYTES)]
DEADLINE = 30.0
LOOK = 0.005
"""Seconds between looks at whether a drain is over: rare enough to cost it nothing."""


class Nothing:
    def publish(self, claims: Batch) -> None:
        return None


class AsyncNothing:
    async def publish(self, claims: Batch) -> None:
        return None


def releaser(bench: Bench, count: int, batch: int | None) -> tuple[float, int]:
    """Jobs a second, and the batch size the loop arrived at."""
    queue = bench.queue()
    loop = Releaser(queue, Nothing(), **({} if batch is None else {"batch": batch}))
    begin = time.perf_counter()
    with loop:
        while loop.stats.released + loop.stats.direct < count:
            time.sleep(LOOK)
        taken = time.perf_counter() - begin
    queue.client.close()
    return count / taken, loop.stats.batch


async def async_releaser(bench: Bench, count: int, batch: int | None) -> tuple[float, int]:
    client = redis.asyncio.Redis(port=bench.port)
    queue = AsyncDelayQueue(client, name="bench")
    loop = AsyncReleaser(queue, AsyncNothing(), **({} if batch is None else {"batch": batch}))
    begin = time.perf_counter()
    async with loop:
        while loop.stats.released + loop.stats.direct < count:
            await asyncio.sleep(LOOK)
        taken = time.perf_counter() - begin
    await client.aclose()
    return count / taken, loop.stats.batch


def bare_claims(bench: Bench, count: int, batch: int) -> float:
    client = bench.client()
    claim, ack = client.register_script(CLAIM), client.register_script(ACK)
    done = 0
    begin = time.perf_counter()
    while got := claim(keys=["z", "l", "h"], args=["+inf", batch, time.time() + DEADLINE]):
        done += ack(keys=["l", "h"], args=got[0])
    taken = time.perf_counter() - begin
    assert done == count
    client.close()
    return count / taken


async def async_bare_claims(bench: Bench, count: int, batch: int) -> float:
    client = redis.asyncio.Redis(port=bench.port)
    claim, ack = client.register_script(CLAIM), client.register_script(ACK)
    done = 0
    begin = time.perf_counter()
    while got := await claim(keys=["z", "l", "h"], args=["+inf", batch, time.time() + DEADLINE]):
        done += await ack(keys=["l", "h"], args=got[0])
    taken = time.perf_counter() - begin
    assert done == count
    await client.aclose()
    return count / taken


def bare_moves(bench: Bench, count: int, batch: int) -> float:
    client = bench.client()
    move = client.register_script(MOVE)
    done = 0
    begin = time.perf_counter()
    while got := move(keys=["z", "h", "broker"], args=["+inf", batch]):
        done += got
    taken = time.perf_counter() - begin
    assert done == count
    client.close()
    return count / taken


def ready(bench: Bench, template: Template, run: Callable[[], Any]) -> Any:
    """Runs with the template's jobs due, and nothing left of the last run."""
    client = bench.client()
    client.unlink("broker")
    template.restore()
    client.close()
    time.sleep(0.3)  # UNLINK frees in the background
    return run()


def templates(bench: Bench, count: int, release: Any = None) -> tuple[Template, Template]:
    """Due jobs: a queue's, and the same bare."""
    client = bench.client()
    client.flushall()
    queue = bench.queue()
    fill(queue, count, lambda: 0, release)
    ours = queue_template(queue)
    order = iter(range(count))
    fill_bare(client, "z", "h", count, lambda: next(order))
    return ours, Template(client, ["z", "h"])


# ---------------------------------------------------------------- the rows


def leased(bench: Bench) -> list[Row]:
    """claim → publish (nothing) → ack, against the bare claim + ack loop at the same batch size."""
    count = bench.size(100_000, 3000)
    ours, bare = templates(bench, count)
    rows = []
    for kind, run, floor in (
        ("sync", lambda size: releaser(bench, count, size), lambda size: bare_claims(bench, count, size)),
        (
            "asyncio",
            lambda size: asyncio.run(async_releaser(bench, count, size)),
            lambda size: asyncio.run(async_bare_claims(bench, count, size)),
        ),
    ):
        rows += _pair(bench, f"drain leased, {kind}", ours, bare, run, floor, "bare claim + ack")
    return rows


def direct(bench: Bench) -> list[Row]:
    """Records that carry one LPUSH, against a script that moves payloads and nothing else."""
    count = bench.size(200_000, 3000)
    ours, bare = templates(bench, count, DIRECT)
    return _pair(
        bench,
        "drain direct, sync",
        ours,
        bare,
        lambda size: releaser(bench, count, size),
        lambda size: bare_moves(bench, count, size),
        "bare move",
    )


def _pair(
    bench: Bench,
    what: str,
    ours: Template,
    bare: Template,
    run: Callable[[int | None], tuple[float, int]],
    floor: Callable[[int], float],
    how: str,
) -> list[Row]:
    progress(f"{what}: adaptive batch")
    size: int = ready(bench, ours, lambda: run(None))[1]
    progress(f"{what}: it arrives at {size}")
    results = interleave(
        bench.repeats,
        ours_100=lambda: ready(bench, ours, lambda: run(100)),
        bare_100=lambda: ready(bench, bare, lambda: floor(100)),
        ours_adaptive=lambda: ready(bench, ours, lambda: run(None)),
        bare_adaptive=lambda: ready(bench, bare, lambda: floor(size)),
    )
    rows = []
    for name, title in (("100", "batch 100"), ("adaptive", f"adaptive batch (about {size})")):
        mine, floors = results[f"ours_{name}"], results[f"bare_{name}"]
        measured, least = median(speed for speed, _ in mine), median(floors)
        rows.append(
            Row(
                what=f"{what}, {title}",
                measured=rate(measured),
                floor=f"{rate(least)} ({how})",
                ratio=times(measured / least),
                target="≥ 60 %",
                met=measured >= 0.6 * least,
                values={"jobs_per_s": measured, "floor_per_s": least, "ratio": measured / least, "batch": size},
                runs={"ours": mine, "floor": floors},
            )
        )
    return rows


# ---------------------------------------------------------------- PING


def ping_forever(port: int, stop: Any, out: Any) -> None:
    """A process: PINGs every half millisecond or so, over a plain socket; sends the round trips in milliseconds."""
    connection = socket.create_connection(("127.0.0.1", port))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    trips = []
    out.send(None)
    while not stop.is_set():
        begin = time.perf_counter()
        connection.sendall(b"PING\r\n")
        connection.recv(64)
        trips.append((time.perf_counter() - begin) * 1000)
        time.sleep(0.0005)
    out.send(trips)


@contextmanager
def pinging(port: int, trips: list[float]) -> Iterator[None]:
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=ping_forever, args=(port, stop, send))
    process.start()
    send.close()  # so that its death ends our waiting
    receive.recv()
    try:
        yield
    finally:
        stop.set()
        trips += receive.recv()
        process.join()


def ping(bench: Bench) -> list[Row]:
    """Another client's PING while a million due jobs are drained.

    The floors are the machine at rest, and the bare loop at batch 100 on as many jobs: what of it is the machine's, and
    Redis's own (shrinking a table of a million entries takes it milliseconds).
    """
    count = bench.size(1_000_000, 5000)
    rows = []
    for kind, release in (("leased", None), ("direct", DIRECT)):
        progress(f"ping: {count:,} due jobs, {kind}")
        client = bench.client()
        client.flushall()
        queue = bench.queue()
        fill(queue, count, lambda: 0, release)
        template = queue_template(queue)
        order = iter(range(count))
        fill_bare(client, "z", "h", count, lambda order=order: next(order))
        bare_template = Template(client, ["z", "h"])

        def bare(template: Template = bare_template, kind: str = kind) -> dict[str, float]:
            def run() -> dict[str, float]:
                trips: list[float] = []
                with pinging(bench.port, trips):
                    speed = (bare_claims if kind == "leased" else bare_moves)(bench, count, 100)
                return {**spread(trips), "drained_per_s": speed}

            return ready(bench, template, run)

        def drain(template: Template = template) -> dict[str, float]:
            def run() -> dict[str, float]:
                trips: list[float] = []
                with pinging(bench.port, trips):
                    speed, size = releaser(bench, count, None)
                return {**spread(trips), "drained_per_s": speed, "batch": size}

            return ready(bench, template, run)

        def rest() -> dict[str, float]:
            trips: list[float] = []
            with pinging(bench.port, trips):
                time.sleep(bench.size(3, 1))
            return spread(trips)

        results = interleave(bench.repeats, rest=rest, drain=drain, bare=bare)
        ours, floor, loop = (medians(results[name]) for name in ("drain", "rest", "bare"))
        rows.append(
            Row(
                what=f"PING of another client, ms p50/p99/max, draining {count:,} due jobs, {kind}",
                measured=triple(ours),
                floor=f"{triple(floor)} (at rest); {triple(loop)} (bare loop of 100)",
                ratio=f"max {times(ours['max'] / loop['max'])} of the bare loop's",
                target="max ≤ 2 ms",
                met=ours["max"] <= 2,
                values={"ours_ms": ours, "rest_ms": floor, "bare_ms": loop},
                runs=results,
            )
        )
        template.drop()
        bare_template.drop()
        queue.purge()
    return rows
