"""Standing in for the producer that ``Celery.send_task`` publishes with.

By the time ``publish`` is called, routing, options, signals and headers are all resolved, so what it receives is the
message as Celery would have sent it (celery/app/amqp.py, ``send_task_message``). The first publish is the task; any
other one (the ``task-sent`` event) belongs to a real producer. Nothing here touches the broker unless somebody needs
the real producer: the rpc result backend, which declares its reply queue, and events.
"""

# mypy: disallow-untyped-calls=False
# (kombu says that it is typed, and most of it is not)

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from time import time
from typing import Any, Final

from celery import Celery
from celery.utils.log import get_logger
from kombu.compression import compress
from kombu.entity import Exchange, maybe_delivery_mode
from kombu.serialization import dumps
from kombu.utils.encoding import str_to_bytes

from .message import DUE_HEADER, Message, pack_entity, without_due

__all__ = ["Capture", "capture_message"]

logger = get_logger(__name__)

_NO_ERRORS: Final[tuple[type[BaseException], ...]] = ()


class Capture:
    """One captured publish: a ``kombu.Producer`` as far as ``send_task`` can see.

    ``store`` receives the message, once; what it raises, ``send_task`` raises. ``eta`` (ISO 8601, or None) is what
    signals and the ``task-sent`` event show as the task's eta, as they would natively.
    """

    serializer = None
    compression = None
    auto_declare = False

    def __init__(
        self, app: Celery, producer: Any | None, eta: str | None, store: Callable[[Capture, Any, dict[str, Any]], None]
    ) -> None:
        self.app = app
        self.eta = eta
        self._given = producer
        self._acquired: Any | None = None
        self._store = store
        self._stored = False
        self.connection = _Connection(self)

    def publish(self, body: Any, **options: Any) -> None:
        if self._stored:
            self._publish_event(body, options)
            return
        self._store(self, body, options)
        self._stored = True
        show_eta(body, options, self.eta)

    def _publish_event(self, body: Any, options: dict[str, Any]) -> None:
        """The task is stored by now: an event that the broker does not take must not look like a failed task."""
        if isinstance(body, dict) and body.get("type") == "task-sent":
            body["eta"] = self.eta
        try:
            producer = self.real()
            with producer.connection._reraise_as_library_errors():
                producer.publish(body, **options)
        except Exception as error:
            logger.warning("A delayed task was stored, but its event was not sent: %r", error)

    def real(self) -> Any:
        """A producer which does publish: the caller's, or one from the app's pool, given back by :meth:`release`."""
        if self._given is not None:
            return self._given
        if self._acquired is None:
            timeout = self.app.conf.get("broker_pool_acquire_timeout")  # new in Celery 5.7
            self._acquired = self.app.producer_pool.acquire(block=True, timeout=timeout)
        return self._acquired

    @property
    def channel(self) -> Any:
        return self.real().channel

    def revive(self, channel: Any) -> None:
        """Part of Celery's own publish retry; nothing here has a channel that could be lost."""

    def release(self) -> None:
        if self._acquired is not None:
            producer, self._acquired = self._acquired, None
            producer.release()


class _Connection:
    """``producer.connection``: ``send_task`` and its retry loop ask it for errors; the rest goes to the real one."""

    connection_errors = channel_errors = _NO_ERRORS
    recoverable_connection_errors = recoverable_channel_errors = _NO_ERRORS
    _reraise_as_library_errors = nullcontext

    def __init__(self, capture: Capture) -> None:
        self._capture = capture

    def __getattr__(self, name: str) -> Any:
        return getattr(self._capture.real().connection, name)


def show_eta(body: Any, options: dict[str, Any], eta: str | None) -> None:
    """Put the eta where Celery's message protocols have it (1: the body, 2: the headers)."""
    if isinstance(body, dict) and "eta" in body:
        body["eta"] = eta
    elif "eta" in (headers := options.get("headers") or {}):
        headers["eta"] = eta


def without_due_header(headers: Any) -> Any:
    """The headers less ours: a retry passes on what its message came with (Context.as_execution_options)."""
    own = headers.get("headers") if headers else None
    if headers and (DUE_HEADER in headers or (isinstance(own, dict) and DUE_HEADER in own)):
        return without_due(headers)
    return headers


def capture_message(app: Celery, body: Any, options: dict[str, Any]) -> Message:
    """The message of one ``Producer.publish(body, **options)``; follows kombu/messaging.py step by step.

    Serialises here, in the client, where custom serialisers and compressors are registered. ``expiration`` counts from
    the call when it stems from the task's ``expires``, so it becomes an instant.
    """
    rest = dict(options)
    for name in _NOT_STORED:  # how hard to try is the release loop's business
        rest.pop(name, None)
    headers = dict(rest.pop("headers", None) or {})
    expires: int | None = None
    if rest.get("expiration") is not None and (body if isinstance(body, dict) else headers).get("expires"):
        expires = int((time() + rest.pop("expiration")) * 1_000_000)

    content_type, encoding = rest.pop("content_type", None), rest.pop("content_encoding", None)
    serializer, compression = rest.pop("serializer", None), rest.pop("compression", None)
    if not content_type:
        content_type, encoding, body = dumps(body, serializer=serializer)
    elif not encoding:
        encoding = "utf-8" if isinstance(body, str) else "binary"
    if compression:
        body, headers["compression"] = compress(body, compression)

    exchange, delivery_mode = rest.pop("exchange", None) or "", rest.pop("delivery_mode", None)
    declare = rest.pop("declare", None) or ()
    declaration: bytes | None = None
    if isinstance(exchange, Exchange):
        delivery_mode = delivery_mode or exchange.delivery_mode
        declaration = _packed(exchange) if exchange.name else None
        exchange = exchange.name
    elif exchange and not any(_exchange_of(entity).name == exchange for entity in declare):
        known = _known_exchange(app, exchange)
        declaration = _packed(known) if known is not None else None

    return Message(
        body=str_to_bytes(body),
        content_type=content_type,
        content_encoding=encoding,
        headers=headers,
        exchange=exchange,
        routing_key=rest.pop("routing_key", None) or "",
        delivery_mode=maybe_delivery_mode(delivery_mode),
        declare=[_packed(entity) for entity in declare],
        properties={key: value for key, value in rest.items() if value is not None or key not in _UNSET_IF_NONE},
        exchange_declaration=declaration,
        expires=expires,
    )


_NOT_STORED: Final = ("retry", "retry_policy")
_UNSET_IF_NONE: Final = frozenset({"timeout", "confirm_timeout", "expiration"})

_PACKED_LIMIT: Final = 1_000
_packed_entities: dict[int, tuple[Any, bytes]] = {}


def _packed(entity: Any) -> bytes:
    """``pack_entity``, remembered: an application publishes to the same few queues all the time."""
    found = _packed_entities.get(id(entity))
    if found is not None and found[0] is entity:
        return found[1]
    packed = pack_entity(entity)
    if len(_packed_entities) >= _PACKED_LIMIT:
        _packed_entities.clear()
    _packed_entities[id(entity)] = (entity, packed)
    return packed


def _exchange_of(entity: Any) -> Exchange:
    return entity if isinstance(entity, Exchange) else (entity.exchange or _NO_EXCHANGE)


_NO_EXCHANGE: Final = Exchange("")


def _known_exchange(app: Celery, name: str) -> Exchange | None:
    """The exchange of that name among the app's queues, broadcast ones included."""
    for queue in app.amqp.queues.values():
        if queue.exchange is not None and queue.exchange.name == name:
            found: Exchange = queue.exchange
            return found
    default: Exchange = app.amqp.default_exchange
    return default if default.name == name else None
