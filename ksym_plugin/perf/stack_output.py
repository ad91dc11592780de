"""The handler's outputs that count stacks: folded text, pictures and the report."""

from __future__ import annotations

import itertools

from ksym_plugin.perf.namer import UNCERTAIN, format_name, is_bpf_name, located
from ksym_plugin.perf.output import say, write
from ksym_plugin.perf.repaint import Memo, StackReader, perf_name
from ksym_plugin.stacks import flamegraph, speedscope
from ksym_plugin.stacks.account import ELSEWHERE, KERNEL, Account, describe
from ksym_plugin.stacks.folded import frame_of, kernel_frame
from ksym_plugin.stacks.frames import SAMPLES, Counts, FrameTable, HotLines, Stacks
from ksym_plugin.stacks.names import decode_name, file_name, for_stacks
from ksym_plugin.timeline.symbols import BPF_MODULE, Frame

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any, TextIO, Union

    from ksym_plugin.perf.namer import Decision
    from ksym_plugin.perf.repaint import Renamer, Whole
    from ksym_plugin.perf.text import FrameLine, Header
    from ksym_plugin.stacks.frames import Stack
    from ksym_plugin.timeline.resolver import Locator
    from ksym_plugin.timeline.symbols import Lifetime

    StackOutput = Union["FoldedOutput", "ReportOutput"]

#: How many programs of one name a tooltip describes.
_MOST_PROGRAMS = 4
#: Digits of a number in text at the most.
_LONGEST_NUMBER = 18


def _is_bpf(name: str, dso: str) -> bool:
    """Whether a frame is BPF's by what is printed of it: a name that is not certain has a mark."""
    return dso == BPF_MODULE or (bool(name) and is_bpf_name(name.rstrip(UNCERTAIN), dso))


class FoldedOutput:
    """Folded stacks: ``comm;root;…;leaf count``, kernel frames ending in ``_[k]``.

    Stacks are counted for each event. Those of ``event`` are printed, by default the one with
    most samples; the others are said. ``weight`` is one of WEIGHTS.
    """

    def __init__(
        self, stream: TextIO, title: str = "", event: str | None = None, weight: str = SAMPLES
    ) -> None:
        self._stream = stream
        self._event = event
        self._weight = weight
        self._title = title
        self._table = FrameTable()
        #: The numbers of stacks without their tasks.
        self._stacks: dict[Stack, int] = {}
        #: By event, of the names of tasks and the numbers of stacks.
        self._counts: Counts[str, tuple[str, int]] = Counts()
        #: The numbers of frames by what perf has for them: a name, or a file.
        self._named: dict[str, int] = Memo(
            lambda name: self._table.number(frame_of(for_stacks(name)))
        )
        self._in_file: dict[str, int] = Memo(lambda dso: self._named[_in_file(dso)])
        self._kernel_named: dict[str, int] = Memo(
            lambda name: self._table.number(kernel_frame(for_stacks(name)))
        )

    def user(self, node: dict[str, Any]) -> int:
        """A user frame of perf's callchain; without a name, the file it is in."""
        symbol = node.get("sym")
        if symbol:
            return self._named[symbol["name"]]
        return self._in_file[node.get("dso") or ""]

    def kernel(
        self, _address: int, name: str, _offset: int | None, dso: str, frame: Frame | None = None
    ) -> int:
        """A kernel frame; without a name, the module it is in."""
        text = name or _in_file(dso)
        if frame is not None and frame.location is not None:
            text += f":{file_name(frame.location.file)}:{frame.location.line}"
        return self._kernel_named[text]

    def sample(self, event: dict[str, Any], pieces: list[int]) -> None:
        """A sample of perf's Python, its frames leaf first."""
        sample = event.get("sample") or {}
        comm, tid = str(event.get("comm") or ""), int(sample.get("tid", -1))
        stack = self.stack(pieces)
        self.add(str(event.get("ev_name")), comm, tid, int(sample.get("period", 1)), stack)

    def stack(self, pieces: list[int]) -> int:
        """The number of a stack, for ``add``."""
        pieces.reverse()
        return self._stacks.setdefault(tuple(pieces), len(self._stacks))

    def add(self, event: str, comm: str, _tid: int, period: int, stack: int) -> None:
        """Count a sample."""
        weight = 1 if self._weight == SAMPLES else period
        self._counts.count(event, (comm, stack), weight)

    def close(self) -> None:
        """Print what was gathered. KsymError if there is no sample of the event."""
        event = self._counts.choose(self._event)
        self._print(event)
        self._stream.flush()
        others = "" if event is None else self._counts.others(event)
        if others:
            say(others)

    def _print(self, event: str | None) -> None:
        lines = [f"{text} {count}\n" for text, count in self._counted(event).by_text().items()]
        write(self._stream, "".join(lines))

    def _counted(self, event: str | None) -> Stacks:
        stacks = Stacks(self._table)
        numbered = list(self._stacks)
        for (comm, number), count in (self._counts[event] if event is not None else {}).items():
            stacks.add((self._named[comm], *numbered[number]), count)
        return stacks


