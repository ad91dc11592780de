"""The body of the ``perf script`` handler: perf's samples in, named stacks out.

Runs inside perf's own interpreter, so it imports the core alone and never raises: an
exception would abort perf (status 134) before its ``trace_end``. What goes wrong with a
sample is counted, and the sample is passed on as perf had it.
"""

from __future__ import annotations

import os
import sys

from ksym_plugin.history.locate import Choice
from ksym_plugin.kernel.clocks import CLOCKS
from ksym_plugin.perf import data, session
from ksym_plugin.perf.namer import Namer, format_name, is_core, located
from ksym_plugin.perf.output import INLINED, TextOutput, give_up_output, say
from ksym_plugin.perf.session import SampleClock
from ksym_plugin.stacks.frames import SAMPLES, WEIGHTS
from ksym_plugin.stacks.names import strip_nul
from ksym_plugin.timeline.errors import KsymError
from ksym_plugin.timeline.resolver import FIRST_MARKER, Locator
from ksym_plugin.timeline.symbols import Frame

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Any

    from ksym_plugin.kernel.dwarf import ImageLines
    from ksym_plugin.kernel.vmlinux import Image
    from ksym_plugin.perf.data import Recorded
    from ksym_plugin.perf.output import Output, Piece

    #: An entry of a callchain, as perf hands it over.
    Node = dict[str, Any]

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


class Options:
    """The handler's options.

    ``lines`` says that source lines are asked for, ``vmlinux`` names the kernel's file.
    ``input`` is the perf.data that a script reads itself, where it is a program of its own.
    Outputs of stacks count the samples of ``event``, by default the one that has most, and of
    each ``weight``, one of WEIGHTS.
    """

    __slots__ = (
        "boot",
        "clock",
        "event",
        "format",
        "history",
        "input",
        "lines",
        "vmlinux",
        "weight",
    )

    def __init__(
        self, history: str | None, clock: str | None, format: str, input: str | None = None
    ) -> None:
        self.history = history
        self.boot: str | None = None
        self.clock = clock
        self.format = format
        self.input = input
        self.lines = False
        self.vmlinux: str | None = None
        self.event: str | None = None
        self.weight = SAMPLES

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
            image = self._open_image(options.vmlinux, options.lines)
            #: Waits until a history that is being written covers a time.
            self._follow = self._session.follower()
        except BaseException:
            self.close()
            raise
        self._covered = 0
        self._clock = SampleClock(options.clock, self._session.clock_map)
        self._namer = Namer(self._session.lookup, self._session.running(image))
        self.tally = self._namer.tally
        wants_lines = options.wants_lines
        self._locator = Locator(self._session.lines, self._kernel_lines) if wants_lines else None
        #: Pieces of frames for which perf's name holds at all times, by address. A leaf's source
        #: line is not that of a caller at the same address.
        self._fixed: dict[int, Piece] = {}
        self._fixed_leaves: dict[int, Piece] = {} if wants_lines else self._fixed

    def _open_image(self, path: str | None, with_lines: bool) -> Image | None:
        from ksym_plugin.kernel.vmlinux import open_lines

        image = None
        if path is not None:
            image = session.open_kernel(path, self.recorded, self._session)
        if image is not None and with_lines:
            self._kernel_lines = open_lines(image, say, may_raise=False)
        return image

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
        self,
        event: dict[str, Any],
        chain: Sequence[Node],
        nodes: Iterator[Node],
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
        """From when to when a sample can have been taken, CLOCK_MONOTONIC ns. A history that is
        written covers it then."""
        window = self._clock.window(event)
        if self._follow is None or window[1] <= self._covered:
            return window
        self._covered, self._clock.clock_map = self._follow(window[1])
        # Symbols may have come where none had been.
        self._namer.forget()
        self._fixed.clear()
        self._fixed_leaves.clear()
        if window[1] > self._covered:
            self._follow = None  # The recorder does not get on, or has ended: never wait again.
        return self._clock.window(event)


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
