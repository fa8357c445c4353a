"""Real workers, killed and stopped in every way."""

from __future__ import annotations

import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import kombu
import pytest
from celery import Celery, chain, chord, group
from celery.exceptions import ImproperlyConfigured

from delayadapters import Batch, Published, Releaser
from delayadapters.celery import hosting
from delayadapters.celery.hosting import ReleaseStep
from delayadapters.celery.message import DUE_HEADER
from delayadapters.celery.publisher import CeleryPublisher
from delayadapters.celery.settings import make_queue
from delaytests import wait_until


def due(execution: Any) -> float:
    return datetime.fromisoformat(execution.headers[DUE_HEADER]).timestamp()


def ran(executions: Callable[[], list[Any]], times: int, timeout: float = 20) -> list[Any]:
    """The executions, once there are that many."""
    return wait_until(lambda: (found := executions()) and len(found) >= times and found, timeout, 0.02)


@pytest.mark.parametrize(
    ("kind", "pool"),
    [("redis", "prefork"), ("redis", "threads"), ("redis", "solo"), ("rabbit", "prefork"), ("rabbit", "threads")],
)
def test_every_kind_of_delay_runs_on_time(
    request: pytest.FixtureRequest,
    kind: str,
    pool: str,
    make_app: Callable[..., Celery],
    worker: Callable[..., Any],
    executions: Callable[[], list[Any]],
) -> None:
    broker = request.getfixturevalue(f"{kind}_broker")
    conf = broker.conf | {"delayadapters_min_delay": 0.1}
    app = make_app(conf)
    running = worker(conf, pool)
    begin = time.time()
    now = datetime.now(timezone.utc)
    note = app.tasks["note"]
    note.apply_async(("countdown",), countdown=0.5)
    note.apply_async(("aware",), eta=now + timedelta(seconds=2))
    note.apply_async(("naive",), eta=now.replace(tzinfo=None) + timedelta(seconds=2))
    note.apply_async(("iso",), eta=(now + timedelta(seconds=2)).isoformat())
    app.send_task("note", ("by name",), countdown=0.5)
    chain(note.s("chain 1"), note.si("chain 2").set(countdown=0.5)).apply_async()
    group(note.s("group 1"), note.s("group 2")).apply_async(countdown=0.5)
    later = {"countdown": 0.5}
    chord([note.s(1).set(**later), note.s(2).set(**later)], app.tasks["total"].s()).apply_async()
    app.tasks["again"].apply_async((2, 0.3))
    app.tasks["auto"].apply_async((1,))

    expected = Counter(note=11, again=3, auto=2, total=1)
    wait_until(lambda: Counter(run.task for run in executions()) == expected, 20, 0.02, message=running.log[-3000:])
    runs = executions()
    for run in runs:
        assert run.eta is None
        if run.headers and DUE_HEADER in run.headers:
            assert due(run) <= run.at < due(run) + 2
    delayed = [run for run in runs if run.headers and DUE_HEADER in run.headers]
    assert len(delayed) == 5 + 1 + 2 + 2 + 2 + 1
    assert all(run.at >= begin + 0.5 for run in delayed if run.task == "note")
    [result] = [run.args[0] for run in runs if run.task == "total"]
    assert sorted(result) == [1, 2]
    retried = [run for run in runs if run.task == "again"]
    assert len({run.id for run in retried}) == 1
    assert [run.retries for run in sorted(retried, key=lambda run: run.at)] == [0, 1, 2]
    assert app.delayadapters.stats().waiting == 0
    assert running.stop() == 0
    assert not running.tree, "a warm shutdown leaves no process behind"


def test_a_retry_that_comes_before_the_first_entrys_ack(
    redis_broker: Any, make_app: Callable[..., Celery], worker: Callable[..., Any], executions: Callable[[], list[Any]]
) -> None:
    """The released task has run, failed and scheduled its retry under its id before the publisher has returned."""
    conf = redis_broker.conf | {"delayadapters_embed": False, "delayadapters_min_delay": 0.1}
    conf["delayadapters_direct"] = False  # a direct release needs no ack
    app = make_app(conf)
    worker(conf, "threads")
    queue = app.delayadapters
    result = app.tasks["again"].apply_async((2, 0.2), countdown=0.2)
    seen: list[int] = []

    class Slow(CeleryPublisher):
        def publish(self, claims: Batch) -> Published:
            outcome = super().publish(claims)
            seen.append(len(claims))
            if len(seen) <= 2:
                wait_until(lambda: len(executions()) == len(seen) and queue.stats().waiting == 1, 10)
            return outcome

    releaser = Releaser(make_queue(app), Slow(app))
    releaser.start()
    try:
        ran(executions, 3)
        wait_until(lambda: (now := queue.stats()) and now.waiting == now.leased == now.dead == 0)
    finally:
        assert releaser.stop(10)
    runs = executions()
    assert [run.retries for run in runs] == [0, 1, 2]
    assert {run.id for run in runs} == {result.id}
    assert seen == [1, 1, 1]


