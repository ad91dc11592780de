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
from ksym_plugin.cli.output import say
from ksym_plugin.timeline.errors import KsymError

#: The commands' modules in the order of use, under what they are for.
_SECTIONS = (
    ("Record and look back", (doctor, record, show, resolve)),
    ("Profile", (script, report, annotate, fold, flamegraph, pyspy)),
)
_FAILED = 1
#: What a shell reports for a process that died of SIGPIPE, and of SIGINT.
_BROKEN_PIPE = 141
_INTERRUPTED = 130


class Commands(click.Group):
    """The group: shows its commands by what they are for, and turns errors into sentences."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, self.commands))
        for title, modules in _SECTIONS:
            with formatter.section(title):
                commands = [module.command for module in modules]
                formatter.write_dl(
                    [(str(one.name).ljust(width), one.get_short_help_str()) for one in commands]
                )

    def invoke(self, ctx: click.Context) -> None:
        try:
            try:
                super().invoke(ctx)
            finally:  # Also after a command that ends with a status of its own.
                sys.stdout.flush()
        except KsymError as error:
            say(str(error))
            ctx.exit(_FAILED)
        except BrokenPipeError:
            _flush_stdout()
            ctx.exit(_BROKEN_PIPE)
        except OSError as error:
            _flush_stdout()
            say(_sentence(error))
            ctx.exit(_FAILED)
        except KeyboardInterrupt:
            ctx.exit(_INTERRUPTED)


def _flush_stdout() -> None:
    """Write what is still buffered; what cannot be written must not fail again at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        with contextlib.suppress(OSError, ValueError), open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())


def _sentence(error: OSError) -> str:
    if error.errno == errno.EBADF:  # By ``_replace_closed_streams``.
        return "standard input or output is closed"
    what = error.strerror or str(error)
    return f"{error.filename}: {what}" if error.filename else what


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(ksym_plugin.__version__, prog_name="ksym", message="%(prog)s %(version)s")
def cli() -> None:
    """Name every kernel frame as it was at the instant it was sampled.

    First: ksym record -- perf record -g -p PID; then: ksym script
    """


for _, _modules in _SECTIONS:
    for _module in _modules:
        cli.add_command(_module.command)


def _replace_closed_streams() -> None:
    """Open something for each standard stream that was closed when this process started.

    Its descriptor would go to the next file that is opened. Using stdin or stdout is then
    an error (EBADF): each is open for the wrong direction. Messages are lost without one.
    """
    for name, flags, mode in (
        ("stdin", os.O_WRONLY, "r"),
        ("stdout", os.O_RDONLY, "w"),
        ("stderr", os.O_WRONLY, "w"),
    ):
        if getattr(sys, name) is None:
            fd = os.open(os.devnull, flags)
            setattr(sys, name, os.fdopen(fd, mode, encoding="utf-8"))


def main() -> None:
    """Run the command line; what the ``ksym`` script calls."""
    _replace_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        # A name that the terminal's encoding lacks is no reason to fail.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        cli(prog_name="ksym")
    except OSError as error:  # of --help and --version, which no command prints
        _flush_stdout()
        say(_sentence(error))
        sys.exit(_FAILED)
