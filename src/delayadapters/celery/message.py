"""A captured Celery message as it waits in Redis: everything that ``kombu.Producer.publish`` was given, resolved.

(A job with a direct release has another form of payload, see :mod:`.direct`; ``Message.unpack`` reads both.)

Record format, version 1: a msgpack array

    [1, body, content type, content encoding, headers, exchange, exchange declaration, routing key, delivery mode,
     declarations, properties, expires]

``declarations`` are packed kombu entities (see :func:`pack_entity`); ``properties`` are all further keywords of
``publish`` (priority, mandatory, correlation_id, …), passed on as they came; ``expires`` is microseconds since the
epoch. Values which msgpack does not know (datetime, Decimal, UUID, …) travel as kombu's own JSON, which is how they
would reach a consumer anyway.
"""

# mypy: disallow-untyped-calls=False
# (kombu says that it is typed, and most of it is not)

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgpack
from kombu.entity import Exchange, Queue, binding
from kombu.exceptions import EncodeError
from kombu.utils import json

from ..errors import RecordUnreadable

__all__ = ["DUE_HEADER", "VERSION", "Message", "pack_entity", "unpack_entity", "with_due", "without_due"]

VERSION: Final = 1
DUE_HEADER: Final = "delayadapters_due"
"""The header that shows the due time (ISO 8601, UTC) on a released message; ``task.request.headers`` has it.

Where a message has headers of its own below ``headers`` (Sentry and others put them there), these are what
``task.request.headers`` shows (celery/app/task.py, ``Context``), so there it is in both.
"""

_FIELDS: Final = 12
_JSON: Final = 1  # msgpack extension type
_QUEUE: Final = "q"
_EXCHANGE: Final = "x"


@dataclass(frozen=True, slots=True)
class Message:
    """One task message, ready to publish."""

    body: bytes
    content_type: str
    content_encoding: str
    headers: dict[str, Any]
    exchange: str
    routing_key: str
    delivery_mode: int
    declare: Sequence[bytes]
    properties: Mapping[str, Any]
    exchange_declaration: bytes | None = None
    """Of an exchange that ``declare`` does not cover: virtual transports route by what their process has declared."""
    expires: int | None = None
    """When the task expires (microseconds since the epoch); the AMQP ``expiration`` is made from it at release."""

    def pack(self) -> bytes:
        """The record. Raises ``kombu.exceptions.EncodeError`` for a header or property that nothing can serialise."""
        return _pack(
            (
                VERSION,
                self.body,
                self.content_type,
                self.content_encoding,
                self.headers,
                self.exchange,
                self.exchange_declaration,
                self.routing_key,
                self.delivery_mode,
                self.declare,
                self.properties,
                self.expires,
            )
        )

    @classmethod
    def unpack(cls, record: bytes) -> Message:
        """The message of a job's payload. Raises RecordUnreadable when it is none, or a newer version wrote it."""
        try:
            if record[:1] == b'"':
                from .direct import read_wire

                return read_wire(record)
            fields = _unpack(record)
        except Exception as error:
            raise RecordUnreadable(f"not a Celery message record: {error}") from error
        if not isinstance(fields, list) or not fields or not isinstance(fields[0], int):
            raise RecordUnreadable("not a Celery message record: no version number")
        if fields[0] != VERSION or len(fields) != _FIELDS:
            raise RecordUnreadable(
                f"Celery message record of version {fields[0]} with {len(fields)} fields; "
                f"this release of delayadapters reads version {VERSION} with {_FIELDS}"
            )
        (_, body, content_type, encoding, headers, exchange, declaration, key, mode, declare, properties, expires) = (
            fields
        )
        if not (isinstance(body, bytes) and isinstance(headers, dict) and isinstance(properties, dict)):
            raise RecordUnreadable("Celery message record with fields of the wrong type")
        return cls(
            body=body,
            content_type=content_type,
            content_encoding=encoding,
            headers=headers,
            exchange=exchange,
            routing_key=key,
            delivery_mode=mode,
            declare=declare,
            properties=properties,
            exchange_declaration=declaration,
            expires=expires,
        )


def with_due(headers: Mapping[str, Any], due: str) -> dict[str, Any]:
    """The headers with ours, which comes last, and before it the headers' own ``headers``, where ours is last, too."""
    shown = {**headers, DUE_HEADER: due}
    own = headers.get("headers")
    if isinstance(own, dict):
        del shown["headers"], shown[DUE_HEADER]
        shown |= {"headers": {**without_due(own), DUE_HEADER: due}, DUE_HEADER: due}
    return shown


def without_due(headers: Mapping[str, Any]) -> dict[str, Any]:
    """The headers less ours: a retry passes on what its message came with (Context.as_execution_options)."""
    left = {key: value for key, value in headers.items() if key != DUE_HEADER}
    own = left.get("headers")
    if isinstance(own, dict) and DUE_HEADER in own:
        left["headers"] = {key: value for key, value in own.items() if key != DUE_HEADER}
    return left


def pack_entity(entity: Queue | Exchange) -> bytes:
    """A kombu Queue or Exchange as bytes: what differs from the defaults of its class."""
    if isinstance(entity, Queue):
        return _pack([_QUEUE, _changed(entity.as_dict(recurse=True), _QUEUE_DEFAULTS)])
    if isinstance(entity, Exchange):
        return _pack([_EXCHANGE, _changed(entity.as_dict(recurse=True), _EXCHANGE_DEFAULTS)])
    raise TypeError(f"declare= takes kombu Queue and Exchange objects, got {entity!r}")


def unpack_entity(packed: bytes) -> Queue | Exchange:
    """The Queue or Exchange that :func:`pack_entity` packed."""
    try:
        kind, options = _unpack(packed)
        if kind == _EXCHANGE:
            return Exchange(**options)
        if kind != _QUEUE:
            raise ValueError(f"unknown kind {kind!r}")
        if options.get("exchange"):
            options["exchange"] = Exchange(**options["exchange"])
        if options.get("bindings"):
            options["bindings"] = [_binding(fields) for fields in options["bindings"]]
        return Queue(**options)
    except Exception as error:
        raise RecordUnreadable(f"not a queue or exchange declaration: {error}") from error


def _binding(fields: dict[str, Any]) -> binding:
    if fields.get("exchange"):
        fields["exchange"] = Exchange(**fields["exchange"])
    return binding(**fields)


def _changed(options: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    changed = {key: value for key, value in options.items() if value != defaults.get(key)}
    exchange = changed.get("exchange")
    if isinstance(exchange, Mapping):
        changed["exchange"] = _changed(exchange, _EXCHANGE_DEFAULTS)
    return changed


_QUEUE_DEFAULTS: Final[Mapping[str, Any]] = Queue().as_dict(recurse=True)
_EXCHANGE_DEFAULTS: Final[Mapping[str, Any]] = Exchange().as_dict()


def _as_json(value: Any) -> Any:
    try:
        return msgpack.ExtType(_JSON, json.dumps(value).encode())
    except Exception as error:
        raise EncodeError(f"cannot store {value!r} in a task message: {error}") from error


def _from_ext(code: int, data: bytes) -> Any:
    if code != _JSON:
        raise ValueError(f"unknown extension type {code}")
    return json.loads(data.decode())


def _pack(value: Any) -> bytes:
    packed: bytes = msgpack.packb(value, default=_as_json, unicode_errors="surrogatepass")
    return packed


def _unpack(data: bytes) -> Any:
    return msgpack.unpackb(data, ext_hook=_from_ext, strict_map_key=False, unicode_errors="surrogatepass")
