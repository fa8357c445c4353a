"""Brokers that kombu reaches through a service's client (SQS, MongoDB, Azure, …): whose fault an error is.

The broker is kombu's own in-memory transport, with the lists of errors that kombu gives to the transport in question,
and a send that fails as that service's client does.
"""

from __future__ import annotations

import sys
import types
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import Celery
from kombu.exceptions import ChannelError
from kombu.transport import TRANSPORT_ALIASES, memory

from delayadapters import Batch, Claim, Published, Releaser
from delayadapters.celery.publisher import CeleryPublisher
from delaytests import wait_until


class BotoCoreError(Exception):
    """botocore.exceptions: no answer, or no credentials."""


class EndpointConnectionError(BotoCoreError):
    pass


class ParamValidationError(BotoCoreError):
    pass


class ClientError(Exception):
    """botocore.exceptions: the service's answer."""

    def __init__(self, code: str, status: int) -> None:
        self.response = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}
        super().__init__(f"An error occurred ({code})")


class OperationalError(Exception):
    """sqlalchemy.exc: kombu's SQL transport calls it a connection error only."""


class ServiceRequestError(Exception):
    """azure.core.exceptions: kombu's Azure transports call it nothing."""


class HttpResponseError(Exception):
    """azure.core.exceptions"""

    def __init__(self, status: int) -> None:
        self.status_code = status
        super().__init__(status)


class Service:
    """``url``: a broker; ``failing``: queue → what a send to it raises (``None``: to any queue)."""

    def __init__(self, connection_errors: tuple[Any, ...], channel_errors: tuple[Any, ...]) -> None:
        self.failing: dict[str | None, Exception] = {}
        self.sent: list[str] = []
        service = self

        class Channel(memory.Channel):
            def _put(self, queue: str, message: Any, **options: Any) -> None:
                error = service.failing.get(queue, service.failing.get(None))
                if error is not None:
                    raise error
                service.sent.append(message["headers"]["id"])

        class Transport(memory.Transport):
            pass

        Transport.Channel = Channel
        Transport.connection_errors = (*memory.Transport.connection_errors, *connection_errors)
        Transport.channel_errors = (*memory.Transport.channel_errors, *channel_errors)
        self.name = f"service{uuid.uuid4().hex[:8]}"
        module = types.ModuleType(self.name)
        module.Transport = Transport  # type: ignore[attr-defined]
        sys.modules[self.name] = module
        TRANSPORT_ALIASES[self.name] = f"{self.name}:Transport"
        self.url = f"{self.name}://"

    def close(self) -> None:
        del sys.modules[self.name], TRANSPORT_ALIASES[self.name]


@pytest.fixture
def service() -> Iterator[Service]:
    """With the two lists of kombu.transport.SQS, and kombu's SQL transport's one."""
    made = Service((BotoCoreError, OSError, OperationalError), (BotoCoreError,))
    yield made
    made.close()


@pytest.fixture
def app(service: Service, redis_broker: Any, make_app: Callable[..., Celery]) -> Celery:
    return make_app({**redis_broker.conf, "broker_url": service.url})


@pytest.fixture
def publisher(app: Celery) -> Iterator[CeleryPublisher]:
    made = CeleryPublisher(app)
    yield made
    made.close()


def batch_of(app: Celery, *queues: str) -> Batch:
    """A task for each of the queues, whose entry and id are its queue's name."""
    found = []
    for queue in queues:
        app.send_task("note", countdown=60, task_id=queue, queue=queue)
        found.append(Claim(queue.encode(), 0, queue, 0, app.delayadapters.get(queue).payload))
    return Batch(found)


OUTAGES = [
    EndpointConnectionError("Could not connect to the endpoint URL"),
    OperationalError("server closed the connection unexpectedly"),
    ConnectionResetError("reset by peer"),
    TimeoutError("timed out"),
    ClientError("InternalFailure", 500),
    ClientError("ServiceUnavailable", 503),
    ClientError("ThrottlingException", 400),
    ClientError("RequestThrottled", 403),
    ClientError("ExpiredToken", 403),
    ClientError("ExpiredTokenException", 400),
    ClientError("InvalidClientTokenId", 403),
    ClientError("AccessDenied", 403),
    ClientError("KMS.AccessDeniedException", 400),
    ServiceRequestError("name resolution failed"),
    HttpResponseError(503),
    HttpResponseError(429),
]

FAULTS = [
    ParamValidationError("Invalid length for parameter QueueUrl"),
    ClientError("InvalidMessageContents", 400),
    ClientError("AWS.SimpleQueueService.NonExistentQueue", 400),
    HttpResponseError(413),
    ChannelError("refused"),
]


@pytest.mark.parametrize("error", OUTAGES, ids=repr)
def test_an_outage_is_charged_to_no_task(
    service: Service, app: Celery, publisher: CeleryPublisher, error: Exception
) -> None:
    batch = batch_of(app, "a", "b", "c")
    service.failing[None] = error
    outcome = publisher.publish(batch)
    assert outcome.failed == {}
    assert sorted(outcome.unpublished) == [b"a", b"b", b"c"]
    assert type(error).__name__ in str(outcome.broker_down)
    service.failing.clear()
    assert publisher.publish(batch) == Published()
    assert service.sent == ["a", "b", "c"]


@pytest.mark.parametrize("error", [*FAULTS, ClientError("AccessDenied", 403)], ids=repr)
def test_what_only_one_queue_refuses_is_charged_to_its_own_task(
    service: Service, app: Celery, publisher: CeleryPublisher, error: Exception
) -> None:
    service.failing["bad"] = error
    outcome = publisher.publish(batch_of(app, "bad", "a", "b"))
    assert list(outcome.failed) == [b"bad"]
    assert not outcome.unpublished
    assert outcome.broker_down is None
    assert service.sent == ["a", "b"]


def test_an_outage_kills_no_task_however_long(service: Service, app: Celery, publisher: CeleryPublisher) -> None:
    queue = app.delayadapters
    batch_of(app, "a", "b", "c")
    service.failing[None] = EndpointConnectionError("Could not connect to the endpoint URL")
    for one in "abc":
        queue.release_now(one)
    releaser = Releaser(queue, publisher, max_attempts=1)
    releaser.start()
    try:
        wait_until(lambda: releaser.stats.pauses >= 3)
        assert queue.stats().dead == 0
        assert releaser.stats.failed == 0
        service.failing.clear()
        wait_until(lambda: sorted(service.sent) == ["a", "b", "c"])
    finally:
        releaser.stop()
