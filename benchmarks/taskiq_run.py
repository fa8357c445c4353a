"""The taskiq benchmarks: the adapter beside taskiq's own scheduler, in one run. See docs/how-to/taskiq.md.

    benchmarks/taskiq_run.py [--quick] [--only NAME]... [--out FOLDER]

Prints a table, writes ``bench-results/``. It starts a Redis server of its own (without persistence, on a free port) and
real ``taskiq`` processes, and ends them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import redis
from harness import Bench, Row, machine, progress, rate, server, spread, times, triple
from run import table, write

HERE = Path(__file__).parent
WORKER = ("worker", "taskiq_app:{}", "-w", "1", "--log-level", "WARNING", "--max-async-tasks", "100")
RELEASE = ("delay-release", "taskiq_app:broker", "--log-level", "WARNING")
SCHEDULER = ("scheduler", "taskiq_app:scheduler", "--log-level", "WARNING")
TUNED = (*SCHEDULER, "--update-interval", "1")


def main() -> None:
    options = arguments()
    options.out.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    with server() as port, tempfile.TemporaryDirectory(prefix="delayadapters-bench-") as folder:
        os.environ["BENCH_URL"] = f"redis://127.0.0.1:{port}/0"
        os.environ["BENCH_OUT"] = f"{folder}/out"
        facts = machine(port)
        rows: list[Row] = []
        for name in options.only or BENCHMARKS:
            print(f"== {name}", file=sys.stderr, flush=True)
            since = time.monotonic()
            found = BENCHMARKS[name](Bench(port, options.quick, False))
            rows += found
            write(options.out / f"taskiq-{name}.json", name, found, facts, time.monotonic() - since)
    text = table(rows, facts, time.monotonic() - begin)
    (options.out / "taskiq-table.md").write_text(text, "utf-8")
    print(text)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes, no scheduler with its defaults")
    parser.add_argument("--only", action="append", choices=BENCHMARKS, metavar="NAME", help=", ".join(BENCHMARKS))
    parser.add_argument("--out", type=Path, default=HERE.parent / "bench-results", help="folder of the JSON results")
    return parser.parse_args()


# ---------------------------------------------------------------- processes


@contextlib.contextmanager
def processes(*commands: tuple[str, ...], env: dict[str, str] | None = None) -> Iterator[None]:
    """``taskiq`` processes, given five seconds to start."""
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "taskiq", *command],
            cwd=HERE,
            env=os.environ | (env or {}),
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        for command in commands
    ]
    try:
        time.sleep(5)
        yield
    finally:
        for process in started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 15)
        for process in started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 9)
            process.wait()


def worker(broker: str) -> tuple[str, ...]:
    return tuple(word.format(broker) for word in WORKER)


def fresh(bench: Bench) -> None:
    bench.client().flushall()
    Path(os.environ["BENCH_OUT"]).unlink(missing_ok=True)


def ran() -> list[tuple[int, float]]:
    """Number and lateness (milliseconds) of each execution so far."""
    try:
        lines = Path(os.environ["BENCH_OUT"]).read_text().split("\n")[:-1]
    except FileNotFoundError:
        return []
    return [(int(number), float(late) * 1000) for number, late in (line.split() for line in lines)]


def wait(count: int, seconds: float) -> list[tuple[int, float]]:
    """Until so many different tasks have run, and a second more for duplicates."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and len({number for number, _ in ran()}) < count:
        time.sleep(0.1)
    time.sleep(1)
    return ran()


# ---------------------------------------------------------------- sending


def send_ours(count: int, first: float, over: float, together: int = 1) -> float:
    """Schedules ``count`` tasks from ``first`` seconds on, spread over ``over``; answers the rate."""

    async def go() -> float:
        from taskiq_app import broker, ours

        await broker.startup()

        async def one(number: int) -> None:
            delay = first + over * number / count
            await ours.kicker().with_labels(delay=delay).kiq(number, time.time() + delay)

        try:
            return await at_once(one, count, together)
        finally:
            await broker.shutdown()

    return asyncio.run(go())


def send_at_once(count: int, first: float, over: float) -> float:
    """Without a delay, at the times the others are due: what broker, worker and machine take by themselves."""

    async def go() -> float:
        from taskiq_app import native, stock

        await stock.startup()
        begin = time.time() + first
        for number in range(count):
            due = begin + over * number / count
            await asyncio.sleep(due - time.time())
            await native.kiq(number, time.time())
        await stock.shutdown()
        return 0.0

    return asyncio.run(go())


def send_stock(count: int, first: float, over: float, together: int = 1) -> float:
    async def go() -> float:
        from taskiq_app import native, source

        async def one(number: int) -> None:
            due = time.time() + first + over * number / count
            await native.schedule_by_time(source, datetime.fromtimestamp(due, timezone.utc), number, due)

        try:
            return await at_once(one, count, together)
        finally:
            await source._connection_pool.disconnect()

    return asyncio.run(go())


async def at_once(one: Callable[[int], Awaitable[None]], count: int, together: int) -> float:
    numbers = iter(range(count))

    async def some() -> None:
        for number in numbers:
            await one(number)

    await one(next(numbers))  # the connection and the script are there
    began = time.perf_counter()
    await asyncio.gather(*(some() for _ in range(together)))
    return count / (time.perf_counter() - began)


# ---------------------------------------------------------------- the benchmarks


