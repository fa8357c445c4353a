"""``doctor``: looks a setup over, and says of everything it finds what it means and what to type."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import click

from .desk import EX_UNAVAILABLE, is_redirection, json_option
from .own import own_queue
from .paper import Sheet, duration, print_json

if TYPE_CHECKING:
    from ..checks import Finding
    from ..redis.keys import ShardKeys
    from ..redis.sync import DelayQueue

__all__ = ["Check", "doctor", "examine"]

ONLY_WARNINGS: Final = 3
SLOW: Final = 0.02
"""Seconds: a round trip that takes longer makes every release late by as much."""
_PINGS: Final = 20
_LOOKED_OVER: Final = 20_000


@dataclass(frozen=True)
class Check:
    """One thing looked at. ``said``: what was seen, when nothing is wrong; ``asked``: whether it could be looked at."""

    name: str
    said: str
    findings: Sequence[Finding] = ()
    asked: bool = True


@click.command()
@click.option("--thorough", is_flag=True, help=f"Look over all jobs, not only the first {_LOOKED_OVER:,} of each kind.")
@json_option
@click.pass_context
def doctor(ctx: click.Context, thorough: bool, as_json: bool) -> None:
    """What is wrong with this setup: what it means, and what to type.

    Looks at: reachability, version, eviction, persistence, role, clock, latency, rights (each command is tried on a key
    of its own), scripts, types of keys, entries and records, shards, release loops. Changes nothing else.

    Exit status: 0 nothing found, 1 problems (jobs can be lost, or are not released), 3 warnings only, 69 Redis cannot
    be reached.
    """
    from ..errors import RedisFault

    own = own_queue(ctx)
    checks: list[Check] = []
    try:
        with own.connect() as queue:
            checks += examine(queue, thorough=thorough)
    except RedisFault as error:  # of a cluster: its client asks the nodes for their slots when it is made
        checks.append(Check("connection", "", [_unreachable(error.__cause__ or error)]))
    found = [finding for check in checks for finding in check.findings]
    if as_json:
        print_json({"checks": [_view(check) for check in checks], "exit": _status(found)})
    else:
        doctor_sheet(own.name, checks).print()
    ctx.exit(_status(found))


def _status(found: Sequence[Finding]) -> int:
    if any(finding.code == "unreachable" for finding in found):
        return EX_UNAVAILABLE
    if any(finding.gravity == "problem" for finding in found):
        return 1
    return ONLY_WARNINGS if found else 0


def _view(check: Check) -> dict[str, Any]:
    return {
        "check": check.name,
        "asked": check.asked,
        "said": check.said,
        "findings": [
            {"code": one.code, "gravity": one.gravity, "meaning": one.meaning, "remedy": one.remedy}
            for one in check.findings
        ],
    }


def doctor_sheet(name: str, checks: Sequence[Check]) -> Sheet:
    """The checks, each with its findings below it."""
    sheet = Sheet()
    sheet.line((f"delay queue {name}", "bold"))
    marks = {"problem": ("problem ", "bold red"), "warning": ("warning ", "bold yellow")}
    for check in checks:
        if not check.findings:
            mark = ("ok      ", "green") if check.asked else ("not asked", "dim")
            sheet.line((f"{mark[0]:<10}", mark[1]), f"{check.name:<17}", check.said)
        for finding in check.findings:
            text, style = marks[finding.gravity]
            sheet.line((f"{text:<10}", style), (check.name, "bold"))
            sheet.text(finding.meaning, indent=10)
            sheet.text(f"→ {finding.remedy}", indent=10, style="cyan")
    found = [finding for check in checks for finding in check.findings]
    problems = sum(finding.gravity == "problem" for finding in found)
    sheet.line("")
    if not found:
        sheet.line(("nothing found", "green"))
    else:
        sheet.line(f"{problems} problems, {len(found) - problems} warnings")
    return sheet


# ------------------------------------------------------------------------------------------------------------- looking


def examine(queue: DelayQueue, *, thorough: bool = False) -> Iterator[Check]:
    """Every check, one after the other; an unreachable Redis is the only one, and so is a part of a cluster."""
    from redis.exceptions import RedisClusterException, RedisError

    try:
        _ask(queue, "TIME")
        part = _part_of_cluster(queue)
    except _NoRight:
        part = None
    except (RedisClusterException, RedisError, OSError) as error:
        yield Check("connection", "", [_unreachable(error)])
        return
    yield Check("connection", "Redis answers")
    if part is not None:
        yield Check("cluster", "", [part])
        return
    replica = False
    for check in _guarded("server", lambda: _server(queue)):
        replica = replica or any(finding.code == "replica" for finding in check.findings)
        yield check
    yield from _guarded("latency", lambda: [_latency(queue)])
    yield from _guarded("rights", lambda: _rights(queue, replica))
    yield from _guarded("scripts", lambda: [_scripts(queue)])
    types = list(_guarded("keys", lambda: [_types(queue)]))
    yield from types
    yield from _guarded("shards", lambda: [_shards(queue)])
    yield from _guarded("loops", lambda: [_loops(queue)])
    if not any(check.findings for check in types):
        limit = 10**12 if thorough else _LOOKED_OVER
        yield from _guarded("records", lambda: [_records(queue, limit)])


def _part_of_cluster(queue: DelayQueue) -> Finding | None:
    from redis.exceptions import ResponseError

    from ..checks import Finding

    for keys in queue._verbs.shards:
        try:
            queue.client.execute_command("TYPE", keys.due)
        except ResponseError as error:
            if is_redirection(error):
                meaning = "this server is one node of a Redis Cluster: what is on the others is not seen from here"
                return Finding("cluster", meaning, "Give --cluster, or set DELAYADAPTERS_CLUSTER=1")
    return None


def _servers(queue: DelayQueue) -> list[tuple[str, ShardKeys, dict[str, Any]]]:
    """How each server that holds shards is called, the first of these, and how to ask just that server.

    Of what is no cluster: the one server, without a name.
    """
    from ..redis.connect import is_cluster

    shards = queue._verbs.shards
    if not is_cluster(queue.client):
        return [("", shards[0], {})]
    found: dict[str, tuple[str, ShardKeys, dict[str, Any]]] = {}
    for keys in shards:
        node = queue.client.get_node_from_key(keys.due)
        found.setdefault(node.name, (f"node {node.name}: ", keys, {"target_nodes": node}))
    return list(found.values())


class _NoRight(Exception):
    """The user may not ask this."""


def _ask(queue: DelayQueue, *words: str | bytes | int, **of: Any) -> Any:
    from redis.exceptions import NoPermissionError, ResponseError

    try:
        return queue.client.execute_command(*words, **of)
    except NoPermissionError as error:
        raise _NoRight from error
    except ResponseError as error:
        if "NOPERM" in str(error) or "unknown command" in str(error).lower():
            raise _NoRight from error
        raise


def _asked_or_none(queue: DelayQueue, *words: str, **of: Any) -> Any:
    try:
        return _ask(queue, *words, **of)
    except _NoRight:
        return None


def _guarded(name: str, checks: Callable[[], Iterable[Check]]) -> Iterator[Check]:
    """What cannot be looked at is a finding of its own, unless it is for want of rights, which are told of already."""
    from redis.exceptions import RedisClusterException, RedisError

    from ..checks import Finding
    from ..errors import PermissionDenied, RedisFault

    try:
        yield from checks()
    except PermissionDenied as error:
        yield Check(name, f"could not look: {type(error).__name__}", asked=False)
    except (RedisFault, RedisClusterException, RedisError, OSError) as error:
        if _is_denial(error):
            yield Check(name, "could not look: this user may not", asked=False)
            return
        meaning = f"could not look, Redis does not do what is asked: {' '.join(str(error).split())}"
        yield Check(name, "", [Finding("fault", meaning, "Put that right first, then call doctor again")])


def _unreachable(error: BaseException) -> Finding:
    from redis.exceptions import AuthenticationError

    from ..checks import Finding

    told = " ".join(str(error).split())
    if isinstance(error, AuthenticationError) or "NOAUTH" in told or "WRONGPASS" in told:
        remedy = "Check user and password: --url redis://user:password@host:port/db"
    else:
        remedy = "Check the server and --url; redis-cli -u URL ping"
    return Finding("unreachable", f"Redis does not answer: {told}. Nothing is scheduled or released", remedy)


def _server(queue: DelayQueue) -> Iterator[Check]:
    from ..checks import QUESTIONS, look

    found: list[Finding] = []
    for server, _, of in _servers(queue):
        before = time.time()
        replies = [_asked_or_none(queue, *question, **of) for question in QUESTIONS]
        # The reply is as old as the half of what the questions took.
        some = look((replies[0], replies[1], replies[2]), (before + time.time()) / 2)
        found += [replace(finding, meaning=server + finding.meaning) for finding in some]
    info, _, clock = replies
    said = {
        "version": f"Redis {info.get('redis_version')}" if info else "",
        "role": str(info.get("role")) if info else "",
        "eviction": f"maxmemory-policy {info.get('maxmemory_policy')}" if info else "",
        "persistence": "append-only file" if info and int(info.get("aof_enabled", 0) or 0) else "",
        "clock": "within a second of this machine's" if clock is not None else "",
    }
    needs = {"clock": "TIME", "persistence": "INFO and CONFIG GET"}
    for name, text in said.items():
        code = "replica" if name == "role" else name
        findings = [finding for finding in found if finding.code == code]
        asked = bool(text) or bool(findings)
        yield Check(name, text or f"this user may not ask ({needs.get(name, 'INFO')})", findings, asked)


def _latency(queue: DelayQueue) -> Check:
    from ..checks import Finding

    taken = []
    try:
        for _ in range(_PINGS):
            began = time.perf_counter()
            _ask(queue, "TIME")
            taken.append(time.perf_counter() - began)
    except _NoRight:
        return Check("latency", "this user may not ask (TIME)", asked=False)
    middle, worst = sorted(taken)[len(taken) // 2], max(taken)
    said = f"a round trip takes {duration(middle)} (of {_PINGS}; worst {duration(worst)})"
    if middle <= SLOW:
        return Check("latency", said)
    remedy = "Run release loops near Redis; look for slow commands: SLOWLOG GET 10"
    return Check("latency", said, [Finding("latency", f"{said}: every release is late by as much", remedy, "warning")])


def _rights(queue: DelayQueue, replica: bool) -> Iterator[Check]:
    from ..checks import Finding
    from ..redis.rights import CHANNEL_ONLY, PRODUCER, RELEASER

    denied, refused = _tried(queue)
    if replica:
        yield Check("writes", "refused: see the role above", asked=False)
    else:
        yield Check("writes", "taken", [_no_writes(*where, names) for where, names in refused.items()])
    user = _asked_or_none(queue, "ACL", "WHOAMI")
    name = user.decode() if isinstance(user, bytes) else str(user or "USER")
    for role, rights, gravity, without in (
        ("producer", PRODUCER, "problem", "it cannot do all of schedule, look, cancel, reschedule"),
        ("releaser", RELEASER, "warning", "a release loop of this user does not work (a producer needs none)"),
    ):
        lacking = sorted((denied & rights) - CHANNEL_ONLY)
        if not lacking:
            yield Check(f"{role} rights", f"user {name} has them")
            continue
        words = " ".join(f"+{command}" for command in lacking)
        yield Check(
            f"{role} rights",
            "",
            [
                Finding(
                    "rights",
                    f"user {name} may not run {', '.join(lacking)} on this queue's keys: {without}",
                    f"ACL SETUSER {name} {words}",
                    gravity,  # type: ignore[arg-type]  # a literal
                )
            ],
        )
    wakes = sorted(denied & CHANNEL_ONLY)
    if not wakes:
        yield Check("wake-ups", "allowed")
        return
    words = " ".join(f"+{command}" for command in wakes)
    meaning = f"user {name} may not {', '.join(wakes)}: jobs can be up to a second late, or are not counted"
    remedy = f"ACL SETUSER {name} {words} &{{{queue.name}:*}}:wake"
    yield Check("wake-ups", "", [Finding("wakes", meaning, remedy, "warning")])


def _tried(queue: DelayQueue) -> tuple[set[str], dict[tuple[str, str], list[str]]]:
    """The commands that this user may not run, and those that a server takes of nobody now, by server and reason."""
    from ..redis.rights import trials

    denied: set[str] = set()
    refused: dict[tuple[str, str], list[str]] = {}
    for server, keys, _ in _servers(queue):
        pipe = queue.client.pipeline(transaction=False)
        tried = trials(keys)
        for trial in tried:
            pipe.execute_command(*trial.words)
        for trial, reply in zip(tried, pipe.execute(raise_on_error=False), strict=True):
            if _is_denial(reply):
                denied.add(trial.name)
            elif code := _refusal(reply):
                refused.setdefault((server, code), []).append(trial.name)
    listener = queue.client.pubsub()
    try:
        listener.subscribe(queue._verbs.shards[0].wake)
        listener.get_message(timeout=2)
    except Exception as error:
        if not _is_denial(error):
            raise
        denied.add("subscribe")
    finally:
        listener.close()
    return denied, refused


def _is_denial(reply: Any) -> bool:
    from redis.exceptions import NoPermissionError

    return isinstance(reply, NoPermissionError) or (isinstance(reply, Exception) and "NOPERM" in str(reply))


_REFUSALS: Final = {
    "OOM": (
        "Redis has reached maxmemory",
        "Give it more (INFO memory says what it uses): CONFIG SET maxmemory BYTES; or let other data go",
    ),
    "MISCONF": (
        "Redis could not save its data to its disk",
        "See its log and CONFIG GET dir; free space or give it its folder back, then BGSAVE. "
        "Until then, if snapshots are what fails: CONFIG SET stop-writes-on-bgsave-error no",
    ),
    "NOREPLICAS": (
        "Redis has fewer replicas than min-replicas-to-write asks for",
        "Bring them back (INFO replication lists those there are), or CONFIG SET min-replicas-to-write 0",
    ),
    "READONLY": ("this server is a read-only replica", "Connect to the primary"),
}
"""How a server's refusal of all writes begins: what it means, what to type."""


