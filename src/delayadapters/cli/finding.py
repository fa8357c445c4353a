"""``queues``: the delay queues that a Redis holds. The adapters' default names are not obvious."""

from __future__ import annotations

import re
from typing import Any

import click

from .desk import OTHER_NODE, DelayRedisAway, errors_told, json_option
from .own import own_queue
from .paper import Sheet, cut, print_json, table

__all__ = ["find_queues", "queues"]

_KEY = re.compile(rb"^\{([^{}]+):(\d+)\}:(?:due|leased|dead|entries|seq|loops|watch|counts)$")


@click.command()
@json_option
@click.pass_context
def queues(ctx: click.Context, as_json: bool) -> None:
    """The delay queues of this Redis, found by SCAN: their names, shards and what waits."""
    own = own_queue(ctx)
    views: list[dict[str, Any]] = []
    with errors_told(), own.connect() as anyone:
        if not own.cluster and _is_node(anyone.client):
            raise DelayRedisAway(OTHER_NODE)
        found = find_queues(anyone.client)
        for name, shards in sorted(found.items()):
            with own.connect(name, shards) as queue:
                stats, loops = queue.stats(), queue.loops()
            views.append(
                {
                    "name": name,
                    "shards": shards,
                    "waiting": stats.waiting,
                    "due": stats.due,
                    "leased": stats.leased,
                    "dead": stats.dead,
                    "loops": sum(loop.alive for loop in loops),
                }
            )
    if as_json:
        print_json(views)
        return
    if not views:
        click.echo("no delay queues on this Redis")
        return
    sheet = Sheet()
    rows = [["NAME", "SHARDS", "WAITING", "DUE", "DEAD", "LOOPS"]]
    for view in views:
        counts = (f"{view[word]:,}" for word in ("shards", "waiting", "due", "dead", "loops"))
        rows.append([cut(view["name"], 40), *counts])
    for number, line in enumerate(table(rows)):
        sheet.line((line, "" if number else "bold"))
    sheet.print()


def _is_node(client: Any) -> bool:
    """Whether the server is a cluster's, where SCAN finds what is on this node. False: or we may not ask."""
    from redis.exceptions import RedisError

    try:
        return bool(client.info("cluster").get("cluster_enabled"))
    except RedisError:
        return False  # SCAN will say what is wrong


def find_queues(client: Any) -> dict[str, int]:
    """Name → number of shards, as far as their keys tell.

    Raises:
        RedisFault: SCAN is not allowed, or Redis does not answer.
    """
    from redis.exceptions import RedisClusterException, RedisError

    from ..redis.faults import translate

    found: dict[str, int] = {}
    try:
        for key in client.scan_iter(match="{*:*}:*", count=1000):
            parts = _KEY.match(key if isinstance(key, bytes) else key.encode())
            if parts:
                name = parts[1].decode("utf-8", "replace")
                found[name] = max(found.get(name, 0), int(parts[2]) + 1)
    except (RedisClusterException, RedisError, OSError) as error:
        raise translate(error, "scan", [], maybe_done=False) from error
    return found
