"""One table."""

from django.db import models


class Order(models.Model):
    """An order, and what became of it."""

    customer = models.CharField(max_length=100)
    confirmed = models.BooleanField(default=False)
    paid = models.BooleanField(default=False)
    reminders = models.IntegerField(default=0)
