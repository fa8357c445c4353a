"""Runs Celery's own tests twice: as they are, and with our fixup in every app; prints counts and every difference.

    tests/peers/celery_suite.py [--only stock|ours] [pytest arguments…]

Its unit tests of tasks and of the app, and its integration tests of tasks and of canvas against a real Redis and a
prefork worker. See ``suite.py``.
"""

from __future__ import annotations

from celery import __version__
from suite import Peer, main

EXPLAINED: dict[str, str] = {}

if __name__ == "__main__":
    main(
        Peer(
            "celery",
            __version__,
            EXPLAINED,
            paths=("t/unit/tasks", "t/unit/app", "t/integration/test_tasks.py", "t/integration/test_canvas.py"),
            options=("--tb=short", "--timeout=120", "-p", "no:warnings", "-p", "no:cacheprovider"),
        )
    )
