"""Runs Celery's own tests twice: as they are, and with our fixup in every app; prints counts and every difference.

    tests/peers/celery_suite.py [--only stock|ours] [pytest arguments…]

Its unit tests of tasks and of the app, and its integration tests of tasks and of canvas against a real Redis and a
prefork worker. See ``suite.py``.
"""

from __future__ import annotations

from celery import __version__
from suite import Peer, main

_LEVELS = "expects RabbitMQ's levels of delay queues for quorum queues; with us nothing is delayed in the broker"
EXPLAINED = {
    "t.unit.app.test_app.test_App::test_native_delayed_delivery_countdown": _LEVELS,
    "t.unit.app.test_app.test_App::test_native_delayed_delivery__no_queue_arg__with_countdown": _LEVELS,
    "t.unit.app.test_app.test_App::test_native_delayed_delivery_direct_exchange": _LEVELS,
    "t.unit.app.test_app.test_App::test_send_task_with_eta_no_quorum_queues": _LEVELS,
    "t.unit.app.test_beat.test_Scheduler::test_send_task": (
        "puts a mock in place of Celery.send_task and compares every argument; ours hands it a producer, too"
    ),
    "t.unit.tasks.test_tasks.test_tasks::test_regular_task": (
        "expects a task of tomorrow in the broker, with its eta; it waits in the delay queue"
    ),
    "t.integration.test_canvas.test_chord::test_group_or_task_countdown_delays_header": (
        "looks for an eta in task.request; ours is due when it comes, and has a header instead"
    ),
}
"""Tests that fail with the fixup, each because of what is meant to be different."""

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
