"""``queue`` is each of the three queues in turn, on ``clock``: whatever is tested here is promised of all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from delayadapters import MemoryDelayQueue
from delaytests import FakeClock
from delaytests.queues import AsyncFace

KINDS = ("memory", "sync", "async")


@pytest.fixture(params=KINDS)
def make(request: pytest.FixtureRequest, redis_server: Any, clock: FakeClock) -> Callable[..., Any]:
    """``make(max_payload=…)``: a queue of the kind under test, on ``clock``."""
    if request.param == "memory":
        return lambda **options: MemoryDelayQueue(clock=clock.seconds, **options)
    if request.param == "sync":
        make_queue = request.getfixturevalue("make_queue")
        return lambda **options: AsyncFace(make_queue(clock=clock, **options))
    make_async_queue = request.getfixturevalue("make_async_queue")
    return lambda **options: make_async_queue(clock=clock, **options)


@pytest.fixture
def queue(make: Callable[..., Any]) -> Any:
    return make()
