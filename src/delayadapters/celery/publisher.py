"""Release through kombu: claimed jobs are published one after another on one connection of our own."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any, Final

from celery import Celery
from celery.utils.log import get_logger
from kombu.exceptions import OperationalError

from ..due import from_micros
from ..errors import LeaseLost, RecordUnreadable
from ..jobs import Claim
from ..release.publisher import Batch, Published
from .message import Message, unpack_entity, with_due
from .signals import announce, task_released

__all__ = ["CeleryPublisher"]

logger = get_logger(__name__)

CONFIRM_TIMEOUT: Final = 10.0
"""Seconds a broker may take to confirm or answer; then it counts as down and the message is given back."""
CONNECT_TIMEOUT: Final = 4.0
PROBE_TIMEOUT: Final = 5.0
"""Seconds RabbitMQ may take to confirm the first message on a new connection, which says nothing and goes nowhere."""

_ENTITY_CACHE: Final = 1_000
# Error replies that speak of the Redis server, not of the message (redis-py has classes for some of them only).
_SERVER_REPLIES: Final = (
    "OOM", "READONLY", "LOADING", "MASTERDOWN", "CLUSTERDOWN", "MISCONF", "BUSY", "NOREPLICAS", "NOAUTH", "WRONGPASS",
)  # fmt: skip
_SERVER_ERRORS: Final = frozenset(
    {"OutOfMemoryError", "ReadOnlyError", "BusyLoadingError", "MasterDownError", "ClusterDownError"}
)
# The other transports' errors are known by name and number: their libraries may not be installed.
_CONNECTING_TELLS: Final = ("amqp", "redis")
"""Drivers that speak to the broker when they connect. Others may first do so when they publish."""
_SERVICE_ERRORS: Final = frozenset(
    {
        "ServiceRequestError", "ServiceResponseError", "ClientAuthenticationError", "OperationTimeoutError",
        "ServiceBusConnectionError", "ServiceBusCommunicationError", "ServiceBusServerBusyError",
    }
)  # fmt: skip
"""Azure's: kombu's transports for it list none of them."""
_SERVICE_CODES: Final = (
    "expiredtoken",
    "requestexpired",
    "invalidclienttokenid",
    "unrecognizedclient",
    "invalidsecurity",
)
_MESSAGE_ERRORS: Final = frozenset({"ParamValidationError", "ValidationError"})
"""botocore's BotoCoreErrors that speak of the message, where all others are the connection's or the credentials'."""


