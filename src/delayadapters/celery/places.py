"""Where a Redis is: the delay queue's, the broker's, the result backend's; in redis-py's words.

Celery has spellings of its own (``redis+socket://``, ``CERT_REQUIRED``), and Sentinel is several addresses and a name::

    broker_url = "sentinel://:password@h1:26379/0;sentinel://h2:26379/0"
    broker_transport_options = {"master_name": "mymaster"}

``delayadapters_redis_url`` takes the same form; ``?master_name=mymaster`` then names the master, and without it the
broker's own option does.

``?credential_provider=package.module.Class`` is kombu's and Celery's way to passwords that change (AWS IAM, Entra): a
``redis.credentials.CredentialProvider``, made without arguments, in place of the URL's user and password.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import parse_qs, parse_qsl, quote, unquote, urlencode, urlsplit

from celery import Celery
from celery.exceptions import ImproperlyConfigured
from kombu.utils.imports import symbol_by_name

from ..redis.connect import client_options, try_seconds

if TYPE_CHECKING:
    import redis

__all__ = ["Identity", "RedisPlace", "backend_place", "broker_database", "broker_place", "place_of_setting"]

_SCHEMES: Final = frozenset({"redis", "rediss", "unix"})
_SENTINEL: Final = "sentinel"
_SENTINEL_PORT: Final = 26379
_LOOPBACK: Final = frozenset({"localhost", "127.0.0.1", "::1"})


class Identity(NamedTuple):
    """Which database on which server, as which user (one may be allowed what another is not)."""

    scheme: str
    address: str
    database: int
    user: str

    def __str__(self) -> str:
        return f"{self.scheme}://{self.user and self.user + '@'}{self.address}/{self.database}"


class RedisPlace(NamedTuple):
    """One Redis. ``options`` are redis-py's, which a URL does not carry (TLS, mostly)."""

    url: str
    """For Sentinel its addresses and the master's name, for people: it is no URL of redis-py's."""
    options: dict[str, Any]
    sentinels: tuple[tuple[str, int], ...] = ()
    master: str = ""

    def client(self, timeout: float) -> redis.Redis:
        """A new client, which connects when it is first used; one silent try ends within ``timeout`` × 0.3 seconds."""
        import redis

        if not self.sentinels:
            return redis.Redis.from_url(self.url, **client_options(timeout, self.options))
        from redis.backoff import NoBackoff
        from redis.retry import Retry
        from redis.sentinel import Sentinel

        options = dict(self.options)
        # Each Sentinel is asked in turn: together they may not take longer than the server itself.
        share = try_seconds(timeout) / len(self.sentinels)
        asking = {"socket_timeout": share, "socket_connect_timeout": share, "retry": Retry(NoBackoff(), 0)}
        sentinel: Any = Sentinel(  # type: ignore[no-untyped-call]  # redis-py's
            list(self.sentinels),
            min_other_sentinels=options.pop("min_other_sentinels", 0),
            sentinel_kwargs={**asking, **(options.pop("sentinel_kwargs", None) or {})},
            **client_options(timeout, options),
        )
        client: redis.Redis = sentinel.master_for(self.master)
        return client

    @property
    def identity(self) -> Identity:
        """What two spellings of one place have in common."""
        if self.sentinels:
            hosts = ",".join(f"{host}:{port}" for host, port in sorted(self.sentinels))
            user = self._provider or self.options.get("username") or ""
            return Identity(_SENTINEL, f"{hosts}/{self.master}", int(self.options.get("db") or 0), user)
        parts = urlsplit(self.url)
        query = parse_qs(parts.query)
        user = self._provider or unquote(parts.username or query.get("username", [""])[0] or "")
        path = unquote(parts.path)
        if parts.scheme == "unix":
            return Identity("unix", path, int(query.get("db", ["0"])[0]), user)
        database = query.get("db", [path.strip("/") or "0"])[0]
        return Identity(parts.scheme, f"{parts.hostname or 'localhost'}:{parts.port or 6379}", int(database), user)

    @property
    def _provider(self) -> str:
        """The name of the class that says who we are, if there is one."""
        kind = type(self.options["credential_provider"]) if "credential_provider" in self.options else None
        return f"{kind.__module__}.{kind.__qualname__}" if kind else ""

    @property
    def local(self) -> bool:
        """Whether its address means this machine, whatever any name server says."""
        if self.sentinels:
            return False
        parts = urlsplit(self.url)
        return parts.scheme == "unix" or (parts.hostname or "localhost") in _LOOPBACK


