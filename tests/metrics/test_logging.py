"""The log: a line for a change of state, none for a job, and nothing of what a job carries."""

from __future__ import annotations

import asyncio
import logging
import threading

import pytest

from delayadapters import AsyncDelayQueue, AsyncReleaser, BrokerDown, DelayQueue, NewJob, Releaser
from delayadapters.redis.keys import ShardKeys
from delayadapters.release.telling import AGAIN, Telling, short
from delaytests import wait_until

SECRET = b"4111-1111-1111-1111"


class Broker:
    """Down while ``down`` is set; a payload that begins with ``bad`` is at fault itself."""

    def __init__(self):
        self.down = threading.Event()
        self.got = 0
        self.turned_away = 0

    def take(self, claims):
        if self.down.is_set():
            self.turned_away += 1
            raise BrokerDown("nobody there")
        if len(claims) == 1 and claims[0].payload.startswith(b"bad"):
            claims[0].payload.decode("ascii")
        if any(claim.payload.startswith(b"bad") for claim in claims):
            raise UnicodeDecodeError("ascii", bytes(claims[0].payload), 0, 1, "bad")
        self.got += len(claims)


class Publisher(Broker):
    def publish(self, claims):
        self.take(claims)


class AsyncPublisher(Broker):
    async def publish(self, claims):
        self.take(claims)


def releasing(shell: str, url: str, publisher, ended: threading.Event) -> threading.Thread:
    """A releaser in a thread, until ``ended``."""

    def thread():
        with DelayQueue.from_url(url) as queue, Releaser(queue, publisher, max_attempts=2, backoff=0.05):
            ended.wait()

    async def task():
        async with (
            AsyncDelayQueue.from_url(url) as queue,
            AsyncReleaser(queue, publisher, max_attempts=2, backoff=0.05),
        ):
            while not ended.is_set():
                await asyncio.sleep(0.02)

    running = threading.Thread(target=thread if shell == "thread" else lambda: asyncio.run(task()))
    running.start()
    return running


def everything(record: logging.LogRecord) -> str:
    """All that a handler could write of a record."""
    return f"{logging.Formatter().format(record)} {vars(record)!r}"


@pytest.mark.parametrize("shell", ["thread", "asyncio"])
def test_a_thousand_jobs_an_outage_and_a_restart_are_a_few_lines(start_redis, caplog, shell):
    server = start_redis(aof="always")
    publisher = Publisher() if shell == "thread" else AsyncPublisher()
    ended = threading.Event()
    broker = ShardKeys.of("delayadapters", 0).due + b":broker"
    with DelayQueue.from_url(server.url, timeout=30) as queue, caplog.at_level(logging.DEBUG, "delayadapters"):
        running = releasing(shell, server.url, publisher, ended)
        try:
            queue.schedule_many([NewJob(SECRET, 0) for _ in range(1000)])
            wait_until(lambda: publisher.got == 1000)
            publisher.down.set()
            queue.schedule_many([NewJob(SECRET, 0) for _ in range(300)])
            wait_until(lambda: publisher.turned_away >= 3)
            publisher.down.clear()
            wait_until(lambda: publisher.got == 1300, 60)
            server.kill()
            server.start()
            queue.schedule_many([NewJob(b"bad \xff " + SECRET, 0) for _ in range(50)])
            queue.schedule_many([NewJob(SECRET, 0, release=[("HSET", broker, SECRET)]) for _ in range(50)])
            wait_until(lambda: queue.stats().dead == 100, 60)
        finally:
            ended.set()
            running.join(30)
    ours = [record for record in caplog.records if record.name.startswith("delayadapters")]
    assert all(SECRET.decode() not in everything(record) for record in ours)
    texts = [record.getMessage() for record in ours if record.levelno >= logging.INFO]
    assert len(texts) <= 25, texts
    for told in ("the broker takes no messages", "the broker takes messages again", "dead, set aside"):
        assert 1 <= sum(told in text for text in texts) <= 6, texts
    of_loop = [record for record in ours if hasattr(record, "delay")]
    assert of_loop
    for record in of_loop:
        assert record.delay["queue"] == "delayadapters:0"
        assert f"queue={record.delay['queue']}" in record.getMessage()
    dead = [record for record in of_loop if "dead, set aside" in record.getMessage()]
    assert sum(record.delay["jobs"] for record in dead) == 100, "those not told of one by one are told in number"


def test_what_happens_to_many_jobs_is_told_at_first_and_then_in_number(caplog):
    now = [0.0]
    telling = Telling("q:0", lambda: now[0])
    with caplog.at_level(logging.INFO, "delayadapters"):
        for n in range(100):
            telling.tally(logging.WARNING, "failed", "why", id=n)
        telling.tally(logging.WARNING, "failed", "another reason", id="x")
        now[0] += AGAIN / 2
        telling.flush()
        assert len(caplog.records) == 2
        now[0] += AGAIN
        telling.flush()
        telling.flush(force=True)
    assert [record.delay["jobs"] for record in caplog.records] == [1, 1, 99]


def test_reasons_that_all_differ_are_not_kept_for_ever(caplog):
    telling = Telling("q:0", lambda: 0.0)
    for n in range(1000):
        telling.tally(logging.WARNING, "failed", f"reason {n}")
    assert len(telling._next) <= 100


def test_an_error_is_one_short_line_without_what_it_stumbled_over():
    error = UnicodeDecodeError("ascii", SECRET + b"\xff", 19, 20, "no")
    assert SECRET.decode() in repr(error)
    assert SECRET.decode() not in short(error)
    assert short(ValueError("a\n b\n" + "x" * 900)).startswith("ValueError: a b xxx")
    assert len(short("x" * 900)) == 200
