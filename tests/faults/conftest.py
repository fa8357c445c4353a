"""A Redis of these tests' own, which they may pause, flush scripts of and cut, and releasers on it.

``delays`` makes queues on it; ``release`` a releaser in this process, ``spawn`` one in a process of its own.
All releasers end before the queues are purged, and then no key may be left.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from delayadapters import DelayQueue
from delaytests import CuttableProxy, RedisServer, wait_until
from delaytests.releasers import SHELLS, FileLedger, ReleasingProcess, Running

_names = itertools.count(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Several processes a test: on a machine that is very busy, starting them takes minutes."""
    for item in items:
        if item.path.parent == Path(__file__).parent and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(300))


@pytest.fixture(scope="session")
def server() -> Iterator[RedisServer]:
    """One server for all tests here that do not kill theirs."""
    with RedisServer() as server:
        yield server


@pytest.fixture
def admin(server: RedisServer) -> Iterator[redis.Redis]:
    with server.client() as client:
        yield client


@pytest.fixture(params=SHELLS)
def shell(request: pytest.FixtureRequest) -> str:
    value: str = request.param
    return value


@pytest.fixture
def name() -> str:
    return f"faults-{next(_names)}"


@pytest.fixture
def proxy(server: RedisServer) -> Iterator[CuttableProxy]:
    with CuttableProxy(server.port) as proxy:
        yield proxy


@pytest.fixture
def delays(server: RedisServer, name: str) -> Iterator[Callable[..., DelayQueue]]:
    """``delays(url=…, clock=…, **options)``: the test's queue, another client each time."""
    made: list[DelayQueue] = []

    def make(url: str | None = None, *, clock: Any = None, **options: Any) -> DelayQueue:
        queue = DelayQueue.from_url(url or server.url, name=name, **options)
        queue._clock = clock
        made.append(queue)
        return queue

    yield make
    for queue in made:
        queue.close()
    with server.client() as client:
        shards = max([len(queue._verbs.shards) for queue in made], default=1)
        with DelayQueue.from_url(server.url, name=name, shards=shards) as queue:
            queue.purge()
        left = client.keys("*")
        client.flushall()
        assert left == []


@pytest.fixture
def queue(delays: Callable[..., DelayQueue]) -> DelayQueue:
    return delays()


@pytest.fixture
def release(server: RedisServer, name: str, delays: Any, shell: str) -> Iterator[Callable[..., Running]]:
    """``release(publish, url=…, shell=…, **settings)``"""
    made: list[Running] = []

    def start(publish: Callable[[Any], Any], *, url: str | None = None, **settings: Any) -> Running:
        running = Running(
            settings.pop("shell", shell), url or server.url, settings.pop("name", name), publish, **settings
        )
        made.append(running)
        return running

    yield start
    late = [running for running in made if not running.stop(30)]
    assert not late, "a releaser did not stop within 30 s"


@pytest.fixture
def ledger(tmp_path: Path) -> FileLedger:
    return FileLedger(tmp_path / "ledger")


@pytest.fixture
def spawn(
    server: RedisServer, name: str, delays: Any, shell: str, ledger: FileLedger
) -> Iterator[Callable[..., ReleasingProcess]]:
    """``spawn(pause=…, check=…, each=…, url=…, **settings)``: a releasing process that is ready.

    ``ready=False``: one that has only begun to start, so that several can do so at once.
    """
    made: list[ReleasingProcess] = []

    def start(*, url: str | None = None, ready: bool = True, **settings: Any) -> ReleasingProcess:
        process = ReleasingProcess(settings.pop("shell", shell), url or server.url, name, ledger.path, **settings)
        made.append(process)
        if ready:
            process.expect("ready")
        return process

    yield start
    for process in made:
        process.close()


@pytest.fixture
def watching(admin: redis.Redis, name: str) -> Callable[..., bytes]:
    """``watching(url=None) → the loop that holds the watch``, waited for."""

    def wait(other_than: bytes | None = None, timeout: float = 30) -> bytes:
        def holder() -> bytes | None:
            value = admin.get(f"{{{name}:0}}:watch")
            return value if value != other_than else None

        return wait_until(holder, timeout=timeout)

    return wait


@pytest.fixture
def settle() -> Callable[[float], None]:
    """Lets some time pass in which something must not happen."""
    return time.sleep
