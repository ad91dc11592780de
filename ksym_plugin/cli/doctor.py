"""``ksym doctor``: what this kernel and this user allow, and how to get the rest."""

from __future__ import annotations

import click

from ksym_plugin.cli import checks, options
from ksym_plugin.cli.output import write_json, write_lines


@click.command(
    name="doctor",
    short_help="Say what works here, and how to get the rest.",
    epilog="Example: ksym doctor",
)
@options.history
@options.as_json
@click.pass_context
def command(ctx: click.Context, history: str | None, as_json: bool) -> None:
    """Say what this kernel and this user allow, and how to get what is missing.

    The exit status is 0 if recording is possible.
    """
    results = checks.run_all(history)
    possible = any(check.fine for check in results if check.name in checks.source_names())
    if as_json:
        write_json(
            {
                "recording": possible,
                "checks": [
                    {
                        "name": check.name,
                        "state": check.state,
                        "finding": check.finding,
                        "remedy": check.remedy,
                    }
                    for check in results
                ],
            }
        )
    else:
        write_lines(f"{check.state:7}  {check.name}: {check.sentence()}" for check in results)
    ctx.exit(0 if possible else 1)
