"""``status``, ``ls`` and ``show``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from .desk import Moment, desk_of, json_option, open_queue
from .paper import WIDTH, Sheet, bar, columns, cut, duration, from_now, pad, print_json, safe, when
from .selecting import Filter, find

if TYPE_CHECKING:
    from ..jobs import Counters, Job, Loop, Stats
    from ..redis.sync import DelayQueue

__all__ = ["Picture", "ls", "print_jobs", "show", "status", "status_sheet", "take_picture", "window_options"]

F = TypeVar("F", bound=Callable[..., Any])

SPANS: Final = (("due now", 0), ("next minute", 60), ("next hour", 3_600), ("next day", 86_400), ("next week", 604_800))
"""What falls due: a label, and the seconds from now at which it ends. What is later comes last."""
_ID_WIDTH: Final = 40


def window_options(command: F) -> F:
    """``--name``, ``--id-prefix``, ``--due-before``, ``--due-after``."""
    for option in (
        click.option("--due-after", type=Moment(), default=None, help="Only what is due then or later."),
        click.option(
            "--due-before", type=Moment(), default=None, help="Only what is due before (ISO 8601, or 15m, 2h)."
        ),
        click.option("--id-prefix", default="", metavar="TEXT", help="Only ids that begin so."),
        click.option(
            "--name", "--task", "pattern", default=None, metavar="PATTERN", help="Only this task; * and ? are wild."
        ),
    ):
        command = option(command)
    return command


def paging_options(command: F) -> F:
    """``--limit`` and ``--cursor``."""
    for option in (
        click.option("--cursor", default=None, help="Go on where a listing ended."),
        click.option("--limit", type=click.IntRange(1, 10_000), default=50, show_default=True, help="At most so many."),
    ):
        command = option(command)
    return command


# -------------------------------------------------------------------------------------------------------------- status


@dataclass(frozen=True)
class Picture:
    """A queue at one moment."""

    name: str
    now: int
    stats: Stats
    falling: Sequence[tuple[str, int]]
    loops: Sequence[Loop]
    counters: Counters
    unlisted_shard: str | None

    def view(self) -> dict[str, Any]:
        from ..views import lateness_view, loop_view, stats_view

        counters = {name: getattr(self.counters, name) for name in type(self.counters).__slots__ if name != "lateness"}
        return {
            **stats_view(self.name, self.stats),
            "falling_due": dict(self.falling),
            "lateness": lateness_view(self.counters.lateness),
            "counters": counters,
            "loops": [loop_view(loop) for loop in self.loops],
            **({"warning": self.unlisted_shard} if self.unlisted_shard else {}),
        }


def take_picture(queue: DelayQueue) -> Picture:
    """A handful of round trips, whatever the queue's length."""
    from ..redis.steering import beyond, falling_due, server_time

    verbs = queue._verbs
    now = queue._run(server_time(verbs))
    counts = queue._run(falling_due(verbs, [now + seconds * 1_000_000 for _, seconds in SPANS]))
    labels = [label for label, _ in SPANS] + ["later"]
    extra = queue._run(beyond(verbs))
    warning = None
    if extra is not None:
        warning = f"this queue has more than {len(verbs.shards)} shards ({extra} is there, too): give --shards"
    return Picture(
        queue.name,
        now,
        queue.stats(),
        list(zip(labels, counts, strict=True)),
        queue.loops(),
        queue.counters(),
        warning,
    )


def status_sheet(picture: Picture) -> Sheet:
    """The queue in numbers, as a screen."""
    from ..due import from_micros
    from ..views import lateness_view

    sheet, stats = Sheet(), picture.stats
    next_due = None if stats.next_due is None else from_micros(stats.next_due)
    sheet.pair("queue", picture.name, "bold")
    sheet.pair("waiting", f"{stats.waiting:,}")
    sheet.pair("  of these due", f"{stats.due:,}", "yellow" if stats.due else "")
    sheet.pair("being released", f"{stats.leased:,}")
    sheet.pair("dead", f"{stats.dead:,}", "red" if stats.dead else "")
    sheet.pair("next due", f"{when(next_due)} UTC  ({from_now(next_due)})" if next_due else "-")
    sheet.pair("overdue", f"{stats.oldest_overdue:.1f} s", "red" if stats.oldest_overdue > 1 else "green")
    late = lateness_view(picture.counters.lateness)
    if late["released"]:
        beyond = "over 5 min"
        half, most = (f"≤ {duration(late[q])}" if late[q] is not None else beyond for q in ("p50", "p99"))
        sheet.pair("lateness", f"half of {late['released']:,} {half}, 99 % {most}")
    if not picture.loops:
        sheet.pair("release loops", "none: nothing is released", "red" if stats.waiting else "yellow")
    for number, loop in enumerate(picture.loops[:8]):
        ago = duration(loop.seen_ago)
        seen = f"heard of {ago} ago" if loop.alive else f"gone? silent for {ago}"
        shard = f", shard {loop.shard}" if any(other.shard for other in picture.loops) else ""
        said = f"{cut(loop.name, 30)}  {seen}{shard}{', watching' if loop.watching else ''}"
        sheet.pair("release loops" if number == 0 else "", said, "green" if loop.alive else "red")
    if len(picture.loops) > 8:
        sheet.pair("", f"and {len(picture.loops) - 8} more (--json lists them)")
    sheet.line("")
    falling_lines(sheet, picture.falling)
    if picture.unlisted_shard:
        sheet.line("")
        sheet.text(f"warning: {picture.unlisted_shard}", style="red")
    return sheet


