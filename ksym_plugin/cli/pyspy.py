"""``ksym pyspy``: py-spy's Python stacks with the kernel's and BPF's frames under them."""

from __future__ import annotations

import contextlib
import os
import tempfile

import click

from ksym_plugin.cli import options, pyspy_graft, pyspy_record
from ksym_plugin.cli.output import say
from ksym_plugin.cli.pyspy_graft import Files, Session, Targets
from ksym_plugin.cli.pyspy_record import Command
from ksym_plugin.cli.signals import Signals

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

DEFAULT_OUTPUT = "pyspy.speedscope.json"
_SECONDS = 10.0


def targets(function: Callable[..., Any]) -> Callable[..., Any]:
    """Options for where results go, and for leaves that did not pass the check."""
    for option in (
        click.option("--force", is_flag=True, help="Give leaves also where the self-check fails."),
        click.option("--svg", metavar="FILE", help="Draw a flame graph too."),
        click.option("--folded", metavar="FILE", help="Write folded stacks too."),
        click.option(
            "-o",
            "--output",
            default=DEFAULT_OUTPUT,
            show_default=True,
            metavar="FILE",
            help="Where the file for speedscope goes.",
        ),
    ):
        function = option(function)
    return function


@click.group(
    name="pyspy",
    short_help="Python, kernel and BPF frames in one picture.",
    epilog="Example: ksym pyspy record -p PID --svg flames.svg",
)
def command() -> None:
    """Put perf's kernel and BPF frames under py-spy's Python stacks.

    Two samplers are matched by thread and instant; where that is not certain it says so.
    Experimental. From Python 3.12 on, python -X perf is exact, and needs none of this.
    """


@command.command(
    name="record",
    short_help="Sample a process with both, and put it together.",
    epilog="Example: ksym pyspy record -p PID --svg flames.svg",
    context_settings={"allow_interspersed_args": False},
)
@click.option("-p", "--pid", type=click.IntRange(1), help="The process to sample.")
@click.option(
    "--duration",
    type=click.FloatRange(0, min_open=True),
    metavar="SECONDS",
    help="For how long.  [default: 10; a COMMAND: until it ends]",
)
@click.option(
    "-r",
    "--rate",
    type=click.IntRange(1, 1000),
    default=100,
    show_default=True,
    help="py-spy's samples a second; 250 for functions of 20 to 50 ms.",
)
@click.option(
    "-F",
    "--freq",
    type=click.IntRange(1, 100_000),
    default=999,
    show_default=True,
    help="perf's samples a second.",
)
@click.option("-e", "--event", default="cpu-clock", show_default=True, help="perf's event.")
@click.option("--native", is_flag=True, help="Native frames too; slows the process down more.")
@click.option("--subprocesses", is_flag=True, help="Sample what the process starts as well.")
@click.option("--keep", metavar="DIR", help="Keep what was recorded there, for ksym pyspy graft.")
@options.history
@targets
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def record(
    ctx: click.Context,
    *,
    pid: int | None,
    duration: float | None,
    rate: int,
    freq: int,
    event: str,
    native: bool,
    subprocesses: bool,
    keep: str | None,
    history: str | None,
    output: str,
    folded: str | None,
    svg: str | None,
    force: bool,
    command: tuple[str, ...],
) -> None:
    """Sample a Python process with perf and py-spy at once, and write one picture.

    Give -p PID, or a COMMAND after --, whose exit status is then passed on. BPF symbols are
    recorded meanwhile, unless a history is named. py-spy stops the process for each of its
    samples, for about half a millisecond.
    """
    if (pid is None) == (not command):
        raise click.UsageError("name a process with -p, or give a command after --")
    pyspy_record.py_spy()
    how = pyspy_record.How(rate, freq, event, native, subprocesses)
    status = 0
    with _folder(keep) as folder, Signals() as signals, contextlib.ExitStack() as stack:
        started = None
        if pid is None:
            started = stack.enter_context(Command(command, signals))
            pid = started.pid
        else:
            pyspy_record.require_fit(pid, rate)
            _tell_of_perf_support(pyspy_record.python_of(pid))
            duration = duration or _SECONDS
        samplers = stack.enter_context(pyspy_record.Sampling(folder, pid, how, signals))
        own = samplers.path("ksym.db")
        if history is None:
            samplers.start_recorder(own)
        samplers.start_perf()
        if started is not None:
            started.let_go()
        samplers.start_py_spy(is_starting=started is not None)
        if started is not None:
            _tell_of_perf_support(pyspy_record.python_of(pid))
        say(f"sampling process {pid}{f' for {duration:g} s' if duration else ''}")
        goes_on = samplers.run(duration)
        # py-spy first: a process that it holds would never end.
        samplers.stop()
        if started is not None:
            if not goes_on:
                started.end()
            status = started.wait()
        samplers.require_results()
        files = Files(
            samplers.path(pyspy_graft.PERF_DATA),
            samplers.path(pyspy_graft.PYSPY),
            samplers.path(pyspy_graft.LOG),
            samplers.session,
            history or (own if os.path.exists(own) else None),
        )
        result = pyspy_graft.graft(files, force)
        Targets(output, folded, svg).write(result, f"process {pid}")
    ctx.exit(status)


@contextlib.contextmanager
def _folder(keep: str | None) -> Iterator[str]:
    """Where perf and py-spy write to: a new folder, or one that is gone afterwards."""
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="ksym-pyspy-") as folder:
            yield folder
        return
    os.makedirs(keep, mode=0o700)
    yield keep


def _tell_of_perf_support(version: tuple[int, int] | None) -> None:
    if version is not None and version >= (3, 12):
        say(
            f"this is Python {version[0]}.{version[1]}: started with python -X perf, perf sees its"
            " functions itself, exactly (perf record -k CLOCK_MONOTONIC --call-graph dwarf, then"
            " ksym script); what follows is an approximation"
        )


@command.command(
    name="graft",
    short_help="Put files together that were recorded before.",
    epilog="Example: ksym pyspy graft --perf perf.data --pyspy spy.json --pyspy-log spy.log",
)
@click.option("--perf", required=True, metavar="FILE", help="perf.data, or perf script's text.")
@click.option("--pyspy", required=True, metavar="FILE", help="What py-spy recorded.")
@click.option("--pyspy-log", "log", metavar="FILE", help="What py-spy said meanwhile.")
@click.option(
    "--session",
    metavar="FILE",
    help="What ksym pyspy record --keep noted.  [default: session.json beside --pyspy]",
)
@options.history
@targets
def graft(
    *,
    perf: str,
    pyspy: str,
    log: str | None,
    session: str | None,
    history: str | None,
    output: str,
    folded: str | None,
    svg: str | None,
    force: bool,
) -> None:
    """Put together what perf and py-spy recorded of one process at the same time.

    perf record -k CLOCK_MONOTONIC -g ...; RUST_LOG=py_spy=info,remoteprocess=debug py-spy
    record -f speedscope --idle --threads --full-filenames ... > LOG 2>&1
    """
    beside = os.path.join(os.path.dirname(pyspy), pyspy_graft.SESSION)
    if session is None and os.path.exists(beside):
        session = beside
    noted = Session() if session is None else pyspy_graft.load_session(session)
    files = Files(perf, pyspy, log, noted, history)
    result = pyspy_graft.graft(files, force)
    Targets(output, folded, svg).write(result, os.path.basename(pyspy))
