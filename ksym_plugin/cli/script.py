"""``ksym script``: perf script's own text with every kernel frame named, and pictures of it."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import re
from collections.abc import Iterator
from typing import IO, TextIO

import click

from ksym_plugin.cli import inputs, options
from ksym_plugin.cli.output import open_result, say, write_pieces
from ksym_plugin.history.locate import Choice
from ksym_plugin.perf import session
from ksym_plugin.perf.script import (
    STACKS,
    WITHOUT_VALUE,
    Child,
    Request,
    ScriptText,
    clocks,
)
from ksym_plugin.perf.stack_output import TextStacks, open_output
from ksym_plugin.stacks.frames import SAMPLES
from ksym_plugin.timeline.resolver import Locator

_OURS = (
    *("-i", "-H", "-o", "--input", "--history", "--output"),
    *("--format", "--clock", "--vmlinux", "--event", "--weight", "--boot"),
)
_FLAGS = ("-h", "--help", "--lines")
#: perf's own spellings of -i: behind short options without a value, and cut short.
_BUNDLED = re.compile(f"-({WITHOUT_VALUE}+)(i.*)", re.DOTALL)
_INPUT = re.compile(r"--inpu?(?==|$)")
#: What a field is taken away with: ``-F -ip`` is no ``-i`` either.
_FIELDS = re.compile(f"-{WITHOUT_VALUE}*F|--fi(?:e(?:l(?:ds?)?)?)?")


class PassingCommand(click.Command):
    """Takes our options out of the arguments and leaves all others to perf as they are."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ours, theirs = split(args)
        return super().parse_args(ctx, [*ours, "--", *theirs])


def split(args: list[str]) -> tuple[list[str], list[str]]:
    """Our arguments and perf's, in order: ``-Fip`` is perf's ``-F ip`` and holds no ``-i``."""
    ours: list[str] = []
    theirs: list[str] = []
    rest = iter(args)
    for word in rest:
        bundled = _BUNDLED.fullmatch(word)
        if bundled is not None:
            theirs.append(f"-{bundled[1]}")
        arg = _INPUT.sub("--input", word if bundled is None else f"-{bundled[2]}")
        if arg == "--":  # All that follows is perf's; to perf itself it would mean a script's.
            theirs += rest
        elif _FIELDS.fullmatch(arg):
            theirs += [arg, *itertools.islice(rest, 1)]
        elif arg in _OURS:
            ours += [arg, *itertools.islice(rest, 1)]
        elif arg in _FLAGS or arg.startswith(("-i", "-H", "-o")) or arg.split("=")[0] in _OURS:
            ours.append(arg)
        else:
            theirs.append(arg)
    return ours, theirs


@click.command(
    name="script",
    cls=PassingCommand,
    short_help="perf script, with every kernel frame named.",
    epilog="Example: ksym script --format svg -o flames.svg",
    options_metavar="[OPTIONS]",
)
@options.perf_data
@options.history
@click.option(
    "--format",
    "form",
    type=click.Choice(["text", "folded", "svg", "speedscope"]),
    default="text",
    show_default=True,
    help="perf script's text, one line a stack, a flame graph, or a file for speedscope.",
)
@options.output
@click.option(
    "--event",
    metavar="NAME",
    help="Samples of this event; what is not text is of one.  [default: the one that has most]",
)
@options.weight(None)
@click.option(
    "--lines",
    "with_lines",
    is_flag=True,
    help="Source lines in text and folded stacks too: of BPF, and of the kernel if its file is"
    " there.",
)
@click.option(
    "--vmlinux",
    "image",
    metavar="FILE",
    help="The kernel's vmlinux or .debug file: for names, and with --lines for its lines.",
)
@options.samples_clock
@click.argument("perf_options", nargs=-1, type=click.UNPROCESSED, metavar="[PERF OPTIONS]...")
def command(
    *,
    data: str | None,
    history: Choice,
    form: str,
    output: str | None,
    event: str | None,
    weight: str | None,
    with_lines: bool,
    image: str | None,
    clock: str | None,
    perf_options: tuple[str, ...],
) -> None:
    """Print what perf recorded, with every kernel frame named as it was when sampled.

    This is perf script's own text: all of its options work, kernel frames get the names
    that hold, and every other byte is perf's. -S and --stop-bt look for the names that are
    printed. perf's exit status is passed on. The history may also lie beside the perf.data.

    svg and speedscope have the source lines of BPF programs that were compiled with -g;
    --lines prints them below the frames of the text. Without --vmlinux, the kernel's file
    is looked for on the servers in $DEBUGINFOD_URLS.
    """
    request = Request(perf_options)
    request.refuse_event(event)
    if form != "text":
        request.refuse_for_stacks()
    elif weight is not None:
        raise click.UsageError("--weight is for what counts samples: text has each of them")
    source = inputs.open_data(data)
    file = inputs.vmlinux_for_data(image, with_lines, source.recorded)
    with contextlib.ExitStack() as stack:
        known = session.open_session(history, source.path, source.recorded, clock)
        stack.enter_context(known)
        kernel = None if file is None else session.open_kernel(file, source.recorded, known)
        locator = None
        if with_lines or form not in ("text", "folded"):
            lines = inputs.open_lines(kernel, stack) if with_lines else None
            locator = Locator(known.lines, lines)
        renamer = known.renamer(clocks(source.recorded, known, clock), kernel)
        fields = () if form == "text" else STACKS
        perf = stack.enter_context(Child(source, [*fields, *request.options]))
        result = stack.enter_context(open_result(output))
        try:
            if form == "text":
                printed = ScriptText(renamer, request, event, locator)
                write_pieces(map(printed.feed, perf.pieces()), result)
                result.write(printed.close())
            else:
                title = os.path.basename(source.path or "") or "perf.data"
                with _as_text(result) as stream:
                    counted = open_output(form, stream, title, event, weight or SAMPLES)
                    inputs.read_all(TextStacks(renamer, counted, locator), perf.pieces())
            status = perf.status()
        finally:
            say(*renamer.report())
        if status:
            raise click.exceptions.Exit(status)


@contextlib.contextmanager
def _as_text(result: IO[bytes]) -> Iterator[TextIO]:
    """Names are printed as they are; the stream below is closed by who opened it."""
    stream = io.TextIOWrapper(result, encoding="utf-8", errors="surrogateescape", newline="")
    try:
        yield stream
    finally:
        stream.detach()
