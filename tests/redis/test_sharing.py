"""One queue object used by several threads or tasks: a repeated request is still known as one."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from delayadapters import Claim, DelayQueue, NewJob, OutcomeUnknown, WrongKeyType
from delayadapters.redis.scripts import load
from delaytests.raw import keys_of, send


@pytest.fixture
def due(make_queue, clock):
    queue = make_queue(clock=clock)
    queue.schedule_many([NewJob(b"%d" % n, 0) for n in range(6)])
    return queue


def test_a_claim_whose_reply_was_lost_while_another_thread_claimed(due, redis_client):
    lost = due._verbs.claim(2, 30.0)
    request = next(lost)
    send(redis_client, request)  # carried out, but the reply is lost
    assert [claim.payload for claim in due.claim(2)] == [b"2", b"3"]
    with pytest.raises(StopIteration) as done:
        lost.send(send(redis_client, request))  # repeated
    assert [claim.payload for claim in done.value.value] == [b"0", b"1"]
    assert due.stats().leased == 4


def test_a_renewal_whose_reply_was_lost_while_another_thread_renewed(due, redis_client):
    mine, theirs = due.claim(2), due.claim(2)
    lost = due._verbs.renew(mine, 60.0)
    request = next(lost)
    send(redis_client, request)
    assert len(due.renew(theirs, lease=60)) == 2
    with pytest.raises(StopIteration) as done:
        lost.send(send(redis_client, request))
    held: list[Claim] = done.value.value
    assert [claim.id for claim in held] == [claim.id for claim in mine]
    assert due.ack(held) == 2


def test_one_after_another_they_need_one_place_among_the_loops(due, redis_client):
    for _ in range(5):
        due.give_back(due.claim(2))
    assert redis_client.hlen(due._verbs.shards[0].loops) == 1


def test_a_busy_shard_does_not_starve_the_others(make_queue, clock):
    queue = make_queue(shards=3, clock=clock)
    queue.schedule_many([NewJob(b"", 0) for _ in range(300)])
    shards = set()
    for _ in range(3):
        shards |= {queue._verbs._shard_at(claim.entry) for claim in queue.claim(10)}
    assert len(shards) == 3


# ------------------------------------------------------------------------------------ a claim that raised, and the next


def lose(queue, client, limit=2, lease=30.0):
    """A claim that is carried out; its caller gets an exception."""
    steps = queue._verbs.claim(limit, lease)
    send(client, next(steps))
    with pytest.raises(OutcomeUnknown):
        steps.throw(OutcomeUnknown("no answer"))


def payloads(claims):
    return [claim.payload for claim in claims]


def test_the_batch_of_a_claim_that_raised_is_the_next_claims(redis_server, make_proxy, make_queue, queue_name):
    make_queue().schedule_many([NewJob(b"%d" % n, 0) for n in range(6)])
    proxy = make_proxy(redis_server.port)
    with redis.Redis(port=proxy.port, retry=Retry(NoBackoff(), 0)) as client:
        queue = DelayQueue(client, name=queue_name)
        queue.give_back(queue.claim(1))  # the script is known now
        cut = proxy.cut_reply_after(lambda request: load("claim").sha in request)
        with pytest.raises(OutcomeUnknown):
            queue.claim(4)
        assert cut.happened == 1
        assert queue.stats().leased == 4
        claims = queue.claim(4)
        assert payloads(claims) == [b"0", b"1", b"2", b"3"]
        assert [claim.requeues for claim in claims] == [0] * 4
        assert payloads(queue.claim(4)) == [b"4", b"5"]
        assert queue.ack(claims) == 4


def test_what_the_next_claim_did_not_ask_for_is_given_back(due, redis_client):
    lose(due, redis_client, 4)
    assert payloads(due.claim(1)) == [b"0"]
    assert (due.stats().leased, due.stats().waiting) == (1, 5)
    assert payloads(due.claim(9)) == [b"1", b"2", b"3", b"4", b"5"]


def test_a_lost_batch_that_another_has_by_now_is_not_taken_from_him(due, make_queue, redis_client, clock):
    lose(due, redis_client, 4, lease=1.0)
    clock.advance(2)
    other = make_queue(clock=clock)
    theirs = other.claim(4)
    assert payloads(due.claim(9)) == [b"4", b"5"], "and what is due comes all the same"
    assert other.ack(theirs) == 4


def test_a_claim_that_was_cancelled_gives_its_batch_to_the_next(due, redis_client):
    steps = due._verbs.claim(2, 30.0)
    send(redis_client, next(steps))
    steps.close()  # what becomes of it in a task that is cancelled
    assert payloads(due.claim(2)) == [b"0", b"1"]


def test_a_renewal_is_not_taken_for_the_claim_that_was_lost(due, redis_client):
    mine = due.claim(2)
    lose(due, redis_client)
    mine = due.renew(mine, lease=60)
    assert len(mine) == 2
    assert payloads(due.claim(2)) == [b"2", b"3"]
    assert due.ack(mine) == 2


FORKED = """
import os, sys
from delayadapters import DelayQueue, NewJob

url, name = sys.argv[1:]
queue = DelayQueue.from_url(url, name=name)
queue.schedule_many([NewJob(b"%d" % n, 0) for n in range(9)])
sys.stdout.write(" ".join(claim.payload.decode() for claim in queue.claim(3)) + " ")
sys.stdout.flush()
children = []
for _ in range(2):
    pid = os.fork()
    if pid == 0:
        os.write(1, " ".join(claim.payload.decode() for claim in queue.claim(3)).encode() + b" ")
        os._exit(0)
    children.append(pid)
assert all(os.waitpid(pid, 0)[1] == 0 for pid in children)
"""


def test_forked_processes_do_not_claim_as_one(redis_server, make_queue, queue_name):
    """A queue made, and used, before the fork (gunicorn's preload, multiprocessing)."""
    make_queue()
    command = [sys.executable, "-c", textwrap.dedent(FORKED), redis_server.url, queue_name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert sorted(done.stdout.split()) == [str(n) for n in range(9)]


def test_a_shard_that_is_away_does_not_keep_what_the_others_gave(make_queue, clock, redis_client):
    queue = make_queue(shards=3, clock=clock)
    queue.schedule_many([NewJob(b"", 0) for _ in range(60)])
    broken = keys_of(queue, 1)
    kept = redis_client.zcard(broken.due)
    redis_client.rename(broken.due, "{aside}")
    redis_client.set(broken.due, "another program's")
    got = []
    while len(got) < 60 - kept:
        claims = queue.claim(10)
        assert claims
        got += claims
    with pytest.raises(WrongKeyType):
        queue.claim(10)
    assert queue.ack(got) == 60 - kept
    redis_client.rename("{aside}", broken.due)
    assert len(queue.claim(100)) == kept
