"""What the verbs have in common: the queue they work on, their options, and how they end.

The same verbs serve ``delayadapters …`` and ``celery -A proj delay …``; a :class:`Desk` in the click context says how
the one differs from the other. Imported by every ``celery`` call: click and the standard library only.

Exit status: 0 when everything asked for was done, 1 when something was not (the output says what and why), 2 for
wrong usage, 69 (EX_UNAVAILABLE, as in Celery's own commands) when the delay Redis does not do what is asked, 130 after
Ctrl-C.
"""

from __future__ import annotations

import re
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

if TYPE_CHECKING:
    from ..jobs import Job
    from ..redis.sync import DelayQueue

__all__ = [
    "EX_UNAVAILABLE",
    "INTERRUPTED",
    "OTHER_NODE",
    "DelayRedisAway",
    "Desk",
    "Moment",
    "desk_of",
    "errors_told",
    "interruptible",
    "is_redirection",
    "json_option",
    "open_queue",
    "sit_down",
]

F = TypeVar("F", bound=Callable[..., Any])

EX_UNAVAILABLE: Final = 69
INTERRUPTED: Final = 130
_UNITS: Final = {"": 1, "s": 1, "m": 60, "h": 3_600, "d": 86_400, "w": 604_800}
_DESK: Final = "delayadapters.desk"


class DelayRedisAway(click.ClickException):
    """Celery's own exit status for a broker that does not answer."""

    exit_code = EX_UNAVAILABLE


@dataclass(frozen=True)
class Desk:
    """How a command finds its queue, and what it calls things."""

    open: Callable[[click.Context], AbstractContextManager[DelayQueue]]
    """The queue; opened when a verb needs it."""
    noun: str = "job"
    command: str = "delayadapters"
    """How to call this command, for hints."""
    said: Mapping[str, str] = field(default_factory=dict)
    """What an outcome means, where the word alone does not say."""
    details: Callable[[Job], dict[str, Any]] | None = None
    """What ``show`` can tell beside what every job has."""
    before_cancel: Callable[[click.Context], None] | None = None
    cancelled: Callable[[DelayQueue, Sequence[Job]], None] | None = None
    """Told of jobs that were cancelled many at once."""

    def count(self, number: int) -> str:
        return f"{number:,} {self.noun}{'' if number == 1 else 's'}"


def sit_down(ctx: click.Context, desk: Desk) -> None:
    """Let the verbs below this context work for ``desk``."""
    ctx.meta[_DESK] = desk


def desk_of(ctx: click.Context) -> Desk:
    desk: Desk = ctx.meta[_DESK]
    return desk


@contextmanager
def open_queue(ctx: click.Context) -> Iterator[DelayQueue]:
    """The queue; what goes wrong with it ends the command with a message of one line."""
    with errors_told(), desk_of(ctx).open(ctx) as queue:
        yield queue


@contextmanager
def errors_told() -> Iterator[None]:
    """Errors of the delay queue and bad values as click's, without a traceback."""
    from ..errors import DelayError, RedisFault

    try:
        yield
    except (DelayError, ValueError, TypeError) as error:
        told = OTHER_NODE if is_redirection(error.__cause__) else " ".join(str(error).split())
        raise (DelayRedisAway if isinstance(error, RedisFault) else click.ClickException)(told) from error


OTHER_NODE: Final = (
    "this server is one node of a Redis Cluster, and others have keys that are asked for: "
    "give delayadapters --cluster or set DELAYADAPTERS_CLUSTER=1"
)


def is_redirection(error: BaseException | None) -> bool:
    """Whether a cluster's node has named another one, which a client without ``--cluster`` does not ask."""
    from redis.exceptions import AskError

    # MOVED is one, too; redis-py 5 leaves both to the client of a cluster and gives us the text.
    return isinstance(error, AskError) or re.search(r"(^|: )(MOVED|ASK) \d+ \S+:\d+$", str(error)) is not None


class Moment(click.ParamType):  # type: ignore[type-arg]  # generic only since click 8.4
    """A point in time: ISO 8601 (without a zone: UTC, as in Celery) or a time from now such as 90, 15m, 2h, 7d."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> datetime:
        if isinstance(value, datetime):
            return value
        relative = re.fullmatch(r"\+?(\d+(?:\.\d+)?)([smhdw]?)", value)
        try:
            if relative:
                seconds = float(relative[1]) * _UNITS[relative[2]]
                return datetime.now(timezone.utc) + timedelta(seconds=seconds)
            moment = datetime.fromisoformat(re.sub("[zZ]$", "+00:00", value))  # Python 3.10 knows no Z
        except (ValueError, OverflowError):
            self.fail(f"{value!r} is neither ISO 8601 nor a time from now (90, 15m, 2h, 7d)", param, ctx)
        return moment if moment.utcoffset() is not None else moment.replace(tzinfo=timezone.utc)


class Span(click.ParamType):  # type: ignore[type-arg]  # generic only since click 8.4
    """A length of time in seconds: 90, 1.5m, 2h, 7d."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, (int, float)):
            return float(value)
        parts = re.fullmatch(r"\+?(\d+(?:\.\d+)?)([smhdw]?)", value)
        if parts is None:
            self.fail(f"{value!r} is no length of time (90, 15m, 2h, 7d)", param, ctx)
        return float(parts[1]) * _UNITS[parts[2]]


def json_option(command: F) -> F:
    decorated: F = click.option("--json", "as_json", is_flag=True, help="Print JSON.")(command)
    return decorated


class Interrupts:
    """Whether Ctrl-C was pressed; asked for between batches."""

    pressed = False


@contextmanager
def interruptible() -> Iterator[Interrupts]:
    """Ctrl-C lets the batch under way end, so that its outcome is known; a second one ends at once."""
    interrupts = Interrupts()

    def press(number: int, frame: FrameType | None) -> None:
        if interrupts.pressed:
            raise KeyboardInterrupt
        interrupts.pressed = True

    if threading.current_thread() is not threading.main_thread():
        yield interrupts
        return
    before = signal.signal(signal.SIGINT, press)
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, before)
