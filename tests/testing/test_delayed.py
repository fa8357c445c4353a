"""What the helpers of all frameworks have in common: looking, asserting, and advancing the clock."""

from __future__ import annotations

import contextlib
import json
from datetime import datetime, timedelta, timezone
from typing import Any
from unittest import mock

import pytest

from delayadapters import DelayQueue
from delayadapters.testing import Delayed, ManualClock, ReleaseFailed
from delayadapters.testing.verbs import NoRedis

START = datetime(2030, 1, 1, tzinfo=timezone.utc)


class Notes(Delayed):
    """The smallest framework there is: a payload of JSON, and a list for a broker."""

    def __init__(self) -> None:
        super().__init__(ManualClock(START))
        self.queue = DelayQueue(NoRedis(), max_payload=None)
        self.queue._verbs = self._verbs
        self.log: list[tuple[str, float]] = []
        self.then: dict[str, Any] = {}

    def schedule(self, task: str, *args: Any, delay: float | timedelta, id: str | None = None, **kwargs: Any) -> None:
        meta = {"task": task, "queue": "notes"}
        self.queue.schedule(json.dumps([args, kwargs]).encode(), delay=delay, id=id, meta=meta, if_exists="add")

    def advance(self, seconds: float | timedelta) -> list[str]:
        done = []
        with contextlib.closing(self._falling_due(seconds)) as claims:
            for claim in claims:
                task = claim.meta["task"]
                if task == "bad":
                    raise self._failed(claim, "no such queue")
                self.log.append((task, (self.clock.now() - START).total_seconds()))
                done.append(self._done(claim).task)
                if task in self.then:
                    self.then[task]()
        return done

    def _read(self, job: Any) -> tuple[str, Any, Any, str]:
        args, kwargs = json.loads(job.payload)
        return job.meta["task"], args, kwargs, job.id

    def _undo(self) -> None:
        self.log.append(("undone", 0))


@pytest.fixture
def notes() -> Notes:
    return Notes()


def message_of(assertion: Any, *args: Any, **kwargs: Any) -> str:
    with pytest.raises(AssertionError) as caught:
        assertion(*args, **kwargs)
    return str(caught.value)


# ------------------------------------------------------------------------------------------------------------ advance


def test_each_job_is_released_at_its_due_time_in_due_order(notes: Notes) -> None:
    for task, delay in (("c", 30), ("a", 10), ("b", 10), ("late", 61)):
        notes.schedule(task, delay=delay)
    assert notes.advance(9.999999) == []
    assert notes.advance(timedelta(seconds=50.000001)) == ["a", "b", "c"]
    assert notes.log == [("a", 10), ("b", 10), ("c", 30)]
    assert notes.clock.now() == START + timedelta(minutes=1)
    assert [job.task for job in notes.scheduled] == ["late"]
    assert [job.task for job in notes.released] == ["a", "b", "c"]


def test_what_a_released_job_schedules_inside_the_window_is_released_too(notes: Notes) -> None:
    notes.schedule("tick", delay=10)
    notes.then["tick"] = lambda: notes.schedule("tick", delay=10)
    notes.advance(35)
    assert notes.log == [("tick", 10), ("tick", 20), ("tick", 30)]
    notes.assert_scheduled("tick", delay=10, due_in=5, due=START + timedelta(seconds=40))


