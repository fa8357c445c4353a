"""Direct release: the claim script pushes what kombu would have pushed, exactly once, or kombu does the publishing."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from typing import Any

import pytest
from celery import Celery
from kombu import Exchange, Queue
from kombu.transport import redis as kombu_redis

from delayadapters import Outcome
from delayadapters.celery import install
from delayadapters.celery.direct import DirectRelease
from delayadapters.celery.fixup import installed
from delayadapters.celery.message import DUE_HEADER, Message
from delaytests import RedisServer, wait_until

LOG = "delayadapters.celery.direct"


def release_all(app: Celery) -> int:
    """Makes everything that waits due, and claims; how many of it a publisher would have to publish."""
    queue = app.delayadapters
    for job in queue.jobs().jobs:
        assert queue.release_now(job.id) is Outcome.RESCHEDULED
    return len(queue.claim(100))


def lists(server: RedisServer) -> dict[bytes, list[Any]]:
    """Every list in the broker's database, parsed; they are gone afterwards."""
    client = server.client()
    found = {}
    for key in client.scan_iter(_type="list"):
        found[key] = [json.loads(value) for value in client.lrange(key, 0, -1)]
        client.delete(key)
    return found


def bindings(server: RedisServer) -> dict[bytes, set[bytes]]:
    client = server.client()
    return {key: client.smembers(key) for key in client.scan_iter(_type="set") if b"_kombu" in key}


# ------------------------------------------------------------------------------------------------------------ fidelity

OPTIONS: list[dict[str, Any]] = [
    {},
    *({"priority": n} for n in (0, 2, 3, 5, 6, 9, 20)),
    {"queue": "a:b:{c}"},
    {"queue": "schlange-ü"},
    {"queue": "q", "routing_key": "another"},
    *({"serializer": name} for name in ("json", "pickle", "yaml", "msgpack")),
    *({"compression": name} for name in ("zlib", "bzip2")),
    {"serializer": "pickle", "compression": "zlib", "priority": 3},
    {"headers": {"mine": {"deep": [1, None, "ü"], "at": datetime(2030, 1, 2, tzinfo=timezone.utc)}}},
    {"time_limit": 10, "soft_time_limit": 5, "ignore_result": True, "shadow": 'quo"te'},
    {"group_id": "g", "group_index": 3, "root_id": "r", "parent_id": "p", "retries": 2},
    {"reply_to": "somebody", "delivery_mode": 1, "message_id": "m", "stray": [1, {"a": "b"}]},
    {"stamped_headers": ["who"], "who": "me"},
    {"exchange": "", "routing_key": "straight"},
    {"mandatory": True},
]
CONFS: list[dict[str, Any]] = [
    {"task_protocol": 1},
    {"broker_transport_options": {"global_keyprefix": "pre{fix}:"}},
    {"broker_transport_options": {"sep": ":"}},
    {"broker_transport_options": {"priority_steps": [0, 1, 5], "global_keyprefix": "p:"}},
    {"task_default_delivery_mode": 1, "task_default_priority": 7},
    {"task_default_exchange": "shop", "task_default_routing_key": "orders"},
]


@pytest.mark.parametrize(
    ("options", "conf"), [*((one, {}) for one in OPTIONS), *(({"priority": 4}, one) for one in CONFS)], ids=str
)
def test_the_list_holds_what_kombu_would_have_pushed(
    redis_broker: Any, make_app: Callable[..., Celery], options: Any, conf: Any
) -> None:
    app = make_app({**redis_broker.conf, **conf})
    call = {"args": (1, "ü", 'a"b\\'), "kwargs": {"x": [2]}, "task_id": "the-id", **options}
    app.send_task("note", countdown=60, **call)
    declared = bindings(redis_broker.redis)
    stored = Message.unpack(app.delayadapters.get("the-id").payload)
    assert release_all(app) == 0
    ours = lists(redis_broker.redis)
    redis_broker.redis.client().flushall()
    Celery.send_task(app, "note", **call)
    native = lists(redis_broker.redis)

    for [message] in native.values():
        body = message["body"]
        assert message["properties"].pop("delivery_tag")
    for [message] in ours.values():
        assert message["properties"].pop("delivery_tag")
        assert datetime.fromisoformat(message["headers"].pop(DUE_HEADER)).tzinfo is not None
    assert ours == native
    assert len(ours) == 1
    assert declared == bindings(redis_broker.redis)
    assert stored.properties.get("correlation_id") == "the-id"
    assert kombu_redis.Channel.codecs["base64"].encode(stored.body) == body


def test_numbers_which_json_does_not_have(app: Celery, redis_broker: Any) -> None:
    app.send_task("note", headers={"odd": [float("nan"), float("inf")]}, countdown=60)
    assert release_all(app) == 0
    [[message]] = lists(redis_broker.redis).values()
    assert str(message["headers"]["odd"]) == "[nan, inf]"


