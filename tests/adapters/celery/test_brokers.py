"""Every kind of broker: a delayed task reaches it, the direct way where that is right and through kombu elsewhere."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import kombu
import pytest
import redis
from celery import Celery
from celery.exceptions import ImproperlyConfigured
from kombu import Exchange, Queue
from redis.credentials import UsernamePasswordCredentialProvider

from delayadapters import Batch, Claim, Published
from delayadapters.celery.fixup import installed
from delayadapters.celery.hosting import run_releaser
from delayadapters.celery.message import DUE_HEADER
from delayadapters.celery.publisher import CeleryPublisher
from delaytests import RedisServer, default_binary, wait_until
from delaytests.topology import Sentinel

LOG = "delayadapters.celery.direct"


@contextlib.contextmanager
def releasing(app: Celery) -> Iterator[None]:
    """The app's release loop, in a thread."""
    releaser = run_releaser(app)
    releaser.start()
    try:
        yield
    finally:
        assert releaser.stop(20)


def release(app: Celery) -> tuple[int, Published]:
    """Makes everything that waits due and releases it once; how many of it had to be published, and what came of it."""
    queue = app.delayadapters
    for job in queue.jobs().jobs:
        queue.release_now(job.id)
    claims: list[Claim] = list(queue.claim(100))
    publisher = CeleryPublisher(app)
    try:
        outcome = publisher.publish(Batch(claims, lambda: True))
    finally:
        publisher.close()
    kept = {*outcome.failed, *outcome.unpublished}
    queue.ack([claim for claim in claims if claim.entry not in kept])
    return len(claims), outcome


def arrived(app: Celery, queue: str) -> kombu.Message | None:
    """The next message of a queue, as a worker of this app would get it."""
    with app.connection_for_read() as connection, connection.channel() as channel:
        return Queue(queue, no_declare=True)(channel).get(no_ack=True)


# --------------------------------------------------------------------------------------------------------------- Redis


@pytest.fixture(scope="module")
def everywhere() -> Iterator[RedisServer]:
    """A Redis with a port and a Unix socket."""
    with RedisServer(unixsocket=True) as server:
        yield server


@pytest.fixture(scope="module")
def sentinel(everywhere: RedisServer) -> Iterator[Sentinel]:
    with Sentinel(everywhere, default_binary()) as running:
        yield running


@pytest.fixture(scope="module")
def tls_server() -> Iterator[RedisServer]:
    with RedisServer(tls=True) as server:
        yield server


PLACES: dict[str, Callable[[RedisServer], dict[str, Any]]] = {
    "plain": lambda s: {"broker_url": s.url},
    "prefix": lambda s: {"broker_url": s.url, "broker_transport_options": {"global_keyprefix": "shop{1}:"}},
    "sep": lambda s: {"broker_url": s.url, "broker_transport_options": {"sep": ":"}},
    "steps": lambda s: {
        "broker_url": s.url,
        "broker_transport_options": {"priority_steps": [0, 4, 7], "queue_order_strategy": "priority"},
    },
    "database": lambda s: {"broker_url": s.url.replace("/0", "/5")},
    "socket": lambda s: {"broker_url": f"redis+socket://{s.socket_path}?virtual_host=2"},
}


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "leased"])
@pytest.mark.parametrize("place", PLACES)
def test_a_broker_that_is_redis_is_where_tasks_wait_and_arrive(
    everywhere: RedisServer, make_app: Callable[..., Celery], place: str, direct: bool
) -> None:
    everywhere.client().flushall()
    app = make_app({**PLACES[place](everywhere), "delayadapters_direct": direct, "delayadapters_min_delay": 0})
    assert (installed(app).direct.refusal() is None) == direct  # type: ignore[union-attr]
    check_priorities_and_names(app, direct)