def _refusal(reply: Any) -> str | None:
    from redis.exceptions import OutOfMemoryError, ReadOnlyError

    if not isinstance(reply, Exception):
        return None
    # Of these redis-py cuts off how they begin.
    for kind, code in ((OutOfMemoryError, "OOM"), (ReadOnlyError, "READONLY")):
        if isinstance(reply, kind):
            return code
    return next((code for code in _REFUSALS if str(reply).startswith(code)), None)


def _no_writes(server: str, code: str, names: Sequence[str]) -> Finding:
    from ..checks import Finding

    why, remedy = _REFUSALS[code]
    some = ", ".join(sorted(names)[:3]) + (", …" if len(names) > 3 else "")
    meaning = f"{server}{why} and takes no writes ({some}): nothing can be scheduled, and what is due is not released"
    return Finding("writes", meaning, remedy)


def _scripts(queue: DelayQueue) -> Check:
    from redis.exceptions import RedisError

    from ..checks import Finding
    from ..redis.scripts import load, names

    remedy = "Let the server run Lua scripts (no rename-command EVAL, no proxy that forbids them)"
    try:
        queue.client.execute_command("EVAL", "return 1", 1, queue._verbs.shards[0].due)
        for name in names():
            _ask(queue, "SCRIPT", "LOAD", load(name).text)
    except _NoRight:
        return Check("scripts", "this user may not ask (SCRIPT LOAD); not needed to work", asked=False)
    except RedisError as error:
        if _is_denial(error):
            return Check("scripts", "this user may not run any: see the rights above", asked=False)
        if _refusal(error):
            return Check("scripts", "refused: see the writes above", asked=False)
        told = " ".join(str(error).split())
        return Check("scripts", "", [Finding("scripts", f"Redis does not take our scripts: {told}", remedy)])
    return Check("scripts", f"{len(names())} load")


