"""A Redis of our own, RabbitMQ when there is one, and workers as real processes."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import json
import logging
import os
import signal
import subprocess
import sys
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import kombu
import pytest
from celery import Celery

from delayadapters.celery.fixup import installed
from delaytests import RedisServer, wait_until
from delaytests.celerys import tasks_as_found

HERE = Path(__file__).parent
RABBIT = os.environ.get("DELAY_TEST_RABBIT", "amqp://guest:guest@127.0.0.1:5672//")

_spec = importlib.util.spec_from_file_location("delay_app", HERE / "delay_app.py")
assert _spec is not None
assert _spec.loader is not None
delay_app = importlib.util.module_from_spec(_spec)
sys.modules["delay_app"] = delay_app
_spec.loader.exec_module(delay_app)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Celery and kombu leave sockets to the garbage collector, and warn about themselves.
    for item in items:
        if HERE in item.path.parents:
            for what in ("pytest.PytestUnraisableExceptionWarning", "ResourceWarning", "DeprecationWarning"):
                item.add_marker(pytest.mark.filterwarnings(f"ignore::{what}"))


def pytest_unconfigure() -> None:
    """pytest collects garbage once more after the last test, when no test's marks apply."""
    warnings.simplefilter("ignore", pytest.PytestUnraisableExceptionWarning)


@pytest.fixture(autouse=True, scope="module")
def _collected() -> Iterator[None]:
    """Collect each module's sockets while the marks above apply, not in the midst of somebody else's tests."""
    yield
    gc.collect()


_LOGGERS = [logging.getLogger(name) for name in (None, "celery", "celery.task", "celery.redirected")]
_LOGGING = [(logger, logger.level, logger.propagate) for logger in _LOGGERS]


@pytest.fixture(autouse=True)
def _logging_as_found() -> None:
    """A worker in this process, a fixture's or another module's, sets the root logger to show errors only."""
    for logger, level, propagate in _LOGGING:
        logger.setLevel(level)
        logger.propagate = propagate


@pytest.fixture(autouse=True)
def _tasks_as_found() -> Iterator[None]:
    with tasks_as_found():
        yield


# ------------------------------------------------------------------------------------------------------------- brokers


@dataclass
class Broker:
    """Where the tests' messages go, and the Redis where they wait."""

    url: str
    redis: RedisServer
    queue: str
    kind: str
    direct: bool = True

    @property
    def conf(self) -> dict[str, Any]:
        return {
            "broker_url": self.url,
            "delayadapters_redis_url": self.redis.url,
            "delayadapters_direct": self.direct,
            "task_default_queue": self.queue,
            "result_backend": self.redis.url.replace("/0", "/9"),
            "broker_connection_retry_on_startup": True,
            "broker_pool_acquire_timeout": 10,
        }

    def get(self, queue: str | None = None) -> kombu.Message | None:
        """The next message of a queue, taken from it."""
        with kombu.Connection(self.url) as connection, connection.channel() as channel:
            return kombu.Queue(queue or self.queue, no_declare=True)(channel).get(no_ack=True)

    def size(self, queue: str | None = None) -> int:
        with kombu.Connection(self.url) as connection, connection.channel() as channel:
            if self.kind == "redis":
                return int(channel._size(queue or self.queue))
            return int(channel.queue_declare(queue or self.queue, passive=True).message_count)


@pytest.fixture(scope="session")
def own_redis() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


def _rabbit_answers() -> bool:
    try:
        with kombu.Connection(RABBIT, connect_timeout=2) as connection:
            connection.connect()
    except OSError:
        return False
    return True


def _broker(kind: str, server: RedisServer, request: pytest.FixtureRequest) -> Iterator[Broker]:
    """A module that sets ``DIRECT = False`` tests leased release on Redis, too."""
    direct = getattr(request.module, "DIRECT", True)
    queue = f"delaytest-{uuid.uuid4().hex[:12]}"
    if kind == "redis":
        server.client().flushall()
        yield Broker(server.url, server, queue, kind, direct)
        return
    if not _rabbit_answers():
        reason = f"no RabbitMQ at {RABBIT.split('@')[-1]} (DELAY_TEST_RABBIT)"
        pytest.fail(reason) if "CI" in os.environ else pytest.skip(reason)
    server.client().flushall()
    yield Broker(RABBIT, server, queue, kind, direct)
    with kombu.Connection(RABBIT) as connection:
        for name in (queue, f"{queue}-2", f"{queue}-exchange"):
            for delete in ("queue_delete", "exchange_delete"):
                with contextlib.suppress(Exception), connection.channel() as channel:
                    getattr(channel, delete)(name)


@pytest.fixture
def redis_broker(request: pytest.FixtureRequest, own_redis: RedisServer) -> Iterator[Broker]:
    yield from _broker("redis", own_redis, request)


@pytest.fixture
def rabbit_broker(request: pytest.FixtureRequest, own_redis: RedisServer) -> Iterator[Broker]:
    yield from _broker("rabbit", own_redis, request)


@pytest.fixture(params=["redis", "rabbit"])
def broker(request: pytest.FixtureRequest, own_redis: RedisServer) -> Iterator[Broker]:
    yield from _broker(request.param, own_redis, request)


