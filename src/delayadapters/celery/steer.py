"""``celery -A proj delay status | ls | show | cancel | …``: see the waiting tasks and steer them.

Imported by every ``celery`` call: click and the standard library only, the rest when a command runs.

Exit status: 0 when everything asked for was done, 1 when something was not (the output says what and why), 2 for wrong
usage, 69 (EX_UNAVAILABLE, as in Celery's own commands) when the delay Redis does not answer.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Final

import click

if TYPE_CHECKING:
    from ..jobs import Job
    from .queue import TaskQueue

__all__ = ["add_commands", "find_jobs"]

EX_UNAVAILABLE: Final = 69
_WIDTH: Final = 80
_PAGE: Final = 500
_UNITS: Final = {"": 1, "s": 1, "m": 60, "h": 3_600, "d": 86_400, "w": 604_800}
_DONE: Final = frozenset({"cancelled", "rescheduled", "replayed", "discarded"})
_SAID: Final = {
    "in_flight": "being released right now; celery control revoke reaches it in a worker",
    "released": "already released; celery control revoke reaches it in a worker",
    "not_found": "no such task in the delay queue",
}


class DelayRedisAway(click.ClickException):
    """Celery's own exit status for a broker that does not answer."""

    exit_code = EX_UNAVAILABLE


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


# ------------------------------------------------------------------------------------------------------------ commands

_json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
_yes_option = click.option("-y", "--yes", is_flag=True, help="Do not ask before acting on several tasks.")
_limit_option = click.option(
    "--limit", type=click.IntRange(1, 10_000), default=50, show_default=True, help="At most so many tasks."
)
_cursor_option = click.option("--cursor", default=None, help="Go on where a listing ended.")
_ids_argument = click.argument("ids", nargs=-1, required=True, metavar="ID...")


@click.command()
@_json_option
@click.pass_context
def status(ctx: click.Context, as_json: bool) -> None:
    """The delay queue in numbers."""
    from .views import stats_view

    with _queue(ctx) as queue:
        view = stats_view(queue.name, queue.stats())
    if as_json:
        _print_json(view)
        return
    next_due = view["next_due"]
    rows = [
        ("queue", view["queue"]),
        ("waiting", view["waiting"]),
        ("  of these due", view["due"]),
        ("being released", view["leased"]),
        ("dead", view["dead"]),
        ("next due", f"{_when(next_due)}  ({_from_now(next_due)})" if next_due else "-"),
        ("overdue", f"{view['oldest_overdue']:.1f} s"),
    ]
    _print_pairs(rows)


@click.command()
@click.option("--task", "pattern", default=None, metavar="NAME", help="Only tasks of this name; * and ? are wild.")
@click.option("--due-before", type=Moment(), default=None, help="Only what is due before (ISO 8601, or 15m, 2h).")
@click.option("--due-after", type=Moment(), default=None, help="Only what is due then or later.")
@_limit_option
@_cursor_option
@_json_option
@click.pass_context
def ls(
    ctx: click.Context,
    pattern: str | None,
    due_before: datetime | None,
    due_after: datetime | None,
    limit: int,
    cursor: str | None,
    as_json: bool,
) -> None:
    """Waiting tasks in due order. With --task, all those due in the window are read."""
    with _queue(ctx) as queue:
        jobs, cursor = find_jobs(queue, pattern, due_before, due_after, limit, cursor)
    _print_jobs(jobs, cursor, as_json, "delay ls")


@click.command()
@click.argument("id")
@_json_option
@click.pass_context
def show(ctx: click.Context, id: str, as_json: bool) -> None:
    """One task, waiting or dead: what is stored, and what its message says."""
    from .views import job_view, message_view

    with _queue(ctx) as queue:
        job = queue.get(id)
    if job is None:
        if as_json:
            _print_json(None)
        else:
            click.echo(f"{id}: {_SAID['not_found']}", err=True)
        ctx.exit(1)
    view = {**job_view(job), "message": message_view(job)}
    if as_json:
        _print_json(view)
        return
    message = view.pop("message")
    view["due"] = f"{_when(view['due'])}  ({_from_now(view['due'])})"
    _print_pairs([(name, value) for name, value in {**view, **message}.items() if value is not None])


