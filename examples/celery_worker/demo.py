"""1,000 delayed Celery tasks, a killed worker, a killed Redis: who ran, who ran twice, and how late.

    python demo.py [--compare] [--quick] [--report demo-report.json]

Exit status 1 when a task was lost, ran early, or ran although it was cancelled. README.md says what is measured.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from demo_kit.command import folder_of, parser, plan_of, verdict  # noqa: E402
from demo_kit.output import Progress, table, tell, write  # noqa: E402
from demo_kit.story import Framework, Job, Run  # noqa: E402


def worker() -> list[str]:
    """``celery -A demo_app worker`` with two prefork children."""
    command = [sys.executable, "-m", "celery", "-A", "demo_app", "worker", "-P", "prefork", "-c", "2"]
    command += ["-l", "WARNING", "--without-mingle", "--without-gossip", "--without-heartbeat"]
    return [*command, "-n", f"demo{time.time_ns()}@%h"]


def schedule(jobs: list[Job]) -> set[int]:
    from demo_app import app, task

    from delayadapters import Outcome

    cancelled = set()
    for job in jobs:
        result = task.apply_async((job.number, time.time() + job.delay), countdown=job.delay)
        if job.kind != "cancelled":
            continue
        if os.environ["DEMO_STOCK"] == "1":
            result.revoke()  # says nothing of whether it will hold
        elif app.delayadapters.cancel(result.id) is not Outcome.CANCELLED:
            continue
        cancelled.add(job.number)
    return cancelled


def waiting() -> int | None:
    """With stock Celery there is nothing to ask but the worker's memory."""
    if os.environ["DEMO_STOCK"] == "1":
        return None
    from demo_app import app

    return app.delayadapters.stats().waiting


CELERY = Framework(
    key="celery",
    packages=("celery", "kombu"),
    here=HERE,
    worker=worker,
    schedule=schedule,
    waiting=waiting,
    lines=("Duplicated: in a worker at a kill, not yet acknowledged; acks_late runs such a task again.",),
)


def stock(options, folder: Path) -> Run:
    """Celery's own countdown. It has kombu's default visibility timeout, unless --tuned (README.md says why)."""
    visibility = "short" if options.tuned else "default"
    plan = replace(plan_of(options), patience=20.0)  # it does lose some, so this is waited for
    return Run(CELERY, plan, folder, DEMO_STOCK="1", DEMO_VISIBILITY=visibility)


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--compare", action="store_true", help="the same through Celery's own countdown, beside it")
    arguments.add_argument("--tuned", action="store_true", help="give stock Celery our short visibility timeout, too")
    arguments.add_argument(
        "--plain-kombu", action="store_true", help="without demo_transport.py: a kill may lose a task"
    )
    arguments.add_argument("--stock-in", type=Path, help="(the child that --compare starts)")
    options = arguments.parse_args()
    os.environ["DEMO_PLAIN_KOMBU"] = "1" if options.plain_kombu else "0"
    if options.stock_in is not None:
        result = stock(options, options.stock_in).go(lambda *_: None)
        (options.stock_in / "result.json").write_text(json.dumps(result))
        return 0
    with folder_of(options) as folder:
        run = Run(CELERY, plan_of(options), folder / "ours", DEMO_STOCK="0", DEMO_VISIBILITY="short")
        run.folder.mkdir()
        if options.compare:
            columns = side_by_side(options, run, folder / "stock")
        else:
            columns = {"celery": run.go(progress := Progress(run))}
            progress.end()
        ours, *theirs = columns.values()
        print()
        print(table(columns))
        print()
        tell(ours, *remarks(options, ours, *theirs))
        write(options.report, CELERY.key, {**ours, "stock": theirs[0]} if theirs else ours)
        return verdict(ours, run)


def side_by_side(options, run: Run, folder: Path) -> dict[str, dict]:
    """Ours in this process, stock Celery's in one of its own, at the same time."""
    folder.mkdir()
    flags = [f"--{name}" for name in ("tuned", "quick", "plain-kombu") if getattr(options, name.replace("-", "_"))]
    other = subprocess.Popen([sys.executable, __file__, "--stock-in", str(folder), *flags])
    try:
        progress = Progress(run, ("stock Celery", stock(options, folder)))
        ours = run.go(progress)
        progress(ours["executed"], 0.0, "waiting for stock Celery")
        if other.wait():
            sys.exit("stock Celery's run failed")
        progress.end()
    finally:
        if other.poll() is None:
            other.terminate()
    return {"delayadapters": ours, "stock Celery": json.loads((folder / "result.json").read_text())}


def remarks(options, ours: dict, theirs: dict | None = None) -> list[str]:
    said = list(CELERY.lines) if ours["duplicated"] else []
    if theirs is not None and theirs["lost"] and not options.tuned:
        said.append("Stock Celery's lost ones were in the killed worker's memory: they run an hour later.")
    if theirs is not None and theirs["cancelled_but_run"]:
        said.append("Stock Celery's revokes were in the killed worker's memory, too.")
    return said


if __name__ == "__main__":
    sys.exit(main())
