"""Workers of a taskiq broker, in this process and as real ones. Not imported by the package: it needs taskiq."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from taskiq import AsyncBroker
from taskiq.api import run_receiver_task

from .waiting import wait_until

__all__ = ["App", "started", "working"]

HERE = Path(__file__).parents[2] / "adapters" / "taskiq"


@contextlib.asynccontextmanager
async def working(broker: AsyncBroker, **options: Any) -> AsyncIterator[AsyncBroker]:
    """A worker in this process."""
    broker.is_worker_process = True
    await broker.startup()
    receiver = asyncio.create_task(run_receiver_task(broker, **options))
    try:
        yield broker
    finally:
        receiver.cancel()
        await asyncio.wait([receiver])
        await broker.shutdown()


@contextlib.asynccontextmanager
async def started(broker: AsyncBroker) -> AsyncIterator[AsyncBroker]:
    """A client."""
    await broker.startup()
    try:
        yield broker
    finally:
        await broker.shutdown()


class App:
    """Processes of the application in delay_taskiq_app.py, told about its broker by environment variables."""

    def __init__(self, folder: Path, env: dict[str, str]) -> None:
        self.folder = folder
        paths = [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
        self.env = os.environ | env | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, *command: str, **env: str) -> subprocess.Popen[bytes]:
        """``taskiq <command…>``, a process group of its own."""
        log = (self.folder / f"process-{len(self.processes)}.log").open("wb")
        process = subprocess.Popen(
            [sys.executable, "-m", "taskiq", *command],
            env=self.env | env,
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        log.close()
        self.processes.append(process)
        return process

    def worker(self, **env: str) -> subprocess.Popen[bytes]:
        """One worker with one child, up and listening."""
        process = self.start("worker", "delay_taskiq_app:broker", "--workers", "1", **env)
        self.wait_for(process, "Listening started")
        return process

    def log(self, process: subprocess.Popen[bytes]) -> str:
        return (self.folder / f"process-{self.processes.index(process)}.log").read_text(errors="replace")

    def wait_for(self, process: subprocess.Popen[bytes], text: str, timeout: float = 100) -> None:
        def said() -> bool:
            assert_log = self.log(process)
            if process.poll() is not None and text not in assert_log:
                raise RuntimeError(f"the process ended with {process.returncode}:\n{assert_log}")
            return text in assert_log

        wait_until(said, timeout, 0.05, message=f"{text!r} in the log of {process.args}")

    @staticmethod
    def kill(process: subprocess.Popen[bytes]) -> None:
        """SIGKILL for the process and all its children."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    @staticmethod
    def stop(process: subprocess.Popen[bytes], timeout: float = 60) -> None:
        """SIGTERM to the process; returns when it has ended."""
        process.terminate()
        process.wait(timeout)

    def close(self) -> None:
        for process in self.processes:
            self.kill(process)
