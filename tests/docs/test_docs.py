"""Every code block of README.md and docs/ is run: Python against a real Redis, make targets against the Makefile.

The Python blocks of a page run in order in one namespace. A block that imports a framework runs in that framework's
environment, in a namespace of its own; everywhere else it is not collected.
"""

from __future__ import annotations

import configparser
import importlib.util
import re
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from delaytests import RedisServer

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FRAMEWORK = re.compile(r"^\s*(?:from|import) (?:delayadapters\.)?(celery|arq|taskiq)\b", re.MULTILINE)
LANGUAGES = {"python", "console", "mermaid", "text", "ini", "redis", "yaml"}
"""`redis` blocks are run by the tests of the page they are in (ACL), or below; `ini` and `yaml` are read below."""


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

    @pytest.fixture(autouse=True)
    def _celery_as_found() -> Iterator[None]:
        if not importlib.util.find_spec("celery"):
            yield
            return
        from delaytests.celerys import tasks_as_found

        with tasks_as_found():
            yield

    @pytest.mark.parametrize("code", FRAMEWORK_BLOCKS)
    def test_framework_blocks_run(code: str, start_redis, monkeypatch) -> None:
        # taskiq looks for the module of a function it decorates.
        module = types.ModuleType("__docs__")
        monkeypatch.setitem(sys.modules, "__docs__", module)
        run(code, "docs", vars(module), start_redis())


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_blocks_are_of_a_known_kind(page: Path) -> None:
    assert {lang for lang, _ in blocks(page)} <= LANGUAGES, "a block nobody runs: give it a language that is tested"


def blocks_of(lang: str) -> list:
    return [
        pytest.param(code, id=f"{name(page)}-{number}")
        for page in PAGES
        for number, (found, code) in enumerate(blocks(page))
        if found == lang
    ]


@pytest.mark.parametrize("code", blocks_of("yaml"))
def test_yaml_blocks_are_what_they_seem(code: str) -> None:
    """Compose files and Kubernetes manifests have what those demand, and name things that are there."""
    for document in yaml.safe_load_all(code):
        if "services" in document:
            services = document["services"]
            assert all({"image", "build"} & service.keys() for service in services.values())
            for service in services.values():
                assert set(service.get("depends_on", ())) <= services.keys()
                volumes = [volume.split(":")[0] for volume in service.get("volumes", ()) if volume[0] not in "./"]
                assert set(volumes) <= document.get("volumes", {}).keys()
        elif "kind" in document:
            assert {"apiVersion", "kind", "metadata"} <= document.keys()
            assert document["metadata"]["name"]
            if document["kind"] == "Deployment":
                spec = document["spec"]
                labels = spec["template"]["metadata"]["labels"]
                assert spec["selector"]["matchLabels"].items() <= labels.items(), "it would select none of its own pods"
                for container in spec["template"]["spec"]["containers"]:
                    assert {"name", "image"} <= container.keys()
                    check_probes(container)
        else:
            assert isinstance(document, dict), "no mapping"


def check_probes(container: dict) -> None:
    """kubelet asks at the pod's own address, where nobody hears who listens on 127.0.0.1, the default."""
    probes = [probe["httpGet"] for name, probe in container.items() if name.endswith("Probe")]
    words = container.get("command", [])
    if not probes and "--metrics-port" not in words:
        return
    assert words[words.index("--metrics-host") + 1] == "0.0.0.0"
    port = int(words[words.index("--metrics-port") + 1])
    named = {one["name"]: one["containerPort"] for one in container["ports"]}
    assert {named.get(probe["port"], probe["port"]) for probe in probes} == {port}
    assert {probe["path"] for probe in probes} <= {"/healthz", "/readyz"}


@pytest.mark.parametrize("code", blocks_of("ini"))
def test_ini_blocks_parse(code: str) -> None:
    """systemd units also have what starts them."""
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(code)
    if "Unit" in parser:
        assert parser["Service"]["ExecStart"].startswith("/"), "systemd wants an absolute path"


def test_redis_settings_in_deploy_are_accepted(start_redis) -> None:
    client = start_redis(args=()).client()
    said = [code for lang, code in blocks(ROOT / "docs/how-to/deploy.md") if lang == "redis"]
    assert said
    for line in "".join(said).splitlines():
        if line != "CONFIG REWRITE":  # the test's server has no configuration file
            assert client.execute_command(*line.split()) in (b"OK", True), line


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


if importlib.util.find_spec("celery"):

    def test_names_of_queues_are_those_that_an_app_has() -> None:
        """In the docs, in pictures, and in the compose file: of an app whose broker is Redis' database 0."""
        from celery import Celery

        from delayadapters.celery.settings import default_name

        name = default_name(Celery("shop", broker="redis://localhost:6379/0", set_as_current=False))
        pictures = sorted((ROOT / "docs" / "pictures").glob("*.svg"))
        texts = [page.read_text("utf-8") for page in (*PAGES, *pictures, ROOT / "docker-compose.yml")]
        found = [word for text in texts for word in re.findall(r"[\w:]*\bcelery:[\w:]*\d\b", text)]
        assert len(found) > 5
        assert set(found) == {name}


def test_links_inside_the_repository_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", FENCE.sub("", page.read_text("utf-8"))):
            assert (page.parent / target).exists(), f"{name(page)} links to {target}"
