"""The arq adapter beside stock arq, side by side in one run; prints a table, writes ``bench-results/arq_*``.

    benchmarks/arq_run.py [--quick] [--only NAME]... [--out FOLDER]

Three workers take turns on a Redis of their own: ``delayadapters arq`` (poll_delay 0.5), and arq's own with poll_delay
0.5 (its default) and 0.05. The workload is that of the peers' scripts: a 100-byte argument, due times spread at random.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from arq.connections import ArqRedis, RedisSettings
from arq.connections import create_pool as stock_pool
from arq.version import VERSION
from harness import (
    Bench,
    Row,
    command_stats,
    interleave,
    machine,
    median,
    medians,
    progress,
    rate,
    server,
    spread,
    times,
    triple,
)
from run import table, write

from delayadapters.arq import create_pool

HERE = Path(__file__).parent
BIN = Path(sys.executable).parent
WORKERS = {
    "ours": ([str(BIN / "delayadapters"), "arq"], "0.5"),
    "arq, poll 0.5": ([str(BIN / "arq")], "0.5"),
    "arq, poll 0.05": ([str(BIN / "arq")], "0.05"),
}
Pool = Callable[[RedisSettings], Any]


@contextmanager
def worker(port: int, name: str, out: Path) -> Iterator[None]:
    command, poll = WORKERS[name]
    env = os.environ | {"BENCH_PORT": str(port), "BENCH_OUT": str(out), "POLL": poll}
    with (out.with_suffix(".log")).open("wb") as log:
        process = subprocess.Popen([*command, "arq_app.WorkerSettings"], cwd=HERE, env=env, stdout=log, stderr=log)
        try:
            wait_for(lambda: b"Starting worker" in out.with_suffix(".log").read_bytes(), process)
            yield
            if process.poll() is not None:
                raise SystemExit("the worker ended by itself:\n" + out.with_suffix(".log").read_text())
        finally:
            process.terminate()
            process.wait(20)


def wait_for(condition: Callable[[], Any], process: Any = None, timeout: float = 60) -> None:
    end = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > end or (process is not None and process.poll() is not None):
            raise SystemExit("the worker did not come up or did not finish")
        time.sleep(0.05)


def rows_of(out: Path, kind: str) -> list[list[str]]:
    if not out.exists():
        return []
    return [line.split()[1:] for line in out.read_text().splitlines() if line.startswith(kind + " ")]


def on_pool(pool_of: Pool, port: int, work: Callable[[ArqRedis], Any]) -> Any:
    async def go() -> Any:
        pool = await pool_of(RedisSettings(port=port))
        try:
            return await work(pool)
        finally:
            await pool.aclose()

    return asyncio.run(go())


def pool_of(name: str) -> Pool:
    return create_pool if name == "ours" else stock_pool


def payload(due: float) -> str:
    return f"{due:.6f}".ljust(100, "x")


async def enqueue(pool: ArqRedis, number: int, delay: float) -> None:
    due = time.time() + delay
    await pool.enqueue_job("rec", number, payload(due), _defer_until=datetime.fromtimestamp(due, timezone.utc))


# ---------------------------------------------------------------- rows


def lateness(bench: Bench, folder: Path) -> list[Row]:
    """From due to the start of the job, on a worker process of its own; 1,000 jobs due at random within 3 s, as the
    peers have it. Beside it a process that only sleeps until the same due times: what the machine itself adds."""
    count = bench.size(1000, 200)

    def once(name: str) -> Callable[[], dict[str, float]]:
        def run() -> dict[str, float]:
            bench.client().flushall()
            out = folder / f"late-{time.monotonic_ns()}"
            rnd = random.Random(1)
            with worker(bench.port, name, out):

                async def fill(pool: ArqRedis) -> None:
                    for number in range(count):
                        await enqueue(pool, number, 1.0 + rnd.random() * 3.0)

                on_pool(pool_of(name), bench.port, fill)
                wait_for(lambda: len(rows_of(out, "ran")) >= count)
            ran = rows_of(out, "ran")
            assert len({number for number, *_ in ran}) == len(ran) == count
            late = [(float(start) - float(due)) * 1000 for _, due, start in ran]
            assert min(late) >= 0, f"early: {min(late)}"
            progress(f"{name}: {spread(late)}")
            return spread(late)

        return run

    def sleeper() -> dict[str, float]:
        code = "import random, time; r = random.Random(1); b = time.time()\n" + (
            f"for d in sorted(b + 1 + r.random() * 3 for _ in range({count})):\n"
            "    time.sleep(max(0, d - time.time())); print((time.time() - d) * 1000)"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        late = spread([float(line) for line in done.stdout.split()])
        progress(f"a sleeping process: {late}")
        return late

    variants: dict[str, Callable[[], dict[str, float]]] = {"sleeper": sleeper}
    found = interleave(1 if bench.quick else 5, **variants, **{name: once(name) for name in WORKERS})
    ours = medians(found["ours"])
    rows = []
    for name in ["sleeper", *list(WORKERS)[1:]]:
        theirs = medians(found[name])
        rows.append(
            Row(
                f"lateness at execution, {count:,} jobs, ms p50 / p99 / max",
                triple(ours),
                f"{name}: {triple(theirs)}",
                times(ours["p99"] / theirs["p99"]),
                "p99 ≤ 5 ms",
                ours["p99"] <= 5,
                {"ours": ours, name: theirs},
                found,
            )
        )
    return rows


def retries(bench: Bench, folder: Path) -> list[Row]:
    """From ``raise Retry(defer=0.05)`` to the next start, five times a job."""
    count = bench.size(10, 4)

    def once(name: str) -> Callable[[], dict[str, float]]:
        def run() -> dict[str, float]:
            bench.client().flushall()
            out = folder / f"retry-{time.monotonic_ns()}"
            with worker(bench.port, name, out):

                async def fill(pool: ArqRedis) -> None:
                    for number in range(count):
                        await pool.enqueue_job("flaky", number)
                        await asyncio.sleep(0.37)

                on_pool(pool_of(name), bench.port, fill)
                wait_for(lambda: len(rows_of(out, "try")) >= 6 * count)
            starts = {(number, int(t)): float(at) for number, t, at in rows_of(out, "try")}
            raised = {(number, int(t)): float(at) for number, t, at in rows_of(out, "raised")}
            gaps = [(starts[number, t + 1] - at) * 1000 for (number, t), at in raised.items()]
            progress(f"{name}: {spread(gaps)} min {min(gaps):.2f}")
            return {**spread(gaps), "min": min(gaps)}

        return run

    found = interleave(bench.repeats, **{name: once(name) for name in WORKERS})
    ours = medians(found["ours"])
    least = min(run["min"] for run in found["ours"])
    return [
        Row(
            "Retry(defer=0.05), raise to start, ms p50 / p99 / max",
            f"{triple(ours)} (min {least:.2f})",
            f"{name}: {triple(medians(found[name]))}",
            times(ours["p99"] / medians(found[name])["p99"]),
            "50 ≤ all < 80 ms",
            least >= 50 and ours["max"] < 80,
            {"ours": ours, name: medians(found[name])},
            found,
        )
        for name in list(WORKERS)[1:]
    ]


def schedule(bench: Bench, folder: Path) -> list[Row]:
    """Deferred enqueues, one by one and by 50 coroutines; no worker runs."""
    count = bench.size(1000, 300)

    def once(name: str, parallel: int) -> Callable[[], float]:
        def run() -> float:
            bench.client().flushall()

            async def fill(pool: ArqRedis) -> float:
                await enqueue(pool, 0, 3600)
                numbers = iter(range(count))

                async def one() -> None:
                    for number in numbers:
                        await enqueue(pool, number, 3600 + number)

                begin = time.perf_counter()
                await asyncio.gather(*(one() for _ in range(parallel)))
                return count / (time.perf_counter() - begin)

            return float(on_pool(pool_of(name), bench.port, fill))

        return run

    rows = []
    for parallel, what in ((1, "one by one"), (50, "by 50 coroutines")):
        found = interleave(3 if bench.quick else 11, ours=once("ours", parallel), arq=once("arq, poll 0.5", parallel))
        ours, theirs = median(found["ours"]), median(found["arq"])
        progress(f"{what}: ours {ours:.0f}, arq {theirs:.0f}")
        rows.append(
            Row(
                f"schedule {what}",
                rate(ours),
                f"arq: {rate(theirs)}",
                times(ours / theirs),
                "≥ 1×",
                ours >= theirs,
                {"ours": ours, "arq": theirs},
                found,
            )
        )
    return rows


def memory(bench: Bench, folder: Path) -> list[Row]:
    """Redis bytes for a waiting job: MEMORY USAGE of every key it is in (used_memory wavers with buffers)."""
    count = bench.size(20_000, 2000)

    def once(name: str) -> float:
        client = bench.client()
        client.flushall()

        async def fill(pool: ArqRedis) -> None:
            for at in range(0, count, 200):
                await asyncio.gather(*(enqueue(pool, number, 36_000 + number) for number in range(at, at + 200)))

        on_pool(pool_of(name), bench.port, fill)
        # Answers kept for repeated calls go by themselves within minutes.
        keys = [key for key in client.scan_iter(count=1000) if b":calls" not in key]
        pipe = client.pipeline(transaction=False)
        for key in keys:
            pipe.memory_usage(key, samples=0)
        return float(sum(pipe.execute())) / count

    ours, theirs = once("ours"), once("arq, poll 0.5")
    return [
        Row(
            f"Redis bytes a waiting job ({count:,}, 100-byte argument)",
            f"{ours:.0f}",
            f"arq: {theirs:.0f}",
            times(ours / theirs),
            "",
            None,
            {"ours": ours, "arq": theirs},
            None,
        )
    ]


def idle(bench: Bench, folder: Path) -> list[Row]:
    """Redis commands a second while nothing is due, scripts' inner ones included."""
    seconds = bench.size(20, 4)

    def once(name: str) -> float:
        client = bench.client()
        client.flushall()
        with worker(bench.port, name, folder / f"idle-{time.monotonic_ns()}"):
            time.sleep(3)
            client.config_resetstat()
            time.sleep(seconds)
            return sum(row["calls"] for row in command_stats(client).values()) / seconds

    found = {name: once(name) for name in WORKERS}
    progress(str(found))
    return [
        Row(
            "Redis commands a second, an idle worker",
            f"{found['ours']:.1f}",
            f"{name}: {found[name]:.1f}",
            times(found["ours"] / found[name]),
            "≤ arq + 3" if name.endswith("0.5") else "",
            found["ours"] <= found[name] + 3 if name.endswith("0.5") else None,
            {"ours": found["ours"], name: found[name]},
            None,
        )
        for name in list(WORKERS)[1:]
    ]


BENCHMARKS = {"lateness": lateness, "retries": retries, "schedule": schedule, "memory": memory, "idle": idle}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes, one run each: figures mean little")
    parser.add_argument("--only", action="append", choices=BENCHMARKS, metavar="NAME", help=", ".join(BENCHMARKS))
    parser.add_argument("--out", type=Path, default=HERE.parent / "bench-results", help="folder of the JSON results")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    rows: list[Row] = []
    with server() as port, tempfile.TemporaryDirectory(prefix="delayadapters-bench-arq-") as folder:
        facts = machine(port) | {"arq": VERSION}
        for name in options.only or BENCHMARKS:
            print(f"== {name}", file=sys.stderr, flush=True)
            since = time.monotonic()
            found = BENCHMARKS[name](Bench(port, options.quick, False), Path(folder))
            write(options.out / f"arq_{name}.json", name, found, facts, time.monotonic() - since)
            rows += found
    text = table(rows, facts, time.monotonic() - begin)
    (options.out / "arq_table.md").write_text(text, "utf-8")
    print(text)


if __name__ == "__main__":
    main()
