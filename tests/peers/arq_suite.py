"""Runs arq's own tests twice: on arq, and with our classes in place of its own; prints counts and every difference.

    tests/peers/arq_suite.py [--only stock|ours] [pytest arguments…]

Their container with Redis is replaced by a server of our own (see :class:`RedisContainer` in ``arq_plugin.py``). See
``suite.py`` for the rest.
"""

from __future__ import annotations

from arq.version import VERSION
from suite import Peer, main

EXPLAINED = {
    "test_cli::test_custom_log_dict[None-log_dict_to_use0]": "the default log config also has a delayadapters logger",
    "test_main::test_defer_by": "looks for a deferred job in arq's queue; it waits in the delay queue",
    "test_main::test_defer_until": "looks for a deferred job in arq's queue; it waits in the delay queue",
    "test_worker::test_abort_job_before": "expects abort(timeout=0) to time out; ours aborts an unstarted job at once",
    "test_worker::test_abort_deferred_job_before": "expects abort(timeout=0) to time out; ours aborts it at once",
    **dict.fromkeys(
        (
            "test_worker::test_remain_keys",
            "test_worker::test_remain_keys_keep_results_forever",
            "test_worker::test_remain_keys_keep_results_forever_in_function",
            "test_worker::test_remain_keys_no_results",
            "test_worker::test_set_health_check_key",
        ),
        "expects no key but arq's; a release loop that has stopped is remembered for minutes",
    ),
}

if __name__ == "__main__":
    # The suite was written for redis-py 4; 5 deprecates what it (and arq) calls.
    options = ("--tb=short", "-W", "ignore::DeprecationWarning", "-o", "timeout=60")
    main(Peer("arq", VERSION, EXPLAINED, options=options))
