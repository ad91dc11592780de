"""The ``ksym`` command: one module a command, and what they share.

Results go to stdout, everything else to stderr. What goes wrong is one plain sentence
with its remedy and exit status 1; wrong usage is exit status 2.
"""

from __future__ import annotations

import contextlib
import errno
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
    pyspy,
    record,
    report,
    resolve,
    script,
    show,
)
from ksym_plugin.cli.output import Failure
from ksym_plugin.timeline.errors import KsymError

#: The commands in the order of use, under what they are for.
_SECTIONS = (
    (
        "Record and look back",
        (doctor.command, record.command, show.command, resolve.command),
    ),
    (
        "Profile",
        (
            script.command,
            report.command,
            annotate.command,
            fold.command,
            flamegraph.command,
            pyspy.command,
        ),
    ),
)
#: What a shell reports for a process that died of SIGPIPE, and of SIGINT.
_BROKEN_PIPE = 141
_INTERRUPTED = 130


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
            try:
                result: object = super().invoke(ctx)
            finally:  # Also where a command ends with a status of its own.
                sys.stdout.flush()
        except KsymError as error:
            raise Failure(str(error)) from None
        except BrokenPipeError:
            _silence_stdout()
            ctx.exit(_BROKEN_PIPE)
        except OSError as error:
            _write_out()
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


def _write_out() -> None:
    """Write what is still buffered; what cannot be written must not fail again at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        _silence_stdout()


def _sentence(error: OSError) -> str:
    if error.errno == errno.EBADF:  # What ``_open_closed`` has put there.
        return "standard input or output is closed"
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


def _open_closed() -> None:
    """Stand in for what whoever started us has closed: nothing else is to be opened in its place.

    Using stdin or stdout then is an error (EBADF); messages that nobody reads are none.
    """
    if sys.stdin is None:
        sys.stdin = os.fdopen(os.open(os.devnull, os.O_WRONLY), "r", encoding="utf-8")
    if sys.stdout is None:
        sys.stdout = os.fdopen(os.open(os.devnull, os.O_RDONLY), "w", encoding="utf-8")
    if sys.stderr is None:
        sys.stderr = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8")


def main() -> None:
    """Run the command line; what the ``ksym`` script calls."""
    _open_closed()
    for stream in (sys.stdout, sys.stderr):
        # A name that the terminal's encoding lacks is no reason to fail.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        cli(prog_name="ksym")
    except OSError as error:  # of --help and --version, which no command prints
        _write_out()
        Failure(_sentence(error)).show()
        sys.exit(Failure.exit_code)