def test_a_killed_workers_tasks_wait_for_the_next_one(
    redis_broker: Any, make_app: Callable[..., Celery], worker: Callable[..., Any], executions: Callable[[], list[Any]]
) -> None:
    conf = redis_broker.conf
    app = make_app(conf)
    first = worker(conf)
    # Due once the second worker is there: a batch that the kill finds claimed would come back with its lease.
    ids = {app.tasks["note"].apply_async((number,), countdown=4).id for number in range(100)}
    pids = first.tree
    first.kill_tree()
    assert len(pids) == 4, "the worker, two children and the release process"
    wait_until(lambda: not first.tree)
    worker(conf)
    runs = ran(executions, 100)
    assert Counter(run.id for run in runs) == Counter(dict.fromkeys(ids, 1))
    assert all(run.at >= due(run) for run in runs)


def test_a_release_process_that_never_comes_up_is_replaced(
    app: Celery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when it was forked while some thread held a lock that it needs."""
    started = tmp_path / "started"

    def hang(*_: Any) -> None:
        with started.open("a") as file:
            file.write("x")
        signal.pause()

    monkeypatch.setattr(hosting, "_child", hang)
    monkeypatch.setattr(hosting, "_START_TIMEOUT", 1.0)
    process = hosting.ReleaseProcess(app, "host")
    process.start()
    try:
        wait_until(lambda: started.exists() and len(started.read_text()) >= 2)
    finally:
        process.terminate()


def test_a_command_under_way_on_a_pooled_connection_does_not_hold_up_the_release_process(
    app: Celery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reply to remote control waits in a BRPOP; kombu closes pooled connections in a new child, which shares them."""
    started = tmp_path / "started"

    def come_up(*_: Any) -> None:
        started.write_text("x")
        signal.pause()

    monkeypatch.setattr(hosting, "_child", come_up)
    with app.pool.acquire(block=True) as connection:
        connection.default_channel.brpop_timeout = 30
        consumer = connection.Consumer(kombu.Queue("nothing-comes", channel=connection.default_channel))
        consumer.consume()
        with pytest.raises(TimeoutError):
            connection.drain_events(timeout=0.2)  # its BRPOP goes on
        process = hosting.ReleaseProcess(app, "host")
        process.start()
        try:
            wait_until(started.exists, 5)
        finally:
            process.terminate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_delay_run_releases_in_a_process_of_its_own(
    redis_broker: Any, make_app: Callable[..., Celery], celeryd: Callable[..., Any], number: int
) -> None:
    app = make_app(redis_broker.conf)
    running = celeryd(redis_broker.conf, "delay", "run", "-l", "INFO", ready="delay release: queue")
    app.tasks["note"].apply_async(countdown=1)
    wait_until(lambda: redis_broker.size() == 1)
    assert running.stop(number, 10) == 0
    assert "stopped" in running.log


def test_delay_help_needs_no_redis(celeryd: Callable[..., Any]) -> None:
    shown = celeryd({"broker_url": "redis://127.0.0.1:1/0"}, "delay", "--help", ready=None)
    assert shown.process.wait(20) == 0
    assert "run" in shown.log


@pytest.mark.parametrize("pool", ["gevent", "eventlet"])
def test_green_pools_are_refused_with_what_to_do(app: Celery, pool: str) -> None:
    step = ReleaseStep(SimpleNamespace(app=app))
    with pytest.raises(ImproperlyConfigured, match=rf"{pool}.*delay run"):
        step.create(SimpleNamespace(app=app, pool_cls=f"celery.concurrency.{pool}", hostname="h"))


def test_embed_can_be_switched_off(
    redis_broker: Any, make_app: Callable[..., Celery], worker: Callable[..., Any]
) -> None:
    app = make_app(redis_broker.conf | {"delayadapters_embed": False})
    assert not ReleaseStep(SimpleNamespace(app=app)).enabled
    running = worker(redis_broker.conf | {"delayadapters_embed": False})
    assert len(running.children()) == 2
    app.tasks["note"].apply_async(countdown=0.01)


def test_a_broker_that_was_down_at_the_due_time_gets_the_task_when_it_is_back(
    redis_broker: Any, make_app: Callable[..., Celery]
) -> None:
    from delaytests import RedisServer

    with RedisServer() as server:
        app = make_app(redis_broker.conf | {"broker_url": server.url})
        server.kill()
        app.tasks["note"].apply_async(countdown=1)
        releaser = Releaser(make_queue(app), CeleryPublisher(app))
        threading.Thread(target=releaser.run, daemon=True).start()
        wait_until(lambda: app.delayadapters.stats().due == 1, 5)
        wait_until(lambda: releaser.stats.given_back >= 1, 10)
        server.restart()
        wait_until(lambda: server.client().llen(redis_broker.queue) == 1, 20)
        assert releaser.stop(10)
        assert app.delayadapters.stats().dead == 0
