"""Runs arq's own tests twice: on arq, and with our classes in place of its own; prints counts and every difference.

    tests/peers/arq_suite.py [--only stock|ours] [pytest arguments…]

The tests come from arq's source distribution of the installed version, fetched by pip. Their container with Redis is
replaced by a server of our own (see :class:`RedisContainer` in ``arq_plugin.py``).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from arq.version import VERSION

EXPLAINED = {
    "test_cli::test_custom_log_dict[None-log_dict_to_use0]": "the default log config also has a delayadapters logger",
    "test_main::test_defer_by": "looks for a deferred job in arq's queue; it waits in the delay queue",
    "test_main::test_defer_until": "looks for a deferred job in arq's queue; it waits in the delay queue",
    "test_worker::test_abort_job_before": "expects abort(timeout=0) to time out; ours aborts an unstarted job at once",
    "test_worker::test_abort_deferred_job_before": "expects abort(timeout=0) to time out; ours aborts it at once",
}
"""Tests that fail with our classes in place, each because of what is meant to be different."""
HERE = Path(__file__).parent
SUPPORT = HERE.parent / "support"


def fetch(folder: Path) -> Path:
    """arq's source tree, unpacked. ARQ_SDIST names a file to use instead of asking the package index."""
    archive = os.environ.get("ARQ_SDIST")
    if not archive:
        uv = shutil.which("uv") or HERE.parents[1] / ".envs/boot/bin/uv"
        pip = [sys.executable, "-m", "pip"]
        if subprocess.run([*pip, "--version"], capture_output=True, check=False).returncode:
            subprocess.run([uv, "pip", "install", "--quiet", "--python", sys.executable, "pip"], check=True)
        options = ["--quiet", "--no-deps", "--no-binary", "arq", "--dest", str(folder)]
        subprocess.run([*pip, "download", *options, f"arq=={VERSION}"], check=True)
        archive = str(next(folder.glob("arq-*.tar.gz")))
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    return next(path for path in folder.glob("arq-*") if path.is_dir())


def run(source: Path, which: str, arguments: list[str]) -> dict[str, tuple[str, str]]:
    """Test → (outcome, the last line of why)."""
    report = source / f"{which}.xml"
    env = os.environ | {"ARQ_SUITE": which, "PYTHONPATH": f"{HERE}{os.pathsep}{SUPPORT}"}
    command = [sys.executable, "-m", "pytest", "-p", "arq_plugin", "-q", "--tb=short", f"--junitxml={report}"]
    # The suite was written for redis-py 4; 5 deprecates what it (and arq) calls.
    command += ["-W", "ignore::DeprecationWarning", "-o", "timeout=60", *arguments, "tests"]
    shutil.rmtree(source / "arq", ignore_errors=True)  # the installed one is meant
    with (source / f"{which}.log").open("wb") as log:
        subprocess.run(command, cwd=source, env=env, stdout=log, stderr=log, check=False)
    if not report.exists():
        raise SystemExit((source / f"{which}.log").read_text()[-4000:])
    results = {}
    for case in ElementTree.parse(report).iter("testcase"):
        outcome, why = "passed", ""
        for kind in ("failure", "error", "skipped"):
            found = case.find(kind)
            if found is not None:
                outcome, why = kind, (found.get("message") or "").splitlines()[0][:150]
        results[f"{case.get('classname')}::{case.get('name')}".removeprefix("tests.")] = (outcome, why)
    return results


def main() -> None:
    arguments = sys.argv[1:]
    runs = ["stock", "ours"]
    if arguments[:1] == ["--only"]:
        runs, arguments = [arguments[1]], arguments[2:]
    with tempfile.TemporaryDirectory(prefix="arq-suite-") as name:
        source = fetch(Path(name))
        found = {which: run(source, which, arguments) for which in runs}
        keep = os.environ.get("ARQ_SUITE_LOGS")
        if keep:
            for which in runs:
                shutil.copy(source / f"{which}.log", keep)
    for which, results in found.items():
        outcomes = [outcome for outcome, _ in results.values()]
        counts = ", ".join(f"{outcomes.count(kind)} {kind}" for kind in sorted(set(outcomes)))
        print(f"arq {VERSION}'s own tests, {which}: {len(outcomes)} tests: {counts}")
    unexplained = 0
    for test in sorted(set().union(*found.values())):
        seen = [found[which].get(test, ("missing", "")) for which in runs]
        if all(outcome in ("passed", "skipped") for outcome, _ in seen):
            continue
        print(f"  {test}")
        for which, (outcome, why) in zip(runs, seen, strict=True):
            print(f"    {which}: {outcome} {why}")
        if "ours" in runs and seen[-1][0] not in ("passed", "skipped"):
            print(f"    why: {EXPLAINED.get(test, 'NOT EXPLAINED')}")
            unexplained += test not in EXPLAINED and (len(runs) == 1 or seen[0][0] == "passed")
    print(f"{unexplained} differences are not explained")
    sys.exit(unexplained > 0)


if __name__ == "__main__":
    main()
