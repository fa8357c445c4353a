"""The table of the demos that have run, from their report. ``python -m demo_kit demo-report.json celery arq taskiq``

Exit status 1 when one of those named is missing, or broke a promise.
"""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

from .output import WIDTH, kills, read, table
from .story import broken


def main() -> int:
    report, *wanted = sys.argv[1:]
    found = read(Path(report))
    columns = {key: found[key] for key in wanted if key in found}
    if columns:
        print(table(columns))
        print()
        print(textwrap.fill(f"Killed (SIGKILL): {kills(next(iter(columns.values())))}.", WIDTH))
    amiss = [f"{key} did not come to an end" for key in wanted if key not in found]
    amiss += [f"{key}: {', '.join(broken(result))}" for key, result in columns.items() if broken(result)]
    for line in amiss:
        print(f"BROKEN: {line}", file=sys.stderr)
    if not amiss:
        print("Nothing lost, nothing early, and what was cancelled did not run.")
    print(f"Report: {report}")
    return 1 if amiss else 0


if __name__ == "__main__":
    sys.exit(main())