class CeleryPublisher:
    """Publishes stored Celery messages to the app's broker. Use from one thread at a time.

    On RabbitMQ every message is confirmed, and one for a queue is ``mandatory``: the queue is declared first, so a
    return means that somebody has deleted it meanwhile. Elsewhere a message counts as published when kombu's publish
    has returned (Redis: the LPUSH is answered).

    A new connection to RabbitMQ carries tasks once it has confirmed a probe. Under a memory or disk alarm RabbitMQ
    connects and declares, stops reading at the first publish, and reads it when the alarm ends, though we may have
    given that connection up long before: a task would arrive once for every attempt.
    """

    def __init__(self, app: Celery) -> None:
        self._app = app
        self._link: _Link | None = None
        self._entities: dict[bytes, Any] = {}

    def publish(self, claims: Batch) -> Published:
        failed: dict[bytes, str] = {}
        denied: dict[bytes, str] = {}
        unpublished: tuple[bytes, ...] = ()
        broker_down: str | None = None
        sent = False
        for index, claim in enumerate(claims):
            try:
                claims.ensure_held()
                self._publish_one(claim)
                sent = True
                announce(task_released, claim.id, from_micros(claim.due), claim.meta)
            except (LeaseLost, _BrokerDown) as stop:
                unpublished = tuple(left.entry for left in claims[index:])
                if isinstance(stop, _BrokerDown):
                    self.close()
                    broker_down = str(stop)
                break
            except _Denied as error:
                denied[claim.entry] = str(error)
            except Exception as error:
                failed[claim.entry] = _reason(error)
        if denied and not sent:  # rights that nobody has any more; else only these messages' queues are out of reach
            unpublished += tuple(denied)
            broker_down = broker_down or next(iter(denied.values()))
        else:
            failed.update(denied)
        return Published(failed, unpublished, broker_down)

    def close(self) -> None:
        """Close the connection; the next publish opens another."""
        if self._link is not None:
            link, self._link = self._link, None
            link.close()

    # ---------------------------------------------------------------------------------------------- one message

    def _publish_one(self, claim: Claim) -> None:
        """Publish, or raise: _BrokerDown when nothing can be published now, _Denied when perhaps nothing may be,
        anything else for this message alone.

        A connection may have gone stale since it was last used, so its loss leads to a new one. When that is lost at
        once on the same message, and yet another can be opened, the broker is up: it is this message that breaks it.
        """
        message = Message.unpack(claim.payload)
        try:
            self._send(message, claim)
        except _LinkLost:
            try:
                self._send(message, claim)
            except _LinkLost as again:
                self._link = self._connect()
                raise RuntimeError(f"the broker closes the connection on this message: {again}") from again

    def _send(self, message: Message, claim: Claim) -> None:
        link = self._link
        if link is None:
            link = self._link = self._connect()
        try:
            link.send(message, claim, self._entity)
        except Exception as error:
            if link.service and _denied(error):
                raise _Denied(_reason(error)) from error
            if link.speaks_of_broker(error):
                self.close()
                raise _BrokerDown(_reason(error)) from error
            if link.blames_message(error):
                if isinstance(error, link.channel_errors):
                    link.producer = None  # a broker closes the channel on which it refused something
                raise
            self.close()
            if link.service or _timed_out(error):
                raise _BrokerDown(_reason(error)) from error
            raise _LinkLost(_reason(error)) from error

    def _connect(self) -> _Link:
        try:
            return _Link(self._app)
        except Exception as error:
            raise _BrokerDown(f"cannot connect: {_reason(error)}") from error

    def _entity(self, packed: bytes) -> Any:
        entity = self._entities.get(packed)
        if entity is None:
            if len(self._entities) >= _ENTITY_CACHE:
                self._entities.clear()
            entity = self._entities[packed] = unpack_entity(packed)
        return entity


class _BrokerDown(Exception):
    pass


class _LinkLost(Exception):
    pass


class _Denied(Exception):
    """The rights to publish this are missing."""