def lateness(bench: Bench) -> list[Row]:
    """At execution: from due to the first line of the task, one worker, idle in between."""
    count, over = bench.size(1000, 100), bench.size(20, 4)
    results: dict[str, dict[str, float]] = {}

    def measure(label: str, send: Callable[..., float], patience: float, *commands: tuple[str, ...]) -> None:
        progress(label)
        fresh(bench)
        with processes(*commands):
            send(count, 5.0, over)
            results[label] = spread([late for _, late in wait(count, over + patience)])

    measure("at once", send_at_once, 30, worker("stock"))
    measure("ours", send_ours, 30, worker("broker"))
    measure("tuned", send_stock, 60, worker("stock"), TUNED)
    if not bench.quick:
        measure("default", send_stock, 135, worker("stock"), SCHEDULER)
    rows = []
    names = {
        "at once": "kiq without a delay (broker, worker and machine alone)",
        "tuned": "taskiq scheduler --update-interval 1",
        "default": "taskiq scheduler (defaults)",
    }
    for label, what in names.items():
        if label in results:
            rows.append(
                Row(
                    f"lateness at execution, {count} tasks over {over} s, ms p50/p99/max; beside {what}",
                    triple(results["ours"]),
                    triple(results[label]),
                    times(results["ours"]["p99"] / results[label]["p99"]),
                    "p99 ≤ 5 ms",
                    results["ours"]["p99"] <= 5,
                    results["ours"],
                    results,
                )
            )
    return rows


def duplicates(bench: Bench) -> list[Row]:
    """Executions beyond one each, with several releasing processes beside one worker."""
    count, rows = 300, []
    for number in (2, 3):
        found = {}
        for label, send, commands in (
            ("ours", send_ours, (worker("broker"), *[RELEASE] * number)),
            ("stock", send_stock, (worker("stock"), *[TUNED] * number)),
        ):
            progress(f"{number} processes, {label}")
            fresh(bench)
            with processes(*commands):
                send(count, 4.0, 5.0)
                executions = Counter(n for n, _ in wait(count, 60))
            found[label] = {"run": len(executions), "duplicates": sum(executions.values()) - len(executions)}
        rows.append(
            Row(
                f"duplicates of {count}, {number} releasing processes, beside as many schedulers (--update-interval 1)",
                str(found["ours"]["duplicates"]),
                str(found["stock"]["duplicates"]),
                "–",
                "0, all run",
                found["ours"] == {"run": count, "duplicates": 0},
                found["ours"],
                found,
            )
        )
    return rows


def commands(bench: Bench) -> list[Row]:
    """Redis commands a second of a process that releases, nothing being due; those inside scripts count too."""
    rows = []
    seconds = bench.size(20, 5)
    for waiting in (0, bench.size(10_000, 1000)):
        found: dict[str, float] = {}
        for label, send, run in (
            ("ours", send_ours, [RELEASE]),
            ("ours, three", send_ours, [RELEASE] * 3),
            ("tuned", send_stock, [TUNED]),
            ("default", send_stock, [SCHEDULER]),
        ):
            progress(f"{label}, {waiting} waiting")
            fresh(bench)
            if waiting:
                # An hour from now, over a day, as different minutes as they come.
                send(waiting, 3600.0, 86400.0, 50)
            with processes(*run):
                found[label] = _commands_a_second(bench.client(), seconds)
        for label, what in (("tuned", "--update-interval 1"), ("default", "defaults")):
            rows.append(
                Row(
                    f"commands a second, idle, {waiting:,} waiting: one loop (three); beside taskiq scheduler, {what}",
                    f"{found['ours']:.1f} ({found['ours, three']:.1f})",
                    f"{found[label]:.1f}",
                    times(found["ours"] / found[label]) if found[label] else "–",
                    "≤ 3, +0.6 each further",
                    found["ours"] <= 3 and found["ours, three"] <= found["ours"] + 1.2,
                    found,
                    found,
                )
            )
    return rows


def _commands_a_second(client: redis.Redis, seconds: float) -> float:
    def total() -> int:
        stats: Any = client.info("commandstats")
        ours = ("cmdstat_info", "cmdstat_config|resetstat")
        return sum(int(row["calls"]) for name, row in stats.items() if name not in ours)

    before, began = total(), time.monotonic()
    time.sleep(seconds)
    return (total() - before) / (time.monotonic() - began)


def scheduling(bench: Bench) -> list[Row]:
    """``kiq`` with a delay, beside ``schedule_by_time`` on ListRedisScheduleSource; nobody releases."""
    rows = []
    for together, count in ((1, bench.size(3000, 500)), (50, bench.size(10_000, 1000))):
        found: dict[str, list[float]] = {"ours": [], "stock": []}
        for _ in range(bench.repeats):
            for label, send in (("ours", send_ours), ("stock", send_stock)):
                fresh(bench)
                found[label].append(send(count, 3600.0, 3600.0, together))
        best = {label: sorted(rates)[len(rates) // 2] for label, rates in found.items()}
        how = "one by one" if together == 1 else f"from {together} coroutines"
        rows.append(
            Row(
                f"schedule {how}, beside ListRedisScheduleSource",
                rate(best["ours"]),
                rate(best["stock"]),
                times(best["ours"] / best["stock"]),
                "≥ 1×",
                best["ours"] >= best["stock"],
                best,
                found,
            )
        )
    return rows


BENCHMARKS: dict[str, Callable[[Bench], list[Row]]] = {
    "lateness": lateness,
    "duplicates": duplicates,
    "commands": commands,
    "schedule": scheduling,
}

if __name__ == "__main__":
    main()
