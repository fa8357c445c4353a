"""The pictures show the figures of their data, and the README shows the pictures."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PICTURES = ROOT / "docs" / "pictures"


def words(picture: str) -> list[str]:
    """The texts of an SVG: matplotlib leaves them texts (svg.fonttype none)."""
    tree = ElementTree.parse(PICTURES / picture)
    return ["".join(node.itertext()) for node in tree.iter("{http://www.w3.org/2000/svg}text")]


def data(name: str) -> dict:
    return json.loads((PICTURES / name).read_text("utf-8"))


def test_lateness_shows_what_was_measured() -> None:
    shown = words("lateness.svg")
    rows = data("data.json")
    (celery,) = (
        row["values"] for row in rows["celery-lateness"]["rows"] if "prefork, released directly" in row["what"]
    )
    arq = {name: found for row in rows["arq_lateness"]["rows"] for name, found in row["values"].items()}
    taskiq = rows["taskiq-lateness"]["rows"][0]["runs"]
    measured = [celery["ours"], celery["native"], arq["ours"], arq["arq, poll 0.5"]]
    measured += [taskiq["ours"], taskiq["tuned"], taskiq["default"], *data("peers.json")["peers"]]
    for figures in measured:
        assert figures["p50"] <= figures["p99"] <= figures["max"]
        text = f"{figures['p99']:,.0f} ms" if figures["p99"] >= 100 else f"{figures['p99']:.1f} ms"
        assert text in shown, "draw the pictures anew: make pictures"
    for peer in data("peers.json")["peers"]:
        assert peer["label"] in shown


def test_memory_shows_what_was_measured() -> None:
    shown = words("memory.svg")
    rows = [row["values"] for row in data("data.json")["celery-memory"]["rows"]]
    assert len(rows) >= 4
    for values in rows:
        assert f"{values['waiting']:,}" in shown
    last = max(rows, key=lambda values: values["waiting"])
    for kind in ("direct", "native"):
        size = last["empty_mb"][kind] + last["grown_mb"][kind]
        assert f"{size:,.0f} MB" in shown, "draw the pictures anew: make pictures"


@pytest.mark.parametrize("name", ["celery-lateness", "celery-memory", "arq_lateness", "taskiq-lateness"])
def test_the_data_says_where_it_comes_from(name: str) -> None:
    found = data("data.json")[name]
    assert re.match(r"benchmarks/\w+\.py", found["command"])
    assert found["when"]
    assert {"python", "redis", "cpus"} <= found["machine"].keys()


def test_the_readme_shows_the_pictures() -> None:
    readme = (ROOT / "README.md").read_text("utf-8")
    for picture in ("lateness.svg", "memory.svg"):
        assert f"](docs/pictures/{picture})" in readme
