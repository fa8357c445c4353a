"""``export`` and ``import``: a backlog as JSON lines, from one Redis to another.

The first line is a header, the last one says how many jobs there were, so that a file that was cut short is known as
such. Each job between has the token of the entry it was: the importing queue remembers tokens in the step that stores a
job, and skips what it has been given before.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import os
import re
import stat
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timezone
from typing import IO, TYPE_CHECKING, Any, Final, Literal

import click

from .desk import INTERRUPTED, desk_of, interruptible, json_option, open_queue
from .looking import window_options
from .paper import print_json, progress
from .selecting import Filter, pages

if TYPE_CHECKING:
    from ..redis.commands import Row
    from ..redis.steering import Incoming

__all__ = ["export", "import_"]

FORMAT: Final = 1
_BATCH: Final = 500
_LABEL: Final = re.compile(r"\d{8}T\d{6}\.\d{6}")


# -------------------------------------------------------------------------------------------------------------- export


@click.command()
@window_options
@click.option("--dead", "with_dead", is_flag=True, help="The dead ones, too.")
@click.option("-o", "--output", type=click.File("w", "utf-8"), default="-", help="A file; default: stdout.")
@json_option
@click.pass_context
def export(
    ctx: click.Context,
    pattern: str | None,
    due_before: datetime | None,
    due_after: datetime | None,
    id_prefix: str,
    with_dead: bool,
    output: IO[str],
    as_json: bool,
) -> None:
    """Write what waits as JSON lines, a job each, in due order.

    Nothing is changed. Stop producers and release loops first if the jobs are to be moved: what is being released is
    not in it, and what stays behind is released here, too.
    """
    wanted = Filter(pattern, due_before, due_after, id_prefix)
    count = unreadable = 0
    with open_queue(ctx) as queue, interruptible() as interrupts:
        # A file is opened, and an older one emptied, by the first write: not before Redis has answered.
        stats = queue.stats()
        _write(output, {"delayadapters": FORMAT, "queue": queue.name, "at": datetime.now(timezone.utc).isoformat()})
        total = None if wanted else stats.waiting + (stats.dead if with_dead else 0)
        with progress(total if output is not sys.stdout else None, "export") as advance:
            for which in _sets(with_dead):
                window = wanted if which == "due" else Filter(pattern, id_prefix=id_prefix)
                for page, _ in pages(queue, window, which, size=_BATCH):
                    if interrupts.pressed:
                        break
                    for row, _ in page:
                        line = _line(queue.name, row)
                        unreadable += "record" in line
                        _write(output, line)
                    count += len(page)
                    advance(len(page))
        leased = queue.stats().leased
        if not interrupts.pressed:
            _write(output, {"end": True, "jobs": count})
        output.flush()
    view = {"jobs": count, "leased": leased, "unreadable": unreadable, "interrupted": interrupts.pressed}
    if as_json:
        click.echo(json.dumps(view), err=True)
    else:
        desk = desk_of(ctx)
        said = f"{desk.count(count)} exported"
        if leased:
            said += f"; {leased:,} being released and not among them"
        if unreadable:
            said += f"; {unreadable:,} unreadable"
        click.echo(said, err=True)
    if interrupts.pressed:
        click.echo("interrupted: the export is not complete, and import will say so", err=True)
        ctx.exit(INTERRUPTED)


def _sets(with_dead: bool) -> tuple[Literal["due", "dead"], ...]:
    return ("due", "dead") if with_dead else ("due",)


def _write(output: IO[str], line: Mapping[str, Any]) -> None:
    output.write(json.dumps(line, separators=(",", ":"), ensure_ascii=False) + "\n")


def _line(name: str, row: Row) -> dict[str, Any]:
    """One job. Fields that say nothing are left out."""
    from ..errors import RecordUnreadable
    from ..jobs import State
    from ..redis.records import take_apart

    dead = row.state is State.DEAD
    try:
        whole = take_apart(row.record)
    except RecordUnreadable:
        return {
            "id": row.id,
            "due": row.place.score,
            "token": _token(name, row, 0, row.record),
            "record": _base64(row.record),
            **({"dead": row.place.score} if dead else {}),
        }
    line: dict[str, Any] = {
        "id": row.id,
        "due": whole.due,
        "token": _token(name, row, whole.due, whole.payload),
        "payload": _base64(whole.payload),
    }
    if row.place.score != whole.due:
        line["dead" if dead else "next_try"] = row.place.score
    elif dead:
        line["dead"] = row.place.score
    optional: dict[str, Any] = {
        "meta": dict(whole.meta),
        "release": whole.release and [[_word(word) for word in command] for command in whole.release],
        "released": whole.done,
        "attempts": whole.attempts,
        "requeues": whole.requeues,
        "reason": whole.reason,
        "raw": whole.raw,
    }
    return {**line, **{key: value for key, value in optional.items() if value}}


def _token(name: str, row: Row, due: int, payload: bytes) -> str:
    """Names the entry. Its number is given once in a queue; after a purge numbers begin anew, so due time and payload
    are in it, too: an entry that was moved to another time counts as another one, since doubled is better than lost."""
    digest = hashlib.blake2b(digest_size=15)
    for part in (name.encode(), row.place.entry, str(due).encode(), payload):
        digest.update(len(part).to_bytes(8, "big") + part)
    return _base64(digest.digest())


def _base64(value: bytes) -> str:
    return base64.b64encode(value).decode()


def _word(word: Any) -> Any:
    """A word of a release command: text, ``{"base64": …}``, ``{"put": "BYTES"}`` (a :class:`Payload`), or a list."""
    from ..jobs import Payload

    if isinstance(word, list):
        return [_word(part) for part in word]
    if isinstance(word, int):
        return {"put": Payload(word).name}
    try:
        return bytes(word).decode()
    except UnicodeDecodeError:
        return {"base64": _base64(word)}


# -------------------------------------------------------------------------------------------------------------- import


class Spoilt(click.ClickException):
    """The input is not what export wrote."""


@click.command(name="import")
@click.argument("file", type=click.File("r", "utf-8"), default="-")
@click.option("--again", is_flag=True, help="Store also what was imported here before; prints a LABEL.")
@click.option("--resume", metavar="LABEL", default=None, help="Go on with the --again that printed this.")
@click.option("--dry-run", is_flag=True, help="Only read the file through.")
@json_option
@click.pass_context
def import_(ctx: click.Context, file: IO[str], again: bool, resume: str | None, dry_run: bool, as_json: bool) -> None:
    """Take in what export wrote, from a FILE or standard input.

    Due times, order, ids, meta, payloads and direct releases are kept; an id that is here already is added beside.

    If it is interrupted, call it again with the same file, or with a new export of the same queue: what was taken in
    is skipped, even when it was released or cancelled meanwhile. That is remembered for a week after the last import.

    With --again it is skipped only by a call with --resume and the label that --again printed when it began.
    """
    from ..redis.steering import restore

    taken = seen = 0
    finished = stopped = False
    desk = desk_of(ctx)
    label = _label(again, resume)
    if dry_run:
        label = ""
    wrong = ""
    if label:
        # At once, since nobody knows how it ends.
        click.echo(f"label {label}: should this end early, call it with --resume {label} in place of --again", err=True)
    with open_queue(ctx) as queue, interruptible() as interrupts, progress(_length(file), "import") as advance:
        try:
            for batch, last, size in _batches(file, label):
                if interrupts.pressed:
                    stopped = True
                    break
                if batch and not dry_run:
                    taken += queue._run(restore(queue._verbs, batch))
                seen += len(batch)
                finished = last
                advance(size)
        except Spoilt as error:
            finished, wrong = False, error.message
    view: dict[str, Any] = {
        "read": seen,
        "imported": taken,
        "skipped": 0 if dry_run else seen - taken,
        "complete": finished,
        **({"label": label} if label else {}),
    }
    if as_json:
        print_json(view)
    elif dry_run:
        click.echo(f"dry run: {desk.count(seen)} would be imported, less those that were before")
    else:
        click.echo(f"{desk.count(taken)} imported, {seen - taken:,} skipped: imported before")
    if stopped:
        rest = f"a call with --resume {label}" if label else "the same call again"
        click.echo(f"interrupted: {rest} does the rest", err=True)
        ctx.exit(INTERRUPTED)
    if not finished:
        told = [wrong or "the input ends before its end"]
        if label:
            told.append(f"import a whole export with --resume {label}; nothing is doubled")
        elif not wrong:
            told.append("export again, import again; nothing is doubled")
        click.echo(f"Error: {': '.join(told)}", err=True)
        ctx.exit(1)


def _label(again: bool, resume: str | None) -> str:
    """What tells this import from those before it; empty: nothing does. Part of each job's token."""
    if resume is None:
        return datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%S.%f") if again else ""
    if again:
        raise click.UsageError("give one of --again, which begins, and --resume, which goes on")
    if not _LABEL.fullmatch(resume):  # a slip of the hand would double what was taken in
        raise click.UsageError(f"--resume needs the label that --again printed, got {resume!r}")
    return resume


