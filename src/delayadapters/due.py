"""Turning ``delay``/``at`` into a due time, and every other rule about a caller's arguments. No I/O, no clock of ours.

A relative delay stays relative: the script adds it to the Redis server's clock, so a client's clock does not matter.
An absolute time is converted here, once, exactly: datetimes are integers of microseconds and never pass through float.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta, timezone
from typing import Final, Literal, NamedTuple, TypeAlias, TypeVar, get_args

from .errors import PayloadTooLarge

__all__ = [
    "EPOCH",
    "LATEST_DUE",
    "MAX_CLAIM",
    "MAX_ID_BYTES",
    "MAX_PAGE",
    "Delay",
    "IfExists",
    "When",
    "check_id",
    "check_if_exists",
    "check_items",
    "check_limit",
    "check_max_payload",
    "check_meta",
    "check_moment",
    "check_payload",
    "check_reason",
    "from_micros",
    "lease_micros",
    "pause_micros",
    "resolve",
    "seconds_to_micros",
    "to_micros",
]

T = TypeVar("T")
Delay: TypeAlias = float | int | timedelta
IfExists: TypeAlias = Literal["error", "keep", "replace", "add"]

EPOCH: Final = datetime(1970, 1, 1, tzinfo=timezone.utc)
_MICROSECOND: Final = timedelta(microseconds=1)
LATEST_DUE: Final = (datetime(2251, 1, 1, tzinfo=timezone.utc) - EPOCH) // _MICROSECOND - 1
"""The last microsecond of the year 2250. All microseconds up to it fit a double exactly, which zset scores are."""
MAX_ID_BYTES: Final = 512
MAX_CLAIM: Final = 1000
"""Jobs a claim may ask for."""
MAX_PAGE: Final = 10_000
"""Jobs a page may ask for."""
_DAY: Final = 86_400_000_000


class When(NamedTuple):
    """A due time before Redis has seen it: ``micros`` from the server's *now*, or since the epoch."""

    relative: bool
    micros: int

    def on(self, now: int) -> int:
        """The due time in microseconds since the epoch, for a server whose clock says ``now``."""
        return now + self.micros if self.relative else max(self.micros, now)


NOW: Final = When(True, 0)


def to_micros(moment: datetime) -> int:
    """Whole microseconds since the epoch of an aware datetime; exact, also across DST edges (``fold`` counts)."""
    return (moment - EPOCH) // _MICROSECOND


def from_micros(micros: int) -> datetime:
    """The aware UTC datetime of microseconds since the epoch; exact."""
    return EPOCH + timedelta(microseconds=micros)


def seconds_to_micros(value: Delay, argument: str) -> int:
    """A duration as whole microseconds (rounded to the nearest); raises for NaN, infinite, bool and other types."""
    if isinstance(value, timedelta):
        return value // _MICROSECOND
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{argument} must be seconds (int or float) or a timedelta, got {value!r}")
    if isinstance(value, int):
        return value * 1_000_000
    if not math.isfinite(value):
        raise ValueError(f"{argument} must be a finite number of seconds, got {value!r}")
    # Beyond any date (and a float's microseconds may be infinite): as an integer it is merely too late.
    return round(value * 1_000_000) if abs(value) < 1e15 else int(value) * 1_000_000


def resolve(delay: Delay | None, at: datetime | None, *, now: int) -> When:
    """Exactly one of ``delay`` and ``at``, as a :class:`When`.

    A negative delay, or an ``at`` in the past, is due now. ``now`` (microseconds, the caller's clock) serves only to
    refuse a delay that would end after the year 2250.

    Raises:
        TypeError: both or neither given, or a wrong type (``bool`` included).
        ValueError: NaN, infinite, a naive datetime, or due later than the year 2250.
    """
    if delay is None and at is None:
        raise TypeError("give one of delay= (seconds or timedelta) and at= (aware datetime); got neither")
    if delay is not None and at is not None:
        raise TypeError(f"give one of delay= and at=, not both; got delay={delay!r} and at={at!r}")
    if delay is not None:
        micros = max(seconds_to_micros(delay, "delay"), 0)
        if now + micros > LATEST_DUE:
            raise ValueError(f"delay={delay!r} would be due later than the year 2250")
        return When(True, micros)
    if not isinstance(at, datetime):
        raise TypeError(f"at must be an aware datetime, got {at!r}")
    if at.utcoffset() is None:
        raise ValueError(f"at must be an aware datetime (with a timezone); got the naive {at!r}")
    micros = to_micros(at)
    if micros > LATEST_DUE:
        raise ValueError(f"at={at!r} is later than the year 2250")
    return When(False, micros) if micros > 0 else NOW


