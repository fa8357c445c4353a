"""The story of a demo, whatever the framework."""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from .ledger import executions, outage, percentiles
from .servers import Redis, Undertaker, Worker

FAR = 3_600.0
Kind = Literal["near", "far", "cancelled"]
Show = Callable[[int, float, str], None]


@dataclass(frozen=True)
class Plan:
    """How many jobs, how many seconds ahead, and what is killed how many seconds after the first is scheduled."""

    near: int = 1_000
    far: int = 50
    cancelled: int = 20
    shortest: float = 1.0
    longest: float = 10.0
    worker_kill: float = 3.0
    redis_kill: float = 6.0
    patience: float = 60.0
    """Seconds; what has not run when all is due, and nothing has run for so long, is lost. Nobody waits for it when
    nothing is lost, so it is long enough for a machine on which a worker takes half a minute to start."""


QUICK = Plan(near=200, far=10, cancelled=5, longest=4.0, worker_kill=1.5, redis_kill=3.0)


@dataclass(frozen=True)
class Job:
    number: int
    kind: Kind
    delay: float


def jobs_of(plan: Plan) -> list[Job]:
    """The far ones first: they wait through everything. Those to be cancelled would be due after the kills."""
    rnd = random.Random(1)
    late = plan.redis_kill + (plan.longest - plan.redis_kill) / 2
    found = [("far", FAR)] * plan.far
    found += [("cancelled", rnd.uniform(late, plan.longest)) for _ in range(plan.cancelled)]
    found += [("near", rnd.uniform(plan.shortest, plan.longest)) for _ in range(plan.near)]
    return [Job(number, kind, round(delay, 3)) for number, (kind, delay) in enumerate(found)]


@dataclass(frozen=True)
class Framework:
    """What a demo says about its framework."""

    key: str
    """Of the report."""
    packages: tuple[str, ...]
    """Whose versions the report names."""
    here: Path
    """The folder of the application."""
    worker: Callable[[], list[str]]
    """The worker's command."""
    schedule: Callable[[list[Job]], set[int]]
    """Schedules all, and cancels those of kind "cancelled": the numbers of those that are cancelled for good."""
    waiting: Callable[[], int | None]
    """How many wait. None: there is nobody to ask."""
    lines: tuple[str, ...] = ()
    """What there is to say about its duplicates."""


class Scheduling(threading.Thread):
    """The client. On a slow disk it is at it until the kills, which wait for nobody."""

    def __init__(self, framework: Framework, jobs: list[Job]) -> None:
        super().__init__(daemon=True)
        self._framework, self._jobs = framework, jobs
        self.took = 0.0
        self.last_due = float("inf")
        self.cancelled: set[int] = set()
        self.error: BaseException | None = None

    def run(self) -> None:
        begin = time.time()
        try:
            self.cancelled = self._framework.schedule(self._jobs)
            self.took = time.time() - begin
            self.last_due = time.time() + max(job.delay for job in self._jobs if job.kind != "far")
        except BaseException as error:
            self.error = error

    def check(self) -> None:
        if self.error is not None:
            raise self.error