class _Link:
    """One connection with its channel, and what has been declared on it."""

    def __init__(self, app: Celery) -> None:
        self._app = app
        self.connection = _own_connection(app)
        self.amqp = self.connection.transport.driver_type == "amqp"
        self.service = self.connection.transport.driver_type not in _CONNECTING_TELLS
        self.producer: Any = None
        self._returned: list[str] = []
        self._declared: set[bytes] = set()
        self.channel_errors: tuple[type[BaseException], ...] = tuple(self.connection.channel_errors)
        self.connection_errors: tuple[type[BaseException], ...] = (
            *self.connection.connection_errors,
            # The transport's own: kombu's Connection makes up for missing ones by adding all channel errors.
            *getattr(self.connection.transport, "recoverable_connection_errors", ()),
            OperationalError,
            OSError,
            EOFError,
        )
        others = len(self.connection.alt or ())
        for left in range(max(others, 1), 0, -1):
            try:
                self.connection.ensure_connection(
                    max_retries=1, interval_start=0, interval_step=0, reraise_as_library_errors=False
                )
                self.open_channel()
                self._probe()
            except Exception:
                if left == 1:
                    self.close()
                    raise
                self.connection.maybe_switch_next()
            else:
                break

    def open_channel(self) -> None:
        channel = self.connection.channel()
        self.producer = self._app.amqp.Producer(
            channel, auto_declare=False, on_return=self._on_return if self.amqp else None
        )

    def _probe(self) -> None:
        """Raises TimeoutError when RabbitMQ reads no publishes. What it drops now, it drops when it reads it later."""
        if not self.amqp:
            return
        try:
            self.producer.publish(
                b"",
                content_type="application/octet-stream",
                content_encoding="binary",
                exchange="",
                routing_key=f"delayadapters.probe.{uuid.uuid4().hex}",
                delivery_mode=1,
                confirm_timeout=PROBE_TIMEOUT,
            )
        except self.channel_errors:  # no permission for the default exchange: an answer, too
            self.open_channel()
        except Exception as error:
            if not _timed_out(error):
                raise
            raise TimeoutError(
                "the broker accepts connections and reads no messages (RabbitMQ: a memory or disk alarm)"
            ) from error

    def alive(self) -> bool:
        """False once the connection is known to be closed (py-amqp then raises AttributeErrors and the like)."""
        return not self.amqp or bool(self.connection.connected)

    def speaks_of_broker(self, error: BaseException) -> bool:
        """Whether the broker has answered that it takes nothing now."""
        if self.service:
            return _service_is_down(error)
        return isinstance(error, self.channel_errors) and _speaks_of_server(error)

    def blames_message(self, error: BaseException) -> bool:
        """False when the connection is at fault. Several transports list such errors as the channel's, too."""
        if self.service and _named(error, _MESSAGE_ERRORS):
            return True
        if isinstance(error, self.connection_errors):
            return False
        return isinstance(error, self.channel_errors) or self.alive()

    def send(self, message: Message, claim: Claim, entity: Callable[[bytes], Any]) -> None:
        if self.producer is None:
            self.open_channel()
        self._declare(message, entity)
        if not self.amqp:
            self._publish(message, claim, {})
            return
        # The default exchange routes to the queue just declared; elsewhere no queue at all may be intended.
        options = {"mandatory": True} if message.exchange == "" else {}
        for attempt in (1, 2):
            self._returned.clear()
            self._publish(message, claim, options)
            if not self._returned:
                return
            if attempt == 1:  # a queue deleted after it was declared: once more
                self._declared.clear()
                self.connection.declared_entities.clear()
                self._declare(message, entity)
        raise RuntimeError(f"the broker returned the message: {self._returned[0]}")

    def _publish(self, message: Message, claim: Claim, options: dict[str, Any]) -> None:
        properties = dict(message.properties)
        if message.expires is not None:
            left = message.expires / 1_000_000 - time.time()
            # Once it has passed the property goes and the header stays: the worker then records REVOKED, where the
            # broker would drop the message without a word and leave a chord hanging.
            if left > 0:
                properties["expiration"] = left
        if self.amqp:
            properties.setdefault("confirm_timeout", CONFIRM_TIMEOUT)
        properties.update(options)
        self.producer.publish(
            message.body,
            content_type=message.content_type,
            content_encoding=message.content_encoding,
            headers=with_due(message.headers, from_micros(claim.due).isoformat()),
            exchange=message.exchange,
            routing_key=message.routing_key,
            delivery_mode=message.delivery_mode,
            **properties,
        )

    def _declare(self, message: Message, entity: Callable[[bytes], Any]) -> None:
        wanted = message.declare
        if not self.amqp and message.exchange_declaration is not None:
            wanted = [message.exchange_declaration, *wanted]
        for packed in wanted:
            if packed in self._declared:
                continue
            item = entity(packed)
            item.bind(self.producer.channel).declare()
            if item.can_cache_declaration:
                self._declared.add(packed)

    def _on_return(self, error: BaseException, exchange: str, routing_key: str, message: Any) -> None:
        self._returned.append(_reason(error))

    def close(self) -> None:
        try:
            self.connection.close()
        except Exception as error:
            logger.debug("closing the release connection: %r", error)


