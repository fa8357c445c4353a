"""The collector: what it says of a queue and a loop, and that a scrape never fails."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import threading

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from delayadapters import DelayQueue, NewJob, Payload, Releaser
from delayadapters.jobs import LATENESS_BOUNDS
from delayadapters.metrics import QueueCollector
from delayadapters.metrics.names import every_name
from delaytests import wait_until
from delaytests.raw import keys_of


class Nothing:
    def publish(self, claims):
        return None


def scrape(collector: QueueCollector) -> dict[str, float]:
    """Sample name, with ``le`` where it has one, → value; of one queue."""
    registry = CollectorRegistry()
    registry.register(collector)
    seen = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            bound = sample.labels.get("le")
            seen[sample.name + (f"|{bound}" if bound else "")] = sample.value
    return seen


def test_what_a_queue_says(queue):
    queue.schedule_many([NewJob(b"", 3600, id=f"{n}") for n in range(5)])
    queue.cancel("0")
    queue.reschedule("1", delay=0)
    queue.schedule(b"", delay=0, id="leased")
    queue.schedule(b"", delay=0, id="dead")
    claims = {claim.id: claim for claim in queue.claim()}
    queue.fail([claims["dead"]], "why", retry_in=None)
    queue.ack([claims["1"]])
    queue.schedule(b"", delay=0, id="due")
    seen = scrape(QueueCollector(queue))
    gauges = ("up", "waiting", "due_unclaimed", "leased", "dead", "loops_alive")
    assert [seen[f"delayadapters_{name}"] for name in gauges] == [1, 4, 1, 1, 1, 1]
    assert 0 <= seen["delayadapters_oldest_overdue_seconds"] < 60
    for name, value in {
        "scheduled": 8,
        "cancelled": 1,
        "rescheduled": 1,
        "released": 1,
        "released_direct": 0,
        "failed": 1,
        "died": 1,
        "requeued": 0,
    }.items():
        assert seen[f"delayadapters_{name}_total"] == value, name
    assert seen["delayadapters_lateness_seconds_count"] == seen["delayadapters_lateness_seconds_bucket|+Inf"] == 1
    assert "delayadapters_batch_size_count" not in seen, "no loop in this process"


def test_every_process_says_the_same_of_a_queue_and_each_of_its_own_loop(make_queue, redis_client):
    queue = make_queue()
    broker = keys_of(queue).due + b":broker"
    with Releaser(queue, Nothing()) as releaser:
        working, looking = QueueCollector(queue, releaser), QueueCollector(make_queue())
        queue.schedule_many([NewJob(b"x", 0, release=[("LPUSH", broker, Payload.BYTES)]) for _ in range(30)])
        queue.schedule_many([NewJob(b"x", 0) for _ in range(20)])
        wait_until(lambda: queue.counters().released == 50)
        one, other = scrape(working), scrape(looking)
        redis_client.delete(broker)
    for seen in (one, other):
        assert seen["delayadapters_released_total"] == seen["delayadapters_lateness_seconds_count"] == 50
        assert seen["delayadapters_released_direct_total"] == 30
        assert seen["delayadapters_loops_alive"] == 1
        buckets = [seen[f"delayadapters_lateness_seconds_bucket|{bound}"] for bound in (*LATENESS_BOUNDS, "+Inf")]
        assert buckets == sorted(buckets)
    assert one["delayadapters_batch_size_sum"] >= 20
    assert one["delayadapters_claim_duration_seconds_count"] > one["delayadapters_batch_size_count"] > 0
    assert not any("batch_size" in name or "claim_duration" in name for name in other)


def test_the_names_are_those_that_are_documented(queue):
    with Releaser(queue, Nothing()) as releaser:
        seen = {name.partition("|")[0] for name in scrape(QueueCollector(queue, releaser))}
    assert seen == every_name()


def test_several_queues_in_one_registry(make_queue, queue_name):
    other = make_queue(name=f"{queue_name}-b")
    collector = QueueCollector(make_queue())
    collector.add(other)
    other.schedule(b"", delay=9)
    registry = CollectorRegistry()
    registry.register(collector)
    assert registry.get_sample_value("delayadapters_waiting", {"queue": queue_name}) == 0
    assert registry.get_sample_value("delayadapters_waiting", {"queue": f"{queue_name}-b"}) == 1
    text = generate_latest(registry).decode()
    assert text.count("# TYPE delayadapters_waiting gauge") == 1


def test_redis_away_is_a_scrape_like_any_other(start_redis, caplog):
    server = start_redis()
    with DelayQueue.from_url(server.url, timeout=0.5) as queue, caplog.at_level(logging.INFO, "delayadapters"):
        collector = QueueCollector(queue)
        assert scrape(collector)["delayadapters_up"] == 1
        server.stop()
        for _ in range(3):
            assert scrape(collector) == {"delayadapters_up": 0}
        server.start()
        wait_until(lambda: scrape(collector)["delayadapters_up"] == 1)
    told = [record.getMessage() for record in caplog.records if record.name == "delayadapters.metrics"]
    assert len(told) == 2, told
    assert "up=0" in told[0]
    assert "up=1" in told[1]


async def test_an_async_queue_is_read_on_its_own_event_loop(async_queue):
    await async_queue.schedule(b"", delay=9)
    collector = QueueCollector(async_queue)
    seen = await asyncio.to_thread(scrape, collector)
    assert (seen["delayadapters_up"], seen["delayadapters_waiting"]) == (1, 1)


def test_an_async_queue_whose_event_loop_has_ended_is_away(redis_server, queue_name):
    from delayadapters import AsyncDelayQueue

    made = []

    async def make():
        async with AsyncDelayQueue.from_url(redis_server.url, name=queue_name) as queue:
            made.append(QueueCollector(queue))

    asyncio.run(make())
    assert scrape(made[0]) == {"delayadapters_up": 0}


def test_what_is_no_queue_is_refused():
    with pytest.raises(TypeError, match="queue must be"):
        QueueCollector("redis://localhost")


def test_an_observer_that_raises_stops_nothing(queue, caplog):
    class Broken:
        def claimed(self, seconds, jobs):
            raise RuntimeError("claimed")

        released = claimed

    done = threading.Event()

    class Tell:
        def publish(self, claims):
            done.set()

    with Releaser(queue, Tell()) as releaser:
        releaser.observe(Broken())
        queue.schedule(b"", delay=0)
        assert done.wait(30)
        wait_until(lambda: queue.counters().released == 1)
        assert releaser.stats.faults == 0
    assert sum("observer" in record.getMessage() for record in caplog.records) == 1


@pytest.mark.parametrize(
    ("package", "name"),
    [("prometheus_client", "QueueCollector"), ("prometheus_client", "serve"), ("opentelemetry", "instrument")],
)
def test_without_the_extra_it_says_what_to_install(package, name):
    code = f"import sys; sys.modules[{package!r}] = None\nfrom delayadapters.metrics import {name}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "pip install 'delayadapters[metrics]'" in done.stderr.splitlines()[-1]
