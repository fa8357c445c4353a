"""RabbitMQ under a memory or disk alarm: it takes connections and declarations, and reads no publish until it ends."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
from celery import Celery

from delayadapters import Batch, Claim, Published
from delayadapters.celery import publisher as publishing
from delayadapters.celery.publisher import CeleryPublisher
from delaytests import wait_until

DIRECT = False

BASIC_PUBLISH = b"\x00\x3c\x00\x28"  # class 60, method 40


class Alarmed:
    """A proxy before RabbitMQ which does to connections what an alarm does: each is read no further than its first
    publish. What was sent on it is read when the alarm ends, even if the client has closed it by then."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._target = (parts.hostname, parts.port)
        self._reads = threading.Event()
        self._reads.set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._threads: list[threading.Thread] = []
        port = self._listener.getsockname()[1]
        self.url = url.replace(f"{parts.hostname}:{parts.port}", f"127.0.0.1:{port}")
        threading.Thread(target=self._accept, daemon=True).start()

    def begin(self) -> None:
        self._reads.clear()

    def end(self) -> None:
        self._reads.set()

    @property
    def read_out(self) -> bool:
        """Whether RabbitMQ has read all that closed connections had sent."""
        return not any(thread.is_alive() for thread in self._threads)

    def close(self) -> None:
        self.end()
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._target)
                for source, sink, held in ((client, server, True), (server, client, False)):
                    thread = threading.Thread(target=self._pump, args=(source, sink, held), daemon=True)
                    self._threads.append(thread)
                    thread.start()

    def _pump(self, source: socket.socket, sink: socket.socket, held: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if held and BASIC_PUBLISH in data:
                    self._reads.wait()
                sink.sendall(data)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)


@pytest.fixture
def rabbit(rabbit_broker: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Alarmed]:
    monkeypatch.setattr(publishing, "CONFIRM_TIMEOUT", 0.5)
    monkeypatch.setattr(publishing, "PROBE_TIMEOUT", 0.5)
    found = Alarmed(rabbit_broker.url)
    yield found
    found.close()


@pytest.fixture
def publisher(rabbit: Alarmed, rabbit_broker: Any, make_app: Callable[..., Celery]) -> Iterator[CeleryPublisher]:
    made = CeleryPublisher(make_app({**rabbit_broker.conf, "broker_url": rabbit.url}))
    yield made
    made.close()


def claims(app: Celery, *ids: str) -> list[Claim]:
    found = []
    for number, one in enumerate(ids):
        app.send_task("note", countdown=60, task_id=one)
        found.append(Claim(str(number).encode(), 0, one, 0, app.delayadapters.get(one).payload))
    return found


def arrived(broker: Any) -> Counter[str]:
    return Counter(message.headers["id"] for message in iter(broker.get, None))


def outlive(rabbit: Alarmed, publisher: CeleryPublisher, batch: Batch, attempts: int) -> None:
    """An alarm through which the loop tries ``attempts`` times; then the batch is published."""
    rabbit.begin()
    for _ in range(attempts):
        outcome = publisher.publish(batch)
        assert outcome.broker_down
        assert not outcome.failed
        assert len(outcome.unpublished) == len(batch)
    rabbit.end()
    wait_until(lambda: rabbit.read_out)
    assert publisher.publish(batch) == Published()


def test_an_alarm_on_an_open_connection_duplicates_one_task_once_however_long_it_lasts(
    rabbit: Alarmed, rabbit_broker: Any, publisher: CeleryPublisher
) -> None:
    before, *batch = claims(publisher._app, "before", "first", "second", "third")
    assert publisher.publish(Batch([before])) == Published()
    outlive(rabbit, publisher, Batch(batch), attempts=4)
    assert arrived(rabbit_broker) == {"before": 1, "first": 2, "second": 1, "third": 1}


def test_a_loop_that_starts_under_an_alarm_duplicates_nothing(
    rabbit: Alarmed, rabbit_broker: Any, publisher: CeleryPublisher
) -> None:
    outlive(rabbit, publisher, Batch(claims(publisher._app, "first", "second")), attempts=3)
    assert arrived(rabbit_broker) == {"first": 1, "second": 1}


def test_an_alarm_is_named(rabbit: Alarmed, publisher: CeleryPublisher) -> None:
    batch = Batch(claims(publisher._app, "one"))
    rabbit.begin()
    assert "alarm" in str(publisher.publish(batch).broker_down)