@click.command()
@_ids_argument
@_yes_option
@_json_option
@click.pass_context
def cancel(ctx: click.Context, ids: Sequence[str], yes: bool, as_json: bool) -> None:
    """Cancel waiting tasks, for good. Their result is REVOKED; a chord that waits for one fails."""
    _act(ctx, "Cancel", ids, yes, as_json, lambda queue, id: queue.cancel(id))


@click.command()
@click.argument("id")
@click.option("--countdown", type=float, default=None, help="Seconds from now.")
@click.option("--eta", type=Moment(), default=None, help="ISO 8601 (without a zone: UTC), or 15m, 2h from now.")
@_json_option
@click.pass_context
def reschedule(ctx: click.Context, id: str, countdown: float | None, eta: datetime | None, as_json: bool) -> None:
    """Give a waiting task another due time."""
    if (countdown is None) == (eta is None):
        raise click.UsageError("give one of --countdown and --eta")
    _act(ctx, "Reschedule", [id], True, as_json, lambda queue, id: queue.reschedule(id, delay=countdown, at=eta))


@click.command(name="release-now")
@_ids_argument
@_yes_option
@_json_option
@click.pass_context
def release_now(ctx: click.Context, ids: Sequence[str], yes: bool, as_json: bool) -> None:
    """Make waiting tasks due now."""
    _act(ctx, "Release", ids, yes, as_json, lambda queue, id: queue.release_now(id))


@click.group()
def dead() -> None:
    """Tasks set aside because their release failed again and again."""


@dead.command(name="ls")
@_limit_option
@_cursor_option
@_json_option
@click.pass_context
def dead_ls(ctx: click.Context, limit: int, cursor: str | None, as_json: bool) -> None:
    """Dead tasks in order of death, with their reason."""
    with _queue(ctx) as queue:
        page = queue.dead_jobs(limit=limit, cursor=cursor)
    _print_jobs(page.jobs, page.cursor, as_json, "delay dead ls", reasons=True)


@dead.command()
@_ids_argument
@_yes_option
@_json_option
@click.pass_context
def replay(ctx: click.Context, ids: Sequence[str], yes: bool, as_json: bool) -> None:
    """Let dead tasks wait again, due now."""
    _act(ctx, "Replay", ids, yes, as_json, lambda queue, id: queue.replay(id))


@dead.command()
@_ids_argument
@_yes_option
@_json_option
@click.pass_context
def discard(ctx: click.Context, ids: Sequence[str], yes: bool, as_json: bool) -> None:
    """Delete dead tasks."""
    _act(ctx, "Discard", ids, yes, as_json, lambda queue, id: queue.discard(id))


dead.add_command(show)


def add_commands(group: click.Group) -> None:
    """Add them all to ``celery delay``."""
    for command in (status, ls, show, cancel, reschedule, release_now, dead):
        group.add_command(command)


# ------------------------------------------------------------------------------------------------------------- finding


def find_jobs(
    queue: TaskQueue,
    pattern: str | None = None,
    due_before: datetime | None = None,
    due_after: datetime | None = None,
    limit: int = 50,
    cursor: str | None = None,
) -> tuple[list[Job], str | None]:
    """Up to ``limit`` waiting jobs, and the cursor behind the last of them (None: there are no more)."""
    from ..due import to_micros
    from ..redis.commands import Cursor

    if cursor is None and due_after is not None:
        cursor = str(Cursor(max(to_micros(due_after), 0), b""))
    found: list[Job] = []
    while True:
        left = limit - len(found)
        size = left if pattern is None else _PAGE
        page = queue.jobs(due_before=due_before, limit=size, cursor=cursor)
        if pattern is not None:
            matches = [n for n, job in enumerate(page.jobs) if _matches(job, pattern)]
            if len(matches) > left:  # the page must end with the last job that is shown, for the cursor to be right
                page = queue.jobs(due_before=due_before, limit=matches[left - 1] + 1, cursor=cursor)
        found += [job for job in page.jobs if pattern is None or _matches(job, pattern)]
        cursor = page.cursor
        if cursor is None or len(found) >= limit:
            return found, cursor


