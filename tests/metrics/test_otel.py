"""The OpenTelemetry instruments, read back by the SDK."""

from __future__ import annotations

import pytest

pytest.importorskip("opentelemetry.sdk.metrics")

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from delayadapters import DelayQueue, NewJob, Payload, Releaser
from delayadapters.jobs import LATENESS_BOUNDS
from delayadapters.metrics import instrument
from delayadapters.metrics.names import every_name
from delaytests import wait_until
from delaytests.raw import keys_of


class Nothing:
    def publish(self, claims):
        return None


@pytest.fixture
def reader():
    return InMemoryMetricReader()


@pytest.fixture
def meter(reader):
    provider = MeterProvider(metric_readers=[reader])
    yield provider.get_meter("test")
    provider.shutdown()


def points(reader) -> dict:
    """Metric name → its only data point."""
    data = reader.get_metrics_data()
    if data is None:
        return {}
    found = {}
    for resource in data.resource_metrics:
        for scope in resource.scope_metrics:
            for metric in scope.metrics:
                (found[metric.name],) = metric.data.data_points
    return found


def test_the_same_names_and_values_as_for_prometheus(make_queue, meter, reader, redis_client):
    queue = make_queue()
    broker = keys_of(queue).due + b":broker"
    with Releaser(queue, Nothing()) as releaser:
        instrument(queue, releaser, meter=meter)
        queue.schedule(b"", delay=99)
        queue.schedule_many([NewJob(b"x", 0, release=[("LPUSH", broker, Payload.BYTES)]) for _ in range(30)])
        queue.schedule_many([NewJob(b"x", 0) for _ in range(20)])
        wait_until(lambda: queue.counters().released == 50)
        late = queue.counters().lateness
        seen = points(reader)
        redis_client.delete(broker)
    histograms = {"delayadapters_lateness_seconds", "delayadapters_claim_duration_seconds", "delayadapters_batch_size"}
    expected = {name for name in every_name() if not name.endswith(("_bucket", "_sum", "_count"))} | histograms
    assert set(seen) == expected
    assert seen["delayadapters_up"].value == 1
    assert seen["delayadapters_waiting"].value == 1
    assert seen["delayadapters_released_total"].value == 50
    assert seen["delayadapters_waiting"].attributes == {"queue": queue.name}
    lateness = seen["delayadapters_lateness_seconds"]
    assert tuple(lateness.explicit_bounds) == LATENESS_BOUNDS
    assert tuple(lateness.bucket_counts) == late.counts, "all were released by this process"
    assert lateness.sum == pytest.approx(late.sum, abs=1e-4)


def test_redis_away_is_up_0_and_nothing_else(start_redis, meter, reader):
    server = start_redis()
    with DelayQueue.from_url(server.url, timeout=0.3) as queue:
        instrument(queue, meter=meter)
        server.stop()
        seen = points(reader)
    assert {name: point.value for name, point in seen.items()} == {"delayadapters_up": 0}
