"""One queue object used by several threads or tasks: a repeated request is still known as one."""

from __future__ import annotations

import pytest

from delayadapters import Claim, NewJob
from delaytests.raw import send


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