def _length(file: IO[str]) -> int | None:
    """Bytes, for the progress bar."""
    try:
        found = os.fstat(file.fileno())
    except (OSError, ValueError, AttributeError):
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) else None


def _batches(file: IO[str], label: str) -> Iterator[tuple[list[Incoming], bool, int]]:
    """Jobs by the hundreds, whether that was the end, and how many bytes were read for them."""
    batch: list[Incoming] = []
    size = count = 0
    state = "header"
    for number, text in enumerate(_text_lines(file), 1):
        size += len(text)
        line = _parsed(text, number)
        if state == "header":
            if line.get("delayadapters") != FORMAT:
                raise Spoilt(f"line {number}: not what delayadapters export writes (format {FORMAT})")
            state = "jobs"
        elif state == "end":
            raise Spoilt(f"line {number}: something follows the end; import one export at a time")
        elif line.get("end"):
            if line.get("jobs") != count:
                raise Spoilt(f"lines are missing: the export had {line.get('jobs')} jobs, {count} were read")
            state = "end"
        else:
            try:
                batch.append(_incoming(line, label))
            except (ValueError, TypeError, KeyError, binascii.Error) as error:
                if batch:
                    yield batch, False, size
                raise Spoilt(f"line {number}: {type(error).__name__}: {error}") from error
            count += 1
            if len(batch) == _BATCH:
                yield batch, False, size
                batch, size = [], 0
    yield batch, state == "end", size


