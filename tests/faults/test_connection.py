"""The network and the server between a client and its queue: replies lost, sockets that hang, scripts forgotten."""

from __future__ import annotations

import threading
import time

import pytest
import redis

from delayadapters import DelayQueue, NewJob, Outcome, OutcomeUnknown, Published, Releaser
from delayadapters.redis import connect
from delayadapters.redis.scripts import load
from delayadapters.release import threads
from delaytests import wait_until
from delaytests.releasers import Ledger, Running, allowance


def calls(script):
    """A predicate: the request is this script's."""
    sha = load(script).sha
    return lambda request: sha in request or load(script).text in request


@pytest.fixture
def warm(queue):
    """The scripts are known to the server, so a request is one EVALSHA."""
    queue.schedule(b"", id="warm", delay=0)
    queue.schedule(b"", id="warm-2", delay=60)
    queue.ack(queue.claim())
    queue.reschedule("warm-2", delay=50)
    queue.cancel("warm-2")
    queue.renew(queue.claim(), lease=1)
    return queue


def idle(running):
    """The loop has the watch and nothing to do."""
    wait_until(lambda: running.stats.claims >= 1)
    time.sleep(0.1)


# -------------------------------------------------------------------------------------------- a releaser's lost replies


def test_a_batch_whose_claim_reply_was_lost_is_released_at_reconnect(queue, release, proxy, warm):
    done = Ledger()
    running = release(done, url=proxy.url, lease=30.0)
    idle(running)
    cut = proxy.cut_reply_after(calls("claim"))
    queue.schedule_many([NewJob(b"", delay=0, id=f"{n}") for n in range(10)])
    cut.wait()
    assert queue.stats().leased == 10
    wait_until(lambda: len(done) == 10)
    assert sorted(done.ids) == sorted(map(str, range(10)))
    assert max(line.lateness for line in done.lines) < 3 + allowance()  # not after the lease
    wait_until(lambda: running.stats.released == 10)
    assert running.stats.requeued == 0
    assert running.stats.faults >= 1
    assert queue.stats().leased == 0


def test_acks_whose_reply_was_lost_are_done_once(queue, release, proxy, warm):
    cuts = []

    def before(batch):
        cuts.append(proxy.cut_reply_after(calls("claim")))

    done = Ledger(before)
    running = release(done, url=proxy.url, lease=30.0)
    queue.schedule_many([NewJob(b"", delay=0, id=f"{n}") for n in range(10)])
    wait_until(lambda: running.stats.released == 10)
    cuts[0].wait()
    assert sorted(done.ids) == sorted(map(str, range(10)))
    assert running.stats.stale_acks == 0
    assert queue.stats().leased == queue.stats().waiting == 0


@pytest.mark.parametrize("lost", ["request", "reply"])
def test_a_settlement_that_was_lost_happens_once(queue, release, proxy, warm, lost):
    cuts = []

    def fail(batch):
        if not cuts:
            cut = proxy.cut_reply_after if lost == "reply" else proxy.cut_request
            cuts.append(cut(calls("settle")))
        return Published(failed={one.entry: "no" for one in batch if one.attempts == 0})

    done = Ledger(fail)
    running = release(done, url=proxy.url, lease=30.0, backoff=0.1)
    queue.schedule(b"", id="job", delay=0)
    wait_until(lambda: done.ids == ["job"])
    cuts[0].wait()
    assert done.lines[0].attempts == 1
    wait_until(lambda: running.stats.released == 1)
    assert (running.stats.failed, running.stats.requeued) == (1, 0)


@pytest.mark.parametrize("lost", ["request", "reply"])
def test_a_renewal_that_was_lost_is_repeated_and_the_ack_is_not_refused(queue, release, proxy, warm, lost):
    cut = (proxy.cut_reply_after if lost == "reply" else proxy.cut_request)(calls("renew"))
    done = Ledger(lambda batch: time.sleep(3.4))
    running = release(done, url=proxy.url, lease=3.0)
    queue.schedule_many([NewJob(b"", delay=0, id=f"{n}") for n in range(5)])
    cut.wait()
    wait_until(lambda: running.stats.released == 5)
    assert (running.stats.stale_acks, running.stats.requeued) == (0, 0)
    assert sorted(done.ids) == sorted(map(str, range(5)))