def place_of_setting(app: Celery, value: Any) -> RedisPlace:
    """The value of ``delayadapters_redis_url``. Raises ImproperlyConfigured for one that is none."""
    scheme = urlsplit(value).scheme if isinstance(value, str) else None
    if scheme in _SCHEMES:
        return _with_provider(RedisPlace(str(value), {}))
    if scheme == _SENTINEL:
        connection = app.connection_for_write()
        options = dict(connection.transport_options or {}) if _is_sentinel(connection) else {}
        return _sentinel_place(str(value).split(";"), options, "delayadapters_redis_url")
    shown = value.split("@")[-1] if isinstance(value, str) else repr(value)
    raise ImproperlyConfigured(
        f"delayadapters_redis_url must be a redis://, rediss://, unix:// or sentinel:// URL; got {shown}"
    )


def broker_place(app: Celery) -> RedisPlace | None:
    """The broker's Redis; None when it is no Redis."""
    connection = app.connection_for_write()
    if connection.get_transport_cls().driver_type != "redis":
        return None
    transport_options: Mapping[str, Any] = connection.transport_options or {}
    options: dict[str, Any] = {}
    if transport_options.get("client_name"):
        options["client_name"] = transport_options["client_name"]
    if transport_options.get("socket_keepalive") is not None:
        options["socket_keepalive"] = transport_options["socket_keepalive"]
    database = broker_database(connection)
    if _is_sentinel(connection):
        if connection.ssl:
            options.update(connection.ssl if isinstance(connection.ssl, Mapping) else {}, ssl=True)
        urls = list(connection.alt or ()) or [f"sentinel://{connection.hostname}:{connection.port or _SENTINEL_PORT}"]
        given = {
            "username": connection.userid or None, "password": connection.password or None, "db": database, **options,
            "credential_provider": getattr(connection, "credential_provider", None),
        }  # fmt: skip
        return _sentinel_place(urls, transport_options, "the broker's broker_transport_options", given)
    host = connection.hostname or "127.0.0.1"
    credentials = _credentials(connection.userid, connection.password)
    if "://" in host:  # kombu's form of redis+socket:///path
        parts = urlsplit(host)
        credentials = credentials or _credentials(parts.username, parts.password)
        path = unquote(parts.path) or "/" + (parts.netloc or "")
        provider = parse_qs(parts.query).get("credential_provider", [None])[0]
        return _with_provider(RedisPlace(f"unix://{credentials}{path}?db={database}", options), provider)
    secure = bool(connection.ssl) or connection.transport_cls == "rediss"
    if secure and isinstance(connection.ssl, Mapping):
        options.update(connection.ssl)
    scheme = "rediss" if secure else "redis"
    shown = f"[{host}]" if ":" in host else host
    place = RedisPlace(f"{scheme}://{credentials}{shown}:{connection.port or 6379}/{database}", options)
    return _with_provider(place, getattr(connection, "credential_provider", None))


def backend_place(app: Celery) -> RedisPlace | None:
    """The result backend's Redis, from its URL; None when it is no Redis."""
    url = app.conf.result_backend
    if not isinstance(url, str):
        return None
    scheme = urlsplit(url).scheme
    provider = app.conf.get("redis_backend_credential_provider")
    if scheme in ("redis", "rediss"):
        options: dict[str, Any] = {}
        if scheme == "rediss" and isinstance(app.conf.redis_backend_use_ssl, Mapping):
            options.update(app.conf.redis_backend_use_ssl)
        # Celery's spelling of ssl_cert_reqs (celery/backends/redis.py), in redis-py's
        for name in ("required", "optional", "none"):
            url = url.replace(f"ssl_cert_reqs=CERT_{name.upper()}", f"ssl_cert_reqs={name}")
        return _with_provider(RedisPlace(url, options), provider)
    if scheme in ("socket", "redis+socket"):
        parts = urlsplit(url)
        query = parse_qs(parts.query)
        database = query.get("virtual_host", ["0"])[0].strip("/") or "0"
        credentials = f"{parts.netloc.rsplit('@', 1)[0]}@" if "@" in parts.netloc else ""
        place = RedisPlace(f"unix://{credentials}{parts.path}?db={database}", {})
        return _with_provider(place, query.get("credential_provider", [provider])[0])
    if scheme == _SENTINEL:
        return _sentinel_place(
            url.split(";"), app.conf.result_backend_transport_options or {}, "result_backend_transport_options"
        )
    return None


