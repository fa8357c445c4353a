"""What the shop does later. Both look the order up: it was committed before they were sent or scheduled."""

from celery import shared_task
from django.db.models import F

from .models import Order


@shared_task
def confirm(order: int) -> None:
    """Sent at once, when the order is committed."""
    Order.objects.filter(pk=order).update(confirmed=True)


@shared_task
def remind(order: int) -> None:
    """Waits in Redis; nothing to do when the order was paid meanwhile."""
    Order.objects.filter(pk=order, paid=False).update(reminders=F("reminders") + 1)
