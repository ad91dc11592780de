"""``ksym record``: record BPF symbols in a history, for as long as a command runs."""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import time
from collections.abc import Iterator, Sequence

import click

from ksym_plugin.cli.options import SECOND, history_size, ring_size, span
from ksym_plugin.cli.output import plural, say
from ksym_plugin.cli.signals import BY_SIGNAL, STOPS, Signals, not_run, pass_on, shell_status
from ksym_plugin.history import locate
from ksym_plugin.history.recorder import Recorder
from ksym_plugin.history.writer import HistoryWriter
from ksym_plugin.kernel import kallsyms
from ksym_plugin.kernel.clocks import PerfClock
from ksym_plugin.kernel.modules import LISTING
from ksym_plugin.kernel.worker import run_promptly
from ksym_plugin.sources import AUTO, NAMES, open_source
from ksym_plugin.sources.details import DetailsProcess
from ksym_plugin.sources.modules import Modules
from ksym_plugin.timeline.errors import KsymError, SourceError
from ksym_plugin.timeline.symbols import BPF_PROG, MODULE
from ksym_plugin.timeline.tracker import Source, Tracker

#: How often a history is cut to --max-age and --max-size, in ns.
_RETENTION_SPAN = 300 * SECOND


@click.command(
    name="record",
    short_help="Keep a history of BPF symbols, while a command runs.",
    epilog="Example: ksym record -- perf record -g -p PID",
    context_settings={"allow_interspersed_args": False},
)
@click.option(
    "-o",
    "--output",
    "-H",
    "--history",
    "output",
    default=locate.BESIDE,
    show_default=True,
    metavar="FILE",
    help="The history; what it holds already is kept.",
)
@click.option(
    "--source",
    default=AUTO,
    show_default=True,
    type=click.Choice([AUTO, *NAMES]),
    help="Where changes come from.",
)
@click.option(
    "--for", "seconds", type=span, metavar="TIME", help="Stop after so many seconds (or m, h, d)."
)
@click.option(
    "--max-age",
    type=span,
    metavar="TIME",
    help="Forget what ended before, such as 7d; seconds without a unit.",
)
@click.option(
    "--max-size", type=history_size, metavar="SIZE", help="Forget the oldest beyond, such as 1G."
)
@click.option(
    "--ring",
    "ring_bytes",
    type=ring_size,
    metavar="SIZE",
    help="Room for what kprobe or fentry tells in a burst.  [default: 4M]",
)
@click.option("--stats", is_flag=True, help="Say at the end what recording has cost.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def command(
    output: str,
    source: str,
    seconds: int | None,
    max_age: int | None,
    max_size: int | None,
    ring_bytes: int | None,
    stats: bool,
    command: tuple[str, ...],
) -> None:
    """Record which BPF symbol was where and when, until Ctrl-C, or while COMMAND runs.

    COMMAND starts once the history covers the time, and its exit status is passed on.
    With --for, a COMMAND that still runs by then is ended with SIGTERM.
    """
    # Compiling a probe takes seconds, and until then Ctrl-C ends this as any program.
    changes, refusals = open_source(source, ring_bytes)
    with Signals() as signals, contextlib.ExitStack() as stack:
        stack.callback(changes.close)
        if ring_bytes is not None and "ring_bytes" not in changes.stats():
            say(f"{changes.name} has no ring to be sized: --ring changes nothing")
        if stats:
            try:
                changes.measure()
            except SourceError as error:
                say(str(error))
        recording = Recording(output, changes, (max_age, max_size), signals, stack)
        instead = "".join(f"; not {name}: {error.problem}" for name, error in refusals)
        say(f"recording with {changes.name} into {output}{instead}", *changes.notes)
        if recording.clock.problem:
            say(f"{recording.clock.problem}; record samples with: perf record -k CLOCK_MONOTONIC")
        if seconds is not None:
            recording.until = time.monotonic_ns() + seconds
        status = recording.run(command)
        for line in recording.summary(stats):
            say(line)
    raise click.exceptions.Exit(status)


