"""Every verb on a Redis Cluster of two nodes, each with some of the queue's four shards; and without --cluster."""

from __future__ import annotations

import itertools
import json
import re
import signal
import subprocess
import sys

import pytest
from redis.cluster import RedisCluster

from delayadapters import DelayQueue, NewJob, Releaser
from delaytests import RedisServer, wait_until
from delaytests.server import free_port
from delaytests.topology import cluster_port

from .conftest import invoke

SHARDS = 4
_numbers = itertools.count()


@pytest.fixture(scope="module")
def nodes():
    """Two primaries with half of the slots each."""
    servers = [RedisServer(aof="everysec", port=cluster_port(), args=["--cluster-enabled", "yes"]) for _ in range(2)]
    try:
        one, other = (server.start().client() for server in servers)
        for epoch, client in enumerate((one, other)):
            client.execute_command("CLUSTER", "ADDSLOTS", *range(epoch * 8192, (epoch + 1) * 8192))
            client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", epoch + 1)
        one.execute_command("CLUSTER", "MEET", "127.0.0.1", servers[1].port)
        wait_until(lambda: all(ok(server) for server in servers))
        yield servers
    finally:
        for server in servers:
            server.close()


def ok(server):
    return server.client().execute_command("CLUSTER INFO")["cluster_state"] == "ok"


@pytest.fixture
def queue(nodes):
    with RedisCluster(host=nodes[0].host, port=nodes[0].port) as client:
        queues = (DelayQueue(client, name=f"wide-{number}", shards=SHARDS) for number in _numbers)
        queue = next(one for one in queues if homes(one) == {node.port for node in nodes})
        yield queue
        queue.purge()


def homes(queue):
    """The ports of the nodes on which its shards are."""
    return {queue.client.get_node_from_key(keys.due).port for keys in queue._verbs.shards}


@pytest.fixture
def given(nodes, queue):
    """The group's options, --cluster excepted."""
    return ["--url", nodes[0].url, "--name", queue.name, "--shards", str(SHARDS), "--timeout", "5"]


@pytest.fixture
def read(given):
    """What ``… --cluster VERB --json`` says."""

    def call(*arguments, code=0, **options):
        result = invoke(*given, "--cluster", *arguments, "--json", **options)
        assert result.exit_code == code, result.output
        return json.loads(result.stdout)

    return call


def fill(queue, count=300):
    queue.schedule_many(NewJob(b"%d" % n, delay=600 + n, id=f"{n}", meta={"task": "t"}) for n in range(count))


class Nothing:
    def publish(self, batch):
        return None


def test_looking(queue, read):
    fill(queue)
    assert read("status")["waiting"] == 300
    page = read("ls", "--limit", "200")
    rest = read("ls", "--limit", "200", "--cursor", page["cursor"])
    assert [job["id"] for job in page["jobs"] + rest["jobs"]] == [f"{n}" for n in range(300)]
    assert read("show", "123")["payload"] == "123"
    [found] = [view for view in read("queues") if view["name"] == queue.name]
    assert (found["shards"], found["waiting"]) == (SHARDS, 300)
    assert read("top", "--iterations", "1")["waiting"] == 300


def test_steering(queue, read):
    fill(queue)
    assert read("cancel", "0", "1", "2", "--yes") == [{"id": f"{n}", "outcome": "cancelled"} for n in range(3)]
    assert read("cancel", "--id-prefix", "1", "--yes")["done"] == 110
    assert read("reschedule", "--all", "--delay", "2h", "--yes")["done"] == 187
    assert read("release-now", "--id-prefix", "5", "--yes")["done"] == 11
    assert queue.stats().due == 11
    assert read("drain", "--timeout", "0.1", code=1)["outcome"] == "timed out"
    while claims := queue.claim():
        queue.fail(claims, "no", retry_in=None)
    assert len(read("dead", "ls")["jobs"]) == 11
    assert read("dead", "replay", "5", "--yes") == [{"id": "5", "outcome": "replayed"}]
    assert read("dead", "discard", "--reason", "n*", "--yes")["done"] == 10
    assert read("purge", "--yes")["waiting"] == 177
    assert read("drain")["outcome"] == "drained"


