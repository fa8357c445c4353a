"""What docs/hooks.py makes of the pages. Building the site is `make docs`, which fails on a broken link."""

from __future__ import annotations

import importlib
import importlib.util
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
FRAMEWORKS = ("celery", "arq", "taskiq")

spec = importlib.util.spec_from_file_location("docs_hooks", DOCS / "hooks.py")
assert spec is not None
assert spec.loader is not None
hooks = importlib.util.module_from_spec(spec)
spec.loader.exec_module(hooks)


def rendered(page: Path) -> str:
    config = {"config_file_path": str(ROOT / "mkdocs.yml")}
    return hooks.on_page_markdown(page.read_text("utf-8"), page=None, config=config, files=None)


def test_the_home_page_is_the_readme_with_links_that_work_there() -> None:
    text = rendered(DOCS / "index.md")
    assert "# delayadapters" in text
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text)
    assert len(links) > 30
    for link in links:
        assert (DOCS / link).exists(), f"{link} leads nowhere on the site"


def test_every_page_is_in_the_navigation(tmp_path) -> None:
    listed = set(re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text("utf-8")))
    pages = {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")}
    assert listed <= pages, "mkdocs.yml names pages that are not there"
    nav = [{"Start": ["index.md"]}, {"How to": ["how-to/arq.md", {"Celery": "how-to/celery.md"}]}]
    for path in ("index.md", "how-to/arq.md", "how-to/celery.md", "how-to/new.md"):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).touch()
    hooks.complete(nav, tmp_path)
    assert nav[0] == {"Start": ["index.md"]}
    assert nav[1]["How to"] == ["how-to/arq.md", {"Celery": "how-to/celery.md"}, "how-to/new.md"]


def test_notes_of_a_forge_become_admonitions() -> None:
    text = hooks.on_page_markdown("a\n\n> [!WARNING]\n> one\n> two\n\nb", page=None, config=None, files=None)
    assert text == "a\n\n!!! warning\n    one\n    two\n\nb"


@pytest.mark.parametrize(("url", "up"), [("", ""), ("architecture/", "../"), ("how-to/arq/", "../../")])
def test_diagrams_load_mermaid_from_the_site_itself(url: str, up: str) -> None:
    page = SimpleNamespace(url=url)
    html = hooks.on_page_content('<pre class="mermaid">', page=page, config=None, files=None)
    assert html.startswith(f'<script src="{up}assets/mermaid.tiny.js">')
    assert hooks.on_page_content("<p>", page=page, config=None, files=None) == "<p>"
    assert (DOCS / "assets" / "mermaid.tiny.js").exists()


def test_roles_in_docstrings_become_names() -> None:
    roles = {
        ":class:<code>~a.b.Queue</code>": "<code>Queue</code>",
        ":meth:<code>schedule</code>": "<code>schedule</code>",
        ":meth:<code>Queue.jobs &lt;a.b.Queue.jobs&gt;</code>": "<code>Queue.jobs</code>",
    }
    for role, name in roles.items():
        assert hooks.on_page_content(role, page=SimpleNamespace(url=""), config=None, files=None) == name


def test_the_reference_has_every_public_name() -> None:
    """Of the core, and of the adapters that this environment has."""
    page = (DOCS / "reference" / "api.md").read_text("utf-8")
    errors = importlib.import_module("delayadapters.errors")
    adapters = [f"delayadapters.{name}" for name in FRAMEWORKS if importlib.util.find_spec(name)]
    for package in ("delayadapters", *adapters):
        public = importlib.import_module(package).__all__
        missing = [name for name in public if not hasattr(errors, name) and f"::: {package}.{name}\n" not in page]
        assert missing == [], f"docs/reference/api.md lacks names of {package}"
