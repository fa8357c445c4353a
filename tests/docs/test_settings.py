"""docs/reference/settings.md names every setting of the code, no other, and the right defaults.

The code is read, not imported: no environment has all three frameworks.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "delayadapters"
PAGE = (ROOT / "docs" / "reference" / "settings.md").read_text("utf-8")
NO_SETTING = {"self", "queue", "publisher", "client", "options", "_"}
WORDS = {"DEFAULT_HOST": "127.0.0.1", "DEFAULT_NAME": "delayadapters:arq"}
"""Constants, as the page shows their values."""


def table(heading: str) -> dict[str, str]:
    """Name → default, of the table below a heading."""
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return dict(re.findall(r"^\| `(\w+)` \| (.*?) \| .* \|$", section, re.MULTILINE))


def parsed(file: str) -> ast.Module:
    return ast.parse((SOURCE / file).read_text("utf-8"))


def class_of(file: str, name: str) -> ast.ClassDef:
    [found] = [node for node in parsed(file).body if isinstance(node, ast.ClassDef) and node.name == name]
    return found


def arguments(file: str, name: str, method: str = "__init__") -> dict[str, ast.expr | None]:
    """The arguments of a method, with their defaults."""
    [function] = [n for n in class_of(file, name).body if isinstance(n, ast.FunctionDef) and n.name == method]
    given = function.args
    positional = [*given.posonlyargs, *given.args]
    defaults: list[ast.expr | None] = [None] * (len(positional) - len(given.defaults)) + list(given.defaults)
    pairs = [*zip(positional, defaults, strict=True), *zip(given.kwonlyargs, given.kw_defaults, strict=True)]
    return {argument.arg: default for argument, default in pairs if argument.arg not in NO_SETTING | {"cls", "url"}}


def check(page: dict[str, str], code: dict[str, ast.expr | None]) -> None:
    assert page.keys() == code.keys()
    for name, default in code.items():
        shown = page[name].strip("`")
        if default is None or not page[name].startswith("`"):
            continue  # in words: "made from …", "1 MiB"
        if isinstance(default, ast.Name):
            assert shown.strip('"') == WORDS[default.id], name
        else:
            assert ast.literal_eval(shown) == ast.literal_eval(default), name


def test_celery() -> None:
    asked = {
        f"delayadapters_{call.args[0].value}"
        for file in sorted((SOURCE / "celery").glob("*.py"))
        for call in ast.walk(ast.parse(file.read_text("utf-8")))
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and call.func.attr in ("_get", "_switch")
        and call.args
        and isinstance(call.args[0], ast.Constant)
    }
    assert len(asked) >= 6, "the settings are asked for in another way now: this test looks in the wrong place"
    assert table("Celery").keys() == asked
    how_to = (ROOT / "docs" / "how-to" / "celery.md").read_text("utf-8")
    in_source = (SOURCE / "celery" / "settings.py").read_text("utf-8").split('"""')[1]
    for setting in asked:
        assert f"``{setting}``" in in_source
        assert f"`{setting}`" in how_to


def test_arq() -> None:
    fields = [node for node in class_of("arq/settings.py", "DelaySettings").body if isinstance(node, ast.AnnAssign)]
    check(table("arq"), {node.target.id: node.value for node in fields if isinstance(node.target, ast.Name)})


def test_taskiq() -> None:
    code = arguments("taskiq/middleware.py", "DelayMiddleware")
    page = table("taskiq")
    assert page.pop("url") == "`None`"
    check(page, code)


def test_the_queue() -> None:
    for file, name in (("redis/sync.py", "DelayQueue"), ("redis/aio.py", "AsyncDelayQueue")):
        code = arguments(file, name)
        both = {**arguments(file, name, "from_url"), **code}
        check(table("The queue"), both)


def test_the_release_loop() -> None:
    check(table("The release loop"), arguments("release/base.py", "BaseReleaser"))
