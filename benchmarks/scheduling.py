"""Scheduling from one client: one by one, and in batches of 500, against raw ZADD + HSET in pipelines."""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

import redis.asyncio
from harness import PAYLOAD, Bench, Row, interleave, median, new_id, progress, rate, times

from delayadapters import AsyncDelayQueue, NewJob

BATCH = 500
"""Of the raw pipelines; schedule_many chooses its own."""


def ids(count: int) -> list[str]:
    rnd = random.Random(7)
    return [new_id(rnd) for _ in range(count)]


def one_by_one(bench: Bench, names: list[str]) -> float:
    queue = bench.queue("sched")
    queue.stats()
    begin = time.perf_counter()
    for name in names:
        queue.schedule(PAYLOAD, delay=3600, id=name)
    taken = time.perf_counter() - begin
    queue.purge()
    queue.client.close()
    return len(names) / taken


def bare_one_by_one(bench: Bench, names: list[str]) -> float:
    client = bench.client()
    client.ping()
    begin = time.perf_counter()
    for name in names:
        pipe = client.pipeline(transaction=False)
        pipe.zadd("zset", {name: time.time() + 3600})
        pipe.hset("hash", name, PAYLOAD)
        pipe.execute()
    taken = time.perf_counter() - begin
    client.unlink("zset", "hash")
    client.close()
    return len(names) / taken


async def async_one_by_one(bench: Bench, names: list[str]) -> float:
    client = redis.asyncio.Redis(port=bench.port)
    queue = AsyncDelayQueue(client, name="sched")
    await queue.stats()
    begin = time.perf_counter()
    for name in names:
        await queue.schedule(PAYLOAD, delay=3600, id=name)
    taken = time.perf_counter() - begin
    await queue.purge()
    await client.aclose()
    return len(names) / taken


async def async_bare_one_by_one(bench: Bench, names: list[str]) -> float:
    client = redis.asyncio.Redis(port=bench.port)
    await client.ping()
    begin = time.perf_counter()
    for name in names:
        pipe = client.pipeline(transaction=False)
        pipe.zadd("zset", {name: time.time() + 3600})
        pipe.hset("hash", name, PAYLOAD)
        await pipe.execute()
    taken = time.perf_counter() - begin
    await client.unlink("zset", "hash")
    await client.aclose()
    return len(names) / taken


def in_batches(bench: Bench, names: list[str]) -> float:
    queue = bench.queue("sched")
    queue.stats()
    begin = time.perf_counter()
    queue.schedule_many(NewJob(PAYLOAD, delay=3600, id=name) for name in names)
    taken = time.perf_counter() - begin
    queue.purge()
    queue.client.close()
    return len(names) / taken


async def async_in_batches(bench: Bench, names: list[str]) -> float:
    client = redis.asyncio.Redis(port=bench.port)
    queue = AsyncDelayQueue(client, name="sched")
    await queue.stats()
    begin = time.perf_counter()
    await queue.schedule_many(NewJob(PAYLOAD, delay=3600, id=name) for name in names)
    taken = time.perf_counter() - begin
    await queue.purge()
    await client.aclose()
    return len(names) / taken


def bare_in_batches(bench: Bench, names: list[str]) -> float:
    """One ZADD and one HSET of 500 members each in a pipeline: the least that can be sent."""
    client = bench.client()
    client.ping()
    begin = time.perf_counter()
    for at in range(0, len(names), BATCH):
        chunk = names[at : at + BATCH]
        pipe = client.pipeline(transaction=False)
        pipe.zadd("zset", {name: time.time() + 3600 for name in chunk})
        pipe.hset("hash", mapping=dict.fromkeys(chunk, PAYLOAD))
        pipe.execute()
    taken = time.perf_counter() - begin
    client.unlink("zset", "hash")
    client.close()
    return len(names) / taken


def bare_pairs_in_batches(bench: Bench, names: list[str]) -> float:
    """A ZADD and an HSET a job, 500 jobs to a pipeline: what one writes without thinking."""
    client = bench.client()
    client.ping()
    begin = time.perf_counter()
    for at in range(0, len(names), BATCH):
        pipe = client.pipeline(transaction=False)
        for name in names[at : at + BATCH]:
            pipe.zadd("zset", {name: time.time() + 3600})
            pipe.hset("hash", name, PAYLOAD)
        pipe.execute()
    taken = time.perf_counter() - begin
    client.unlink("zset", "hash")
    client.close()
    return len(names) / taken


def scheduling(bench: Bench) -> list[Row]:
    """Jobs an hour ahead, 36-byte ids, 300-byte payloads."""
    few, many = ids(bench.size(5000, 300)), ids(bench.size(50_000, 2000))
    progress("scheduling: one by one")
    single = interleave(
        bench.repeats,
        ours=lambda: one_by_one(bench, few),
        bare=lambda: bare_one_by_one(bench, few),
        async_ours=lambda: asyncio.run(async_one_by_one(bench, few)),
        async_bare=lambda: asyncio.run(async_bare_one_by_one(bench, few)),
    )
    progress("scheduling: in batches")
    batched = interleave(
        bench.repeats + 2 if not bench.quick else 1,
        ours=lambda: in_batches(bench, many),
        bare=lambda: bare_in_batches(bench, many),
        pairs=lambda: bare_pairs_in_batches(bench, many),
        async_ours=lambda: asyncio.run(async_in_batches(bench, many)),
    )
    # Against Celery and arq, this is for the adapters' own benchmarks to say.
    later = "≥ 2× Celery, ≥ 1× arq (not here)"
    return [
        _row("schedule one by one, sync", single["ours"], single["bare"], "pipeline of 1", later, None),
        _row("schedule one by one, asyncio", single["async_ours"], single["async_bare"], "pipeline of 1", later, None),
        _row("schedule_many, sync", batched["ours"], batched["bare"], "ZADD + HSET of 500", "≥ 50,000/s", 50_000),
        _row("schedule_many, sync", batched["ours"], batched["pairs"], "500 ZADD, HSET", "≥ 50,000/s", 50_000),
        _row("schedule_many, asyncio", batched["async_ours"], batched["bare"], "ZADD + HSET of 500", "–", None),
    ]


def _row(what: str, ours: list[float], bare: list[float], how: str, target: str, least: float | None) -> Row:
    measured, floor = median(ours), median(bare)
    values: dict[str, Any] = {"jobs_per_s": measured, "floor_per_s": floor, "ratio": measured / floor}
    return Row(
        what=what,
        measured=rate(measured),
        floor=f"{rate(floor)} ({how})",
        ratio=times(measured / floor),
        target=target,
        met=None if least is None else measured >= least,
        values=values,
        runs={"ours": ours, "floor": bare},
    )
