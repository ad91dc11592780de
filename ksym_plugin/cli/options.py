"""Options that several commands have."""

from __future__ import annotations

import click

from ksym_plugin.cli.times import point
from ksym_plugin.clocks import CLOCKS

history = click.option(
    "-H",
    "--history",
    metavar="FILE",
    help="The history; else $KSYM_HISTORY, ksym.db here, or the system's.",
)
at = click.option(
    "--at",
    type=point,
    metavar="TIME",
    help="A time as perf script prints it, such as 5741.328403.",
)
clock = click.option(
    "--clock",
    type=click.Choice(CLOCKS),
    help="The clock that times are on.  [default: perf]",
)
as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
