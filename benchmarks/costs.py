"""What the queue costs Redis: bytes a job, commands while idle, and time as it grows."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import redis
from floors import TAKE
from harness import PAYLOAD, Bench, Row, command_stats, fill, fill_bare, median, new_id, progress, times

from delayadapters import Batch, DelayQueue, Releaser

DAY = 86_400.0


def used(client: redis.Redis) -> int:
    """Bytes, once freeing and rehashing have settled."""
    time.sleep(2.5)
    client.ping()
    info: Any = client.info("memory")
    return int(info["used_memory"])


def memory(bench: Bench) -> list[Row]:
    """36-byte ids, 300-byte payloads, due within a day; used_memory before and after."""
    count = bench.size(1_000_000, 5000)
    client = bench.client()
    client.flushall()
    before = used(client)
    progress(f"memory: {count:,} jobs in a bare sorted set and a hash")
    rnd = random.Random(9)
    fill_bare(client, "z", "h", count, lambda: time.time() + rnd.random() * DAY)
    bare = (used(client) - before) / count
    client.flushall()
    before = used(client)
    progress(f"memory: {count:,} jobs in a queue")
    rnd = random.Random(9)
    fill(bench.queue(), count, lambda: 3600 + rnd.random() * DAY)
    ours = (used(client) - before) / count
    client.flushall()
    return [
        Row(
            what=f"Redis bytes a job, {count:,} jobs",
            measured=f"{ours:.1f}",
            floor=f"{bare:.1f} (zset + one hash)",
            ratio=times(ours / bare),
            target="≤ 600",
            met=ours <= 600 if not bench.quick else None,
            values={"bytes_per_job": ours, "floor": bare, "ratio": ours / bare, "jobs": count},
            runs={"ours": [ours], "floor": [bare]},
        )
    ]


# ---------------------------------------------------------------- idle


class Nothing:
    def publish(self, claims: Batch) -> None:
        return None


def idle(bench: Bench) -> list[Row]:
    """Commands a second while nothing is due, those inside scripts included; each loop with connections of its own."""
    client = bench.client()
    client.flushall()
    queue = bench.queue()
    fill(queue, 1000, lambda: 3600)
    seconds = bench.size(12, 3)
    rates: dict[int, float] = {}
    seen: dict[int, dict[str, float]] = {}
    for loops in (1, 8):
        progress(f"idle: {loops} loop{'s' * (loops > 1)}, {seconds} s")
        running = [Releaser(DelayQueue(bench.client(), name="bench"), Nothing()) for _ in range(loops)]
        for one in running:
            one.start()
        time.sleep(bench.size(3, 1))
        client.config_resetstat()
        begin = time.perf_counter()
        time.sleep(seconds)
        stats = command_stats(client)
        taken = time.perf_counter() - begin
        for one in running:
            one.stop()
        seen[loops] = {name: row["calls"] for name, row in stats.items()}
        rates[loops] = sum(seen[loops].values()) / taken
    further = (rates[8] - rates[1]) / 7
    queue.purge()
    values = {"per_s": {str(k): v for k, v in rates.items()}, "each_further": further, "seconds": seconds}
    runs = {str(k): v for k, v in seen.items()}
    return [
        Row("Redis commands a second, idle, 1 loop", f"{rates[1]:.2f}", "–", "–", "≤ 3", rates[1] <= 3, values, runs),
        Row(
            "Redis commands a second, idle, 8 loops",
            f"{rates[8]:.2f} ({further:+.2f} a further loop)",
            "–",
            "–",
            "≤ +0.6 a further loop",
            further <= 0.6,
            values,
            runs,
        ),
    ]


# ---------------------------------------------------------------- growth


def script_cost(client: redis.Redis, command: str, run: Callable[[], None]) -> float:
    """Microseconds of server time a call."""
    client.config_resetstat()
    run()
    return float(command_stats(client)[command]["usec_per_call"])


class Ours:
    """A queue whose jobs were due over the day before ``now``: the queue's clock is one the benchmark sets."""

    def __init__(self, bench: Bench, rnd: random.Random) -> None:
        self._queue = bench.queue("grow")
        self._rnd = rnd
        self._ids = random.Random(11)
        self._now = time.time_ns() // 1000
        self._queue._clock = lambda: self._now

    def fill(self, count: int) -> None:
        if count:
            rnd = random.Random(self._rnd.random())
            self._queue.schedule_many([])
            fill_more(self._queue, count, lambda: 1 + rnd.random() * DAY, self._ids)

    def schedule(self, count: int) -> list[str]:
        names = [new_id(self._ids) for _ in range(count)]
        for name in names:
            self._queue.schedule(PAYLOAD, delay=1 + self._rnd.random() * DAY, id=name)
        return names

    def cancel(self, names: list[str]) -> None:
        for name in names:
            self._queue.cancel(name)

    def claim(self, calls: int) -> list[Any]:
        real, self._now = self._now, self._now + round(2 * DAY * 1e6)
        claims: list[Any] = []
        for _ in range(calls):
            claims += self._queue.claim(100, lease=3600)
        self._now = real
        return claims

    def give_back(self, claims: list[Any]) -> None:
        self._queue.give_back(claims)


