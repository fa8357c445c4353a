"""Handing due tasks to a broker that only its own ``kick`` knows how to reach: leased release."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from redis import exceptions as rx
from taskiq import AsyncBroker, BrokerMessage
from taskiq.exceptions import UnknownTaskError

from ..jobs import Claim
from ..release.publisher import Batch, Published
from .brokers import is_in_memory, kind_of

__all__ = ["ID", "LABELS", "TaskiqPublisher", "message_of"]

log: Final = logging.getLogger("delayadapters.taskiq")

ID: Final = "id"
"""Meta: the task's id, where it is not the job's."""
LABELS: Final = "labels"
"""Meta: the labels a broker's ``kick`` looks at, JSON."""
KICK_TIMEOUT: Final = 10.0
"""Seconds after which a broker that does not answer is down. aio-pika waits for its connection to come back."""
_IN_FLIGHT: Final = 50
"""Confirmations awaited at once, where sending keeps its order (one AMQP channel)."""
_BATCH: Final = 25
"""Claimed at once, else. What a killed process had sent of its batch is sent again, so it is small."""


def message_of(claim: Claim) -> BrokerMessage:
    """The message as it was kicked, less its delay.

    Raises:
        ValueError: labels that are not ours.
    """
    labels = json.loads(claim.meta.get(LABELS) or "{}")
    if not isinstance(labels, Mapping):
        raise ValueError(f"the labels of this job are {labels!r}, not a JSON object")
    return BrokerMessage(
        task_id=claim.meta.get(ID) or claim.id,
        task_name=claim.meta.get("task") or "",
        message=claim.payload,
        labels=dict(labels),
    )


class TaskiqPublisher:
    """Publishes through ``kick``, in due order, and tells whose fault a failure is.

    Args:
        broker: only looked at.
        kick: the broker's own.
        down: exceptions which say that the broker is down, beside those that are known to.
    """

    def __init__(
        self,
        broker: AsyncBroker,
        kick: Callable[[BrokerMessage], Awaitable[None]],
        down: tuple[type[BaseException], ...] = (),
    ) -> None:
        self._broker = broker
        self._kick = kick
        self._down = down
        self._at_once = _IN_FLIGHT if kind_of(broker) == "rabbitmq" else 1
        self.batch = max(_BATCH, self._at_once)
        """How many to claim at once."""
        self._running: set[asyncio.Task[None]] = set()

    async def publish(self, claims: Batch) -> Published:
        failed: dict[bytes, str] = {}
        for at in range(0, len(claims), self._at_once):
            if not claims.held():
                return Published(failed, unpublished=[claim.entry for claim in claims[at:]])
            part = claims[at : at + self._at_once]
            if len(part) == 1:
                errors: list[BaseException | None] = [await self._send(part[0])]
            else:
                errors = await asyncio.gather(*(self._send(claim) for claim in part))
            unpublished, why = [], None
            for claim, error in zip(part, errors, strict=True):
                if error is None:
                    continue
                if self._is_down(error):
                    unpublished.append(claim.entry)
                    why = why or f"{type(error).__name__}: {error}"
                else:
                    failed[claim.entry] = f"{type(error).__name__}: {error}"
            if why is not None:
                unpublished += [claim.entry for claim in claims[at + len(part) :]]
                return Published(failed, unpublished, why)
        return Published(failed)

    async def _send(self, claim: Claim) -> BaseException | None:
        try:
            message = message_of(claim)
            if is_in_memory(self._broker) and self._broker.await_inplace:  # type: ignore[attr-defined]
                if self._broker.find_task(message.task_name) is None:
                    raise UnknownTaskError(task_name=message.task_name)
                self._run(message)
            else:
                await self._kick_in_time(message)
        except Exception as error:
            return error
        return None

    async def _kick_in_time(self, message: BrokerMessage) -> None:
        try:
            await asyncio.wait_for(self._kick(message), KICK_TIMEOUT)
        except asyncio.TimeoutError as error:
            if str(error):
                raise
            raise asyncio.TimeoutError(f"no answer within {KICK_TIMEOUT:g} s") from error

    def _run(self, message: BrokerMessage) -> None:
        """InMemoryBroker(await_inplace=True): ``kick`` is the whole task, which must not hold up the others."""

        async def run() -> None:
            try:
                await self._kick(message)
            except Exception:
                log.exception("delayed task %s (%s) could not be run", message.task_name, message.task_id)

        task = asyncio.create_task(run())
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    def _is_down(self, error: BaseException) -> bool:
        return isinstance(error, (*_DOWN, *self._down)) or any(
            word in cls.__name__ for cls in type(error).__mro__ for word in _DOWN_NAMES
        )


_DOWN: Final = (
    OSError,
    asyncio.TimeoutError,
    rx.ConnectionError,
    rx.TimeoutError,
    rx.ReadOnlyError,
    rx.OutOfMemoryError,
    rx.ClusterDownError,
    rx.TryAgainError,
)
_DOWN_NAMES: Final = ("Connection", "Timeout", "Unavailable", "NoStartup", "ChannelInvalidState", "ChannelClosed")
"""Brokers of other packages, by the names of their exceptions (nats, aiokafka, aiormq, asyncpg, …)."""
