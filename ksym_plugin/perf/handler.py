"""The ``perf script`` handler: perf's samples in, named stacks out.

It runs inside perf's own interpreter, so it imports the core alone and never raises: an
exception would abort perf (status 134) before its ``trace_end``. What goes wrong with a
sample is counted, and the sample is passed on as perf had it.

A newer perf embeds no Python and starts scripts as programs. Then it reads what ``perf
script`` prints of the samples.
"""

from __future__ import annotations

import gc
import os
import signal
import sys

from ksym_plugin.history.locate import Choice
from ksym_plugin.kernel.clocks import CLOCKS, clock_of_attr
from ksym_plugin.perf import data, session
from ksym_plugin.perf.namer import Namer, format_name, is_core, located
from ksym_plugin.perf.output import INLINED, TextOutput, give_up_output, say
from ksym_plugin.stacks.frames import SAMPLES, WEIGHTS
from ksym_plugin.stacks.names import strip_nul
from ksym_plugin.timeline.errors import KsymError
from ksym_plugin.timeline.resolver import FIRST_MARKER, Locator
from ksym_plugin.timeline.symbols import Frame

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from typing import Any

    from ksym_plugin.kernel.dwarf import ImageLines
    from ksym_plugin.perf.data import Recorded
    from ksym_plugin.perf.output import Output, Piece
    from ksym_plugin.perf.repaint import Renamer
    from ksym_plugin.perf.session import Session

    #: An entry of a callchain, as perf hands it over.
    Node = dict[str, Any]

#: Built into perf's own interpreter and no other.
_PERF_MODULE = "perf_trace_context"
#: A shell's exit status of a program that a signal ended is this and the signal's number.
_SIGNALLED = 128
FORMATS = ("text", "folded", "svg", "speedscope", "report")
#: These tell of source lines without being asked to.
_LINED = ("svg", "speedscope", "report")
_KERNEL_HALF = 1 << 63
_GUEST = "[guest."
#: A page of the user's at a kernel's address.
_VSYSCALL = "[vsyscall]"
#: PERF_RECORD_MISC_USER (linux/perf_event.h). Above it are a hypervisor, which perf cannot tell
#: from a guest, and guests.
_USER_MODE = 2
#: perf's time of a sample that has none is 0 or all ones, by its version.
_NO_TIME = 1 << 63
#: A time that nothing covers.
_OUTSIDE = (-1, -1)


class Options:
    """The handler's options.

    ``lines`` says that source lines are asked for, ``vmlinux`` names the kernel's file.
    ``input`` is the perf.data that a script reads itself, where it is a program of its own.
    Outputs of stacks count the samples of ``event``, by default the one that has most, and of
    each ``weight``, one of WEIGHTS.
    """

    boot: str | None = None
    lines = False
    vmlinux: str | None = None
    event: str | None = None
    weight = SAMPLES

    def __init__(
        self, history: str | None, clock: str | None, format: str, input: str | None = None
    ) -> None:
        self.history = history
        self.clock = clock
        self.format = format
        self.input = input

    @property
    def choice(self) -> Choice:
        """The history and the boot that are asked for."""
        return Choice(self.history, self.boot)

    @property
    def wants_lines(self) -> bool:
        """Whether the output tells source lines."""
        return self.lines or self.format in _LINED


def parse(arguments: list[str], is_embedded: bool = True) -> Options:
    """Exits as argparse does on what it does not know (status 2), before perf reads a sample."""
    import argparse

    parser = argparse.ArgumentParser(
        prog="perf script -s ksym_handler.py --",
        description="Print perf's samples with every kernel frame named as it was when sampled.",
    )
    parser.add_argument(
        "-H", "--history", metavar="FILE", help="what ksym record wrote (default: see ksym script)"
    )
    parser.add_argument("--boot", help="the boot in it, by number or id")
    parser.add_argument(
        "--clock", choices=CLOCKS, help="the clock of the samples, whatever perf tells of it"
    )
    parser.add_argument("--format", choices=FORMATS, help="report: samples by BPF program, as JSON")
    parser.add_argument(
        "--lines",
        action="store_true",
        help="source lines in text and folded stacks: of BPF, with --vmlinux of the kernel too",
    )
    parser.add_argument(
        "--vmlinux",
        metavar="FILE",
        help="name kernel functions from this vmlinux or .debug file (needs pyelftools)",
    )
    parser.add_argument(
        "--event", help="for stacks: count the samples of this one (default: that has most)"
    )
    parser.add_argument(
        "--weight", choices=WEIGHTS, help="for stacks: count samples (default) or add up periods"
    )
    if not is_embedded:
        parser.add_argument("-i", "--input", metavar="FILE", help="what perf recorded")
    return parser.parse_args(arguments, Options(None, None, "text"))


