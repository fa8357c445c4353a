"""``celery -A proj delay …`` and ``celery … revoke / inspect``, as a user types them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from types import ModuleType
from typing import Any

import click
import pytest
from celery import Celery
from celery.bin.celery import celery
from celery.contrib.testing.worker import start_worker
from click.testing import CliRunner, Result

from delayadapters.cli.desk import Moment
from delayadapters.cli.selecting import Filter, find
from delaytests import wait_until
from delaytests.server import free_port

UTC = timezone.utc


@pytest.fixture
def delay(app: Celery, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """``delay("ls", "--json", input=…) -> Result`` of ``celery -A … delay ls --json``."""
    return commands(app, monkeypatch)


def commands(app: Celery, monkeypatch: pytest.MonkeyPatch, group: str = "delay") -> Callable[..., Result]:
    module = ModuleType("delay_steer")
    module.app = app  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "delay_steer", module)

    def run(*arguments: str, **options: Any) -> Result:
        result = CliRunner().invoke(celery, ["-A", "delay_steer", group, *arguments], **options)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return run


def later(app: Celery, countdown: float, task_id: str, name: str = "note") -> None:
    app.send_task(name, (1,), countdown=countdown, task_id=task_id)


def die(app: Celery, *ids: str) -> None:
    queue = app.delayadapters
    for one in ids:
        app.send_task("note", countdown=60, task_id=one)
        queue.release_now(one)
    claims = wait_until(lambda: queue.claim())
    assert queue.fail(claims, "no exchange 'x'\x1b[31m in vhost " + "y" * 100, retry_in=None) == len(ids)


@pytest.fixture
def app(redis_broker: Any, make_app: Callable[..., Celery]) -> Celery:
    # Leased: these tests claim by hand.
    return make_app({**redis_broker.conf, "delayadapters_direct": False})


def test_status(app: Celery, delay: Callable[..., Result]) -> None:
    later(app, 60, "a")
    die(app, "b")
    shown = delay("status")
    assert shown.exit_code == 0
    rows = dict(line.split(None, 1) for line in shown.output.splitlines() if line.startswith(("waiting", "dead")))
    assert (rows["waiting"], rows["dead"]) == ("1", "1")
    assert max(map(len, shown.output.splitlines())) <= 80
    view = json.loads(delay("status", "--json").output)
    assert (view["waiting"], view["due"], view["leased"], view["dead"]) == (1, 0, 0, 1)
    assert abs(datetime.fromisoformat(view["next_due"]) - datetime.now(UTC) - timedelta(seconds=60)).seconds < 10
    app.delayadapters.purge()
    assert json.loads(delay("status", "--json").output)["next_due"] is None
    assert delay("status").exit_code == 0


def test_ls_pages_filters_and_windows(app: Celery, delay: Callable[..., Result]) -> None:
    for n in range(10):
        later(app, 100 + n * 100, f"id-{n}", "shop.tasks.remind" if n % 3 == 0 else "shop.other." + "x" * 90)
    plain = delay("ls")
    assert plain.exit_code == 0
    assert max(map(len, plain.output.splitlines())) <= 80
    assert plain.output.count("id-") == 10

    def ids(*arguments: str) -> list[str]:
        return [job["id"] for job in json.loads(delay("ls", "--json", *arguments).output)["jobs"]]

    assert ids("--task", "shop.tasks.*") == ["id-0", "id-3", "id-6", "id-9"]
    assert ids("--task", "shop.tasks.remind", "--due-after", "5m") == ["id-3", "id-6", "id-9"]
    assert ids("--due-before", "350") == ["id-0", "id-1", "id-2"]
    assert ids("--due-after", "250", "--due-before", "450s") == ["id-2", "id-3"]
    at = (datetime.now(UTC) + timedelta(seconds=850)).isoformat()
    assert ids("--due-after", at) == ["id-8", "id-9"]

    seen: list[str] = []
    cursor: list[str] = []
    while True:
        page = json.loads(delay("ls", "--json", "--limit", "3", "--task", "*e*", *cursor).output)
        seen += [job["id"] for job in page["jobs"]]
        assert len(page["jobs"]) <= 3
        if page["cursor"] is None:
            break
        cursor = ["--cursor", page["cursor"]]
    assert seen == [f"id-{n}" for n in range(10)]
    assert "--cursor" in delay("ls", "--limit", "3").stderr
    assert delay("ls", "--task", "nothing").output == "no tasks\n"


def test_a_page_of_matches_ends_with_the_last_one_shown(app: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("delayadapters.cli.selecting.PAGE", 4)
    for n in range(20):
        later(app, 100 + n, f"id-{n:02}", "a" if n % 3 else "b")
    seen: list[str] = []
    cursor = None
    while True:
        jobs, cursor = find(app.delayadapters, Filter("a"), 5, cursor)
        seen += [job.id for job in jobs]
        if cursor is None:
            break
        assert len(jobs) == 5
    assert seen == [f"id-{n:02}" for n in range(20) if n % 3]


def test_show(app: Celery, delay: Callable[..., Result]) -> None:
    app.tasks["note"].apply_async(("hello", 5), countdown=60, task_id="a", priority=3)
    shown = delay("show", "a")
    assert shown.exit_code == 0
    assert "('hello', 5)" in shown.output
    view = json.loads(delay("show", "a", "--json").output)
    assert (view["id"], view["task"], view["state"]) == ("a", "note", "waiting")
    assert view["message"]["argsrepr"] == "('hello', 5)"
    missing = delay("show", "b")
    assert missing.exit_code == 1
    assert "no such task" in missing.stderr
    assert json.loads(delay("show", "b", "--json").output) is None


def test_cancel(app: Celery, delay: Callable[..., Result]) -> None:
    for one in "abcd":
        later(app, 60, one)
    assert delay("cancel", "a").output == "a  cancelled\n"
    assert app.AsyncResult("a").state == "REVOKED"
    again = delay("cancel", "a")
    assert again.exit_code == 1
    assert "no such task" in again.output

    refused = delay("cancel", "b", "c", input="n\n")
    assert refused.exit_code == 1
    assert app.delayadapters.stats().waiting == 3
    assert delay("cancel", "b", "c", input="y\n").exit_code == 0
    done = delay("cancel", "d", "x", "--yes", "--json")
    assert done.exit_code == 1
    assert json.loads(done.output) == [{"id": "d", "outcome": "cancelled"}, {"id": "x", "outcome": "not_found"}]


def test_cancel_by_filter_tells_the_result_backend_of_each(app: Celery, delay: Callable[..., Result]) -> None:
    for one in "abc":
        later(app, 60, one, "note" if one != "c" else "other")
    assert "2 tasks would be cancelled" in delay("cancel", "--task", "note", "--dry-run").output
    assert delay("cancel", "--task", "note", "--yes").output == "2 tasks cancelled\n"
    assert [app.AsyncResult(one).state for one in "abc"] == ["REVOKED", "REVOKED", "PENDING"]
    assert [job.id for job in app.delayadapters.jobs().jobs] == ["c"]


def test_cancel_of_what_is_being_released(app: Celery, delay: Callable[..., Result]) -> None:
    later(app, 60, "a")
    app.delayadapters.release_now("a")
    assert wait_until(lambda: app.delayadapters.claim())
    said = delay("cancel", "a")
    assert said.exit_code == 1
    assert "celery control revoke" in said.output


def test_reschedule_and_release_now(app: Celery, delay: Callable[..., Result]) -> None:
    later(app, 60, "a")

    def due() -> datetime:
        job = app.delayadapters.get("a")
        assert job is not None
        return job.due_at

    assert delay("reschedule", "a", "--countdown", "1000").exit_code == 0
    assert due() > datetime.now(UTC) + timedelta(seconds=900)
    assert delay("reschedule", "a", "--eta", "2100-01-01T00:00:00").exit_code == 0
    assert due() == datetime(2100, 1, 1, tzinfo=UTC)
    assert delay("reschedule", "a", "--eta", "2100-01-01T00:00:00Z").exit_code == 0
    for wrong in ([], ["--countdown", "1", "--eta", "1h"], ["--eta", "soon"], ["--countdown", "x"]):
        assert delay("reschedule", "a", *wrong).exit_code == 2
    assert delay("reschedule", "a", "--countdown", "nan").exit_code == 2
    assert delay("release-now", "a").exit_code == 0
    assert due() <= datetime.now(UTC) + timedelta(seconds=1)
    assert delay("release-now", "b").exit_code == 1


def test_dead(app: Celery, delay: Callable[..., Result]) -> None:
    die(app, "a", "b", "c")
    plain = delay("dead", "ls")
    assert max(map(len, plain.output.splitlines())) <= 80
    assert "no exchange 'x'" in plain.output
    assert "\x1b" not in plain.output
    page = json.loads(delay("dead", "ls", "--json", "--limit", "2").output)
    assert [job["id"] for job in page["jobs"]] == ["a", "b"]
    page = json.loads(delay("dead", "ls", "--json", "--cursor", page["cursor"]).output)
    assert [job["id"] for job in page["jobs"]] == ["c"]
    assert json.loads(delay("dead", "show", "a", "--json").output)["state"] == "dead"
    assert delay("dead", "replay", "a").output == "a  replayed\n"
    assert delay("dead", "discard", "b", "c", "--yes").exit_code == 0
    stats = app.delayadapters.stats()
    assert (stats.waiting, stats.dead) == (1, 0)
    assert delay("dead", "discard", "b").exit_code == 1


def test_exit_status_of_a_redis_that_is_down_and_an_app_without_us(
    redis_broker: Any, make_app: Callable[..., Celery], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("delayadapters.celery.settings.SCHEDULE_TIMEOUT", 0.3)
    down = make_app({**redis_broker.conf, "delayadapters_redis_url": f"redis://127.0.0.1:{free_port()}/0"})
    for arguments in (["status"], ["ls", "--json"], ["cancel", "a"]):
        said = commands(down, monkeypatch)(*arguments)
        assert said.exit_code == 69
        assert "cannot be reached" in said.stderr
    without = make_app(redis_broker.conf, installed=False)
    said = commands(without, monkeypatch)("status")
    assert said.exit_code == 2
    assert "install(app)" in said.stderr


def test_bad_cursors_and_limits(delay: Callable[..., Result]) -> None:
    assert delay("ls", "--cursor", "!").exit_code == 1
    assert delay("ls", "--limit", "0").exit_code == 2
    assert delay("ls", "--due-before", "yesterday").exit_code == 2


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("+90", 90), ("1.5m", 90), ("2h", 7200), ("7d", 604_800), ("1w", 604_800)]
)
def test_times_from_now(text: str, seconds: float) -> None:
    moment = Moment().convert(text, None, None)
    assert abs((moment - datetime.now(UTC)).total_seconds() - seconds) < 5


@pytest.mark.parametrize("text", ["", "x", "1y", "2100-13-01", "999999999999w"])
def test_what_is_no_time(text: str) -> None:
    with pytest.raises(click.BadParameter):
        Moment().convert(text, None, None)


def test_celery_control_revoke_and_inspect_delayed(
    redis_broker: Any, make_app: Callable[..., Celery], monkeypatch: pytest.MonkeyPatch
) -> None:
    conf = {**redis_broker.conf, "worker_hijack_root_logger": False, "worker_redirect_stdouts": False}
    app = make_app(conf)
    for one in "abc":
        later(app, 60, one)
    app.send_task("note", countdown=60, task_id="d", stamped_headers=["k"], k="v")
    with start_worker(app, perform_ping_check=False):
        inspect, control = (commands(app, monkeypatch, group) for group in ("inspect", "control"))
        # Celery's command gives workers one second to answer, and a busy machine does not always.
        seen = wait_until(lambda: (answer := inspect("delayed", "2", "--json")).exit_code == 0 and answer)
        [view] = json.loads(seen.output).values()
        assert view["waiting"] == 4
        assert [job["id"] for job in view["jobs"]] == ["a", "b"]
        foreign = commands(make_app(redis_broker.conf, installed=False), monkeypatch, "control")
        assert control("revoke", "a").exit_code == 0
        assert foreign("revoke", "b").exit_code == 0
        assert foreign("revoke_by_stamped_headers", "k=v").exit_code == 0
        wait_until(lambda: [job.id for job in app.delayadapters.jobs().jobs] == ["c"])
    assert app.AsyncResult("b").state == "REVOKED"


def test_the_command_is_light() -> None:
    """Every ``celery`` call imports it."""
    code = (
        "import celery.bin.celery, sys; before = set(sys.modules); import delayadapters.celery.command; "
        "new = {m.split('.')[0] for m in set(sys.modules) - before}; print(*sorted(new))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"rich", "prometheus_client", "redis"} & set(done.stdout.split())
