"""Schedules a few tasks and shows what waits: ``python shop.py``."""

from datetime import datetime, timedelta, timezone

from proj.celery import app
from proj.tasks import check_payment, send_reminder

kept = send_reminder.apply_async(("ada", "a telescope"), countdown=3)
bought = send_reminder.apply_async(("grace", "a clock"), countdown=3600)
check_payment.apply_async(("order 17",), eta=datetime.now(timezone.utc) + timedelta(seconds=2))

print("Grace has bought the clock, so her reminder is", app.delayadapters.cancel(bought.id).value)
for job in app.delayadapters.jobs().jobs:
    print(f"{job.due_at:%H:%M:%S}  {job.meta['task']}  {job.id}")