def check_priorities_and_names(app: Celery, direct: bool) -> None:
    """Messages of three priorities, to queues of two names, arrive by priority and each in its own queue."""
    for priority in (9, 0, 4):
        app.send_task("note", (priority,), task_id=f"p{priority}", queue="jobs", priority=priority, countdown=60)
    app.send_task("note", task_id="colons", queue="a:b:{c}", countdown=60)
    assert [arrived(app, "jobs"), arrived(app, "a:b:{c}")] == [None, None]
    published, outcome = release(app)
    assert outcome == Published()
    assert published == (0 if direct else 4)
    order = [arrived(app, "jobs").headers["id"] for _ in range(3)]  # type: ignore[union-attr]
    assert order == ["p0", "p4", "p9"]  # kombu on Redis: 0 is the most urgent
    assert arrived(app, "a:b:{c}").headers["id"] == "colons"  # type: ignore[union-attr]
    assert arrived(app, "jobs") is None
    now = app.delayadapters.stats()
    assert (now.waiting, now.leased, now.dead) == (0, 0, 0)


@pytest.mark.parametrize(("spelling", "direct"), [("url", True), ("settings", False)])
def test_tls(tls_server: RedisServer, make_app: Callable[..., Celery], direct: bool, spelling: str) -> None:
    assert tls_server.tls is not None
    files = tls_server.tls
    conf: dict[str, Any] = {"broker_url": tls_server.url}
    if spelling == "settings":
        names = {"ssl_ca_certs": str(files.ca), "ssl_certfile": str(files.cert), "ssl_keyfile": str(files.key)}
        conf = {"broker_url": f"rediss://127.0.0.1:{tls_server.port}/0", "broker_use_ssl": names}
    app = make_app({**conf, "delayadapters_direct": direct})
    app.send_task("note", task_id="secret", countdown=60)
    assert release(app) == (0 if direct else 1, Published())
    assert arrived(app, "celery").headers["id"] == "secret"  # type: ignore[union-attr]


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "leased"])
def test_sentinel(sentinel: Sentinel, everywhere: RedisServer, make_app: Callable[..., Celery], direct: bool) -> None:
    everywhere.client().flushall()
    url = f"sentinel://127.0.0.1:{sentinel.port}/4"
    options = {"master_name": sentinel.name, "global_keyprefix": "p:"}
    app = make_app({"broker_url": url, "broker_transport_options": options, "delayadapters_direct": direct})
    check_priorities_and_names(app, direct)
    app.send_task("note", countdown=60)
    assert everywhere.client(db=4).exists("{delayadapters:celery:redis:4:p%3A:0}:due")


def test_a_sentinel_of_its_own_and_one_of_the_result_backend(
    sentinel: Sentinel, everywhere: RedisServer, make_app: Callable[..., Celery]
) -> None:
    url = f"sentinel://127.0.0.1:{sentinel.port}/6"
    down = "sentinel://127.0.0.1:1/6"  # then the next one is asked
    of_its_own = {"broker_url": "amqp://", "delayadapters_redis_url": f"{down}?master_name={sentinel.name};{url}"}
    backends = {
        "broker_url": "amqp://",
        "result_backend": url,
        "result_backend_transport_options": {"master_name": sentinel.name},
    }
    for conf in (of_its_own, backends):
        everywhere.client().flushall()
        app = make_app(conf)
        app.send_task("note", countdown=60)
        assert everywhere.client(db=6).exists("{delayadapters:celery:amqp:/:0}:due")


