"""The body of the ``perf script`` handler: perf's samples in, named stacks out.

Runs inside perf's own interpreter, so it imports the core alone and never raises: an
exception would abort perf (status 134) before its ``trace_end``. What goes wrong with a
sample is counted, and the sample is passed on as perf had it.
"""

from __future__ import annotations

import os
import signal
import sys
import time

from ksym_plugin import histories, kernel_id, kernel_text
from ksym_plugin.clocks import CLOCKS, clock_of_attr
from ksym_plugin.errors import KsymError
from ksym_plugin.history import History
from ksym_plugin.kallsyms import Kallsyms
from ksym_plugin.perf import data
from ksym_plugin.perf.naming import Tally, clean, decide, spelled
from ksym_plugin.perf.output import FoldedOutput, TextOutput, to_stderr
from ksym_plugin.resolver import FIRST_MARKER, Resolver
from ksym_plugin.symbols import BPF_MODULE, KERNEL, UNKNOWN_ADDRESS, Frame, Reason
from ksym_plugin.timeline import Timeline

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Final

    from ksym_plugin.clocks import ClockMap
    from ksym_plugin.history import Past
    from ksym_plugin.perf.output import Entry

_KERNEL_HALF: Final = 1 << 63
_GUEST: Final = "[guest."
_OUTSIDE: Final = -1


class Options:
    """What stands after the script's name: ``-H FILE``, ``--clock``, ``--format``."""

    __slots__ = ("clock", "format", "history")

    def __init__(self, history: str | None, clock: str | None, format: str) -> None:
        self.history = history
        self.clock = clock
        self.format = format


def parse_options(arguments: list[str]) -> Options:
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
    parser.add_argument("--format", choices=("text", "folded"), default="text")
    chosen = parser.parse_args(arguments)
    return Options(chosen.history, chosen.clock, chosen.format)


class Handler:
    """One run over one perf.data. ``process_event`` and ``trace_end`` are perf's to call."""

    def __init__(self, options: Options, data_path: str | None) -> None:
        self.tally = Tally()
        self._output = (FoldedOutput if options.format == "folded" else TextOutput)(sys.stdout)
        self._clock = options.clock
        self._clocks_by_event: dict[str, str | None] = {}
        self._clock_map: ClockMap | None = None
        self._past: Past | Timeline | None = None
        #: Addresses that BPF never held, where perf's name for them stands, as printed.
        self._standing: dict[int, str] = {}
        self._recorded = data.read(data_path)
        self._is_this_boot = _is_this_boot(self._recorded)
        self._open_past(histories.find(options.history, data_path))
        self._resolver = Resolver(self._past)
        self._has_statics = False

    def process_event(self, event: dict[str, Any]) -> None:
        try:
            entries, kernel = self._entries(event)
        except Exception as error:  # Nothing that a sample holds may abort perf.
            what = f"{type(error).__name__}: {error}"
            self.tally.errors[what] = self.tally.errors.get(what, 0) + 1
            entries, kernel = _as_perf_had_it(event)
        self._print(event, entries, kernel)

    def trace_end(self) -> None:
        try:
            self._output.close()
            sys.stdout.flush()
            for line in self.tally.lines():
                to_stderr(line)
        except OSError:
            _give_up_output()

    def _print(self, event: dict[str, Any], entries: list[Entry], kernel: set[int]) -> None:
        try:
            self._output.sample(event, entries, kernel)
        except OSError:
            _give_up_output()
        except Exception as error:  # As above.
            what = f"not printed, {type(error).__name__}: {error}"
            self.tally.errors[what] = self.tally.errors.get(what, 0) + 1

    # Naming

    def _entries(self, event: dict[str, Any]) -> tuple[list[Entry], set[int]]:
        """The callchain as it is to be printed, and which of its addresses are the kernel's."""
        sample = event.get("sample") or {}
        chain = event.get("callchain") or [_leaf(event, sample)]
        entries: list[Entry] = []
        kernel: set[int] = set()
        time_ns: int | None = None
        standing = self._standing
        for node in chain:
            address = node.get("ip", 0)
            symbol = node.get("sym")
            dso = node.get("dso") or ""
            name = symbol["name"] if symbol else ""
            if address >= FIRST_MARKER:
                continue
            if not self._is_host_kernel(address, dso):
                offset = node.get("sym_off")
                if symbol and offset is not None:
                    # perf prints user addresses relative to the file they are in.
                    address = symbol["start"] + offset
                entries.append((address, name, offset, dso))
                continue
            kernel.add(address)
            if name and standing.get(address) == name:
                self.tally.confirmed += 1
                entries.append((address, name, node.get("sym_off"), dso))
                continue
            if time_ns is None:
                time_ns = self._monotonic(event, sample)
            entries.append(self._name(address, clean(name), node.get("sym_off"), dso, time_ns))
        return entries, kernel

    def _name(self, address: int, name: str, offset: int | None, dso: str, time_ns: int) -> Entry:
        answer = self._resolver.resolve(address, time_ns)
        if isinstance(answer, Reason) and not name and not self._has_statics:
            self._load_statics()
            answer = self._resolver.resolve(address, time_ns)
        held = decide(answer, name, dso, self.tally)
        if held is None:
            return address, "", None, "" if name else clean(dso)
        if isinstance(held, str):
            if answer is UNKNOWN_ADDRESS or (isinstance(answer, Frame) and answer.kind == KERNEL):
                self._standing[address] = name
            return address, name, offset, clean(dso)
        return address, spelled(held), held.offset, _dso(held, dso)

    def _is_host_kernel(self, address: int, dso: str) -> bool:
        """Guest addresses look like the host's, but mean another kernel."""
        return address >= _KERNEL_HALF and not dso.startswith(_GUEST)

    def _load_statics(self) -> None:
        """This boot's kallsyms, once a frame wants it: perf mostly names those itself."""
        self._has_statics = True
        if not self._is_this_boot:
            return
        try:
            self._resolver = Resolver(self._past, Kallsyms.load())
        except KsymError as error:
            to_stderr(str(error))

    # Time

    def _monotonic(self, event: dict[str, Any], sample: dict[str, Any]) -> int:
        """When the sample was taken, in CLOCK_MONOTONIC; before everything if unknown."""
        name = str(event.get("ev_name"))
        clock = self._clocks_by_event.get(name, "")
        if clock == "":
            clock = self._clocks_by_event[name] = self._clock_of(event)
        stamp = sample.get("time") or 0
        if not stamp or clock is None or self._clock_map is None:
            return _OUTSIDE
        return self._clock_map.to_monotonic(clock, stamp)

    def _clock_of(self, event: dict[str, Any]) -> str | None:
        """The clock of an event's samples, None (said once) if times on it mean nothing here."""
        clock = self._clock or clock_of_attr(event.get("attr") or b"")
        if self._clock_map is None:
            return clock
        if clock is not None and self._clock_map.knows(clock):
            return clock
        to_stderr(
            f"samples of {event.get('ev_name')} are on a clock that the history cannot place,"
            " so BPF frames stay as perf has them; record with: perf record -k CLOCK_MONOTONIC"
        )
        return None

    # What is known of the past

    def _open_past(self, path: str | None) -> None:
        """KsymError if a history is there and cannot be used."""
        if path is None:
            self._open_live()
            return
        recorded = self._recorded
        history = History(path)
        boot = histories.choose_boot(
            history,
            kernel_id.boot_id(),
            recorded.build_id,
            recorded.release,
            recorded.host,
            recorded.text_start,
        )
        if boot is None:
            history.close()
            raise KsymError(
                f"{path} has no record of the kernel this perf.data is from",
                "name the history that was recorded beside it with -H",
            )
        past = history.past(boot)
        past.wait_covered(time.monotonic_ns())
        for line in past.warnings():
            to_stderr(f"{path}: {line}")
        self._past, self._clock_map = past, past.clock_map()

    def _open_live(self) -> None:
        """Without a history: what is loaded now was there ever since it was loaded."""
        if not self._is_this_boot:
            to_stderr(
                "no history, and the data is of another boot: BPF frames stay as perf has them"
            )
            return
        from ksym_plugin.clocks import ClockMap, PerfClock
        from ksym_plugin.sources import snapshot

        try:
            loads = snapshot.take().loads
        except KsymError as error:
            to_stderr(f"no history, and the live system does not tell: {error}")
            return
        to_stderr("no history: only BPF programs that are still loaded can be named")
        timeline = Timeline()
        for load in loads:
            timeline.apply(load)
        clock = PerfClock()
        try:
            self._clock_map = ClockMap([clock.read()])
        finally:
            clock.close()
        self._past = timeline


