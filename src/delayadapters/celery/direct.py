"""Direct release into a Redis broker: the claim script itself pushes kombu's message onto the queue's list.

It needs no process of ours between the delay queue and the broker, so a task is released exactly once. It is right only
where the two are one Redis and where kombu's whole publish is one LPUSH: kombu's own Redis transport (Sentinel's, too),
the default exchange (as Celery uses for every queue with a direct exchange), a queue that does not expire. Whatever
else is published goes the leased way, through kombu, and :class:`DirectRelease` says why, once.

What kombu would push is asked of kombu: its own channel class, with a client that records instead of a connection,
makes key, message and declarations. For each new list the recorded LPUSH is compared with ours before ours is trusted.

The stored payload is that message as JSON, less what differs from release to release::

    {"properties": {"delivery_tag": "<unique>", <PAYLOAD … "headers": {…, "delayadapters_due": ">due<"}}

The release command puts payload, tag and due time together, so the due time is right after a reschedule, too.
"""

# mypy: disallow-untyped-calls=False
# (kombu says that it is typed, and most of it is not)

from __future__ import annotations

import base64
import json as plain
import threading
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from celery import Celery
from celery.utils.log import get_logger
from kombu.entity import Queue
from kombu.utils import json

from ..jobs import Command, Payload
from ..redis.commands import Extras
from ..redis.records import Packed
from .message import DUE_HEADER, Message, with_due, without_due
from .places import RedisPlace, broker_place
from .settings import Settings

__all__ = ["Direct", "DirectRelease", "read_wire"]

logger = get_logger(__name__)

_HEAD: Final = '{"properties": {"delivery_tag": "", '
_TAIL: Final = f'"{DUE_HEADER}": ""}}}}'
_OPEN: Final = '{"properties": {"delivery_tag": "'
_CLOSE: Final = '"}}'
# Where the headers have headers of their own, the due time is in these, too (see message.with_due).
_BETWEEN: Final = f'"}}, "{DUE_HEADER}": "'

_PLANS: Final = 1_000
_REASONS: Final = 20
_ASK_TIMEOUT: Final = 5.0
# Keywords of kombu's Producer.publish which do not become properties of the message.
_NOT_PROPERTIES: Final = frozenset(
    {"mandatory", "immediate", "priority", "expiration", "timeout", "confirm_timeout", "reply_to", "delivery_mode"}
)


class Direct(NamedTuple):
    """How one message is stored for a direct release: arguments of ``schedule``."""

    payload: bytes
    release: Sequence[Command]
    extras: Extras | None
    """Declares the queue, at the first message for it of this process; None later."""