def test_an_unanswered_renewal_at_the_end_of_a_publish_is_resolved_before_the_ack(queue, release, proxy, warm):
    """The renewal is carried out and its reply lost just as the publish ends: the ack must quote the new fence."""
    cut = proxy.cut_reply_after(calls("renew"))

    def until_cut(batch):
        cut.wait()

    done = Ledger(until_cut)
    running = release(done, url=proxy.url, lease=2.0)
    queue.schedule(b"", id="job", delay=0)
    wait_until(lambda: running.stats.released == 1)
    assert running.stats.stale_acks == 0
    assert done.ids == ["job"]


def test_a_handed_over_watch_whose_reply_was_lost(queue, release, proxy, warm):
    running = release(Ledger(), url=proxy.url)
    idle(running)
    cut = proxy.cut_reply_after(calls("leave"))
    assert running.stop(30)
    assert cut.happened == 1


# ---------------------------------------------------------------------------------------------- a client's lost replies


def test_a_schedule_whose_reply_was_lost_does_not_exist_twice(delays, proxy, warm):
    producer = delays(proxy.url)
    cut = proxy.cut_reply_after(calls("schedule"))
    job = producer.schedule(b"payload", id="job", delay=60)
    assert cut.happened == 1
    assert job.outcome is Outcome.SCHEDULED
    assert [one.id for one in warm.jobs().jobs] == ["job"]
    assert warm.get("job").due == job.due  # the answer is that of the first time


@pytest.mark.parametrize("if_exists", ["error", "keep", "replace", "add"])
def test_a_schedule_whose_reply_was_lost_and_was_released_meanwhile_stays_released(
    delays, proxy, release, warm, if_exists
):
    done = Ledger()
    release(done)
    producer = delays(proxy.url, timeout=10)
    cut = proxy.cut_reply_after(calls("schedule"))
    answers = []

    def produce():
        answers.append(producer.schedule(b"payload", id="job", delay=0, if_exists=if_exists))

    proxy_thread = threading.Thread(target=produce)
    proxy_thread.start()
    cut.wait()
    proxy.refuse()  # keep it away until the job is gone
    wait_until(lambda: done.ids == ["job"] and warm.get("job") is None)
    proxy.resume()
    proxy_thread.join(30)
    assert answers
    assert answers[0].outcome is Outcome.SCHEDULED
    time.sleep(0.1)
    assert done.ids == ["job"]
    assert warm.stats().waiting == 0


def test_a_batch_of_schedules_whose_reply_was_lost_exists_once(delays, proxy, warm):
    producer = delays(proxy.url)
    cut = proxy.cut_reply_after(calls("schedule"), times=2)
    stored = producer.schedule_many([NewJob(b"x" * 100, delay=60, id=f"{n}") for n in range(1200)])
    assert cut.happened == 2
    assert len(stored) == 1200
    assert warm.stats().waiting == 1200


def test_a_cancel_whose_reply_was_lost_says_cancelled(delays, proxy, warm):
    consumer = delays(proxy.url)
    warm.schedule(b"", id="job", delay=60)
    cut = proxy.cut_reply_after(calls("cancel"))
    assert consumer.cancel("job") is Outcome.CANCELLED
    assert cut.happened == 1
    assert warm.get("job") is None


def test_a_reschedule_whose_reply_was_lost_says_rescheduled(delays, proxy, warm):
    consumer = delays(proxy.url)
    warm.schedule(b"", id="job", delay=60)
    cut = proxy.cut_reply_after(calls("reschedule"))
    assert consumer.reschedule("job", delay=30) is Outcome.RESCHEDULED
    assert cut.happened == 1


def test_a_consumer_of_its_own_loses_replies_and_nothing_else(delays, proxy, warm):
    consumer = delays(proxy.url)
    warm.schedule_many([NewJob(b"", delay=0, id=f"{n}") for n in range(5)])
    lost = [proxy.cut_reply_after(calls("claim"))]
    claims = consumer.claim(lease=30)
    assert [one.id for one in claims] == list("01234")
    lost.append(proxy.cut_reply_after(calls("renew")))
    claims = consumer.renew(claims, lease=40)
    assert len(claims) == 5
    lost.append(proxy.cut_reply_after(calls("settle")))
    assert consumer.ack(claims[:2]) == 2
    lost.append(proxy.cut_reply_after(calls("settle")))
    assert consumer.give_back(claims[2:]) == 3
    assert [cut.happened for cut in lost] == [1, 1, 1, 1]
    assert warm.stats().waiting == 3


