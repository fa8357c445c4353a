"""What a demo shows: a bar while it runs, a table, and its key of the report."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .story import Run

Result = Mapping[str, Any]
WIDTH = 79


class Progress:
    """A bar on a terminal; elsewhere a line now and then. ``beside``: another run, and what to call it."""

    def __init__(self, run: Run, beside: tuple[str, Run] | None = None) -> None:
        self.live = sys.stdout.isatty()
        self.total = len(run.near)
        self.beside = beside
        self.last = ("", -1)

    def __call__(self, done: int, seconds: float, said: str) -> None:
        beside = f"   {self.beside[0]} {self.beside[1].done():4}" if self.beside else ""
        if self.live:
            room = 24 if beside else 36
            filled = done * room // self.total
            bar = "█" * filled + "·" * (room - filled)
            print(f"\r\033[K{bar} {done:4}/{self.total} {seconds:5.1f} s{beside}  {said}"[:WIDTH], end="", flush=True)
        elif (said, done * 4 // self.total) != self.last:
            self.last = (said, done * 4 // self.total)
            print(f"{seconds:5.1f} s  {done:4}/{self.total} executed{beside}   {said}", flush=True)

    def end(self) -> None:
        if self.live:
            print()


def table(columns: Mapping[str, Result]) -> str:
    """Side by side: a column a run."""

    def cell(value: object, unit: str = "") -> str:
        return "–" if value is None else f"{value:,}{unit}"

    rows: list[tuple[str, list[str]]] = []
    for key in ("scheduled", "executed", "lost", "duplicated", "early", "cancelled", "cancelled_but_run", "waiting"):
        rows.append((key.replace("_", " "), [cell(c[key]) for c in columns.values()]))
    for key in ("p50", "p99", "max"):
        rows.append((f"lateness {key}", [cell(c["lateness_ms"][key], " ms") for c in columns.values()]))
    rows.append(("latest, kills included", [cell(c["lateness_all_ms"]["max"], " ms") for c in columns.values()]))
    for key, title in (
        ("before", "worker memory before"),
        ("all_waiting", "  with all waiting"),
        ("end", "  at the end"),
    ):
        rows.append((title, [cell(c["worker_memory_mb"][key], " MB") for c in columns.values()]))
    rows.append(("scheduling took", [cell(c["schedule_s"], " s") for c in columns.values()]))
    widths = [max(len(name), *(len(cells[i]) for _, cells in rows)) for i, name in enumerate(columns)]
    lines = [" " * 26 + "  ".join(name.rjust(width) for name, width in zip(columns, widths, strict=True))]
    lines += [
        f"{title:26}" + "  ".join(c.rjust(w) for c, w in zip(cells, widths, strict=True)) for title, cells in rows
    ]
    return "\n".join(lines)


def kills(result: Result) -> str:
    return "; ".join(f"{kill['what']} at {kill['at_s']:.1f} s" for kill in result["kills"])


def tell(result: Result, *more: str) -> None:
    """The paragraphs below a table."""
    touched = ", ".join("{:.1f}–{:.1f} s".format(*kill["touched_s"]) for kill in result["kills"])
    notes = [
        f"Killed (SIGKILL): {kills(result)}. Lateness is of the {result['untouched']} jobs that no kill touched; "
        f"{result['excluded']} were due around one ({touched})."
    ]
    for text in (*notes, *more):
        print(textwrap.fill(text, WIDTH))


def read(report: Path) -> dict[str, Any]:
    """The report as it is; nothing when there is none, or none of ours."""
    with contextlib.suppress(FileNotFoundError, ValueError):
        found = json.loads(report.read_text("utf-8"))
        if isinstance(found, dict) and all(isinstance(value, dict) for value in found.values()):
            return found
    return {}


def write(report: Path, key: str, result: Result) -> None:
    """Replaces one framework's key; the others' stay. Whole or not at all."""
    whole = {**read(report), key: dict(result)}
    aside = report.with_name(report.name + ".new")
    aside.write_text(json.dumps(dict(sorted(whole.items())), indent=2) + "\n", "utf-8")
    os.replace(aside, report)
    print(f"Report: {report}, key {key}")
