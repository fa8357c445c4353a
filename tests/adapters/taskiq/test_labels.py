"""What a message's labels ask for: every value, good and bad, without a broker."""

from __future__ import annotations

import pickle
from datetime import datetime, timedelta, timezone

import pytest
from taskiq.exceptions import SendTaskError
from taskiq.labels import prepare_label

from delayadapters.taskiq import DelayLabelError
from delayadapters.taskiq.labels import Request, RetryDelay, read_request, retry_delay

UTC = timezone.utc


def read(labels, own=None, policy="auto", default=False) -> Request:
    return read_request(labels, own or {}, policy, default)


def wired(**labels):
    """As they are on the wire (taskiq/labels.py)."""
    return {name: prepare_label(value)[0] for name, value in labels.items()}


@pytest.mark.parametrize(
    ("value", "seconds"),
    [(30, 30), (0.25, 0.25), ("5", 5), ("1e2", 100), (30 * 86400, 2592000), (" 2 ", 2), (1e-9, 1e-9)],
)
@pytest.mark.parametrize("label", ["delay", "x_delay"])
@pytest.mark.parametrize("form", [wired, dict], ids=["wire", "typed"])
def test_seconds(label, value, seconds, form):
    request = read(form(**{label: value}))
    assert (request.delay, request.at, request.waits) == (seconds, None, True)


@pytest.mark.parametrize(
    "value",
    [timedelta(seconds=30), timedelta(days=400, microseconds=5), timedelta(days=1), timedelta(hours=100, seconds=0.5)],
)
def test_a_timedelta_is_understood_although_its_type_hint_forbids_it(value):
    assert read(wired(delay=value)).delay == value
    assert read({"delay": value}).delay == value


@pytest.mark.parametrize("value", [None, "None"])
@pytest.mark.parametrize("label", ["delay", "x_delay", "delay_until"])
def test_none_is_no_delay(label, value):
    request = read({label: value})
    assert not request.waits
    assert not request.untouched, "the label must not be sent on"


@pytest.mark.parametrize("value", [0, 0.0, -5, "-0.1", timedelta(0), timedelta(days=-1)])
@pytest.mark.parametrize("form", [wired, dict], ids=["wire", "typed"])
def test_nothing_to_wait_for(value, form):
    assert not read(form(delay=value)).waits


@pytest.mark.parametrize(
    "value", ["soon", "", "nan", "inf", "-inf", float("nan"), float("inf"), True, False, b"5", [5], {}, "1e999", "5 s"]
)
@pytest.mark.parametrize("label", ["delay", "x_delay"])
@pytest.mark.parametrize("form", [wired, dict], ids=["wire", "typed"])
def test_garbage_is_named(label, value, form):
    with pytest.raises(DelayLabelError, match=rf"label {label} must be a (finite )?number of seconds, got ") as caught:
        read(form(**{label: value}))
    assert isinstance(caught.value, (ValueError, SendTaskError))


def test_a_date_as_delay_is_told_the_right_label():
    with pytest.raises(DelayLabelError, match=r"use the label delay_until"):
        read(wired(delay=datetime.now(UTC)))


@pytest.mark.parametrize("value", [1e300, 10**400, 3e11])
def test_later_than_2250(value):
    with pytest.raises(DelayLabelError, match=r"label delay"):
        read({"delay": value})
    with pytest.raises(DelayLabelError, match=r"label delay_until=.*2250"):
        read({"delay_until": "2251-01-01T00:00:00+00:00"})


@pytest.mark.parametrize("label", ["delay", "x_delay", "delay_until"])
@pytest.mark.parametrize("value", ["x" * 1_000_000, ["x"] * 100_000, {"x": 10**4299}], ids=["text", "list", "number"])
def test_a_message_is_short_whatever_the_value(label, value):
    with pytest.raises(DelayLabelError) as caught:
        read({label: value})
    assert label in str(caught.value)
    assert len(str(caught.value)) < 400
    with pytest.raises(DelayLabelError) as caught:
        read({label: value, "delay_until" if label != "delay_until" else "delay": "y" * 1_000_000})
    assert len(str(caught.value)) < 600


