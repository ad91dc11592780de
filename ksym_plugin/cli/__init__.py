"""The ``ksym`` command: one module a command, and what they share.

Results go to stdout, everything else to stderr. What goes wrong is one plain sentence
with its remedy and exit status 1; wrong usage is exit status 2.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys

import click

import ksym_plugin
from ksym_plugin.cli import (
    annotate,
    doctor,
    flamegraph,
    fold,
    record,
    report,
    resolve,
    script,
    show,
)
from ksym_plugin.cli.output import Failure
from ksym_plugin.errors import KsymError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Final

#: The commands in the order of use, under what they are for.
_SECTIONS: Final = (
    ("Record", (doctor.command, record.command)),
    ("Look back", (show.command, resolve.command)),
    (
        "Profile",
        (script.command, report.command, annotate.command, fold.command, flamegraph.command),
    ),
)
#: What a shell reports for a process that died of SIGPIPE, and of SIGINT.
_BROKEN_PIPE: Final = 141
_INTERRUPTED: Final = 130


class Commands(click.Group):
    """The group: lists its commands in the order of use, and turns errors into sentences."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [command.name or "" for _, commands in _SECTIONS for command in commands]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, self.list_commands(ctx)))
        for title, commands in _SECTIONS:
            with formatter.section(title):
                rows = [(str(cmd.name).ljust(width), cmd.get_short_help_str()) for cmd in commands]
                formatter.write_dl(rows)

    def invoke(self, ctx: click.Context) -> object:
        try:
            result: object = super().invoke(ctx)
            sys.stdout.flush()
        except KsymError as error:
            raise Failure(str(error)) from None
        except BrokenPipeError:
            _silence_stdout()
            ctx.exit(_BROKEN_PIPE)
        except OSError as error:
            raise Failure(_sentence(error)) from None
        except KeyboardInterrupt:
            ctx.exit(_INTERRUPTED)
        return result


def _silence_stdout() -> None:
    """Nobody reads any more: what is still buffered must not fail again at exit."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def _sentence(error: OSError) -> str:
    what = error.strerror or str(error)
    return f"{error.filename}: {what}" if error.filename else what


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(ksym_plugin.__version__, prog_name="ksym", message="%(prog)s %(version)s")
def cli() -> None:
    """Name every kernel frame as it was at the instant it was sampled.

    First: ksym record -- perf record -g -p PID; then: ksym script
    """


for _, _commands in _SECTIONS:
    for _command in _commands:
        cli.add_command(_command)


def main() -> None:
    """Run the command line; what the ``ksym`` script calls."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed by whoever started us
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        # A name that the terminal's encoding lacks is no reason to fail.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    cli(prog_name="ksym")
