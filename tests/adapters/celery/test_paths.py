"""Every way in which Celery makes a delayed message, run through a worker in this process."""

from __future__ import annotations

import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from types import ModuleType
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from celery import Celery, Task, chain, chord, group, shared_task
from celery.beat import Scheduler
from celery.contrib.testing.worker import start_worker
from celery.schedules import schedule
from celery.utils.time import maybe_iso8601, maybe_make_aware
from click.testing import CliRunner

from delayadapters.celery import install
from delayadapters.celery.message import DUE_HEADER
from delaytests import RedisServer, wait_until

LATER = 0.25


@dataclass
class Live:
    """An app, a worker that runs its tasks in this process, and what it ran: (task, id, result or args, request)."""

    app: Celery
    server: RedisServer
    runs: list[dict[str, Any]] = field(default_factory=list)

    def of(self, task_id: str) -> list[dict[str, Any]]:
        return [run for run in self.runs if run["id"] == task_id]

    def named(self, name: str) -> list[dict[str, Any]]:
        return [run for run in self.runs if run["task"] == f"paths.{name}"]

    def delayed(self, run: dict[str, Any]) -> bool:
        """Whether this run came through the delay queue, and then not early."""
        due = (run["headers"] or {}).get(DUE_HEADER)
        if due is not None:
            assert run["at"] >= datetime.fromisoformat(due).timestamp()
            assert run["eta"] is None
        return due is not None

    def task(self, name: str) -> Any:
        return self.app.tasks[f"paths.{name}"]

    def client(self, **conf: Any) -> Celery:
        """Another app of the same application: it knows no task."""
        app = Celery("elsewhere", set_as_current=False)
        app.conf.update({**_conf(self.server), **conf})
        install(app)
        return app


def _conf(server: RedisServer) -> dict[str, Any]:
    return {
        "broker_url": server.url,
        "result_backend": server.url.replace("/0", "/9"),
        "delayadapters_min_delay": 0.05,
        "task_default_queue": "paths",
        "worker_hijack_root_logger": False,
        "worker_redirect_stdouts": False,
        "accept_content": ["json", "pickle", "yaml", "msgpack"],
    }


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with RedisServer() as server:
        app = Celery("paths", set_as_current=False)
        app.conf.update(_conf(server))
        install(app)
        found = Live(app, server)
        _define(found)
        with start_worker(app, perform_ping_check=False):
            yield found
        app.delayadapters.close()
        app.close()


@pytest.fixture(autouse=True)
def fresh(request: pytest.FixtureRequest) -> Iterator[None]:
    if "live" not in request.fixturenames:
        yield
        return
    live = request.getfixturevalue("live")
    live.runs.clear()
    yield
    live.app.delayadapters.purge()


def _define(live: Live) -> None:
    app, runs = live.app, live.runs

    class Recording(Task):  # type: ignore[misc]
        abstract = True

        def before_start(self, task_id: str, args: Any, kwargs: Any) -> None:
            request = self.request
            runs.append(
                {"task": self.name, "id": task_id, "at": time.time(), "args": args, "kwargs": kwargs,
                 "eta": request.eta, "headers": request.headers, "stamps": request.stamps,
                 "retries": request.retries, "parent": request.parent_id, "root": request.root_id}
            )  # fmt: skip

    def task(function: Callable[..., Any], **options: Any) -> None:
        app.task(
            function, name=f"paths.{function.__name__}", **{"base": Recording, "bind": True, "shared": False, **options}
        )

    def add(self: Any, *numbers: int) -> int:
        return sum(numbers)

    def total(self: Any, numbers: list[int]) -> int:
        return sum(numbers)

    def fails(self: Any, *args: Any) -> None:
        raise ValueError("as asked")

    def told(self: Any, *args: Any, bad: int) -> None:
        """For link_error."""

    def replaced(self: Any, a: int, b: int) -> Any:
        raise self.replace(live.task("add").s(a, b).set(countdown=LATER))

    def grows(self: Any, a: int) -> int:
        if self.request.retries == 0:
            self.add_to_chord(live.task("add").s(a, 100).set(countdown=LATER))
        return a

    def again(self: Any, times: int) -> int:
        if self.request.retries < times:
            raise self.retry(countdown=LATER, max_retries=times)
        return int(self.request.retries)

    def auto(self: Any) -> int:
        if self.request.retries < 1:
            raise ValueError("not yet")
        return int(self.request.retries)

    for function in (add, total, fails, told, replaced, grows, again):
        task(function)
    task(auto, autoretry_for=(ValueError,), retry_backoff=1, retry_jitter=True, max_retries=2)