def _in_file(dso: str) -> str:
    """A frame without a name, by its file, as stackcollapse-perf.pl writes it."""
    return f"[{dso.rpartition('/')[2] or 'unknown'}]"


class SvgOutput(FoldedOutput):
    """A flame graph; above it stand ``title``, the event and what is counted."""

    def __init__(
        self, stream: TextIO, title: str = "", event: str | None = None, weight: str = SAMPLES
    ) -> None:
        super().__init__(stream, title, event, weight)
        self._programs: dict[int, dict[Lifetime, None]] = {}
        self._traced: dict[int, str] = {}
        self._lines = HotLines(self._table)
        self._bpf_named: dict[str, int] = Memo(
            lambda name: self._table.number(kernel_frame(for_stacks(name), is_bpf=True))
        )

    def kernel(
        self, address: int, name: str, offset: int | None, dso: str, frame: Frame | None = None
    ) -> int:
        """A frame, counted by its source location too."""
        if _is_bpf(name, dso):
            number = self._bpf_named[name or _in_file(dso)]
            if frame is not None and frame.lifetime is not None:
                self._programs.setdefault(number, {})[frame.lifetime] = None
        else:
            number = super().kernel(address, name, offset, dso)
        if frame is None:
            return number
        if frame.traced is not None:
            self._traced[number] = frame.traced
        return self._lines.number(number, frame.location)

    def _print(self, event: str | None) -> None:
        stacks = self._lines.sum_up(self._counted(event))
        noted = {*self._programs, *self._traced, *self._lines.frames()}
        notes = {number: self._notes(number) for number in noted}
        title = self._title if event is None else f"{self._title}: {event}"
        unit = event if event is not None and self._weight != SAMPLES else SAMPLES
        for part in flamegraph.draw(stacks, title, unit=unit, notes=notes):
            self._stream.write(part)

    def _notes(self, number: int) -> list[str]:
        """What a frame's tooltip says beside its samples."""
        lines = [describe(lifetime) for lifetime in self._programs.get(number, {})]
        more = len(lines) - _MOST_PROGRAMS
        if more > 0:
            lines[_MOST_PROGRAMS:] = [f"and {more} more of this name"]
        if number in self._traced:
            lines.append(f"traces {self._traced[number]}")
        return lines + self._lines.describe(number)


class SpeedscopeOutput(SvgOutput):
    """A profile a thread, its samples in the order of time; before them all, merged."""

    def __init__(
        self, stream: TextIO, title: str = "", event: str | None = None, weight: str = SAMPLES
    ) -> None:
        super().__init__(stream, title, event, weight)
        #: By event and thread, the samples of stacks; what follows upon an equal one is added.
        self._threads: dict[tuple[str, str, int], list[tuple[int, int]]] = {}

    def add(self, event: str, comm: str, tid: int, period: int, stack: int) -> None:
        super().add(event, comm, tid, period, stack)
        weight = 1 if self._weight == SAMPLES else period
        samples = self._threads.setdefault((event, comm, tid), [])
        if samples and samples[-1][0] == stack:
            weight += samples.pop()[1]
        samples.append((stack, weight))

    def _print(self, event: str | None) -> None:
        merged = ("all threads, merged", self._lines.sum_up(self._counted(event)).ordered())
        stacks = list(map(self._lines.unlocated, self._stacks))
        threads = [
            (f"{comm} {tid}", _joined(((self._named[comm], *stacks[at]), n) for at, n in samples))
            for (of, comm, tid), samples in sorted(self._threads.items())
            if of == event
        ]
        locations = self._lines.hottest()
        for part in speedscope.write(self._title, self._table, [merged, *threads], locations):
            self._stream.write(part)


