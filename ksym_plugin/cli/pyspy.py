"""``ksym pyspy``: py-spy's Python stacks with the kernel's and BPF's frames under them."""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
from collections.abc import Iterator
from typing import NamedTuple

import click

from ksym_plugin.cli import options, pyspy_record
from ksym_plugin.cli.output import check_result, plural, say, write_text
from ksym_plugin.cli.pyspy_record import Command, RecordingInfo, load_info
from ksym_plugin.cli.signals import Signals
from ksym_plugin.history import locate
from ksym_plugin.perf.data import MAGIC
from ksym_plugin.perf.script import Child, Input
from ksym_plugin.perf.text_origin import Text, open_renamer
from ksym_plugin.python import pyspy, pyspy_match
from ksym_plugin.python.pyspy import Hit, PerfReader
from ksym_plugin.python.pyspy_match import Grafted
from ksym_plugin.stacks import flamegraph, speedscope
from ksym_plugin.timeline.errors import KsymError

_SECONDS = 10.0
_SCRIPT_OPTIONS = ("--ns", "--header", "-F", "comm,pid,tid,time,event,ip,sym,symoff,dso")
_MONOTONIC_REMEDY = "record with: perf record -k CLOCK_MONOTONIC"


class Targets(NamedTuple):
    """The files for results; None and empty are not wanted. ``force``: give leaves at any rate."""

    output: str
    folded: str | None
    svg: str | None
    force: bool

    def write(self, grafted: Grafted, title: str) -> None:
        stacks = grafted.stacks
        if self.output:
            pieces = speedscope.write(title, stacks.table, grafted.profiles())
            write_text(pieces, self.output)
        if self.folded:
            lines = (f"{text} {count}\n" for text, count in stacks.by_text().items())
            write_text(lines, self.folded)
        if self.svg:
            write_text(flamegraph.draw(stacks, title), self.svg)


def target_options(command: options.Command) -> options.Command:
    """Options for the results: ``Targets`` as ``targets``, which takes in the eager ones."""
    output = click.option(
        "-o",
        "--output",
        "targets",
        default="pyspy.speedscope.json",
        show_default=True,
        metavar="FILE",
        callback=lambda context, _, path: Targets(
            path, *map(context.params.pop, ("folded", "svg", "force"))
        ),
        help="Where the file for speedscope goes.",
    )
    eager = functools.partial(click.option, is_eager=True)
    folded = eager("--folded", metavar="FILE", help="Write folded stacks too.")
    svg = eager("--svg", metavar="FILE", help="Draw a flame graph too.")
    force = eager("--force", is_flag=True, help="Give leaves also where the self-check fails.")
    return output(folded(svg(force(command))))


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
@target_options
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def record(
    *,
    pid: int | None,
    duration: float | None,
    rate: int,
    freq: int,
    event: str,
    native: bool,
    subprocesses: bool,
    keep: str | None,
    history: locate.Choice,
    targets: Targets,
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
    for path in (targets.output, targets.folded, targets.svg):
        check_result(path)  # Sampling first would be in vain.
    how = pyspy_record.SamplingOptions(rate, freq, event, native, subprocesses)
    status = 0
    with contextlib.ExitStack() as stack:
        if keep is None:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="ksym-pyspy-"))
        else:
            folder = keep
            os.makedirs(folder, mode=0o700)
        signals = stack.enter_context(Signals())
        started = None
        if pid is None:
            started = stack.enter_context(Command(command, signals))
            pid = started.pid
        else:
            pyspy_record.require_fit(pid, rate)
            pyspy_record.suggest_perf_support(pid)
            duration = duration or _SECONDS
        samplers = stack.enter_context(pyspy_record.Sampling(folder, pid, how, signals))
        own = samplers.path("ksym.db")
        if history.path is None:
            samplers.start_recorder(own)
        samplers.start_perf()
        if started is not None:
            started.let_go()
        samplers.start_py_spy(is_starting=started is not None)
        if started is not None:
            pyspy_record.suggest_perf_support(pid)
        say(f"sampling process {pid}{f' for {duration:g} s' if duration else ''}")
        goes_on = samplers.run(duration)
        # py-spy first: a process that it has stopped would never end.
        samplers.stop()
        if started is not None:
            if not goes_on:
                started.end()
            status = started.wait()
        samplers.require_results()
        recorded = history.path or (own if os.path.exists(own) else None)
        grafted = graft_files(
            samplers.path(pyspy_record.PERF_DATA),
            samplers.path(pyspy_record.PYSPY),
            samplers.path(pyspy_record.LOG),
            samplers.info,
            locate.Choice(recorded, history.boot),
            targets.force,
        )
        targets.write(grafted, f"process {pid}")
    raise click.exceptions.Exit(status)


