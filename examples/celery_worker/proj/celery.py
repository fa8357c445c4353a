"""The application. ``install(app)`` is the only line that delayadapters adds."""

import os

from celery import Celery

from delayadapters.celery import install

app = Celery("proj", broker=os.environ.get("REDIS_URL", "redis://localhost:6379/0"), include=["proj.tasks"])
app.conf.update(
    task_ignore_result=True,
    broker_connection_retry_on_startup=True,
)
install(app)
