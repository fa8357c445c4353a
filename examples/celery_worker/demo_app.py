"""The demo's application; where everything is comes from the environment that ``demo.py`` sets."""

import os

from celery import Celery
from celery.signals import worker_ready
from demo_kit.ledger import note_execution, note_ready

app = Celery("demo", broker=os.environ["DEMO_REDIS"])
app.conf.update(
    task_ignore_result=True,
    broker_connection_retry_on_startup=True,
    worker_cancel_long_running_tasks_on_connection_loss=False,
    broker_transport=None if os.environ.get("DEMO_PLAIN_KOMBU") == "1" else "demo_transport:Transport",
    task_acks_late=True,
    task_reject_on_worker_lost=True,
    worker_prefetch_multiplier=1,
)
if os.environ.get("DEMO_VISIBILITY") == "short":
    # What a killed worker had taken from the queue comes back after 5 s. With stock Celery the timeout has to be
    # longer than the longest delay (README.md), so its column has kombu's defaults unless --tuned is given.
    app.conf.broker_transport_options = {
        "visibility_timeout": 5,
        "unacked_restore_interval": 1,
        "unacked_restore_throttle": 1,
        "unacked_mutex_expire": 5,
    }
if os.environ.get("DEMO_STOCK") != "1":
    from delayadapters.celery import install

    install(app)


@app.task(bind=True, name="demo.task")
def task(self, number: int, due: float) -> None:
    note_execution(number, due)


@worker_ready.connect
def ready(**_) -> None:
    note_ready()