@pytest.mark.slow
def test_sentinel_fails_over(start_redis: Callable[..., RedisServer], make_app: Callable[..., Celery]) -> None:
    """The master is killed while a task waits: the replica that takes its place releases it, and takes new ones."""
    master = start_redis(args=("--repl-diskless-sync-delay", "0"))
    replica = start_redis(args=("--replicaof", f"127.0.0.1 {master.port}"))
    with Sentinel(master, default_binary(), down_after=300) as sentinel:
        url = f"sentinel://127.0.0.1:{sentinel.port}/0"
        app = make_app({"broker_url": url, "broker_transport_options": {"master_name": sentinel.name}})
        wait_until(lambda: b"master_link_status:up" in _info(replica), 60)
        wait_until(lambda: sentinel.replicas() == 1, 60)
        with releasing(app):
            app.send_task("note", task_id="before", countdown=3)
            assert master.client().wait(1, 20_000) == 1
            master.kill()
            wait_until(lambda: sentinel.primary() == replica.port, 70, 0.05)  # a busy Sentinel pauses for 30 s (TILT)
            app.send_task("note", task_id="after", countdown=1)
            wait_until(lambda: replica.client().llen("celery") == 2, 60, 0.02)
        assert {arrived(app, "celery").headers["id"] for _ in range(2)} == {"before", "after"}  # type: ignore[union-attr]
        now = app.delayadapters.stats()
        assert (now.waiting, now.leased, now.dead) == (0, 0, 0)


def _info(server: RedisServer) -> bytes:
    answer: Any = server.client().execute_command("INFO", "replication", NEVER_DECODE=True)
    if isinstance(answer, dict):
        return "\n".join(f"{name}:{value}" for name, value in answer.items()).encode()
    return bytes(answer)


# ---------------------------------------------------------------------------------------------------------- credentials


class Credentials(UsernamePasswordCredentialProvider):
    """What a user of AWS IAM or Entra names in the URL."""

    def __init__(self) -> None:
        super().__init__("tasks", "of today")


PROVIDER = f"{Credentials.__module__}.{Credentials.__qualname__}"


@pytest.fixture(scope="module")
def guarded() -> Iterator[RedisServer]:
    """A Redis, with a Unix socket and a Sentinel, in which only the user of these credentials may do anything."""
    with RedisServer(unixsocket=True) as server:
        admin = server.client()
        name, password = Credentials().get_credentials()
        admin.acl_setuser(
            name, enabled=True, passwords=f"+{password}", keys=["*"], channels=["*"], categories=["+@all"]
        )
        admin.execute_command("ACL", "SETUSER", "default", "-@all", "+ping", "+info")
        yield server


@pytest.fixture
def clean(guarded: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, Credentials.__module__, sys.modules[__name__])
    with redis.Redis(port=guarded.port, credential_provider=Credentials()) as client:
        client.flushall()


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "leased"])
@pytest.mark.parametrize("spelling", ["url", "url with another user", "socket", "sentinel", "two sentinels"])
@pytest.mark.usefixtures("clean")
def test_a_broker_with_a_credential_provider(
    guarded: RedisServer, make_app: Callable[..., Celery], spelling: str, direct: bool
) -> None:
    with contextlib.ExitStack() as stack:
        conf: dict[str, Any] = {"delayadapters_direct": direct}
        if "sentinel" in spelling:
            sentinel = stack.enter_context(Sentinel(guarded, default_binary()))
            url = f"sentinel://127.0.0.1:{sentinel.port}/1"
            conf["broker_url"] = f"{url}?credential_provider={PROVIDER}" + (f";{url}" if "two" in spelling else "")
            conf["broker_transport_options"] = {"master_name": sentinel.name}
        elif spelling == "socket":
            conf["broker_url"] = f"redis+socket://{guarded.socket_path}?virtual_host=2&credential_provider={PROVIDER}"
        else:
            user = "somebody:else@" if "user" in spelling else ""
            conf["broker_url"] = f"redis://{user}127.0.0.1:{guarded.port}/3?credential_provider={PROVIDER}"
        app = make_app(conf)
        assert (installed(app).direct.refusal() is None) == direct  # type: ignore[union-attr]
        check_priorities_and_names(app, direct)