def broker_database(connection: Any) -> int:
    """kombu/transport/redis.py, ``_prepare_virtual_host``: the database as a number, 0 when there is none."""
    host = connection.virtual_host
    if "://" in (connection.hostname or ""):
        host = parse_qs(urlsplit(connection.hostname).query).get("virtual_host", [host])[0]
    return _number(host)


def _is_sentinel(connection: Any) -> bool:
    return bool(connection.get_transport_cls().__name__.startswith("Sentinel"))


def _sentinel_place(
    urls: list[str], transport_options: Mapping[str, Any], where: str, given: Mapping[str, Any] | None = None
) -> RedisPlace:
    """Of URLs as kombu has them: only those with the scheme are Sentinels, the first one has what is not an address."""
    parts = [found for found in map(urlsplit, urls) if found.scheme == _SENTINEL]
    sentinels = tuple((part.hostname or "localhost", part.port or _SENTINEL_PORT) for part in parts)
    query = {key: value for part in parts for key, value in parse_qsl(part.query)}
    master = query.get("master_name") or transport_options.get("master_name")
    if not master:
        raise ImproperlyConfigured(
            f"a Redis behind Sentinel needs its master's name: master_name in {where}"
            + (", as in sentinel://host:26379/0?master_name=mymaster" if "url" in where else "")
        )
    options: dict[str, Any] = dict(given or ())
    if given is None:
        first = parts[0]
        options = {
            "username": unquote(first.username or "") or None,
            "password": unquote(first.password or "") or None,
            "db": _number(first.path),
        }
    provider = query.get("credential_provider") or options.pop("credential_provider", None)
    if provider:
        options = {**_without_password(options), "credential_provider": _provider(provider)}
    for name in ("min_other_sentinels", "sentinel_kwargs"):
        if transport_options.get(name):
            options[name] = transport_options[name]
    shown = ",".join(f"{host}:{port}" for host, port in sentinels)
    return RedisPlace(f"sentinel://{shown}/{options['db']}?master_name={quote(master)}", options, sentinels, master)


def _with_provider(place: RedisPlace, provider: Any = None) -> RedisPlace:
    """The place with the credential provider that its URL names, else this one, in place of user and password."""
    parts = urlsplit(place.url)
    query = dict(parse_qsl(parts.query, keep_blank_values=True))
    provider = query.pop("credential_provider", None) or provider
    if not provider:
        return place
    rest = urlencode(_without_password(query))
    address = parts.netloc.rpartition("@")[2]
    url = f"{parts.scheme}://{address}{parts.path}{'?' if rest else ''}{rest}"
    return RedisPlace(url, {**_without_password(place.options), "credential_provider": _provider(provider)})


def _without_password(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name not in ("username", "password")}


def _provider(given: Any) -> Any:
    """As ``_process_credential_provider`` makes it of a name (kombu/transport/redis.py)."""
    from redis.credentials import CredentialProvider

    try:
        made: Any = given
        if isinstance(given, str):
            made = symbol_by_name(given)()  # type: ignore[no-untyped-call]  # kombu's
    except (ImportError, AttributeError, ValueError) as error:
        raise ImproperlyConfigured(f"the credential provider {given!r} cannot be imported: {error}") from error
    if not isinstance(made, CredentialProvider):
        raise ImproperlyConfigured(f"{given!r} is no redis.credentials.CredentialProvider")
    return made


def _number(database: Any) -> int:
    try:
        return int(str(database or "0").strip("/") or 0)
    except ValueError as error:
        raise ImproperlyConfigured(f"the broker's Redis database must be a number, got {database!r}") from error


def _credentials(user: str | None, password: str | None) -> str:
    if not user and not password:
        return ""
    return f"{quote(user or '', safe='')}:{quote(password or '', safe='')}@"
