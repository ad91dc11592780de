"""``ksym pyspy``: py-spy's Python stacks with the kernel's and BPF's frames under them."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from typing import TYPE_CHECKING, NamedTuple

import click

from ksym_plugin.cli import flamegraph, inputs, options, pyspy_record
from ksym_plugin.cli.output import plural, say
from ksym_plugin.cli.pyspy_record import Command, RecordingInfo, load_info
from ksym_plugin.cli.signals import Signals
from ksym_plugin.history import locate
from ksym_plugin.perf.data import MAGIC
from ksym_plugin.python import pyspy, pyspy_graft, pyspy_match, pyspy_perf
from ksym_plugin.stacks import flamegraph as picture
from ksym_plugin.stacks import speedscope as speedscope_file
from ksym_plugin.stacks.folded import stacks_of
from ksym_plugin.timeline.errors import KsymError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

    from ksym_plugin.python.pyspy import Log
    from ksym_plugin.python.pyspy_graft import Grafted
    from ksym_plugin.python.pyspy_match import Dating
    from ksym_plugin.python.pyspy_perf import Hit, Reader

DEFAULT_OUTPUT = "pyspy.speedscope.json"
_SECONDS = 10.0
_SCRIPT = [
    *("perf", "script", "--ns", "--header"),
    *("-F", "comm,pid,tid,time,event,ip,sym,symoff,dso"),
]
_MONOTONIC = "record with: perf record -k CLOCK_MONOTONIC"


class Targets(NamedTuple):
    """Where results go: speedscope, folded stacks, a picture; None for not at all."""

    speedscope: str | None
    folded: str | None
    svg: str | None

    def write(self, grafted: Grafted, title: str) -> None:
        if self.speedscope:
            flamegraph.write(speedscope_file.write(title, *grafted.profiles()), self.speedscope)
        if self.folded:
            with open(self.folded, "wb") as file:
                file.writelines(
                    line.encode("utf-8", "surrogateescape") for line in grafted.folded()
                )
        if self.svg:
            stacks = stacks_of(grafted.counts)
            flamegraph.write(picture.draw(stacks, picture.Picture(title)), self.svg)


class Files(NamedTuple):
    """One recording: perf's data or text, py-spy's file and log, the history."""

    perf: str
    pyspy: str
    log: str | None
    info: RecordingInfo
    history: str | None


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
            samplers.path(pyspy_record.PERF_DATA),
            samplers.path(pyspy_record.PYSPY),
            samplers.path(pyspy_record.LOG),
            samplers.info,
            history or (own if os.path.exists(own) else None),
        )
        result = graft_files(files, force)
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
    beside = os.path.join(os.path.dirname(pyspy), pyspy_record.INFO)
    if session is None and os.path.exists(beside):
        session = beside
    info = RecordingInfo() if session is None else load_info(session)
    files = Files(perf, pyspy, log, info, history)
    result = graft_files(files, force)
    Targets(output, folded, svg).write(result, os.path.basename(pyspy))


def graft_files(files: Files, force: bool) -> Grafted:
    """Both sides together, with all that is to be known of how well they fit said."""
    log = _log(files.log)
    with open(files.pyspy, "rb") as file:
        profile = pyspy.parse(pyspy.load(file.read()))
    reader, hits = _perf_samples(files)
    shift = _shift(files, reader)
    _note_version(profile.version)
    threads = pyspy_graft.by_thread(hits)
    # With clocks, py-spy was started by us, with --idle.
    dating = pyspy_match.date(profile, log, shift, files.info.outer, bool(files.info.clocks))
    verdict = pyspy_graft.check(threads, dating.threads)
    answers = pyspy_graft.matchers(dating, not (verdict.passes or force))
    grafted = pyspy_graft.graft(threads, answers, dating.misfits, _natives(log, dating))
    say(pyspy_graft.run_line(dating, files.info.rate))
    say(grafted.tally.line())
    say(pyspy_graft.verdict_line(verdict, force))
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


def _natives(log: Log, dating: Dating) -> set[int]:
    """The threads without Python, by what the log has and the samples have not."""
    if dating.misfits - log.tids:
        # Python threads under ids of a namespace that were not noted: they may be any of these.
        return set()
    return log.tids - set(dating.threads) - dating.misfits


def _log(path: str | None) -> Log:
    """py-spy's log. KsymError if nothing right can come of a recording with it."""
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


def _note_version(version: str) -> None:
    if version not in pyspy.TRIED:
        tried = ", ".join(pyspy.TRIED)
        say(
            f"py-spy {version or 'of unknown version'} is none of those tried ({tried}); its log"
            " is believed as far as it fits the samples in number"
        )


def _shift(files: Files, reader: Reader) -> int:
    if reader.is_monotonic is False:
        raise KsymError("perf's samples are not on CLOCK_MONOTONIC", _MONOTONIC)
    shift = files.info.shift()
    if shift is None:
        shift = reader.shift
    if shift is None or not reader.is_monotonic:
        raise KsymError(
            "nothing tells how perf's clock stands to py-spy's",
            f"{_MONOTONIC}, and print text with: perf script --header --ns",
        )
    return shift


def _perf_samples(files: Files) -> tuple[Reader, list[Hit]]:
    """perf's samples, kernel frames named by the history if there is one."""
    history = locate.find(files.history, files.perf)
    with _perf_text(files.perf) as text, contextlib.ExitStack() as stack:
        renamer = stack.enter_context(inputs.renamer(text, history, None)) if history else None
        reader = pyspy_perf.Reader(renamer)
        return reader, list(reader.read(text.pieces()))


@contextlib.contextmanager
def _perf_text(path: str) -> Iterator[inputs.Text]:
    """The text of a perf.data, or the file itself if it is such text."""
    with open(path, "rb") as file:
        is_data = file.read(len(MAGIC)) == MAGIC
        file.seek(0)
        if not is_data:
            yield inputs.Text(file)
            return
    call = [*_SCRIPT, "-i", path]
    try:
        child = subprocess.Popen(
            call, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
    except OSError as error:
        raise KsymError(
            f"perf cannot be run ({error.strerror})",
            "install it, or give the text that perf script --ns --header prints elsewhere",
        ) from error
    with child:
        if child.stdout is not None:
            yield inputs.Text(child.stdout)
    if child.returncode:
        raise KsymError(f"perf script cannot read {path}", f"see: {' '.join(call)}")
