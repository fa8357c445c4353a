"""Draws docs/pictures/*.svg. No figure is in this script: they come from two files beside the pictures.

    benchmarks/pictures.py [--results FOLDER]        # or: make pictures

``docs/pictures/data.json`` has what the benchmarks measured, with the command, the day and the machine of each. Where
``bench-results/`` has newer results they replace it first. ``docs/pictures/peers.json`` has the peers which our
benchmarks do not run; they are drawn hollow.

    chrt -r 5 make bench-celery bench-arq bench-taskiq ARGS="--only lateness"
    make bench-celery ARGS="--only memory"
    make pictures
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

ROOT = Path(__file__).parent.parent
PICTURES = ROOT / "docs" / "pictures"
RESULTS = ("celery-lateness", "celery-memory", "arq_lateness", "taskiq-lateness")
# Readable on white and on near-black alike.
TEXT, QUIET, OURS, THEIRS = "#768390", "#76839055", "#2f9e6e", "#d97757"
mpl.rcParams.update(
    {
        "svg.fonttype": "none",  # text stays text: small files, and it can be read aloud, searched and tested
        "svg.hashsalt": "delayadapters",
        "font.family": "sans-serif",
        "font.sans-serif": ["Helvetica", "Arial", "DejaVu Sans", "sans-serif"],
        "font.size": 11,
        "text.color": TEXT,
        "axes.labelcolor": TEXT,
        "axes.edgecolor": TEXT,
        "xtick.color": TEXT,
        "ytick.color": TEXT,
        "axes.spines.top": False,
        "axes.spines.right": False,
        # The fonts of whoever looks decide in the end; the width is measured with the one that comes with matplotlib.
    }
)
mpl.set_loglevel("error")  # "findfont": as said


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=ROOT / "bench-results", help="folder of the JSON results")
    options = parser.parse_args()
    data = refreshed(PICTURES / "data.json", options.results)
    peers = json.loads((PICTURES / "peers.json").read_text("utf-8"))
    lateness(bars_of(data, peers))
    memory(data["celery-memory"])


def refreshed(path: Path, results: Path) -> dict[str, Any]:
    """The data, with what the folder of results has of it."""
    data: dict[str, Any] = json.loads(path.read_text("utf-8")) if path.exists() else {}
    for name in RESULTS:
        found = results / f"{name}.json"
        if not found.exists():
            continue
        whole = json.loads(found.read_text("utf-8"))
        data[name] = {key: whole[key] for key in ("command", "when", "machine")}
        data[name]["rows"] = [
            {"what": row["what"], "values": row["values"], "runs": row["runs"]} for row in whole["rows"]
        ]
        print(f"{path.name}: {name} of {whole['when']}")
    path.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", "utf-8")
    return data


# ---------------------------------------------------------------- lateness


@dataclass(frozen=True)
class Bar:
    label: str
    p50: float
    p99: float
    max: float
    ours: bool = False
    elsewhere: bool = False


def bars_of(data: dict[str, Any], peers: dict[str, Any]) -> list[Bar]:
    """Each framework with us and without, then the others."""
    (celery,) = (
        row["values"] for row in data["celery-lateness"]["rows"] if "Redis, prefork, released directly" in row["what"]
    )
    arq: dict[str, Any] = {}
    for row in data["arq_lateness"]["rows"]:
        arq |= row["values"]
    taskiq = data["taskiq-lateness"]["rows"][0]["runs"]
    found = [
        bar("Celery + delayadapters", celery["ours"], ours=True),
        bar("Celery, countdown in worker memory", celery["native"]),
        bar("arq + delayadapters", arq["ours"], ours=True),
        bar("arq (polls every 0.5 s)", arq["arq, poll 0.5"]),
        bar("taskiq + delayadapters", taskiq["ours"], ours=True),
        bar("taskiq, --update-interval 1", taskiq["tuned"]),
        bar("taskiq, defaults", taskiq["default"]),
    ]
    return found + [bar(peer["label"], peer, elsewhere=True) for peer in peers["peers"]]


def bar(label: str, figures: dict[str, float], ours: bool = False, elsewhere: bool = False) -> Bar:
    return Bar(label, figures["p50"], figures["p99"], figures["max"], ours, elsewhere)


def milliseconds(value: float) -> str:
    return f"{value:,.0f} ms" if value >= 100 else f"{value:.1f} ms"


def lateness(bars: list[Bar]) -> None:
    figure = Figure(figsize=(8.6, 0.36 * len(bars) + 1.3), layout="constrained")
    axes = figure.add_subplot()
    for place, one in enumerate(bars):
        y = len(bars) - place - (place >= 7) * 0.6
        color = OURS if one.ours else THEIRS
        axes.plot([one.p50, one.p99], [y, y], color=color, linewidth=5, alpha=0.55, solid_capstyle="round")
        face = "none" if one.elsewhere else color
        axes.plot([one.p50], [y], "o", markersize=6, markerfacecolor=face, markeredgecolor=color)
        axes.plot([one.p99], [y], "o", markersize=8, markerfacecolor=face, markeredgecolor=color)
        weight = "bold" if one.ours else "normal"
        axes.text(one.p99 * 1.35, y, milliseconds(one.p99), va="center", fontsize=10, fontweight=weight)
        axes.text(0.32, y, one.label, va="center", ha="right", fontweight=weight, color=OURS if one.ours else TEXT)
    axes.set_xscale("log")
    axes.set_xlim(0.4, 300_000)
    axes.set_ylim(-0.2 - 0.4, len(bars) + 0.7)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.set_xticks([1, 10, 100, 1_000, 10_000, 100_000], ["1 ms", "10 ms", "100 ms", "1 s", "10 s", "100 s"])
    axes.tick_params(axis="x", which="minor", length=0)
    axes.grid(axis="x", color=QUIET, linewidth=0.8)
    axes.set_title("How late a delayed job starts: p50 to p99 (log scale)", fontsize=13, loc="center")
    axes.set_xlabel("hollow: measured in another run, see peers.json", fontsize=9)
    save(figure, "lateness.svg")


# ---------------------------------------------------------------- memory


def memory(result: dict[str, Any]) -> None:
    rows = sorted((row["values"] for row in result["rows"]), key=lambda values: values["waiting"])
    waiting = [values["waiting"] for values in rows]
    figure = Figure(figsize=(8.6, 3.9), layout="constrained")
    axes = figure.add_subplot()
    for kind, color, label in (
        ("native", THEIRS, "Celery, countdown in worker memory"),
        ("direct", OURS, "Celery + delayadapters"),
    ):
        sizes = [values["empty_mb"][kind] + values["grown_mb"][kind] for values in rows]
        axes.plot(waiting, sizes, "o-", color=color, linewidth=2.5, markersize=6)
        line(axes, waiting, sizes, color, label)
    axes.set_ylim(0, None)
    axes.set_xlim(-1_000, waiting[-1] * 1.22)
    axes.set_xticks(waiting, [f"{count:,}" for count in waiting])
    axes.set_ylabel("MB, resident, all processes of the worker")
    axes.set_xlabel("tasks waiting")
    axes.grid(axis="y", color=QUIET, linewidth=0.8)
    axes.set_title("Worker memory against waiting tasks", fontsize=13)
    save(figure, "memory.svg")


def line(axes: Axes, waiting: list[int], sizes: list[float], color: str, label: str) -> None:
    """What a line is, above its last third; and its last figure."""
    axes.text(waiting[-1] * 1.02, sizes[-1], f"{sizes[-1]:,.0f} MB", va="center", color=color, fontweight="bold")
    at = (2 * waiting[-2] + waiting[-1]) / 3
    height = sizes[-2] + (sizes[-1] - sizes[-2]) / 3
    axes.annotate(label, (at, height), (-8, 9), textcoords="offset points", ha="right", color=color, fontweight="bold")


def save(figure: Figure, name: str) -> None:
    figure.savefig(PICTURES / name, transparent=True, metadata={"Date": None, "Creator": None})
    print(PICTURES.relative_to(ROOT) / name)


if __name__ == "__main__":
    main()