def fill_more(queue: DelayQueue, count: int, delay: Callable[[], float], ids: random.Random) -> None:
    from delayadapters import NewJob

    for at in range(0, count, 5000):
        queue.schedule_many(NewJob(PAYLOAD, delay=delay(), id=new_id(ids)) for _ in range(min(5000, count - at)))


class Bare:
    """The sorted set alone."""

    def __init__(self, bench: Bench, rnd: random.Random) -> None:
        self._client = bench.client()
        self._take = self._client.register_script(TAKE)
        self._rnd = rnd
        self._ids = random.Random(11)

    def _score(self) -> float:
        return 1_800_000_000 + self._rnd.random() * DAY

    def fill(self, count: int) -> None:
        for at in range(0, count, 5000):
            self._client.zadd("grow", {new_id(self._ids): self._score() for _ in range(min(5000, count - at))})

    def schedule(self, count: int) -> list[str]:
        names = [new_id(self._ids) for _ in range(count)]
        for name in names:
            self._client.zadd("grow", {name: self._score()})
        return names

    def cancel(self, names: list[str]) -> None:
        self._client.zrem("grow", *names)

    def claim(self, calls: int) -> list[Any]:
        out: list[Any] = []
        for _ in range(calls):
            out += self._take(keys=["grow"], args=["+inf", 100])
        return out

    def give_back(self, claims: list[Any]) -> None:
        self._client.zadd("grow", {one: self._score() for one in claims})


def growth(bench: Bench) -> list[Row]:
    """Server time of a schedule and of a claim of 100, as the number of waiting jobs grows."""
    sizes = [1000, 5000] if bench.quick else [1000, 100_000, 1_000_000] + [10_000_000] * bench.full
    client = bench.client()
    client.flushall()
    sides: dict[str, Any] = {"bare": Bare(bench, random.Random(2)), "ours": Ours(bench, random.Random(2))}
    commands = {"bare": ("zadd", "evalsha"), "ours": ("evalsha", "evalsha")}
    cost: dict[str, dict[str, list[float]]] = {side: {"schedule": [], "claim": []} for side in sides}
    runs: dict[str, Any] = {side: {"schedule": [], "claim": []} for side in sides}
    have = 0
    for size in sizes:
        progress(f"growth: {size:,} waiting")
        for side in sides.values():
            side.fill(size - have)
        have = size
        calls = min(5, size // 200) if size == 1000 else min(50, size // 200)
        found: dict[str, dict[str, list[float]]] = {side: {"schedule": [], "claim": []} for side in sides}
        for _ in range(bench.repeats):
            for name, side in sides.items():
                kept: list[Any] = []
                # Few enough at a time that the small queue stays small.
                rounds = 5 if size == 1000 else 1
                spent = []
                for _ in range(rounds):
                    count = bench.size(3000, 200) // (rounds * (5 if size == 1000 else 1))
                    spent.append(
                        script_cost(client, commands[name][0], lambda: kept.extend(side.schedule(count)))  # noqa: B023
                    )
                    side.cancel(kept)
                    kept.clear()
                found[name]["schedule"].append(median(spent))
                found[name]["claim"].append(
                    script_cost(client, commands[name][1], lambda: kept.extend(side.claim(calls)))  # noqa: B023
                )
                side.give_back(kept)
        for name in sides:
            for what in ("schedule", "claim"):
                cost[name][what].append(median(found[name][what]))
                runs[name][what].append(found[name][what])
    client.flushall()
    rows = []
    for what, title in (("schedule", "schedule"), ("claim", "claim of 100")):
        mine, floor = cost["ours"][what], cost["bare"][what]
        grew, bare_grew = mine[-1] / mine[0], floor[-1] / floor[0]
        rows.append(
            Row(
                what=f"growth, {title}, server µs at {' → '.join(f'{size:,}' for size in sizes)} waiting",
                measured=f"{' → '.join(f'{x:.1f}' for x in mine)} ({grew:.2f}×)",
                floor=f"{' → '.join(f'{x:.1f}' for x in floor)} ({bare_grew:.2f}×)",
                ratio=times(grew / bare_grew),
                target="grows no faster than the bare zset's",
                met=None if bench.quick else grew <= bare_grew,
                values={"sizes": sizes, "us": mine, "floor_us": floor, "growth": grew, "floor_growth": bare_grew},
                runs={side: runs[side][what] for side in sides},
            )
        )
    return rows
