"""delayadapters.testing for Celery: no Redis, no broker, no worker. The apps have addresses where nobody listens."""

from __future__ import annotations

import json
import socket
import warnings
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from celery import Celery, chain, chord, group, signals
from celery.result import AsyncResult
from kombu import Connection

from delayadapters import Outcome
from delayadapters.celery import install
from delayadapters.celery.fixup import installed
from delayadapters.testing import ClockMismatch, ManualClock, ReleaseFailed
from delayadapters.testing.celery import DelayedCelery
from delaytests.docs import run_example

pytest_plugins = ["pytester"]
NOBODY = "redis://localhost:1/0"
Make = Callable[..., DelayedCelery]


@pytest.fixture(autouse=True)
def _no_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        raise AssertionError(f"a connection is being made: {args}")

    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.fixture(params=["installed", "not installed"])
def app(request: pytest.FixtureRequest) -> Iterator[Celery]:
    app = Celery("proj", broker=NOBODY, backend=NOBODY, set_as_current=False)
    app.ran = ran = []

    @app.task(shared=False, name="proj.note", bind=True)
    def note(self: Any, value: Any = None, **more: Any) -> Any:
        ran.append(value)
        return value

    @app.task(shared=False, name="proj.retry", bind=True, max_retries=2)
    def retry(self: Any, countdown: float = 10) -> None:
        ran.append(self.request.retries)
        raise self.retry(countdown=countdown, exc=ValueError("for good"))

    @app.task(
        shared=False,
        name="proj.auto",
        autoretry_for=(KeyError,),
        retry_backoff=2,
        retry_jitter=False,
        max_retries=3,
        bind=True,
    )
    def auto(self: Any, fails: int) -> str:
        if self.request.retries < fails:
            raise KeyError("again")
        return "done"

    @app.task(shared=False, name="proj.add")
    def add(x: int, y: int) -> int:
        return x + y

    @app.task(shared=False, name="proj.total")
    def total(numbers: list[int]) -> int:
        return sum(numbers)

    @app.task(shared=False, name="proj.bad")
    def bad() -> None:
        raise ValueError("bad")

    @app.task(shared=False, name="proj.tick")
    def tick() -> None:
        ran.append("tick")
        tick.apply_async(countdown=10)
        note.delay("inside")
        ran.append("tock")

    @app.task(shared=False, name="proj.waits")
    def waits() -> None:
        note.delay(1).get()

    app.task_names = {name.rpartition(".")[2]: task for name, task in app.tasks.items() if name.startswith("proj.")}
    if request.param == "installed":
        install(app)
    yield app
    app.close()


@pytest.fixture
def tasks(app: Celery) -> Any:
    return type("Tasks", (), app.task_names)


@pytest.fixture
def delayed(delayed_celery: Make, app: Celery) -> DelayedCelery:
    return delayed_celery(app)


# ------------------------------------------------------------------------------------------------- scheduled, released


def test_a_delayed_task_waits_and_runs_when_the_clock_gets_there(delayed: DelayedCelery, tasks: Any, app: Any) -> None:
    result = tasks.note.apply_async(("a",), {"urgent": True}, countdown=60)
    delayed.assert_scheduled(tasks.note, delay=60, args=["a"], kwargs={"urgent": True}, id=result.id, queue="celery")
    delayed.assert_scheduled("note", delay=timedelta(minutes=1), times=1)
    assert app.delayadapters.get(result.id).meta["task"] == "proj.note"
    assert delayed.advance(59.999) == []
    assert app.ran == []
    assert result.state == "PENDING"
    assert [job.task for job in delayed.advance(1)] == ["proj.note"]
    assert app.ran == ["a"]
    assert result.get(timeout=0) == "a"
    delayed.assert_nothing_scheduled()
    delayed.assert_released("note", delay=60)


def test_every_way_to_name_a_time(delayed: DelayedCelery, tasks: Any, delay_clock: ManualClock) -> None:
    hour = timedelta(hours=1)
    tasks.note.apply_async(eta=delay_clock.now() + hour)
    tasks.note.apply_async(eta=(delay_clock.now() + hour).replace(tzinfo=None))
    tasks.note.apply_async(eta=(delay_clock.now() + hour).isoformat())
    tasks.note.apply_async(countdown=0.25)
    tasks.note.signature(countdown=3600).apply_async()
    delayed.assert_scheduled(delay=hour, times=4)
    delayed.assert_scheduled(delay=0.25)
    delayed.advance(hour)
    delayed.assert_nothing_scheduled()


