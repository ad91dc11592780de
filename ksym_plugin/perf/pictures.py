"""Which output prints in which format."""

from __future__ import annotations

from ksym_plugin.perf.namer import is_bpf_name
from ksym_plugin.perf.output import FoldedOutput, base
from ksym_plugin.stacks import flamegraph, speedscope
from ksym_plugin.stacks.account import ELSEWHERE, KERNEL, Account, told
from ksym_plugin.stacks.folded import cut
from ksym_plugin.timeline.symbols import BPF_MODULE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any, Final, TextIO

    from ksym_plugin.timeline.symbols import Frame, Lifetime, SourceLocation

#: Outputs of folded stacks replace it in names, as all control characters.
_MARK: Final = "\x1f"
#: How many lines of a frame are told, how wide their places are, and how much of each text.
_MOST: Final = 5
_WHERE: Final = 40
_TEXT: Final = 60


class HotLines:
    """The lines of frames, by the text of the frame without its mark."""

    def __init__(self) -> None:
        self._places: list[SourceLocation] = []
        self._numbers: dict[SourceLocation, int] = {}
        self._samples: dict[str, float] = {}
        self._counts: dict[str, dict[int, float]] = {}

    def marked(self, piece: str, location: SourceLocation | None) -> str:
        """A frame with its source location, if there is one."""
        if location is None:
            return piece
        number = self._numbers.get(location)
        if number is None:
            number = self._numbers[location] = len(self._places)
            self._places.append(location)
        return f"{piece}{_MARK}{number}"

    def sum_up(self, stacks: Mapping[str, float]) -> dict[str, float]:
        """The stacks without marks, their lines counted.

        A sample counts once for a line of a frame, however often it is in its stack.
        """
        plain: dict[str, float] = {}
        for stack, samples in stacks.items():
            whole = stack
            if _MARK in stack:
                self._count(stack, samples)
                whole = unmarked(stack)
            plain[whole] = plain.get(whole, 0) + samples
        return plain

    def pieces(self) -> list[str]:
        """The frames that have lines."""
        return list(self._counts)

    def hottest(self) -> dict[str, tuple[str, int]]:
        """The file and the line at which each frame was most often."""
        found = {}
        for piece in self._counts:
            place = self._places[self._ranked(piece)[0][0]]
            found[piece] = (place.file, place.line)
        return found

    def told(self, piece: str) -> list[str]:
        """A frame's hottest lines in words, each with its share of the frame's samples."""
        if piece not in self._counts:
            return []
        ranked = self._ranked(piece)
        whole = self._samples[piece]
        wide = min(max(len(self._where(number)) for number, _ in ranked[:_MOST]), _WHERE)
        lines = [
            f"{self._where(number):<{wide}}  {100 * samples / whole:3.0f} %"
            f"  {self._text(number)}".rstrip()
            for number, samples in ranked[:_MOST]
        ]
        more = len(ranked) - _MOST
        return lines + ([f"and {more} more lines"] if more > 0 else [])

    def _count(self, stack: str, samples: float) -> None:
        met = set(stack.split(";"))
        names = set()
        for frame in met:
            piece, mark, number = frame.partition(_MARK)
            if not mark:
                continue
            names.add(piece)
            counts = self._counts.setdefault(piece, {})
            counts[int(number)] = counts.get(int(number), 0) + samples
        for piece in names:
            self._samples[piece] = self._samples.get(piece, 0) + samples

    def _ranked(self, piece: str) -> list[tuple[int, float]]:
        """A frame's places, the hottest first; then as they stand in the source."""
        places = self._places
        return sorted(
            self._counts[piece].items(),
            key=lambda item: (-item[1], places[item[0]].file, places[item[0]].line),
        )

    def _where(self, number: int) -> str:
        place = self._places[number]
        return f"{base(place.file)}:{place.line}"

    def _text(self, number: int) -> str:
        return cut(" ".join(self._places[number].text.split()), _TEXT)


def unmarked(stack: str) -> str:
    """A stack without the numbers of places."""
    return ";".join([frame.partition(_MARK)[0] for frame in stack.split(";")])