class Handler:
    """One run over one perf.data. ``process_event`` and ``trace_end`` are perf's to call."""

    def __init__(self, options: Options, data_path: str | None) -> None:
        self.recorded = data.read(data_path)
        self._output = choose_output(options, data_path, self.recorded)
        self._user = self._output.user
        #: Whether some of the output could not be written.
        self.is_cut_short = False
        self._session = session.open_session(
            options.choice, data_path, self.recorded, options.clock
        )
        self._kernel_lines: ImageLines | None = None
        try:
            path, image = options.vmlinux, None
            if path is not None:
                image = session.open_kernel(path, self.recorded, self._session)
            if image is not None and options.lines:
                from ksym_plugin.kernel.vmlinux import open_lines

                self._kernel_lines = open_lines(image, say, may_raise=False)
            #: Waits until a history that is being written covers a time; up to when it does.
            self._follow, self._covered = self._session.follower(), 0
        except BaseException:
            self.close()
            raise
        self._clock_map = self._session.clock_map
        #: The clock of all samples where the user says so, and that of each event.
        self._clock = options.clock
        self._clocks: dict[str, str | None] = {}
        self._has_warned = False
        self._namer = Namer(self._session.lookup, self._session.running(image))
        self.tally = self._namer.tally
        wants_lines = options.wants_lines
        self._locator = Locator(self._session.lines, self._kernel_lines) if wants_lines else None
        #: Pieces of frames for which perf's name holds at all times, by address. A leaf's source
        #: line is not that of a caller at the same address.
        self._fixed: dict[int, Piece] = {}
        self._fixed_leaves: dict[int, Piece] = {} if wants_lines else self._fixed

    def process_event(self, event: dict[str, Any]) -> None:
        """A sample, as perf hands it over."""
        try:
            pieces = self._pieces(event)
        except Exception as error:  # noqa: BLE001 - nothing a sample holds may abort perf
            self.tally.failed("passed on as perf had them", error)
            pieces = self._as_perf_had_it(event)
        try:
            self._output.sample(event, pieces)
        except OSError as error:
            self._give_up_output(error)
        except Exception as error:  # noqa: BLE001 - as above
            self.tally.failed("left out", error)

    def trace_end(self) -> None:
        try:
            self._output.close()
        except OSError as error:
            self._give_up_output(error)
        except KsymError as error:
            say(str(error))
        except Exception as error:  # noqa: BLE001 - perf would abort
            say(f"the output is incomplete: {type(error).__name__}: {error}")
            self.is_cut_short = True
        for line in self._namer.report():
            say(line)
        self.close()

    def close(self) -> None:
        """Let go of the history and the kernel's file."""
        self._session.close()
        if self._kernel_lines is not None:
            self._kernel_lines.close()

    def _give_up_output(self, error: OSError) -> None:
        self.is_cut_short = True
        give_up_output(error)

    # Naming

    def _pieces(self, event: dict[str, Any]) -> list[Piece]:
        """The frames of a sample as pieces of the output, leaf first."""
        mode = event["sample"].get("cpumode", 0)
        if mode > _USER_MODE:
            return self._as_perf_had_it(event)
        chain = event.get("callchain") or ()
        nodes = iter(chain or (_leaf(event),))
        pieces = [] if mode == _USER_MODE else self._kernel_part(event, chain, nodes)
        pieces.extend(map(self._user, nodes))
        return pieces

    def _kernel_part(
        self, event: dict[str, Any], chain: Sequence[Node], nodes: Iterator[Node]
    ) -> list[Piece]:
        """The frames of a sample up to the first user frame; these are taken from ``nodes``.

        What is behind that was read from a user's stack. It is not the kernel's, whatever it
        looks like.
        """
        pieces: list[Piece] = []
        window = None if self._follow is None else self._window(event)
        fixed = self._fixed_leaves
        confirmed = 0
        for node in nodes:
            address = node["ip"]
            piece = fixed.get(address)
            if piece is not None:
                confirmed += 1
            elif not _KERNEL_HALF <= address < FIRST_MARKER or node.get("dso") == _VSYSCALL:
                pieces.append(self._user(node))
                break
            else:
                if window is None:
                    window = self._window(event)
                piece = self._kernel(node, window, chain, len(pieces))
            pieces.append(piece)
            fixed = self._fixed
        self.tally.confirmed += confirmed
        return pieces

    def _kernel(self, node: Node, window: tuple[int, int], chain: Sequence[Node], at: int) -> Piece:
        """A frame of the kernel's part, ``chain[at]`` if there is a callchain. It is cached where
        perf's name holds at all times."""
        address, name, offset = node["ip"], _name(node), node.get("sym_off")
        dso = strip_nul(node.get("dso") or "")
        if dso.startswith(_GUEST):  # looks like this kernel's, but is another's
            return self._by_perf(node)
        functions = _functions_at(chain, at, name) if name and chain else [name]
        around = functions[-1]
        decision, shown = self._namer.decide(address, window, around, dso, offset)
        if decision == around != name:
            decision, shown = name, INLINED
        frame: Frame | None = None
        if self._locator is not None and name == functions[0]:
            frame = located(self._locator, address, offset, decision, dso, not at)
        if isinstance(decision, Frame):
            text, offset = format_name(decision), decision.offset
        else:
            text = decision or ""
        piece = self._output.kernel(address, text, offset, shown, frame)
        is_perf_s = bool(chain and decision) and {*functions} == {decision} and is_core(dso)
        if is_perf_s and self._namer.is_fixed(address, window, name, dso, offset):
            (self._fixed if at else self._fixed_leaves)[address] = piece
        return piece

    def _as_perf_had_it(self, event: dict[str, Any]) -> list[Piece]:
        """The frames of a sample under perf's own names, as far as they can be read."""
        pieces: list[Piece] = []
        try:
            for node in event.get("callchain") or (_leaf(event),):
                pieces.append(self._by_perf(node))  # noqa: PERF401 - keeps what came before
        except Exception as error:  # noqa: BLE001 - nothing a sample holds may abort perf
            self.tally.failed("cut short", error)
        return pieces

    def _by_perf(self, node: Node) -> Piece:
        if node["ip"] < _KERNEL_HALF:
            return self._output.user(node)
        dso = strip_nul(node.get("dso") or "")
        return self._output.kernel(node["ip"], _name(node), node.get("sym_off"), dso)

    def _window(self, event: dict[str, Any]) -> tuple[int, int]:
        """From when to when a sample can have been taken, CLOCK_MONOTONIC ns.

        That is one instant unless its clock was set about then, and a time before everything
        if nothing is known of it. A history that is written covers it then.
        """
        name = str(event.get("ev_name"))
        if name not in self._clocks:
            self._clocks[name] = self._clock_of(event)
        clock = self._clocks[name]
        stamp = event["sample"].get("time") or 0
        if clock is None or self._clock_map is None or not 0 < stamp < _NO_TIME:
            return _OUTSIDE
        window = self._clock_map.window(clock, stamp, stamp)
        if self._follow is None or window[1] <= self._covered:
            return window
        self._covered, self._clock_map = self._follow(window[1])
        # Symbols may have come where none had been.
        self._namer.forget()
        self._fixed.clear()
        self._fixed_leaves.clear()
        if window[1] > self._covered:
            self._follow = None  # The recorder does not get on, or has ended: never wait again.
        return self._clock_map.window(clock, stamp, stamp)

    def _clock_of(self, event: dict[str, Any]) -> str | None:
        """The clock of an event's samples; None, and one message, if it cannot be placed."""
        clock = self._clock or clock_of_attr(event.get("attr") or b"")
        if self._clock_map is None or (clock is not None and self._clock_map.knows(clock)):
            return clock
        if not self._has_warned:
            self._has_warned = True
            say(
                f"samples of {event.get('ev_name')} are on a clock that the history cannot place,"
                " so BPF frames stay as perf has them; record with: perf record -k CLOCK_MONOTONIC"
            )
        return None


