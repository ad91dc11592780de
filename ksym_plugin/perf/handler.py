"""The body of the ``perf script`` handler: perf's samples in, named stacks out.

Runs inside perf's own interpreter, so it imports the core alone and never raises: an
exception would abort perf (status 134) before its ``trace_end``. What goes wrong with a
sample is counted, and the sample is passed on as perf had it.
"""

from __future__ import annotations

import gc
import os
import signal
import sys

from ksym_plugin.clocks import CLOCKS, clock_of_attr
from ksym_plugin.errors import KsymError
from ksym_plugin.kallsyms import Kallsyms
from ksym_plugin.perf import data, known
from ksym_plugin.perf.naming import Repeated, Tally, clean, decide, is_core, spelled
from ksym_plugin.perf.output import FoldedOutput, TextOutput, say
from ksym_plugin.resolver import FIRST_MARKER, Resolver
from ksym_plugin.symbols import (
    BPF_MODULE,
    EXACT,
    MODULE,
    UNKNOWN_ADDRESS,
    Frame,
    Reason,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Final

    from ksym_plugin.perf.output import Output
    from ksym_plugin.perf.renaming import Renamer

_KERNEL_HALF: Final = 1 << 63
_GUEST: Final = "[guest."
#: A time that nothing covers.
_OUTSIDE: Final = -1
#: perf's time of a sample that has none is 0 or all ones, by its version.
_NO_TIME: Final = 1 << 63
FORMATS: Final = ("text", "folded", "svg", "speedscope", "report")
#: Built into perf's own interpreter and no other.
_PERF_MODULE: Final = "perf_trace_context"


class Options:
    """What stands after the script's name: ``-H FILE``, ``--clock``, ``--format``.

    ``input`` is the perf.data that a script reads itself, where it is a program of its own.
    """

    __slots__ = ("clock", "format", "history", "input")

    def __init__(
        self, history: str | None, clock: str | None, format: str, input: str | None = None
    ) -> None:
        self.history = history
        self.clock = clock
        self.format = format
        self.input = input


def parse_options(arguments: list[str], is_embedded: bool = True) -> Options:
    """Exits as argparse does on what it does not know (status 2), before perf reads a sample."""
    import argparse

    parser = argparse.ArgumentParser(
        prog="perf script -s ksym_handler.py --",
        description="Print perf's samples with every kernel frame named as it was when sampled.",
    )
    parser.add_argument(
        "-H", "--history", metavar="FILE", help="what ksym record wrote (default: see ksym script)"
    )
    parser.add_argument(
        "--clock", choices=CLOCKS, help="the clock of the samples, if perf does not tell it"
    )
    parser.add_argument("--format", choices=FORMATS, default="text")
    if not is_embedded:
        parser.add_argument("-i", "--input", metavar="FILE", help="what perf recorded")
    chosen = parser.parse_args(arguments)
    return Options(chosen.history, chosen.clock, chosen.format, getattr(chosen, "input", None))


class Handler:
    """One run over one perf.data. ``process_event`` and ``trace_end`` are perf's to call."""

    def __init__(self, options: Options, data_path: str | None) -> None:
        self.tally = Tally()
        self.recorded = data.read(data_path)
        self._output = _output(options.format, data_path, self.recorded)
        self._user = self._output.user
        self._clock = options.clock
        self._clocks_by_event: dict[str, str | None] = {}
        self._has_said_clock = False
        #: Whether some of the output could not be written.
        self.is_cut_short = False
        #: Addresses of the core image as they are spelled: BPF never held them.
        self._core: dict[int, str] = {}
        #: Those met in the sample at hand; and those that stand for several frames.
        self._met: dict[int, str] = {}
        self._inlined: set[int] = set()
        #: By address, frames of BPF and of modules that may come again.
        self._repeated: dict[int, Repeated] = {}
        self._known = known.find(options.history, data_path, self.recorded)
        self._past, self._clock_map = self._known.past, self._known.clock_map
        self._has_modules = self._past is not None and self._past.has_modules
        self._resolver = Resolver(self._past)
        self._has_statics = False

    def process_event(self, event: dict[str, Any]) -> None:
        """A sample, as perf hands it over."""
        try:
            pieces = self._pieces(event)
        except Exception as error:  # noqa: BLE001 - nothing a sample holds may abort perf
            self._met.clear()
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
        for repeated in self._repeated.values():
            repeated.settle(self.tally)
        for line in self.tally.lines():
            say(line)
        self.close()

    def close(self) -> None:
        """Let go of the history."""
        self._known.close()

    def _give_up_output(self, error: OSError) -> None:
        self.is_cut_short = True
        give_up_output(error)

    def renamer(self) -> Renamer:
        """What names frames of text by the same past.

        KsymError if the samples are on a clock that it cannot place, or on several.
        """
        from ksym_plugin.perf.renaming import Renamer

        clocks = {self._clock or clock_of_attr(attr) for attr in self.recorded.attrs.values()}
        if self._past is not None and (len(clocks) > 1 or None in clocks):
            raise KsymError(
                "the samples are on several clocks, or on one that a history cannot place",
                "record with: perf record -k CLOCK_MONOTONIC",
            )
        clock = clocks.pop() if clocks else self._clock
        return Renamer(self._past, self._clock_map, clock, self._running)

    def _running(self) -> tuple[None, Kallsyms | None]:
        try:
            return None, Kallsyms.load() if self._known.is_this_boot else None
        except KsymError as error:
            say(str(error))
            return None, None

    # Naming

    def _pieces(self, event: dict[str, Any]) -> list[str]:
        """The frames of a sample as the output spells them, leaf first."""
        # From PERF_RECORD_MISC_GUEST_KERNEL on: what a virtual machine was at.
        if event["sample"].get("cpumode", 0) > 3:
            return self._as_perf_had_it(event)
        core = self._core
        user = self._user
        pieces: list[str] = []
        time_ns: int | None = None
        confirmed = 0
        chain = event.get("callchain")
        for node in chain or (_leaf(event),):
            address = node["ip"]
            piece = core.get(address)
            if piece is not None:
                confirmed += 1
            elif address < _KERNEL_HALF:
                piece = user(node)
            elif address >= FIRST_MARKER:
                continue
            else:
                if time_ns is None:
                    time_ns = self._monotonic(event)
                piece = self._again(node, time_ns) or self._kernel(node, time_ns)
            pieces.append(piece)
        self.tally.confirmed += confirmed
        if self._met:
            self._keep(bool(chain))
        return pieces

    def _again(self, node: dict[str, Any], time_ns: int) -> str | None:
        """A frame of BPF or a module that came before and cannot have changed since."""
        repeated = self._repeated.get(node["ip"])
        if repeated is None or not repeated.since <= time_ns <= repeated.until:
            return None
        symbol = node.get("sym")
        if (symbol["name"] if symbol else "") != repeated.symbol:
            return None
        if (node.get("dso") or "") != repeated.dso:
            return None
        repeated.times += 1
        return repeated.piece

    def _remember(
        self, node: dict[str, Any], answer: Frame | Reason, held: Frame | str, dso: str, piece: str
    ) -> None:
        """Keep a frame that the history is sure of, for as long as it is."""
        if not isinstance(answer, Frame) or answer.lifetime is None or self._past is None:
            return
        if answer.certainty != EXACT or (held is not answer and answer.kind != MODULE):
            return
        address, symbol = node["ip"], node.get("sym")
        since, until = self._past.steady(address)
        if since < until:
            before = self._repeated.get(address)
            if before is not None:
                before.settle(self.tally)
            name = symbol["name"] if symbol else ""
            frame = held if isinstance(held, Frame) else None
            self._repeated[address] = Repeated(since, until, name, dso, frame, piece)

    def _kernel(self, node: dict[str, Any], time_ns: int) -> str:
        address, symbol, dso = node["ip"], node.get("sym"), node.get("dso") or ""
        if dso.startswith(_GUEST):  # looks like this kernel's, but is another's
            return self._by_perf(node)
        name = clean(symbol["name"]) if symbol else ""
        answer = self._resolver.resolve(address, time_ns)
        if isinstance(answer, Reason) and not name and not self._has_statics:
            self._load_statics()
            answer = self._resolver.resolve(address, time_ns)
        held = decide(answer, name, dso, self.tally, self._has_modules)
        if held is None:
            return self._output.kernel(address, "", None, "" if name else clean(dso))
        if isinstance(held, Frame):
            piece = self._output.kernel(
                address, spelled(held), held.offset, _dso(held, dso), held.lifetime
            )
            self._remember(node, answer, held, dso, piece)
            return piece
        piece = self._output.kernel(address, held, node.get("sym_off"), clean(dso))
        self._remember(node, answer, held, dso, piece)
        if is_core(dso) and _is_fixed(answer) and self._met.setdefault(address, piece) != piece:
            self._inlined.add(address)
        return piece

    def _keep(self, has_chain: bool) -> None:
        """Keep how the frames of the core image in a sample are spelled.

        Not where an address has several spellings: perf expands inlined functions to
        frames with one address, all of them in a callchain and none without.
        """
        if has_chain:
            for address, piece in self._met.items():
                if address not in self._inlined:
                    self._core[address] = piece
        self._met.clear()

    def _as_perf_had_it(self, event: dict[str, Any]) -> list[str]:
        """The frames of a sample under perf's own names, as far as they can be read."""
        pieces: list[str] = []
        try:
            for node in event.get("callchain") or (_leaf(event),):
                pieces.append(self._by_perf(node))  # noqa: PERF401 - keeps what came before
        except Exception as error:  # noqa: BLE001 - nothing a sample holds may abort perf
            self.tally.failed("cut short", error)
        return pieces

    def _by_perf(self, node: dict[str, Any]) -> str:
        address, symbol = node["ip"], node.get("sym")
        if address < _KERNEL_HALF:
            return self._output.user(node)
        name = clean(symbol["name"]) if symbol else ""
        return self._output.kernel(address, name, node.get("sym_off"), clean(node.get("dso") or ""))

    def _load_statics(self) -> None:
        """This boot's kallsyms, once a frame wants it: perf mostly names those itself."""
        self._has_statics = True
        if not self._known.is_this_boot:
            return
        try:
            self._resolver = Resolver(self._past, Kallsyms.load())
        except KsymError as error:
            say(str(error))

    # Time

    def _monotonic(self, event: dict[str, Any]) -> int:
        """When the sample was taken, in CLOCK_MONOTONIC; before everything if unknown."""
        name = str(event.get("ev_name"))
        clock = self._clocks_by_event.get(name, "")
        if clock == "":
            clock = self._clocks_by_event[name] = self._clock_of(event)
        stamp = event["sample"].get("time") or 0
        if not 0 < stamp < _NO_TIME or clock is None or self._clock_map is None:
            return _OUTSIDE
        return self._clock_map.to_monotonic(clock, stamp)

    def _clock_of(self, event: dict[str, Any]) -> str | None:
        """The clock of an event's samples, None (said once) if times on it mean nothing here."""
        clock = self._clock or clock_of_attr(event.get("attr") or b"")
        if self._clock_map is None:
            return clock
        if clock is not None and self._clock_map.knows(clock):
            return clock
        if not self._has_said_clock:
            self._has_said_clock = True
            say(
                f"samples of {event.get('ev_name')} are on a clock that the history cannot place,"
                " so BPF frames stay as perf has them; record with: perf record -k CLOCK_MONOTONIC"
            )
        return None


def _output(form: str, data_path: str | None, recorded: data.Recorded) -> Output:
    """What prints in the format asked for; the text's own columns need perf's header."""
    if form == "text":
        return TextOutput(sys.stdout, recorded.width)
    if form == "folded":
        return FoldedOutput(sys.stdout)
    from ksym_plugin.perf import pictures, report

    if form == "report":
        return report.ReportOutput(sys.stdout)
    name = os.path.basename(data_path or "") or "perf.data"
    if form == "svg":
        return pictures.SvgOutput(sys.stdout, name)
    return pictures.SpeedscopeOutput(sys.stdout, name)


def _leaf(event: dict[str, Any]) -> dict[str, Any]:
    """The only frame of a sample without a callchain, in the shape of a callchain's."""
    node: dict[str, Any] = {"ip": event["sample"].get("ip", 0), "dso": event.get("dso")}
    if event.get("symbol"):
        offset = event.get("symoff")
        node["sym"] = {"name": event["symbol"], "start": node["ip"] - (offset or 0)}
        node["sym_off"] = offset
    return node


def _is_fixed(answer: Frame | Reason) -> bool:
    """Whether an address answers the same at all times: nothing that comes and goes held it."""
    if isinstance(answer, Frame):
        return answer.lifetime is None and answer.module != BPF_MODULE
    return answer is UNKNOWN_ADDRESS


def _dso(frame: Frame, dso: str) -> str:
    if frame.module == BPF_MODULE:
        return BPF_MODULE
    if frame.module is not None:
        return f"[{frame.module}]"
    return clean(dso) or "[kernel.kallsyms]"


def give_up_output(error: OSError) -> None:
    """The output cannot be written (a full disk, say): say so once, let perf finish."""
    say(f"the output cannot be written ({error.strerror or error})")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    if nowhere != sys.stdout.fileno():  # It is that if stdout had been closed.
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def start(arguments: list[str]) -> Handler:
    """The handler for the perf this runs inside of; exits with a sentence if it cannot be.

    Where there is no perf around it, it is a program: that runs, and exits at its end.
    """
    is_embedded = _PERF_MODULE in sys.builtin_module_names
    options = parse_options(arguments, is_embedded)
    prepare()
    try:
        if is_embedded:
            return Handler(options, data.path_of_running_perf())
        from ksym_plugin.perf import program

        sys.exit(program.run(options))
    except KsymError as error:
        say(str(error))
        sys.exit(1)


def prepare() -> None:
    """Make the interpreter one that does nothing but handle samples."""
    # Every sample is a tree of dicts without cycles: looking for some costs a twentieth.
    gc.disable()
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # As perf itself: a closed pipe ends it.
    if sys.stdout is None:  # closed by whoever started perf
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - for good
    sys.stdout.reconfigure(encoding="utf-8", errors="surrogateescape")  # type: ignore[union-attr]
