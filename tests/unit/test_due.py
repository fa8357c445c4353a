"""Due times and the other rules about a caller's arguments (design §7)."""

from __future__ import annotations

import math
from datetime import date, datetime, timedelta, timezone, tzinfo
from decimal import Decimal
from fractions import Fraction
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delayadapters.due import (
    EPOCH,
    LATEST_DUE,
    MAX_ID_BYTES,
    When,
    check_id,
    check_payload,
    from_micros,
    resolve,
    seconds_to_micros,
    to_micros,
)
from delayadapters.errors import DelayError, PayloadTooLarge

UTC = timezone.utc
NOW = to_micros(datetime(2030, 1, 1, tzinfo=UTC))
DAY = 86_400_000_000
ZONES = ["UTC", "Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "Asia/Kathmandu", "Pacific/Apia"]


def due(*, delay=None, at=None, now=NOW) -> int:
    """The due time once Redis, whose clock says ``now`` too, has seen it."""
    return resolve(delay, at, now=now).on(now)


# ---------------------------------------------------------------------------------------------------------- good values


@pytest.mark.parametrize(
    ("delay", "micros"),
    [
        (0, 0),
        (0.0, 0),
        (-0.0, 0),
        (1, 1_000_000),
        (0.000001, 1),
        (1e-7, 0),
        (2.5, 2_500_000),
        (0.1 + 0.2, 300_000),
        (timedelta(), 0),
        (timedelta(microseconds=1), 1),
        (timedelta(days=40_000, microseconds=1), 40_000 * DAY + 1),
        (10**9, 10**15),
    ],
)
def test_a_delay_counts_from_the_servers_clock(delay, micros):
    assert resolve(delay, None, now=NOW) == When(relative=True, micros=micros)
    assert due(delay=delay) == NOW + micros


def test_a_relative_delay_ignores_the_callers_clock():
    when = resolve(5, None, now=0)
    assert when.on(NOW) == NOW + 5_000_000


def test_an_absolute_time_is_itself_whatever_the_callers_clock_says():
    at = from_micros(NOW + 5)
    for clock in (0, NOW, NOW + DAY):
        assert resolve(None, at, now=clock).on(NOW) == NOW + 5


@pytest.mark.parametrize("delay", [-1, -0.001, -1e300, -(10**30), timedelta(microseconds=-1), timedelta.min])
def test_a_negative_delay_is_due_now(delay):
    assert due(delay=delay) == NOW


@pytest.mark.parametrize(
    "at",
    [
        from_micros(NOW - 1),
        EPOCH,
        datetime(1969, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC),
        datetime.min.replace(tzinfo=UTC),
        datetime.min.replace(tzinfo=timezone(timedelta(hours=14))),  # before year 1 in UTC
    ],
)
def test_a_time_in_the_past_is_due_now(at):
    assert due(at=at) == NOW


def test_now_itself_is_now():
    assert due(at=from_micros(NOW)) == NOW


# ------------------------------------------------------------------------------------------------------- both, neither


def test_neither_delay_nor_at():
    with pytest.raises(TypeError, match=r"delay=.*at=.*neither"):
        resolve(None, None, now=NOW)


@pytest.mark.parametrize("delay", [0, 1, False, math.nan, "soon"])
@pytest.mark.parametrize("at", [from_micros(NOW), "soon", 0])
def test_both_delay_and_at(delay, at):
    with pytest.raises(TypeError, match=r"delay=.*at=.*not both"):
        resolve(delay, at, now=NOW)


# ----------------------------------------------------------------------------------------------------------- bad values


@pytest.mark.parametrize("delay", [math.nan, math.inf, -math.inf])
def test_a_delay_that_is_no_number_of_seconds(delay):
    with pytest.raises(ValueError, match=r"^delay must be a finite"):
        resolve(delay, None, now=NOW)


@pytest.mark.parametrize(
    "delay", [True, False, "1", b"1", 1j, [1], object(), Decimal(1), Fraction(1), datetime.now(UTC), date.today()]
)
def test_a_delay_of_a_wrong_type(delay):
    with pytest.raises(TypeError, match=r"^delay must be seconds"):
        resolve(delay, None, now=NOW)


@pytest.mark.parametrize(
    "at", [True, False, 0, 1.5, math.nan, math.inf, "2030-01-01T00:00:00Z", b"x", timedelta(1), date(2030, 1, 1)]
)
def test_an_at_of_a_wrong_type(at):
    with pytest.raises(TypeError, match=r"^at must be an aware datetime"):
        resolve(None, at, now=NOW)


def test_a_naive_datetime():
    with pytest.raises(ValueError, match=r"^at must be an aware datetime .*naive"):
        resolve(None, datetime(2030, 1, 1), now=NOW)


def test_a_timezone_without_an_offset_is_naive_too():
    class Nowhere(tzinfo):
        def utcoffset(self, dt):
            return None

    with pytest.raises(ValueError, match="naive"):
        resolve(None, datetime(2030, 1, 1, tzinfo=Nowhere()), now=NOW)


# ------------------------------------------------------------------------------------------------------------ year 2250


def test_the_last_microsecond_of_2250_is_the_latest_due():
    last = datetime(2250, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC)
    assert due(at=last) == LATEST_DUE == to_micros(last)
    assert due(delay=timedelta(microseconds=LATEST_DUE - NOW)) == LATEST_DUE


def test_every_due_time_is_exact_as_a_score():
    assert LATEST_DUE < 2**53
    assert int(float(LATEST_DUE)) == LATEST_DUE
    assert int(float(LATEST_DUE - 1)) == LATEST_DUE - 1


@pytest.mark.parametrize(
    "at",
    [
        datetime(2251, 1, 1, tzinfo=UTC),
        datetime(2250, 12, 31, 20, tzinfo=timezone(timedelta(hours=-4))),  # the same instant
        datetime.max.replace(tzinfo=UTC),
        datetime.max.replace(tzinfo=timezone(timedelta(hours=-12))),  # past year 9999 in UTC
    ],
)
def test_an_at_later_than_2250(at):
    with pytest.raises(ValueError, match=r"^at=.*2250"):
        resolve(None, at, now=NOW)


def test_2251_in_the_east_is_still_2250():
    assert due(at=datetime(2251, 1, 1, 13, 59, tzinfo=timezone(timedelta(hours=14)))) == LATEST_DUE + 1 - 60_000_000


@pytest.mark.parametrize("delay", [timedelta(microseconds=LATEST_DUE - NOW + 1), timedelta.max, 1e12, 1.7e308, 10**400])
def test_a_delay_that_ends_after_2250(delay):
    with pytest.raises(ValueError, match=r"^delay=.*2250"):
        resolve(delay, None, now=NOW)


# ------------------------------------------------------------------------------------------------------- zones and DST


@pytest.mark.parametrize("zone", ZONES)
def test_an_instant_is_the_same_in_any_zone(zone):
    moment = datetime(2030, 7, 1, 12, 0, 0, 123_457, tzinfo=UTC)
    assert due(at=moment.astimezone(ZoneInfo(zone))) == to_micros(moment)


def test_an_offset_with_microseconds():
    odd = timezone(timedelta(hours=1, seconds=2, microseconds=3))
    assert to_micros(datetime(2030, 1, 1, 1, 0, 2, 3, tzinfo=odd)) == NOW


REPEATED = [  # zone, wall time which comes twice, UTC instants of the first and second time
    ("Europe/Berlin", datetime(2030, 10, 27, 2, 30), (27, 0, 30), (27, 1, 30)),
    ("America/New_York", datetime(2030, 11, 3, 1, 30), (3, 5, 30), (3, 6, 30)),
    ("Australia/Lord_Howe", datetime(2030, 4, 7, 1, 45), (6, 14, 45), (6, 15, 15)),  # half an hour of DST
]


@pytest.mark.parametrize(("zone", "wall", "first", "second"), REPEATED, ids=[row[0] for row in REPEATED])
def test_an_hour_that_comes_twice(zone, wall, first, second):
    for fold, (day, hour, minute) in enumerate((first, second)):
        local = wall.replace(tzinfo=ZoneInfo(zone), fold=fold)
        assert due(at=local) == to_micros(datetime(2030, wall.month, day, hour, minute, tzinfo=UTC))


SKIPPED = [  # zone, wall time which never comes, UTC instants that PEP 495 gives fold 0 (old offset) and fold 1 (new)
    ("Europe/Berlin", datetime(2030, 3, 31, 2, 30), (31, 1, 30), (31, 0, 30)),
    ("America/New_York", datetime(2030, 3, 10, 2, 30), (10, 7, 30), (10, 6, 30)),
    ("Australia/Lord_Howe", datetime(2030, 10, 6, 2, 15), (5, 15, 45), (5, 15, 15)),
]


@pytest.mark.parametrize(("zone", "wall", "early", "late"), SKIPPED, ids=[row[0] for row in SKIPPED])
def test_an_hour_that_never_comes(zone, wall, early, late):
    for fold, (day, hour, minute) in enumerate((early, late)):
        local = wall.replace(tzinfo=ZoneInfo(zone), fold=fold)
        assert due(at=local) == to_micros(datetime(2030, wall.month, day, hour, minute, tzinfo=UTC))


@pytest.mark.parametrize("zone", ["Europe/Berlin", "America/New_York", "Australia/Lord_Howe"])
def test_instants_around_every_dst_edge_keep_their_order_and_distance(zone):
    start = to_micros(datetime(2030, 1, 1, tzinfo=UTC))
    step = 15 * 60 * 1_000_000
    previous = None
    for moment in range(start, start + 366 * DAY, step):
        local = from_micros(moment).astimezone(ZoneInfo(zone))
        micros = to_micros(local)
        assert micros == moment
        assert previous is None or micros - previous == step
        previous = micros


# ------------------------------------------------------------------------------------------------------------ exactness

micros_in_range = st.integers(min_value=to_micros(datetime.min.replace(tzinfo=UTC)), max_value=LATEST_DUE)


@given(micros_in_range)
def test_microseconds_survive_a_datetime(micros):
    assert to_micros(from_micros(micros)) == micros


@given(
    st.datetimes(
        min_value=datetime(1970, 1, 2),
        max_value=datetime(2250, 12, 30),
        timezones=st.sampled_from([ZoneInfo(zone) for zone in ZONES]),
        allow_imaginary=False,
    )
)
def test_a_datetime_survives_microseconds(moment):
    assert from_micros(to_micros(moment)) == moment.astimezone(UTC)


@given(micros_in_range, micros_in_range)
def test_the_order_of_instants_is_the_order_of_microseconds(one, other):
    assert (from_micros(one) < from_micros(other)) == (one < other)


@given(st.integers(min_value=0, max_value=LATEST_DUE - NOW))
def test_a_timedelta_is_exact(micros):
    assert due(delay=timedelta(microseconds=micros)) == NOW + micros


@given(st.integers(min_value=0, max_value=10**15))
def test_a_float_that_came_from_microseconds_is_exact(micros):
    assert seconds_to_micros(micros / 1_000_000, "delay") == micros


@given(st.one_of(st.floats(), st.integers(), st.timedeltas(), st.booleans(), st.none(), st.text()))
def test_any_delay_is_a_due_time_in_range_or_a_clear_error(delay):
    try:
        micros = due(delay=delay)
    except (TypeError, ValueError) as error:
        assert "delay" in str(error)
    else:
        assert NOW <= micros <= LATEST_DUE


@given(st.one_of(st.datetimes(), st.datetimes(timezones=st.timezones()), st.floats(), st.booleans(), st.text()))
def test_any_at_is_a_due_time_in_range_or_a_clear_error(at):
    try:
        micros = due(at=at)
    except (TypeError, ValueError) as error:
        assert "at" in str(error)
    else:
        assert NOW <= micros <= LATEST_DUE


def test_seconds_to_micros_names_the_argument():
    with pytest.raises(TypeError, match=r"^lease must be"):
        seconds_to_micros("1", "lease")
    with pytest.raises(ValueError, match=r"^lease must be"):
        seconds_to_micros(math.inf, "lease")


# ------------------------------------------------------------------------------------------------------------------ ids


@pytest.mark.parametrize("id", ["a", "0", " ", "\0", "ü", "工作", "👋", "a" * MAX_ID_BYTES, "ü" * 256, "a:b{c}*?[d]\n"])
def test_an_id_is_its_utf8(id):
    assert check_id(id) == id.encode()


@pytest.mark.parametrize("id", ["a" * 513, "ü" * 257, "👋" * 129])
def test_an_id_that_is_too_long(id):
    with pytest.raises(ValueError, match=r"^id must be at most 512 bytes"):
        check_id(id)


def test_an_empty_id():
    with pytest.raises(ValueError, match=r"^id must not be empty"):
        check_id("")


@pytest.mark.parametrize("id", ["\ud800", "a\udfff", "\udc80"])
def test_an_id_with_half_a_surrogate_pair(id):
    with pytest.raises(ValueError, match=r"^id must be encodable") as raised:
        check_id(id)
    assert not isinstance(raised.value, UnicodeError)


@pytest.mark.parametrize("id", [None, 1, True, b"a", ["a"], object()])
def test_an_id_of_a_wrong_type(id):
    with pytest.raises(TypeError, match=r"^id must be a str"):
        check_id(id)


@given(st.text(min_size=1, max_size=200))
def test_any_text_is_an_id_or_a_clear_error(id):
    try:
        assert check_id(id).decode() == id
    except ValueError as error:
        assert str(error).startswith("id must be")


# ------------------------------------------------------------------------------------------------------------- payloads


@pytest.mark.parametrize("payload", ["text", None, 1, bytearray(b"x"), memoryview(b"x"), {"a": 1}, ["x"]])
def test_a_payload_that_is_not_bytes(payload):
    with pytest.raises(TypeError, match=rf"^payload must be bytes, got {type(payload).__name__}"):
        check_payload(payload, None)


def test_a_payload_up_to_the_limit():
    for payload in (b"", b"x" * 10):
        check_payload(payload, 10)
    check_payload(b"x" * 2_000_000, None)


def test_a_payload_over_the_limit():
    with pytest.raises(PayloadTooLarge, match=r"^payload is 11 bytes, .*max_payload=10") as raised:
        check_payload(b"x" * 11, 10)
    assert isinstance(raised.value, DelayError)
    assert isinstance(raised.value, ValueError)


def test_a_limit_of_nothing():
    check_payload(b"", 0)
    with pytest.raises(PayloadTooLarge):
        check_payload(b"x", 0)