def _leaf(event: dict[str, Any]) -> Node:
    """The only frame of a sample without a callchain, in the shape of a callchain's."""
    node: Node = {"ip": event["sample"].get("ip", 0), "dso": event.get("dso")}
    if event.get("symbol"):
        offset = event.get("symoff")
        node["sym"] = {"name": event["symbol"], "start": node["ip"] - (offset or 0)}
        node["sym_off"] = offset
    return node


def _name(node: Node) -> str:
    """perf's name of a frame; empty where it has none."""
    symbol = node.get("sym")
    return strip_nul(symbol["name"]) if symbol else ""


def _functions_at(chain: Sequence[Node], at: int, name: str) -> list[str]:
    """perf's names of the functions at the address of ``chain[at]``, the innermost first.

    perf gives inlined functions frames of their own, with the address of the one around them.
    """
    address, first, last = chain[at]["ip"], at, at + 1
    while first and chain[first - 1]["ip"] == address:
        first -= 1
    while last < len(chain) and chain[last]["ip"] == address:
        last += 1
    if last - first == 1:
        return [name]
    return [name for name in map(_name, chain[first:last]) if name]


def choose_output(options: Options, data_path: str | None, recorded: Recorded) -> Output:
    """What prints in the format asked for; the text's own columns need perf's header."""
    if options.format == "text":
        return TextOutput(sys.stdout, recorded.width, lambda: data.user_maps(data_path))
    from ksym_plugin.perf.stack_output import open_output

    name = os.path.basename(data_path or "") or "perf.data"
    return open_output(options.format, sys.stdout, name, options.event, options.weight)