def _matches(job: Job, pattern: str) -> bool:
    return fnmatchcase(job.meta.get("task", ""), pattern)


# -------------------------------------------------------------------------------------------------------------- acting


@contextmanager
def _queue(ctx: click.Context) -> Iterator[TaskQueue]:
    """The app's queue; what goes wrong with it ends the command with a message."""
    from celery.exceptions import ImproperlyConfigured

    from ..errors import DelayError, RedisFault
    from .fixup import installed
    from .settings import make_queue

    app = ctx.obj.app
    if installed(app) is None:
        raise click.UsageError("this app has no delay queue: call delayadapters.celery.install(app) where it is made")
    app.set_current()
    try:
        queue = make_queue(app)
        try:
            yield queue
        finally:
            queue.close()
    except (DelayError, ImproperlyConfigured, ValueError, TypeError) as error:
        raise (DelayRedisAway if isinstance(error, RedisFault) else click.ClickException)(str(error)) from error


def _act(
    ctx: click.Context,
    verb: str,
    ids: Sequence[str],
    yes: bool,
    as_json: bool,
    act: Callable[[TaskQueue, str], Any],
) -> None:
    ids = list(dict.fromkeys(ids))
    if len(ids) > 1 and not yes:
        click.confirm(f"{verb} {len(ids)} tasks?", abort=True, err=True)
    if verb == "Cancel":
        ctx.obj.app.loader.import_default_modules()  # a task may have a result backend, or receivers, of its own
    outcomes: list[dict[str, str]] = []
    try:
        with _queue(ctx) as queue:
            for id in ids:
                outcome = act(queue, id).value
                outcomes.append({"id": id, "outcome": outcome})
                if not as_json:
                    click.echo(f"{id}  {outcome}" + (f" ({_SAID[outcome]})" if outcome in _SAID else ""))
    finally:
        if as_json:
            _print_json(outcomes)
    if any(one["outcome"] not in _DONE for one in outcomes):
        ctx.exit(1)


# ------------------------------------------------------------------------------------------------------------ printing


def _print_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=2, default=str))


def _print_pairs(rows: Iterable[tuple[str, Any]]) -> None:
    for name, value in rows:
        click.echo(f"{name:<15} {_plain(value)}")


def _print_jobs(jobs: Sequence[Job], cursor: str | None, as_json: bool, command: str, *, reasons: bool = False) -> None:
    from .views import job_view

    views = [job_view(job) for job in jobs]
    if as_json:
        _print_json({"jobs": views, "cursor": cursor})
        return
    if not views:
        click.echo("no tasks")
    else:
        width = max(2, *(len(view["id"]) for view in views))
        left = max(_WIDTH - width - 23, 8)
        click.echo(f"{'DUE (UTC)':<19}  {'ID':<{width}}  TASK")
        for view in views:
            click.echo(f"{_when(view['due'])}  {_plain(view['id']):<{width}}  {_cut(view['task'] or '?', left)}")
            if reasons or view["reason"]:
                click.echo(_cut(f"  {view['attempts']} attempts: {view['reason'] or '-'}", _WIDTH))
    if cursor is not None:
        click.echo(f"more: {command} --cursor {cursor}", err=True)


def _when(iso: str) -> str:
    return datetime.fromisoformat(iso).strftime("%Y-%m-%d %H:%M:%S")


def _from_now(iso: str) -> str:
    seconds = round((datetime.fromisoformat(iso) - datetime.now(timezone.utc)).total_seconds())
    text = str(timedelta(seconds=abs(seconds)))
    return f"in {text}" if seconds >= 0 else f"{text} ago"


def _plain(value: Any) -> str:
    """As one line: an id or a reason comes from elsewhere, and must not steer the terminal."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in str(value))


def _cut(text: str, width: int) -> str:
    text = _plain(text)
    ellipsis = "…" if (sys.stdout.encoding or "").lower().startswith("utf") else "~"
    return text if len(text) <= width else text[: width - 1] + ellipsis