def _joined(samples: Iterable[tuple[Stack, float]]) -> list[tuple[Stack, float]]:
    """Neighbours with one stack are one; they may have been at different lines."""
    groups = itertools.groupby(samples, key=lambda sample: sample[0])
    return [(stack, sum(weight for _, weight in group)) for stack, group in groups]


class ReportOutput:
    """Samples by BPF program, in ``account``; printed as JSON where there is a ``stream``."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream
        self.account = Account()

    def user(self, _node: dict[str, Any]) -> int:
        return ELSEWHERE

    def kernel(
        self, _address: int, name: str, _offset: int | None, dso: str, frame: Frame | None = None
    ) -> int:
        if _is_bpf(name, dso):
            # Code without a name, as classic BPF is, goes by what it is known to be.
            return self.account.frame(name or BPF_MODULE, frame)
        # What a virtual machine was at is not this kernel's time.
        return ELSEWHERE if dso.startswith("[guest") else KERNEL

    def sample(self, event: dict[str, Any], pieces: list[int]) -> None:
        comm = event.get("comm")
        self.add(str(event.get("ev_name")), ":-1" if comm is None else str(comm), 0, 0, pieces)

    def stack(self, pieces: list[int]) -> list[int]:
        return pieces

    def add(self, event: str, comm: str, _tid: int, _period: int, stack: list[int]) -> None:
        self.account.add(event, comm, stack)

    def close(self) -> None:
        if self._stream is None:
            return
        import json

        json.dump(self.account.documents(), self._stream)
        self._stream.write("\n")
        self._stream.flush()


def open_output(
    form: str, stream: TextIO, title: str, event: str | None, weight: str
) -> StackOutput:
    """What counts stacks and prints them as ``folded``, ``svg``, ``speedscope`` or ``report``."""
    if form == "report":
        return ReportOutput(stream)
    kinds = {"folded": FoldedOutput, "svg": SvgOutput, "speedscope": SpeedscopeOutput}
    return kinds[form](stream, title, event, weight)


class TextStacks(StackReader):
    """perf script's text to an output of stacks: text in by ``read``, ``end`` at its end."""

    def __init__(self, renamer: Renamer, output: StackOutput, locator: Locator | None) -> None:
        super().__init__(renamer, locator)
        self._output = output
        self._decoded = Memo(decode_name)

    def end(self) -> None:
        super().end()
        self._output.close()

    def _user(self, _line: bytes, frame: FrameLine) -> int:
        name, dso = perf_name(frame)
        node: dict[str, Any] = {"ip": frame.address, "dso": dso}
        if name:
            node["sym"] = {"name": name}
        return self._output.user(node)

    def _kernel(
        self, _line: bytes, frame: FrameLine, decision: Decision, dso: str, is_leaf: bool
    ) -> int:
        known = decision if isinstance(decision, Frame) else None
        if self._locator is not None:
            known = located(self._locator, frame.address, frame.distance, decision, dso, is_leaf)
        offset = frame.distance
        if isinstance(decision, Frame):
            offset, decision = decision.offset, format_name(decision)
        return self._output.kernel(frame.address, decision or "", offset, dso, known)

    def _join(self, pieces: list[int | None]) -> Whole:
        return self._output.stack([piece for piece in pieces if piece is not None])

    def _sample(self, header: Header, stack: Whole, _line: bytes) -> None:
        event, comm = self._decoded[header.event], self._decoded[header.comm]
        tid = int(header.tid) if len(header.tid) <= _LONGEST_NUMBER and header.tid else -1
        self._output.add(event, comm, tid, header.period, stack)