def start(arguments: list[str]) -> Handler:
    """The handler for the perf this runs inside of; exits with a sentence if it cannot be.

    Where there is no perf around it, it is a program: that runs, and exits at its end. The
    interpreter is set up to handle samples and nothing else.
    """
    is_embedded = _PERF_MODULE in sys.builtin_module_names
    options = parse(arguments, is_embedded)
    # Every sample is a tree of dicts without cycles: looking for some costs a twentieth.
    gc.disable()
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # As perf itself: a closed pipe ends it.
    if sys.stdout is None:  # closed by whoever started perf
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - for good
    sys.stdout.reconfigure(encoding="utf-8", errors="surrogateescape")  # type: ignore[union-attr]
    try:
        if is_embedded:
            return Handler(options, data.path_of_running_perf())
        sys.exit(run(options))
    except KsymError as error:
        say(str(error))
        sys.exit(1)
    except KeyboardInterrupt:
        say("interrupted: what is printed is incomplete")
        sys.exit(_SIGNALLED + signal.SIGINT)


def run(options: Options) -> int:
    """Print what perf script prints, its kernel frames named; the exit status, perf's if it ran.

    Of the perf.data that is named or comes on standard input; its text may come there too.
    KsymError if there is nothing to read, or it cannot be read.
    """
    if options.lines or options.vmlinux is not None:
        raise KsymError("text gets no source lines", "run: ksym script --lines")
    from ksym_plugin.perf import script

    source = script.Input(options.input)
    if source.is_empty:
        say("this is a script for perf; run: perf script -s ksym_handler.py, or: ksym script")
        return 1
    if source.path is None:
        from ksym_plugin.perf.text_origin import Text, open_text

        text = Text(sys.stdin.buffer, source.start)
        with open_text(text, options.choice, options.clock) as (known, renamer):
            return int(not _print_named(text.pieces(), options, known, renamer))
    with session.open_session(options.choice, source.path, source.recorded, options.clock) as known:
        renamer = known.renamer(script.clocks(source.recorded, known, options.clock))
        fields = () if options.format == "text" else script.STACKS
        with script.Child(source, [*fields, "--ns"]) as perf:
            is_whole = _print_named(perf.pieces(), options, known, renamer)
            return perf.status() if is_whole else 1


def _print_named(
    pieces: Iterable[bytes], options: Options, known: Session, renamer: Renamer
) -> bool:
    """Print the text, and what became of its frames; whether it could be written."""
    is_whole = True
    try:
        _print(pieces, options, known, renamer)
        sys.stdout.flush()
    except OSError as error:
        give_up_output(error)
        is_whole = False
    finally:
        for line in renamer.report():
            say(line)
    return is_whole


def _print(pieces: Iterable[bytes], options: Options, known: Session, renamer: Renamer) -> None:
    out = sys.stdout.buffer
    if options.format == "text":
        from ksym_plugin.perf.repaint import Annotator

        annotator = Annotator(renamer)
        for piece in pieces:
            out.write(annotator.feed(piece))
            out.flush()
        out.write(annotator.close())
        return
    from ksym_plugin.perf.stack_output import TextStacks, open_output

    output = open_output(options.format, sys.stdout, "perf script", options.event, options.weight)
    reader = TextStacks(renamer, output, Locator(known.lines) if options.wants_lines else None)
    for piece in pieces:
        reader.read(piece)
    reader.end()
