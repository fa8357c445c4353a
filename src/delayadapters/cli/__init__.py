"""The ``delayadapters`` command: a group whose subcommands are imported when they are asked for."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Final

try:
    import click
except ImportError:
    sys.exit("the delayadapters command needs click: pip install 'delayadapters[cli]'")

__all__ = ["main"]

COMMANDS: Final = {
    "status": ("delayadapters.cli.looking:status", "The delay queue in numbers, and what falls due when."),
    "ls": ("delayadapters.cli.looking:ls", "What waits, in due order."),
    "show": ("delayadapters.cli.looking:show", "One job: what is stored."),
    "cancel": ("delayadapters.cli.acting:cancel", "Cancel what waits, for good."),
    "reschedule": ("delayadapters.cli.acting:reschedule", "Give what waits another due time."),
    "release-now": ("delayadapters.cli.acting:release_now", "Make what waits due now."),
    "dead": ("delayadapters.cli.acting:dead", "Those whose release failed: ls, show, replay, discard."),
    "top": ("delayadapters.cli.live:top", "Watch the delay queue live."),
    "doctor": ("delayadapters.cli.doctor:doctor", "What is wrong with this setup, and what to type."),
    "drain": ("delayadapters.cli.draining:drain", "Wait until nothing waits any more, for deploys."),
    "purge": ("delayadapters.cli.draining:purge", "Delete the whole queue."),
    "queues": ("delayadapters.cli.finding:queues", "The delay queues of this Redis."),
    "export": ("delayadapters.cli.moving:export", "Write the waiting jobs as JSON lines."),
    "import": ("delayadapters.cli.moving:import_", "Take in jobs that were exported."),
    "metrics": ("delayadapters.metrics.command:metrics", "Serve the queue's metrics for Prometheus."),
    "arq": ("delayadapters.arq.command:arq", "Run an arq worker whose deferred jobs are on time."),
    "arq-migrate": ("delayadapters.arq.command:arq_migrate", "Take over jobs that arq itself has deferred."),
}
"""Name → where the command is, and a line about it: ``--help`` imports none of them."""


class LazyGroup(click.Group):
    """A group that knows its commands by name only."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *COMMANDS})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return super().get_command(ctx, cmd_name)
        module, _, name = COMMANDS[cmd_name][0].partition(":")
        try:
            command: click.Command = getattr(import_module(module), name)
        except ModuleNotFoundError as error:
            missing = (error.name or "").partition(".")[0]
            if missing == "delayadapters":
                raise
            raise click.ClickException(
                f"{cmd_name} needs {missing}, which is not installed here: pip install 'delayadapters[{missing}]'"
            ) from error
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        own = {name: self.commands[name].get_short_help_str(80) for name in self.commands}
        rows = {**own, **{name: line for name, (_, line) in COMMANDS.items()}}
        with formatter.section("Commands"):
            formatter.write_dl(sorted(rows.items()))


_EPILOG = """Exit status: 0 when everything asked for was done, 1 when something was not (the output says what and why),
2 for wrong usage, 69 when Redis does not do what is asked, 130 after Ctrl-C. doctor has more: see there."""


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]}, epilog=_EPILOG)
@click.option(
    "--url", envvar="DELAYADAPTERS_URL", show_envvar=True, help="The Redis, for example redis://localhost:6379/0"
)
@click.option(
    "--name",
    envvar="DELAYADAPTERS_NAME",
    show_envvar=True,
    default="delayadapters",
    show_default=True,
    help="The queue's name; the verb queues lists them.",
)
@click.option(
    "--shards",
    envvar="DELAYADAPTERS_SHARDS",
    show_envvar=True,
    type=click.IntRange(1, 10_000),
    default=1,
    show_default=True,
    help="As many as its users say.",
)
@click.option(
    "--cluster",
    envvar="DELAYADAPTERS_CLUSTER",
    show_envvar=True,
    is_flag=True,
    help="The Redis is a Redis Cluster; --url names any of its nodes.",
)
@click.option(
    "--timeout",
    type=click.FloatRange(0.1, 600),
    default=10.0,
    show_default=True,
    help="Seconds within which Redis has to answer.",
)
@click.version_option(package_name="delayadapters")
@click.pass_context
def main(ctx: click.Context, url: str | None, name: str, shards: int, cluster: bool, timeout: float) -> None:
    """Delayed jobs that wait in Redis: see them, steer them, move them, and check the setup.

    Times are shown in UTC. Every verb takes --json, but for metrics, arq and arq-migrate.
    """
    from .desk import sit_down
    from .own import OwnQueue

    own = OwnQueue(url, name, shards, timeout, cluster)
    ctx.obj = own
    sit_down(ctx, own.desk())