def test_an_eta_by_a_clock_of_long_ago(app: Celery, tasks: Any, delayed_celery: Make) -> None:
    start = datetime(2020, 1, 1, tzinfo=timezone.utc)
    delayed = delayed_celery(app, clock=ManualClock(start))
    tasks.note.apply_async(eta=start + timedelta(minutes=5))
    delayed.assert_scheduled("note", delay=300)


def test_what_a_task_sends_runs_after_it_and_is_released_in_the_window(
    delayed: DelayedCelery, tasks: Any, app: Any
) -> None:
    tasks.tick.apply_async(countdown=10)
    delayed.advance(25)
    assert app.ran == ["tick", "tock", "inside"] * 2
    delayed.assert_scheduled("tick", due_in=5)


def test_a_task_that_is_not_delayed_runs_before_the_call_returns(delayed: DelayedCelery, tasks: Any, app: Any) -> None:
    assert tasks.note.delay(1).result == 1
    assert tasks.note.apply_async((2,), countdown=-1).result == 2
    assert app.send_task("proj.note", (3,)).result == 3
    assert app.ran == [1, 2, 3]
    assert delayed.released == []


def test_always_eager_still_delays(app: Celery, tasks: Any, delayed_celery: Make) -> None:
    app.conf.task_always_eager = True
    with DelayedCelery(app) as delayed:
        tasks.note.apply_async((1,), countdown=60)
        delayed.assert_scheduled("note")
        assert tasks.note.delay(2).result == 2
        assert app.ran == [2]
    assert app.conf.task_always_eager is True


def test_a_task_of_another_service_is_released_and_runs_nowhere(delayed: DelayedCelery, app: Celery) -> None:
    app.send_task("billing.charge", (7,), countdown=60, queue="billing")
    app.send_task("billing.charge", (8,))
    delayed.assert_scheduled("charge", queue="billing")
    delayed.advance(60)
    delayed.assert_released("billing.charge", args=[7])


# ---------------------------------------------------------------------------------------------------- retries, canvas


def test_retries_wait_and_the_last_error_is_raised(delayed: DelayedCelery, tasks: Any, app: Any) -> None:
    result = tasks.retry.delay(countdown=30)
    assert result.state == "RETRY"
    delayed.assert_scheduled("retry", delay=30, id=result.id)
    delayed.advance(30)
    assert app.ran == [0, 1]
    with pytest.raises(ValueError, match="for good"):
        delayed.advance(3600)
    assert app.ran == [0, 1, 2]
    assert result.state == "FAILURE"
    assert delayed.clock.now() > datetime.now(timezone.utc) + timedelta(seconds=3500), "the clock arrives all the same"
    assert delayed.advance(1) == []


def test_autoretry_with_backoff(delayed: DelayedCelery, tasks: Any) -> None:
    result = tasks.auto.delay(3)
    for delay in (2, 4, 8):
        delayed.assert_scheduled("auto", delay=delay, times=1)
        delayed.advance_to_next()
    assert result.get(timeout=0) == "done"
    assert delayed.advance_to_next() == []


def test_errors_can_be_left_in_the_results(delayed_celery: Make, app: Celery, tasks: Any) -> None:
    delayed = delayed_celery(app, propagate=False)
    results = [tasks.bad.delay(), tasks.bad.apply_async(countdown=5)]
    delayed.advance(5)
    assert [result.state for result in results] == ["FAILURE"] * 2


def test_an_error_is_raised_where_the_task_was_sent(delayed: DelayedCelery, tasks: Any) -> None:
    with pytest.raises(ValueError, match="bad"):
        tasks.bad.delay()
    assert delayed.advance(0) == []


def test_waiting_for_a_result_inside_a_task_is_refused_as_in_a_worker(delayed: DelayedCelery, tasks: Any) -> None:
    with pytest.raises(RuntimeError, match=r"Never call result.get\(\) within a task"):
        tasks.waits.delay()


def test_chains_groups_chords_and_links(delayed: DelayedCelery, tasks: Any, app: Any) -> None:
    chained = chain(tasks.add.s(1, 2), tasks.add.s(3).set(countdown=30)).apply_async()
    delayed.assert_scheduled("add", args=(3, 3), delay=30)
    body = chord([tasks.add.s(1, 1).set(countdown=5), tasks.add.s(2, 2).set(countdown=50)])(
        tasks.total.s().set(countdown=100)
    )
    grouped = group(tasks.add.s(n, n) for n in range(3)).apply_async(countdown=60)
    delayed.assert_scheduled("add", delay=60, times=3)
    tasks.add.apply_async((4, 4), countdown=1, link=tasks.note.s().set(countdown=2))
    delayed.advance(149)
    assert (chained.result, grouped.get(timeout=0), body.state) == (6, [0, 2, 4], "PENDING")
    assert app.ran == [8]
    delayed.advance(1)
    assert body.get(timeout=0) == 6


