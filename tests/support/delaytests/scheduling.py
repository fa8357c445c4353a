"""A process that schedules many jobs, to be killed meanwhile: ``python -m delaytests.scheduling '{"url": …}'``."""

from __future__ import annotations

import json
import sys

from delayadapters import DelayQueue, NewJob


def main() -> None:
    job = json.loads(sys.argv[1])
    jobs = [NewJob(b"payload", delay=job["delay"], id=f"{n:05d}") for n in range(job["count"])]
    with DelayQueue.from_url(job["url"], name=job["name"]) as queue:
        print("ready", flush=True)
        queue.schedule_many(jobs)


if __name__ == "__main__":
    main()