def get(result: Any, timeout: float = 10) -> Any:
    return result.get(timeout=timeout, disable_sync_subtasks=False)


# -------------------------------------------------------------------------------------------------------------- canvas


def test_chain(live: Live) -> None:
    add = live.task("add")
    result = chain(add.s(1, 1), add.s(2).set(countdown=LATER), add.s(3)).apply_async(countdown=LATER)
    assert get(result) == 7
    assert [live.delayed(run) for run in live.named("add")] == [True, True, False]
    first, second, third = live.named("add")
    assert first["root"] == second["root"] == third["root"] == first["id"]
    assert (second["parent"], third["parent"]) == (first["id"], second["id"])


def test_group(live: Live) -> None:
    add = live.task("add")
    result = group(add.s(n, n) for n in range(3)).apply_async(countdown=LATER)
    assert get(result) == [0, 2, 4]
    assert all(map(live.delayed, live.named("add")))


def test_group_skew(live: Live) -> None:
    add = live.task("add")
    begin = time.time()
    result = group(add.s(n) for n in range(3)).skew(start=0.2, stop=0.9, step=0.3).apply_async()
    assert get(result) == [0, 1, 2]
    runs = sorted(live.named("add"), key=lambda run: run["args"])
    assert all(map(live.delayed, runs))
    for run, after in zip(runs, (0.2, 0.5, 0.8), strict=True):
        assert run["at"] >= begin + after


def test_chord_with_delays_in_header_and_body(live: Live) -> None:
    add, total = live.task("add"), live.task("total")
    header = [add.s(1).set(countdown=LATER), add.s(2), add.s(3).set(countdown=2 * LATER)]
    result = chord(header, total.s().set(countdown=LATER)).apply_async()
    assert get(result) == 6
    assert sum(live.delayed(run) for run in live.named("add")) == 2
    assert [live.delayed(run) for run in live.named("total")] == [True]


def test_a_chords_countdown(live: Live) -> None:
    add, total = live.task("add"), live.task("total")
    result = chord([add.s(1), add.s(2)], total.s()).apply_async(countdown=LATER)
    assert get(result) == 3
    assert any(live.delayed(run) for run in live.runs)


def test_replace(live: Live) -> None:
    result = live.task("replaced").delay(1, 2)
    assert get(result) == 3
    [run] = live.named("add")
    assert live.delayed(run)
    assert run["id"] == result.id


def test_replace_in_a_delayed_chain(live: Live) -> None:
    result = chain(live.task("replaced").s(1, 2).set(countdown=LATER), live.task("add").s(10)).apply_async()
    assert get(result) == 13


def test_add_to_chord(live: Live) -> None:
    result = chord([live.task("grows").s(1)], live.task("total").s()).apply_async()
    assert get(result) == 1 + 101
    assert [live.delayed(run) for run in live.named("add")] == [True]


def test_link_and_link_error(live: Live) -> None:
    add, told = live.task("add"), live.task("told")
    good = add.apply_async((1, 2), countdown=LATER, link=add.s(10).set(countdown=LATER))
    live.task("fails").apply_async(countdown=LATER, link_error=told.s(bad=1).set(countdown=LATER))
    assert get(good) == 3
    wait_until(lambda: len(live.named("add")) == 2 and len(live.named("told")) == 1)
    assert all(map(live.delayed, live.named("add") + live.named("told") + live.named("fails")))


