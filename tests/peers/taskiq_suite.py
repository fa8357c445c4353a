"""Runs taskiq's own tests twice: as they are, and with a DelayMiddleware on every broker; prints counts, differences.

    tests/peers/taskiq_suite.py [--only stock|ours] [pytest arguments…]

The tests come from taskiq's source distribution of the installed version, fetched by pip; TASKIQ_SDIST names a file to
use instead. taskiq-redis's source distribution has no tests: TASKIQ_REDIS_TESTS may name the ``tests`` folder of a
checkout of it, and they are run too (what needs its cluster or Sentinel is left out).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import xml.etree.ElementTree as ElementTree
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).parent
SUPPORT = HERE.parent / "support"
VERSION = version("taskiq")
NEEDS = ("freezegun", "polyfactory", "opentelemetry-test-utils<1", "opentelemetry-instrumentation", "psutil", "pip")
"""What taskiq's tests import; put into the environment when first run."""

_AT_ONCE = "expects SmartRetryMiddleware's 5 s delay to be ignored, by an InMemoryBroker that was not even started"
EXPLAINED = {
    "middlewares.test_task_retry::test_per_task_exc_types_matching[SmartRetryMiddleware]": _AT_ONCE,
    "middlewares.test_task_retry::test_per_task_exc_types_override_global[SmartRetryMiddleware]": _AT_ONCE,
    "middlewares.test_task_retry::test_retry_of_custom_exc_types_of_smart_middleware": _AT_ONCE,
}
"""Tests that fail with the middleware, each because of what is meant to be different."""


def fetch(folder: Path) -> Path:
    """taskiq's source tree, unpacked."""
    archive = os.environ.get("TASKIQ_SDIST")
    uv = shutil.which("uv") or HERE.parents[1] / ".envs/boot/bin/uv"
    subprocess.run(
        [uv, "pip", "install", "--quiet", "--prerelease", "allow", "--python", sys.executable, *NEEDS], check=True
    )
    if not archive:
        options = ["--quiet", "--no-deps", "--no-binary", "taskiq", "--dest", str(folder)]
        subprocess.run([sys.executable, "-m", "pip", "download", *options, f"taskiq=={VERSION}"], check=True)
        archive = str(next(folder.glob("taskiq-*.tar.gz")))
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    source = next(path for path in folder.glob("taskiq-*") if path.is_dir())
    shutil.rmtree(source / "taskiq", ignore_errors=True)  # the installed one is meant
    redis_tests = os.environ.get("TASKIQ_REDIS_TESTS")
    if redis_tests:
        shutil.copytree(redis_tests, source / "tests" / "taskiq_redis_tests")
    return source


def run(source: Path, which: str, arguments: list[str]) -> dict[str, tuple[str, str]]:
    """Test → (outcome, the first line of why)."""
    report = source / f"{which}.xml"
    env = os.environ | {"TASKIQ_SUITE": which, "PYTHONPATH": f"{HERE}{os.pathsep}{SUPPORT}"}
    command = [sys.executable, "-m", "pytest", "-p", "taskiq_plugin", "-q", "--tb=native", f"--junitxml={report}"]
    command += ["-p", "no:asyncio", "-o", "timeout=20", "-k", "not cluster and not sentinel", *arguments, "tests"]
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
                outcome, why = kind, ((found.get("message") or "").splitlines() or [""])[0][:150]
        results[f"{case.get('classname')}::{case.get('name')}".removeprefix("tests.")] = (outcome, why)
    return results


def main() -> None:
    arguments = sys.argv[1:]
    runs = ["stock", "ours"]
    if arguments[:1] == ["--only"]:
        runs, arguments = [arguments[1]], arguments[2:]
    with tempfile.TemporaryDirectory(prefix="taskiq-suite-") as name:
        source = fetch(Path(name))
        found = {which: run(source, which, arguments) for which in runs}
        if keep := os.environ.get("TASKIQ_SUITE_LOGS"):
            for which in runs:
                shutil.copy(source / f"{which}.log", keep)
    for which, results in found.items():
        outcomes = [outcome for outcome, _ in results.values()]
        counts = ", ".join(f"{outcomes.count(kind)} {kind}" for kind in sorted(set(outcomes)))
        print(f"taskiq {VERSION}'s own tests, {which}: {len(outcomes)} tests: {counts}")
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