@pytest.mark.usefixtures("clean")
def test_another_place_with_a_credential_provider(guarded: RedisServer, make_app: Callable[..., Celery]) -> None:
    named = f"credential_provider={PROVIDER}"
    plain = f"redis://127.0.0.1:{guarded.port}/0"
    socket = f"redis+socket://{guarded.socket_path}?virtual_host=0"
    places: list[dict[str, Any]] = [
        {"delayadapters_redis_url": f"{plain}?{named}"},
        {"delayadapters_redis_url": f"unix://{guarded.socket_path}?db=0&{named}"},
        {"result_backend": f"{plain}?{named}"},
        {"result_backend": f"{socket}&{named}"},
        {"result_backend": plain, "redis_backend_credential_provider": PROVIDER},
        {"result_backend": plain, "redis_backend_credential_provider": Credentials()},
    ]
    for number, conf in enumerate(places, 1):
        app = make_app({"broker_url": "amqp://", **conf})
        app.send_task("note", countdown=60)
        assert app.delayadapters.stats().waiting == number


def test_a_credential_provider_that_is_none(make_app: Callable[..., Celery]) -> None:
    for wrong in ("nowhere.Provider", "collections.NoSuchClass", "collections.OrderedDict"):
        app = make_app({"broker_url": f"redis://127.0.0.1/0?credential_provider={wrong}"})
        with pytest.raises(ImproperlyConfigured, match=wrong):
            app.delayadapters.stats()


# ------------------------------------------------------------------------------------------------------ the same Redis?


def why_leased(app: Celery, caplog: pytest.LogCaptureFixture) -> str | None:
    """The reason, which is in the log as one line; None: released inside Redis."""
    caplog.clear()
    caplog.set_level(logging.INFO, LOG)
    direct = installed(app).direct  # type: ignore[union-attr]
    reason = direct.refusal()
    direct.refusal()
    lines = [record.getMessage() for record in caplog.records if record.name == LOG]
    assert len(lines) == (reason is not None)
    assert all(str(reason) in line for line in lines)
    return reason


def test_two_names_of_this_machine_are_one_redis_when_it_says_so(
    everywhere: RedisServer, make_app: Callable[..., Celery], caplog: pytest.LogCaptureFixture
) -> None:
    port, socket = everywhere.port, everywhere.socket_path
    with RedisServer(unixsocket=True) as other:
        for broker, ours, why in (
            (f"redis://127.0.0.1:{port}/0", f"redis://localhost:{port}/0", None),
            (f"redis://localhost:{port}/3", f"unix://{socket}?db=3", None),
            (f"redis+socket://{socket}?virtual_host=1", f"redis://127.0.0.1:{port}/1", None),
            (f"redis://127.0.0.1:{port}/0", f"redis://localhost:{port}/1", "host, port and database"),
            (f"redis://127.0.0.1:{port}/0", f"redis://localhost:{other.port}/0", "host, port and database"),
            (f"redis://127.0.0.1:{port}/0", f"unix://{other.socket_path}?db=0", "two servers"),
            (f"redis://127.0.0.1:{port}/0", "unix:///nowhere/redis.sock?db=0", "cannot be asked"),
        ):
            app = make_app({"broker_url": broker, "delayadapters_redis_url": ours})
            reason = why_leased(app, caplog)
            assert (why is None) == (reason is None), (broker, ours, reason)
            assert why is None or why in str(reason)
            if why is None:
                everywhere.client().flushall()
                check_priorities_and_names(app, direct=True)


def test_sentinel_and_the_masters_own_address_are_leased(
    sentinel: Sentinel, everywhere: RedisServer, make_app: Callable[..., Celery], caplog: pytest.LogCaptureFixture
) -> None:
    """They are one server only until the next failover."""
    everywhere.client().flushall()
    app = make_app({
        "broker_url": f"sentinel://127.0.0.1:{sentinel.port}/0",
        "broker_transport_options": {"master_name": sentinel.name},
        "delayadapters_redis_url": everywhere.url,
    })  # fmt: skip
    assert "the broker is sentinel://" in str(why_leased(app, caplog))
    check_priorities_and_names(app, direct=False)


# ------------------------------------------------------------------------------------------------------------ RabbitMQ