def test_tags_differ(app: Celery, redis_broker: Any) -> None:
    for _ in range(20):
        app.send_task("note", task_id="same", countdown=60)
    assert release_all(app) == 0
    [messages] = lists(redis_broker.redis).values()
    assert len({message["properties"]["delivery_tag"] for message in messages}) == len(messages) == 20


def test_the_due_header_follows_a_reschedule(app: Celery, redis_broker: Any) -> None:
    app.send_task("note", task_id="moved", countdown=60)
    at = datetime(2000, 2, 29, 1, 2, 3, tzinfo=timezone.utc)
    before = datetime.now(timezone.utc)
    app.delayadapters.reschedule("moved", at=at)
    due = app.delayadapters.get("moved").due_at
    assert app.delayadapters.claim() == []
    [[message]] = lists(redis_broker.redis).values()
    assert message["headers"][DUE_HEADER] == due.isoformat()
    assert due >= before, "a time in the past means now"


# ---------------------------------------------------------------------------------------------------------- not direct


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == LOG and record.levelno == logging.INFO]


@pytest.mark.parametrize(
    ("conf", "why"),
    [
        ({"broker_url": "amqp://"}, "transport is"),
        ({"broker_url": "sentinel://h:1", "broker_transport_options": {"master_name": "m"}}, "broker is sentinel://"),
        ({"broker_url": "sentinel://h:1"}, "master_name"),
        ({"broker_url": "redis://localhost:6379/1"}, "wait in redis://localhost:6379/0"),
        ({"broker_url": "redis://localhost:6380/0"}, "broker is redis://localhost:6380/0"),
        ({"broker_url": "redis://other:6379/0"}, "broker is redis://other:6379/0"),
        ({"broker_url": "rediss://localhost:6379/0"}, "broker is rediss://localhost:6379/0"),
        ({"broker_url": "redis://somebody:x@localhost:6379/0"}, "somebody@"),
        ({"broker_url": "redis+socket:///nowhere/redis.sock"}, "unix://"),
        ({"broker_url": "redis://localhost:6379/0;redis://other/0"}, "failover"),
        ({"broker_url": "redis://localhost:6379/0", "delayadapters_redis_url": "redis://localhost/0?db=1"}, "/1"),
    ],
    ids=str,
)
def test_another_place_means_leased_and_one_line_says_why(
    conf: dict[str, Any], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, LOG)
    app = Celery("x", set_as_current=False)
    app.conf.update({"delayadapters_redis_url": "redis://localhost:6379/0", **conf})
    direct = DirectRelease(app)
    assert why in (direct.refusal() or "")
    assert direct.refusal() is direct.refusal()
    [line] = said(caplog)
    assert why in line


@pytest.mark.parametrize(
    ("broker", "ours"),
    [
        ("redis://localhost:6379/0", None),
        ("redis://localhost/", "redis://localhost:6379"),
        ("redis://:secret@localhost/3", "redis://:secret@localhost:6379/3"),
        ("redis://me:secret@h:1/3", "redis://me:other@h:1?db=3"),
        ("rediss://h:2/0", "rediss://h:2/0?ssl_cert_reqs=none"),
        ("redis+socket:///nowhere/redis.sock?virtual_host=2", "unix:///nowhere/redis.sock?db=2"),
        ("sentinel://:x@a:1/3;sentinel://b/3", "sentinel://:y@b:26379/3;sentinel://a:1"),
    ],
)
def test_the_same_redis_in_two_spellings(broker: str, ours: str | None) -> None:
    app = Celery("x", set_as_current=False)
    app.conf.update(broker_url=broker, delayadapters_redis_url=ours)
    app.conf.broker_transport_options = {"master_name": "mymaster"}
    assert DirectRelease(app).refusal() is None


@pytest.mark.parametrize("value", [False, "no"])
def test_it_can_be_switched_off(
    redis_broker: Any, make_app: Callable[..., Celery], value: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, LOG)
    app = make_app({**redis_broker.conf, "delayadapters_direct": value})
    app.send_task("note", countdown=60)
    assert release_all(app) == 1
    assert said(caplog) == []


EXPIRING = Queue("expiring", Exchange("expiring"), routing_key="expiring", expires=60)
GOING = Queue("going", Exchange("going"), routing_key="going", auto_delete=True)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"expires": 3600}, "expires"),
        ({"expiration": 3600}, "expiration"),
        ({"exchange": "named", "routing_key": "k"}, "exchange"),
        ({"exchange": Exchange("all", type="fanout"), "routing_key": "k"}, "exchange"),
        ({"queue": EXPIRING}, "a queue that expires"),
        ({"queue": GOING}, "a queue that expires"),
    ],
    ids=str,
)
def test_a_message_that_one_push_cannot_be_is_leased(
    app: Celery, options: dict[str, Any], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, LOG)
    for _ in range(3):
        app.send_task("note", countdown=60, **options)
    app.send_task("note", countdown=60)
    [line] = said(caplog)
    assert why in line
    assert release_all(app) == 3


