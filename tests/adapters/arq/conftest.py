"""Fixtures of the arq adapter's tests: a server of the test's own, clients, workers here and in processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from arq.connections import ArqRedis, RedisSettings
from arq.connections import create_pool as arq_create_pool
from arq.worker import Function, Worker, func

from delayadapters.arq import DelayArqRedis, DelaySettings, DelayWorker, create_pool
from delaytests import RedisServer, wait_until

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            # arq itself calls what redis-py 5 deprecates.
            item.add_marker(pytest.mark.filterwarnings("ignore:Call to deprecated close:DeprecationWarning"))
            item.add_marker(pytest.mark.filterwarnings("ignore:There is no current event loop:DeprecationWarning"))
            # A stock worker that ends in the midst of a poll leaves its pipeline to the garbage collector.
            item.add_marker(pytest.mark.filterwarnings("ignore:Unclosed client session.*Pipeline:ResourceWarning"))
            if "start_worker" in getattr(item, "fixturenames", ()):
                # On a machine that others keep busy a process takes half a minute to begin.
                item.add_marker(pytest.mark.timeout(400))


@pytest.fixture
def server(start_redis: Callable[..., RedisServer]) -> RedisServer:
    return start_redis()


@pytest.fixture
def settings(server: RedisServer) -> RedisSettings:
    return RedisSettings(port=server.port)


@pytest.fixture
async def make_pool(settings: RedisSettings) -> AsyncIterator[Callable[..., Any]]:
    """``await make_pool(**create_pool's options)``"""
    made: list[DelayArqRedis] = []

    async def make(to: RedisSettings | None = None, **options: Any) -> DelayArqRedis:
        options.setdefault("delay_settings", DelaySettings(timeout=60))  # on a busy machine
        pool = await create_pool(to or settings, **options)
        made.append(pool)
        return pool

    yield make
    for pool in made:
        await close(pool)


@pytest.fixture
async def pool(make_pool: Callable[..., Any]) -> DelayArqRedis:
    made: DelayArqRedis = await make_pool()
    return made


@pytest.fixture
async def stock(settings: RedisSettings) -> AsyncIterator[ArqRedis]:
    """arq's own client."""
    made = await arq_create_pool(settings)
    yield made
    await made.aclose()


@pytest.fixture
async def work(settings: RedisSettings) -> AsyncIterator[Callable[..., Any]]:
    """``work(*functions, cls=DelayWorker, **options) -> worker``, running until the test ends; ``poll_delay`` is long,
    so that what runs soon was woken."""
    running: list[tuple[Any, asyncio.Task[None]]] = []

    def start(*functions: Any, cls: type[Worker] = DelayWorker, **options: Any) -> Any:
        options = {"poll_delay": 20, "redis_settings": settings, **options}
        named = [func(f, name=f.__name__) if callable(f) and not isinstance(f, Function) else f for f in functions]
        worker = cls(functions=named, handle_signals=False, **options)
        running.append((worker, asyncio.create_task(worker.async_run())))
        return worker

    yield start
    for worker, task in running:
        pool = worker._pool
        # arq's close() ends with the CancelledError of a job whose hook it cancelled.
        with contextlib.suppress(asyncio.CancelledError):
            await worker.close()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        if pool is not None:
            await close(pool)


async def close(pool: ArqRedis) -> None:
    """The pool, and the connections to its Sentinels, which arq leaves to the garbage collector."""
    await pool.aclose(close_connection_pool=True)
    for sentinel in getattr(getattr(pool.connection_pool, "sentinel_manager", None), "sentinels", ()):
        await sentinel.aclose()


class WorkerProcess:
    """A worker in a process of its own, on app/jobs.py."""

    def __init__(self, command: list[str], env: dict[str, str], log: Path) -> None:
        self.log_path = log
        with log.open("ab") as out:
            self._process = subprocess.Popen(command, cwd=HERE / "app", env=env, stdout=out, stderr=out)

    def log(self) -> str:
        return self.log_path.read_text()

    def wait_ready(self) -> WorkerProcess:
        wait_until(lambda: "Starting worker" in self.log() or self._process.poll() is not None, timeout=90)
        assert self._process.poll() is None, self.log()
        return self

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        self._process.wait()

    def wait(self, timeout: float = 60) -> int:
        return self._process.wait(timeout)

    def stop(self) -> int:
        self.signal(signal.SIGTERM)
        return self.wait()


@pytest.fixture
def start_worker(server: RedisServer, tmp_path: Path) -> Iterator[Callable[..., WorkerProcess]]:
    """``start_worker("Settings", *options, stock=False, **environment) -> WorkerProcess`` by the command line."""
    made: list[WorkerProcess] = []

    def start(name: str = "Settings", *options: str, stock: bool = False, **environment: str) -> WorkerProcess:
        scripts = Path(sys.executable).parent
        command = [str(scripts / "arq")] if stock else [str(scripts / "delayadapters"), "arq"]
        env = os.environ | {"REDIS_PORT": str(server.port), **environment}
        made.append(WorkerProcess([*command, f"jobs.{name}", *options], env, tmp_path / f"worker-{len(made)}.log"))
        return made[-1]

    yield start
    for process in made:
        process.kill()


class Ledger:
    """What the jobs of app/jobs.py write down, in Redis: ``id try`` a start, in a list."""

    def __init__(self, server: RedisServer) -> None:
        self._client = server.client()

    def runs(self) -> list[str]:
        return [row.decode() for row in self._client.lrange("ledger", 0, -1)]

    def ids(self) -> list[str]:
        return [row.split()[0] for row in self.runs()]


@pytest.fixture
def ledger(server: RedisServer) -> Ledger:
    return Ledger(server)
