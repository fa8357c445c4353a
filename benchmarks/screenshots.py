"""Draws docs/pictures/{status,top,doctor}.svg: what the command shows on a terminal, of a queue made up for it.

    .envs/core8/bin/python benchmarks/screenshots.py

It starts a Redis of its own. Names and addresses are made up; the text is the command's own, so that a picture cannot
show what the command does not.
"""

from __future__ import annotations

import io
import random
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from harness import server
from rich.console import Console

from delayadapters import DelayQueue, NewJob, Releaser
from delayadapters.cli import doctor, live, looking
from delayadapters.cli.paper import Sheet

ROOT = Path(__file__).parent.parent
PICTURES = ROOT / "docs" / "pictures"
NAME = "delayadapters:celery:redis:0"
"""What a Celery app on database 0 calls its queue."""


class Broker:
    def publish(self, claims: object) -> None:
        return None


def fill(queue: DelayQueue) -> None:
    """A shop's backlog: reminders through the week, retries soon."""
    dice = random.Random(7)
    tasks = ("shop.tasks.remind", "shop.tasks.expire_cart", "shop.mail.retry")
    spans = [(40, 60), (300, 3_600), (2_600, 86_400), (8_000, 604_800), (1_500, 2_000_000)]
    for count, upto in spans:
        queue.schedule_many(
            NewJob(b"x" * 200, delay=upto * (0.1 + 0.9 * dice.random()), meta={"task": dice.choice(tasks)})
            for _ in range(count)
        )
    queue.schedule(b"x", delay=0, id="dead", meta={"task": tasks[2]})
    for claim in queue.claim():
        queue.fail([claim], "no exchange 'mail' in vhost '/'", retry_in=None)


def draw(name: str, command: str, sheet: Sheet) -> None:
    console = Console(record=True, width=80, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(f"[bold green]$[/] {command}")
    console.print(sheet.rich(), soft_wrap=True)
    svg = console.export_svg(title="delayadapters", unique_id=f"delay-{name}")
    # The pictures ask no other server for a font.
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)
    svg = svg.replace("Fira Code, monospace", "Menlo, Consolas, DejaVu Sans Mono, monospace")
    (PICTURES / f"{name}.svg").write_text("\n".join(line.rstrip() for line in svg.splitlines()) + "\n", "utf-8")
    print(f"docs/pictures/{name}.svg")


@contextmanager
def loops(url: str, *names: str) -> Iterator[None]:
    """Release loops of these names, at work."""
    running = [Releaser(DelayQueue.from_url(url, name=NAME), Broker(), name=name) for name in names]
    for releaser in running:
        releaser.start()
    try:
        yield
    finally:
        for releaser in running:
            releaser.stop()


def main() -> None:
    PICTURES.mkdir(parents=True, exist_ok=True)
    with server() as port:
        url = f"redis://127.0.0.1:{port}/0"
        with DelayQueue.from_url(url, name=NAME) as queue, loops(url, "web-1:celery", "web-2:celery"):
            fill(queue)
            queue.schedule_many(NewJob(b"x", delay=random.random()) for _ in range(2_000))
            deadline = time.monotonic() + 60
            while queue.counters().released < 2_000 and time.monotonic() < deadline:
                time.sleep(0.05)
            queue.client.hdel(queue._verbs.shards[0].loops, *_claims_by_hand(queue))
            before = looking.take_picture(queue)
            queue.schedule_many(NewJob(b"x", delay=1.5 + 3_000 * random.random()) for _ in range(180))
            time.sleep(1)
            after = looking.take_picture(queue)
            draw("status", "celery -A shop delay status", looking.status_sheet(after))
            draw("top", "delayadapters top", live.top_sheet(after, live.Rates.between(before, after)))
        with DelayQueue.from_url(url, name=NAME) as queue:
            queue.client.config_set("maxmemory-policy", "allkeys-lru")
            draw("doctor", "delayadapters doctor", doctor.doctor_sheet(queue.name, list(doctor.examine(queue))))


def _claims_by_hand(queue: DelayQueue) -> list[bytes]:
    """``claim()`` of :func:`fill` is no release loop to be shown."""
    found = queue.client.hgetall(queue._verbs.shards[0].loops)
    return [owner for owner, entry in found.items() if entry.endswith(b"claim()")] or [b"-"]


if __name__ == "__main__":
    sys.exit(main())
