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


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="delayadapters")
def main() -> None:
    """Delayed jobs that wait in Redis."""


if __name__ == "__main__":
    main()
