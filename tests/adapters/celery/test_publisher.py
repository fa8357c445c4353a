"""Release into real brokers: the released message is Celery's own, and one bad message stops nothing."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from typing import Any

import kombu
import pytest
from celery import Celery
from kombu import Exchange, Queue

from delayadapters import Batch, Claim, LeaseLost, Published
from delayadapters.celery.message import DUE_HEADER, Message, pack_entity, unpack_entity
from delayadapters.celery.publisher import CeleryPublisher
from delayadapters.errors import RecordUnreadable
from delaytests.server import free_port

DIRECT = False


@pytest.fixture
def publisher(app: Celery) -> Any:
    made = CeleryPublisher(app)
    yield made
    made.close()


@pytest.fixture
def broker_app(broker: Any, make_app: Callable[..., Celery]) -> Celery:
    return make_app(broker.conf)


def claim_all(app: Celery) -> list[Claim]:
    """Everything that waits, made due now and claimed."""
    queue = app.delayadapters
    for job in queue.jobs().jobs:
        queue.release_now(job.id)
    return list(queue.claim(100))


def release(app: Celery, held: Callable[[], bool] = lambda: True) -> Published:
    """One round of release, without a loop."""
    publisher = CeleryPublisher(app)
    try:
        claims = claim_all(app)
        outcome = publisher.publish(Batch(claims, held))
        kept = {*outcome.failed, *outcome.unpublished}
        app.delayadapters.ack([claim for claim in claims if claim.entry not in kept])
        return outcome
    finally:
        publisher.close()


def claim_of(payload: bytes, entry: bytes = b"1") -> Claim:
    return Claim(entry, 0, "id", 0, payload)


# ------------------------------------------------------------------------------------------------------------ fidelity


def both(broker: Any, app: Celery, queue: str | None = None, **options: Any) -> tuple[Any, Any]:
    """The message of one call, released by us and sent by Celery itself, as the broker holds them."""
    arguments = {"args": (1, "ü"), "kwargs": {"x": [2]}, "task_id": "the-id", **options}
    if queue:
        arguments["queue"] = queue
    app.send_task("note", countdown=60, **arguments)
    released = release(app)
    assert not released.failed, released
    assert released.broker_down is None
    ours = broker.get(queue)
    Celery.send_task(app, "note", countdown=60, **arguments)
    return ours, broker.get(queue)


def comparable(message: Any) -> dict[str, Any]:
    assert message is not None, "no message arrived"
    headers = dict(message.headers)
    headers.pop(DUE_HEADER, None)
    headers.pop("eta", None)
    properties = dict(message.properties)
    properties.pop("delivery_tag", None)
    properties.pop("application_headers", None)
    info = {key: value for key, value in (message.delivery_info or {}).items() if key in ("exchange", "routing_key")}
    properties.pop("delivery_info", None)
    body = message.body if isinstance(message.body, bytes) else message.body.encode()
    if message.headers.get("compression") is None and b'"eta"' in body:
        body = json.dumps({**json.loads(body), "eta": None}).encode()
    return {
        "body": body,
        "type": (message.content_type, message.content_encoding),
        "headers": headers,
        "properties": properties,
        "info": info,
    }


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"priority": 6},
        {"headers": {"mine": {"deep": [1, None]}}},
        {"serializer": "pickle"},
        {"serializer": "msgpack"},
        {"compression": "zlib"},
        {"time_limit": 10, "soft_time_limit": 5, "ignore_result": True, "shadow": "other"},
        {"group_id": "g", "group_index": 3, "root_id": "r", "parent_id": "p", "retries": 2},
        {"reply_to": "somebody", "delivery_mode": 1},
        {"stamped_headers": ["who"], "who": "me"},
    ],
    ids=lambda options: ",".join(options) or "plain",
)
def test_a_released_message_is_what_celery_would_have_sent(broker: Any, broker_app: Celery, options: Any) -> None:
    ours, native = both(broker, broker_app, **options)
    assert comparable(ours) == comparable(native)
    assert ours.headers["eta"] is None
    assert native.headers["eta"] is not None
    assert datetime.fromisoformat(ours.headers[DUE_HEADER]).tzinfo is not None


def test_protocol_1(broker: Any, make_app: Callable[..., Celery]) -> None:
    app = make_app({**broker.conf, "task_protocol": 1})
    ours, native = both(broker, app)
    assert comparable(ours) == comparable(native)
    assert json.loads(ours.body)["eta"] is None


def test_another_queue_is_declared(broker: Any, broker_app: Celery) -> None:
    ours, native = both(broker, broker_app, queue=f"{broker.queue}-2")
    assert comparable(ours) == comparable(native)


def test_a_topic_exchange_reaches_its_queue_from_a_process_that_declared_nothing(
    broker: Any, make_app: Callable[..., Celery]
) -> None:
    exchange = Exchange(f"{broker.queue}-exchange", type="topic")
    app = make_app(broker.conf)
    app.conf.task_queues = [Queue(broker.queue, exchange, routing_key="shop.#")]
    app.send_task("note", countdown=60, queue=broker.queue, routing_key="shop.orders")
    app.send_task("note", countdown=60, exchange=exchange.name, exchange_type="topic", routing_key="shop.more")
    with kombu.Connection(broker.url) as connection:  # as a worker has
        app.amqp.queues[broker.queue](connection.default_channel).declare()
    outcome = release(make_app(broker.conf | {"delayadapters_name": app.conf.get("delayadapters_name")}))
    assert not outcome.failed
    keys = {broker.get().delivery_info["routing_key"] for _ in range(2)}
    assert keys == {"shop.orders", "shop.more"}


def test_expires_is_counted_again_at_release(broker: Any, broker_app: Celery) -> None:
    broker_app.send_task("note", countdown=60, expires=100)
    broker_app.send_task("note", countdown=60, expires=datetime.now(timezone.utc) - timedelta(seconds=5))
    release(broker_app)
    first, second = broker.get(), broker.get()
    assert 90_000 < int(first.properties["expiration"]) <= 100_000
    # Past: the broker must not drop it, so that the worker can say REVOKED.
    assert second.headers["expires"] is not None
    assert second.properties.get("expiration") is None


def test_unusual_values_survive(broker: Any, broker_app: Celery) -> None:
    when = datetime(2030, 1, 2, 3, 4, 5, tzinfo=timezone.utc)
    ours, native = both(broker, broker_app, headers={"when": when, "big": 2**70 if broker.kind == "redis" else 2**40})
    assert comparable(ours) == comparable(native)


# ---------------------------------------------------------------------------------------------------------- bad things


def test_an_unreadable_record_fails_alone(broker: Any, broker_app: Celery) -> None:
    queue = broker_app.delayadapters
    queue.schedule(b"\xc1 not msgpack", id="bad", delay=0)
    queue.schedule(
        Message(b"", "a", "b", {}, "", "q", 2, [], {}).pack().replace(b"\x9c\x01", b"\x9c\x02", 1), id="newer", delay=0
    )
    broker_app.send_task("note", countdown=60)
    outcome = release(broker_app)
    assert sorted(reason.split(":")[0] for reason in outcome.failed.values()) == [
        "Celery message record of version 2 with 12 fields; this release of delayadapters reads version 1 with 12",
        "not a Celery message record",
    ]
    assert outcome.broker_down is None
    assert broker.get() is not None


def test_a_broker_that_is_down_takes_nothing_and_blames_nobody(
    redis_broker: Any, make_app: Callable[..., Celery]
) -> None:
    for url in (f"redis://127.0.0.1:{free_port()}/0", f"amqp://127.0.0.1:{free_port()}//"):
        app = make_app({**redis_broker.conf, "broker_url": url})
        app.send_task("note", countdown=60)
        app.send_task("note", countdown=60)
        outcome = release(app)
        assert outcome.broker_down
        assert len(outcome.unpublished) == 2
        assert not outcome.failed
        app.delayadapters.purge()


def test_a_connection_that_went_stale_is_replaced(redis_broker: Any, app: Celery, publisher: CeleryPublisher) -> None:
    payload = stored(app)
    assert publisher.publish(Batch([claim_of(payload)])) == Published()
    redis_broker.redis.client().client_kill_filter(_type="normal", skipme=True)
    assert publisher.publish(Batch([claim_of(payload)])) == Published()
    assert redis_broker.size() == 2


def stored(app: Celery, **options: Any) -> bytes:
    app.send_task("note", countdown=60, task_id="stored", **options)
    payload: bytes = app.delayadapters.get("stored").payload
    app.delayadapters.cancel("stored")
    return payload


def test_a_queue_key_of_another_type_fails_its_own_messages(
    redis_broker: Any, app: Celery, publisher: CeleryPublisher
) -> None:
    redis_broker.redis.client().set("occupied", "x")
    bad, good = stored(app, queue="occupied"), stored(app)
    outcome = publisher.publish(Batch([claim_of(bad, b"bad"), claim_of(good, b"good")]))
    assert list(outcome.failed) == [b"bad"]
    assert "WRONGTYPE" in outcome.failed[b"bad"]
    assert redis_broker.size() == 1


def test_redis_out_of_memory_is_the_brokers_fault(redis_broker: Any, app: Celery, publisher: CeleryPublisher) -> None:
    payload = stored(app)
    client = redis_broker.redis.client()
    client.config_set("maxmemory", "1")
    try:
        outcome = publisher.publish(Batch([claim_of(payload)]))
    finally:
        client.config_set("maxmemory", "0")
    assert outcome.broker_down
    assert "OutOfMemory" in outcome.broker_down
    assert not outcome.failed


def test_a_lost_lease_stops_the_batch(redis_broker: Any, app: Celery, publisher: CeleryPublisher) -> None:
    payload = stored(app)
    answers = iter([True, False])
    outcome = publisher.publish(
        Batch([claim_of(payload, b"1"), claim_of(payload, b"2"), claim_of(payload, b"3")], lambda: next(answers))
    )
    assert list(outcome.unpublished) == [b"2", b"3"]
    assert redis_broker.size() == 1
    with pytest.raises(LeaseLost):
        Batch([], lambda: False).ensure_held()


def test_rabbitmq_queues_deleted_and_queues_of_another_kind(
    rabbit_broker: Any, make_app: Callable[..., Celery]
) -> None:
    app = make_app(rabbit_broker.conf)
    publisher = CeleryPublisher(app)
    other = f"{rabbit_broker.queue}-2"
    try:
        good, bad = stored(app), stored(app, queue=other)
        assert publisher.publish(Batch([claim_of(good)])) == Published()
        with kombu.Connection(rabbit_broker.url) as connection, connection.channel() as channel:
            channel.queue_delete(rabbit_broker.queue)
            channel.queue_declare(other, durable=False, auto_delete=False)  # not as the app declares it
        outcome = publisher.publish(Batch([claim_of(bad, b"bad"), claim_of(good, b"good")]))
    finally:
        publisher.close()
    assert list(outcome.failed) == [b"bad"]
    assert "PRECONDITION_FAILED" in outcome.failed[b"bad"]
    assert rabbit_broker.size() == 1


def test_a_message_that_amqp_cannot_carry_fails_alone(rabbit_broker: Any, make_app: Callable[..., Celery]) -> None:
    app = make_app(rabbit_broker.conf)
    publisher = CeleryPublisher(app)
    try:
        good = stored(app)
        bad = stored(app, headers={"x" * 300: 1})  # a header's name has at most 255 bytes
        outcome = publisher.publish(Batch([claim_of(good, b"1"), claim_of(bad, b"bad"), claim_of(good, b"2")]))
    finally:
        publisher.close()
    assert list(outcome.failed) == [b"bad"]
    assert outcome.broker_down is None
    assert rabbit_broker.size() == 2


def test_two_apps_that_differ_by_their_prefix_release_their_own_tasks_only(
    redis_broker: Any, make_app: Callable[..., Celery]
) -> None:
    one, two = (
        make_app({**redis_broker.conf, "broker_transport_options": {"global_keyprefix": f"{name}:"}})
        for name in ("one", "two")
    )
    one.send_task("note", countdown=60, task_id="of-one")
    two.send_task("note", countdown=60, task_id="of-two")
    assert [job.id for job in one.delayadapters.jobs().jobs] == ["of-one"]
    release(one)
    client = redis_broker.redis.client()
    assert client.llen(f"one:{redis_broker.queue}") == 1
    assert client.llen(f"two:{redis_broker.queue}") == 0
    release(two)
    wire = json.loads(client.lpop(f"two:{redis_broker.queue}"))
    assert wire["headers"]["id"] == "of-two"
    assert json.loads(base64.b64decode(wire["body"]))[0] == []


# ------------------------------------------------------------------------------------------------------------- records


@pytest.mark.parametrize(
    "entity",
    [
        Queue("a"),
        Queue(
            "a",
            Exchange("e", type="topic", durable=False),
            routing_key="k.#",
            queue_arguments={"x-queue-type": "quorum"},
        ),
        Queue("a", bindings=[kombu.binding(Exchange("t", type="topic"), routing_key="r")]),
        Queue("a", Exchange(""), no_declare=True, expires=3, max_priority=9, message_ttl=1.5),
        Exchange("e", type="fanout", delivery_mode="transient"),
    ],
    ids=lambda entity: repr(entity)[:60],
)
def test_declarations_round_trip(entity: Any) -> None:
    again = unpack_entity(pack_entity(entity))
    assert type(again) is type(entity)
    assert again.as_dict(recurse=True) == entity.as_dict(recurse=True)


def test_records_say_their_version_and_refuse_others() -> None:
    message = Message(b"body", "application/json", "utf-8", {"a": 1}, "", "q", 2, [], {"priority": 1})
    assert Message.unpack(message.pack()) == message
    for record in (
        b"",
        b"\x01",
        b"\x90",
        b"\x91\xa1x",
        message.pack()[:-1],
        message.pack().replace(b"\x9c\x01", b"\x9c\x07", 1),
    ):
        with pytest.raises(RecordUnreadable):
            Message.unpack(record)
