"""What the adapter knows of brokers: their kind, a queue's default name, the commands of a direct release.

Nothing here imports a broker package: a broker that is here has had its package imported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final
from urllib.parse import quote, unquote, urlsplit

import redis.asyncio
from redis.asyncio.connection import BlockingConnectionPool, ConnectionPool
from redis.asyncio.sentinel import SentinelConnectionPool
from taskiq import AsyncBroker, InMemoryBroker
from taskiq.brokers.shared_broker import AsyncSharedBroker

from ..jobs import Command, Payload
from ..redis.aio import AsyncDelayQueue
from ..redis.connect import client_options, try_seconds

__all__ = [
    "default_name",
    "direct_commands",
    "is_in_memory",
    "needs_startup",
    "own_queue",
    "queue_of",
    "refuse",
    "same_address",
    "same_server",
    "workers_send",
]

_KINDS: Final = {
    "ListQueueBroker": "list",
    "ListQueueSentinelBroker": "list",
    "ListQueueClusterBroker": "list",
    "RedisStreamBroker": "stream",
    "RedisStreamSentinelBroker": "stream",
    "RedisStreamClusterBroker": "stream",
    "PubSubBroker": "pubsub",
    "PubSubSentinelBroker": "pubsub",
    "AioPikaBroker": "rabbitmq",
}
_PACKAGES: Final = ("taskiq_redis", "taskiq_aio_pika")
_DIRECT: Final = ("list", "stream")


def known_class(broker: AsyncBroker) -> type | None:
    """The broker class of taskiq-redis or taskiq-aio-pika that this one is, or derives from."""
    for cls in type(broker).__mro__:
        if cls.__name__ in _KINDS and cls.__module__.partition(".")[0] in _PACKAGES:
            return cls
    return None


def kind_of(broker: AsyncBroker) -> str:
    """``list``, ``stream``, ``pubsub``, ``rabbitmq``, ``memory``, or the class's name."""
    known = known_class(broker)
    if known is not None:
        return _KINDS[known.__name__]
    return "memory" if is_in_memory(broker) else type(broker).__name__


def is_in_memory(broker: AsyncBroker) -> bool:
    return isinstance(broker, InMemoryBroker)


def needs_startup(broker: AsyncBroker) -> bool:
    """Whether nothing at all can be sent before ``startup()``; taskiq-redis's brokers connect when first used."""
    return kind_of(broker) in ("memory", "rabbitmq")


def workers_send(broker: AsyncBroker) -> bool:
    """False for ZeroMQBroker, whose workers only subscribe."""
    return not any(cls.__name__ == "ZeroMQBroker" for cls in type(broker).__mro__)


def refuse(broker: AsyncBroker, *, embed_in_client: bool) -> None:
    """Raises TypeError for a broker that delayed tasks cannot be released into."""
    if isinstance(broker, AsyncSharedBroker):
        raise TypeError(
            "DelayMiddleware cannot work on the shared broker, which sends nothing itself; add it to the broker that "
            "shared tasks are sent through: async_shared_broker.default_broker(broker), or kicker().with_broker(broker)"
        )
    if not workers_send(broker) and not embed_in_client:
        raise TypeError(
            "ZeroMQBroker's workers cannot send, so they cannot release delayed tasks either; pass "
            "DelayMiddleware(..., embed_in_client=True) and keep the client process running"
        )


# ------------------------------------------------------------------------------------------------ names


def default_name(broker: AsyncBroker) -> str:
    """``delayadapters:taskiq:<kind>:<what tells two brokers on one server apart>``.

    A queue belongs to a broker, for a released message does not carry its broker's queue. Nothing that may differ
    between the processes of one application is in the name (host names, credentials). Brokers that differ only by
    server need different ``name``s if they share one Redis for their delays.
    """
    kind = kind_of(broker)
    parts = ["delayadapters", "taskiq", kind]
    if kind == "rabbitmq":
        parts += _rabbitmq_parts(broker)
    elif kind in ("list", "stream", "pubsub"):
        parts += [str(_database(broker)), str(broker.queue_name)]  # type: ignore[attr-defined]
    elif kind != "memory":
        queue = getattr(broker, "queue_name", None)
        parts += [queue] if isinstance(queue, str) and queue else []
    return ":".join(quote(part, safe="/.-_") for part in parts)


def _rabbitmq_parts(broker: Any) -> list[str]:
    path = urlsplit(broker.url or "").path.lstrip("/")
    host = broker._conn_kwargs.get("virtualhost") or unquote(path) or "/"
    queues = sorted({queue.name for queue in broker._task_queues}) or ["taskiq"]
    return [str(host), str(broker._exchange.name), "+".join(queues)]