def test_jobs_that_reschedule_themselves_without_a_delay_do_not_hang_the_test(
    notes: Notes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("delayadapters.testing.delayed._AT_ONE_INSTANT", 100)
    notes.schedule("now", delay=0)
    notes.then["now"] = lambda: notes.schedule("now", delay=0)
    with pytest.raises(RuntimeError, match=r"releases at one instant, of now\(\); an endless loop"):
        notes.advance(1)


def test_advancing_goes_forward_only_and_not_from_inside(notes: Notes) -> None:
    with pytest.raises(ValueError, match="forward only, got seconds=-1"):
        notes.advance(-1)
    with pytest.raises(TypeError, match="seconds must be seconds"):
        notes.advance("1")  # type: ignore[arg-type]
    notes.schedule("a", delay=1)
    notes.then["a"] = lambda: notes.advance(1)
    with pytest.raises(RuntimeError, match="a task that advance\\(\\) is running"):
        notes.advance(1)
    assert notes.advance(1) == []


def test_a_job_that_cannot_be_released_is_named_and_dead(notes: Notes) -> None:
    notes.schedule("bad", 7, delay=5, id="the-id")
    with pytest.raises(ReleaseFailed, match=r"bad\(7\) \[id the-id\] could not be released: no such queue"):
        notes.advance(60)
    assert notes.clock.now() == START + timedelta(seconds=5)
    assert [job.reason for job in notes.queue.dead_jobs().jobs] == ["no such queue"]
    notes.assert_nothing_scheduled()


def test_a_cancelled_job_is_not_released_and_a_rescheduled_one_at_its_new_time(notes: Notes) -> None:
    notes.schedule("a", delay=10, id="a")
    notes.schedule("b", delay=10, id="b")
    notes.clock.advance(4)
    notes.queue.cancel("a")
    notes.queue.reschedule("b", delay=20)
    notes.assert_scheduled("b", delay=20, due_in=20)
    notes.advance(20)
    assert notes.log == [("b", 24)]


def test_undone_once(notes: Notes) -> None:
    with notes:
        pass
    notes.undo()
    assert notes.log == [("undone", 0)]
    with pytest.raises(RuntimeError, match="undone"):
        notes.advance(1)


# --------------------------------------------------------------------------------------------------------- assertions


def test_what_an_assertion_takes(notes: Notes) -> None:
    notes.schedule("proj.tasks.send", 7, [1, 2], delay=60, id="x", urgent=True)
    job = notes.assert_scheduled("proj.tasks.send")
    assert (job.task, job.args, job.kwargs, job.id, job.queue) == (
        "proj.tasks.send", (7, [1, 2]), {"urgent": True}, "x", "notes",
    )  # fmt: skip
    assert notes.assert_scheduled() == job
    task = mock.Mock(task_name="proj.tasks.send")
    for name in ("send", "tasks.send", task):
        notes.assert_scheduled(name, times=1)
    for delay in (60, 60.0, timedelta(minutes=1), pytest.approx(59.9, abs=0.2), pytest.approx(60)):
        notes.assert_scheduled(delay=delay)
        notes.assert_scheduled(due_in=delay)
    notes.assert_scheduled(args=(7, (1, 2)), kwargs={"urgent": True})
    notes.assert_scheduled(args=[mock.ANY, mock.ANY], id="x", queue="notes")
    for other in (
        {"task": "end"}, {"task": "nd"}, {"delay": 59}, {"delay": timedelta(0)}, {"delay": pytest.approx(61)},
        {"due_in": 61}, {"due": START}, {"args": [7]}, {"args": []}, {"kwargs": {}}, {"id": "y"}, {"queue": "q"},
        {"kwargs": {"urgent": True, "more": 1}}, {"task": "send", "delay": 1},
    ):  # fmt: skip
        notes.assert_not_scheduled(**other)
        message_of(notes.assert_scheduled, **other)
    with pytest.raises(TypeError, match="task must be a name or a task, got 7"):
        notes.assert_scheduled(7)
    with pytest.raises(ValueError, match="times must be a positive int, got 0"):
        notes.assert_scheduled(times=0)


def test_a_delay_is_what_was_asked_for_whatever_time_it_is_by_now(notes: Notes) -> None:
    notes.schedule("a", delay=60)
    notes.advance(20)
    notes.assert_scheduled("a", delay=60, due_in=40)
    notes.advance(40)
    notes.assert_released("a", delay=60, due=START + timedelta(seconds=60))


def test_a_failure_says_what_there_is_and_in_what_it_differs(notes: Notes) -> None:
    notes.schedule("proj.send", 7, delay=60, id="one", urgent=True)
    notes.schedule("proj.clean", delay=86_400, id="two")
    notes.advance(10)
    assert message_of(notes.assert_scheduled, "send", args=(8,), delay=timedelta(seconds=61)) == (
        "expected to be scheduled: send with args=(8,), delay=61 s\n"
        "scheduled at 2030-01-01 00:00:10+00:00 on the test's clock:\n"
        "  in 50 s: proj.send(7, urgent=True)  [id one, queue notes, delay 60 s]\n"
        "      but delay is 60 s; args are (7,)\n"
        "  in 86390 s (23:59:50): proj.clean()  [id two, queue notes, delay 86400 s (1 day, 0:00:00)]\n"
        "      but another task; delay is 86400 s (1 day, 0:00:00); args are ()"
    )
    assert "delay=61 ± " in message_of(notes.assert_scheduled, delay=pytest.approx(61))
    assert message_of(notes.assert_not_scheduled, "send", delay=60) == (
        "expected not to be scheduled: send with delay=60\n"
        "but there is\n"
        "  in 50 s: proj.send(7, urgent=True)  [id one, queue notes, delay 60 s]"
    )
    assert message_of(notes.assert_nothing_scheduled).startswith(
        "expected nothing to be scheduled, but there is\n  in 50"
    )
    notes.schedule("proj.send", 7, delay=60)
    assert message_of(notes.assert_scheduled, "send", times=3).startswith(
        "expected to be scheduled: send, 3 times; found 2\n"
    )


def test_a_failure_with_nothing_scheduled_tells_of_what_was_released(notes: Notes) -> None:
    assert message_of(notes.assert_scheduled, "a") == "expected to be scheduled: a\nbut nothing is scheduled"
    assert message_of(notes.assert_released, "a") == "expected to be released: a\nbut nothing was released"
    notes.schedule("a", delay=1, id="x")
    notes.advance(3)
    assert message_of(notes.assert_scheduled, "a").endswith(
        "but nothing is scheduled\nreleased before:\n  2 s ago: a()  [id x, queue notes, delay 1 s]"
    )


def test_a_failure_does_not_list_hundreds(notes: Notes) -> None:
    for n in range(50):
        notes.schedule("a", n, delay=n + 1)
    message = message_of(notes.assert_scheduled, "b")
    assert message.endswith("  … and 30 more")
    assert len(message.splitlines()) == 43


def test_a_payload_that_cannot_be_read_is_shown_and_matches_by_name_only(notes: Notes) -> None:
    notes.queue.schedule(b"{", delay=1, id="x", meta={"task": "a"})
    notes.assert_scheduled("a", delay=1)
    assert "its arguments cannot be read: JSONDecodeError" in message_of(notes.assert_scheduled, "a", args=())


def test_repr(notes: Notes) -> None:
    assert repr(notes) == "<Notes scheduled=0>"
    notes.schedule("a", delay=90)
    assert repr(notes) == "<Notes scheduled=1, next due in 90 s>"
