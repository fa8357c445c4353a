"""``top``: the queue, again and again."""

from __future__ import annotations

import contextlib
import json
import os
import select
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

import click

from .desk import errors_told, interruptible, open_queue
from .looking import Picture, status_sheet, take_picture
from .paper import Sheet, fancy

if TYPE_CHECKING:
    from ..redis.sync import DelayQueue

__all__ = ["Rates", "top", "top_sheet"]

_HEARD_EVERY: Final = 0.1
"""Seconds between looks at the keyboard."""
_COUNTED: Final = ("scheduled", "released", "failed", "cancelled")


@dataclass(frozen=True)
class Rates:
    """What happened a second between two pictures."""

    seconds: float
    counts: dict[str, int]

    @classmethod
    def between(cls, before: Picture | None, after: Picture) -> Rates:
        if before is None or after.now <= before.now:
            return cls(0.0, dict.fromkeys(_COUNTED, 0))
        counts = {name: getattr(after.counters, name) - getattr(before.counters, name) for name in _COUNTED}
        # A purge in between begins at 0 again.
        return cls((after.now - before.now) / 1e6, {name: max(0, count) for name, count in counts.items()})

    def view(self) -> dict[str, float]:
        return {name: round(count / self.seconds, 1) if self.seconds else 0.0 for name, count in self.counts.items()}


def top_sheet(picture: Picture, rates: Rates) -> Sheet:
    """One frame."""
    sheet = status_sheet(picture)
    sheet.line("")
    sheet.pair("a second", "  ".join(f"{name} {rate:,.1f}" for name, rate in rates.view().items()), "cyan")
    return sheet


@click.command()
@click.option(
    "--interval", type=click.FloatRange(0.1, 3600), default=1.0, show_default=True, help="Seconds between looks."
)
@click.option("--iterations", type=click.IntRange(1), default=None, help="Look so often, then end. Default: for ever.")
@click.option("--json", "as_json", is_flag=True, help="Print a line of JSON a look.")
@click.pass_context
def top(ctx: click.Context, interval: float, iterations: int | None, as_json: bool) -> None:
    """Watch the delay queue live: status, again and again, and what happens a second.

    q or Ctrl-C ends it. Without a terminal, or with NO_COLOR, it prints one frame after the other.
    """
    with open_queue(ctx) as queue, interruptible() as interrupts:
        if as_json or not (fancy() and sys.stdin.isatty()):
            looks = _looks(queue, iterations, lambda: _wait(interval, lambda: interrupts.pressed))
            _print_frames(looks, as_json)
            return
        with _keys() as pressed:
            stopped = lambda: interrupts.pressed or "q" in pressed()  # noqa: E731  # two words, used once
            _live(_looks(queue, iterations, lambda: _wait(interval, stopped)))


Look: TypeAlias = "tuple[Picture, Rates, str | None]"
"""What there is to see, and what is wrong with Redis, in which case it is what was seen last."""


def _looks(queue: DelayQueue, iterations: int | None, pause: Callable[[], bool]) -> Iterator[Look]:
    """``pause`` answers whether to end. Only the first look must succeed."""
    before: Picture | None = None
    count = 0
    while True:
        try:
            with errors_told():
                picture = take_picture(queue)
        except click.ClickException as error:
            if before is None:
                raise
            yield before, Rates.between(None, before), error.message
        else:
            yield picture, Rates.between(before, picture), None
            before = picture
        count += 1
        if count == iterations or pause():
            return


def _print_frames(looks: Iterator[Look], as_json: bool) -> None:
    for number, (picture, rates, wrong) in enumerate(looks):
        if as_json:
            click.echo(json.dumps({**picture.view(), "per_second": rates.view(), "error": wrong}))
        else:
            click.echo(("\n" if number else "") + _frame(picture, rates, wrong).plain())
        sys.stdout.flush()


def _frame(picture: Picture, rates: Rates, wrong: str | None) -> Sheet:
    sheet = top_sheet(picture, rates)
    if wrong:
        sheet.line("")
        sheet.text(wrong, style="red")
    return sheet


def _live(looks: Iterator[Look]) -> None:
    from rich.console import Console
    from rich.live import Live

    with Live(console=Console(), screen=True, auto_refresh=False) as live:
        for picture, rates, wrong in looks:
            text = _frame(picture, rates, wrong).rich()
            text.append("\n\nq ends", style="dim")
            live.update(text, refresh=True)


def _wait(seconds: float, stopped: Callable[[], bool]) -> bool:
    """Whether to end."""
    deadline = time.monotonic() + seconds
    while not stopped():
        left = deadline - time.monotonic()
        if left <= 0:
            return False
        time.sleep(min(_HEARD_EVERY, left))
    return True


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[], str]]:
    """What was typed since the last look; the terminal is as it was afterwards."""
    try:
        import termios
        import tty
    except ImportError:  # Windows: Ctrl-C ends it
        yield lambda: ""
        return
    number = sys.stdin.fileno()
    before = termios.tcgetattr(number)

    def pressed() -> str:
        typed = b""
        while select.select([number], [], [], 0)[0]:
            some = os.read(number, 64)
            if not some:
                return "q"  # the terminal is gone
            typed += some
        return typed.decode(errors="replace").lower()

    tty.setcbreak(number)
    try:
        yield pressed
    finally:
        termios.tcsetattr(number, termios.TCSADRAIN, before)