class Run:
    """One run of the whole story."""

    def __init__(self, framework: Framework, plan: Plan, folder: Path, **environment: str) -> None:
        self.framework, self.plan, self.folder = framework, plan, folder
        self.jobs = jobs_of(plan)
        self.near = {job.number for job in self.jobs if job.kind == "near"}
        self.environment = environment
        self.kills: list[tuple[str, float]] = []

    def done(self) -> int:
        return len({run.number for run in executions(self.folder)} & self.near)

    def go(self, show: Show) -> dict[str, Any]:
        show(0, 0, "starting Redis and a worker")
        undertaker = Undertaker()
        redis = Redis(self.folder, undertaker)
        kit, here = Path(__file__).parent.parent, self.framework.here
        path = [str(here), str(kit), os.environ.get("PYTHONPATH", "")]
        environment = {
            **os.environ,
            "DEMO_REDIS": redis.url,
            "DEMO_FOLDER": str(self.folder),
            "PYTHONPATH": os.pathsep.join(part for part in path if part),
            **self.environment,
        }
        os.environ.update(environment)
        sys.path.insert(0, str(here))
        worker = Worker(self.framework.worker(), here, self.folder, environment, undertaker)
        try:
            worker.wait_ready()
            time.sleep(0.5)  # let its memory settle
            return self.tell(redis, worker, show)
        finally:
            worker.kill()
            redis.kill()
            undertaker.close()

    def tell(self, redis: Redis, worker: Worker, show: Show) -> dict[str, Any]:
        before, all_waiting = worker.memory(), None
        begin = time.time()
        scheduling = Scheduling(self.framework, self.jobs)
        scheduling.start()

        def worker_dies() -> None:
            nonlocal all_waiting
            all_waiting = worker.memory()
            self.kills.append(("the worker's process tree", time.time()))
            worker.kill()
            worker.start()

        def redis_dies() -> None:
            self.kills.append(("Redis", time.time()))
            redis.kill()
            redis.start()

        plan = [
            (self.plan.worker_kill, "worker killed and restarted", worker_dies),
            (self.plan.redis_kill, "Redis killed and restarted", redis_dies),
        ]
        done, said, restarts, quiet_since = 0, "", 0, begin
        while plan or done < len(self.near):
            if plan and time.time() - begin >= plan[0][0]:
                _, said, deed = plan.pop(0)
                deed()
            before_that, done = done, self.done()
            if plan or done > before_that or scheduling.is_alive():
                quiet_since = time.time()
            elif time.time() - quiet_since > self.plan.patience and time.time() > scheduling.last_due:
                break
            scheduling.check()
            if worker.process.poll() is not None:  # as any supervisor would
                worker.start()
                restarts += 1
            show(done, time.time() - begin, said or "scheduling" * scheduling.is_alive())
            time.sleep(0.02)
        # Would anything run twice at the last moment, or a cancelled one after all?
        scheduling.join()
        scheduling.check()
        time.sleep(max(0.0, scheduling.last_due - time.time()) + 1.0)
        return {
            "versions": {name: metadata.version(name) for name in (*self.framework.packages, "redis")},
            "at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            **self.account(begin, scheduling.cancelled),
            "waiting": self.framework.waiting(),
            "worker_died_by_itself": restarts,
            "schedule_s": round(scheduling.took, 2),
            "worker_memory_mb": {"before": before, "all_waiting": all_waiting, "end": worker.memory()},
        }

    def account(self, begin: float, cancelled: set[int]) -> dict[str, Any]:
        starts: dict[int, list[float]] = {}
        dues: dict[int, float] = {}
        for number, due, start in executions(self.folder):
            starts.setdefault(number, []).append(start)
            dues[number] = due
        firsts = {number: min(times) for number, times in starts.items() if number in self.near}
        outages = [outage(moment, firsts, dues) for _, moment in self.kills]
        late = {number: start - dues[number] for number, start in firsts.items()}
        untouched = [
            lateness for number, lateness in late.items()
            if not any(start <= dues[number] <= end for start, end in outages)
        ]  # fmt: skip
        return {
            "scheduled": len(self.jobs),
            "executed": len(firsts),
            "lost": len(self.near) - len(firsts),
            "duplicated": sum(len(times) > 1 for times in starts.values()),
            "early": sum(min(times) < dues[number] for number, times in starts.items()),
            "cancelled": len(cancelled),
            "cancelled_but_run": len(cancelled & starts.keys()),
            "executions": sum(len(times) for times in starts.values()),
            "lateness_ms": percentiles(untouched),
            "lateness_all_ms": percentiles(list(late.values())),
            "untouched": len(untouched),
            "excluded": len(late) - len(untouched),
            "kills": [
                {
                    "what": what,
                    "at_s": round(moment - begin, 2),
                    "touched_s": [round(start - begin, 2), round(end - begin, 2)],
                }
                for (what, moment), (start, end) in zip(self.kills, outages, strict=True)
            ],
        }


def broken(result: dict[str, Any]) -> list[str]:
    """The promises that this run broke."""
    found = [f"{result[key]} {key}" for key in ("lost", "early") if result[key]]
    if result["cancelled_but_run"]:
        found.append(f"{result['cancelled_but_run']} run although cancelled")
    return found
