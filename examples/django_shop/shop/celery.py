"""The Celery app, its settings in Django's. ``install(app)`` is the only line that delayadapters adds."""

import os

from celery import Celery

from delayadapters.celery import install

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "shop.settings")

app = Celery("shop")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks()
install(app)