class DirectRelease:
    """Decides for one app, message by message. Made when first needed; makes no connection."""

    def __init__(self, app: Celery) -> None:
        self._app = app
        self._lock = threading.Lock()
        self._kombu: _Recorder | None = None
        self._refusal: str | None = None
        self._asked = False
        self._told: set[str] = set()
        self._plans: dict[tuple[str, int, tuple[bytes, ...], bool], Sequence[Command] | str] = {}
        self._declared: set[tuple[bytes, ...]] = set()

    def refusal(self) -> str | None:
        """Why no message of this app is released directly; None when they are."""
        if not self._asked:
            with self._lock:
                if not self._asked:
                    self._refusal = self._look()
                    self._asked = True
                    if self._refusal is not None and self._refusal != _SWITCHED_OFF:
                        logger.info("Delayed tasks are released through kombu, at least once: %s", self._refusal)
        return self._refusal

    def plan(self, message: Message, declare: Sequence[Any]) -> Direct | None:
        """How to store a message for direct release; None when it goes the leased way. Never raises."""
        if self.refusal() is not None or self._kombu is None:
            return None
        try:
            return self._plan(self._kombu, message, declare)
        except _Leased as why:
            reason = str(why)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
        if reason not in self._told and len(self._told) < _REASONS:
            self._told.add(reason)
            logger.info("Some delayed tasks are released through kombu, at least once: %s", reason)
        return None

    # ---------------------------------------------------------------------------------------------- one message

    def _plan(self, kombu: _Recorder, message: Message, declare: Sequence[Any]) -> Direct:
        if message.exchange != "":
            raise _Leased("an exchange other than the default one is routed when the message is published")
        if not message.routing_key:
            raise _Leased("a message without a routing key")
        if message.expires is not None or message.properties.get("expiration") is not None:
            raise _Leased("the expiration property of a task that expires is computed when it is published")
        wire = kombu.wire(message)
        priority = wire["properties"]["priority"]
        text: str = kombu.dumps(wire)
        own = isinstance(wire["headers"].get("headers"), dict)
        close = f"{_BETWEEN}{_CLOSE}" if own else _CLOSE
        if not (text.startswith(_HEAD) and text.endswith(_TAIL) and text.endswith(f'"{DUE_HEADER}": "{close}')):
            raise _Leased("kombu writes its JSON in another form")
        declarations = tuple(message.declare)
        key = (message.routing_key, priority, declarations, own)
        found = self._plans.get(key)
        if found is None:
            found = self._plans[key] = self._new_plan(kombu, message, wire, declare)
        if isinstance(found, str):
            raise _Leased(found)
        extras = None
        if declarations not in self._declared:
            extras = Extras(alongside=kombu.declarations(declare))
        return Direct(text[len(_HEAD) : -len(close)].encode(), found, extras)

    def stored(self, message: Message) -> None:
        """The message was stored: so its queue is declared."""
        if len(self._declared) >= _PLANS:
            self._declared.clear()
        self._declared.add(tuple(message.declare))

    def _new_plan(
        self, kombu: _Recorder, message: Message, wire: dict[str, Any], declare: Sequence[Any]
    ) -> Sequence[Command] | str:
        """The commands for messages to one list, after comparing them with what kombu does with this one."""
        plan: Sequence[Command] | str
        try:
            plan = self._compared(kombu.publish(message, declare), wire)
        except _Leased as why:
            plan = str(why)
        except Exception as error:
            plan = f"{type(error).__name__}: {error}"
        if len(self._plans) >= _PLANS:
            self._plans.clear()
        return plan

    @staticmethod
    def _compared(recorded: list[tuple[Any, ...]], wire: dict[str, Any]) -> Sequence[Command]:
        if len(recorded) != 1 or len(recorded[0]) != 3 or recorded[0][0] != "LPUSH":
            raise _Leased(f"kombu publishes by {[words[0] for words in recorded]} instead of one LPUSH")
        _, key, value = recorded[0]
        native, ours = plain.loads(value), plain.loads(json.dumps(wire))
        tag = native["properties"].pop("delivery_tag")
        ours["properties"].pop("delivery_tag")
        ours["headers"] = without_due(ours["headers"])
        again = [_BETWEEN, Payload.DUE_ISO] if isinstance(ours["headers"].get("headers"), dict) else []
        # As text: a NaN in a header is not equal to itself.
        if plain.dumps(native, sort_keys=True) != plain.dumps(ours, sort_keys=True) or not isinstance(tag, str):
            names = sorted(k for k in native.keys() | ours.keys() if native.get(k) != ours.get(k))
            logger.warning("Direct release does not know kombu's message (%s differs)", ", ".join(names) or "its tag")
            raise _Leased("the message which the installed kombu makes is not the one that was expected")
        frame: Any = [_OPEN, Payload.UNIQUE, '", ', Payload.BYTES, Payload.DUE_ISO, *again, _CLOSE]
        return Packed([("LPUSH", key, frame)])

    # ---------------------------------------------------------------------------------------------- the app

    def _look(self) -> str | None:
        settings = Settings(self._app)
        if not settings.direct:
            return _SWITCHED_OFF
        try:
            reason = _other_broker(self._app, settings)
            if reason is None:
                self._kombu = _Recorder(self._app)
            return reason
        except Exception as error:  # whatever another kombu does differently
            return f"{type(error).__name__}: {error}"


_SWITCHED_OFF: Final = "delayadapters_direct is off"


class _Leased(Exception):
    """Why a message cannot be released directly."""


# ------------------------------------------------------------------------------------------------- the same Redis?


