"""The tasks of a group are stored together; nothing else about them differs."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
from celery import Celery, chain, chord, group

from delayadapters import DelayQueue, RedisUnavailable
from delayadapters.celery import gathering
from delayadapters.celery.signals import task_delayed
from delaytests.server import free_port


@pytest.fixture
def calls() -> Iterator[mock.Mock]:
    """Each request to the delay queue."""
    with mock.patch.object(DelayQueue, "_run", autospec=True, side_effect=DelayQueue._run) as made:
        yield made


def waiting(app: Celery) -> dict[str, Any]:
    jobs, cursor = {}, None
    while True:
        page = app.delayadapters.jobs(cursor=cursor)
        jobs.update((job.id, job) for job in page.jobs)
        cursor = page.cursor
        if cursor is None:
            return jobs


def test_a_group_is_stored_in_few_requests_before_apply_async_returns(app: Celery, calls: mock.Mock) -> None:
    note = app.tasks["note"]
    seen: list[str] = []
    with mock.patch.object(task_delayed, "receivers", []):
        task_delayed.connect(lambda id, **_: seen.append(id), weak=False)
        before = time.time()
        result = group(note.s(n) for n in range(500)).apply_async(countdown=60)
        after = time.time()
        made = calls.call_count
    jobs = waiting(app)
    assert [child.id for child in result.children] == list(jobs) == seen
    assert made < 50
    assert all(before + 60 <= job.due / 1e6 <= after + 60.1 for job in jobs.values())
    due = [job.due for job in jobs.values()]
    assert due == sorted(due)
    app.delayadapters.purge()


def test_a_delay_counts_from_its_own_call(app: Celery) -> None:
    note = app.tasks["note"]
    note.apply_async(countdown=60)
    app.delayadapters.purge()
    ticks = itertools.count()
    with mock.patch.object(gathering, "time", mock.Mock(monotonic=lambda: next(ticks) * 0.001)):
        group([note.s(n) for n in range(20)]).skew(start=60, stop=80).apply_async()
    due = [job.due for job in waiting(app).values()]
    steps = {round((after - before) / 1000) for before, after in itertools.pairwise(due)}
    assert steps == {1001}, "a second of skew, and the tick between two calls"


def test_what_is_in_a_group_may_be_anything(app: Celery, redis_broker: Any) -> None:
    note = app.tasks["note"]
    inner = group(note.s("inner").set(countdown=60), note.s("now"))
    group(
        note.s("plain").set(countdown=60),
        inner,
        chain(note.s("chained").set(countdown=60), note.s()),
        note.s("leased").set(countdown=60, expires=3600),
        note.s("other queue").set(countdown=60, queue="other"),
    ).apply_async()
    chord([note.s(1).set(countdown=60), note.s(2).set(countdown=60)], app.tasks["total"].s()).apply_async()
    assert len(waiting(app)) == 7
    assert redis_broker.size() == 1


def test_an_error_in_the_midst_stores_what_was_sent_before(app: Celery) -> None:
    note = app.tasks["note"]
    with pytest.raises(ValueError, match="delay"):
        group([note.s(1).set(countdown=60), note.s(2).set(countdown=float("nan"))]).apply_async()
    assert len(waiting(app)) == 1
    note.apply_async(countdown=60)
    assert len(waiting(app)) == 2


@pytest.mark.parametrize("mode", ["raise", "native"])
def test_unavailable(redis_broker: Any, make_app: Callable[..., Celery], mode: str) -> None:
    url = f"redis://127.0.0.1:{free_port()}/0"
    app = make_app({**redis_broker.conf, "delayadapters_redis_url": url, "delayadapters_on_unavailable": mode})
    app.delayadapters._bound = 0.2
    tasks = group([app.tasks["note"].s(n) for n in range(3)])
    if mode == "raise":
        with pytest.raises(RedisUnavailable):
            tasks.apply_async(countdown=60)
        assert redis_broker.size() == 0
    else:
        tasks.apply_async(countdown=60)
        assert redis_broker.size() == 3


def test_only_a_groups_own_producer_gathers(app: Celery, calls: mock.Mock) -> None:
    note = app.tasks["note"]
    with app.producer_or_acquire() as producer:
        for stored in (1, 2):
            note.apply_async(countdown=60, producer=producer)
            assert calls.call_count == stored