def test_moving_from_a_single_server_and_back(queue, given, read, start_redis):
    single = start_redis()
    with DelayQueue.from_url(single.url) as source:
        fill(source)
    lines = invoke("--url", single.url, "export").stdout
    assert read("import", input=lines)["imported"] == 300
    assert read("import", input=lines)["skipped"] == 300
    back = invoke(*given, "--cluster", "export").stdout
    assert len(back.splitlines()) == 302
    assert json.loads(invoke("--url", single.url, "import", "--json", input=back).stdout)["imported"] == 300


def test_doctor_looks_at_each_node(nodes, queue, read):
    fill(queue, 10)
    with Releaser(queue, Nothing()):
        wait_until(lambda: {loop.shard for loop in queue.loops() if loop.alive} == set(range(SHARDS)))
        view = read("doctor")
        assert [check["check"] for check in view["checks"] if check["findings"]] == []
        assert all(check["asked"] for check in view["checks"]), view
    sick = nodes[1].client()
    sick.config_set("maxmemory-policy", "allkeys-lru")
    sick.config_set("min-replicas-to-write", 1)
    try:
        view = read("doctor", code=1)
    finally:
        sick.config_set("maxmemory-policy", "noeviction")
        sick.config_set("min-replicas-to-write", 0)
    found = {check["check"]: check["findings"] for check in view["checks"]}
    for check in ("eviction", "writes"):
        [finding] = found[check]
        assert finding["meaning"].startswith(f"node {nodes[1].host}:{nodes[1].port}: ")


def metrics(given, *more):
    command = [sys.executable, "-m", "delayadapters.cli", *given, *more, "metrics", "--port", "0"]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def test_metrics(queue, given):
    pytest.importorskip("prometheus_client")
    from delaytests.http import fetch

    fill(queue, 10)
    with metrics(given, "--cluster") as process:
        told = process.stderr.readline()
        port = int(re.search(r":(\d+)/metrics", told)[1])
        assert f'delayadapters_waiting{{queue="{queue.name}"}} 10.0' in fetch(port).text
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    with metrics(given) as process:
        assert process.wait(30) == 69
        assert "--cluster" in process.stderr.read().splitlines()[-1]


def test_the_environment_may_say_so(queue, given):
    fill(queue, 10)
    assert invoke(*given, "status", env={"DELAYADAPTERS_CLUSTER": "1"}).exit_code == 0


# ------------------------------------------------------------------------------------------------------ wrong options


@pytest.mark.parametrize(
    "verb",
    [
        ("status",),
        ("ls",),
        ("cancel", "--all", "--yes"),
        ("cancel", "--yes", *(f"{n}" for n in range(20))),
        ("dead", "ls"),
        ("export",),
        ("drain",),
        ("purge", "--yes"),
        ("queues",),
        ("top", "--iterations", "1"),
    ],
    ids=" ".join,
)
def test_without_the_option_it_is_named(queue, given, verb):
    fill(queue, 10)
    result = invoke(*given, *verb)
    assert result.exit_code == 69
    [line] = result.stderr.splitlines()
    assert line.startswith("Error: ")
    assert "--cluster" in line


def test_doctor_without_the_option_names_it_and_looks_no_further(queue, given):
    result = invoke(*given, "doctor", "--json")
    assert result.exit_code == 1
    [_, check] = json.loads(result.stdout)["checks"]
    assert "--cluster" in check["findings"][0]["remedy"]


def test_the_option_for_what_is_no_cluster(start_redis, nodes):
    single = start_redis().url
    other_database = nodes[0].url.replace("/0", "/3")
    for url, told in ((single, "not part of a"), (other_database, "only be 0"), ("unix:///tmp/redis.sock", "Unix")):
        for verb in ("status", "doctor", "queues"):
            result = invoke("--url", url, "--cluster", "--timeout", "5", verb)
            assert result.exit_code == 2
            assert result.stderr.splitlines()[-1].startswith("Error: --cluster: ")
            assert told in result.stderr


def test_a_cluster_that_cannot_be_reached():
    given = ["--url", f"redis://127.0.0.1:{free_port()}/0", "--cluster", "--timeout", "2"]
    status = invoke(*given, "status")
    assert status.exit_code == 69
    assert len(status.stderr.splitlines()) == 1
    doctor = invoke(*given, "doctor", "--json")
    assert doctor.exit_code == 69
    [check] = json.loads(doctor.stdout)["checks"]
    assert [finding["code"] for finding in check["findings"]] == ["unreachable"]