def _other_broker(app: Celery, settings: Settings) -> str | None:
    """Why the app's broker is not, for certain, the Redis in which its delayed tasks wait."""
    from kombu.transport import redis as transport

    connection = app.connection_for_write()
    kind = connection.get_transport_cls()
    sentinel = kind is transport.SentinelTransport
    if kind is not transport.Transport and not sentinel:
        return f"the broker's transport is {kind.__module__}.{kind.__name__}, not kombu's own Redis"
    if len(connection.alt or ()) > 1 and not sentinel:
        return "the broker has failover addresses"
    broker, ours = broker_place(app), settings.redis
    if broker is None:
        return "the broker is not a Redis"
    theirs, own = broker.identity, ours.identity
    if theirs == own:
        return None
    told = f"delayed tasks wait in {own}, the broker is {theirs}"
    if not _may_be_one(broker, ours):
        return f"{told}; the same Redis has the same host, port and database"
    # Only the names of this machine: what another name means can change while this process runs, at a failover.
    try:
        one = _run_id(broker) == _run_id(ours)
    except Exception as error:
        return f"{told}, and they cannot be asked whether they are one server: {error}"
    return None if one else f"{told}, which are two servers"


def _may_be_one(broker: RedisPlace, ours: RedisPlace) -> bool:
    """Whether two identities that differ can be one database of one server on this machine, under two addresses."""
    one, other = broker.identity, ours.identity
    if not (broker.local and ours.local and one[2:] == other[2:]):
        return False
    ports = {identity.address.rpartition(":")[2] for identity in (one, other)}
    return "unix" in (one.scheme, other.scheme) or (one.scheme == other.scheme and len(ports) == 1)


def _run_id(place: RedisPlace) -> bytes:
    """What a server calls this run of it. Raises what redis-py raises."""
    client = place.client(_ASK_TIMEOUT)
    try:
        # Raw, since redis-py reads INFO in its own way, and that depends on the protocol.
        answer: Any = client.execute_command("INFO", "server", NEVER_DECODE=True)
    finally:
        client.close()
    text = answer.get("run_id", "") if isinstance(answer, dict) else _line(bytes(answer), b"run_id:")
    found = text.encode() if isinstance(text, str) else text
    if not found:
        raise ValueError(f"the server at {place.identity} does not say which run of it this is")
    return bytes(found)


def _line(text: bytes, name: bytes) -> bytes:
    return next((line[len(name) :].strip() for line in text.splitlines() if line.startswith(name)), b"")


# ------------------------------------------------------------------------------------------------- asking kombu


class _Recorder:
    """kombu's Redis channel and producer on a client that records its commands."""

    def __init__(self, app: Celery) -> None:
        from kombu.transport import redis as transport

        self._transport = transport
        self.dumps: Any = transport.dumps  # type: ignore[attr-defined]  # what its _put calls
        self._client = client = _Client()

        class Channel(transport.Channel):
            def _create_client(self, asynchronous: bool = False) -> Any:
                client.prefix = self.global_keyprefix
                return client

            def _disconnect_pools(self) -> None:
                """There are none."""

            def _next_delivery_tag(self) -> str:
                return ""  # the release script makes it

        class Transport(transport.Transport):
            pass

        Transport.Channel = Channel
        self._connection = app.connection_for_write()
        # Sentinel's channel differs in how it connects, which this one does not, and in fanout.
        # Not as an argument: in "redis+socket://…" the URL's own transport would win.
        self._connection.transport_cls = Transport
        self._channel: Any = self._connection.transport.create_channel(self._connection.transport)
        self._producer: Any = app.amqp.Producer(self._channel, auto_declare=False)
        self._lock = threading.Lock()

    def wire(self, message: Message) -> dict[str, Any]:
        """The message as ``Producer.publish`` and ``Channel.basic_publish`` make it; tag first, headers last."""
        given = message.properties
        properties = {k: v for k, v in given.items() if k not in _NOT_PROPERTIES}
        if "reply_to" in given:
            reply_to = given["reply_to"]
            properties["reply_to"] = reply_to.name if isinstance(reply_to, Queue) else reply_to
        properties["delivery_mode"] = message.delivery_mode
        channel = self._channel
        made = channel.prepare_message(
            message.body,
            given.get("priority", 0),
            message.content_type,
            message.content_encoding,
            message.headers,
            properties,
        )
        channel._inplace_augment_message(made, message.exchange, message.routing_key)
        properties = made.pop("properties")
        del properties["delivery_tag"]
        headers = with_due(without_due(made.pop("headers")), "")
        return {"properties": {"delivery_tag": "", **properties}, **made, "headers": headers}

    def publish(self, message: Message, declare: Sequence[Any]) -> list[tuple[Any, ...]]:
        """The commands of a real ``Producer.publish``, prefixed as kombu prefixes them; declarations left out."""
        with self._lock:
            self._declare(declare)
            self._client.commands.clear()
            self._producer.publish(
                message.body,
                content_type=message.content_type,
                content_encoding=message.content_encoding,
                headers=without_due(message.headers),
                exchange=message.exchange,
                routing_key=message.routing_key,
                delivery_mode=message.delivery_mode,
                **message.properties,
            )
            return self._client.taken()

    def declarations(self, declare: Sequence[Any]) -> list[tuple[Any, ...]]:
        """The commands by which kombu declares these entities: the exchanges' tables of bindings."""
        with self._lock:
            self._channel.state.clear()
            self._client.commands.clear()
            self._declare(declare)
            commands = self._client.taken()
        other = sorted({words[0] for words in commands} - {"SADD"})
        if other:
            raise _Leased(f"kombu declares the queue by {other}")
        return commands

    def _declare(self, declare: Sequence[Any]) -> None:
        for entity in declare:
            if getattr(entity, "auto_delete", False) or getattr(entity, "expires", None):
                raise _Leased("a queue that expires, or goes with its last consumer")
            entity.bind(self._channel).declare()