def lease_micros(lease: Delay) -> int:
    """The length of a lease in microseconds.

    Raises:
        TypeError, ValueError: not a number of seconds from 0.001 to a day.
    """
    length = seconds_to_micros(lease, "lease")
    if not 1000 <= length <= _DAY:
        raise ValueError(f"lease must be between 0.001 s and a day, got {lease!r}")
    return length


def pause_micros(retry_in: Delay, *, now: int) -> int:
    """The pause before a retry in microseconds; a negative one is none. ``now`` as for :func:`resolve`.

    Raises:
        TypeError, ValueError: no finite number of seconds, or it ends after the year 2250.
    """
    pause = max(seconds_to_micros(retry_in, "retry_in"), 0)
    if now + pause > LATEST_DUE:
        raise ValueError(f"retry_in={retry_in!r} would be due later than the year 2250")
    return pause


def check_moment(moment: datetime, argument: str) -> int:
    """An aware datetime as microseconds since the epoch; ValueError, naming ``argument``, for anything else."""
    if not isinstance(moment, datetime) or moment.utcoffset() is None:
        raise ValueError(f"{argument} must be an aware datetime, got {moment!r}")
    return to_micros(moment)


def check_id(id: str) -> bytes:
    """The id as Redis sees it: UTF-8, 1 to 512 bytes.

    Raises:
        TypeError: not a ``str``.
        ValueError: empty, longer than 512 bytes, or not encodable.
    """
    if not isinstance(id, str):
        raise TypeError(f"id must be a str, got {id!r}")
    try:
        raw = id.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"id must be encodable as UTF-8, got {id!r}") from error
    if not raw:
        raise ValueError("id must not be empty")
    if len(raw) > MAX_ID_BYTES:
        raise ValueError(f"id must be at most {MAX_ID_BYTES} bytes long, got {len(raw)} bytes beginning {id[:40]!r}")
    return raw


def check_payload(payload: bytes, max_payload: int | None) -> None:
    """Raises TypeError for anything but ``bytes``, PayloadTooLarge above ``max_payload`` bytes (None: no limit)."""
    if not isinstance(payload, bytes):
        raise TypeError(f"payload must be bytes, got {type(payload).__name__}: {str(payload)[:40]!r}")
    if max_payload is not None and len(payload) > max_payload:
        raise PayloadTooLarge(
            f"payload is {len(payload)} bytes, more than max_payload={max_payload}; "
            "store it elsewhere and schedule a reference, or raise max_payload"
        )


def check_max_payload(max_payload: int | None) -> int | None:
    """Raises ValueError for anything but a number of bytes or None (no limit)."""
    if max_payload is not None and (
        isinstance(max_payload, bool) or not isinstance(max_payload, int) or max_payload < 0
    ):
        raise ValueError(f"max_payload must be a number of bytes or None, got {max_payload!r}")
    return max_payload


def check_meta(meta: Mapping[str, str] | None) -> dict[str, str]:
    """A job's meta, copied; None is an empty one.

    Raises:
        TypeError: no mapping of ``str`` to ``str``.
        ValueError: not encodable as UTF-8.
    """
    if meta is None:
        return {}
    if not isinstance(meta, Mapping):
        raise TypeError(f"meta must be a mapping of str to str, got {meta!r}")
    for key, value in meta.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise TypeError(f"meta must map str to str, got {key!r}: {value!r}")
        try:
            (key + value).encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"meta must be encodable as UTF-8, got {key!r}: {value!r}") from error
    return dict(meta)


def check_if_exists(mode: str) -> None:
    """Raises ValueError for anything but one of :data:`IfExists`."""
    if mode not in get_args(IfExists):
        raise ValueError(f"if_exists must be one of {get_args(IfExists)}, got {mode!r}")


def check_limit(limit: int, most: int) -> int:
    """Raises ValueError for anything but an ``int`` from 1 to ``most``."""
    if isinstance(limit, bool) or not isinstance(limit, int) or not 1 <= limit <= most:
        raise ValueError(f"limit must be an int from 1 to {most}, got {limit!r}")
    return limit


def check_reason(reason: str) -> str:
    """Raises TypeError for anything but a ``str``."""
    if not isinstance(reason, str):
        raise TypeError(f"reason must be a str, got {reason!r}")
    return reason


def check_items(items: Iterable[T], kind: type[T], argument: str) -> list[T]:
    """The items, all of them seen before anything is done with the first.

    Raises:
        TypeError: no iterable, or not all of it is of this ``kind``.
    """
    if not isinstance(items, Iterable):
        raise TypeError(f"{argument} must be an iterable of {kind.__name__}, got {items!r}")
    listed = list(items)
    for one in listed:
        if not isinstance(one, kind):
            raise TypeError(f"{argument} must be {kind.__name__} objects, got {one!r}")
    return listed
