"""pytest plugin for Celery's own tests: a Redis server for them and, with CELERY_SUITE=ours, our fixup in every app.

The tests that need a broker get one by Celery's own environment variables; the apps of the others talk to kombu's
memory transport, and then delayed tasks wait in the same server. Every delay is ours, however short.
"""

from __future__ import annotations

import atexit
import functools
import os
import sys
from typing import Any

from celery import Celery
from celery.exceptions import ImproperlyConfigured

from delaytests import RedisServer

server = RedisServer(aof="no").start()
atexit.register(server.close)
os.environ |= {
    "TEST_BROKER": server.url,
    "TEST_BACKEND": server.url.replace("/0", "/1"),
    "REDIS_HOST": server.host,
    "REDIS_PORT": str(server.port),
}

if os.environ["CELERY_SUITE"] == "stock":
    # The celery command imports what is in its entry points, and ours adds ``inspect delayed``.
    sys.modules["delayadapters.celery.command"] = None  # type: ignore[assignment]
else:
    from delayadapters.celery import install, settings

    plain = Celery.__init__
    configured: Any = settings.Settings.redis.fget  # type: ignore[attr-defined]
    elsewhere = Celery(broker=server.url, set_as_current=False)

    @functools.wraps(plain)
    def init(self: Celery, *arguments: Any, **options: Any) -> None:
        plain(self, *arguments, **options)
        install(self)

    def redis(self: settings.Settings) -> Any:
        try:
            return configured(self)
        except ImproperlyConfigured:  # the memory transport
            return configured(settings.Settings(elsewhere))

    Celery.__init__ = init
    settings.DEFAULT_MIN_DELAY = 0.0  # type: ignore[misc]
    settings.Settings.redis = property(redis)  # type: ignore[method-assign, assignment]
