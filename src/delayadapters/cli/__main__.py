"""``python -m delayadapters.cli``: the ``delayadapters`` command."""

from . import main

main(prog_name="delayadapters")
