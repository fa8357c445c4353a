"""Celery's ``countdown``, ``eta`` and ``retry`` on a delay queue in Redis, instead of in a worker's memory.

::

    from celery import Celery
    from delayadapters.celery import install

    app = Celery("proj", broker="redis://localhost")
    install(app)

That is all: every message with a delay now waits in Redis and is released into the app's own broker when it is due,
by a loop inside the workers or by ``celery -A proj delay run``. ``app.delayadapters`` is the queue.
"""

from __future__ import annotations

from .fixup import install

__all__ = ["install"]