def test_a_chord_fails_with_a_delayed_member(delayed_celery: Make, app: Celery, tasks: Any) -> None:
    delayed = delayed_celery(app, propagate=False)
    body = chord([tasks.bad.si().set(countdown=5), tasks.add.si(1, 1)])(tasks.total.s())
    delayed.advance(5)
    assert body.state == "FAILURE"


# --------------------------------------------------------------------------------------------------- revoke, expires


@pytest.mark.parametrize("way", ["result", "control", "queue", "stamp"])
def test_a_revoked_task_does_not_run(delayed: DelayedCelery, tasks: Any, app: Any, way: str) -> None:
    seen: list[str] = []
    signals.task_revoked.connect(lambda request, **_: seen.append(request.id), weak=False, dispatch_uid="test")
    try:
        if way == "stamp":
            tasks.note.s(1).stamp(team="red").apply_async(countdown=60)
            result = AsyncResult(delayed.scheduled[0].id, app=app)
            app.control.revoke_by_stamped_headers({"team": "red"})
        else:
            result = tasks.note.apply_async((1,), countdown=60)
            if way == "queue":
                assert app.delayadapters.cancel(result.id) is Outcome.CANCELLED
            else:
                (result.revoke if way == "result" else lambda: app.control.revoke([result.id]))()
    finally:
        signals.task_revoked.disconnect(dispatch_uid="test")
    delayed.assert_nothing_scheduled()
    assert result.state == "REVOKED"
    assert seen == [result.id]
    assert delayed.advance(60) == []
    assert app.ran == []
    assert app.control.inspect().active() is None


def test_a_task_expires_by_the_clock_of_the_test(delayed: DelayedCelery, tasks: Any, app: Any) -> None:
    late = tasks.note.apply_async(("late",), countdown=60, expires=30)
    early = tasks.note.apply_async(("early",), countdown=60, expires=90)
    delayed.advance(60)
    assert (late.state, early.state) == ("REVOKED", "SUCCESS")
    assert app.ran == ["early"]


