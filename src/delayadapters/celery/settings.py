"""The settings, read from the app's own configuration, and the queue which they describe.

====================================  ================================================================================
``delayadapters_redis_url``           the Redis to wait in; default: the broker, else the result backend, when Redis
``delayadapters_name``                the queue's name; default: see :func:`default_name`
``delayadapters_min_delay``           seconds; shorter delays stay Celery's own. Default 1.0, and 0 with quorum queues
``delayadapters_on_unavailable``      ``"raise"`` (default) or ``"native"``: what becomes of a delayed task while the
                                      delay Redis refuses it
``delayadapters_embed``               run a release loop in each worker (default true)
``delayadapters_direct``              release inside Redis where the broker is that Redis, see :mod:`.direct` (default
                                      true)
====================================  ================================================================================

With ``namespace="CELERY"`` they are ``CELERY_DELAYADAPTERS_REDIS_URL`` and so on. Redis' address and name are read
when the queue is first used, the others at every call.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, cast
from urllib.parse import parse_qs, quote, unquote, urlsplit

from celery import Celery
from celery.exceptions import ImproperlyConfigured

if TYPE_CHECKING:
    from .queue import TaskQueue

__all__ = ["Settings", "broker_url", "default_name", "make_queue"]

DEFAULT_MIN_DELAY: Final = 1.0
SCHEDULE_TIMEOUT: Final = 10.0
"""Seconds within which scheduling has succeeded or raised, retries included."""

_REDIS_SCHEMES: Final = frozenset({"redis", "rediss", "unix"})
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
        if not self._app.configured:  # it is read when first asked for something
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
    def redis(self) -> tuple[str, dict[str, Any]]:
        """The Redis to wait in: its URL, and options for redis-py that a URL does not carry (TLS, mostly)."""
        value = self._get("redis_url")
        if value is not None:
            return _own_url(value), {}
        found = _broker_redis(self._app) or _backend_redis(self._app)
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
    url, options = settings.redis
    options["timeout"] = SCHEDULE_TIMEOUT if timeout is None else timeout
    # max_payload: Celery has no limit on messages, so neither have we.
    queue = cast("TaskQueue", TaskQueue.from_url(url, name=settings.name, max_payload=None, **options))
    queue.app = app
    return queue


def default_name(app: Celery) -> str:
    """``delayadapters:celery:<transport>:<virtual host>[:<global_keyprefix>]``.

    A queue belongs to a broker: what tells two brokers on one server apart is in the name, and nothing that may
    differ between the processes of one application (the app's own name, host names, credentials). Applications whose
    brokers differ only by server need different ``delayadapters_name`` if they share one Redis for their delays.
    """
    connection = app.connection_for_write()
    kind = connection.transport.driver_type or "kombu"
    if kind == "redis":
        host = str(_redis_db(connection))
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


def _own_url(value: Any) -> str:
    if isinstance(value, str) and urlsplit(value).scheme in _REDIS_SCHEMES:
        return value
    shown = value.split("@")[-1] if isinstance(value, str) else repr(value)
    raise ImproperlyConfigured(f"delayadapters_redis_url must be a redis://, rediss:// or unix:// URL; got {shown}")


def broker_url(app: Celery) -> str:
    """The address of a broker that is a Redis, in redis-py's spelling. Raises ImproperlyConfigured for another one."""
    found = _broker_redis(app)
    if found is None:
        raise ImproperlyConfigured("the broker is not a single Redis server")
    return found[0]


def _broker_redis(app: Celery) -> tuple[str, dict[str, Any]] | None:
    """The broker's Redis. Sentinel brokers have no URL of one server: they need delayadapters_redis_url for now."""
    connection = app.connection_for_write()
    transport = connection.get_transport_cls()
    if transport.driver_type != "redis" or transport.__name__.startswith("Sentinel"):
        return None
    options: dict[str, Any] = {}
    transport_options: Mapping[str, Any] = connection.transport_options or {}
    if transport_options.get("client_name"):
        options["client_name"] = transport_options["client_name"]
    if transport_options.get("socket_keepalive") is not None:
        options["socket_keepalive"] = transport_options["socket_keepalive"]
    database = _redis_db(connection)
    host = connection.hostname or "127.0.0.1"
    credentials = _credentials(connection.userid, connection.password)
    if "://" in host:  # kombu's form of redis+socket:///path
        parts = urlsplit(host)
        credentials = credentials or _credentials(parts.username, parts.password)
        return f"unix://{credentials}{unquote(parts.path) or '/' + (parts.netloc or '')}?db={database}", options
    secure = bool(connection.ssl) or connection.transport_cls == "rediss"
    if secure and isinstance(connection.ssl, Mapping):
        options.update(connection.ssl)
    scheme = "rediss" if secure else "redis"
    shown = f"[{host}]" if ":" in host else host
    return f"{scheme}://{credentials}{shown}:{connection.port or 6379}/{database}", options


def _backend_redis(app: Celery) -> tuple[str, dict[str, Any]] | None:
    """The result backend's Redis, from its URL."""
    url = app.conf.result_backend
    if not isinstance(url, str):
        return None
    scheme = urlsplit(url).scheme
    if scheme in ("redis", "rediss"):
        options: dict[str, Any] = {}
        if scheme == "rediss" and isinstance(app.conf.redis_backend_use_ssl, Mapping):
            options.update(app.conf.redis_backend_use_ssl)
        # Celery's spelling of ssl_cert_reqs (celery/backends/redis.py), in redis-py's
        for name in ("required", "optional", "none"):
            url = url.replace(f"ssl_cert_reqs=CERT_{name.upper()}", f"ssl_cert_reqs={name}")
        return url, options
    if scheme in ("socket", "redis+socket"):
        parts = urlsplit(url)
        database = parse_qs(parts.query).get("virtual_host", ["0"])[0].strip("/") or "0"
        credentials = f"{parts.netloc.rsplit('@', 1)[0]}@" if "@" in parts.netloc else ""
        return f"unix://{credentials}{parts.path}?db={database}", {}
    return None


def _credentials(user: str | None, password: str | None) -> str:
    if not user and not password:
        return ""
    return f"{quote(user or '', safe='')}:{quote(password or '', safe='')}@"


def _redis_db(connection: Any) -> int:
    """kombu/transport/redis.py, ``_prepare_virtual_host``: the database as a number, 0 when there is none."""
    host = connection.virtual_host
    if "://" in (connection.hostname or ""):
        host = parse_qs(urlsplit(connection.hostname).query).get("virtual_host", [host])[0]
    try:
        return int(str(host or "0").strip("/") or 0)
    except ValueError as error:
        raise ImproperlyConfigured(f"the broker's Redis database must be a number, got {host!r}") from error
