"""A released message is the one that Celery would have sent, less its eta, more one header: compared byte by byte.

Every case is sent twice, by an app with us and by one without, and both messages are read off the broker as they are:
Redis' lists as JSON, RabbitMQ's with all properties.
"""

from __future__ import annotations

import base64
import json
import marshal
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import kombu
import pytest
from celery import Celery
from celery._state import _task_stack
from kombu import Exchange, Queue, compression, serialization

from delayadapters import Batch, Outcome
from delayadapters.celery.message import DUE_HEADER
from delayadapters.celery.publisher import CeleryPublisher

# -------------------------------------------------------------------------------------------- serialisers, compressors


@pytest.fixture(scope="module", autouse=True)
def _registered(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What kombu does not have by itself: a serialiser and a compressor of a user's own, and Celery's ``auth``."""
    serialization.register("marshal", marshal.dumps, marshal.loads, "application/x-marshal", "binary")
    compression.register(lambda body: body[::-1], lambda body: body[::-1], "application/x-reverse", aliases=["reverse"])
    registry = serialization.registry
    default = registry._default_encode, registry._default_content_type, registry._default_content_encoding
    disabled = set(registry._disabled_content_types)
    app = Celery(set_as_current=False, task_serializer="auth", accept_content=["auth"], **certificate(tmp_path_factory))
    app.setup_security()
    # setup_security is the whole process': the other serialisers and the default one come back.
    registry._default_encode, registry._default_content_type, registry._default_content_encoding = default
    registry._disabled_content_types.clear()
    registry._disabled_content_types.update(disabled)
    yield
    for name in ("marshal", "auth"):
        serialization.unregister(name)
    compression._encoders.pop("application/x-reverse")
    compression._decoders.pop("application/x-reverse")
    compression._aliases.pop("reverse")


def certificate(folders: pytest.TempPathFactory) -> dict[str, str]:
    """Celery's ``security_*`` settings, for a key and a certificate made here."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import rsa
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    folder: Path = folders.mktemp("certificates")
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "tests")])
    now = datetime.now(timezone.utc)
    signed = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .sign(key, hashes.SHA256())
    )
    (folder / "key").write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.TraditionalOpenSSL, NoEncryption()))
    (folder / "cert.pem").write_bytes(signed.public_bytes(Encoding.PEM))
    return {
        "security_key": str(folder / "key"),
        "security_certificate": str(folder / "cert.pem"),
        "security_cert_store": str(folder / "*.pem"),
    }


SERIALIZERS = ("json", "pickle", "yaml", "msgpack", "marshal", "auth")
COMPRESSIONS = ("zlib", "bzip2", "lzma", "reverse", *(n for n in ("brotli", "zstd") if n in compression._aliases))

# ----------------------------------------------------------------------------------------------------------- the wire


@pytest.fixture(params=["redis, inside Redis", "redis, through kombu", "rabbitmq"])
def broker(request: pytest.FixtureRequest) -> Any:
    found = request.getfixturevalue("rabbit_broker" if request.param == "rabbitmq" else "redis_broker")
    found.direct = request.param == "redis, inside Redis"
    return found


def taken(broker: Any) -> list[dict[str, Any]]:
    """Everything in the broker's queues, taken out, as plain values."""
    if broker.kind == "redis":
        client = broker.redis.client()
        found = []
        for key in sorted(client.scan_iter(_type="list")):
            found += [{"list": key, **json.loads(value)} for value in client.lrange(key, 0, -1)]
            client.delete(key)
        for one in found:
            assert one["properties"].pop("delivery_tag")
            one["body"] = base64.b64decode(one["body"])
        return found
    found = []
    with kombu.Connection(broker.url) as connection, connection.channel() as channel:
        for queue in (broker.queue, f"{broker.queue}-2"):
            kombu.Queue(queue, Exchange(queue), queue)(channel).declare()  # as Celery does
            while (got := channel.basic_get(queue, no_ack=True)) is not None:
                found.append(
                    {
                        "list": queue,
                        "body": got.body if isinstance(got.body, bytes) else got.body.encode(),
                        "headers": dict(got.headers),
                        "content-type": got.properties["content_type"],
                        "content-encoding": got.properties["content_encoding"],
                        "properties": {k: v for k, v in got.properties.items() if k != "application_headers"},
                        "delivery_info": {k: got.delivery_info[k] for k in ("exchange", "routing_key", "redelivered")},
                    }
                )
    return found


def release(app: Celery) -> None:
    """Everything that waits, released now: by the claim itself, or by a publisher."""
    queue = app.delayadapters
    for job in queue.jobs().jobs:
        assert queue.release_now(job.id) is Outcome.RESCHEDULED
    claims = queue.claim(100)
    publisher = CeleryPublisher(app)
    try:
        outcome = publisher.publish(Batch(list(claims), lambda: True))
    finally:
        publisher.close()
    assert not outcome.failed, outcome
    assert outcome.broker_down is None
    queue.ack(claims)