def test_a_time_out_after_sending_says_that_the_outcome_is_unknown(delays, proxy, warm):
    producer = delays(proxy.url, timeout=0.6)
    proxy.cut_reply_after(calls("schedule"), times=1000)
    with pytest.raises(OutcomeUnknown):
        producer.schedule(b"", id="job", delay=60)
    assert warm.get("job") is not None


# ----------------------------------------------------------------------------------------------------- the subscription


def test_without_its_subscription_a_loop_is_late_by_at_most_the_safety_poll(queue, release, admin, warm):
    done = Ledger()
    running = release(done)
    idle(running)
    stop = threading.Event()

    def cut_subscribers():
        while not stop.is_set():
            admin.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
            stop.wait(0.01)

    cutter = threading.Thread(target=cut_subscribers)
    cutter.start()
    try:
        time.sleep(0.1)
        for n in range(3):
            queue.schedule(b"", id=f"{n}", delay=0.05)
            wait_until(lambda n=n: f"{n}" in done.ids)
            assert 0 <= done.lateness(f"{n}") < 1.3 + allowance()
    finally:
        stop.set()
        cutter.join()


def test_a_subscription_that_is_cut_is_made_again(queue, release, admin, warm, name):
    done = Ledger()
    running = release(done)
    idle(running)
    channel = f"{{{name}:0}}:wake"
    wait_until(lambda: dict(admin.pubsub_numsub(channel))[channel.encode()] == 1)
    admin.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
    wait_until(lambda: dict(admin.pubsub_numsub(channel))[channel.encode()] == 1)
    time.sleep(0.2)
    queue.schedule(b"", id="job", delay=0.05)
    wait_until(lambda: done.ids == ["job"])
    assert 0 <= done.lateness("job") < 0.6 + allowance()


def test_a_subscription_that_is_silent_without_being_cut_is_made_again(queue, release, admin, warm):
    """As when a router has forgotten the connection: nothing fails, and no message comes."""
    done = Ledger()
    running = release(done)
    idle(running)

    def subscribers():
        return {one["id"] for one in admin.client_list() if int(one["sub"]) > 0}

    before = wait_until(subscribers)
    (shard,) = running._releaser._shards
    tell, shard._tell = shard._tell, lambda message: None
    for n in range(20):
        queue.schedule(b"", id=f"{n}", delay=0.05)
        wait_until(lambda n=n: running.stats.released == n + 1)
        assert done.lateness(f"{n}") < 1.3 + allowance()
        if (now := subscribers()) and not now & before:
            break
        time.sleep(0.05)
    else:
        pytest.fail("it never subscribed again")
    shard._tell = tell
    queue.schedule(b"", id="after", delay=0.05)
    wait_until(lambda: "after" in done.ids)
    assert 0 <= done.lateness("after") < 0.6 + allowance()


# --------------------------------------------------------------------------------------------- hanging, killed, paused


@pytest.fixture
def impatient(monkeypatch):
    """Loops take a silent Redis for hanging after half a second."""
    monkeypatch.setattr(connect, "LOOP_TIMEOUT", 0.5)


def test_a_socket_that_hangs_is_given_up_and_made_anew(queue, release, proxy, warm, impatient):
    done = Ledger()
    running = release(done, url=proxy.url)
    idle(running)
    queue.schedule_many([NewJob(b"", delay=0.2, id=f"{n}") for n in range(10)])
    proxy.hang()
    wait_until(lambda: running.stats.faults >= 1)
    assert len(done) == 0
    proxy.resume()
    wait_until(lambda: running.stats.released == 10)
    assert sorted(done.ids) == sorted(map(str, range(10)))


def test_killed_connections_cost_little(queue, release, admin, warm):
    done = Ledger()
    running = release(done)
    idle(running)
    for n in range(5):
        queue.schedule(b"", id=f"{n}", delay=0.1)
        admin.execute_command("CLIENT", "KILL", "TYPE", "normal")
        wait_until(lambda n=n: f"{n}" in done.ids)
        assert 0 <= done.lateness(f"{n}") < 1.5 + allowance()
    assert max(done.counts.values()) == 1


