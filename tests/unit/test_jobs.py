"""The value types."""

from __future__ import annotations

import contextlib
import dataclasses
import pickle
from datetime import datetime, timezone

import pytest

from delayadapters import jobs
from delayadapters.jobs import Claim, Job, NewJob, Outcome, Page, Payload, State, Stats

VALUES = [
    NewJob(b"p", delay=1),
    Job(id="a", due=1, payload=b"p"),
    Claim(entry=b"e", lease=2, id="a", due=1, payload=b"p"),
    Page([], None),
    Stats(waiting=1, due=1, leased=0, dead=0, next_due=1, oldest_overdue=0.5),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_values_are_frozen(value):
    field = dataclasses.fields(value)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(value, field, None)
    with pytest.raises((AttributeError, TypeError)):
        value.something_new = 1


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_values_are_equal_by_content(value):
    assert dataclasses.replace(value) == value


def test_a_jobs_due_time_as_a_datetime():
    moment = datetime(2030, 7, 1, 12, 0, 0, 123_457, tzinfo=timezone.utc)
    micros = (moment - datetime(1970, 1, 1, tzinfo=timezone.utc)) // (datetime.resolution)
    job = Job(id="a", due=micros, payload=b"")
    assert job.due_at == moment
    assert job.due_at.tzinfo is timezone.utc


def test_a_plain_job_waits_and_has_no_history():
    job = Job(id="a", due=1, payload=b"")
    assert (job.state, job.attempts, job.requeues, job.reason, job.outcome) == (State.WAITING, 0, 0, None, None)


@pytest.mark.parametrize("value", VALUES[1:3], ids=lambda value: type(value).__name__)
def test_filling_one_meta_by_accident_fills_no_other(value):
    twin = Job(id="b", due=1, payload=b"")
    with contextlib.suppress(TypeError):
        value.meta["task"] = "t"
    others = dict(twin.meta), dict(Job(id="c", due=1, payload=b"").meta)
    with contextlib.suppress(AttributeError):
        value.meta.pop("task", None)
    assert others == ({}, {})


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_values_cross_processes(value):
    assert pickle.loads(pickle.dumps(value)) == value


def test_outcomes_and_states_are_text_for_logs_and_json():
    assert Outcome.CANCELLED == "cancelled"
    assert Outcome("in_flight") is Outcome.IN_FLIGHT
    assert State("leased") is State.LEASED
    for enumeration in (Outcome, State):
        for member in enumeration:
            assert member.value == member.name.lower()


def test_outcomes_cross_processes():
    for outcome in Outcome:
        assert pickle.loads(pickle.dumps(outcome)) is outcome


def test_payload_stand_ins_are_small_numbers():
    """They are packed into the record, and the release script tells them by their value."""
    values = {"BYTES": 0, "DUE_MS": 1, "NOW_MS": 2, "UNIQUE": 3, "UNLESS_EXISTS": 4, "ID": 5, "DUE_ISO": 6}
    assert {member.name: member.value for member in Payload} == values


def test_all_names_exist():
    assert set(jobs.__all__) <= set(vars(jobs))
