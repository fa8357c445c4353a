"""``drain``, which waits, and ``purge``, which deletes."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

import click

from .desk import INTERRUPTED, Span, desk_of, interruptible, json_option, open_queue
from .paper import print_json

if TYPE_CHECKING:
    from ..jobs import Stats

__all__ = ["drain", "purge"]

_LOOK_EVERY = 0.2


@click.command()
@click.option("--timeout", type=Span(), default=None, help="Give up after so long: seconds, or 5m. Default: never.")
@click.option("--due", "only_due", is_flag=True, help="Wait for what is due or being released; not for later jobs.")
@json_option
@click.pass_context
def drain(ctx: click.Context, timeout: float | None, only_due: bool, as_json: bool) -> None:
    """Wait until nothing waits and nothing is being released, for deploys.

    A job that is due tomorrow keeps the queue from being empty until then: see --due. Exit status 1 when the time is
    up. It releases nothing itself, and keeps nobody from scheduling more.
    """
    began = time.monotonic()
    told = ""
    with open_queue(ctx) as queue, interruptible() as interrupts:
        while True:
            stats = queue.stats()
            left = (stats.due if only_due else stats.waiting) + stats.leased
            if not left:
                break
            line = _line(stats)
            if line != told and sys.stderr.isatty() and not as_json:
                click.echo(line, err=True)
                told = line
            if interrupts.pressed:
                _say(ctx, stats, began, as_json, "interrupted", INTERRUPTED)
            if timeout is not None and time.monotonic() - began >= timeout:
                _say(ctx, stats, began, as_json, "timed out", 1)
            # In small steps, so that Ctrl-C is heard.
            time.sleep(min(_LOOK_EVERY, max(0.01, timeout - (time.monotonic() - began)) if timeout else _LOOK_EVERY))
    _say(ctx, stats, began, as_json, "drained", 0)


def _line(stats: Stats) -> str:
    return f"{stats.waiting:,} waiting, {stats.due:,} of these due, {stats.leased:,} being released"


def _say(ctx: click.Context, stats: Stats, began: float, as_json: bool, what: str, code: int) -> None:
    view: dict[str, Any] = {
        "outcome": what,
        "waiting": stats.waiting,
        "due": stats.due,
        "leased": stats.leased,
        "dead": stats.dead,
        "seconds": round(time.monotonic() - began, 3),
    }
    if as_json:
        print_json(view)
    else:
        dead = f", {stats.dead:,} dead" if stats.dead else ""
        click.echo(f"{what}: {_line(stats)}{dead}", err=code != 0)
    ctx.exit(code)


@click.command()
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@json_option
@click.pass_context
def purge(ctx: click.Context, yes: bool, as_json: bool) -> None:
    """Delete the whole queue, dead jobs, leases and counters included.

    What is being released now may still go out.
    """
    with open_queue(ctx) as queue:
        stats = queue.stats()
        count = desk_of(ctx).count(stats.waiting + stats.leased + stats.dead)
        if not yes:
            click.confirm(f"Delete {queue.name} with {count}?", abort=True, err=True)
        queue.purge()
    if as_json:
        print_json({"waiting": stats.waiting, "leased": stats.leased, "dead": stats.dead})
    else:
        click.echo(f"purged: {count}")
