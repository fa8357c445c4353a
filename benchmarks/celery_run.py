"""The Celery benchmarks: the adapter beside Celery's own countdown, in one run. See docs/how-to/celery.md.

    benchmarks/celery_run.py [--quick] [--only NAME]... [--out FOLDER]

Prints a table, writes ``bench-results/``. It starts a Redis server of its own (without persistence, on a free port)
and real workers, and ends them. With RabbitMQ at BENCH_RABBIT (default: the local one) it measures there, too, in a
queue of its own; BENCH_BROKERS=Redis or RabbitMQ measures with that one alone.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path

import kombu
from celery import Celery, group
from harness import Bench, Row, interleave, machine, median, progress, rate, server, spread, times, triple
from run import table, write

HERE = Path(__file__).parent
RABBIT = os.environ.get("BENCH_RABBIT", "amqp://guest:guest@127.0.0.1:5672//")
POOLS = {"prefork": ("-P", "prefork", "-c", "2"), "threads": ("-P", "threads", "-c", "20")}
KINDS = {"direct": "released directly", "leased": "released through kombu"}


def main() -> None:
    options = arguments()
    options.out.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    os.environ["BENCH_QUEUE"] = f"bench-{uuid.uuid4().hex[:12]}"
    with server() as port, tempfile.TemporaryDirectory(prefix="delayadapters-bench-") as folder:
        os.environ["BENCH_URL"] = f"redis://127.0.0.1:{port}/0"
        os.environ["BENCH_OUT"] = f"{folder}/out"
        facts = machine(port)
        rows: list[Row] = []
        try:
            for name in options.only or BENCHMARKS:
                print(f"== {name}", file=sys.stderr, flush=True)
                since = time.monotonic()
                found = BENCHMARKS[name](Bench(port, options.quick, False))
                rows += found
                write(options.out / f"celery-{name}.json", name, found, facts, time.monotonic() - since)
        finally:
            drop_rabbit_queue()
    text = table(rows, facts, time.monotonic() - begin)
    (options.out / "celery-table.md").write_text(text, "utf-8")
    print(text)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes, one run of each")
    parser.add_argument("--only", action="append", choices=BENCHMARKS, metavar="NAME", help=", ".join(BENCHMARKS))
    parser.add_argument("--out", type=Path, default=HERE.parent / "bench-results", help="folder of the JSON results")
    return parser.parse_args()


# ---------------------------------------------------------------- brokers and apps


def brokers(bench: Bench) -> dict[str, str]:
    found = {"Redis": bench.url}
    try:
        with kombu.Connection(RABBIT, connect_timeout=2) as connection:
            connection.connect()
        found["RabbitMQ"] = RABBIT
    except OSError as error:
        progress(f"without RabbitMQ: {error}")
    wanted = os.environ.get("BENCH_BROKERS", "")
    return {name: url for name, url in found.items() if not wanted or name in wanted.split(",")}


def drop_rabbit_queue() -> None:
    for name in ("queue_delete", "exchange_delete"):
        with contextlib.suppress(Exception), kombu.Connection(RABBIT, connect_timeout=2) as connection:
            getattr(connection.channel(), name)(os.environ["BENCH_QUEUE"])


def an_app(bench: Bench, kind: str, broker: str) -> Celery:
    from celery_app import make_app

    return make_app(broker, bench.url, kind != "native", kind == "direct")


def fresh(bench: Bench) -> None:
    bench.client().flushall()
    drop_rabbit_queue()
    Path(os.environ["BENCH_OUT"]).unlink(missing_ok=True)


@contextlib.contextmanager
def worker(kind: str, broker: str, pool: str) -> Iterator[subprocess.Popen[bytes]]:
    """A worker that is ready."""
    ready = Path(os.environ["BENCH_OUT"] + ".ready")
    ready.unlink(missing_ok=True)
    process = subprocess.Popen(
        [sys.executable, "-m", "celery", "-A", "celery_app", "worker", *POOLS[pool], "-l", "ERROR",
         "--without-mingle", "--without-gossip", "-n", f"bench{time.time_ns()}@%h"],
        cwd=HERE,
        env=os.environ | {"BENCH_KIND": kind, "BENCH_BROKER": broker, "C_FORCE_ROOT": "1", "PYTHONWARNINGS": "ignore"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip
    try:
        end = time.monotonic() + 60
        while not ready.exists():
            if process.poll() is not None or time.monotonic() > end:
                raise SystemExit("the worker did not start")
            time.sleep(0.05)
        time.sleep(1)
        yield process
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(15)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        process.wait()


# ---------------------------------------------------------------- lateness


def lateness(bench: Bench) -> list[Row]:
    """At execution: from due to the first line of the task, one worker, idle in between."""
    count = bench.size(1000, 200)
    rows = []
    for name, url in brokers(bench).items():
        for pool in POOLS:
            kinds = ("direct", "leased", "native") if name == "Redis" else ("leased", "native")

            def late(kind: str, url: str = url, pool: str = pool, name: str = name) -> list[float]:
                progress(f"{name}, {pool}, {kind}")
                fresh(bench)
                with worker(kind, url, pool):
                    return executed(an_app(bench, kind, url), count)

            runs = interleave(min(2, bench.repeats), **{kind: (lambda kind=kind: late(kind)) for kind in kinds})
            figures = {kind: spread([one for run in found for one in run]) for kind, found in runs.items()}
            native = figures.pop("native")
            for kind, ours in figures.items():
                rows.append(
                    Row(
                        f"lateness at execution, {name}, {pool}, {KINDS[kind]}, ms p50/p99/max; beside native",
                        triple(ours),
                        triple(native),
                        times(ours["p99"] / native["p99"]),
                        "p99 ≤ 2×",
                        ours["p99"] <= 2 * native["p99"],
                        {"ours": ours, "native": native},
                        {"repeats": min(2, bench.repeats), "count": count},
                    )
                )
    return rows


def executed(app: Celery, count: int) -> list[float]:
    """Milliseconds of lateness of ``count`` tasks over 3 s, the first one in 3 s."""
    first, note = time.time() + 3.0, app.tasks["note"]
    for number in range(count):
        due = first + 3.0 * number / count
        note.apply_async((number, due), eta=datetime.fromtimestamp(due, timezone.utc))
    app.close()
    out, end = Path(os.environ["BENCH_OUT"]), time.monotonic() + 60
    while True:
        lines = out.read_text().split("\n")[:-1] if out.exists() else []
        if len(lines) >= count or time.monotonic() > end:
            break
        time.sleep(0.2)
    found = {int(line.split()[0]): float(line.split()[1]) * 1000 for line in lines}
    if len(lines) != count or len(found) != count:
        raise SystemExit(f"{len(lines)} executions of {len(found)} tasks, {count} were scheduled")
    return list(found.values())


# ---------------------------------------------------------------- scheduling


def schedule(bench: Bench) -> list[Row]:
    """``apply_async(countdown=…)`` one by one, and a group; nobody releases."""
    rows = []
    for name, url in brokers(bench).items():
        kind = "direct" if name == "Redis" else "leased"
        apps = {which: an_app(bench, which, url) for which in (kind, "native")}

        def one_by_one(app: Celery) -> float:
            note, count = app.tasks["note"], bench.size(2000, 300)
            note.apply_async((0, 0.0), countdown=3600)
            began = time.perf_counter()
            for number in range(count):
                note.apply_async((number, 1.5), countdown=3600)
            return count / (time.perf_counter() - began)

        def together(app: Celery) -> float:
            note, count = app.tasks["note"], bench.size(10_000, 1000)
            signature = group([note.s(number, 1.5) for number in range(count)], app=app)
            began = time.perf_counter()
            signature.apply_async(countdown=3600)
            return count / (time.perf_counter() - began)

        for how, run, target in (
            ("one by one", one_by_one, "≥ 2×"),
            (f"in a group of {bench.size(10_000, 1000):,}", together, "≥ 2×"),
        ):
            progress(f"{name}, {how}")
            fresh(bench)
            runs = interleave(
                bench.repeats,
                ours=lambda run=run, app=apps[kind]: run(app),
                native=lambda run=run, app=apps["native"]: run(app),
            )
            ours, native = median(runs["ours"]), median(runs["native"])
            rows.append(
                Row(
                    f"schedule {how}, broker {name}; beside native",
                    rate(ours),
                    rate(native),
                    times(ours / native),
                    target,
                    ours >= 2 * native,
                    {"ours": ours, "native": native},
                    runs,
                )
            )
        for app in apps.values():
            app.close()
    return rows


# ---------------------------------------------------------------- memory


def memory(bench: Bench) -> list[Row]:
    """What a worker and its processes grow by while tasks wait for an hour."""
    rows = []
    for count in (0, bench.size(10_000, 1000), bench.size(25_000, 2000), bench.size(50_000, 3000)):
        grown, empty = {}, {}
        for kind in ("direct", "native"):
            progress(f"{count} waiting, {kind}")
            fresh(bench)
            with worker(kind, bench.url, "prefork") as process:
                before = resident(process.pid)
                empty[kind] = before / 1e6
                app = an_app(bench, kind, bench.url)
                for number in range(count):
                    app.tasks["note"].apply_async((number, 1.5), countdown=3600)
                app.close()
                settle(bench, process.pid)
                grown[kind] = (resident(process.pid) - before) / 1e6
        rows.append(
            Row(
                f"worker memory, {count:,} waiting, MB more than before; beside native",
                f"{grown['direct']:.1f}",
                f"{grown['native']:.1f}",
                times(grown["direct"] / grown["native"]) if count else "–",
                "0 a job",
                grown["direct"] < 3.0,
                {"waiting": count, "grown_mb": grown, "empty_mb": empty},
                grown,
            )
        )
    return rows


def settle(bench: Bench, session: int) -> None:
    """Until the worker has taken what it takes from the broker, and its size stands still."""
    client, last, same = bench.client(), -1, 0
    while same < 4:
        time.sleep(0.5)
        left, size = int(client.llen(os.environ["BENCH_QUEUE"])), resident(session)
        same = same + 1 if left == 0 and abs(size - last) < 500_000 else 0
        last = size


def resident(session: int) -> int:
    """Bytes of resident memory of every process of a session."""
    listing = subprocess.run(["ps", "-A", "-o", "sess=,rss="], capture_output=True, text=True, check=True).stdout
    return sum(int(rss) * 1024 for sess, rss in (line.split() for line in listing.splitlines()) if int(sess) == session)


BENCHMARKS: dict[str, Callable[[Bench], list[Row]]] = {"lateness": lateness, "schedule": schedule, "memory": memory}

if __name__ == "__main__":
    main()