def test_stamps(live: Live) -> None:
    signature = live.task("add").s(1)
    signature.stamp(customer="c17")
    assert get(signature.apply_async(countdown=LATER)) == 1
    [run] = live.named("add")
    assert live.delayed(run)
    assert run["stamps"] == {"customer": "c17"}


# ------------------------------------------------------------------------------------------------------- other senders


def test_retries(live: Live) -> None:
    result = live.task("again").apply_async((2,), countdown=LATER)
    assert get(result) == 2
    assert [(run["id"], run["retries"]) for run in live.named("again")] == [(result.id, n) for n in range(3)]
    assert all(map(live.delayed, live.named("again")))


def test_autoretry_with_backoff_and_jitter(live: Live) -> None:
    assert get(live.task("auto").delay()) == 1
    assert len(live.named("auto")) == 2


def test_by_name_and_unregistered_signatures_from_another_app(live: Live) -> None:
    app = live.client()
    one = app.send_task("paths.add", (1, 2), countdown=LATER)
    two = app.signature("paths.add", args=(3, 4), options={"countdown": LATER}).apply_async()
    assert (get(one), get(two)) == (3, 7)
    assert all(map(live.delayed, live.runs))
    app.delayadapters.close()
    app.close()


@pytest.mark.parametrize("protocol", [1, 2])
@pytest.mark.parametrize("serializer", ["json", "pickle"])
def test_message_protocols(live: Live, protocol: int, serializer: str) -> None:
    app = live.client(task_protocol=protocol, task_serializer=serializer)
    result = app.send_task("paths.add", (1, 2), countdown=LATER, compression="zlib")
    assert get(result) == 3
    [run] = live.of(result.id)
    assert live.delayed(run)
    app.delayadapters.close()
    app.close()


def test_a_beat_entry_with_a_countdown(live: Live) -> None:
    scheduler = Scheduler(live.app, lazy=True)
    entry = scheduler.Entry(
        name="often", task="paths.add", schedule=schedule(3600), args=(2, 3), options={"countdown": LATER}, app=live.app
    )
    scheduler.apply_entry(entry)
    [job] = wait_until(lambda: live.app.delayadapters.jobs().jobs)
    assert job.meta["task"] == "paths.add"
    wait_until(lambda: live.of(job.id))
    assert live.delayed(live.of(job.id)[0])


def test_celery_call(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    from celery.bin.celery import celery

    module = ModuleType("delay_paths")
    module.app = live.app  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "delay_paths", module)
    soon = (datetime.now(timezone.utc) + timedelta(seconds=1)).isoformat()
    for option in (["--countdown", "0.5"], ["--eta", soon]):
        done = CliRunner().invoke(celery, ["-A", "delay_paths", "call", "paths.add", "-a", "[4, 5]", *option])
        assert done.exit_code == 0, done.output
        task_id = done.output.strip()
        assert live.app.delayadapters.get(task_id) is not None
        wait_until(lambda task_id=task_id: live.of(task_id))
        assert live.delayed(live.of(task_id)[0])


def test_task_classes(live: Live) -> None:
    """``base=`` of an abstract class, of the app's Task and of plain Task; one that overrides apply_async."""
    app, sent = live.app, []

    class Counted(app.Task):  # type: ignore[misc, name-defined]
        abstract = True

        def apply_async(self, *args: Any, **kwargs: Any) -> Any:
            sent.append(self.name)
            return super().apply_async(*args, **{"countdown": LATER, **kwargs})

    def same(n: int) -> int:
        return n

    for base in (Counted, app.Task, Task):
        name = f"paths.of.{base.__module__}.{base.__qualname__}"
        one = app.task(same, base=base, name=name)
        options = {} if base is Counted else {"countdown": 60}
        result = one.apply_async((3,), **options)
        [job] = [job for job in app.delayadapters.jobs().jobs if job.id == result.id]
        assert job.meta["task"] == name
        del app.tasks[name]
        app.delayadapters.cancel(result.id)
    assert len(sent) == 1