def _is_this_boot(recorded: data.Recorded) -> bool:
    """Whether a perf.data can be of the running kernel; one without a header may well be."""
    here = (kernel_id.build_id(), kernel_id.release(), kernel_id.hostname(), kernel_text.start())
    there = (recorded.build_id, recorded.release, recorded.host, recorded.text_start)
    return all(has is None or had is None or has == had for has, had in zip(here, there))


def _leaf(event: dict[str, Any], sample: dict[str, Any]) -> dict[str, Any]:
    """The only frame of a sample without a callchain, in the shape of a callchain's."""
    node: dict[str, Any] = {"ip": sample.get("ip", 0), "dso": event.get("dso")}
    if event.get("symbol"):
        node["sym"] = {"name": event["symbol"]}
        node["sym_off"] = event.get("symoff")
    return node


def _as_perf_had_it(event: dict[str, Any]) -> tuple[list[Entry], set[int]]:
    entries: list[Entry] = []
    for node in event.get("callchain") or ():
        if isinstance(node, dict) and isinstance(node.get("ip"), int):
            symbol = node.get("sym") or {}
            name = clean(str(symbol.get("name", "")))
            entries.append((node["ip"], name, node.get("sym_off"), str(node.get("dso") or "")))
    return entries, {address for address, *_ in entries if address >= _KERNEL_HALF}


def _dso(frame: Frame, dso: str) -> str:
    if frame.module == BPF_MODULE:
        return BPF_MODULE
    if frame.module is not None:
        return f"[{frame.module}]"
    return clean(dso) or "[kernel.kallsyms]"


def _give_up_output() -> None:
    """The output cannot be written (a full disk, say): say so once, let perf finish."""
    error = sys.exc_info()[1]
    to_stderr(f"the output cannot be written ({error})")
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def start(arguments: list[str]) -> Handler:
    """The handler for the perf this runs inside of; exits with a sentence if it cannot be."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # As perf itself: a closed pipe ends it.
    sys.stdout.reconfigure(encoding="utf-8", errors="surrogateescape")  # type: ignore[union-attr]
    options = parse_options(arguments)
    try:
        return Handler(options, data.path_of_running_perf())
    except KsymError as error:
        to_stderr(str(error))
        sys.exit(1)