@command.command(
    name="graft",
    short_help="Put files together that were recorded before.",
    epilog="Example: ksym pyspy graft --perf perf.data --pyspy spy.json --pyspy-log spy.log",
)
@click.option("--perf", required=True, metavar="FILE", help="perf.data, or perf script's text.")
@click.option("--pyspy", required=True, metavar="FILE", help="What py-spy recorded.")
@click.option("--pyspy-log", "log", metavar="FILE", help="What py-spy said meanwhile.")
@options.history
@target_options
def graft(perf: str, pyspy: str, log: str | None, history: locate.Choice, targets: Targets) -> None:
    """Put together what perf and py-spy recorded of one process at the same time.

    perf record -k CLOCK_MONOTONIC -g ...; RUST_LOG=py_spy=info,remoteprocess=debug py-spy
    record -f speedscope --idle --threads --full-filenames ... > LOG 2>&1

    The session.json that ksym pyspy record --keep leaves beside py-spy's file is used too.
    """
    session = os.path.join(os.path.dirname(pyspy), pyspy_record.INFO)
    info = load_info(session) if os.path.exists(session) else RecordingInfo()
    grafted = graft_files(perf, pyspy, log, info, history, targets.force)
    targets.write(grafted, os.path.basename(pyspy))


def graft_files(
    perf: str,
    spied: str,
    log_path: str | None,
    info: RecordingInfo,
    history: locate.Choice,
    force: bool,
) -> Grafted:
    """Put together perf's data or text and what py-spy wrote; messages say how well they fit.

    KsymError if they do not fit, or a file cannot be used.
    """
    log = _log(log_path)
    with open(spied, "rb") as file:
        profile = pyspy.load(file.read())
    reader, hits = _perf_samples(perf, history)
    shift = _shift(info, reader)
    if profile.version not in pyspy.TRIED:
        say(
            f"py-spy {profile.version or 'of unknown version'} is none of those tried"
            f" ({', '.join(pyspy.TRIED)}); its log is believed as far as it fits the samples in"
            " number"
        )
    threads = pyspy_match.by_thread(hits)
    # With clocks, py-spy was started by us, with --idle.
    dating = pyspy_match.date(profile, log, shift, info.outer, bool(info.clocks))
    verdict = pyspy_match.check(threads, dating.threads)
    grafted = pyspy_match.graft(threads, dating, None if force else verdict)
    say(dating.line(info.rate), grafted.line(), verdict.line(force))
    if log.errors:
        say(
            f"py-spy failed at {plural(log.errors, 'sample')}, nobody knows which: frames are"
            " given only where it makes no difference"
        )
    if dating.misfits:
        say(f"{plural(len(dating.misfits), 'thread')} unknown: samples and log do not fit")
    if not any(hit.kernel for hit in hits):
        say("no sample of perf has kernel frames: see what this user may see with: ksym doctor")
    if reader.passed_over:
        say(f"{reader.passed_over:,} samples of other events left out")
    return grafted


def _log(path: str | None) -> pyspy.Log:
    """py-spy's log. KsymError if it cannot date the samples, or they lack what is needed."""
    log = pyspy.Log()
    if path is not None:
        with open(path, "rb") as file:
            log = pyspy.parse_log(file)
    if log.settings.get("gil_only") == "true":
        raise KsymError(
            "py-spy was told --gil: it never sees a thread inside a system call",
            "record without --gil",
        )
    if not log.locks:
        raise KsymError(
            "py-spy's log does not date its samples",
            "record with: RUST_LOG=py_spy=info,remoteprocess=debug py-spy record"
            " -f speedscope --idle --threads … > LOG 2>&1, and give --pyspy-log LOG",
        )
    if log.errors > pyspy_match.MOST_SLACK:
        raise KsymError(
            f"py-spy failed at {log.errors} samples, so that the order of the others tells no time",
            "record again at a lower --rate",
        )
    return log


def _shift(info: RecordingInfo, reader: PerfReader) -> int:
    if reader.is_monotonic is False:
        raise KsymError("perf's samples are not on CLOCK_MONOTONIC", _MONOTONIC_REMEDY)
    shift = info.shift()
    if shift is None:
        shift = reader.shift
    if shift is None or not reader.is_monotonic:
        raise KsymError(
            "nothing tells how perf's clock stands to py-spy's",
            f"{_MONOTONIC_REMEDY}, and print text with: perf script --header --ns",
        )
    return shift


def _perf_samples(path: str, history: locate.Choice) -> tuple[PerfReader, list[Hit]]:
    """perf's samples, with kernel frames named by the history if there is one."""
    history = locate.Choice(locate.find(history, path), history.boot)
    with _perf_text(path) as text, contextlib.ExitStack() as stack:
        renamer = stack.enter_context(open_renamer(text, history, None)) if history.path else None
        reader = PerfReader(renamer)
        return reader, list(reader.hits(text.pieces()))


@contextlib.contextmanager
def _perf_text(path: str) -> Iterator[Text]:
    """The text that perf script prints of a perf.data, or that the file itself is."""
    with open(path, "rb") as file:
        is_data = file.read(len(MAGIC)) == MAGIC
        file.seek(0)
        if not is_data:
            yield Text(file)
            return
    with Child(Input(path), _SCRIPT_OPTIONS) as perf:
        if perf.stdout is not None:
            yield Text(perf.stdout)
        if perf.status():
            call = ("perf script -i", path, *_SCRIPT_OPTIONS)
            raise KsymError(f"perf script cannot read {path}", f"see: {' '.join(call)}")