def test_shared_tasks_follow_the_current_app(live: Live) -> None:
    @shared_task(name="paths.shared")
    def shared(n: int) -> int:
        return n

    live.app.set_current()
    result = shared.apply_async((5,), countdown=60)
    assert live.app.delayadapters.get(result.id) is not None
    other = live.client(delayadapters_name="second")
    other.set_current()
    try:
        result = shared.apply_async((5,), countdown=60)
        assert other.delayadapters.get(result.id) is not None
        assert live.app.delayadapters.get(result.id) is None
    finally:
        live.app.set_current()
        other.delayadapters.purge()
        other.delayadapters.close()
        other.close()


def test_two_apps_in_one_process_keep_apart(live: Live) -> None:
    other = live.client(broker_url=live.server.url.replace("/0", "/5"), task_default_queue="elsewhere")
    mine = live.app.send_task("paths.add", (1,), countdown=60)
    theirs = other.send_task("paths.add", (1,), countdown=60)
    assert [job.id for job in live.app.delayadapters.jobs().jobs] == [mine.id]
    assert [job.id for job in other.delayadapters.jobs().jobs] == [theirs.id]
    live.app.control.revoke([mine.id, theirs.id])
    assert [job.id for job in other.delayadapters.jobs().jobs] == [theirs.id]
    other.delayadapters.purge()
    other.delayadapters.close()
    other.close()


def test_a_pickled_app_sends_and_revokes(live: Live) -> None:
    other = pickle.loads(pickle.dumps(live.client()))
    assert get(other.send_task("paths.add", (1, 2), countdown=LATER)) == 3
    result = other.send_task("paths.add", (1, 2), countdown=60)
    other.AsyncResult(result.id).revoke()
    assert live.app.delayadapters.get(result.id) is None
    other.delayadapters.close()
    other.close()


def test_an_app_that_a_new_process_is_given(live: Live) -> None:
    """As a spawned pool process is: it has the pickle, and imports the rest."""
    app = live.client()
    code = (
        "import pickle, sys; app = pickle.load(sys.stdin.buffer); app.delayadapters.close()\n"
        "app.send_task('paths.add', (1, 2), countdown=60, task_id='spawned')"
    )
    subprocess.run([sys.executable, "-c", code], input=pickle.dumps(app), check=True, timeout=60)
    assert live.app.delayadapters.get("spawned").meta["task"] == "paths.add"
    app.close()


# --------------------------------------------------------------------------------------------------------------- times

BERLIN = ZoneInfo("Europe/Berlin")


@pytest.mark.parametrize(
    "conf", [{}, {"timezone": "Europe/Berlin"}, {"timezone": "America/New_York", "enable_utc": False}], ids=str
)
def test_an_eta_is_the_instant_that_a_native_worker_takes_it_for(
    conf: dict[str, Any], redis_broker: Any, make_app: Callable[..., Celery]
) -> None:
    app, native = make_app({**redis_broker.conf, **conf}), make_app({**redis_broker.conf, **conf}, installed=False)
    for eta in (
        datetime(2099, 7, 1, 12),
        datetime(2099, 3, 29, 2, 30),  # does not exist in Berlin
        datetime(2099, 10, 25, 2, 30),  # is there twice
        datetime(2099, 3, 29, 2, 30, tzinfo=BERLIN),
        datetime(2099, 10, 25, 2, 30, tzinfo=BERLIN),
        datetime(2099, 10, 25, 2, 30, tzinfo=BERLIN, fold=1),
        "2099-10-25T02:30:00",
        "2099-10-25T02:30:00+02:00",
        "2099-10-25T02:30:00Z",
    ):
        job = app.delayadapters.get(app.send_task("x", eta=eta).id)
        native.send_task("x", eta=eta)
        # celery/worker/request.py, Request.__init__
        taken = maybe_make_aware(maybe_iso8601(redis_broker.get().headers["eta"]), native.timezone)
        assert job.due_at == taken, eta
