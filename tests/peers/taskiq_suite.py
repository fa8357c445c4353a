"""Runs taskiq's own tests twice: as they are, and with a DelayMiddleware on every broker; prints counts, differences.

    tests/peers/taskiq_suite.py [--only stock|ours] [pytest arguments…]

taskiq-redis's source distribution has no tests: TASKIQ_REDIS_TESTS may name the ``tests`` folder of a checkout of it,
and they are run too (what needs its cluster or Sentinel is left out). See ``suite.py`` for the rest.
"""

from __future__ import annotations

import os
from importlib.metadata import version
from pathlib import Path

from suite import Peer, main

NEEDS = ("freezegun", "polyfactory", "opentelemetry-test-utils<1", "opentelemetry-instrumentation", "psutil", "pip")
"""What taskiq's tests import; put into the environment when first run."""

_AT_ONCE = "expects SmartRetryMiddleware's 5 s delay to be ignored, by an InMemoryBroker that was not even started"
EXPLAINED = {
    "middlewares.test_task_retry::test_per_task_exc_types_matching[SmartRetryMiddleware]": _AT_ONCE,
    "middlewares.test_task_retry::test_per_task_exc_types_override_global[SmartRetryMiddleware]": _AT_ONCE,
    "middlewares.test_task_retry::test_retry_of_custom_exc_types_of_smart_middleware": _AT_ONCE,
}

if __name__ == "__main__":
    redis_tests = os.environ.get("TASKIQ_REDIS_TESTS")
    main(
        Peer(
            "taskiq",
            version("taskiq"),
            EXPLAINED,
            options=("--tb=native", "-p", "no:asyncio", "-o", "timeout=20", "-k", "not cluster and not sentinel"),
            needs=NEEDS,
            extra={"tests/taskiq_redis_tests": Path(redis_tests)} if redis_tests else {},
        )
    )
