"""The handler's outputs that count stacks: folded text, pictures and the report."""

from __future__ import annotations

from collections import defaultdict

from ksym_plugin.perf.namer import is_bpf_name
from ksym_plugin.perf.output import write
from ksym_plugin.stacks import flamegraph, speedscope
from ksym_plugin.stacks.account import ELSEWHERE, KERNEL, Account, describe
from ksym_plugin.stacks.folded import frame_of, kernel_frame
from ksym_plugin.stacks.frames import FrameTable, HotLines, Stacks
from ksym_plugin.stacks.names import file_name, for_stacks
from ksym_plugin.timeline.symbols import BPF_MODULE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, TextIO

    from ksym_plugin.stacks.frames import Stack
    from ksym_plugin.timeline.symbols import Frame, Lifetime

#: How many programs of one name a tooltip describes.
_MOST_PROGRAMS = 4


class FoldedOutput:
    """Folded stacks: ``comm;root;…;leaf count``, kernel frames ending in ``_[k]``."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._table = FrameTable()
        self._stacks: defaultdict[Stack, int] = defaultdict(int)
        #: The numbers of frames by what perf has for them: a name, or a file.
        self._named = _Numbers(lambda name: self._table.number(frame_of(for_stacks(name))))
        self._in_file = _Numbers(lambda dso: self._named[_in_file(dso)])
        self._kernel_named = _Numbers(self._kernel_number)

    def user(self, node: dict[str, Any]) -> int:
        """A user frame of perf's callchain; without a name, the file it is in."""
        symbol = node.get("sym")
        if symbol:
            return self._named[symbol["name"]]
        return self._in_file[node.get("dso") or ""]

    def kernel(
        self,
        _address: int,
        name: str,
        _offset: int | None,
        dso: str,
        frame: Frame | None = None,
    ) -> int:
        """A kernel frame; without a name, the module it is in."""
        text = name or _in_file(dso)
        if frame is not None and frame.location is not None:
            text += f":{file_name(frame.location.file)}:{frame.location.line}"
        return self._kernel_named[text]

    def sample(self, event: dict[str, Any], pieces: list[int]) -> None:
        pieces.append(self._named[event.get("comm") or ""])
        pieces.reverse()
        self._add(event, tuple(pieces))

    def close(self) -> None:
        """Print what was gathered."""
        self._print()
        self._stream.flush()

    def _add(self, _event: dict[str, Any], stack: Stack) -> None:
        self._stacks[stack] += 1

    def _print(self) -> None:
        lines = [f"{text} {count}\n" for text, count in self._counted().by_text().items()]
        write(self._stream, "".join(lines))

    def _counted(self) -> Stacks:
        stacks = Stacks(self._table)
        stacks.counts.update(self._stacks)
        return stacks

    def _kernel_number(self, name: str) -> int:
        return self._table.number(kernel_frame(for_stacks(name)))


class _Numbers(dict[str, int]):
    """The numbers of frames, each found once."""

    def __init__(self, find: Callable[[str], int]) -> None:
        super().__init__()
        self._find = find

    def __missing__(self, key: str) -> int:
        self[key] = number = self._find(key)
        return number


def _in_file(dso: str) -> str:
    """A frame without a name, by its file."""
    return f"[{dso.rpartition('/')[2].strip('[]') or 'unknown'}]"


class SvgOutput(FoldedOutput):
    """A flame graph; ``title`` stands above it."""

    def __init__(self, stream: TextIO, title: str) -> None:
        super().__init__(stream)
        self._title = title
        self._programs: dict[int, dict[Lifetime, None]] = {}
        self._traced: dict[int, str] = {}
        self._lines = HotLines(self._table)
        self._bpf_named = _Numbers(self._bpf_number)

    def kernel(
        self,
        address: int,
        name: str,
        offset: int | None,
        dso: str,
        frame: Frame | None = None,
    ) -> int:
        """A frame, counted by its source location too."""
        if dso == BPF_MODULE or (name and is_bpf_name(name, dso)):
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

    def _bpf_number(self, name: str) -> int:
        return self._table.number(kernel_frame(for_stacks(name), is_bpf=True))

    def _print(self) -> None:
        stacks = self._lines.sum_up(self._counted())
        noted = {*self._programs, *self._traced, *self._lines.frames()}
        notes = {number: self._notes(number) for number in noted}
        for part in flamegraph.draw(stacks, flamegraph.Picture(self._title), notes):
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

    def __init__(self, stream: TextIO, title: str) -> None:
        super().__init__(stream, title)
        self._threads: dict[tuple[str, int], list[tuple[Stack, float]]] = {}
        #: Stacks by those with source locations; equal ones are one object.
        self._unlocated: dict[Stack, Stack] = {}

    def _add(self, event: dict[str, Any], stack: Stack) -> None:
        super()._add(event, stack)
        plain = self._unlocated.get(stack)
        if plain is None:
            plain = self._lines.unlocated(stack)
            plain = self._unlocated[stack] = self._unlocated.setdefault(plain, plain)
        thread = (str(event.get("comm") or ""), int(event["sample"].get("tid", -1)))
        samples = self._threads.setdefault(thread, [])
        if samples and samples[-1][0] is plain:
            samples[-1] = (plain, samples[-1][1] + 1)
        else:
            samples.append((plain, 1))

    def _print(self) -> None:
        merged = ("all threads, merged", self._lines.sum_up(self._counted()).ordered())
        threads = [
            (f"{comm} {tid}", samples) for (comm, tid), samples in sorted(self._threads.items())
        ]
        locations = self._lines.hottest()
        for part in speedscope.write(self._title, self._table, [merged, *threads], locations):
            self._stream.write(part)


class ReportOutput:
    """Samples by BPF program; see ``Account.documents``."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._account = Account()

    def user(self, _node: dict[str, Any]) -> int:
        return ELSEWHERE

    def kernel(
        self,
        _address: int,
        name: str,
        _offset: int | None,
        dso: str,
        frame: Frame | None = None,
    ) -> int:
        if dso == BPF_MODULE or (name and is_bpf_name(name, dso)):
            # Code without a name, as classic BPF is, goes by what it is known to be.
            return self._account.frame(name or BPF_MODULE, frame)
        # What a virtual machine was at is not this kernel's time.
        return ELSEWHERE if dso.startswith("[guest") else KERNEL

    def sample(self, event: dict[str, Any], pieces: list[int]) -> None:
        comm = event.get("comm")
        self._account.add(str(event.get("ev_name")), ":-1" if comm is None else str(comm), pieces)

    def close(self) -> None:
        import json

        json.dump(self._account.documents(), self._stream)
        self._stream.write("\n")
        self._stream.flush()