def _database(broker: Any) -> int:
    if (pool := getattr(broker, "connection_pool", None)) is not None:
        return int(pool.connection_kwargs.get("db") or 0)
    if (sentinel := getattr(broker, "sentinel", None)) is not None:
        return int(sentinel.connection_kwargs.get("db") or 0)
    return 0


# ------------------------------------------------------------------------------------------------ the delays' Redis


def own_queue(broker: Any, name: str, shards: int, timeout: float, options: Mapping[str, Any]) -> AsyncDelayQueue:
    """A queue on the broker's own Redis.

    Raises:
        TypeError: the broker has none.
    """
    known = known_class(broker) is not None
    owned = True
    client: Any
    if known and isinstance(pool := getattr(broker, "connection_pool", None), ConnectionPool):
        kwargs = {k: v for k, v in pool.connection_kwargs.items() if k not in ("max_connections", "timeout")}
        kwargs |= client_options(timeout, dict(options), asynchronous=True)
        kwargs["decode_responses"] = False
        client = redis.asyncio.Redis(connection_pool=ConnectionPool(connection_class=pool.connection_class, **kwargs))
    elif known and (sentinel := getattr(broker, "sentinel", None)) is not None:
        # Ours are another matter than the broker's, which may wait without end.
        kwargs = {**client_options(timeout, dict(options), asynchronous=True), "decode_responses": False}
        client = sentinel.master_for(broker.master_name, **kwargs)
    elif known and (cluster := getattr(broker, "redis", None)) is not None:
        client, owned = cluster, False
    else:
        raise TypeError(
            f"{type(broker).__name__} has no Redis of its own: say where delayed tasks shall wait, "
            'DelayMiddleware("redis://host:6379/0")'
        )
    queue = AsyncDelayQueue(client, name=name, shards=shards, max_payload=None)
    queue._owned, queue._bound = owned, timeout
    queue._try = try_seconds(timeout) if owned else 0.0
    return queue


def same_server(broker: Any, queue: AsyncDelayQueue) -> bool:
    """Whether the delays wait in the very database that the broker uses: as configured, so an alias of a host is
    another server. On a Redis Cluster they do not: the broker's key is in another slot."""
    theirs: Any = getattr(queue.client, "connection_pool", None)
    if same_address(getattr(broker, "connection_pool", None), theirs):
        return True
    if (sentinel := getattr(broker, "sentinel", None)) is not None and isinstance(theirs, SentinelConnectionPool):
        return (
            theirs.service_name == broker.master_name
            and theirs.is_master
            and int(theirs.connection_kwargs.get("db") or 0) == _database(broker)
            and _sentinels(theirs.sentinel_manager) == _sentinels(sentinel)
        )
    return False


def same_address(one: Any, other: Any) -> bool:
    """Whether two plain connection pools lead to one database."""
    plain = (ConnectionPool, BlockingConnectionPool)
    return (
        type(one) in plain
        and type(other) in plain
        and _address(one.connection_kwargs) == _address(other.connection_kwargs)
    )


def _address(kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    database = int(kwargs.get("db") or 0)
    if kwargs.get("path"):
        return (kwargs["path"], database)
    host = kwargs.get("host") or "localhost"
    return ("127.0.0.1" if host == "localhost" else host, int(kwargs.get("port") or 6379), database)


def _sentinels(manager: Any) -> set[tuple[Any, ...]]:
    return {_address(one.connection_pool.connection_kwargs) for one in manager.sentinels}


# ------------------------------------------------------------------------------------------------ direct release


def queue_of(broker: Any, labels: Mapping[str, Any]) -> str | None:
    """The queue a message goes to, where the broker has such a thing."""
    if kind_of(broker) == "rabbitmq":
        if len(broker._task_queues) <= 1:
            return broker._task_queues[0].name if broker._task_queues else "taskiq"
        name = labels.get(broker._label_for_routing)
    else:
        name = labels.get("queue_name") or getattr(broker, "queue_name", None)
    return str(name) if name else None


def direct_commands(broker: Any, labels: Mapping[str, Any]) -> Sequence[Command] | None:
    """What the broker's ``kick`` would send to Redis; None: only ``kick`` itself knows."""
    known = known_class(broker)
    if known is None or _KINDS[known.__name__] not in _DIRECT or type(broker).kick is not vars(known)["kick"]:
        return None
    key = labels.get("queue_name") or broker.queue_name
    if _KINDS[known.__name__] == "list":
        return [("LPUSH", str(key), Payload.BYTES)]
    words: list[str | Payload] = ["XADD", str(key)]
    if broker.maxlen is not None:
        words += ["MAXLEN", *(["~"] if broker.approximate else []), str(broker.maxlen)]
    return [[*words, "*", "data", Payload.BYTES]]
