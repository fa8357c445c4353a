"""What mkdocs does besides its own, so that every page reads well on a forge and on the site.

- ``docs/index.md`` begins with README.md, its links turned.
- ``> [!NOTE]`` (a forge's notes) becomes an admonition.
- Pages with a diagram load Mermaid from this site, not from somebody else's.
- A page that mkdocs.yml does not name comes last in the section of its folder.
- Roles in docstrings (``:class:`~package.Name```) become the name.
"""

from __future__ import annotations

import re
from html import unescape as html_unescape
from pathlib import Path
from typing import Any

README = "<!-- README.md -->"
NOTE = re.compile(r"^> \[!(NOTE|TIP|IMPORTANT|WARNING|CAUTION)\]\n((?:>.*\n?)+)", re.MULTILINE)
KINDS = {"IMPORTANT": "info", "CAUTION": "danger"}
ROLE = re.compile(r":(?:class|meth|func|attr|mod|exc|data):<code>([^<]+)</code>")


def on_config(config: Any) -> Any:
    complete(config["nav"], Path(config["docs_dir"]))
    return config


def complete(nav: list[Any], docs: Path) -> None:
    """A new page needs no line in mkdocs.yml: it goes where its neighbours are."""
    sections = [pages for entry in nav for pages in entry.values()]
    for page in sorted(docs.rglob("*.md")):
        path = page.relative_to(docs).as_posix()
        if not any(path in names(pages) for pages in sections):
            folder = path.rpartition("/")[0]
            home = [pages for pages in sections if any(name.rpartition("/")[0] == folder for name in names(pages))]
            home[-1].append(path)


def names(pages: list[Any]) -> list[str]:
    return [entry if isinstance(entry, str) else next(iter(entry.values())) for entry in pages]


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    if README in markdown:
        markdown = markdown.replace(README, readme(Path(config["config_file_path"]).parent / "README.md"))
    return NOTE.sub(admonition, markdown)


def readme(path: Path) -> str:
    """README.md as a page of docs/: the links into docs/ lose that folder."""
    text = path.read_text("utf-8")
    return re.sub(r'(\]\(|src="|srcset=")docs/', r"\1", text)


def admonition(found: re.Match[str]) -> str:
    kind = found.group(1)
    lines = [line.removeprefix(">").removeprefix(" ") for line in found.group(2).splitlines()]
    body = "\n".join(f"    {line}".rstrip() for line in lines)
    return f"!!! {KINDS.get(kind, kind.lower())}\n{body}\n"


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    if 'class="mermaid"' in html:
        up = "../" * page.url.count("/")
        html = f'<script src="{up}assets/mermaid.tiny.js"></script>\n{html}'
    return ROLE.sub(lambda found: f"<code>{name_of(html_unescape(found.group(1)))}</code>", html)


def name_of(target: str) -> str:
    """What a reader sees of ``a.b.c``, ``~a.b.c`` (c) and ``title <a.b.c>``."""
    title, bracket, _ = target.partition(" <")
    if bracket:
        return title
    return target.rpartition(".")[2] if target.startswith("~") else target