def rabbit_app(rabbit_broker: Any, make_app: Callable[..., Celery], queue: Queue, **conf: Any) -> Celery:
    app = make_app({**rabbit_broker.conf, **conf})
    app.conf.task_queues = [queue]
    app.conf.task_default_queue = queue.name
    app.conf.task_default_exchange_type = "direct"
    app.conf.task_default_routing_key = queue.routing_key or queue.name
    return app


@pytest.mark.parametrize("kind", ["classic", "quorum"])
def test_rabbitmq_queues_of_either_kind(rabbit_broker: Any, make_app: Callable[..., Celery], kind: str) -> None:
    """Half a second with quorum queues, which Celery itself refuses; the queue is declared by whoever releases."""
    name = rabbit_broker.queue
    queue = Queue(name, Exchange(f"{name}-exchange"), routing_key=name, queue_arguments={"x-queue-type": kind})
    app = rabbit_app(rabbit_broker, make_app, queue, delayadapters_min_delay=0)
    with pytest.raises(Exception, match="NOT_FOUND"):
        rabbit_broker.size()
    with releasing(app):
        result = app.send_task("note", countdown=0.5)
        message = wait_until(lambda: _exists(rabbit_broker) and rabbit_broker.get(), 20, 0.05)
    assert message.headers["id"] == result.id
    assert message.headers[DUE_HEADER]


def _exists(broker: Any) -> bool:
    try:
        return int(broker.size()) >= 0
    except Exception as error:
        assert "NOT_FOUND" in str(error)
        return False


def test_a_message_that_rabbitmq_does_not_confirm_is_kept(rabbit_broker: Any, make_app: Callable[..., Celery]) -> None:
    """A queue with room for one: the second publish is answered by a nack."""
    name = rabbit_broker.queue
    full = {"x-max-length": 1, "x-overflow": "reject-publish"}
    queue = Queue(name, Exchange(f"{name}-exchange"), routing_key=name, queue_arguments=full)
    app = rabbit_app(rabbit_broker, make_app, queue)
    for _ in range(2):
        app.send_task("note", countdown=60)
    published, outcome = release(app)
    assert published == 2
    [reason] = outcome.failed.values()
    assert "Nack" in reason
    assert outcome.broker_down is None
    assert rabbit_broker.size() == 1


@pytest.mark.parametrize("kind", ["topic", "fanout"])
def test_exchanges_that_route(rabbit_broker: Any, make_app: Callable[..., Celery], kind: str) -> None:
    name = rabbit_broker.queue
    exchange = Exchange(f"{name}-exchange", type=kind)
    key = "orders.#" if kind == "topic" else ""
    app = make_app(rabbit_broker.conf)
    with kombu.Connection(rabbit_broker.url) as connection, connection.channel() as channel:
        for queue in (name, f"{name}-2"):
            Queue(queue, exchange, routing_key=key)(channel).declare()
    app.send_task("note", task_id="to both", exchange=exchange, routing_key="orders.paid", countdown=60)
    app.send_task("note", task_id="to nobody", exchange=exchange, routing_key="users", countdown=60)
    assert release(app) == (2, Published())
    expected = {"to both"} if kind == "topic" else {"to both", "to nobody"}
    for queue in (name, f"{name}-2"):
        found = [rabbit_broker.get(queue) for _ in range(3)]
        assert {message.headers["id"] for message in found if message} == expected


def test_an_exchange_that_does_not_exist_is_a_clear_failure(
    rabbit_broker: Any, make_app: Callable[..., Celery]
) -> None:
    app = make_app(rabbit_broker.conf)
    app.send_task("note", exchange=f"{rabbit_broker.queue}-missing", routing_key="k", countdown=60)
    app.send_task("note", task_id="after", countdown=60)
    published, outcome = release(app)
    assert published == 2
    [reason] = outcome.failed.values()
    assert "NOT_FOUND" in reason
    assert f"{rabbit_broker.queue}-missing" in reason
    assert rabbit_broker.get().headers["id"] == "after"


