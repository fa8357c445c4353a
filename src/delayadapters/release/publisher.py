"""What an adapter implements: handing claimed jobs to the framework's broker."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, overload

from redis import exceptions as rx

from ..errors import LeaseLost, RedisUnavailable
from ..jobs import Claim

__all__ = ["AsyncPublisher", "Batch", "Published", "Publisher", "checked"]

DOWN: Final = (OSError, EOFError, rx.ConnectionError, rx.TimeoutError, RedisUnavailable)
"""Raised by a publisher, these say that the broker cannot be reached."""


class Batch(Sequence[Claim]):
    """The claims of one publish. A publisher that sends one by one asks :meth:`ensure_held` before each.

    A process that was stopped (SIGSTOP, a laptop's sleep) may have lost its leases meanwhile; then what it holds is
    somebody else's. ``ensure_held`` notices by a clock that runs on during sleep. Asking counts as progress: a
    publisher that makes none is taken for hanging, and its leases are no longer renewed.
    """

    __slots__ = ("_claims", "_held")

    def __init__(self, claims: Sequence[Claim], held: Callable[[], bool] = lambda: True) -> None:
        self._claims = claims
        self._held = held

    @overload
    def __getitem__(self, index: int) -> Claim: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Claim]: ...
    def __getitem__(self, index: int | slice) -> Claim | Sequence[Claim]:
        return self._claims[index]

    def __len__(self) -> int:
        return len(self._claims)

    def __iter__(self) -> Iterator[Claim]:
        return iter(self._claims)

    def held(self) -> bool:
        """Whether the leases still hold, by this process's clock."""
        return self._held()

    def ensure_held(self) -> None:
        """Raises LeaseLost when the leases may have passed: stop, and return what was published so far."""
        if not self._held():
            raise LeaseLost("the lease on this batch has passed; whoever holds it now publishes the rest")


@dataclass(frozen=True, slots=True)
class Published:
    """What became of a batch. Whatever is named in neither field was published and is forgotten.

    ``failed``: entry → reason; the message itself is at fault: retried with backoff, then dead.
    ``unpublished``: entries that were not sent through no fault of theirs: given back, no attempt counted.
    ``broker_down``: why the broker takes nothing now; release pauses with backoff and jitter. None: it is up.
    """

    failed: Mapping[bytes, str] = field(default_factory=dict)
    unpublished: Collection[bytes] = ()
    broker_down: str | None = None


def checked(result: Any) -> Published:
    """What a publisher returned, made sure of: a wrong answer must not end the release loop.

    Raises:
        TypeError: neither None nor a Published.
    """
    if result is None:
        return Published()
    if not isinstance(result, Published):
        raise TypeError(f"publish must return None or Published, got {result!r}")
    failed = {entry: str(reason) for entry, reason in result.failed.items()}
    down = result.broker_down
    return Published(failed, frozenset(result.unpublished), None if down is None else str(down))


class Publisher(Protocol):
    """Hands jobs to a broker, from a thread.

    ``publish`` returns None or an empty :class:`Published` when the broker *has* every message (confirmed, where the
    broker can). It reports what it did not publish; when it raises instead, nothing of the batch counts as published:
    BrokerDown, or any OSError or redis-py connection error, says that the broker is down; after any other exception a
    batch is tried again one by one, and a job alone is charged with the failure. So a publisher that sends one by one
    catches LeaseLost and what its broker raises, and returns what it did not send as ``unpublished``: whatever it lets
    through makes the messages it did send go out again.
    """

    def publish(self, claims: Batch) -> Published | None: ...


class AsyncPublisher(Protocol):
    """:class:`Publisher` on an event loop."""

    async def publish(self, claims: Batch) -> Published | None: ...
