"""Options that several commands have."""

from __future__ import annotations

import click

from ksym_plugin.cli.times import point
from ksym_plugin.kernel.clocks import CLOCKS

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
perf_data = click.option(
    "-i", "--input", "data", metavar="FILE", help="What perf recorded.  [default: perf.data]"
)
samples_clock = click.option(
    "--clock",
    type=click.Choice(CLOCKS),
    help="The clock of the samples, where perf.data does not tell.",
)
as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
