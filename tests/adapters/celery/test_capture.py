"""What becomes of a delayed call in the calling process: stored, and nothing else. No workers here."""

from __future__ import annotations

import contextlib
import os
import pickle
import threading
import time
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from typing import Any
from unittest import mock

import pytest
from celery import Celery, chain, chord, group, signals
from celery.exceptions import ImproperlyConfigured
from celery.utils.time import LocalTimezone

from delayadapters import DelayQueue, OutcomeUnknown, RedisUnavailable
from delayadapters.celery import install
from delayadapters.celery.fixup import FIXUP, installed
from delayadapters.celery.message import DUE_HEADER, Message
from delayadapters.celery.settings import Settings, default_name
from delaytests import wait_until
from delaytests.server import free_port

UTC = timezone.utc


def waiting(app: Celery) -> list[Any]:
    return list(app.delayadapters.jobs().jobs)


def test_a_countdown_waits_in_redis_and_not_in_the_broker(app: Celery, redis_broker: Any) -> None:
    before = time.time()
    result = app.tasks["note"].apply_async((1,), countdown=60)
    after = time.time()

    [job] = waiting(app)
    assert job.id == result.id
    assert before + 60 <= job.due / 1e6 <= after + 60.1
    assert job.meta == {"task": "note", "queue": redis_broker.queue}
    assert redis_broker.size() == 0


@pytest.mark.parametrize(
    ("eta", "expected"),
    [
        (datetime(2100, 1, 2, 3, 4, 5, 678901, UTC), datetime(2100, 1, 2, 3, 4, 5, 678901, UTC)),
        (
            datetime(2100, 1, 2, 3, 4, 5, tzinfo=timezone(timedelta(hours=5))),
            datetime(2100, 1, 1, 22, 4, 5, tzinfo=UTC),
        ),
        (datetime(2100, 1, 2, 3, 4, 5), datetime(2100, 1, 2, 3, 4, 5, tzinfo=UTC)),
        ("2100-01-02T03:04:05+00:00", datetime(2100, 1, 2, 3, 4, 5, tzinfo=UTC)),
        ("2100-01-02T03:04:05", datetime(2100, 1, 2, 3, 4, 5, tzinfo=UTC)),
    ],
    ids=["aware", "other zone", "naive is UTC", "ISO", "naive ISO"],
)
def test_an_eta_in_each_of_its_forms(app: Celery, eta: Any, expected: datetime) -> None:
    app.tasks["note"].apply_async(eta=eta)
    [job] = waiting(app)
    assert job.due_at == expected


def test_a_countdown_wins_over_an_eta(app: Celery) -> None:
    app.tasks["note"].apply_async(countdown=60, eta=datetime(2100, 1, 1, tzinfo=UTC))
    [job] = waiting(app)
    assert job.due / 1e6 < time.time() + 61


@pytest.mark.parametrize(
    "options",
    [{}, {"countdown": 0}, {"countdown": None}, {"countdown": 0.5}, {"countdown": -5}, {"eta": datetime(2020, 1, 1)}],
    ids=str,
)
def test_what_is_due_now_or_in_a_moment_goes_to_celery(app: Celery, redis_broker: Any, options: Any) -> None:
    app.tasks["note"].apply_async(**options)
    assert waiting(app) == []
    assert redis_broker.size() == 1


def test_min_delay_is_a_setting_that_counts_at_each_call(app: Celery, redis_broker: Any) -> None:
    app.conf.delayadapters_min_delay = 0
    app.tasks["note"].apply_async(countdown=0.2)
    assert len(waiting(app)) == 1
    app.conf.update(delayadapters_min_delay=100)
    app.tasks["note"].apply_async(countdown=99)
    assert redis_broker.size() == 1