def content(message: dict[str, Any]) -> Any:
    body = message["body"]
    if message["headers"].get("compression"):
        body = compression.decompress(body, message["headers"]["compression"])
    return serialization.loads(body, message["content-type"], message["content-encoding"], force=True)


def less_eta(app: Celery, message: dict[str, Any], ours: bool) -> dict[str, Any]:
    """The message without what is meant to differ; what ours has there is checked."""
    headers = dict(message["headers"])
    if message["properties"].get("reply_to") == app.thread_oid:
        message["properties"]["reply_to"] = "this app, this thread"
    if ours:
        due = headers.pop(DUE_HEADER)
        assert datetime.fromisoformat(due).tzinfo is not None
        if "headers" in headers:  # what task.request.headers would show
            headers["headers"] = dict(headers["headers"])
            assert headers["headers"].pop(DUE_HEADER) == due
    assert DUE_HEADER not in headers
    body = message["body"]
    if "eta" in headers:  # protocol 2
        assert (headers.pop("eta") is None) is ours
        if message["content-type"] == "application/data":  # signed: no signature is made twice
            body = content(message)
    else:
        body = content(message)
        assert (body.pop("eta") is None) is ours
        body["expires"] = body["expires"] and "…"
    if headers.get("expires"):
        headers["expires"] = "…"  # of two calls: test_expires compares them
        expiration = message["properties"].get("expiration")
        message["properties"]["expiration"] = expiration and "…"
    return {**message, "headers": headers, "body": body}


class Pair:
    """The app with us, and the app without."""

    def __init__(self, broker: Any, make_app: Callable[..., Celery], **conf: Any) -> None:
        self.broker = broker
        self.apps = [make_app({**broker.conf, **conf}, installed=installed) for installed in (True, False)]

    def compare(self, options: Any, case: str = "") -> dict[str, Any]:
        """Sends with us and without, from the task; returns what both messages have in common, which is everything."""
        seen = []
        for app in self.apps:
            ours = app is self.apps[0]
            call = options(app, self.broker) if callable(options) else options
            call = {"args": (1, "ü", 'a"b\\'), "kwargs": {"x": [2, None]}, "task_id": "the-id", **call}
            app.tasks["note"].apply_async(countdown=60, **call)
            if ours:
                assert taken(self.broker) == [], f"{case}: it does not wait"
                release(app)
            messages = taken(self.broker)
            assert len(messages) == 1, (case, messages)
            seen.append(less_eta(app, messages[0], ours))
        ours, native = seen
        assert ours == native, case
        return native


# -------------------------------------------------------------------------------------------------------------- cases

STRANGE = {
    "when": datetime(2030, 1, 2, 3, 4, 5, 678, tzinfo=timezone.utc),
    "deep": [1, None, "ü", {"a": [True]}],
    "big": 2**40,
    "minus": -1.5,
    "empty": "",
}
CASES: dict[str, Any] = {
    "plain": {},
    **{f"serializer {name}": {"serializer": name} for name in SERIALIZERS},
    **{f"compression {name}": {"compression": name} for name in COMPRESSIONS},
    "pickle, compressed": {"serializer": "pickle", "compression": "zlib"},
    "signed, compressed": {"serializer": "auth", "compression": "bzip2"},
    **{f"priority {n}": {"priority": n} for n in (0, 3, 9)},
    "headers": {"headers": STRANGE},
    "headers of headers": {"headers": {"mine": 1, "headers": {"a": "b", "c": [1]}, "last": 2}},
    "limits": {"time_limit": 10, "soft_time_limit": 5.5, "ignore_result": True, "shadow": 'quo"te'},
    "canvas": {"group_id": "g", "group_index": 3, "root_id": "r", "parent_id": "p", "retries": 2,
               "replaced_task_nesting": 1},
    "repr": {"argsrepr": "(secret)", "kwargsrepr": "{…}"},
    "properties": {"reply_to": "somebody", "message_id": "m", "user_id": "guest", "app_id": "a", "type": "t"},
    "transient": {"delivery_mode": 1},
    "mandatory": {"mandatory": True},
    "stamps": {"stamped_headers": ["who", "where"], "who": "me", "where": ["here", "there"]},
    "queue": lambda app, broker: {"queue": f"{broker.queue}-2"},
    "queue object": lambda app, broker: {"queue": Queue(f"{broker.queue}-2", Exchange(""), f"{broker.queue}-2")},
    "exchange and key": lambda app, broker: {"exchange": "", "routing_key": broker.queue},
    "links": lambda app, broker: {
        "link": [app.signature("a", (1,), countdown=5), app.signature("b", queue="q")],
        "link_error": app.signature("c"),
    },
    "chain and chord": lambda app, broker: {
        "chain": [app.signature("last"), app.signature("next", countdown=3)],
        "chord": app.signature("body", chord_size=2),
    },
    "expires": {"expires": 3600},
}  # fmt: skip


def test_options(broker: Any, make_app: Callable[..., Celery]) -> None:
    pair = Pair(broker, make_app)
    for case, options in CASES.items():
        pair.compare(options, case)


