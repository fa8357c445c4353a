"""The tests' own helpers do what they say."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from delaytests import (
    CuttableProxy,
    FakeClock,
    RedisServer,
    count_commands,
    count_messages,
    redis_binaries,
    wait_until,
    wait_until_async,
)

NO_RETRY = {"retry": Retry(NoBackoff(), 0), "socket_timeout": 5}


@pytest.fixture
def proxied(redis_server, make_proxy):
    """A proxy before the session's server, and a client that goes through it and never retries."""
    proxy = make_proxy(redis_server.port)
    with redis.Redis(port=proxy.port, **NO_RETRY) as client:
        yield proxy, client


# ----------------------------------------------------------------------------------------------------------- binaries


def test_every_binary_is_the_version_its_label_says(start_redis):
    for label in redis_binaries():
        server = start_redis(label).client().info("server")
        assert label == "path" or server["redis_version"].startswith(label) or f"{label}_version" in server


def test_the_environments_own_bin_is_not_path():
    binary = redis_binaries().get("path")
    if binary is None:
        pytest.skip("no redis-server on PATH")
    assert shutil.which("redis-server", path=str(binary.parent)) or binary.name == "valkey-server"
    assert ".envs" not in binary.parts


# --------------------------------------------------------------------------------------------------- the shared server


def test_the_server_is_the_one_its_label_says(redis_server):
    assert redis_server.version >= (6, 2)


@pytest.mark.leftover_ok("mine:*")
def test_declared_keys_may_stay(redis_client):
    redis_client.set("mine:1", 1)


def test_a_key_left_behind_is_swept_before_the_next_test(redis_client):
    assert redis_client.dbsize() == 0


def test_a_key_left_behind_fails_the_test(run_pytest):
    outcome = run_pytest(
        """
        def test_leaks(redis_client):
            redis_client.set("forgotten", 1)
        """
    )
    assert "Redis keys left behind: forgotten" in outcome