def falling_lines(sheet: Sheet, falling: Sequence[tuple[str, int]]) -> None:
    """What falls due when, a bar each."""
    most = max(1, *(count for _, count in falling))
    widest = max(len(f"{count:,}") for _, count in falling)
    for label, count in falling:
        left = WIDTH - 16 - widest - 2
        style = "red" if label == "due now" and count else "cyan"
        sheet.line(pad(label, 16), f"{count:>{widest},}  ", (bar(count / most, left), style))


@click.command()
@json_option
@click.pass_context
def status(ctx: click.Context, as_json: bool) -> None:
    """The delay queue in numbers, and what falls due when."""
    with open_queue(ctx) as queue:
        picture = take_picture(queue)
    if as_json:
        print_json(picture.view())
        return
    status_sheet(picture).print()
    empty = not (picture.stats.waiting or picture.stats.leased or picture.stats.dead or picture.loops)
    if empty and not picture.counters.scheduled:
        command = desk_of(ctx).command
        if command == "delayadapters":
            click.echo(f"nothing was ever in this queue; {command} queues lists those of this server", err=True)


# ------------------------------------------------------------------------------------------------------------------ ls


@click.command()
@window_options
@paging_options
@click.option("--ids", "only_ids", is_flag=True, help="Print ids only, in full, for example for: … | cancel -")
@json_option
@click.pass_context
def ls(
    ctx: click.Context,
    pattern: str | None,
    due_before: datetime | None,
    due_after: datetime | None,
    id_prefix: str,
    limit: int,
    cursor: str | None,
    only_ids: bool,
    as_json: bool,
) -> None:
    """What waits, in due order. With --name or --id-prefix, all that is due in the window is read."""
    wanted = Filter(pattern, due_before, due_after, id_prefix)
    with open_queue(ctx) as queue:
        jobs, cursor = find(queue, wanted, limit, cursor)
    print_jobs(ctx, jobs, cursor, as_json, "ls", only_ids=only_ids)


def print_jobs(
    ctx: click.Context,
    jobs: Sequence[Job],
    cursor: str | None,
    as_json: bool,
    command: str,
    *,
    reasons: bool = False,
    only_ids: bool = False,
) -> None:
    """A listing; the cursor goes to standard error, out of the way of pipes."""
    from ..views import job_view

    desk = desk_of(ctx)
    if as_json:
        print_json({"jobs": [job_view(job) for job in jobs], "cursor": cursor})
        return
    if only_ids:
        for job in jobs:
            click.echo(job.id)
    elif not jobs:
        click.echo(f"no {desk.noun}s")
    else:
        sheet = Sheet()
        width = min(_ID_WIDTH, max(2, *(columns(safe(job.id)) for job in jobs)))
        sheet.line((f"{'DUE (UTC)':<19}  {'ID':<{width}}  TASK", "bold"))
        for job in jobs:
            task = (job.meta.get("task") or "?", "cyan")
            sheet.line(f"{when(job.due_at)}  {pad(cut(job.id, width), width)}  ", task)
            if reasons or job.reason:
                sheet.line((f"  {job.attempts} attempts: {job.reason or '-'}", "red"))
        sheet.print()
    if cursor is not None:
        click.echo(f"more: {command} --cursor {cursor}", err=True)


# ---------------------------------------------------------------------------------------------------------------- show


@click.command()
@click.argument("id")
@json_option
@click.pass_context
def show(ctx: click.Context, id: str, as_json: bool) -> None:
    """One of them, waiting, being released or dead: what is stored."""
    from ..views import job_view

    desk = desk_of(ctx)
    with open_queue(ctx) as queue:
        job = queue.get(id)
    if job is None:
        if as_json:
            print_json(None)
        else:
            click.echo(f"{safe(id)}: {desk.said.get('not_found', 'not found')}", err=True)
        ctx.exit(1)
    view = job_view(job)
    details = desk.details(job) if desk.details else {}
    if as_json:
        print_json({**view, **details})
        return
    sheet = Sheet()
    view["due"] = f"{when(job.due_at)} UTC  ({from_now(job.due_at)})"
    for part in (view, *(value if isinstance(value, dict) else {name: value} for name, value in details.items())):
        for name, value in part.items():
            if value is not None and value != {}:
                sheet.pair(name, value, {"id": "bold", "reason": "red"}.get(name, ""))
    sheet.print()
