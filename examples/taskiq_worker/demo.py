"""1,000 delayed taskiq tasks, a killed worker, a killed Redis: who ran, who ran twice, and how late.

    python demo.py [--quick] [--report demo-report.json]

Exit status 1 when a task was lost, ran early, or ran although it was cancelled. README.md says what is measured.
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from demo_kit.command import main  # noqa: E402
from demo_kit.story import Framework, Job  # noqa: E402


def worker() -> list[str]:
    return [sys.executable, "-m", "taskiq", "worker", "demo_app:broker", "--workers", "2", "--log-level", "WARNING"]


def schedule(jobs: list[Job]) -> set[int]:
    async def go() -> set[int]:
        from demo_app import broker, delay, task

        from delayadapters import Outcome

        await broker.startup()
        cancelled = set()
        for job in jobs:
            due = time.time() + job.delay
            sent = await task.kicker().with_labels(delay=job.delay).kiq(job.number, due)
            if job.kind == "cancelled" and await delay.cancel(sent.task_id) is Outcome.CANCELLED:
                cancelled.add(job.number)
        await broker.shutdown()
        return cancelled

    return asyncio.run(go())


def waiting() -> int:
    async def go() -> int:
        from demo_app import broker, delay

        await broker.startup()
        try:
            return (await delay.queue.stats()).waiting
        finally:
            await broker.shutdown()

    return asyncio.run(go())


TASKIQ = Framework(
    key="taskiq",
    packages=("taskiq", "taskiq-redis"),
    here=HERE,
    worker=worker,
    schedule=schedule,
    waiting=waiting,
    lines=("Duplicated: in a worker at a kill, not yet acknowledged; the stream delivers such a task again.",),
)

if __name__ == "__main__":
    sys.exit(main(TASKIQ, __doc__))
