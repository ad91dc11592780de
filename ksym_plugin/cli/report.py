"""``ksym report``: which BPF program used how much of the time."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Any, Callable

import click

from ksym_plugin.cli import inputs, options
from ksym_plugin.cli.output import say, write_json, write_lines
from ksym_plugin.history.locate import Choice
from ksym_plugin.perf import report, session
from ksym_plugin.perf.script import STACKS, Child, Input, Request, clocks
from ksym_plugin.perf.stack_output import ReportOutput, TextStacks
from ksym_plugin.stacks.account import lived, loader
from ksym_plugin.timeline.errors import KsymError
from ksym_plugin.timeline.resolver import Locator

_ROW = "{:>7}  {:>8}  {:>13}  {:>13}  {:>8}  {:>13}  {:18}  {:20}  {:20}  {}"
_HEAD = _ROW.format(
    *("PROGRAM", "OWN", "OF ALL", "OF KERNEL", "TOTAL", "OF KERNEL"),
    *("LIVED", "LOADED BY", "RAN IN", "NAME"),
)
#: How many source lines of a program are shown.
_MOST_LINES = 5
#: How programs are ordered by each key: the greatest first, but names and ids upwards.
_SORTS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "own": lambda row: (-row["own"]["samples"], -row["total"]["samples"]),
    "total": lambda row: (-row["total"]["samples"], -row["own"]["samples"]),
    "lived": lambda row: -_least_life(row),
    "program": lambda row: (row["program"] is None, row["program"] or 0),
    "name": lambda row: row["name"],
    "loader": lambda row: (row["comm"] or "", row["pid"] or 0),
}


@click.command(
    name="report",
    short_help="Account for the time of BPF programs.",
    epilog="Example: ksym report --sort total --filter ingress",
)
@options.perf_data
@options.history
@options.samples_clock
@click.option("--event", metavar="NAME", help="Of which event.  [default: most samples]")
@click.option(
    "--sort",
    type=click.Choice(list(_SORTS)),
    default="own",
    show_default=True,
    help="What to order the programs by.",
)
@click.option("--filter", "pattern", default="", metavar="PATTERN", help="Of which names.")
@click.option(
    "--lines", "with_lines", is_flag=True, help="The hottest source lines below each program."
)
@options.as_json
@click.argument("perf_options", nargs=-1, type=click.UNPROCESSED, metavar="[-- PERF OPTIONS]")
def command(
    *,
    data: str | None,
    history: Choice,
    clock: str | None,
    event: str | None,
    sort: str,
    with_lines: bool,
    as_json: bool,
    pattern: str,
    perf_options: tuple[str, ...],
) -> None:
    """Tell which BPF programs the samples of a perf.data were in.

    OWN are the samples that ended in the program, TOTAL those that also went through it.
    Shares are of all samples, or of those that ended in the kernel, and come with the error
    of sampling: the true share is within it in 95 of 100 profiles. PATTERN is a part of the
    name, or a whole one with * and ?. PERF OPTIONS go to perf script. Source lines are those
    of programs that were compiled with -g; a sample counts for the line at which it was in the
    program, or at which the program had called. In JSON, which always has them, times
    are nanoseconds of CLOCK_MONOTONIC.
    """
    documents, status = account(data, history, clock, perf_options)
    found = _choose(documents, event)
    rows = [row for row in found["programs"] if fnmatchcase(row["name"], options.glob(pattern))]
    rows.sort(key=_SORTS[sort])
    if as_json:
        write_json({**found, "programs": rows})
    else:
        write_lines([_summary(found)])
        if rows:
            write_lines(["", _HEAD, *(line for row in rows for line in _lines(row, with_lines))])
        else:
            say(_why_none(found, pattern))
    if status:  # Also where perf could read a part of the data only.
        raise KsymError(f"perf script failed (status {status}) before the end of the data")


def account(
    data: str | None, history: Choice, clock: str | None, perf_options: tuple[str, ...]
) -> tuple[list[dict[str, Any]], int]:
    """What is counted of a perf.data, one of each event, and perf's exit status.

    Without perf where that counts the same; always by perf script if that is given options.
    KsymError for a kernel whose frames nothing tells from a user's.
    """
    request = Request(perf_options)
    request.refuse_for_stacks()
    source = inputs.open_data(data)
    if source.recorded.other_split:
        raise KsymError(
            f"its BPF programs cannot be told: {source.recorded.other_split}", "use perf report"
        )
    if not perf_options:
        # Where perf has to read it, that says what there is to say.
        with contextlib.suppress(KsymError):
            with contextlib.redirect_stderr(io.StringIO()) as told:
                documents = report.read(str(source.path), history, clock)
            click.echo(told.getvalue(), nl=False, err=True)
            return documents, 0
    return by_text(source, history, clock, request)


def by_text(
    source: Input, history: Choice, clock: str | None, request: Request
) -> tuple[list[dict[str, Any]], int]:
    """The same of the text that perf script prints. KsymError if there is no perf."""
    output = ReportOutput()
    with session.open_session(history, source.path, source.recorded, clock) as known:
        renamer = known.renamer(clocks(source.recorded, known, clock))
        stacks = TextStacks(renamer, output, Locator(known.lines))
        with Child(source, [*STACKS, *request.options]) as perf:
            try:
                inputs.read_all(stacks, perf.pieces())
                status = perf.status()
            finally:
                say(*renamer.report())
    documents = output.account.documents()
    if status and not documents:
        raise KsymError(f"perf script failed (status {status}); see above")
    return documents, status


def _choose(documents: list[dict[str, Any]], event: str | None) -> dict[str, Any]:
    """The event asked for, or else the one with the most samples."""
    if not documents:
        raise KsymError("there are no samples in it")
    names = [document["event"] for document in documents]
    if event is None:
        if len(names) > 1:
            say(f"this is about {names[0]}; --event takes another: {', '.join(names[1:])}")
        return documents[0]
    if event not in names:
        raise KsymError(f"there are no samples of {event}; there are some of: {', '.join(names)}")
    return documents[names.index(event)]


def _least_life(row: dict[str, Any]) -> float:
    """ns that a program lived; what is still there outlived all others."""
    if row["lived"] is None:
        return -1.0
    least = row["lived"][0]
    return float("inf") if least is None else float(least)


def _summary(found: dict[str, Any]) -> str:
    samples, kernel, bpf = found["samples"], found["kernel_samples"], found["bpf_samples"]
    return (
        f"{samples:,} samples of {found['event']}: {kernel:,} in the kernel"
        f" ({_percent(kernel, samples)}), {bpf:,} of them in BPF"
        f" ({_percent(bpf, kernel)} of the kernel's)"
    )


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / (whole or 1):.1f} %"


def _lines(row: dict[str, Any], with_sources: bool) -> Iterator[str]:
    """A program's row and, in the same columns, its source lines."""
    yield _line(row)
    if not with_sources:
        return
    for source in row["lines"][:_MOST_LINES]:
        own, total = f"{source['own']:,}", f"{source['samples']:,}"
        text = " ".join((source["text"] or "").split())
        location = f"  {source['file'].rpartition('/')[2]}:{source['line']}  {text}"
        yield _ROW.format("", own, "", "", total, *[""] * 4, location).rstrip()
    more = len(row["lines"]) - _MOST_LINES
    if more > 0:
        yield _ROW.format(*[""] * 9, f"  and {more} more lines")