def _types(queue: DelayQueue) -> Check:
    from ..checks import Finding
    from ..redis import commands

    wrong: list[str] = []
    for keys in queue._verbs.shards:
        wrong += commands.list_wrong_types(keys, queue._run(_one(commands.types(keys))))
    if not wrong:
        return Check("keys", "of the right types")
    remedy = "Give this queue another --name, or move the other program's keys away: RENAME KEY OTHER"
    meaning = f"another program writes under this queue's name ({'; '.join(wrong)}): nothing works there"
    return Check("keys", "", [Finding("types", meaning, remedy)])


def _one(request: Any) -> Any:
    return (yield request)


def _shards(queue: DelayQueue) -> Check:
    from ..checks import Finding
    from ..redis.steering import beyond

    count = len(queue._verbs.shards)
    extra = queue._run(beyond(queue._verbs))
    if extra is None:
        return Check("shards", str(count))
    meaning = f"the queue has more than {count} shards ({extra} is there): what is in those is not seen from here"
    return Check("shards", "", [Finding("shards", meaning, "Give --shards as the queue's users do")])


def _loops(queue: DelayQueue) -> Check:
    from ..checks import Finding

    loops = queue.loops()
    stats = queue.stats()
    alive = [loop for loop in loops if loop.alive]
    shards = len(queue._verbs.shards)
    unserved = set(range(shards)) - {loop.shard for loop in alive}
    if unserved:
        where = "" if shards == 1 else f" of shard {', '.join(map(str, sorted(unserved)))}"
        last = min((loop.seen_ago for loop in loops), default=None)
        seen = f"the last one was heard of {duration(last)} ago" if last is not None else "none was ever heard of"
        waiting = f"{stats.waiting:,} jobs wait" if stats.waiting else "nothing waits yet"
        remedy = "Start a worker, or: celery -A APP delay run | taskiq delay-release APP:broker | delayadapters arq …"
        meaning = f"no release loop{where} is alive ({seen}; {waiting}): nothing is released"
        return Check("loops", "", [Finding("loops", meaning, remedy, "problem" if stats.waiting else "warning")])
    late = []
    if stats.oldest_overdue > 5:
        meaning = (
            f"{stats.due:,} jobs are due and the oldest has been for {duration(stats.oldest_overdue)}: "
            "the loops do not keep up, or the broker does not take them"
        )
        late = [Finding("overdue", meaning, "Look at the loops' logs and at the broker; start more loops", "warning")]
    watching = sum(loop.watching for loop in alive)
    said = f"{len(alive)} alive, {watching} watching"
    silent = len(loops) - len(alive)
    return Check("loops", said + (f", {silent} gone without a word" if silent else ""), late)