def test_a_number_too_long_to_be_shown():
    with pytest.raises(DelayLabelError, match=r"got a huge int"):
        read({"delay": 10**5000})


NOON = datetime(2040, 5, 6, 12, 0, 0, 123456, tzinfo=UTC)


@pytest.mark.parametrize(
    "value",
    [
        NOON,
        str(NOON),
        NOON.isoformat(),
        "2040-05-06T12:00:00.123456Z",
        NOON.astimezone(timezone(timedelta(hours=5, minutes=30))),
        NOON.replace(tzinfo=None),
    ],
    ids=["aware", "text", "iso", "Z", "elsewhere", "naive is UTC"],
)
@pytest.mark.parametrize("form", [wired, dict], ids=["wire", "typed"])
def test_absolute_times(value, form):
    assert read(form(delay_until=value)).at == NOON


@pytest.mark.parametrize("value", ["tomorrow", 1764000000, "1764000000", True, "12:00"])
def test_absolute_garbage(value):
    with pytest.raises(DelayLabelError, match=r"label delay_until must be an aware datetime.*use the label delay"):
        read({"delay_until": value})


def test_no_label_of_ours():
    assert read({"queue_name": "x", "retry_on_error": "True"}).untouched


def test_contradictions_are_refused():
    with pytest.raises(DelayLabelError, match=r"give one of .*; got delay='5' and delay_until="):
        read(wired(delay=5, delay_until=NOON))


def test_a_callers_label_wins_over_the_decorators():
    assert read(wired(delay=5, delay_until=NOON), own={"delay": 5}).at == NOON
    assert read(wired(delay=5, x_delay=30), own={"x_delay": 30}).delay == 5


# ------------------------------------------------------------------------------------------ the decorator's own delay


def test_the_decorators_delay_delays_every_send():
    assert read(wired(delay=5), own={"delay": 5}).delay == 5
    assert read(wired(delay=5, retry_on_error=False), own={"delay": 5, "retry_on_error": False}).delay == 5


@pytest.mark.parametrize("flag", [{"retry_on_error": True}, {"retry_on_error": "TRUE"}])
def test_unless_the_task_retries(flag):
    request = read(wired(delay=5, **flag), own={"delay": 5, **flag})
    assert (request.waits, request.kept) == (False, True)


def test_or_every_task_retries():
    assert read(wired(delay=5), own={"delay": 5}, default=True).kept


def test_the_setting_decides():
    labels, own = wired(delay=5, retry_on_error=True), {"delay": 5, "retry_on_error": True}
    assert read(labels, own, "send").delay == 5
    assert read(wired(delay=5), {"delay": 5}, "retry").kept


def test_another_delay_than_the_decorators_is_of_this_send():
    assert read(wired(delay=6, retry_on_error=True), own={"delay": 5, "retry_on_error": True}).delay == 6


def test_x_delay_beside_the_delay_of_retries():
    request = read(wired(delay=5, x_delay=30, retry_on_error=True), own={"delay": 5, "retry_on_error": True})
    assert (request.delay, request.kept) == (30, True)


def test_a_retrys_delay_is_of_the_retry():
    own = {"delay": 5, "retry_on_error": True}
    assert read(wired(delay=5, retry_on_error=True, _retries=1), own).delay == 5


def test_a_running_tasks_delay_passed_on_is_no_request():
    own = {"delay": 5, "retry_on_error": True}
    delay = retry_delay({"retry_on_error": True}, own, "auto", False)
    assert delay == 5.0
    assert not read({"delay": delay, "_retries": 1}, own).waits
    assert not read(wired(delay=delay, _retries=1), own).waits
    assert float(delay) * 2 == 10.0


def test_a_result_can_be_read_without_this_package():
    assert type(pickle.loads(pickle.dumps(RetryDelay(5)))) is float


@pytest.mark.parametrize(
    ("own", "labels", "policy"),
    [({}, {"retry_on_error": True}, "auto"), ({"delay": 5}, {}, "auto"), ({"delay": 5}, {"retry_on_error": 1}, "send")],
)
def test_nothing_for_retries(own, labels, policy):
    assert retry_delay(labels, own, policy, False) is None
