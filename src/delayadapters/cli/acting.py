"""``cancel``, ``reschedule``, ``release-now`` and ``dead …``: one job, many, those of a list or those of a filter."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar

import click

from .desk import INTERRUPTED, Desk, Moment, Span, desk_of, interruptible, json_option, open_queue
from .looking import paging_options, print_jobs, show, window_options
from .paper import Sheet, print_json, progress
from .selecting import Filter, find, pages

if TYPE_CHECKING:
    from ..jobs import Job, Outcome
    from ..redis.commands import Row
    from ..redis.steering import Steer
    from ..redis.sync import DelayQueue

__all__ = ["cancel", "dead", "release_now", "reschedule"]

F = TypeVar("F", bound=Callable[..., Any])

_BATCH: Final = 100
_DONE: Final = {
    "cancel": "cancelled",
    "reschedule": "rescheduled",
    "release": "rescheduled",
    "replay": "replayed",
    "discard": "discarded",
}


def acting_options(command: F) -> F:
    """Which ones, and how."""
    for option in (
        json_option,
        click.option("-y", "--yes", is_flag=True, help="Do not ask before acting on several."),
        click.option("--dry-run", is_flag=True, help="Only say what would be done."),
        click.option("--all", "everything", is_flag=True, help="All there are."),
    ):
        command = option(command)
    decorated: F = click.argument("ids", nargs=-1, metavar="[ID]...")(command)
    return decorated


@click.command()
@acting_options
@window_options
@click.pass_context
def cancel(
    ctx: click.Context,
    ids: Sequence[str],
    pattern: str | None,
    due_before: datetime | None,
    due_after: datetime | None,
    id_prefix: str,
    everything: bool,
    dry_run: bool,
    yes: bool,
    as_json: bool,
) -> None:
    """Cancel what waits, for good.

    Give ids, - to read them from standard input, or a filter. A framework is not told: for Celery, whose result
    backend and chords have to know, use celery -A proj delay cancel.
    """
    wanted = Filter(pattern, due_before, due_after, id_prefix)
    _Act(ctx, "cancel", everything, dry_run, yes, as_json).on(ids, wanted)


@click.command()
@acting_options
@window_options
@click.option("--delay", "--countdown", "delay", type=Span(), default=None, help="From now: seconds, or 15m, 2h, 7d.")
@click.option(
    "--at", "--eta", "at", type=Moment(), default=None, help="ISO 8601 (without a zone: UTC), or 15m, 2h from now."
)
@click.pass_context
def reschedule(
    ctx: click.Context,
    ids: Sequence[str],
    pattern: str | None,
    due_before: datetime | None,
    due_after: datetime | None,
    id_prefix: str,
    delay: float | None,
    at: datetime | None,
    everything: bool,
    dry_run: bool,
    yes: bool,
    as_json: bool,
) -> None:
    """Give what waits another due time.

    Give ids, - to read them from standard input, or a filter. With a filter all get the same due time, and are released
    in the order they have now.
    """
    if (delay is None) == (at is None):
        raise click.UsageError("give one of --delay and --at")
    wanted = Filter(pattern, due_before, due_after, id_prefix)
    _Act(ctx, "reschedule", everything, dry_run, yes, as_json, delay, at).on(ids, wanted)


@click.command(name="release-now")
@acting_options
@window_options
@click.pass_context
def release_now(
    ctx: click.Context,
    ids: Sequence[str],
    pattern: str | None,
    due_before: datetime | None,
    due_after: datetime | None,
    id_prefix: str,
    everything: bool,
    dry_run: bool,
    yes: bool,
    as_json: bool,
) -> None:
    """Make what waits due now.

    Give ids, - to read them from standard input, or a filter.
    """
    wanted = Filter(pattern, due_before, due_after, id_prefix)
    _Act(ctx, "release", everything, dry_run, yes, as_json, 0.0).on(ids, wanted)


# ---------------------------------------------------------------------------------------------------------------- dead


@click.group()
def dead() -> None:
    """Those set aside because their release failed again and again."""


def dead_options(command: F) -> F:
    for option in (
        click.option("--reason", default=None, metavar="PATTERN", help="Only with this reason; * and ? are wild."),
        click.option("--id-prefix", default="", metavar="TEXT", help="Only ids that begin so."),
        click.option(
            "--name", "--task", "pattern", default=None, metavar="PATTERN", help="Only this task; * and ? are wild."
        ),
    ):
        command = option(command)
    return command


@dead.command(name="ls")
@dead_options
@paging_options
@click.option("--ids", "only_ids", is_flag=True, help="Print ids only, in full, for example for: … | dead replay -")
@json_option
@click.pass_context
def dead_ls(
    ctx: click.Context,
    pattern: str | None,
    id_prefix: str,
    reason: str | None,
    limit: int,
    cursor: str | None,
    only_ids: bool,
    as_json: bool,
) -> None:
    """The dead in order of death, with their reason."""
    wanted = Filter(pattern, id_prefix=id_prefix, reason=reason)
    with open_queue(ctx) as queue:
        jobs, cursor = find(queue, wanted, limit, cursor, "dead")
    print_jobs(ctx, jobs, cursor, as_json, "dead ls", reasons=True, only_ids=only_ids)


dead.add_command(show)


def _add_dead_verb(verb: str, help: str) -> None:
    @dead.command(name=verb, help=help)
    @acting_options
    @dead_options
    @click.pass_context
    def command(
        ctx: click.Context,
        ids: Sequence[str],
        pattern: str | None,
        id_prefix: str,
        reason: str | None,
        everything: bool,
        dry_run: bool,
        yes: bool,
        as_json: bool,
    ) -> None:
        wanted = Filter(pattern, id_prefix=id_prefix, reason=reason)
        _Act(ctx, verb, everything, dry_run, yes, as_json).on(ids, wanted)


_add_dead_verb("replay", "Let dead ones wait again, due now, their attempts counted from zero.")
_add_dead_verb("discard", "Delete dead ones.")


# -------------------------------------------------------------------------------------------------------------- acting


class _Act:
    """One call of a verb. In batches of 100: one script call each, so that other clients of Redis do not wait."""

    def __init__(
        self,
        ctx: click.Context,
        verb: str,
        everything: bool,
        dry_run: bool,
        yes: bool,
        as_json: bool,
        delay: float | None = None,
        at: datetime | None = None,
    ) -> None:
        self.ctx, self.verb, self.everything = ctx, verb, everything
        self.dry_run, self.yes, self.as_json = dry_run, yes, as_json
        self.delay, self.at = delay, at
        self.desk: Desk = desk_of(ctx)
        self.steer: Steer = "reschedule" if verb == "release" else verb  # type: ignore[assignment]  # a literal
        self.which: Literal["due", "dead"] = "dead" if verb in ("replay", "discard") else "due"
        self.word = {"release": "made due now"}.get(verb, _DONE[verb])

    def on(self, ids: Sequence[str], wanted: Filter) -> None:
        if bool(ids) + bool(wanted) + self.everything != 1:
            raise click.UsageError("give ids, or a filter such as --name, or --all")
        if ids:
            self._on_ids(self._listed(ids))
        else:
            self._on_filter(wanted)

    def _ask(self, question: str) -> None:
        if not self.yes:
            click.confirm(question, abort=True, err=True)

    # ---------------------------------------------------------------- ids

    def _listed(self, ids: Sequence[str]) -> list[str]:
        if "-" not in ids:
            return list(dict.fromkeys(ids))
        if not (self.yes or self.dry_run):
            raise click.UsageError("with - the ids come from standard input, where nobody can be asked: add --yes")
        listed = (line.rstrip("\r\n") for line in sys.stdin)
        return list(dict.fromkeys([*(id for id in ids if id != "-"), *(id for id in listed if id)]))

    def _on_ids(self, ids: list[str]) -> None:
        if self.dry_run:
            self._dry_ids(ids)
            return
        if len(ids) > 1:
            self._ask(f"{self.verb.capitalize()} {self.desk.count(len(ids))}?")
        if self.verb == "cancel" and self.desk.before_cancel:
            self.desk.before_cancel(self.ctx)
        outcomes: list[tuple[str, str]] = []
        stopped = False
        try:
            with open_queue(self.ctx) as queue, interruptible() as interrupts:
                for at in range(0, len(ids), _BATCH):
                    if interrupts.pressed:
                        stopped = True
                        break
                    some = ids[at : at + _BATCH]
                    said = [(id, one.value) for id, one in zip(some, self._many(queue, some), strict=True)]
                    outcomes += said
                    if not self.as_json:
                        for id, word in said:
                            _line(f"{id}  {word}")
        finally:
            if self.as_json:
                print_json([{"id": id, "outcome": word} for id, word in outcomes])
        if not self.as_json:
            self._explain(word for _, word in outcomes)
        if stopped:
            click.echo(f"interrupted: {len(outcomes):,} of {self.desk.count(len(ids))} done", err=True)
            self.ctx.exit(INTERRUPTED)
        if any(word != _DONE[self.verb] for _, word in outcomes):
            self.ctx.exit(1)

    def _many(self, queue: DelayQueue, ids: Sequence[str]) -> Sequence[Outcome]:
        from ..redis.steering import steer_ids

        if self.verb == "cancel":
            return queue.cancel_many(ids)
        if self.which == "due":
            return queue.reschedule_many(ids, delay=self.delay, at=self.at)
        return queue._run(steer_ids(queue._verbs, self.steer, ids))

    def _dry_ids(self, ids: Sequence[str]) -> None:
        with open_queue(self.ctx) as queue:
            states = [{"id": id, "state": job.state.value if (job := queue.get(id)) else "not_found"} for id in ids]
        if self.as_json:
            print_json(states)
            return
        for one in states:
            _line(f"{one['id']}  {one['state']}")
        right = "dead" if self.which == "dead" else "waiting"
        count = sum(one["state"] == right for one in states)
        click.echo(f"dry run: {self.desk.count(count)} would be {self.word}")

    def _explain(self, words: Iterable[str]) -> None:
        sheet, seen = Sheet(), dict.fromkeys(words)
        for word in seen:
            if word in self.desk.said and word != _DONE[self.verb]:
                sheet.text(f"{word}: {self.desk.said[word]}")
                sheet.print()
                sheet = Sheet()

    # ---------------------------------------------------------------- filter

    def _on_filter(self, wanted: Filter) -> None:
        with open_queue(self.ctx) as queue:
            target, start = self._target(queue)
            total = None
            if self.dry_run or not self.yes or sys.stderr.isatty():
                total = self._count(queue, wanted, target, start)
                if self.dry_run:
                    return
                if total:
                    self._ask(f"{self.verb.capitalize()} {self.desk.count(total)}?")
            if self.verb == "cancel" and self.desk.before_cancel:
                self.desk.before_cancel(self.ctx)
            said: Counter[str] = Counter()
            with interruptible() as interrupts, progress(total, self.verb) as advance:
                for batch in self._batches(queue, wanted, target, start):
                    if interrupts.pressed:
                        break
                    said.update(self._steer(queue, batch, target))
                    advance(len(batch))
                stopped = interrupts.pressed
        self._report(said, stopped)

    def _target(self, queue: DelayQueue) -> tuple[int, int]:
        """The due time all get, microseconds (0: now), and the server's time."""
        from ..due import resolve
        from ..redis.steering import server_time

        now = queue._run(server_time(queue._verbs))
        if self.steer != "reschedule":
            return 0, now
        target = resolve(self.delay, self.at, now=now).on(now)
        return (target if target > now else 0), now

    def _batches(self, queue: DelayQueue, wanted: Filter, target: int, start: int) -> Iterator[list[tuple[Row, Job]]]:
        # A replayed job that dies again comes up again behind all others: those who died since are not meant.
        before = start + 1 if self.which == "dead" else None
        for page, _ in pages(queue, wanted, self.which, before=before):
            todo = [pair for pair in page if not self._is_done(pair[0], target, start)]
            for at in range(0, len(todo), _BATCH):
                yield todo[at : at + _BATCH]

    def _is_done(self, row: Row, target: int, start: int) -> bool:
        """Moved jobs come up again further on: they are as they should be. So are due ones that are to be due."""
        if self.steer != "reschedule":
            return False
        return row.place.score == target if target else row.place.score <= start

    def _steer(self, queue: DelayQueue, batch: Sequence[tuple[Row, Job]], target: int) -> list[str]:
        from ..redis.steering import steer_rows

        said = queue._run(steer_rows(queue._verbs, self.steer, [row for row, _ in batch], target))
        if self.verb == "cancel" and self.desk.cancelled:
            gone = [job for (_, job), one in zip(batch, said, strict=True) if one.value == "cancelled"]
            self.desk.cancelled(queue, gone)
        return [one.value for one in said]

    def _count(self, queue: DelayQueue, wanted: Filter, target: int, start: int) -> int:
        """How many match; a dry run shows the first of them."""
        total = 0
        first: list[Job] = []
        for batch in self._batches(queue, wanted, target, start):
            total += len(batch)
            first += [replace(job, payload=b"") for _, job in batch[: 10 - len(first)]]
        if self.dry_run and self.as_json:
            from ..views import job_view

            print_json({"dry_run": True, "matched": total, "first": [job_view(job) for job in first]})
        elif self.dry_run:
            if first:
                print_jobs(self.ctx, first, None, False, "ls")
            click.echo(f"dry run: {self.desk.count(total)} would be {self.word}")
        return total

    def _report(self, said: Counter[str], stopped: bool) -> None:
        done = said.pop(_DONE[self.verb], 0)
        if self.as_json:
            print_json({"done": done, "others": dict(said), "interrupted": stopped})
        else:
            others = {
                "not_found": "gone meanwhile",
                "in_flight": "being released meanwhile",
            }
            rest = "".join(f"; {count:,} {others.get(word, word)}" for word, count in said.items())
            click.echo(f"{self.desk.count(done)} {self.word}{rest}")
        if stopped:
            click.echo(f"interrupted after {self.desk.count(done)}: the same call again does the rest", err=True)
            self.ctx.exit(INTERRUPTED)


def _line(text: str) -> None:
    sheet = Sheet()
    sheet.line(text)
    sheet.print()
