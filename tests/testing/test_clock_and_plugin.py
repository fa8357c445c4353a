"""The clock that others follow, what the plugin costs those who do not use it, and that no framework is loaded."""

from __future__ import annotations

import subprocess
import sys
import warnings
from datetime import datetime, timedelta, timezone

import pytest

from delayadapters import ManualClock
from delayadapters.testing import ClockMismatch
from delayadapters.testing.errors import warn_if_passed

pytest_plugins = ["pytester"]
START = datetime(2030, 1, 1, tzinfo=timezone.utc)


def test_others_follow_the_clock() -> None:
    clock, seen = ManualClock(START), []
    clock.follow(seen.append)
    clock.advance(60)
    assert seen == [START, START + timedelta(minutes=1)]
    assert clock.now() == seen[-1]


def test_a_time_that_is_over_here_but_not_on_the_machine_is_warned_of() -> None:
    clock = ManualClock()
    soon = clock.now() + timedelta(hours=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_if_passed(soon, clock, "task")
        warn_if_passed(clock.now() - timedelta(hours=1), clock, "task")
        warn_if_passed(None, clock, "task")
        clock.advance(86_400)
        warn_if_passed(clock.now() + timedelta(hours=1), clock, "task")
    with pytest.warns(ClockMismatch, match=r"task was scheduled for .* delay_clock\.follow\(traveller\.move_to\)"):
        warn_if_passed(soon, clock, "task")


def test_the_plugin_loads_nothing_and_testing_no_framework() -> None:
    code = (
        "import sys, pytest, delayadapters; before = set(sys.modules)\n"
        "import delayadapters.testing.plugin; print(sorted(set(sys.modules) - before))\n"
        "import delayadapters.testing, delayadapters.testing.delayed\n"
        "print([name for name in sys.modules if name.split('.')[0] in ('celery', 'kombu', 'arq', 'taskiq')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    plugin, frameworks = done.stdout.splitlines()
    assert set(eval(plugin)) <= {
        "delayadapters.testing", "delayadapters.testing.plugin", "delayadapters.testing.delayed",
        "delayadapters.testing.errors", "delayadapters.testing.jobs", "delayadapters.testing.verbs",
    }  # fmt: skip
    assert frameworks == "[]"


def test_the_clock_is_a_fixture_and_can_begin_at_another_time(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        test_now="""
            import time

            def test_clock(delay_clock):
                assert abs(delay_clock() - time.time()) < 60
                delay_clock.advance(86_400)
                assert delay_clock() - time.time() > 86_000

            def test_another(delay_clock):
                assert abs(delay_clock() - time.time()) < 60
        """,
        test_then="""
            import datetime
            import pytest
            from delayadapters.testing import ManualClock

            @pytest.fixture
            def delay_clock():
                return ManualClock(datetime.datetime(2030, 1, 1, tzinfo=datetime.timezone.utc))

            def test_clock(delay_clock):
                assert delay_clock.now().year == 2030
        """,
    )
    options = ("-p", "no:cacheprovider", "-o", "asyncio_default_fixture_loop_scope=function")
    pytester.runpytest_inprocess(*options).assert_outcomes(passed=3)