class _Client:
    """As much of a Redis client as kombu's channel needs to declare and publish; anything else is an AttributeError."""

    def __init__(self) -> None:
        self.commands: list[tuple[Any, ...]] = []
        self.prefix = ""

    def taken(self) -> list[tuple[Any, ...]]:
        commands, self.commands = self.commands, []
        return commands

    def _record(self, *words: Any) -> _Client:
        if self.prefix:
            words = tuple(_prefixed(self.prefix, list(words)))
        self.commands.append(words)
        return self

    def ping(self) -> bool:
        return True

    def lpush(self, key: str, value: Any) -> Any:
        return self._record("LPUSH", key, value)

    def sadd(self, key: str, *members: Any) -> Any:
        return self._record("SADD", key, *members)

    def pexpire(self, key: str, milliseconds: int) -> Any:
        return self._record("PEXPIRE", key, milliseconds)

    def llen(self, key: str) -> Any:
        """Asked by queue_declare, for its answer."""
        return self

    def smembers(self, key: str) -> set[bytes]:
        return set()

    def pipeline(self, transaction: bool = True) -> _Client:
        return self

    def execute(self) -> list[Any]:
        return []

    def __enter__(self) -> _Client:
        return self

    def __exit__(self, *error: object) -> None:
        """Nothing to give back."""


def _prefixed(prefix: str, words: list[Any]) -> list[Any]:
    from kombu.transport.redis import GlobalKeyPrefixMixin

    class Prefixing(GlobalKeyPrefixMixin):
        global_keyprefix = prefix

    return list(Prefixing()._prefix_args(words))


# ------------------------------------------------------------------------------------------------- reading back


def read_wire(record: bytes) -> Message:
    """The message of a payload made for direct release. Raises whatever is wrong with one that is not."""
    try:
        wire = json.loads(_HEAD.encode() + record + _CLOSE.encode())
    except ValueError:
        wire = json.loads(_HEAD.encode() + record + f"{_BETWEEN}{_CLOSE}".encode())
    properties, headers, body = wire["properties"], wire["headers"], wire["body"]
    headers = without_due(headers)
    del properties["delivery_tag"]
    info = properties.pop("delivery_info")
    encoded = properties.pop("body_encoding", None) == "base64"
    return Message(
        body=base64.b64decode(body) if encoded else str(body).encode(),
        content_type=wire["content-type"],
        content_encoding=wire["content-encoding"],
        headers=headers,
        exchange=info["exchange"],
        routing_key=info["routing_key"],
        delivery_mode=properties.pop("delivery_mode"),
        declare=[],
        properties=properties,
    )