@pytest.mark.parametrize(
    ("countdown", "error"),
    [(float("nan"), ValueError), (float("inf"), ValueError), (1e12, ValueError), ("5", TypeError)],
)
def test_a_countdown_that_is_no_time_is_refused_before_anything_happens(
    app: Celery, countdown: Any, error: Any
) -> None:
    seen = []
    signals.before_task_publish.connect(lambda **kw: seen.append(kw), weak=False, dispatch_uid="here")
    try:
        with pytest.raises(error, match="delay"):
            app.tasks["note"].apply_async(countdown=countdown)
    finally:
        signals.before_task_publish.disconnect(dispatch_uid="here")
    assert seen == []
    assert waiting(app) == []


def test_every_way_to_send_passes_through(app: Celery) -> None:
    note = app.tasks["note"]
    app.send_task("unknown.task", (1,), countdown=60)
    app.send_task("positional", (1,), {}, 60)
    note.s(1).apply_async(countdown=60)
    group(note.s(1), note.s(2)).apply_async(countdown=60)
    chain(note.s(1), note.s(2)).apply_async(countdown=60)
    chord([note.s(1).set(countdown=60), note.s(2).set(countdown=60)], app.tasks["total"].s()).apply_async()
    note.s(1).set(countdown=60).delay()
    assert len(waiting(app)) == 9


def test_chord_unlock_stays_celerys(app: Celery, redis_broker: Any) -> None:
    app.send_task("celery.chord_unlock", countdown=60)
    assert waiting(app) == []
    assert redis_broker.size() == 1


