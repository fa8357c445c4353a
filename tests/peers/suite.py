"""What the runners of the peers' own tests share.

A peer's tests come from the source distribution of its installed version, fetched by pip (``<PEER>_SDIST`` names a
file to use instead). They run twice, as they are and with our classes in place, told apart by the environment variable
``<PEER>_SUITE`` (``stock`` or ``ours``), which the peer's plugin reads; ``<PEER>_SUITE_LOGS`` names a folder for the
logs. Printed are the counts of both runs, and every test that passed in neither or in one of them only.

The peer's runner takes ``[--only stock|ours] [pytest arguments…]``. Exit status 1 when a test that passes as it is
fails with our classes, and nobody has written down why.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent
SUPPORT = HERE.parent / "support"

Results = dict[str, tuple[str, str]]
"""Test → (outcome, the first line of why)."""

_WORST = ("failure", "error", "skipped", "passed")


@dataclass(frozen=True)
class Peer:
    """One framework's own tests.

    ``explained``: tests that fail with our classes, each because of what is meant to be different. ``paths``: what to
    run, below the source tree. ``options`` go to pytest. ``needs`` is put into the environment first.
    """

    name: str
    version: str
    explained: Mapping[str, str]
    paths: Sequence[str] = ("tests",)
    options: Sequence[str] = ()
    needs: Sequence[str] = ()
    extra: Mapping[str, Path] = field(default_factory=dict)
    """More tests, copied from elsewhere: path below the source tree → folder."""

    def env(self, what: str) -> str | None:
        return os.environ.get(f"{self.name.upper()}_{what}")


def fetch(peer: Peer, folder: Path) -> Path:
    """The peer's source tree, unpacked, without the package itself: the installed one is meant."""
    needs = list(peer.needs)
    if subprocess.run([sys.executable, "-m", "pip", "--version"], capture_output=True, check=False).returncode:
        needs.append("pip")
    if needs:
        uv = shutil.which("uv") or HERE.parents[1] / ".envs/boot/bin/uv"
        install = [uv, "pip", "install", "--quiet", "--prerelease", "allow", "--python", sys.executable]
        subprocess.run([*install, *needs], check=True)
    archive = peer.env("SDIST")
    if not archive:
        options = ["--quiet", "--no-deps", "--no-binary", peer.name, "--dest", str(folder)]
        command = [sys.executable, "-m", "pip", "download", *options, f"{peer.name}=={peer.version}"]
        subprocess.run(command, check=True)
        archive = str(next(folder.glob(f"{peer.name}-*.tar.gz")))
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    source = next(path for path in folder.glob(f"{peer.name}-*") if path.is_dir())
    shutil.rmtree(source / peer.name, ignore_errors=True)
    for where, tests in peer.extra.items():
        shutil.copytree(tests, source / where)
    return source


def run(peer: Peer, source: Path, which: str, arguments: Sequence[str]) -> Results:
    """One run of the peer's tests, each of its paths in a pytest of its own: what tests of one leave behind (a mock in
    place of a class of a library) does not reach another's."""
    given = any(one.startswith(("t/", "tests/")) for one in arguments)
    results: Results = {}
    for number, path in enumerate([""] if given else peer.paths):
        results |= _run(peer, source, f"{which}-{number}", which, [*arguments, *([path] if path else [])])
    return results


def _run(peer: Peer, source: Path, name: str, which: str, arguments: Sequence[str]) -> Results:
    report = source / f"{name}.xml"
    env = os.environ | {f"{peer.name.upper()}_SUITE": which, "PYTHONPATH": f"{HERE}{os.pathsep}{SUPPORT}"}
    command = [sys.executable, "-m", "pytest", "-p", f"{peer.name}_plugin", "-q", f"--junitxml={report}"]
    command += [*peer.options, *arguments]
    log_file = source / f"{name}.log"
    with log_file.open("wb") as log:
        ended = subprocess.run(
            command, cwd=source, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, check=False
        )
    if keep := peer.env("SUITE_LOGS"):
        shutil.copy(log_file, keep)
    if ended.returncode not in (0, 1) or not report.exists():  # tests that could not be collected, for one
        raise SystemExit(f"{peer.name}'s own tests, {name}: pytest ended with {ended.returncode}\n{_end_of(log_file)}")
    return _read(report)


def _end_of(log_file: Path) -> str:
    return log_file.read_text(errors="replace")[-4000:]


def _read(report: Path) -> Results:
    results: Results = {}
    for case in ElementTree.parse(report).iter("testcase"):
        outcome, why = "passed", ""
        for kind in ("skipped", "error", "failure"):
            found = case.find(kind)
            if found is not None:
                outcome, why = kind, ((found.get("message") or "").splitlines() or [""])[0][:150]
        name = f"{case.get('classname')}::{case.get('name')}".removeprefix("tests.")
        known = results.get(name, ("passed", ""))  # a test may be there several times: each of its subtests is
        results[name] = min(known, (outcome, why), key=lambda seen: _WORST.index(seen[0]))
    return results


def main(peer: Peer) -> None:
    arguments = sys.argv[1:]
    runs = ["stock", "ours"]
    if arguments[:1] == ["--only"]:
        runs, arguments = [arguments[1]], arguments[2:]
    with tempfile.TemporaryDirectory(prefix=f"{peer.name}-suite-") as folder:
        source = fetch(peer, Path(folder))
        found = {which: run(peer, source, which, arguments) for which in runs}
    sys.exit(compare(peer, found) > 0)


def compare(peer: Peer, found: Mapping[str, Results]) -> int:
    """Prints the counts and the differences; how many of these nobody has explained."""
    for which, results in found.items():
        outcomes = [outcome for outcome, _ in results.values()]
        counts = ", ".join(f"{outcomes.count(kind)} {kind}" for kind in sorted(set(outcomes)))
        print(f"{peer.name} {peer.version}'s own tests, {which}: {len(outcomes)} tests: {counts}")
    unexplained = 0
    for test in sorted({test for results in found.values() for test in results}):
        seen = {which: results.get(test, ("missing", "")) for which, results in found.items()}
        outcomes = {outcome for outcome, _ in seen.values()}
        if outcomes == {"passed"} or outcomes == {"skipped"}:
            continue
        print(f"  {test}")
        for which, (outcome, why) in seen.items():
            print(f"    {which}: {outcome} {why}")
        if "ours" in seen and seen["ours"][0] != "passed":
            print(f"    why: {peer.explained.get(test, 'NOT EXPLAINED')}")
            unexplained += test not in peer.explained and seen.get("stock", ("passed", ""))[0] == "passed"
    print(f"{unexplained} differences are not explained")
    return unexplained
