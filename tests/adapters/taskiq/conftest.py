"""A Redis of our own, brokers of every kind, workers in this process and as real ones."""

from __future__ import annotations

import gc
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from taskiq_redis import ListQueueBroker, RedisAsyncResultBackend

from delayadapters.taskiq import DelayMiddleware
from delaytests import RedisServer
from delaytests.taskiqs import App

HERE = Path(__file__).parent
PATIENCE = 60.0
"""Seconds for storing a task: what is asserted of the time-out has one of its own."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # taskiq and its brokers leave sockets and tasks to the garbage collector, and warn about themselves.
    for item in items:
        if HERE in item.path.parents:
            for what in ("pytest.PytestUnraisableExceptionWarning", "ResourceWarning", "DeprecationWarning"):
                item.add_marker(pytest.mark.filterwarnings(f"ignore::{what}"))
            if "app" in getattr(item, "fixturenames", ()):
                # On a machine that others keep busy a process takes half a minute to begin.
                item.add_marker(pytest.mark.timeout(400))
    # It only waits, and long: beside all the others, not after them.
    items.sort(key=lambda item: "test_idle_brokers_then" not in item.name)


@pytest.fixture(scope="module", autouse=True)
def _leftovers() -> Iterator[None]:
    """Collected here, where the warnings about them are ignored, and not in somebody else's test."""
    yield
    gc.collect()


@pytest.fixture(scope="session")
def _server() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture
def server(_server: RedisServer) -> RedisServer:
    """A Redis for the delays, the Redis brokers and the results; empty."""
    _server.client().flushall()
    return _server


@pytest.fixture
def client(server: RedisServer) -> redis.Redis:
    return server.client()


@pytest.fixture
def queue_name() -> str:
    return f"delaytest-{uuid.uuid4().hex[:12]}"


@pytest.fixture
def make_broker(server: RedisServer, queue_name: str) -> Callable[..., Any]:
    """``make_broker(cls=ListQueueBroker, *middlewares, delay={…}, **options)``: with results and a DelayMiddleware,
    which comes first, as ``broker.delay``."""

    def make(cls: Any = ListQueueBroker, *middlewares: Any, delay: dict[str, Any] | None = None, **options: Any) -> Any:
        if cls.__module__.startswith("taskiq_redis"):
            options = {"url": server.url, "queue_name": queue_name, "socket_timeout": None} | options
        broker = cls(**options)
        middleware = DelayMiddleware(**{"url": server.url, "timeout": PATIENCE, **(delay or {})})
        broker.with_middlewares(middleware, *middlewares)
        broker.with_result_backend(RedisAsyncResultBackend(server.url))
        broker.delay = middleware
        return broker

    return make


@pytest.fixture
def app(tmp_path: Path, server: RedisServer, queue_name: str) -> Iterator[App]:
    made = App(
        tmp_path,
        {"DELAY_URL": server.url, "BROKER_URL": server.url, "QUEUE": queue_name, "BROKER": "ListQueueBroker"},
    )
    yield made
    made.close()