def test_always_eager_is_untouched(app: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
    app.conf.task_always_eager = True
    monkeypatch.setenv("DELAY_TEST_OUT", os.devnull)
    assert app.tasks["note"].apply_async((7,), countdown=60).get() == 7
    assert waiting(app) == []


def test_scheduling_needs_no_broker(redis_broker: Any, make_app: Callable[..., Celery]) -> None:
    app = make_app({**redis_broker.conf, "broker_url": f"redis://127.0.0.1:{free_port()}/0"})
    app.tasks["note"].apply_async(countdown=60)
    assert len(waiting(app)) == 1


def test_signals_and_events_fire_once_when_scheduling(app: Celery) -> None:
    app.conf.task_send_sent_event = True
    calls: list[tuple[str, Any]] = []
    events: list[dict[str, Any]] = []
    signals.before_task_publish.connect(lambda **kw: calls.append(("before", kw)), weak=False, dispatch_uid="b")
    signals.after_task_publish.connect(lambda **kw: calls.append(("after", kw)), weak=False, dispatch_uid="a")
    try:
        with app.connection_for_read() as broker:
            receiver = app.events.Receiver(broker, handlers={"task-sent": events.append})
            with receiver.consumer_context() as (connection, _, _):
                with contextlib.suppress(TimeoutError):  # it subscribes while it listens
                    connection.drain_events(timeout=0.2)
                result = app.tasks["note"].apply_async(countdown=60)

                def drained() -> bool:
                    connection.drain_events(timeout=5)
                    return bool(events)

                wait_until(drained)
    finally:
        signals.before_task_publish.disconnect(dispatch_uid="b")
        signals.after_task_publish.disconnect(dispatch_uid="a")
    assert [kind for kind, _ in calls] == ["before", "after"]
    [job] = waiting(app)
    for shown in (calls[1][1]["headers"]["eta"], events[0]["eta"]):
        assert abs(datetime.fromisoformat(shown).timestamp() - job.due / 1e6) < 1
    assert events[0]["uuid"] == result.id
    assert Message.unpack(job.payload).headers["eta"] is None


def test_the_due_header_is_not_passed_on(app: Celery, redis_broker: Any) -> None:
    carried = {DUE_HEADER: "2020-01-01T00:00:00+00:00", "mine": 1}
    app.tasks["note"].apply_async(headers=carried)
    app.tasks["note"].apply_async(headers=carried, countdown=60)
    message = redis_broker.get()
    assert message.headers["mine"] == 1
    assert DUE_HEADER not in message.headers
    stored = Message.unpack(waiting(app)[0].payload).headers
    assert stored["mine"] == 1
    assert DUE_HEADER not in stored


def test_two_schedulings_of_one_id_both_wait(app: Celery) -> None:
    app.tasks["note"].apply_async(task_id="same", countdown=60)
    app.tasks["note"].apply_async(task_id="same", countdown=70)
    assert [job.id for job in waiting(app)] == ["same", "same"]


# ------------------------------------------------------------------------------------------------------- installing


def test_install_twice_is_install_once(app: Celery) -> None:
    send_task = app.send_task
    install(app)
    assert app.send_task == send_task
    assert list(app.fixups).count(FIXUP) == 1
    app.tasks["note"].apply_async(countdown=60)
    assert len(waiting(app)) == 1


def test_it_survives_pickling(app: Celery) -> None:
    other = pickle.loads(pickle.dumps(app))
    assert installed(other) is not None
    other.send_task("x", countdown=60)
    assert len(waiting(app)) == 1
    other.delayadapters.close()


def test_a_patch_of_celerys_send_task_sees_every_call_once(app: Celery, redis_broker: Any) -> None:
    original = Celery.send_task
    seen: list[str] = []

    def patched(self: Celery, name: str, *args: Any, **kwargs: Any) -> Any:
        seen.append(name)
        return original(self, name, *args, **kwargs)

    with mock.patch.object(Celery, "send_task", patched):
        app.send_task("one", countdown=60)
        app.send_task("two")
    assert seen == ["one", "two"]


def test_the_queue_is_a_delay_queue(app: Celery) -> None:
    result = app.tasks["note"].apply_async(countdown=60)
    assert isinstance(app.delayadapters, DelayQueue)
    assert app.delayadapters.cancel(result.id).value == "cancelled"


def test_a_forked_child_has_a_client_of_its_own(app: Celery) -> None:
    app.tasks["note"].apply_async(countdown=60)
    fixup = installed(app)
    assert fixup is not None
    before = fixup.queue()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            app.tasks["note"].apply_async(countdown=60)
            os.write(write, b"other" if fixup.queue() is not before else b"same")
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(write)
    assert os.read(read, 10) == b"other"
    os.close(read)
    assert fixup.queue() is before
    assert len(waiting(app)) == 2


# -------------------------------------------------------------------------------------------------- the Redis refuses


def dead_conf(redis_broker: Any, **more: Any) -> dict[str, Any]:
    return {**redis_broker.conf, "delayadapters_redis_url": f"redis://127.0.0.1:{free_port()}/0", **more}


def test_unavailable_raises_by_default(
    redis_broker: Any, make_app: Callable[..., Celery], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("delayadapters.celery.settings.SCHEDULE_TIMEOUT", 1.0)
    app = make_app(dead_conf(redis_broker))
    begin = time.monotonic()
    with pytest.raises(RedisUnavailable) as caught:
        app.tasks["note"].apply_async(countdown=60)
    assert time.monotonic() - begin < 5
    assert caught.value.__cause__ is not None
    if hasattr(caught.value, "__notes__"):
        assert "note[" in caught.value.__notes__[0]
    assert redis_broker.size() == 0


def test_unavailable_can_mean_celerys_own_countdown(
    redis_broker: Any,
    make_app: Callable[..., Celery],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("delayadapters.celery.settings.SCHEDULE_TIMEOUT", 0.5)
    app = make_app(dead_conf(redis_broker, delayadapters_on_unavailable="native"))
    result = app.tasks["note"].apply_async(countdown=60)
    message = redis_broker.get()
    assert message.headers["id"] == result.id
    assert abs(datetime.fromisoformat(message.headers["eta"]).timestamp() - time.time() - 60) < 5
    assert installed(app).fallbacks == 1
    assert f"note[{result.id}]" in caplog.text


def test_when_only_the_answer_is_lost_a_doubled_task_is_better_than_a_lost_one(
    redis_broker: Any, make_app: Callable[..., Celery], caplog: pytest.LogCaptureFixture
) -> None:
    app = make_app({**redis_broker.conf, "delayadapters_on_unavailable": "native"})
    with mock.patch.object(DelayQueue, "_run", side_effect=OutcomeUnknown("no answer")):
        result = app.tasks["note"].apply_async(countdown=60)
    assert redis_broker.get().headers["id"] == result.id
    assert "runs twice" in caplog.text
    app.conf.delayadapters_on_unavailable = "raise"
    with (
        mock.patch.object(DelayQueue, "_run", side_effect=OutcomeUnknown("no answer")),
        pytest.raises(OutcomeUnknown),
    ):
        app.tasks["note"].apply_async(countdown=60)


# ----------------------------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("conf", "name"),
    [
        ({"broker_url": "redis://a:1/3"}, "delayadapters:celery:redis:3"),
        ({"broker_url": "redis://b"}, "delayadapters:celery:redis:0"),
        ({"broker_url": "rediss://b:2/0"}, "delayadapters:celery:redis:0"),
        ({"broker_url": "redis://", "broker_transport_options": {"global_keyprefix": "p{1}:"}},
         "delayadapters:celery:redis:0:p%7B1%7D%3A"),
        ({"broker_url": "amqp://"}, "delayadapters:celery:amqp:/"),
        ({"broker_url": "amqp://h/shop"}, "delayadapters:celery:amqp:shop"),
        ({"broker_url": "pyamqp://other//"}, "delayadapters:celery:amqp:/"),
    ],
)  # fmt: skip
def test_default_names_tell_brokers_on_one_server_apart(conf: dict[str, Any], name: str) -> None:
    for main in ("worker", None):
        app = Celery(main, set_as_current=False)
        app.conf.update(conf)
        assert default_name(app) == name


@pytest.mark.parametrize(
    ("conf", "url"),
    [
        ({"broker_url": "redis://h:1/3"}, "redis://h:1/3"),
        ({"broker_url": "redis://u:p%40@h/3"}, "redis://u:p%40@h:6379/3"),
        ({"broker_url": "redis://h:1/3;redis://other/3"}, "redis://h:1/3"),
        ({"broker_url": "rediss://h/3?ssl_cert_reqs=required"}, "rediss://h:6379/3"),
        ({"broker_url": "redis+socket:///tmp/r.sock?virtual_host=2"}, "unix:///tmp/r.sock?db=2"),
        ({"broker_url": "amqp://h", "result_backend": "redis://r/1"}, "redis://r/1"),
        (
            {"broker_url": "amqp://h", "result_backend": "socket:///tmp/r.sock?virtual_host=2"},
            "unix:///tmp/r.sock?db=2",
        ),
        ({"broker_url": "redis://h", "delayadapters_redis_url": "redis://d/7"}, "redis://d/7"),
    ],
)
def test_the_redis_is_the_setting_or_the_broker_or_the_backend(conf: dict[str, Any], url: str) -> None:
    app = Celery(set_as_current=False)
    app.conf.update(conf)
    assert Settings(app).redis[0] == url


@pytest.mark.parametrize(
    "conf", [{"broker_url": "amqp://h"}, {"broker_url": "amqp://h", "delayadapters_redis_url": "h:1"}]
)
def test_without_a_redis_the_error_says_what_to_set(conf: dict[str, Any]) -> None:
    app = Celery(set_as_current=False)
    app.conf.update(conf)
    with pytest.raises(ImproperlyConfigured, match="delayadapters_redis_url"):
        _ = Settings(app).redis


def test_settings_have_the_apps_namespace_in_either_case() -> None:
    class DjangoSettings:
        CELERY_BROKER_URL = "redis://h/1"
        CELERY_DELAYADAPTERS_NAME = "shop"
        CELERY_DELAYADAPTERS_MIN_DELAY = 3

    app = Celery(set_as_current=False)
    app.config_from_object(DjangoSettings, namespace="CELERY")
    assert Settings(app).name == "shop"
    assert Settings(app).min_delay == 3
    plain = Celery(set_as_current=False, delayadapters_name="first")
    assert Settings(plain).name == "first"
    plain.conf.update(delayadapters_name="second")
    assert Settings(plain).name == "second"


def test_a_configuration_which_another_thread_is_reading_is_waited_for() -> None:
    """Celery reads it at first use, in whichever thread that is; a web server's first requests come together."""
    app = Celery(set_as_current=False)
    app.conf.update(broker_url="memory://", delayadapters_redis_url="redis://h/1")
    prepare, reading, go_on = app.prepare_config, threading.Event(), threading.Event()

    def slow(conf: Any) -> Any:
        if not reading.is_set():
            reading.set()
            assert go_on.wait(20)
        return prepare(conf)

    app.prepare_config = slow
    other = threading.Thread(target=lambda: app.conf.broker_url)
    other.start()
    try:
        assert reading.wait(20)
        threading.Timer(0.3, go_on.set).start()
        assert Settings(app).redis.url == "redis://h/1"
    finally:
        go_on.set()
        other.join()


@pytest.mark.parametrize(
    ("setting", "value"),
    [("min_delay", -1), ("min_delay", "x"), ("on_unavailable", "ignore"), ("embed", "maybe"), ("name", 3)],
)
def test_a_bad_setting_is_named(setting: str, value: Any) -> None:
    app = Celery(set_as_current=False, broker="redis://")
    app.conf[f"delayadapters_{setting}"] = value
    attribute = {"on_unavailable": "native_when_unavailable"}.get(setting, setting)
    with pytest.raises(ImproperlyConfigured, match=f"delayadapters_{setting}"):
        getattr(Settings(app), attribute)


def test_quorum_queues_mean_no_min_delay() -> None:
    from kombu import Queue

    app = Celery(set_as_current=False, broker="amqp://")
    assert Settings(app).min_delay == 1.0
    app = Celery(set_as_current=False, broker="amqp://")
    app.conf.task_queues = [Queue("q", queue_arguments={"x-queue-type": "quorum"})]
    assert Settings(app).min_delay == 0
    assert not Settings(app).passes_natively(0.5)


def test_a_connection_to_another_broker_is_respected(app: Celery, own_redis: Any, redis_broker: Any) -> None:
    elsewhere = own_redis.url.replace("/0", "/5")
    with app.connection_for_write(elsewhere) as connection:
        app.tasks["note"].apply_async(countdown=60, connection=connection)
    assert waiting(app) == []
    assert own_redis.client(db=5).llen(redis_broker.queue) == 1
    with app.connection_for_write() as connection:
        app.tasks["note"].apply_async(countdown=60, connection=connection)
    with app.producer_pool.acquire(block=True) as producer:
        app.tasks["note"].apply_async(countdown=60, producer=producer)
    assert len(waiting(app)) == 2


def test_local_timezones_change_nothing(redis_broker: Any, make_app: Callable[..., Celery]) -> None:
    app = make_app({**redis_broker.conf, "enable_utc": False, "timezone": "America/New_York"})
    app.tasks["note"].apply_async(countdown=60)
    app.tasks["note"].apply_async(eta=datetime.now(LocalTimezone()) + timedelta(seconds=60))
    for job in waiting(app):
        assert abs(job.due / 1e6 - time.time() - 60) < 5


def test_the_rpc_backend_still_declares_its_reply_queue(rabbit_broker: Any, make_app: Callable[..., Celery]) -> None:
    app = make_app(rabbit_broker.conf | {"result_backend": "rpc://"})
    app.tasks["note"].apply_async(countdown=60)
    [job] = waiting(app)
    reply_to = Message.unpack(job.payload).properties["reply_to"]
    with app.connection_for_write() as connection, connection.channel() as channel:
        assert channel.queue_declare(reply_to, passive=True).queue == reply_to
        channel.queue_delete(reply_to)
