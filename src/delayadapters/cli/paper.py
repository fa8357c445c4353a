"""What the commands print: lines of at most 80 columns, coloured on a terminal that wants it, plain everywhere else."""

from __future__ import annotations

import json
import os
import sys
import textwrap
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any, Final

import click

if TYPE_CHECKING:
    from rich.text import Text

__all__ = [
    "WIDTH",
    "Sheet",
    "bar",
    "columns",
    "cut",
    "duration",
    "fancy",
    "from_now",
    "pad",
    "print_json",
    "progress",
    "safe",
    "when",
]

WIDTH: Final = 80


class Sheet:
    """Lines; a part of one may be ``(text, style)``, where the style is rich's and only seen on a terminal."""

    def __init__(self) -> None:
        self._lines: list[list[tuple[str, str]]] = []

    def line(self, *parts: str | tuple[str, str]) -> None:
        """One line, cut at 80 columns. What comes from elsewhere must not steer the terminal."""
        left, line = WIDTH, []
        for part in parts:
            text, style = part if isinstance(part, tuple) else (part, "")
            text = cut(text, left)
            left -= columns(text)
            line.append((text, style))
        self._lines.append(line)

    def pair(self, name: str, value: object, style: str = "", *, indent: int = 16) -> None:
        """A name and its value, which goes on below when it is long."""
        rows = wrap(str(value), WIDTH - indent) or [""]
        self.line(pad(name, indent), (rows[0], style))
        for row in rows[1:]:
            self.line(" " * indent, (row, style))

    def text(self, text: str, *, indent: int = 0, style: str = "") -> None:
        """A paragraph."""
        for row in wrap(text, WIDTH - indent):
            self.line(" " * indent, (row, style))

    def plain(self) -> str:
        return "\n".join("".join(text for text, _ in line).rstrip() for line in self._lines)

    def rich(self) -> Text:
        from rich.text import Text

        return Text("\n").join(Text.assemble(*line) for line in self._lines)

    def print(self) -> None:
        if not fancy():
            click.echo(self.plain())
            return
        from rich.console import Console

        Console(width=WIDTH, highlight=False, soft_wrap=True).print(self.rich())


def fancy() -> bool:
    """Whether standard output is a terminal that takes colours, and rich is here to make them."""
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    try:
        import rich  # noqa: F401
    except ImportError:
        return False
    return True


@contextmanager
def progress(total: int | None, label: str) -> Iterator[Any]:
    """``advance(n)``: a bar on standard error when that is a terminal that takes it, else nothing."""
    if not total or not sys.stderr.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        yield lambda n: None
        return
    with click.progressbar(length=total, label=label, file=sys.stderr) as shown:
        yield shown.update


def print_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=2, default=str))


# ------------------------------------------------------------------------------------------------------------ pieces


def safe(value: object) -> str:
    """As one line: an id or a reason comes from elsewhere, and must not steer the terminal."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in str(value))


def columns(text: str) -> int:
    """How wide it is on a terminal."""
    if text.isascii():
        return len(text)
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def cut(text: str, width: int) -> str:
    """At most so wide; what is cut off is marked."""
    text = safe(text)
    if columns(text) <= width:
        return text
    kept, left = [], width - 1
    for c in text:
        left -= columns(c)
        if left < 0:
            break
        kept.append(c)
    return "".join(kept) + ("…" if _unicode() else "~") if width > 0 else ""


def pad(text: str, width: int) -> str:
    return text + " " * max(0, width - columns(text))


def wrap(text: str, width: int) -> list[str]:
    """Lines of at most so many columns; a word that is longer is broken."""
    rows: list[str] = []
    for row in textwrap.wrap(safe(text), width, break_on_hyphens=False):
        rest = row
        while columns(rest) > width:  # textwrap counts characters
            head = cut(rest, width)[:-1]
            rows.append(head)
            rest = rest[len(head) :]
        rows.append(rest)
    return rows


def bar(share: float, width: int) -> str:
    """A bar of at most ``width`` columns; the smallest share is still to be seen."""
    full, block = share * width, "█" if _unicode() else "#"
    return block * max(1 if share > 0 else 0, round(full))


def when(moment: str | datetime) -> str:
    """UTC, to the second."""
    at = datetime.fromisoformat(moment) if isinstance(moment, str) else moment
    return at.astimezone(timezone.utc).strftime("%Y-%m-%d %H:%M:%S")


def from_now(moment: str | datetime) -> str:
    at = datetime.fromisoformat(moment) if isinstance(moment, str) else moment
    seconds = round((at - datetime.now(timezone.utc)).total_seconds())
    text = str(timedelta(seconds=abs(seconds)))
    return f"in {text}" if seconds >= 0 else f"{text} ago"


def duration(seconds: float | None) -> str:
    """Short: ``0.5 ms``, ``12 s``, ``3 h``."""
    if seconds is None:
        return "-"
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s")):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1000:.3g} ms"


def table(rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines with their cells below one another, the last one as it is."""
    rows = list(rows)
    widths = [max(columns(safe(cell)) for cell in column) for column in zip(*rows, strict=True)]
    return [
        "  ".join([*(pad(safe(c), w) for c, w in zip(row[:-1], widths[:-1], strict=True)), safe(row[-1])]).rstrip()
        for row in rows
    ]


def _unicode() -> bool:
    return (sys.stdout.encoding or "").lower().startswith("utf")
