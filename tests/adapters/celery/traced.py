"""A client and a worker under Sentry's or OpenTelemetry's instrumentation, in a process of its own: both patch Celery.

    traced.py sentry|opentelemetry BROKER_URL

Sends a task that retries twice, within a trace; prints what was collected, as JSON.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from celery import Celery

from delayadapters.celery import install

which, url = sys.argv[1:]
seen: list[dict[str, Any]] = []


def make_app() -> Celery:
    app = Celery("traced", broker=url, backend=url.replace("/0", "/9"), set_as_current=True)
    app.conf.update(
        delayadapters_min_delay=0.05, task_default_queue="traced", worker_hijack_root_logger=False,
        worker_redirect_stdouts=False,
    )  # fmt: skip
    install(app)

    @app.task(name="traced.again", bind=True)
    def again(self: Any) -> int:
        headers = self.request.headers
        seen.append({"retries": self.request.retries, "due": headers["delayadapters_due"], "mine": headers["mine"]})
        if self.request.retries < 2:
            raise self.retry(countdown=0.3)
        return 1

    return app


def worker(app: Celery) -> Any:
    # Imported late, as a worker is: Sentry patches functions which this imports by name.
    from celery.contrib.testing.worker import start_worker

    return start_worker(app, perform_ping_check=False)


def send(app: Celery) -> None:
    result = app.tasks["traced.again"].apply_async(countdown=0.3, headers={"mine": "x"})
    result.get(timeout=60)


def sentry() -> dict[str, Any]:
    import sentry_sdk
    from sentry_sdk.integrations.celery import CeleryIntegration
    from sentry_sdk.transport import Transport

    events: list[Any] = []

    class Memory(Transport):
        def capture_envelope(self, envelope: Any) -> None:
            events.extend(item.payload.json for item in envelope.items if item.type == "transaction")

    sentry_sdk.init(
        dsn="http://key@localhost/1", transport=Memory, traces_sample_rate=1.0, integrations=[CeleryIntegration()],
        default_integrations=False, auto_enabling_integrations=False,
    )  # fmt: skip
    app = make_app()
    with worker(app):
        with sentry_sdk.start_transaction(op="http", name="request"):
            send(app)
        sentry_sdk.flush()
    app.delayadapters.close()
    return {
        "spans": [
            {"name": e["transaction"], "op": e["contexts"]["trace"]["op"], "trace": e["contexts"]["trace"]["trace_id"],
             "id": e["contexts"]["trace"]["span_id"], "parent": e["contexts"]["trace"].get("parent_span_id")}
            for e in events
        ] + [
            {"name": s.get("description"), "op": s["op"], "trace": s["trace_id"], "id": s["span_id"],
             "parent": s["parent_span_id"]}
            for e in events for s in e["spans"]
        ]
    }  # fmt: skip


def opentelemetry() -> dict[str, Any]:
    from opentelemetry import trace
    from opentelemetry.instrumentation.celery import CeleryInstrumentor
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    CeleryInstrumentor().instrument()
    app = make_app()
    with worker(app), trace.get_tracer("test").start_as_current_span("request"):
        send(app)
    app.delayadapters.close()
    return {
        "spans": [
            {"name": span.name, "op": span.kind.name, "trace": format(span.context.trace_id, "x"),
             "id": span.context.span_id, "parent": span.parent and span.parent.span_id}
            for span in exporter.get_finished_spans()
        ]
    }  # fmt: skip


print(json.dumps({**{"sentry": sentry, "opentelemetry": opentelemetry}[which](), "runs": seen}))