CONFS: dict[str, dict[str, Any]] = {
    "protocol 1": {"task_protocol": 1},
    **{f"protocol 1, {name}": {"task_protocol": 1, "task_serializer": name} for name in ("pickle", "yaml", "auth")},
    "protocol 1, compressed": {"task_protocol": 1, "task_compression": "zlib"},
    "defaults": {
        "task_serializer": "pickle", "task_compression": "bzip2", "task_default_priority": 4,
        "task_default_delivery_mode": "transient", "task_ignore_result": True,
    },
    "local time": {"enable_utc": False, "timezone": "Asia/Kathmandu"},
    "annotations": {"task_annotations": {"note": {"priority": 5, "time_limit": 3, "serializer": "yaml"}}},
}  # fmt: skip


def test_settings(broker: Any, make_app: Callable[..., Celery]) -> None:
    for case, conf in CONFS.items():
        Pair(broker, make_app, **conf).compare({"headers": {"mine": 1}, "time_limit": 7, "shadow": "s"}, case)


def test_routes(broker: Any, make_app: Callable[..., Celery]) -> None:
    routes = {"no*": {"queue": f"{broker.queue}-2", "priority": 7, "delivery_mode": 1}}
    found = Pair(broker, make_app, task_routes=routes).compare({})
    assert f"{broker.queue}-2" in str(found["list"])
    assert found["properties"]["priority"] == 7


def test_a_task_sent_by_a_task(broker: Any, make_app: Callable[..., Celery]) -> None:
    """Its root, its parent, the priority it inherits and its stamps come from the task that runs."""
    contexts: list[Any] = []

    def inside(app: Celery, _: Any) -> dict[str, Any]:
        task = app.tasks["total"]
        task.push_request(id="parent", root_id="root", delivery_info={"priority": 6}, called_directly=False)
        _task_stack.push(task)
        contexts.append(task)
        return {}

    try:
        found = Pair(broker, make_app, task_inherit_parent_priority=True).compare(inside)
    finally:
        for task in contexts:
            _task_stack.pop()
            task.pop_request()
    assert (found["headers"]["root_id"], found["headers"]["parent_id"]) == ("root", "parent")
    assert found["properties"]["priority"] == 6


def test_arguments_of_every_kind(broker: Any, make_app: Callable[..., Celery]) -> None:
    """kombu's JSON knows more than JSON does; and text that is no UTF-8 is a matter of the serialiser."""
    odd = (UUID(int=7), Decimal("1.10"), datetime(2030, 1, 2), b"\xff", "\u2028", 2**80)
    pair = Pair(broker, make_app)
    for serializer in ("json", "pickle"):
        pair.compare({"args": odd, "kwargs": {"ключ": "☃"}, "serializer": serializer}, serializer)


# ------------------------------------------------------------------------------------------------------------ expires


def test_expires(broker: Any, make_app: Callable[..., Celery]) -> None:
    """Counts from the call, whenever the task is released; the property is what is left of it then."""
    at = datetime.now(timezone.utc) + timedelta(seconds=100)
    kinds = {"seconds": 100, "aware": at, "naive": at.replace(tzinfo=None), "ISO": at.isoformat(), "the task's": None}
    found: list[dict[str, Any]] = []
    for installed in (True, False):
        app = make_app(broker.conf, installed=installed)
        app.tasks["note"].expires = 100
        for kind, expires in kinds.items():
            options = {} if expires is None else {"expires": expires}
            app.tasks["note"].apply_async(countdown=60, task_id=kind, **options)
        if installed:
            begin, wait = time.time(), 0.4
            time.sleep(wait)  # as if they were due then
            release(app)
        found.append({message["headers"]["id"]: message for message in taken(broker)})
    ours, native = found
    assert ours.keys() == native.keys() == kinds.keys()
    for kind in kinds:
        for message in (ours[kind], native[kind]):
            expires = datetime.fromisoformat(message["headers"]["expires"]).replace(tzinfo=timezone.utc).timestamp()
            assert abs(expires - begin - 100) < 10, kind
        assert 80_000 < int(ours[kind]["properties"]["expiration"]) <= 100_000 - 1000 * wait, kind
        assert 80_000 < int(native[kind]["properties"]["expiration"]) <= 100_000, kind


def test_what_has_expired_keeps_its_header_and_loses_its_property(broker: Any, make_app: Callable[..., Celery]) -> None:
    """The broker must not drop it: a worker shall say REVOKED, and a chord fail."""
    app = make_app(broker.conf)
    app.tasks["note"].apply_async(countdown=60, expires=0.05)
    app.tasks["note"].apply_async(countdown=60, expires=datetime.now(timezone.utc) - timedelta(days=1))
    time.sleep(0.1)
    release(app)
    found = taken(broker)
    assert len(found) == 2
    for message in found:
        assert message["headers"]["expires"] is not None
        assert message["properties"].get("expiration") is None
