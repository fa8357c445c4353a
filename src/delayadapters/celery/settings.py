"""The settings, read from the app's own configuration, and the queue which they describe.

====================================  ================================================================================
``delayadapters_redis_url``           the Redis to wait in; default: the broker, else the result backend, when Redis
                                      (Sentinel: see :mod:`.places`)
``delayadapters_name``                the queue's name; default: see :func:`default_name`
``delayadapters_min_delay``           seconds; shorter delays stay Celery's own. Default 1.0, and 0 with quorum queues
``delayadapters_on_unavailable``      ``"raise"`` (default) or ``"native"``: what becomes of a delayed task while the
                                      delay Redis refuses it
``delayadapters_embed``               run a release loop in each worker (default true)
``delayadapters_metrics_port``        where a worker's loop serves metrics; default: nowhere. See :mod:`.metrics`
``delayadapters_metrics_host``        the address to listen on (default 127.0.0.1)
``delayadapters_direct``              release inside Redis where the broker is that Redis, see :mod:`.direct` (default
                                      true)
====================================  ================================================================================

With ``namespace="CELERY"`` they are ``CELERY_DELAYADAPTERS_REDIS_URL`` and so on. Redis' address and name are read
when the queue is first used, the others at every call.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

from celery import Celery
from celery.app.base import PendingConfiguration
from celery.exceptions import ImproperlyConfigured

from .places import RedisPlace, backend_place, broker_database, broker_place, place_of_setting

if TYPE_CHECKING:
    from .queue import TaskQueue

__all__ = ["Settings", "default_name", "make_queue"]

DEFAULT_MIN_DELAY: Final = 1.0
SCHEDULE_TIMEOUT: Final = 10.0
"""Seconds within which scheduling has succeeded or raised, retries included."""

_TRUE: Final = frozenset({"1", "true", "yes", "on"})
_FALSE: Final = frozenset({"0", "false", "no", "off", ""})


class Settings:
    """The app's settings, checked. A bad value raises ``ImproperlyConfigured`` naming the setting."""

    def __init__(self, app: Celery) -> None:
        self._app = app

    def _get(self, name: str) -> Any:
        """The value, None when it is not set. Names are in the app's namespace, or plain; in lower or upper case.

        ``conf.get`` would find the same, but takes 5 µs to find nothing, and this is asked for every delayed task.
        """
        conf = self._app.conf
        # It is read when first asked for something. (app.configured is true already while another thread reads it.)
        if isinstance(conf.maps[0], PendingConfiguration):
            conf.finalize()
        spellings = _spellings(name, conf.prefix)
        for mapping in conf.maps[:-1]:  # the last one holds Celery's defaults
            for key in spellings:
                try:
                    return mapping[key]
                except KeyError:
                    continue
        return None

    def passes_natively(self, seconds: float) -> bool:
        """Whether a delay is so short that it is left to Celery; one that is over already always is."""
        value = self._get("min_delay")
        if seconds <= 0:
            return True
        if value is None:  # asking for quorum queues makes the broker's transport: only when it matters
            return seconds < DEFAULT_MIN_DELAY and not uses_quorum_queues(self._app)
        return seconds < self._seconds(value)

    @property
    def min_delay(self) -> float:
        """Seconds; a shorter delay is passed to Celery as it is."""
        value = self._get("min_delay")
        if value is None:
            return 0.0 if uses_quorum_queues(self._app) else DEFAULT_MIN_DELAY
        return self._seconds(value)

    @staticmethod
    def _seconds(value: Any) -> float:
        try:
            seconds = float(value)
        except (TypeError, ValueError):
            seconds = math.nan
        if not (math.isfinite(seconds) and seconds >= 0):
            raise ImproperlyConfigured(f"delayadapters_min_delay must be seconds, 0 or more; got {value!r}")
        return seconds

    @property
    def native_when_unavailable(self) -> bool:
        """Whether a task that the delay Redis does not take goes to Celery's own countdown."""
        value = self._get("on_unavailable")
        if value in (None, "raise"):
            return False
        if value == "native":
            return True
        raise ImproperlyConfigured(f'delayadapters_on_unavailable must be "raise" or "native"; got {value!r}')

    @property
    def embed(self) -> bool:
        """Whether workers run a release loop."""
        return self._switch("embed")

    @property
    def direct(self) -> bool:
        """Whether jobs for a broker on the delay queue's own Redis are released without kombu, where that is right."""
        return self._switch("direct")

    def _switch(self, name: str) -> bool:
        value = self._get(name)
        if value is None or isinstance(value, bool):
            return value is not False
        text = str(value).strip().lower()
        if text in _TRUE or text in _FALSE:
            return text in _TRUE
        raise ImproperlyConfigured(f"delayadapters_{name} must be true or false; got {value!r}")

    @property
    def name(self) -> str:
        """The queue's name."""
        value = self._get("name")
        if value is None:
            return default_name(self._app)
        if not isinstance(value, str) or not value:
            raise ImproperlyConfigured(f"delayadapters_name must be a non-empty string; got {value!r}")
        return value

    @property
    def redis(self) -> RedisPlace:
        """The Redis to wait in."""
        value = self._get("redis_url")
        if value is not None:
            return place_of_setting(self._app, value)
        found = broker_place(self._app) or backend_place(self._app)
        if found is None:
            raise ImproperlyConfigured(
                "neither the broker nor the result backend is a Redis that delayed tasks could wait in: "
                'set delayadapters_redis_url, for example "redis://localhost:6379/0"'
            )
        return found


@lru_cache(maxsize=64)
def _spellings(name: str, prefix: str | None) -> tuple[str, ...]:
    plain = f"delayadapters_{name}"
    spellings: tuple[str, ...] = (plain, plain.upper())
    if prefix:  # "CELERY_" for namespace="CELERY" (celery/utils/collections.py, ConfigurationView)
        prefixed = prefix + plain
        spellings = (prefixed.upper() if prefix.isupper() else prefixed, *spellings)
    return spellings


def make_queue(app: Celery, *, timeout: float | None = None) -> TaskQueue:
    """A new queue with a client of its own, as the app's settings say. Opens no connection yet.

    ``timeout``: seconds within which a verb answers or raises; default SCHEDULE_TIMEOUT.
    """
    from .queue import TaskQueue

    settings = Settings(app)
    seconds = SCHEDULE_TIMEOUT if timeout is None else timeout
    return TaskQueue.of(app, settings.redis.client(seconds), settings.name, seconds)


def default_name(app: Celery) -> str:
    """``delayadapters:celery:<transport>:<virtual host>[:<global_keyprefix>]``.

    A queue belongs to a broker: what tells two brokers on one server apart is in the name, and nothing that may
    differ between the processes of one application (the app's own name, host names, credentials). Applications whose
    brokers differ only by server need different ``delayadapters_name`` if they share one Redis for their delays.
    """
    connection = app.connection_for_write()
    kind = connection.transport.driver_type or "kombu"
    if kind == "redis":
        host = str(broker_database(connection))
    else:
        host = connection.virtual_host or "/"
    prefix = (connection.transport_options or {}).get("global_keyprefix") or ""
    parts = ["delayadapters", "celery", kind, quote(host, safe="/.-_")]
    if prefix:
        parts.append(quote(prefix, safe="/.-_"))
    return ":".join(parts)


def uses_quorum_queues(app: Celery) -> bool:
    """Whether Celery would delay through RabbitMQ's native delayed delivery, which refuses fractions of a second."""
    from celery.utils.quorum_queues import detect_quorum_queues

    return bool(detect_quorum_queues(app, app.producer_pool.connections.connection.transport.driver_type)[0])