@pytest.fixture
def make_app() -> Iterator[Callable[..., Celery]]:
    """``make_app(conf, installed=True) -> Celery``; its pools and its queue are closed after the test."""
    made: list[Celery] = []

    def make(conf: dict[str, Any], installed: bool = True, **options: Any) -> Celery:
        app = delay_app.make_app(conf, installed, **options)
        made.append(app)
        return app

    yield make
    for app in made:
        close_app(app)


def close_app(app: Celery) -> None:
    fixup = installed(app)
    if fixup is not None and fixup._queue is not None:
        fixup._queue.close()
    app.close()


@pytest.fixture
def app(redis_broker: Broker, make_app: Callable[..., Celery]) -> Celery:
    """An app with its broker and its delays on the tests' Redis."""
    return make_app(redis_broker.conf)


# ------------------------------------------------------------------------------------------------------------- workers


def processes(session: int) -> dict[int, str]:
    """Live processes of a session (each worker has its own): pid → command line."""
    found = {}
    listing = subprocess.run(["ps", "-A", "-o", "pid=,sess=,stat=,args="], capture_output=True, text=True, check=True)
    for line in listing.stdout.splitlines():
        pid, sess, stat, args = line.split(None, 3)
        if int(sess) == session and not stat.startswith("Z"):
            found[int(pid)] = args
    return found


@dataclass
class Execution:
    task: str
    id: str
    at: float
    pid: int
    retries: int
    eta: Any
    headers: dict[str, Any] | None
    args: list[Any] = field(default_factory=list)
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass
class Celeryd:
    """A process of ``celery -A delay_app …`` in a session of its own."""

    process: subprocess.Popen[bytes]
    log_file: Path

    @property
    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    @property
    def tree(self) -> set[int]:
        return set(processes(self.process.pid))

    def children(self) -> set[int]:
        return self.tree - {self.process.pid}

    def wait_log(self, text: str, times: int = 1) -> None:
        def said() -> bool:
            if self.process.poll() is not None:
                pytest.fail(f"the process ended with {self.process.returncode}:\n{self.log}")
            return self.log.count(text) >= times

        try:
            wait_until(said, 60, 0.02)
        except AssertionError as error:
            raise AssertionError(f"{text!r} is not in the log:\n{self.log[-3000:]}") from error

    def kill_tree(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def stop(self, number: int = signal.SIGTERM, timeout: float = 20) -> int:
        self.process.send_signal(number)
        return self.process.wait(timeout)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "executions"


@pytest.fixture
def executions(out: Path) -> Callable[[], list[Execution]]:
    def read() -> list[Execution]:
        if not out.exists():
            return []
        text = out.read_text()
        return [Execution(**json.loads(line)) for line in text[: text.rfind("\n") + 1].splitlines()]

    return read


@pytest.fixture
def celeryd(out: Path, tmp_path: Path) -> Iterator[Callable[..., Celeryd]]:
    """``celeryd(conf, *arguments, ready="ready.", program=None) -> Celeryd``, started and ready; killed after the test.

    ``program``: what stands before ``-A delay_app``; ``python -m celery`` of this environment.
    """
    started: list[Celeryd] = []

    def start(
        conf: dict[str, Any], *arguments: str, ready: str | None = " ready.", program: Sequence[str] | None = None
    ) -> Celeryd:
        log_file = tmp_path / f"log-{len(started)}"
        environment = {
            **os.environ,
            "DELAY_TEST_CONF": json.dumps(conf),
            "DELAY_TEST_OUT": str(out),
            "C_FORCE_ROOT": "1",
            "PYTHONUNBUFFERED": "1",
        }
        with log_file.open("wb") as log:
            process = subprocess.Popen(
                [*(program or (sys.executable, "-m", "celery")), "-A", "delay_app", *arguments],
                cwd=HERE, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        found = Celeryd(process, log_file)
        started.append(found)
        if ready:
            found.wait_log(ready)
        return found

    yield start
    for one in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(one.process.pid, signal.SIGKILL)
        one.process.wait()


@pytest.fixture
def worker(celeryd: Callable[..., Celeryd]) -> Callable[..., Celeryd]:
    """``worker(conf, pool="prefork", *arguments) -> Celeryd``"""

    def start(conf: dict[str, Any], pool: str = "prefork", *arguments: str) -> Celeryd:
        quiet: Sequence[str] = ("--without-mingle", "--without-gossip", "-l", "INFO", "-n", f"w{time.time_ns()}@%h")
        return celeryd(conf, "worker", "-P", pool, "-c", "1" if pool == "solo" else "2", *quiet, *arguments)

    return start


@pytest.fixture
def run_example(redis_broker: Broker) -> Callable[[Path], str]:
    """``run_example(folder)``: its run.py on this Redis has succeeded; what it said."""

    def run(folder: Path) -> str:
        done = subprocess.run(
            [sys.executable, "run.py"],
            cwd=folder,
            env=os.environ | {"REDIS_URL": redis_broker.redis.url, "C_FORCE_ROOT": "1"},
            capture_output=True,
            text=True,
            timeout=220,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run