def _text_lines(file: IO[str]) -> Iterator[str]:
    try:
        yield from file
    except UnicodeDecodeError as error:
        raise Spoilt(f"not UTF-8: {error}") from error


def _parsed(text: str, number: int) -> dict[str, Any]:
    try:
        line = json.loads(text)
    except ValueError as error:
        raise Spoilt(f"line {number}: not JSON: {error}") from error
    if not isinstance(line, dict):
        raise Spoilt(f"line {number}: not a JSON object")
    return line


def _incoming(line: Mapping[str, Any], label: str) -> Incoming:
    from ..due import LATEST_DUE, check_id, check_meta
    from ..jobs import State
    from ..redis.records import RAW, pack, with_state
    from ..redis.steering import Incoming

    due = _micros(line["due"], LATEST_DUE)
    dead = line.get("dead")
    score = _micros(line.get("next_try", due) if dead is None else dead, LATEST_DUE)
    token = base64.b64decode(line["token"], validate=True) + label.encode()
    if "record" in line:  # unreadable there: dead here, kept whole
        flags, tail = pack(base64.b64decode(line["record"], validate=True), None, None)
        flags, tail = with_state(flags | RAW, tail, (0, 0, "unreadable record", 0))
        return Incoming(check_id(line["id"]), token, State.DEAD, score, due, flags, tail)
    release = line.get("release")
    payload = base64.b64decode(line["payload"], validate=True)
    flags, tail = pack(
        payload, check_meta(line.get("meta")), None if release is None else [_command(words) for words in release]
    )
    state = (line.get("attempts", 0), line.get("requeues", 0), line.get("reason", ""), line.get("released", 0))
    if not all(isinstance(number, int) and number >= 0 for number in (state[0], state[1], state[3])):
        raise ValueError(f"attempts, requeues and released must be numbers, got {state}")
    flags, tail = with_state(flags | (RAW if line.get("raw") else 0), tail, state)
    return Incoming(check_id(line["id"]), token, State.WAITING if dead is None else State.DEAD, score, due, flags, tail)


def _micros(value: Any, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
        raise ValueError(f"a time must be microseconds since the epoch, got {value!r}")
    return value


def _command(words: Sequence[Any]) -> list[Any]:
    from ..jobs import Payload

    def word(one: Any) -> Any:
        if isinstance(one, list):
            return [word(part) for part in one]
        if isinstance(one, dict):
            return Payload[one["put"]] if "put" in one else base64.b64decode(one["base64"], validate=True)
        if not isinstance(one, str):
            raise ValueError(f"a word of release must be text, a list, put or base64, got {one!r}")
        return one

    return [word(one) for one in words]