class ReportOutput:
    """Samples by BPF program; see ``Account.documents``."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._account = Account()

    def user(self, _node: dict[str, Any]) -> str:
        return ELSEWHERE

    def kernel(
        self,
        _address: int,
        name: str,
        _offset: int | None,
        dso: str,
        frame: Frame | None = None,
    ) -> str:
        if dso == BPF_MODULE or (name and is_bpf_name(name, dso)):
            # Code without a name, as classic BPF is, goes by what it is known to be.
            return self._account.frame(name or BPF_MODULE, frame)
        # What a virtual machine was at is not this kernel's time.
        return ELSEWHERE if dso.startswith("[guest") else KERNEL

    def sample(self, event: dict[str, Any], pieces: list[str]) -> None:
        comm = event.get("comm")
        self._account.add(str(event.get("ev_name")), ":-1" if comm is None else str(comm), pieces)

    def close(self) -> None:
        import json

        json.dump(self._account.documents(), self._stream)
        self._stream.write("\n")
        self._stream.flush()


#: How many programs of one name a tooltip tells of.
_MOST_TOLD: Final = 4


class SvgOutput(FoldedOutput):
    """A flame graph; ``title`` stands above it."""

    def __init__(self, stream: TextIO, title: str) -> None:
        super().__init__(stream)
        self._title = title
        self._programs: dict[str, dict[Lifetime, None]] = {}
        self._traced: dict[str, str] = {}
        self._lines = HotLines()

    def kernel(
        self,
        address: int,
        name: str,
        offset: int | None,
        dso: str,
        frame: Frame | None = None,
    ) -> str:
        """A frame; what is BPF's ends in ``_[b]``."""
        if dso != BPF_MODULE and not (name and is_bpf_name(name, dso)):
            piece = super().kernel(address, name, offset, dso)
        else:
            piece = (self._names[name] if name else self._files[dso]) + "_[b]"
            if frame is not None and frame.lifetime is not None:
                self._programs.setdefault(piece, {})[frame.lifetime] = None
        if frame is None:
            return piece
        if frame.traced is not None:
            self._traced[piece] = frame.traced
        return self._lines.marked(piece, frame.location)

    def _print(self) -> None:
        picture = flamegraph.Picture(self._title)
        counts = self._lines.sum_up(self._stacks)
        noted = {*self._programs, *self._traced, *self._lines.pieces()}
        for part in flamegraph.draw(
            counts, picture, {piece: self._notes(piece) for piece in noted}
        ):
            self._stream.write(part)

    def _notes(self, piece: str) -> list[str]:
        """What a frame's tooltip says beside its samples."""
        lifetimes = self._programs.get(piece, {})
        lines = [told(lifetime) for lifetime in lifetimes]
        more = len(lines) - _MOST_TOLD
        if more > 0:
            lines[_MOST_TOLD:] = [f"and {more} more of this name"]
        if piece in self._traced:
            lines.append(f"traces {self._traced[piece]}")
        return lines + self._lines.told(piece)


class SpeedscopeOutput(SvgOutput):
    """A profile a thread, its samples in the order of time; before them all, merged."""

    def __init__(self, stream: TextIO, title: str) -> None:
        super().__init__(stream, title)
        self._threads: dict[tuple[str, int], list[tuple[str, int]]] = {}
        self._stack: dict[str, str] = {}
        self._kept: dict[str, str] = {}

    def _add(self, event: dict[str, Any], stack: str) -> None:
        super()._add(event, stack)
        stack = self._stack.get(stack) or self._plain(stack)
        thread = (str(event.get("comm") or ""), int(event["sample"].get("tid", -1)))
        samples = self._threads.setdefault(thread, [])
        if samples and samples[-1][0] is stack:
            samples[-1] = (stack, samples[-1][1] + 1)
        else:
            samples.append((stack, 1))

    def _plain(self, stack: str) -> str:
        """A stack without the places of its frames; kept once, however often it comes."""
        plain = unmarked(stack)
        plain = self._stack[stack] = self._kept.setdefault(plain, plain)
        return plain

    def _print(self) -> None:
        merged: Any = ("all threads, merged", sorted(self._lines.sum_up(self._stacks).items()))
        threads = [
            (f"{comm} {tid}", samples) for (comm, tid), samples in sorted(self._threads.items())
        ]
        profiles = [merged, *threads]
        for part in speedscope.write(self._title, profiles, self._lines.hottest()):
            self._stream.write(part)
