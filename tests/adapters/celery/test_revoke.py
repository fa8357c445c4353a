"""A revoke reaches what waits, whoever sends it and however; and what those hear who wait for the task."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from celery import Celery, chord, group, signals
from celery.contrib.testing.worker import start_worker
from celery.exceptions import ChordError, TaskRevokedError
from kombu.exceptions import OperationalError

from delayadapters import Batch, DelayQueue, Outcome, Published, Releaser
from delayadapters.celery import panel
from delayadapters.celery.cancelled import request_of
from delayadapters.celery.publisher import CeleryPublisher
from delayadapters.celery.settings import make_queue
from delayadapters.celery.signals import task_delay_cancelled, task_delayed, task_released
from delaytests import wait_until
from delaytests.server import free_port


@contextmanager
def heard(*wanted: Any) -> Iterator[list[tuple[str, dict[str, Any]]]]:
    """What these signals say meanwhile: (signal, arguments)."""
    calls: list[tuple[str, dict[str, Any]]] = []
    receivers = []
    for signal in wanted:

        def receive(signal: Any = None, sender: Any = None, **arguments: Any) -> None:
            calls.append((signal.name, {"sender": sender, **arguments}))

        signal.connect(receive, weak=False)
        receivers.append((signal, receive))
    try:
        yield calls
    finally:
        for signal, receive in receivers:
            signal.disconnect(receive)


@contextmanager
def working(app: Celery) -> Iterator[None]:
    with start_worker(app, perform_ping_check=False):
        yield


def waiting(app: Celery) -> set[str]:
    return {job.id for job in app.delayadapters.jobs().jobs}


@pytest.fixture
def native(redis_broker: Any, make_app: Callable[..., Celery]) -> Celery:
    """A process of the same application without our package."""
    return make_app(redis_broker.conf, installed=False)


@pytest.fixture(autouse=True)
def out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("DELAY_TEST_OUT", str(tmp_path / "executions"))
    return tmp_path / "executions"


def no_logging(conf: dict[str, Any]) -> dict[str, Any]:
    return {**conf, "worker_hijack_root_logger": False, "worker_redirect_stdouts": False}


# ------------------------------------------------------------------------------------------------- in the caller


WAYS: dict[str, Callable[[Celery, Any], Any]] = {
    "AsyncResult.revoke": lambda app, result: result.revoke(),
    "AsyncResult.revoke(terminate)": lambda app, result: result.revoke(terminate=True),
    "control.revoke": lambda app, result: app.control.revoke(result.id),
    "control.revoke of many": lambda app, result: app.control.revoke(["x", result.id, result.id]),
    "control.revoke to a node": lambda app, result: app.control.revoke(result.id, destination=["w@h"]),
    "control.terminate": lambda app, result: app.control.terminate(result.id),
    "control.broadcast": lambda app, result: app.control.broadcast("revoke", task_id=result.id),
    "by stamp": lambda app, result: app.control.revoke_by_stamped_headers({"customer": "c17"}),
    "by one of stamps": lambda app, result: app.control.revoke_by_stamped_headers({"customer": ["c1", "c17"]}),
    "cancel": lambda app, result: app.delayadapters.cancel(result.id),
}


@pytest.mark.parametrize("way", WAYS)
def test_no_worker_is_needed(app: Celery, way: str) -> None:
    stamped = {"stamped_headers": ["customer"], "customer": "c17"}
    result = app.tasks["note"].apply_async((1,), countdown=60, **stamped)
    other = app.tasks["note"].apply_async((1,), countdown=60, stamped_headers=["customer"], customer="c2")
    with heard(task_delay_cancelled, signals.task_revoked) as calls:
        WAYS[way](app, result)
    assert waiting(app) == {other.id}
    assert result.state == "REVOKED"
    with pytest.raises(TaskRevokedError):
        result.get(timeout=1)
    assert [name for name, _ in calls] == ["task_delay_cancelled", "task_revoked"]
    assert calls[0][1]["sender"] == "note"
    assert calls[0][1]["id"] == calls[1][1]["request"].id == result.id
    assert calls[1][1]["request"].args == [1]
    assert calls[1][1]["sender"] is app.tasks["note"]


def test_a_group_result(app: Celery) -> None:
    result = group(app.tasks["note"].s(n) for n in range(3)).apply_async(countdown=60)
    result.revoke()
    assert waiting(app) == set()
    assert {child.state for child in result.results} == {"REVOKED"}


def test_workers_are_told_all_the_same(app: Celery, native: Celery) -> None:
    for one in (native, app):
        with mock.patch("kombu.pidbox.Mailbox._broadcast") as broadcast:
            one.control.revoke("a", terminate=True, signal="KILL", destination=["n"])
            one.control.revoke_by_stamped_headers({"k": "v"})
        first, second = broadcast.call_args_list
        assert first.args[:3] == ("revoke", {"task_id": "a", "terminate": True, "signal": "KILL"}, ["n"])
        assert second.args[0] == "revoke_by_stamped_headers"


def test_a_delay_redis_that_is_down_does_not_keep_workers_from_hearing(
    redis_broker: Any,
    make_app: Callable[..., Celery],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("delayadapters.celery.settings.SCHEDULE_TIMEOUT", 0.3)
    app = make_app({**redis_broker.conf, "delayadapters_redis_url": f"redis://127.0.0.1:{free_port()}/0"})
    with mock.patch("kombu.pidbox.Mailbox._broadcast", return_value=[{"n": {"ok": "told"}}]) as broadcast:
        begin = time.monotonic()
        assert app.control.revoke(["a", "b", "c"]) == [{"n": {"ok": "told"}}]
        app.control.revoke_by_stamped_headers({"k": "v"})
        assert time.monotonic() - begin < 5, "one time-out each, not one per task"
    assert [call.args[0] for call in broadcast.call_args_list] == ["revoke", "revoke_by_stamped_headers"]
    assert broadcast.call_args.args[1] == {"headers": {"k": "v"}, "terminate": False, "signal": "SIGTERM"}
    assert "3 of 3 revoked tasks" in caplog.text


def test_a_broker_that_is_down_does_not_keep_the_task_from_being_cancelled(app: Celery) -> None:
    result = app.tasks["note"].apply_async(countdown=60)
    with (
        mock.patch("kombu.pidbox.Mailbox._broadcast", side_effect=OperationalError("down")),
        pytest.raises(OperationalError),
    ):
        result.revoke()
    assert waiting(app) == set()


def test_a_result_backend_that_is_down_is_logged(
    redis_broker: Any, make_app: Callable[..., Celery], caplog: pytest.LogCaptureFixture
) -> None:
    app = make_app(redis_broker.conf)
    result = app.tasks["note"].apply_async(countdown=60)
    with mock.patch.object(type(app.backend), "mark_as_revoked", side_effect=OSError("away")):
        assert app.delayadapters.cancel(result.id) is Outcome.CANCELLED
    assert waiting(app) == set()
    assert "backend was not told" in caplog.text


def test_without_a_result_backend(redis_broker: Any, make_app: Callable[..., Celery]) -> None:
    app = make_app({**redis_broker.conf, "result_backend": None})
    result = app.tasks["note"].apply_async(countdown=60)
    result.revoke()
    assert waiting(app) == set()


@pytest.mark.parametrize(("state", "value"), [("SUCCESS", 7), ("FAILURE", ValueError("boom"))])
@pytest.mark.parametrize("reply_to", [None, "somebody"])
def test_a_result_that_is_there_stays(app: Celery, state: str, value: Any, reply_to: str | None) -> None:
    options = {"reply_to": reply_to} if reply_to else {}
    result = app.tasks["note"].apply_async(countdown=60, **options)
    app.backend.store_result(result.id, value, state)
    result.revoke()
    assert waiting(app) == set()
    assert result.state == state
    assert repr(result.result) == repr(value)


def test_a_result_that_is_sent_to_the_caller(redis_broker: Any, make_app: Callable[..., Celery]) -> None:
    app = make_app({**redis_broker.conf, "result_backend": "rpc://"})
    result = app.tasks["note"].apply_async(countdown=60)
    result.revoke()
    with pytest.raises(TaskRevokedError):
        result.get(timeout=10)


def test_what_is_being_released_is_left_to_the_workers(redis_broker: Any, make_app: Callable[..., Celery]) -> None:
    app = make_app({**redis_broker.conf, "delayadapters_min_delay": 0, "delayadapters_direct": False})
    result = app.tasks["note"].apply_async(countdown=0.01)
    queue = app.delayadapters
    [claim] = wait_until(lambda: queue.claim(lease=30))
    with heard(task_delay_cancelled) as calls:
        result.revoke()
    assert calls == []
    assert result.state == "PENDING"
    assert queue.ack([claim]) == 1


@pytest.mark.parametrize(
    "cancel",
    [
        lambda app, id: app.AsyncResult(id).revoke(),
        lambda app, id: app.delayadapters.cancel(id),
        lambda app, id: app.delayadapters.cancel_many([id]),
    ],
    ids=["revoke", "cancel", "cancel_many"],
)
@pytest.mark.parametrize("acked", [False, True], ids=["leased", "acked"])
def test_a_retry_that_waits_while_the_first_release_is_not_acked(
    redis_broker: Any,
    make_app: Callable[..., Celery],
    monkeypatch: pytest.MonkeyPatch,
    cancel: Callable[[Celery, str], Any],
    acked: bool,
) -> None:
    """The worker has run the task already, and it retries, before the loop has acked its batch."""
    app = make_app({**redis_broker.conf, "delayadapters_min_delay": 0, "delayadapters_direct": False})
    note = app.tasks["note"]
    header = [note.s(1).set(countdown=0.01), note.s(2).set(countdown=60)]
    result = chord(header, app.tasks["total"].s()).apply_async()
    member, other = result.parent.results
    other.revoke()
    queue = app.delayadapters
    [claim] = wait_until(lambda: queue.claim(lease=30))
    request = request_of(app, queue.get(member.id))
    note.apply_async((1,), task_id=member.id, retries=1, countdown=60, chord=request.chord, group_id=request.group)
    app.backend.store_result(member.id, ValueError("again"), "RETRY")
    if acked:  # as soon as the cancel has found it on its way
        native = DelayQueue.cancel

        def cancelled(self: DelayQueue, id: str) -> Outcome:
            outcome = native(self, id)
            queue.ack([claim])
            return outcome

        monkeypatch.setattr(DelayQueue, "cancel", cancelled)
    with heard(task_delay_cancelled, signals.task_revoked) as calls:
        cancel(app, member.id)
    assert [name for name, _ in calls] == ["task_delay_cancelled", "task_revoked"]
    assert waiting(app) == set()
    assert member.state == "REVOKED"
    assert result.state == "FAILURE"


@pytest.mark.parametrize("acked", [False, True], ids=["leased", "acked"])
def test_a_task_that_is_claimed_while_it_is_cancelled_is_not_called_cancelled(
    redis_broker: Any, make_app: Callable[..., Celery], monkeypatch: pytest.MonkeyPatch, acked: bool
) -> None:
    app = make_app({**redis_broker.conf, "delayadapters_min_delay": 0, "delayadapters_direct": False})
    queue = app.delayadapters
    native = DelayQueue.cancel

    def cancelled(self: DelayQueue, id: str) -> Outcome:
        claims = wait_until(lambda: queue.claim(lease=30))
        outcome = native(self, id)
        if acked:
            queue.ack(claims)
        return outcome

    monkeypatch.setattr(DelayQueue, "cancel", cancelled)
    with heard(task_delay_cancelled, signals.task_revoked) as calls:
        for cancel in (queue.cancel, queue.revoke):
            result = app.tasks["note"].apply_async(countdown=0.2)
            assert cancel(result.id) in (Outcome.IN_FLIGHT, False)
            assert result.state == "PENDING"
    assert calls == []


def test_a_control_class_of_the_users_own_stays(redis_broker: Any, make_app: Callable[..., Celery]) -> None:
    from celery.app.control import Control

    class Mine(Control):  # type: ignore[misc]
        def extra(self) -> str:
            return "mine"

    from delayadapters.celery import install

    app = Celery("own", control=Mine, set_as_current=False)
    app.conf.update(redis_broker.conf)
    assert app.control.extra() == "mine", "made before install"
    install(app)
    assert app.control.extra() == "mine"
    result = app.send_task("x", countdown=60)
    result.revoke()
    assert waiting(app) == set()
    app.delayadapters.close()
    app.close()


# ---------------------------------------------------------------------------------------------------------- chords


@pytest.mark.parametrize(
    "conf",
    [
        {},
        {"task_protocol": 1},
        {"task_serializer": "pickle", "accept_content": ["pickle", "json"], "task_compression": "zlib"},
        {"task_serializer": "msgpack", "accept_content": ["msgpack", "json"]},
    ],
    ids=str,
)
def test_a_chord_fails_when_its_member_is_cancelled(
    redis_broker: Any, make_app: Callable[..., Celery], conf: dict[str, Any]
) -> None:
    app = make_app({**redis_broker.conf, **conf})
    note = app.tasks["note"]
    result = chord([note.s(1).set(countdown=60), note.s(2).set(countdown=60)], app.tasks["total"].s()).apply_async()
    for member in result.parent.results:
        member.revoke()
    wait_until(lambda: result.state == "FAILURE", 5)
    with pytest.raises((ChordError, TaskRevokedError)):
        result.get(timeout=1)
    assert {member.state for member in result.parent.results} == {"REVOKED"}


def test_a_chord_of_which_the_rest_has_run_fails_at_once(
    redis_broker: Any, make_app: Callable[..., Celery], native: Celery
) -> None:
    """Cancelled by a process that does not know of us: the worker does it, and tells the chord once."""
    app = make_app(no_logging(redis_broker.conf))
    note, total = app.tasks["note"], app.tasks["total"]
    with working(app), heard(task_delay_cancelled, signals.task_revoked) as calls:
        result = chord([note.s(1), note.s(2).set(countdown=60)], total.s()).apply_async()
        first, second = result.parent.results
        assert first.get(timeout=10, disable_sync_subtasks=False) == 1
        native.control.revoke(second.id, reply=True, timeout=5, limit=1)
        wait_until(lambda: result.state == "FAILURE")
        assert second.state == "REVOKED"
        assert [name for name, _ in calls] == ["task_delay_cancelled", "task_revoked"]
    assert waiting(app) == set()


def test_the_request_is_what_a_worker_would_make(app: Celery) -> None:
    signature = app.tasks["note"].s(1).set(countdown=60, priority=3, link_error=app.tasks["total"].s())
    result = chord([signature, app.tasks["note"].s(2).set(countdown=60)], app.tasks["total"].s()).apply_async()
    request = request_of(app, app.delayadapters.get(result.parent.results[0].id))
    assert request.id == result.parent.results[0].id
    assert request.chord["task"] == "total"
    assert (request.group, request.group_index) == (result.parent.id, 0)
    assert request.args == [1]
    assert request.errbacks


# -------------------------------------------------------------------------------------------------------- in a worker


def test_revokes_from_a_process_without_us(redis_broker: Any, make_app: Callable[..., Celery], native: Celery) -> None:
    app = make_app(no_logging(redis_broker.conf))
    note = app.tasks["note"]

    def delayed(**options: Any) -> Any:
        return note.apply_async(countdown=60, **options)

    with working(app), heard(task_delay_cancelled) as calls:
        by_id, by_terminate, by_stamp = delayed(), delayed(), delayed(stamped_headers=["k"], k=["v1", "v2"])
        kept = delayed(stamped_headers=["k"], k="v3")
        ours = delayed()
        [reply] = native.control.revoke([by_id.id, "unknown"], reply=True, timeout=5, limit=1)
        assert "flagged as revoked" in next(iter(reply.values()))["ok"]
        native.control.terminate(by_terminate.id, reply=True, timeout=5, limit=1)
        native.control.revoke_by_stamped_headers({"k": "v2"}, reply=True, timeout=5, limit=1)
        wait_until(lambda: waiting(app) == {kept.id, ours.id})
        ours.revoke(wait=True, timeout=0.5)  # by a process with us: still cancelled once
        native.control.broadcast("revoke", arguments={"task_id": [ours.id]}, reply=True, timeout=5, limit=1)
        wait_until(lambda: len(calls) == 4)
        cancelled = [by_id, by_terminate, by_stamp, ours]
        assert sorted(call["id"] for _, call in calls) == sorted(one.id for one in cancelled)
        assert {one.state for one in cancelled} == {"REVOKED"}

        inspected = native.control.inspect(timeout=5, limit=1)._request("delayed", limit=5)
        [seen] = inspected.values()
        assert (seen["waiting"], [job["id"] for job in seen["jobs"]]) == (1, [kept.id])
        [seen] = app.control.inspect(timeout=5, limit=1).delayed(limit=0).values()
        assert seen["jobs"] == []


def test_two_workers_on_rabbitmq(
    rabbit_broker: Any, make_app: Callable[..., Celery], worker: Callable[..., Any]
) -> None:
    """Both cancel: one of them does."""
    app, native = make_app(rabbit_broker.conf), make_app(rabbit_broker.conf, installed=False)
    workers = [worker(rabbit_broker.conf, pool, "-l", "DEBUG") for pool in ("solo", "threads")]
    results = [app.tasks["note"].apply_async(countdown=60) for _ in range(20)]
    native.control.revoke([result.id for result in results[1:]], reply=True, timeout=20, limit=2)
    assert waiting(app) == {results[0].id}
    assert {result.state for result in results[1:]} == {"REVOKED"}
    assert sum(one.log.count("cancelled while it waited") for one in workers) == 19


def test_inspect_delayed_when_the_delay_redis_is_down(
    redis_broker: Any, make_app: Callable[..., Celery], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(panel, "TIMEOUT", 0.2)
    app = make_app({**redis_broker.conf, "delayadapters_redis_url": f"redis://127.0.0.1:{free_port()}/0"})
    assert "cannot be reached" in panel.delayed(mock.Mock(app=app))["error"]
    assert "not installed" in panel.delayed(mock.Mock(app=Celery(set_as_current=False)))["error"]


# ------------------------------------------------------------------------------------------------------------- signals


def test_scheduled_and_released_are_said_once(redis_broker: Any, make_app: Callable[..., Celery]) -> None:
    app = make_app({**redis_broker.conf, "delayadapters_min_delay": 0, "delayadapters_direct": False})
    with heard(task_delayed, task_released, task_delay_cancelled) as calls:
        app.tasks["note"].apply_async((1,))
        assert calls == [], "nothing was delayed"
        result = app.tasks["note"].apply_async((1,), countdown=0.05)
        assert [name for name, _ in calls] == ["task_delayed"]
        with Releaser(make_queue(app), CeleryPublisher(app)):
            wait_until(lambda: len(calls) == 2)
    assert [name for name, _ in calls] == ["task_delayed", "task_released"]
    for _, said in calls:
        assert (said["sender"], said["id"], said["queue"]) == ("note", result.id, redis_broker.queue)
    assert abs((calls[0][1]["due"] - calls[1][1]["due"]).total_seconds()) < 1


def test_each_task_of_a_group_and_each_retry_is_said(app: Celery) -> None:
    note = app.tasks["note"]
    with heard(task_delayed) as calls:
        result = group(note.s(n) for n in range(3)).apply_async(countdown=60)
        assert sorted(said["id"] for _, said in calls) == sorted(child.id for child in result.results)
        note.apply_async(countdown=60, task_id=result.results[0].id)
    assert len(calls) == 4


def test_a_receiver_that_fails_stops_nothing(redis_broker: Any, make_app: Callable[..., Celery]) -> None:
    app = make_app({**redis_broker.conf, "delayadapters_min_delay": 0, "delayadapters_direct": False})

    def receive(**_: Any) -> None:
        raise ValueError("a receiver's own")

    every = (task_delayed, task_released, task_delay_cancelled)
    for signal in every:
        signal.connect(receive)
    try:
        app.tasks["note"].apply_async(countdown=0.01)
        [claim] = wait_until(lambda: app.delayadapters.claim())
        assert CeleryPublisher(app).publish(Batch([claim])) == Published()
        assert app.delayadapters.ack([claim]) == 1
        assert redis_broker.size() == 1
        result = app.tasks["note"].apply_async(countdown=60)
        assert app.delayadapters.cancel(result.id) is Outcome.CANCELLED
        assert result.state == "REVOKED"
    finally:
        for signal in every:
            signal.disconnect(receive)
