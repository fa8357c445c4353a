"""Django's settings: a database in a file, and Celery on Redis, everything of it under CELERY_."""

import os
from pathlib import Path

BASE_DIR = Path(__file__).resolve().parent.parent

SECRET_KEY = "an example has no secrets"
USE_TZ = True
INSTALLED_APPS = ["orders"]
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": os.environ.get("SHOP_DATABASE", BASE_DIR / "shop.sqlite3"),
        "OPTIONS": {"timeout": 20},
    }
}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

CELERY_BROKER_URL = os.environ.get("REDIS_URL", "redis://localhost:6379/0")
CELERY_BROKER_CONNECTION_RETRY_ON_STARTUP = True
CELERY_TASK_IGNORE_RESULT = True
CELERY_TASK_DEFAULT_QUEUE = "django-shop"
# delayadapters' own: all of them begin with CELERY_DELAYADAPTERS_ here.
CELERY_DELAYADAPTERS_NAME = "django-shop"
CELERY_DELAYADAPTERS_MIN_DELAY = 0.5