@pytest.fixture
def virtual_host() -> Iterator[str]:
    """A virtual host of this test's own. Making one takes rights which rabbitmqctl has, as root."""
    command = shutil.which("rabbitmqctl")
    name = f"delaytest-{uuid.uuid4().hex[:8]}"
    if command is None or os.geteuid() != 0 or "DELAY_TEST_RABBIT" in os.environ:
        pytest.skip("no rabbitmqctl to make a virtual host with")
    subprocess.run([command, "-q", "add_vhost", name], check=True, timeout=60)
    try:
        subprocess.run(
            [command, "-q", "set_permissions", "-p", name, "guest", ".*", ".*", ".*"], check=True, timeout=60
        )
        yield name
    finally:
        subprocess.run([command, "-q", "delete_vhost", name], check=True, timeout=60)


def test_an_alternate_virtual_host(rabbit_broker: Any, make_app: Callable[..., Celery], virtual_host: str) -> None:
    """Each has a delay queue of its own in the same Redis, and its tasks arrive there only."""
    other_url = f"{rabbit_broker.url.rstrip('/')}/{virtual_host}"
    app, other = make_app(rabbit_broker.conf), make_app({**rabbit_broker.conf, "broker_url": other_url})
    assert other.delayadapters.name.endswith(virtual_host)
    app.send_task("note", task_id="here", countdown=60)
    other.send_task("note", task_id="there", countdown=60)
    for one in (app, other):
        assert release(one) == (1, Published())
    assert rabbit_broker.get().headers["id"] == "here"
    assert rabbit_broker.get() is None
    assert arrived(other, rabbit_broker.queue).headers["id"] == "there"  # type: ignore[union-attr]


# ------------------------------------------------------------------------------------------------- any other transport


def test_another_transport_with_a_real_worker(
    own_redis: RedisServer, make_app: Callable[..., Celery], worker: Callable[..., Any],
    executions: Callable[[], list[Any]], tmp_path: Path,
) -> None:  # fmt: skip
    """Messages as files. kombu locks and reads whole folders there, so this is no broker to be fast with."""
    own_redis.client().flushall()
    folders = {}
    for option in ("data_folder_in", "data_folder_out", "control_folder"):
        folder = tmp_path / ("control" if option == "control_folder" else "data")
        folder.mkdir(exist_ok=True)
        folders[option] = str(folder)
    conf = {
        "broker_url": "filesystem://",
        "broker_transport_options": folders,
        "delayadapters_redis_url": own_redis.url,
        "worker_enable_remote_control": False,
    }
    app = make_app(conf)
    assert "filesystem" in str(installed(app).direct.refusal())  # type: ignore[union-attr]
    running = worker(conf, "threads")
    begin = time.time()
    app.tasks["note"].apply_async(("x",), countdown=1)
    [run] = wait_until(lambda: executions(), 30, 0.05, message=running.log[-3000:])
    assert begin + 1 <= run.at
    assert run.headers[DUE_HEADER]
    wait_until(lambda: (now := app.delayadapters.stats()) and now.waiting == now.leased == now.dead == 0)


def test_the_memory_transport(own_redis: RedisServer, make_app: Callable[..., Celery]) -> None:
    """Of use in tests only: broker, worker and release loop are in one process."""
    own_redis.client().flushall()
    app = make_app({"broker_url": "memory://", "delayadapters_redis_url": own_redis.url})
    consumed: list[Any] = []

    def consume() -> None:
        queue = app.amqp.queues[app.conf.task_default_queue]

        def take(_body: Any, message: Any) -> None:
            consumed.append(message)
            message.ack()

        with app.connection_for_read() as connection, connection.Consumer(queue, callbacks=[take]):
            while not consumed:
                with contextlib.suppress(TimeoutError):
                    connection.drain_events(timeout=0.1)

    thread = threading.Thread(target=consume, daemon=True)
    thread.start()
    with releasing(app):
        result = app.send_task("here", countdown=1)
        wait_until(lambda: consumed, 20)
    thread.join(10)
    assert consumed[0].headers["id"] == result.id