@pytest.mark.parametrize("how", ["CLIENT PAUSE", "SIGSTOP"])
def test_a_paused_server_stops_nothing_for_good(queue, release, server, admin, warm, how):
    done = Ledger()
    running = release(done, lease=5.0)
    idle(running)
    queue.schedule_many([NewJob(b"", delay=0.3, id=f"{n}") for n in range(10)])
    if how == "SIGSTOP":
        with server.paused():
            time.sleep(1.0)
    else:
        admin.execute_command("CLIENT", "PAUSE", 1000)
    wait_until(lambda: running.stats.released == 10)
    assert sorted(done.ids) == sorted(map(str, range(10)))
    assert min(line.lateness for line in done.lines) >= 0


def test_a_server_that_is_away_for_longer_than_the_time_out(start_redis, shell, impatient):
    server = start_redis()
    done = Ledger()
    running = Running(shell, server.url, "q", done, lease=30.0)
    try:
        idle(running)
        with DelayQueue.from_url(server.url, name="q") as queue:
            queue.schedule(b"", id="job", delay=0.2)
        with server.paused():
            wait_until(lambda: running.stats.faults >= 1)
        wait_until(lambda: running.stats.released == 1)
        assert done.ids == ["job"]
    finally:
        assert running.stop(30)


def test_stop_while_the_server_hangs_answers_in_time(start_redis, shell):
    server = start_redis()
    running = Running(shell, server.url, "q", Ledger())
    try:
        idle(running)
        with server.paused():
            begun = time.monotonic()
            running.stop(0.5)
            assert time.monotonic() - begun < 4 + allowance()
    finally:
        assert running.stop(30)


def test_stop_while_the_server_is_gone_ends(start_redis, shell):
    server = start_redis()
    running = Running(shell, server.url, "q", Ledger())
    idle(running)
    server.kill()
    wait_until(lambda: running.stats.faults >= 1)
    assert running.stop(30)


# ------------------------------------------------------------------------------------------------------------- scripts


def test_a_server_that_has_forgotten_the_scripts(queue, release, admin, warm):
    done = Ledger()
    running = release(done)
    idle(running)
    for n in range(3):
        admin.script_flush()
        queue.schedule(b"", id=f"{n}", delay=0.05)
        admin.script_flush()
        wait_until(lambda n=n: f"{n}" in done.ids)
        assert done.lateness(f"{n}") < 0.6 + allowance()
    wait_until(lambda: running.stats.released == 3)
    assert running.stats.faults == 0


# --------------------------------------------------------------------------------------------------------- no leftovers


def test_after_stop_no_connection_stays(queue, release, admin):
    def connections():
        return {int(one["id"]) for one in admin.client_list()}

    before = connections()
    running = release(Ledger())
    idle(running)
    assert len(connections() - before) >= 2
    assert running.stop()
    queue.close()
    wait_until(lambda: not connections() - before)


def test_a_pool_of_one_connection_is_enough_for_the_caller(server, name, delays):
    delays()
    pool = redis.BlockingConnectionPool(host=server.host, port=server.port, max_connections=1, timeout=2)

    class Publisher:
        def __init__(self):
            self.ids = []

        def publish(self, batch):
            self.ids += [one.id for one in batch]

    with redis.Redis.from_pool(pool) as client:
        queue, publisher = DelayQueue(client, name=name), Publisher()
        with Releaser(queue, publisher):
            queue.schedule(b"", id="job", delay=0.1)
            wait_until(lambda: publisher.ids == ["job"])


def test_a_stop_that_comes_while_it_starts(queue, monkeypatch):
    """As a signal handler's may: before the shard is there to be told."""

    class Nowhere:
        def publish(self, claims):
            return None

    releaser = Releaser(queue, Nowhere())

    class Told(threads._Shard):
        def __init__(self, *args, **options):
            releaser.stop(0)
            super().__init__(*args, **options)

    monkeypatch.setattr(threads, "_Shard", Told)
    releaser.start()
    wait_until(lambda: not releaser.running, timeout=30)
