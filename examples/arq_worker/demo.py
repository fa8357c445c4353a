"""1,000 deferred arq jobs, a killed worker, a killed Redis: who ran, who ran twice, and how late.

    python demo.py [--quick] [--report demo-report.json]

Exit status 1 when a job was lost, ran early, or ran although it was aborted. README.md says what exactly is measured.
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
    return [str(Path(sys.executable).parent / "delayadapters"), "arq", "demo_app.WorkerSettings"]


def schedule(jobs: list[Job]) -> set[int]:
    async def go() -> set[int]:
        from demo_app import REDIS

        from delayadapters.arq import create_pool

        redis = await create_pool(REDIS)
        aborted = set()
        for job in jobs:
            made = await redis.enqueue_job("task", job.number, time.time() + job.delay, _defer_by=job.delay)
            # True for a job that waits means: it will not run, and its result says so.
            if job.kind == "cancelled" and await made.abort():
                aborted.add(job.number)
        await redis.aclose()
        return aborted

    return asyncio.run(go())


def waiting() -> int:
    async def go() -> int:
        from demo_app import REDIS

        from delayadapters.arq import create_pool

        redis = await create_pool(REDIS)
        try:
            return (await redis.delay_queue.stats()).waiting
        finally:
            await redis.aclose()

    return asyncio.run(go())


ARQ = Framework(
    key="arq",
    packages=("arq",),
    here=HERE,
    worker=worker,
    schedule=schedule,
    waiting=waiting,
    lines=("Duplicated: running at a kill; arq runs such a job again, its time-out + 10 s later.",),
)

if __name__ == "__main__":
    sys.exit(main(ARQ, __doc__))
