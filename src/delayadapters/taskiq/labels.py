"""What a message's labels say about its delay. No I/O.

==================  ==================================================================================================
``delay``           seconds from now, as taskiq's other brokers understand it
``x_delay``         the same, never taken for the delay of retries
``delay_until``     an absolute time: an aware datetime, or its ISO form; a naive one is UTC, as taskiq's schedules are
==================  ==================================================================================================

taskiq sends labels as strings with their types beside (labels.py), so all of these arrive as text.

None of them is left in a message that is sent on: SmartRetryMiddleware multiplies ``delay`` by the number of the retry
(so a retry's own delay would be multiplied again), ``Context.requeue`` and SimpleRetryMiddleware pass on what they
find, and taskiq-aio-pika would delay once more.

SmartRetryMiddleware also reads the task's own ``delay`` label, as the delay of its retries. While a task runs, that
one is put back as a :class:`RetryDelay`, which is a number to SmartRetryMiddleware and recognisably no request to us.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from typing import Any, Final, Literal, TypeAlias

from ..due import resolve
from .errors import DelayLabelError

__all__ = ["DELAY_LABELS", "DELAY_UNTIL", "DecoratorDelay", "Request", "RetryDelay", "read_request", "retry_delay"]

DELAY: Final = "delay"
X_DELAY: Final = "x_delay"
DELAY_UNTIL: Final = "delay_until"
DELAY_LABELS: Final = (DELAY, X_DELAY, DELAY_UNTIL)
RETRIES: Final = "_retries"
DecoratorDelay: TypeAlias = Literal["auto", "send", "retry"]

_MARK: Final = " (retry)"
_SHOWN: Final = 100
"""Characters of a bad value in an error's message."""
_TIMEDELTA: Final = re.compile(r"(?:(-?\d+) days?, )?(\d+):(\d\d):(\d\d(?:\.\d+)?)")


class RetryDelay(float):
    """The delay of a task's retries, in the ``delay`` label of a running task.

    As text (what taskiq makes of a label that is passed on) it says so, and pickled it is a plain float.
    """

    def __str__(self) -> str:
        return f"{float(self)!r}{_MARK}"

    def __reduce__(self) -> tuple[type[float], tuple[float]]:
        return (float, (float(self),))


@dataclass(frozen=True, slots=True)
class Request:
    """What a message asks for. Neither ``delay`` nor ``at``: send it now.

    ``label``: which one said so; None: none did. ``untouched``: the message may go as it is. ``kept``: the ``delay``
    label was taken for the delay of retries and belongs into the message.
    """

    delay: float | timedelta | None = None
    at: datetime | None = None
    label: str | None = None
    untouched: bool = False
    kept: bool = False

    @property
    def waits(self) -> bool:
        return self.delay is not None or self.at is not None


_NOTHING: Final = Request(untouched=True)