def _records(queue: DelayQueue, limit: int) -> Check:
    from ..checks import Finding
    from ..redis.steering import disagreements, orphans

    found = queue._run(disagreements(queue._verbs, limit))
    lost = list(found.lost)
    findings = []
    if lost:
        some = ", ".join(lost[:3]) + (", …" if len(lost) > 3 else "")
        meaning = f"{len(lost):,} entries have no record of their own ({some}): they are dropped when they are due"
        remedy = "Keys were edited by hand or restored in part. Schedule those jobs again: delayadapters show ID"
        findings.append(Finding("lost", meaning, remedy))
    unseen = queue._run(orphans(queue._verbs, limit)) if found.unseen else []
    if unseen:
        some = ", ".join(unseen[:3]) + (", …" if len(unseen) > 3 else "")
        meaning = f"{len(unseen):,} records have no entry ({some}): they take memory and are never released"
        findings.append(Finding("unseen", meaning, _delete(queue, unseen), "warning"))
    return Check("records", f"{found.looked_at:,} entries agree with their records", findings)


def _delete(queue: DelayQueue, ids: Sequence[str]) -> str:
    """What to type: a record is in the hash of its id's shard."""
    from ..redis.keys import shard_of

    shards = queue._verbs.shards
    by_key: dict[str, list[str]] = {}
    for id in ids:
        keys = shards[shard_of(id.encode(errors="replace"), len(shards))]
        by_key.setdefault(keys.entries.decode(), []).append(id)
    if len(by_key) == 1:
        return f"HDEL {next(iter(by_key))} ID, for each"
    of = {key: f"{', '.join(some[:3])}{', …' if len(some) > 3 else ''}" for key, some in sorted(by_key.items())}
    return "; ".join(f"HDEL {key} ID, for each of {some}" for key, some in of.items())
