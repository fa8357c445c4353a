"""For tests that make Celery apps. Imports Celery: not part of the package's front."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from celery import _state


@contextlib.contextmanager
def tasks_as_found() -> Iterator[None]:
    """``@app.task`` and ``@shared_task`` give a task to every app that is to come, other tests' apps too: not beyond
    this block."""
    found = set(_state._on_app_finalizers)
    yield
    _state._on_app_finalizers.clear()
    _state._on_app_finalizers.update(found)