def test_a_time_of_the_machine_that_the_clock_has_passed_is_warned_of(delayed: DelayedCelery, tasks: Any) -> None:
    delayed.advance(86_400)
    with pytest.warns(ClockMismatch, match=r"proj\.note was scheduled for"):
        tasks.note.apply_async(eta=datetime.now(timezone.utc) + timedelta(hours=1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tasks.note.apply_async(eta=delayed.clock.now() + timedelta(hours=1))


# ------------------------------------------------------------------------------------------------------------ publish


@pytest.fixture
def memory_app(app: Celery, request: pytest.FixtureRequest) -> Celery:
    app.conf.update(broker_url="memory://", task_default_queue=f"q-{abs(hash(request.node.name))}")
    return app


def test_published_to_the_apps_own_broker_at_the_due_time(memory_app: Celery, tasks: Any, delayed_celery: Make) -> None:
    delayed = delayed_celery(memory_app, release="publish")
    result = tasks.note.apply_async(("a",), countdown=60)
    tasks.note.delay("now")
    due = delayed.assert_scheduled("note").due
    with Connection("memory://") as connection, connection.SimpleQueue(memory_app.conf.task_default_queue) as queue:
        first = queue.get(block=False)
        assert json.loads(first.body)[0] == ["now"]
        assert queue.qsize() == 0
        delayed.advance(60)
        message = queue.get(block=False)
        message.ack()
        first.ack()
    assert message.headers["id"] == result.id
    assert message.headers["eta"] is None
    assert message.headers["delayadapters_due"] == due.isoformat()
    assert memory_app.ran == [], "a worker would run it"


def test_a_broker_that_takes_nothing(app: Celery, tasks: Any, delayed_celery: Make, monkeypatch: Any) -> None:
    monkeypatch.setattr(socket.socket, "connect", lambda *_: (_ for _ in ()).throw(ConnectionRefusedError("nobody")))
    app.conf.broker_transport_options = {"max_retries": 0}
    delayed = delayed_celery(app, release="publish")
    tasks.note.apply_async((1,), countdown=60)
    with pytest.raises(ReleaseFailed, match=r"proj\.note\(1\) \[id .*\] could not be released: cannot connect"):
        delayed.advance(60)


# --------------------------------------------------------------------------------------------------------------- undo


def state_of(app: Celery) -> dict[str, Any]:
    own = {name: value for name, value in vars(app).items() if name not in ("_local", "amqp", "_pool")}
    known = installed(app)
    return {
        **own,
        "fixups": list(app.fixups),
        "_fixups": list(app._fixups),
        "steps": {name: set(steps) for name, steps in app.steps.items() if steps},
        "conf": dict(app.conf.changes),
        "known": known and (known._queue, known._clock, known._stands_in, known._instance_send_task),
    }


@pytest.mark.parametrize("options", [{}, {"results": "app"}, {"release": "publish"}])
def test_the_app_is_given_back_as_it_was(app: Celery, tasks: Any, options: dict[str, Any]) -> None:
    _ = app.conf.task_always_eager, app.backend, app.control
    _ = app.tasks, app.timezone, app.events  # what Celery keeps once it is asked for
    before = state_of(app)
    with DelayedCelery(app, **options) as delayed:
        if "results" not in options:
            tasks.note.apply_async(countdown=60)
            delayed.assert_scheduled("note")
        assert state_of(app) != before
    after = state_of(app)
    assert {name for name in before if before[name] != after.get(name)} == set()
    assert set(after) - set(before) <= {"thread_oid", "oid", "timezone", "uses_utc_timezone"}


def test_it_can_be_used_again_and_not_twice_at_once(app: Celery, tasks: Any) -> None:
    for _ in range(2):
        with DelayedCelery(app) as delayed:
            tasks.note.apply_async(countdown=60)
            delayed.assert_scheduled(times=1)
            with pytest.raises(RuntimeError, match="in memory already"):
                DelayedCelery(app)
            delayed.assert_scheduled(times=1)


def test_results_stay_where_they_are_on_request(app: Celery, tasks: Any, tmp_path: Any, delayed_celery: Make) -> None:
    app.conf.result_backend = f"file://{tmp_path}"
    delayed = delayed_celery(app, results="app")
    tasks.note.apply_async((7,), countdown=1)
    delayed.advance(1)
    assert json.loads(next(tmp_path.iterdir()).read_text())["result"] == 7


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"release": "send"}, ValueError, 'release must be "run" or "publish", got \'send\''),
        ({"results": None}, ValueError, 'results must be "memory" or "app", got None'),
        ({"clock": 7}, TypeError, "clock must be a ManualClock, got 7"),
    ],
)
def test_bad_arguments(app: Celery, options: dict[str, Any], error: type[Exception], message: str) -> None:
    before = state_of(app)
    with pytest.raises(error, match=message):
        DelayedCelery(app, **options)
    assert state_of(app) == before
    with pytest.raises(TypeError, match="takes a Celery app, got 'app'"):
        DelayedCelery("app")  # type: ignore[arg-type]


def test_publishing_needs_tasks_that_are_sent(app: Celery) -> None:
    app.conf.task_always_eager = True
    with pytest.raises(ValueError, match="tasks would run at once and never reach a broker"):
        DelayedCelery(app, release="publish")


def test_the_plugin_undoes_it_at_the_end_of_a_test(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("""
        from celery import Celery

        app = Celery("proj", broker="redis://localhost:1", set_as_current=False)
        before = vars(app).get("send_task")

        @app.task(shared=False, name="remind")
        def remind(what): ...

        def test_first(delayed_celery, delay_clock):
            delayed = delayed_celery(app)
            remind.apply_async(("a",), countdown=60)
            assert delayed.clock is delay_clock
            delayed.assert_scheduled("remind", delay=60)

        def test_fails(delayed_celery):
            delayed = delayed_celery(app)
            remind.apply_async(("a",), countdown=60)
            delayed.assert_scheduled("remind", delay=61)

        def test_last():
            assert vars(app).get("send_task") is before
    """)
    options = ("-p", "no:cacheprovider", "-o", "asyncio_default_fixture_loop_scope=function")
    done = pytester.runpytest_inprocess(*options)
    done.assert_outcomes(passed=2, failed=1)
    done.stdout.fnmatch_lines(["E*expected to be scheduled: remind with delay=61", "E*in 60 s: remind('a')*"])
    done.stdout.no_fnmatch_line("*delayed.py*def assert_scheduled*")


def test_the_test_file_in_the_docs_passes(pytester: pytest.Pytester) -> None:
    run_example(pytester, "celery")