class Recording:
    """A history that is being written, until ``until`` (CLOCK_MONOTONIC ns) at the latest.

    ``bounds`` are its age in ns and its size in bytes at the most. ``stack`` closes what this
    opens. If it cannot start, no new history is left behind.
    """

    def __init__(
        self,
        output: str,
        source: Source,
        bounds: tuple[int | None, int | None],
        signals: Signals,
        stack: contextlib.ExitStack,
    ) -> None:
        self.until: int | None = None
        self.output = output
        self.source = source
        self._max_age, self._max_size = bounds
        #: When the history is to be cut to its bounds.
        self._due = 0
        self._signals = signals
        self._has_failed = False
        self.details = _details(stack)
        if source.fileno() >= 0:
            run_promptly()
        self.clock = PerfClock()
        stack.callback(self.clock.close)
        started = time.monotonic_ns()
        is_new = not os.path.exists(output)
        self._writer = HistoryWriter(output, source.name, started, kallsyms.text_start())
        try:
            self.modules = _modules(stack, self._writer)
            self._recorder = Recorder(source, self._writer, self.clock, self.details, self.modules)
            self._recorder.start()
        except BaseException:
            with contextlib.suppress(KsymError):  # The disk may be full.
                self._writer.close(started)
            if is_new:
                # Readers would take an empty history before others that are not.
                with contextlib.suppress(OSError):
                    os.unlink(output)
            raise
        self._changes_before = self._recorder.tracker.changes

    def run(self, command: Sequence[str]) -> int:
        """Record until the end of the command, or until a signal; the exit status."""
        try:
            if command:
                return self._while_running(command)
            while not (self._is_over() or self._step() & STOPS):
                pass
            return 0
        finally:
            # What keeps it from going on was said, and is no second error.
            with contextlib.suppress(KsymError) if self._has_failed else contextlib.nullcontext():
                self._recorder.finish()

    def _while_running(self, command: Sequence[str]) -> int:
        """The command's exit status as a shell has it."""
        stops = self._signals.take() & STOPS
        if stops:
            # The signal came during the start, before there was a command to get it.
            return BY_SIGNAL + min(stops)
        try:
            child = subprocess.Popen(command)
        except OSError as error:
            return not_run(command[0], error)
        try:
            while child.poll() is None:
                if self._is_over():
                    child.terminate()
                    self.until = None
                pass_on(self._step(), child)
        except KsymError as error:
            # The command is the user's, and the error is none of its own: it goes on.
            say(f"{error}; recording has stopped, {command[0]} goes on")
            self._has_failed = True
            self._signals.wait(child)
            return 1
        return shell_status(child.returncode)

    def _step(self) -> set[int]:
        """Record until something is due; the signals that arrived."""
        now = time.monotonic_ns()
        if now >= self._due:
            if self._max_age is not None and now > self._max_age:
                self._writer.forget(now - self._max_age)
            if self._max_size is not None:
                self._writer.shrink(self._max_size)
            self._due = now + _RETENTION_SPAN
        until = self._due if self.until is None else min(self._due, self.until)
        self._recorder.run(until, self._signals.fd)
        return self._signals.take()

    def _is_over(self) -> bool:
        return self.until is not None and time.monotonic_ns() >= self.until

    def summary(self, stats: bool) -> Iterator[str]:
        """What came of it, a sentence each; with ``stats`` also what it has cost."""
        tracker = self._recorder.tracker
        if not self._has_failed:
            yield self._counts(tracker)
        for notes in (self.details, self.modules):
            yield from notes.notes if notes else ()
        if stats:
            yield from costs(self.source, tracker, self.output)
            if self.details is not None:
                yield self.details.summary()

    def _counts(self, tracker: Tracker) -> str:
        lives = [life for life in tracker.timeline.live() if life.symbol.kind == BPF_PROG]
        programs = {life.prog_id or life.symbol.start for life in lives}
        changes = plural(tracker.changes - self._changes_before, "change")
        return (
            f"{changes}, {plural(tracker.losses, 'loss')}, {_resyncs(tracker)};"
            f" {plural(len(programs), 'program')} live at the end; kept in {self.output}"
        )


def _details(stack: contextlib.ExitStack) -> DetailsProcess | None:
    """The process that reads source lines; None, with a message, if it cannot be started."""
    try:
        details = DetailsProcess()
    except OSError as error:
        say(f"there will be no source lines of BPF programs ({error.strerror or error})")
        return None
    stack.callback(details.close)
    details.wait()
    return details


def _modules(stack: contextlib.ExitStack, writer: HistoryWriter) -> Modules | None:
    """What follows the kernel's modules; None if it has none, or, with a message, cannot."""
    if not os.path.exists(LISTING):
        return None
    earlier = [lifetime for lifetime in writer.earlier if lifetime.symbol.kind == MODULE]
    try:
        modules = Modules(earlier, writer.covered_before)
    except (SourceError, OSError) as error:
        say(f"the history will have no modules ({error})")
        return None
    stack.callback(modules.close)
    return modules


def costs(source: Source, tracker: Tracker, output: str) -> list[str]:
    """A sentence each on the source, on its probe where it has one, and on this process."""
    counts = source.stats()
    about = f"{source.name}: {plural(tracker.changes, 'change')} applied"
    about += f", {plural(tracker.losses, 'loss')}, {_resyncs(tracker)}"
    if "records" in counts:
        about += f"; {plural(counts['records'], 'record')} came, {counts['lost']:,} were lost"
        about += f", the ring holds {counts['ring_bytes'] >> 10:,} KB"
    used = resource.getrusage(resource.RUSAGE_SELF)
    cost = f"{used.ru_utime + used.ru_stime:.2f} s of CPU, {used.ru_maxrss / 1024:.0f} MB of memory"
    probe = [_probe(counts)] if "add_runs" in counts else []
    return [about, *probe, f"{cost}, {os.path.getsize(output)} bytes kept"]


def _resyncs(tracker: Tracker) -> str:
    # The first resync is the start.
    return plural(max(0, tracker.resyncs - 1), "resync")


def _probe(counts: dict[str, int]) -> str:
    parts = []
    for kind, change in (("add", "load"), ("del", "unload")):
        runs, span = counts[f"{kind}_runs"], counts[f"{kind}_ns"]
        each = f"{span / runs / 1000:.2f} µs each" if runs else "not measured"
        parts.append(f"{runs:,} times on {change}s ({each})")
    return f"the probe ran {' and '.join(parts)}"
