"""The project. Importing it makes the Celery app, so that tasks of all Django apps find it (as Celery's guide says)."""

from .celery import app as celery_app

__all__ = ["celery_app"]