@pytest.fixture
def run_pytest(tmp_path, request):
    """Runs one test file beneath the real conftest in a pytest of its own; answers its output."""

    base = Path(tempfile.mkdtemp()) / "b"  # a short path: pytest-redis puts a Unix socket there

    def run(source: str) -> str:
        (tmp_path / "test_inner.py").write_text(textwrap.dedent(source))
        conftest = request.config.rootpath / "tests" / "conftest.py"
        (tmp_path / "conftest.py").write_text(conftest.read_text())
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-c",
            request.config.inipath,
            "--rootdir",
            request.config.rootpath,
        ]
        command += ["-o", f"cache_dir={tmp_path}/cache", "--basetemp", base, tmp_path / "test_inner.py"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        return done.stdout + done.stderr

    yield run
    shutil.rmtree(base.parent, ignore_errors=True)


def test_queues_share_a_name_and_are_purged(make_queue, queue, clock):
    queue.schedule(b"p", delay=60, id="a")
    assert make_queue(shards=1).get("a").payload == b"p"
    assert make_queue(name=f"{queue.name}-other", clock=clock).get("a") is None


async def test_async_queues_share_a_name_and_are_purged(make_async_queue, async_queue, clock):
    await async_queue.schedule(b"p", delay=60, id="a")
    assert (await make_async_queue().get("a")).payload == b"p"
    job = await make_async_queue(name=f"{async_queue.name}-other", clock=clock).schedule(b"p", delay=1)
    assert job.due == clock() + 1_000_000


# ----------------------------------------------------------------------------------------------------------- own server


def test_a_killed_server_comes_back_with_what_its_aof_holds(start_redis):
    server = start_redis(aof="always")
    server.client().set("k", "v")
    server.kill()
    assert not server.running
    with pytest.raises(redis.ConnectionError):
        server.client(**NO_RETRY).ping()
    server.restart()
    assert server.client().get("k") == b"v"


def test_without_an_aof_a_killed_server_forgets(start_redis):
    server = start_redis()
    server.client().set("k", "v")
    server.kill()
    server.restart()
    assert server.client().get("k") is None


def test_a_paused_server_answers_nothing_until_resumed(start_redis):
    server = start_redis()
    client = server.client(**NO_RETRY | {"socket_timeout": 0.1})
    client.ping()
    with server.paused(), pytest.raises(redis.TimeoutError):
        client.ping()
    assert server.client().ping()


def test_unix_socket_maxmemory_and_password(start_redis):
    server = start_redis(unixsocket=True, maxmemory="3mb", args=("--requirepass", "s3cret"), password="s3cret")
    with redis.Redis.from_url(server.unix_url) as client, pytest.raises(redis.ResponseError, match="maxmemory"):
        client.mset({f"k{i}": b"x" * 100_000 for i in range(100)})
    with redis.Redis.from_url(server.url) as client:
        assert client.ping()


def test_tls(start_redis):
    server = start_redis(tls=True)
    with redis.Redis.from_url(server.url) as client:
        assert client.ping()


def test_nothing_is_left_of_a_closed_server():
    with RedisServer(aof="always") as server:
        folder = server.folder
        server.client().set("k", "v")
    assert not server.running
    assert not folder.exists()


# -------------------------------------------------------------------------------------------------------------- waiting


def test_wait_until_answers_what_the_condition_did():
    answers = iter([0, None, 7])
    assert wait_until(lambda: next(answers)) == 7


def test_wait_until_takes_a_failed_assertion_for_not_yet():
    since = time.monotonic()

    def later():
        assert time.monotonic() - since > 0.05
        return True

    assert wait_until(later)


def test_wait_until_says_what_it_waited_for():
    with pytest.raises(AssertionError, match=r"waited 0.01 s in vain for: .*2 \+ 2 == 5") as raised:
        wait_until(lambda: 2 + 2 == 5, timeout=0.01)
    assert "last answer: False" in str(raised.value)


async def test_wait_until_async_takes_plain_and_coroutine_functions():
    event = asyncio.Event()
    asyncio.get_running_loop().call_later(0.02, event.set)
    assert await wait_until_async(event.is_set)

    async def answer():
        return event.is_set()

    assert await wait_until_async(answer)
    with pytest.raises(AssertionError, match="never mind"):
        await wait_until_async(lambda: False, timeout=0.01, message="never mind")


# ---------------------------------------------------------------------------------------------------------------- clock


def test_the_clock_moves_only_when_told():
    clock = FakeClock()
    start = clock()
    assert clock.datetime == datetime(2030, 1, 1, tzinfo=timezone.utc)
    assert clock() == start
    assert clock.advance(1.5, micros=1) == start + 1_500_001
    assert clock.advance(timedelta(microseconds=-1)) == start + 1_500_000
    assert clock.seconds() == clock() / 1e6
    clock.set(42)
    assert clock() == 42


# ------------------------------------------------------------------------------------------------------------- counting


def test_commands_are_counted(redis_client):
    redis_client.ping()
    with count_commands(redis_client) as counted:
        for _ in range(3):
            redis_client.get("nothing")
        assert counted["GET"] == 3
    redis_client.get("nothing")
    assert counted["get"] == 3
    assert counted.total == 3


def test_messages_are_counted(redis_client):
    with count_messages(redis_client, "news:*") as heard:
        assert len(heard) == 0
        redis_client.publish("news:1", "a")
        redis_client.publish("other", "b")
        assert heard.all() == [(b"news:1", b"a")]


# ---------------------------------------------------------------------------------------------------------------- proxy


def test_the_proxy_forwards_and_counts(proxied):
    proxy, client = proxied
    client.set("k", b"x" * 100_000)
    assert client.get("k") == b"x" * 100_000
    assert client.delete("k") == 1
    assert proxy.connections == proxy.open == 1
    assert proxy.to_server > 100_000
    assert proxy.to_client > 100_000
    assert proxy.commands["SET"] == proxy.commands["GET"] == proxy.commands["DEL"] == 1


def test_the_proxy_counts_pipelined_commands(proxied):
    proxy, client = proxied
    with client.pipeline(transaction=False) as pipe:
        for _ in range(500):
            pipe.echo(b"*3\r\n$1\r\n" * 10)
        pipe.execute()
    assert proxy.commands["ECHO"] == 500


def test_cut_breaks_open_connections_and_lets_new_ones_in(proxied):
    proxy, client = proxied
    client.ping()
    assert proxy.cut() == 1
    with contextlib.suppress(redis.ConnectionError):  # redis-py 8 looks before it uses an idle connection
        client.ping()
    assert client.ping()
    assert proxy.connections == 2


def test_a_cut_reply_leaves_the_request_carried_out(proxied, redis_client):
    proxy, client = proxied
    cut = proxy.cut_reply_after(lambda request: b"SET" in request and b"k" in request)
    client.ping()
    with pytest.raises(redis.ConnectionError):
        client.set("k", "v")
    cut.wait()
    assert cut.happened == 1
    assert redis_client.get("k") == b"v"
    assert client.delete("k") == 1


def test_a_cut_request_is_not_carried_out(proxied, redis_client):
    proxy, client = proxied
    cut = proxy.cut_request(lambda request: b"INCR" in request, times=2)
    for _ in range(2):
        with pytest.raises(redis.ConnectionError):
            client.incr("k")
    assert redis_client.get("k") is None
    assert client.incr("k") == 1
    wait_until(lambda: cut.happened == 2)
    redis_client.delete("k")


def test_a_hanging_proxy_keeps_connections_and_delivers_later(proxied):
    proxy, client = proxied
    client.ping()
    proxy.hang()
    answers = []
    thread = threading.Thread(target=lambda: answers.append(client.ping()))
    thread.start()
    thread.join(0.1)
    assert thread.is_alive()
    assert proxy.open == 1
    proxy.resume()
    thread.join(5)
    assert answers == [True]


def test_a_refusing_proxy_accepts_again_on_the_same_port(proxied):
    proxy, client = proxied
    client.ping()
    proxy.down()
    for _ in range(2):
        with pytest.raises(redis.ConnectionError):
            client.ping()
    proxy.resume()
    assert client.ping()


def test_a_hanging_proxy_can_be_cut_and_closed(redis_server):
    with CuttableProxy(redis_server.port) as proxy, redis.Redis(port=proxy.port, **NO_RETRY) as client:
        client.ping()
        proxy.hang()
        timer = threading.Timer(0.1, proxy.cut)
        timer.start()
        with pytest.raises(redis.ConnectionError):
            client.ping()
        timer.join(5)
    assert proxy.open == 0
