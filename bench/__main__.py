"""``python -m bench [--quick] [--json FILE|-] [SUBJECT ...]``: a table, and JSON if asked for.

Each subject runs in a process of its own, so none meets another's heap. Exits 0 whatever
the figures are, and 1 if a benchmark crashed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys

from bench import report
from bench.measure import in_child

#: Module and what it measures; each has ``rows(quick)``.
SUBJECTS = {
    "timeline": "timeline: changes and look-ups in memory",
    "past": "timeline: a million past lifetimes on 64 pages",
    "change": "one change against the re-read of kallsyms that it replaces",
    "kallsyms": "kallsyms",
    "history": "history",
    "live": "recorder, live",
    "capture": "source lines of programs that live shortly",
    "lines": "deeper names: vmlinux, and source lines of programs",
    "hooks": "hooks: a batch through pluggy, and a plugin nobody asks",
    "imports": "handler: start",
    "handler": "handler, embedded in perf",
    "svg": "flame graphs",
    "probe": "the probe in the kernel",
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small sizes: does it run at all?")
    parser.add_argument("--json", metavar="FILE", help="write the figures; - is stdout")
    parser.add_argument("subjects", nargs="*", metavar="SUBJECT", help=", ".join(SUBJECTS))
    chosen = parser.parse_args()
    unknown = set(chosen.subjects).difference(SUBJECTS)
    if unknown:
        parser.error(f"no such subject: {', '.join(sorted(unknown))}")
    names = chosen.subjects or list(SUBJECTS)
    measured, crashed = {}, {}
    # An installed package's bytecode is kept.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    for name in names:
        print(f"bench: {SUBJECTS[name]} ...", file=sys.stderr, flush=True)
        try:
            measured[name] = in_child(f"bench_{name}", "rows", chosen.quick)
        except (RuntimeError, subprocess.TimeoutExpired, ValueError) as error:
            crashed[name] = str(error)
    if chosen.json != "-":
        print(report.table({SUBJECTS[name]: rows for name, rows in measured.items()}))
    for name, error in crashed.items():
        print(f"bench: {name} crashed: {error}", file=sys.stderr)
    if chosen.json:
        answer = {
            "host": report.host(),
            "quick": chosen.quick,
            "subjects": measured,
            "crashed": crashed,
        }
        write(chosen.json, json.dumps(answer, indent=1) + "\n")
    return 1 if crashed else 0


def write(path: str, text: str) -> None:
    if path == "-":
        sys.stdout.write(text)
        return
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


if __name__ == "__main__":
    sys.exit(main())
