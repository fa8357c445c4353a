"""doctor on servers of every kind of wrong."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from pathlib import Path

import pytest
import redis

from delayadapters import DelayQueue, RedisFault, Releaser
from delayadapters.cli import doctor
from delayadapters.redis import rights
from delayadapters.redis.keys import ShardKeys, shard_of
from delayadapters.redis.scripts import names
from delaytests import wait_until
from delaytests.raw import keys_of, snapshot
from delaytests.server import free_port

from .conftest import invoke

ACL_PAGE = Path(__file__).parents[2] / "docs" / "reference" / "acl.md"


class Nothing:
    def publish(self, claims):
        return None


def look(url, *arguments, name="delayadapters"):
    """Exit status, and the findings by check."""
    result = invoke("--url", url, "--name", name, "--timeout", "5", "doctor", "--json", *arguments)
    view = json.loads(result.stdout)
    assert view["exit"] == result.exit_code
    found = {one["check"]: [(f["code"], f["gravity"]) for f in one["findings"]] for one in view["checks"]}
    for one in view["checks"]:
        for finding in one["findings"]:
            assert finding["meaning"], finding
            assert finding["remedy"], finding
    return result.exit_code, {check: findings for check, findings in found.items() if findings}, view


@pytest.fixture
def good(start_redis):
    """A server with persistence, and a release loop on it."""
    server = start_redis(aof="everysec")
    with DelayQueue.from_url(server.url) as queue, Releaser(queue, Nothing()):
        wait_until(lambda: any(loop.watching for loop in queue.loops()))
        yield server


def test_a_good_setup(good):
    before = snapshot(good.client())
    code, found, view = look(good.url)
    assert (code, found) == (0, {})
    assert all(check["asked"] for check in view["checks"]), view
    after = snapshot(good.client())
    assert before.keys() == after.keys(), "nothing is left behind"
    shown = invoke("--url", good.url, "doctor")
    assert shown.exit_code == 0
    assert shown.stdout.endswith("nothing found\n")
    assert "1 alive, 1 watching" in shown.stdout


def test_eviction(good):
    good.client().config_set("maxmemory-policy", "allkeys-lru")
    code, found, _ = look(good.url)
    assert (code, found) == (1, {"eviction": [("eviction", "problem")]})
    shown = invoke("--url", good.url, "doctor").stdout
    assert "CONFIG SET maxmemory-policy noeviction" in shown


def test_no_persistence_and_snapshots_only(good):
    client = good.client()
    client.config_set("appendonly", "no")
    assert look(good.url)[:2] == (1, {"persistence": [("persistence", "problem")]})
    client.config_set("save", "3600 1")
    assert look(good.url)[:2] == (3, {"persistence": [("persistence", "warning")]})


def test_a_user_who_lacks_one_command(good):
    admin = good.client()
    admin.execute_command("ACL", "SETUSER", "ops", "on", ">secret", "~*", "&*", "+@all", "-zrem")
    url = good.url.replace("redis://", "redis://ops:secret@")
    code, found, _ = look(url)
    assert code == 1
    assert found.pop("producer rights") == [("rights", "problem")]
    assert found.pop("releaser rights") == [("rights", "warning")]
    assert found == {}
    shown = " ".join(invoke("--url", url, "doctor").stdout.split())
    assert "may not run zrem" in shown
    assert "ACL SETUSER ops +zrem" in shown


def test_a_producer_needs_no_more_than_its_rights(good):
    """With the list of docs/reference/acl.md: a producer is found fault with as a release loop only."""
    [line] = re.findall(r"^ACL SETUSER delay-producer reset .*$", ACL_PAGE.read_text(), re.MULTILINE)
    good.client().execute_command(*line.split())
    code, found, view = look(good.url.replace("redis://", "redis://delay-producer:choose-a-password@"))
    assert (code, found["releaser rights"]) == (3, [("rights", "warning")])
    assert "producer rights" not in found
    not_asked = {check["check"] for check in view["checks"] if not check["asked"]}
    assert {"version", "eviction", "persistence", "scripts"} <= not_asked


def test_without_the_channel_wakes_are_lost(good):
    good.client().execute_command("ACL", "SETUSER", "ops", "on", ">secret", "~*", "resetchannels", "+@all")
    code, found, _ = look(good.url.replace("redis://", "redis://ops:secret@"))
    assert (code, found) == (3, {"wake-ups": [("wakes", "warning")]})


def test_every_command_of_every_script_is_tried():
    """A script that begins to use another command is known here, and by whom it is needed."""
    tried = {trial.name for trial in rights.trials(ShardKeys.of("n", 0))} | {"subscribe", "unsubscribe"}
    assert tried == rights.PRODUCER | rights.RELEASER
    looks = {"inspect"}  # doctor's own
    assert {*rights.PRODUCER_SCRIPTS, *rights.RELEASER_SCRIPTS, "restore"} | looks == set(names())
    for role, user in ((rights.PRODUCER, "delay-producer"), (rights.RELEASER, "delay-releaser")):
        [line] = re.findall(rf"^ACL SETUSER {user} reset .*$", ACL_PAGE.read_text(), re.MULTILINE)
        assert {word[1:] for word in line.split() if word.startswith("+")} == role


def test_a_key_of_another_type(good):
    client = good.client()
    client.sadd("{other:0}:dead", "x")
    code, found, view = look(good.url, name="other")
    assert code == 1
    assert found["keys"] == [("types", "problem")]
    assert "{other:0}:dead: set, expected zset" in json.dumps(view)


def test_an_unreachable_server():
    url = f"redis://127.0.0.1:{free_port()}/0"
    code, found, _ = look(url)
    assert (code, found) == (69, {"connection": [("unreachable", "problem")]})
    shown = invoke("--url", url, "doctor")
    assert shown.exit_code == 69
    assert "Traceback" not in shown.output


def test_a_wrong_password(start_redis):
    server = start_redis(args=["--requirepass", "secret"])
    code, _, view = look(server.url)
    assert code == 69
    assert "Check user and password" in json.dumps(view)


def test_a_replica(good, start_redis):
    replica = start_redis(aof="everysec", args=["--replicaof", good.host, str(good.port)])
    client = replica.client()
    wait_until(lambda: client.info("replication")["master_link_status"] == "up")
    wait_until(lambda: client.exists("{delayadapters:0}:loops"))
    code, found, _ = look(replica.url)
    assert (code, found) == (1, {"role": [("replica", "problem")]})


def test_no_scripts(start_redis):
    server = start_redis(aof="everysec", args=["--rename-command", "EVAL", "", "--rename-command", "EVALSHA", ""])
    code, found, _ = look(server.url)
    assert code == 1
    assert found["scripts"] == [("scripts", "problem")]


def out_of_memory(server):
    server.client().config_set("maxmemory", "1")


def no_replicas(server):
    server.client().config_set("min-replicas-to-write", "1")


def no_disk(server):
    """Its folder is gone when it saves."""
    client = server.client()
    client.config_set("save", "3600 1000000")
    shutil.rmtree(client.config_get("dir")["dir"])
    with contextlib.suppress(redis.ResponseError):  # says so at once, or later
        client.bgsave()
    wait_until(lambda: client.info("persistence")["rdb_last_bgsave_status"] == "err")


@pytest.mark.parametrize(
    ("refuse", "remedy"),
    [
        (out_of_memory, "CONFIG SET maxmemory"),
        (no_replicas, "CONFIG SET min-replicas-to-write 0"),
        (no_disk, "CONFIG SET stop-writes-on-bgsave-error no"),
    ],
)
def test_a_server_that_takes_no_writes(start_redis, tmp_path, refuse, remedy):
    """Whatever its reason is; and nothing else is blamed for it."""
    folder = tmp_path / "data"
    folder.mkdir()
    server = start_redis(aof="everysec", args=["--dir", str(folder)])
    with DelayQueue.from_url(server.url) as queue:
        queue.schedule(b"x", delay=600, id="a")
    refuse(server)
    code, found, view = look(server.url)
    found.pop("loops")
    found.pop("persistence", None)
    assert (code, found) == (1, {"writes": [("writes", "problem")]})
    assert remedy in json.dumps(view)
    with DelayQueue.from_url(server.url, timeout=2) as queue, pytest.raises(RedisFault):
        queue.schedule(b"x", delay=600)


def test_what_redis_does_not_answer_is_a_problem(good):
    """Only what this user may not ask is passed over."""
    with DelayQueue.from_url(good.url) as queue:
        keys = keys_of(queue)
        good.client().delete(keys.loops)
        good.client().set(keys.loops, "a string")
        checks = {check.name: check for check in doctor.examine(queue)}
    assert [finding.code for finding in checks["keys"].findings] == ["types"]
    assert [finding.code for finding in checks["loops"].findings] == ["fault"]
    assert "loops" in checks["loops"].findings[0].meaning


def test_no_loop(start_redis):
    server = start_redis(aof="everysec")
    assert look(server.url)[:2] == (3, {"loops": [("loops", "warning")]})
    with DelayQueue.from_url(server.url) as queue:
        queue.schedule(b"x", delay=60)
    code, found, view = look(server.url)
    assert (code, found) == (1, {"loops": [("loops", "problem")]})
    assert "celery -A APP delay run" in json.dumps(view)


def test_shards_that_were_not_named(good):
    with DelayQueue.from_url(good.url, name="wide", shards=2) as queue:
        for n in range(10):
            queue.schedule(b"x", delay=60, id=f"{n}")
    _, found, _ = look(good.url, name="wide")
    assert found["shards"] == [("shards", "problem")]


@pytest.mark.parametrize("orphaned", [1, 2])
def test_records_without_an_entry_are_in_their_own_shard(good, orphaned):
    """What the remedy says, typed, is the remedy."""
    client = good.client()
    with DelayQueue.from_url(good.url, name="torn", shards=3) as queue:
        ids: dict[int, str] = {}
        for n in range(20):
            ids.setdefault(shard_of(b"%d" % n, 3), f"{n}")
        some = [ids[2], ids[1]][:orphaned]
        for id in some:
            queue.schedule(b"x", delay=600, id=id)
        for shard in range(3):
            client.delete(keys_of(queue, shard).due)
    view = json.loads(invoke("--url", good.url, "--name", "torn", "--shards", "3", "doctor", "--json").stdout)
    [finding] = next(check["findings"] for check in view["checks"] if check["check"] == "records")
    keys = re.findall(r"HDEL (\S+) ID, for each(?: of (\S+?))?(?:;|$)", finding["remedy"])
    assert len(keys) == orphaned
    for key, listed in keys:
        assert client.hdel(key, listed or some[0]) == 1


def test_entries_and_records_that_disagree(good):
    client = good.client()
    with DelayQueue.from_url(good.url, name="torn") as queue:
        keys = keys_of(queue)
        for id in ("lost", "unseen", "swapped", "fine"):
            queue.schedule(b"x", delay=600, id=id)
        queue.schedule(b"x", delay=600, id="fine", if_exists="add")
        assert "records" not in look(good.url, name="torn")[1]
        client.hdel(keys.entries, "lost")
        client.zrem(keys.due, *[entry for entry in client.zrange(keys.due, 0, -1) if entry.endswith(b"unseen")])
        record = client.hget(keys.entries, "swapped")
        client.hset(keys.entries, "swapped", record[:1] + b"\0\0\0\0\1\0" + record[7:])
    _, found, view = look(good.url, name="torn")
    assert found["records"] == [("lost", "problem"), ("unseen", "warning")]
    [check] = [check for check in view["checks"] if check["check"] == "records"]
    told = [finding["meaning"] for finding in check["findings"]]
    assert re.match(r"2 entries .*(lost, swapped|swapped, lost)", told[0])
    assert "unseen" in told[1]