def read_request(
    labels: Mapping[str, Any], own: Mapping[str, Any], policy: DecoratorDelay, retries_by_default: bool
) -> Request:
    """What ``labels`` ask for. ``own``: the labels of the task's decorator.

    Raises:
        DelayLabelError: not a delay, or several that contradict each other.
    """
    if not any(name in labels for name in DELAY_LABELS):
        return _NOTHING
    found = {name: labels[name] for name in DELAY_LABELS if not _is_none(labels.get(name))}
    kept = False
    if DELAY in found and (_is_retry_delay(found[DELAY]) or meant_for_retries(labels, own, policy, retries_by_default)):
        kept = not _is_retry_delay(found.pop(DELAY))
    if len(found) > 1:
        chosen = {name: value for name, value in found.items() if str(value) != str(own.get(name))}
        if len(chosen) != 1:
            shown = " and ".join(f"{name}={_shown(value)}" for name, value in found.items())
            raise DelayLabelError(reason=f"give one of {', '.join(DELAY_LABELS)}; got {shown}")
        found = chosen
    if not found:
        return Request(kept=kept)
    name, value = next(iter(found.items()))
    request = Request(at=_moment(value), label=name) if name == DELAY_UNTIL else _relative(name, value)
    try:
        resolve(request.delay, request.at, now=time.time_ns() // 1000)
    except (TypeError, ValueError) as error:
        raise DelayLabelError(reason=f"label {name}={_shown(value)}: {error}") from error
    if request.delay is not None and _is_over(request.delay):
        request = Request(label=name)
    return replace(request, kept=kept)


def _is_over(delay: float | timedelta) -> bool:
    return delay <= timedelta(0) if isinstance(delay, timedelta) else delay <= 0


def meant_for_retries(
    labels: Mapping[str, Any], own: Mapping[str, Any], policy: DecoratorDelay, retries_by_default: bool
) -> bool:
    """Whether a message's ``delay`` is its decorator's, and that is the delay of SmartRetryMiddleware's retries."""
    if policy == "send" or own.get(DELAY) is None or RETRIES in labels or str(labels.get(DELAY)) != str(own[DELAY]):
        return False
    return policy == "retry" or _retries(labels, retries_by_default)


def retry_delay(
    labels: Mapping[str, Any], own: Mapping[str, Any], policy: DecoratorDelay, retries_by_default: bool
) -> RetryDelay | None:
    """What SmartRetryMiddleware is to find in the ``delay`` label of a running task; None: nothing."""
    if policy == "send" or own.get(DELAY) is None:
        return None
    if policy == "auto" and not _retries(labels, retries_by_default):
        return None
    try:
        return RetryDelay(own[DELAY])
    except (TypeError, ValueError):
        return None


def _retries(labels: Mapping[str, Any], default: bool) -> bool:
    """taskiq/middlewares/smart_retry_middleware.py, ``is_retry_on_error``."""
    value = labels.get("retry_on_error")
    if _is_none(value):
        return default
    return value.lower() == "true" if isinstance(value, str) else bool(value)


def _is_none(value: Any) -> bool:
    return value is None or value == "None"


def _is_retry_delay(value: Any) -> bool:
    return isinstance(value, RetryDelay) or (isinstance(value, str) and value.endswith(_MARK))


def _relative(name: str, value: Any) -> Request:
    if isinstance(value, timedelta):
        return Request(delay=value, label=name)
    number = None
    if isinstance(value, str):
        if match := _TIMEDELTA.fullmatch(value):
            days, hours, minutes, seconds = match.groups()
            return Request(
                delay=timedelta(days=int(days or 0), hours=int(hours), minutes=int(minutes), seconds=float(seconds)),
                label=name,
            )
        try:
            number = float(value)
        except ValueError:
            number = None
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
    if number is None:
        hint = f"; for an absolute time use the label {DELAY_UNTIL}" if _looks_like_a_date(value) else ""
        raise DelayLabelError(reason=f"label {name} must be a number of seconds, got {_shown(value)}{hint}")
    if not math.isfinite(number):
        raise DelayLabelError(reason=f"label {name} must be a finite number of seconds, got {_shown(value)}")
    return Request(delay=number, label=name)


def _moment(value: Any) -> datetime:
    moment = value
    if isinstance(value, str):
        text = value[:-1] + "+00:00" if value.endswith(("Z", "z")) else value
        try:
            moment = datetime.fromisoformat(text)
        except ValueError:
            moment = None
    if not isinstance(moment, datetime):
        raise DelayLabelError(
            reason=f"label {DELAY_UNTIL} must be an aware datetime (or its ISO 8601 form), got {_shown(value)}; "
            f"for seconds from now use the label {DELAY}"
        )
    return moment.replace(tzinfo=timezone.utc) if moment.utcoffset() is None else moment


def _shown(value: Any) -> str:
    """For a message: short, whatever it is."""
    try:
        text = repr(value)
    except ValueError:  # an int of more than 4300 digits
        return f"a huge {type(value).__name__}"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}… ({len(text)} characters)"


def _looks_like_a_date(value: Any) -> bool:
    return isinstance(value, datetime) or (isinstance(value, str) and re.match(r"\d{4}-\d\d-\d\d", value) is not None)
