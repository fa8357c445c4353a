"""Every code block of README.md and docs/ is run: Python against a real Redis, make targets against the Makefile.

The Python blocks of a page run in order in one namespace. A block that imports a framework runs in that framework's
environment, in a namespace of its own; everywhere else it is not collected.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

from delaytests import RedisServer

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FRAMEWORK = re.compile(r"^\s*(?:from|import) (?:delayadapters\.)?(celery|arq|taskiq)\b", re.MULTILINE)
LANGUAGES = {"python", "console", "mermaid", "text", "ini", "redis"}
"""`redis` blocks are run by the tests of the page they are in (ACL)."""


def blocks(page: Path) -> list[tuple[str, str]]:
    return FENCE.findall(page.read_text("utf-8"))


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def framework_of(code: str) -> str | None:
    found = FRAMEWORK.search(code)
    return found.group(1) if found else None


CORE_PAGES = [page for page in PAGES if any(lang == "python" and not framework_of(code) for lang, code in blocks(page))]
FRAMEWORK_BLOCKS = [
    pytest.param(code, id=f"{name(page)}-{number}")
    for page in PAGES
    for number, (lang, code) in enumerate(blocks(page))
    if lang == "python" and (framework := framework_of(code)) and importlib.util.find_spec(framework)
]


def run(code: str, page: str, namespace: dict[str, object], server: RedisServer) -> None:
    """Runs a block as it stands, but for the address of the Redis server."""
    exec(compile(code.replace("redis://localhost:6379/0", server.url), page, "exec"), namespace)


@pytest.mark.parametrize("page", CORE_PAGES, ids=name)
def test_python_blocks_run(page: Path, start_redis) -> None:
    server = start_redis()
    namespace: dict[str, object] = {"__name__": "__docs__"}
    for lang, code in blocks(page):
        if lang == "python" and not framework_of(code):
            run(code, name(page), namespace, server)
    assert server.client().keys("{*") == [], "the page leaves keys of its queue behind"


if FRAMEWORK_BLOCKS:

    @pytest.mark.parametrize("code", FRAMEWORK_BLOCKS)
    def test_framework_blocks_run(code: str, start_redis, monkeypatch) -> None:
        # taskiq looks for the module of a function it decorates.
        module = types.ModuleType("__docs__")
        monkeypatch.setitem(sys.modules, "__docs__", module)
        run(code, "docs", vars(module), start_redis())


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_blocks_are_of_a_known_kind(page: Path) -> None:
    assert {lang for lang, _ in blocks(page)} <= LANGUAGES, "a block nobody runs: give it a language that is tested"


def test_make_targets_in_the_docs_exist() -> None:
    wanted = set()
    for page in PAGES:
        for lang, code in blocks(page):
            if lang == "console":
                wanted |= set(re.findall(r"^\$ make ([\w-]+)", code, re.MULTILINE))
    assert {"demo", "test"} <= wanted
    for target in wanted:
        made = subprocess.run(["make", "--dry-run", target], cwd=ROOT, capture_output=True, text=True, check=False)
        assert made.returncode == 0, f"make {target}: {made.stderr}"


def test_links_inside_the_repository_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", FENCE.sub("", page.read_text("utf-8"))):
            assert (page.parent / target).exists(), f"{name(page)} links to {target}"
