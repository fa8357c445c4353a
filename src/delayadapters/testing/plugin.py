"""The pytest plugin: a clock, and for each framework a fixture that keeps an app's delayed jobs in memory.

Loaded in every pytest run of an environment that has delayadapters, so it imports nothing until a fixture is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from ..clock import ManualClock
    from .arq import DelayedArq
    from .celery import DelayedCelery
    from .taskiq import DelayedTaskiq


@pytest.fixture
def delay_clock() -> ManualClock:
    """The test's clock: stands still at the present until it is advanced. Override it to begin at another time."""
    from ..clock import ManualClock

    return ManualClock()


@pytest.fixture
def delayed_celery(delay_clock: ManualClock) -> Iterator[Callable[..., DelayedCelery]]:
    """``delayed_celery(app, *, release="run", results="memory", propagate=True)``: its delayed tasks in memory."""
    with ExitStack() as undoing:

        def make(app: Any, **options: Any) -> DelayedCelery:
            from .celery import DelayedCelery

            return undoing.enter_context(DelayedCelery(app, **{"clock": delay_clock, **options}))

        yield make


@pytest.fixture
def delayed_taskiq(delay_clock: ManualClock) -> Iterator[Callable[..., DelayedTaskiq]]:
    """``delayed_taskiq(broker, *, release="run", propagate=True)``: its delayed tasks in memory."""
    with ExitStack() as undoing:

        def make(broker: Any, **options: Any) -> DelayedTaskiq:
            from .taskiq import DelayedTaskiq

            return undoing.enter_context(DelayedTaskiq(broker, **{"clock": delay_clock, **options}))

        yield make


@pytest.fixture
def delayed_arq(delay_clock: ManualClock) -> Iterator[Callable[..., DelayedArq]]:
    """``delayed_arq(WorkerSettings, *, ctx=None, release_to=None, propagate=True)``: its jobs in memory."""
    with ExitStack() as undoing:

        def make(settings: Any, **options: Any) -> DelayedArq:
            from .arq import DelayedArq

            return undoing.enter_context(DelayedArq(settings, **{"clock": delay_clock, **options}))

        yield make
