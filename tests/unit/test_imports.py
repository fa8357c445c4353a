"""What the package exports, and that arrows point one way: adapters → release → redis, memory → jobs, due, errors."""

from __future__ import annotations

import ast
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

import delayadapters
from delayadapters import errors

SOURCE = Path(delayadapters.__file__).parent
ADAPTERS = ("arq", "celery", "taskiq")
FOREIGN = {"arq", "billiard", "celery", "click", "kombu", "prometheus_client", "rich", "taskiq", "taskiq_redis", "vine"}
PUBLIC = {
    "AsyncDelayQueue",
    "AsyncPublisher",
    "AsyncReleaser",
    "Batch",
    "Claim",
    "Counters",
    "DelayQueue",
    "Job",
    "Lateness",
    "Loop",
    "ManualClock",
    "MemoryDelayQueue",
    "NewJob",
    "Outcome",
    "Page",
    "Payload",
    "Published",
    "Publisher",
    "Releaser",
    "ReleaserStats",
    "State",
    "Stats",
    *errors.__all__,
}


def test_the_public_names_are_these():
    """A name added or removed here is a change for users: say so in CHANGELOG.md."""
    assert set(delayadapters.__all__) == PUBLIC
    assert len(delayadapters.__all__) == len(PUBLIC)
    for name in PUBLIC:
        assert getattr(delayadapters, name).__doc__


def loaded_after(statement: str) -> set[str]:
    """The modules that a fresh interpreter has loaded after ``statement``."""
    code = f"import json, sys\n{statement}\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout))


def test_the_core_loads_no_framework_and_no_adapter():
    loaded = loaded_after("import delayadapters")
    assert not {name for name in loaded if name.partition(".")[0] in FOREIGN}
    assert not {name for name in loaded for adapter in ADAPTERS if name.startswith(f"delayadapters.{adapter}")}


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_an_adapter_loads_no_other_adapter_or_framework(adapter):
    if importlib.util.find_spec(adapter) is None or not (SOURCE / adapter / "__init__.py").exists():
        pytest.skip(f"{adapter} is not installed here, or has no adapter yet")
    loaded = loaded_after(f"import delayadapters.{adapter}")
    for other in set(ADAPTERS) - {adapter}:
        assert other not in loaded
        assert f"delayadapters.{other}" not in loaded


# The layers of src/delayadapters, and what each may import besides itself and the ones it names.
BASE = {"errors", "due", "jobs", "clock"}
MAY_IMPORT = {
    **dict.fromkeys(BASE, BASE),
    "heap": BASE,
    "memory": BASE | {"heap"},
    "redis": BASE,
    "checks": set(),
    "release": BASE | {"redis", "memory", "checks"},
    **dict.fromkeys(ADAPTERS),  # anything but another adapter
}


def imported(module: Path) -> set[str]:
    """Top-level names inside the package that a module's source imports, those for type checking excepted."""
    package = ["delayadapters", *module.relative_to(SOURCE).parent.parts]
    tree = ast.parse(module.read_text())
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    names: set[str] = set()
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            target = ".".join([*base, *([node.module] if node.module else [])])
            names |= {f"{target}.{alias.name}" for alias in node.names}
    return {name.split(".")[1] for name in names if name.startswith("delayadapters.")}


MODULES = sorted(SOURCE.rglob("*.py"))


@pytest.mark.parametrize("module", MODULES, ids=lambda path: path.relative_to(SOURCE).as_posix())
def test_arrows_point_one_way(module):
    layer = module.relative_to(SOURCE).parts[0].removesuffix(".py")
    names = imported(module) - {layer}
    allowed = MAY_IMPORT.get(layer)
    if allowed is not None:
        assert names <= allowed
    elif layer in ADAPTERS:
        assert not names & set(ADAPTERS)
