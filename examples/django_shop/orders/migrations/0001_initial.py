"""The table of orders."""

# ruff: noqa: RUF012
# (as Django writes migrations)

from django.db import migrations, models


class Migration(migrations.Migration):
    initial = True
    dependencies = []
    operations = [
        migrations.CreateModel(
            name="Order",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("customer", models.CharField(max_length=100)),
                ("confirmed", models.BooleanField(default=False)),
                ("paid", models.BooleanField(default=False)),
                ("reminders", models.IntegerField(default=0)),
            ],
        ),
    ]