def _own_connection(app: Celery) -> Any:
    """A connection that reports trouble soon, instead of trying for minutes while leases run out."""
    connection = app.connection_for_write(heartbeat=0, connect_timeout=CONNECT_TIMEOUT)
    options = dict(connection.transport_options or {})
    if connection.transport.driver_type == "amqp":
        options["confirm_publish"] = True
        for name in ("read_timeout", "write_timeout"):
            options.setdefault(name, CONFIRM_TIMEOUT)
    elif connection.transport.driver_type == "redis":
        if options.get("socket_timeout") is None:
            options["socket_timeout"] = CONFIRM_TIMEOUT
        if options.get("socket_connect_timeout") is None:
            options["socket_connect_timeout"] = CONNECT_TIMEOUT
        if issubclass(connection.get_transport_cls(), _sentinel_transport()):
            options["sentinel_kwargs"] = {**_asking_sentinels(), **(options.get("sentinel_kwargs") or {})}
        transport = _without_retries(connection.get_transport_cls())
        connection = app.connection_for_write()
        connection.transport_cls = transport  # an argument would lose against the URL's own in "redis+socket://…"
    connection.transport_options = options
    return connection


def _sentinel_transport() -> Any:
    from kombu.transport.redis import SentinelTransport

    return SentinelTransport


def _asking_sentinels() -> dict[str, Any]:
    """So that one that is down is passed over at once: redis-py 8 asks it 10 times, every time."""
    from redis.backoff import NoBackoff
    from redis.retry import Retry

    return {
        "socket_timeout": CONNECT_TIMEOUT,
        "socket_connect_timeout": CONNECT_TIMEOUT,
        "retry": Retry(NoBackoff(), 0),
    }


def _without_retries(transport: Any) -> Any:
    """A Redis transport for publishing: its client does not retry by itself, and is made once.

    redis-py 8 retries a command up to 10 times with growing pauses, about a minute in all, and a repeated LPUSH is a
    second message. The release loop has its own pauses and keeps the leases meanwhile. kombu has no option for it.
    kombu also makes a client object (on the same connection pool) for every message, a third of a publish's time.
    """
    from redis.backoff import NoBackoff
    from redis.retry import Retry

    class Channel(transport.Channel):
        kept: Any = None

        def _connparams(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
            parameters: dict[str, Any] = super()._connparams(*args, **kwargs)
            return {**parameters, "retry": Retry(NoBackoff(), 0), "retry_on_timeout": False}

        def _create_client(self, asynchronous: bool = False) -> Any:
            if asynchronous:
                return super()._create_client(asynchronous=True)
            if self.kept is None:
                self.kept = super()._create_client()
            return self.kept

    class Transport(transport):
        pass

    Transport.Channel = Channel
    return Transport


def _speaks_of_server(error: BaseException) -> bool:
    return type(error).__name__ in _SERVER_ERRORS or str(error).startswith(_SERVER_REPLIES)


def _named(error: BaseException, names: frozenset[str]) -> bool:
    return any(kind.__name__ in names for kind in type(error).__mro__)


def _service_is_down(error: BaseException) -> bool:
    """By a web service's answer: 5xx, too many requests, or credentials that have expired."""
    status, code = _answer(error)
    return (
        status >= 500
        or status == 429
        or "thrott" in code
        or code.startswith(_SERVICE_CODES)
        or _named(error, _SERVICE_ERRORS)
    )


def _denied(error: BaseException) -> bool:
    return "accessdenied" in _answer(error)[1]


def _answer(error: BaseException) -> tuple[int, str]:
    """The HTTP status (0: none) of AWS' ClientError, Google's and Azure's errors; the first's code in lower case."""
    response = getattr(error, "response", None)
    if isinstance(response, Mapping):
        status = (response.get("ResponseMetadata") or {}).get("HTTPStatusCode")
        code = str((response.get("Error") or {}).get("Code", "")).lower()
    else:
        status, code = getattr(error, "status_code", None) or getattr(error, "code", None), ""
    return status if isinstance(status, int) else 0, code


def _timed_out(error: BaseException) -> bool:
    text = f"{type(error).__name__} {error}".lower()
    return isinstance(error, TimeoutError) or "timed out" in text or "timeout" in text


def _reason(error: BaseException) -> str:
    if isinstance(error, RecordUnreadable):
        return str(error)
    return f"{type(error).__name__}: {error}"
