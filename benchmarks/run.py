"""Runs the benchmarks: prints a table, writes ``bench-results/``. See docs/benchmarks.md.

    benchmarks/run.py [--quick] [--full] [--only NAME]... [--out FOLDER]

It starts a Redis server of its own (without persistence, on a free port) and ends it.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from costs import growth, idle, memory
from draining import direct, leased, ping
from harness import Bench, Row, machine, server
from lateness import lateness
from scheduling import scheduling

BENCHMARKS = {
    "lateness": lateness,
    "schedule": scheduling,
    "leased": leased,
    "direct": direct,
    "ping": ping,
    "memory": memory,
    "idle": idle,
    "growth": growth,
}


def main() -> None:
    options = arguments()
    options.out.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    with server() as port:
        facts = machine(port)
        rows: list[Row] = []
        for name in options.only or BENCHMARKS:
            print(f"== {name}", file=sys.stderr, flush=True)
            since = time.monotonic()
            found = BENCHMARKS[name](Bench(port, options.quick, options.full))
            rows += found
            write(options.out / f"{name}.json", name, found, facts, time.monotonic() - since)
    text = table(rows, facts, time.monotonic() - begin)
    (options.out / "table.md").write_text(text, "utf-8")
    print(text)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="small sizes, one run each: under a minute; figures mean little"
    )
    parser.add_argument(
        "--full", action="store_true", help="growth up to 10 million waiting jobs (about 7 GB of memory)"
    )
    parser.add_argument("--only", action="append", choices=BENCHMARKS, metavar="NAME", help=", ".join(BENCHMARKS))
    default = Path(__file__).parent.parent / "bench-results"
    parser.add_argument("--out", type=Path, default=default, help="folder of the JSON results (bench-results)")
    return parser.parse_args()


def command_line() -> str:
    """What was called, without where the results went."""
    words = iter(sys.argv[1:])
    kept = [word for word in words if not (word.startswith("--out") and (word != "--out" or next(words, None)))]
    return shlex.join([f"benchmarks/{Path(sys.argv[0]).name}", *kept])


def write(path: Path, name: str, rows: list[Row], facts: dict[str, Any], seconds: float) -> None:
    result = {
        "benchmark": name,
        "command": command_line(),
        "when": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "seconds": round(seconds, 1),
        "machine": facts,
        "rows": [asdict(row) for row in rows],
    }
    path.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", "utf-8")


def table(rows: list[Row], facts: dict[str, Any], seconds: float) -> str:
    """A markdown table, aligned so that it reads as plain text too."""
    lines = [("what", "measured", "floor, same run", "ratio", "target", "met")]
    for row in rows:
        met = {True: "yes", False: "NO", None: "–"}[row.met]
        lines.append((row.what, row.measured, row.floor, row.ratio, row.target, met))
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    out = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines
    ]
    out.insert(1, "| " + " | ".join("-" * width for width in widths) + " |")
    hiredis = f" + hiredis {facts['hiredis']}" if facts["hiredis"] else ""
    out += [
        "",
        f"Python {facts['python']}, redis-py {facts['redis_py']}{hiredis}, Redis {facts['redis']}, "
        f"{facts['cpus_usable']} CPUs, {facts['system']}, {facts['commit']}; "
        f"load before {facts['load_before'][0]}; took {seconds:.0f} s.",
        "",
    ]
    return "\n".join(out)


if __name__ == "__main__":
    main()
