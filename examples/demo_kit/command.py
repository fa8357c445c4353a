"""A demo's command line, folder and exit status."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .output import Progress, table, tell, write
from .story import QUICK, Framework, Plan, Run, broken


def parser(doc: str | None) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--quick", action="store_true", help="fewer jobs in less time")
    made.add_argument("--report", type=Path, default=Path("demo-report.json"), help="where to write the JSON")
    made.add_argument("--folder", type=Path, help="where logs and data go (default: memory, /dev/shm, if there is)")
    made.add_argument("--keep", action="store_true", help="keep the folder with logs and data")
    return made


def plan_of(options: argparse.Namespace) -> Plan:
    return QUICK if options.quick else Plan()


@contextmanager
def folder_of(options: argparse.Namespace) -> Iterator[Path]:
    """A folder for logs and data.

    Killing processes loses nothing that is in the kernel's hands, so a memory disk shows the same as a real one, and
    the figures are not those of this machine's fsync.
    """
    memory = Path("/dev/shm")
    place = options.folder or (memory if os.access(memory, os.W_OK) else None)
    if place is not None:
        place.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="delay-demo-", dir=place))
    try:
        yield folder
    finally:
        if options.keep:
            print(f"logs and data: {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)


def verdict(result: dict, run: Run) -> int:
    """The exit status: 1 when a promise was broken, and what the worker said last."""
    if not (found := broken(result)):
        return 0
    said = (run.folder / "worker.log").read_text(errors="replace").splitlines()
    print(f"BROKEN: {', '.join(found)}. The worker's last lines:", *said[-20:], sep="\n", file=sys.stderr)
    return 1


def main(framework: Framework, doc: str | None) -> int:
    """A whole demo that has nothing beside it."""
    options = parser(doc).parse_args()
    with folder_of(options) as folder:
        run = Run(framework, plan_of(options), folder)
        progress = Progress(run)
        result = run.go(progress)
        progress.end()
        print()
        print(table({framework.key: result}))
        print()
        tell(result, *(framework.lines if result["duplicated"] else ()))
        write(options.report, framework.key, result)
        return verdict(result, run)