def _line(row: dict[str, Any]) -> str:
    own, total = row["own"], row["total"]
    return _ROW.format(
        "-" if row["program"] is None else row["program"],
        f"{own['samples']:,}",
        _share(own["of_all"]),
        _share(own["of_kernel"]),
        f"{total['samples']:,}",
        _share(total["of_kernel"]),
        "-" if row["lived"] is None else lived(*row["lived"]),
        loader(row["pid"], row["comm"]),
        _tasks(row["tasks"], total["samples"]),
        row["name"] + ("" if row["traces"] is None else f" (traces {row['traces']})"),
    )


def _share(interval: dict[str, float]) -> str:
    half = (interval["high"] - interval["low"]) / 2
    return f"{100 * interval['share']:.1f} ±{100 * half:.1f} %"


def _tasks(tasks: dict[str, int], total: int) -> str:
    """The task that a program ran in most, and how many others there were."""
    comm, samples = next(iter(tasks.items()))
    if len(tasks) == 1:
        return comm
    return f"{comm} {100 * samples // (total or 1)} %, {len(tasks) - 1} more"


def _why_none(found: dict[str, Any], pattern: str) -> str:
    if found["programs"]:
        return f"no program with samples matches {pattern!r}; there are {len(found['programs'])}"
    if not found["kernel_samples"]:
        return (
            f"none of the {found['samples']:,} samples ended in the kernel; perf leaves it out"
            " without privileges (kernel.perf_event_paranoid) and for events ending in :u"
        )
    return (
        "no sample went through a BPF program: none ran while perf sampled, or its frames have no"
        " names, which a history gives them: ksym record -- perf record -g"
    )