@pytest.mark.parametrize("method", ["prepare_message", "_put", "_q_for_pri"])
def test_a_kombu_that_does_it_otherwise_means_leased(
    app: Celery, method: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The contract check: once for every list, kombu's own publish is recorded and compared."""
    real = getattr(kombu_redis.Channel, method)

    def put(self: Any, queue: str, message: Any, **kwargs: Any) -> None:
        real(self, queue, {**message, "more": 1}, **kwargs)

    def prepared(self: Any, body: Any, *args: Any, **kwargs: Any) -> Any:
        message = real(self, body, *args, **kwargs)
        message["properties"]["serial"] = random.random()
        return message

    def pushed_twice(self: Any, queue: str, pri: Any) -> str:
        self.conn_or_acquire().__enter__().lpush("elsewhere", "x")
        return str(real(self, queue, pri))

    monkeypatch.setattr(
        kombu_redis.Channel, method, {"_put": put, "prepare_message": prepared, "_q_for_pri": pushed_twice}[method]
    )
    caplog.set_level(logging.INFO, LOG)
    for _ in range(2):
        app.send_task("note", countdown=60)
    assert len(said(caplog)) == 1
    assert len(app.delayadapters.jobs().jobs) == 2
    assert [job for job in app.delayadapters.jobs().jobs if job.payload[:1] == b'"'] == []


def test_a_forked_child_decides_for_itself(app: Celery) -> None:
    app.send_task("note", countdown=60)
    with installed(app)._direct._lock:  # type: ignore[union-attr]  # somebody in the parent is deciding
        pid = os.fork()
        if pid == 0:
            code = 1
            with contextlib.suppress(BaseException):
                app.send_task("note", countdown=60, priority=3)
                code = 0
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    assert len(app.delayadapters.jobs().jobs) == 2
    assert release_all(app) == 0


# ------------------------------------------------------------------------------------------------------------ crashes

RELEASER = """
import sys, time
from celery import Celery
from delayadapters.celery import install
from delayadapters.celery.hosting import run_releaser
app = Celery("crash", broker=sys.argv[1])
install(app)
run_releaser(app, batch=20).run()
"""


def releaser(server: RedisServer) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", RELEASER, server.url], stderr=subprocess.DEVNULL)


@contextlib.contextmanager
def releasing(server: RedisServer, count: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    processes = [releaser(server) for _ in range(count)]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def fill(app: Celery, count: int, seconds: float) -> set[str]:
    return {app.send_task("note", (n,), countdown=2 + n / count * seconds).id for n in range(count)}


def in_broker(server: RedisServer) -> Counter[str]:
    return Counter(json.loads(value)["headers"]["id"] for value in server.client().lrange("celery", 0, -1))


def test_releasing_processes_killed_while_they_release_lose_and_double_nothing(own_redis: RedisServer) -> None:
    server = own_redis
    server.client().flushall()
    app = Celery("crash", broker=server.url, set_as_current=False)
    install(app)
    with releasing(server, 2) as processes:
        ids = fill(app, 1500, 4.0)
        client = server.client()
        rnd = random.Random(3)
        kills = 0
        while client.llen("celery") < len(ids):
            seen = client.llen("celery")
            wait_until(lambda seen=seen: client.llen("celery") >= min(seen + 100, len(ids)), 30)  # type: ignore[misc]
            if kills < 6 and client.llen("celery") < len(ids):
                time.sleep(rnd.random() * 0.005)
                victim = processes.pop(0)
                victim.send_signal(signal.SIGKILL)
                victim.wait()
                processes.append(releaser(server))
                kills += 1
    assert kills >= 3
    assert in_broker(server) == Counter(ids)
    now = app.delayadapters.stats()
    assert (now.waiting, now.leased, now.dead) == (0, 0, 0)
    app.delayadapters.close()


def test_a_redis_killed_while_it_releases_loses_and_doubles_nothing() -> None:
    with RedisServer(aof="always") as server, releasing(server, 1):
        app = Celery("crash", broker=server.url, set_as_current=False)
        install(app)
        ids = fill(app, 1000, 3.0)
        for share in (0.2, 0.5, 0.8):
            wait_until(lambda share=share: server.client().llen("celery") >= share * len(ids), 30)  # type: ignore[misc]
            server.kill()
            server.restart()
        wait_until(lambda: server.client().llen("celery") >= len(ids), 30)
        assert in_broker(server) == Counter(ids)
        now = app.delayadapters.stats()
        assert (now.waiting, now.leased, now.dead) == (0, 0, 0)
        app.delayadapters.close()
