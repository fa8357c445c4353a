"""What holds of every verb: 80 columns, plain text for pipes and with NO_COLOR, JSON, errors of one line."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from delayadapters import NewJob
from delayadapters.cli import COMMANDS, main, paper
from delaytests.server import free_port

from .conftest import invoke, kill_one

OURS = {name for name, (path, _) in COMMANDS.items() if path.startswith("delayadapters.cli.")}

VERBS = {
    "status": ("status",),
    "ls": ("ls", "--limit", "8"),
    "ls of nothing": ("ls", "--name", "nothing"),
    "show": ("show", "a"),
    "show of a dead one": ("dead", "show", "dead"),
    "cancel": ("cancel", "a", "b", "no such id " * 20, "--yes"),
    "cancel by filter": ("cancel", "--name", "shop.*", "--yes"),
    "cancel, dry run": ("cancel", "--all", "--dry-run"),
    "reschedule": ("reschedule", "--all", "--delay", "1h", "--yes"),
    "release-now": ("release-now", "a"),
    "dead ls": ("dead", "ls"),
    "dead replay": ("dead", "replay", "dead", "no", "--yes"),
    "dead discard": ("dead", "discard", "--all", "--yes"),
    "top": ("top", "--iterations", "2", "--interval", "0.1"),
    "doctor": ("doctor",),
    "drain": ("drain", "--timeout", "0.1"),
    "purge": ("purge", "--yes"),
    "queues": ("queues",),
    "export": ("export",),
    "import": ("import",),
}
NOT_SCREENS = {"export"}
"""Whose standard output is data."""


@pytest.fixture
def full(queue):
    """A queue with everything that could be too wide or do harm to a terminal."""
    queue.schedule(b"\x1b[31m" + b"x" * 500, delay=60, id="a", meta={"task": "shop." + "t" * 90, "note": "n " * 90})
    queue.schedule(b"", delay=60, id="b\x1b[31m" * 20, meta={"task": "宽" * 60})
    queue.schedule(b"", delay=61, id="宽" * 100, meta={"task": "e\u0301" * 60})
    queue.schedule_many(NewJob(b"", delay=60 + 997 * n, id=f"{n:036}", meta={"task": "shop.x"}) for n in range(700))
    kill_one(queue, "dead", "no exchange 'x'\x1b[31m in vhost " + "y" * 100)
    queue.schedule(b"", delay=0, id="leased")
    queue.claim()
    queue.schedule(b"", delay=0, id="due")
    return queue


def text_for(verb: str) -> str:
    return '{"delayadapters":1}\n{"end":true,"jobs":0}\n' if verb == "import" else ""


def test_every_verb_is_in_the_table():
    assert {words[0] for words in VERBS.values()} == OURS
    dead = main.get_command(click.Context(main), "dead")
    assert isinstance(dead, click.Group)
    assert {words[1] for words in VERBS.values() if words[0] == "dead"} == set(dead.commands)


@pytest.mark.parametrize("verb", VERBS)
def test_a_pipe_gets_plain_text_of_80_columns(full, run, verb):
    result = run(*VERBS[verb], input=text_for(verb))
    assert result.exit_code in (0, 1, 3)
    assert "\x1b" not in result.output
    lines = result.output.splitlines()
    assert lines
    if verb not in NOT_SCREENS:
        assert max(paper.columns(line) for line in lines) <= 80


@pytest.mark.parametrize("verb", VERBS)
def test_json(full, run, verb):
    result = run(*VERBS[verb], "--json", input=text_for(verb))
    assert result.exit_code in (0, 1, 3)
    if verb == "top":
        assert len([json.loads(line) for line in result.stdout.splitlines()]) == 2
    elif verb == "export":
        assert json.loads(result.stderr)["jobs"] == len(result.stdout.splitlines()) - 2
    else:
        json.loads(result.stdout)


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """For :func:`call`, which makes it standard output and error: pytest has its own there until the test begins."""
    shown = Terminal()
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    return shown


def call(redis_server, queue, verb, terminal, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(text_for(verb)))
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "stderr", terminal)
    given = ["--url", redis_server.url, "--name", queue.name, *VERBS[verb]]
    try:
        main.main(given, prog_name="delayadapters", standalone_mode=False)
    except click.exceptions.Exit as end:
        assert end.exit_code in (0, 1, 3)


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("switch", [("NO_COLOR", "1"), ("TERM", "dumb")], ids=["NO_COLOR", "TERM=dumb"])
def test_a_terminal_that_wants_none_gets_no_escape_codes(redis_server, full, verb, switch, terminal, monkeypatch):
    monkeypatch.setenv(*switch)
    call(redis_server, full, verb, terminal, monkeypatch)
    assert terminal.getvalue()
    assert "\x1b" not in terminal.getvalue()


@pytest.mark.parametrize("verb", ["status", "ls", "show", "dead ls", "doctor", "queues"])
def test_a_terminal_gets_colours_and_the_same_text(redis_server, full, run, verb, terminal, monkeypatch):
    call(redis_server, full, verb, terminal, monkeypatch)
    colourful = terminal.getvalue()
    assert "\x1b[" in colourful
    plain = click.unstyle(colourful).splitlines()
    assert max(paper.columns(line) for line in plain) <= 80
    assert plain[0].split()[0] == run(*VERBS[verb]).stdout.splitlines()[0].split()[0]


def test_a_progress_bar_where_there_is_a_terminal(redis_server, full, terminal, monkeypatch):
    call(redis_server, full, "reschedule", terminal, monkeypatch)
    assert "100%" in terminal.getvalue()


def test_an_output_that_knows_no_unicode(full, run):
    """In the C locale of a cron job."""
    code = "import sys; from delayadapters.cli import main; main()"
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    server = full.client.connection_pool.connection_kwargs
    url = f"redis://{server['host']}:{server['port']}/0"
    command = [sys.executable, "-c", code, "--url", url, "--name", full.name, "ls"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert "shop.t" in done.stdout


# -------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize("verb", sorted(set(VERBS) - {"doctor"}))
def test_without_redis_a_line_and_69(verb):
    url = f"redis://127.0.0.1:{free_port()}/0"
    result = invoke("--url", url, "--timeout", "0.3", *VERBS[verb], input=text_for(verb))
    if verb == "import":
        return  # an empty one asks Redis for nothing
    assert result.exit_code == 69
    assert "cannot be reached" in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert result.stdout in ("", "[]\n")


@pytest.mark.parametrize("verb", sorted(set(VERBS) - {"doctor", "import", "queues"}))
def test_without_the_right_a_line_and_69(redis_server, redis_client, queue, verb):
    redis_client.execute_command("ACL", "SETUSER", "nobody", "reset", "on", ">secret", "~*", "+time")
    url = redis_server.url.replace("redis://", "redis://nobody:secret@")
    result = invoke("--url", url, "--name", queue.name, *VERBS[verb])
    redis_client.execute_command("ACL", "DELUSER", "nobody")
    assert result.exit_code == 69
    assert "lacks a right" in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("verb", VERBS)
def test_without_a_url_wrong_usage(verb):
    result = invoke(*VERBS[verb], env={"DELAYADAPTERS_URL": None}, input=text_for(verb))
    assert result.exit_code == 2
    assert "DELAYADAPTERS_URL" in result.stderr


@pytest.mark.parametrize("given", [("--url", "http://x"), ("--url", "redis://x:y"), ("--name", "a{b}")])
def test_a_bad_url_or_name_is_wrong_usage(given, redis_server):
    result = invoke("--url", redis_server.url, *given, "status")
    assert result.exit_code == 2
    assert "Traceback" not in result.output


def test_settings_from_the_environment(redis_server, queue):
    environment = {"DELAYADAPTERS_URL": redis_server.url, "DELAYADAPTERS_NAME": queue.name, "DELAYADAPTERS_SHARDS": "1"}
    assert json.loads(invoke("status", "--json", env=environment).stdout)["queue"] == queue.name


def test_help_loads_neither_redis_nor_rich():
    code = (
        "import sys; from click.testing import CliRunner; import delayadapters.cli as cli; "
        "r = CliRunner().invoke(cli.main, ['--help']); assert r.exit_code == 0; "
        "print(*sorted({m.split('.')[0] for m in sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"rich", "arq", "celery", "taskiq"} & set(done.stdout.split())


def test_without_click_a_line(tmp_path):
    """The package without its extra."""
    (tmp_path / "click.py").write_text("raise ImportError('no click')")
    code = "import delayadapters.cli"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 1
    assert done.stderr == "the delayadapters command needs click: pip install 'delayadapters[cli]'\n"


# ----------------------------------------------------------------------------------------------------------- reference

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "cli.md"


def sections() -> dict[str, str]:
    """The page by its headings."""
    parts = PAGE.read_text("utf-8").split("\n## ")[1:]
    return {part.splitlines()[0].strip("`"): part for part in parts}


def verbs_of(group: click.Group, prefix: str = "") -> Iterator[tuple[str, click.Command]]:
    for name in sorted(set(group.list_commands(click.Context(group)))):
        if not prefix and name not in OURS:
            continue
        command = group.get_command(click.Context(group), name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from verbs_of(command, f"{prefix}{name} ")
        else:
            yield f"{prefix}{name}", command


@pytest.mark.parametrize(("name", "command"), [pytest.param(*pair, id=pair[0]) for pair in verbs_of(main)])
def test_the_reference_has_every_verb_and_option(name, command):
    section = sections()[name]
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            for word in (*parameter.opts, *parameter.secondary_opts):
                assert f"`{word}" in section or f" {word}`" in section, f"{name} {word}"


def test_every_verb_takes_json_but_those_that_the_help_names():
    found = dict(verbs_of(main))
    without = {name for name, command in found.items() if not any("--json" in one.opts for one in command.params)}
    for text in (main.help, PAGE.read_text("utf-8")):
        [said] = re.findall(r"Every verb takes `?--json`?, but for (.*?)\.(?:\s|$)", " ".join(text.split()))
        named = set(re.sub(r"\([^)]*\)", "", said).replace("`", "").replace(" and ", ", ").replace(" ", "").split(","))
        assert named == {"metrics", "arq", "arq-migrate"}
        assert without <= named


def test_the_reference_has_the_groups_options_and_every_exit_status():
    text = PAGE.read_text("utf-8")
    for parameter in main.params:
        for word in parameter.opts:
            assert f"`{word}" in text, word
        if isinstance(parameter, click.Option) and parameter.envvar:
            assert f"`{parameter.envvar}`" in text
    for status in (0, 1, 2, 3, 69, 130):
        assert f"| {status} |" in text
    for name in set(COMMANDS) - OURS:
        assert f"`delayadapters {name}`" in text, name
