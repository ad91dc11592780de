"""Who used the kernel's time: samples by BPF program.

Functions with one program id are one program, counted together. An image (a trampoline,
say) and a program whose id is not known are counted by lifetime. A sample counts once for a
program, however often the program is in its stack, and once for a source line: that of the
program's innermost frame.
"""

from __future__ import annotations

from collections import defaultdict

from ksym_plugin.timeline.symbols import BPF_PROG, bpf_kind

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from ksym_plugin.timeline.symbols import Frame, Lifetime

    Key = tuple[str, int | str]
    #: File, line, and the line's text.
    Source = tuple[str, int, str | None]


def describe(lifetime: Lifetime) -> str:
    """Which program it is, who loaded it, and how long it was loaded."""
    known = [
        "program unknown" if lifetime.prog_id is None else f"program {lifetime.prog_id}",
        f"loaded by {loader(lifetime.pid, lifetime.comm)}",
        lived(shortest(lifetime), longest(lifetime)),
    ]
    return ", ".join(part for part in known if not part.endswith(" -"))


def loader(pid: int | None, comm: str | None) -> str:
    """The task that loaded a program; a dash if nobody saw it."""
    if pid is None and not comm:
        return "-"
    return (comm or "?") + ("" if pid is None else f" (pid {pid})")


def shortest(lifetime: Lifetime) -> int | None:
    """The ns that it was loaded for at the least; None while it is loaded."""
    if lifetime.unloaded_earliest is None:
        return None
    return max(0, lifetime.unloaded_earliest - lifetime.loaded_latest)


def longest(lifetime: Lifetime) -> int | None:
    """The ns that it was loaded for at the most; None while it is, or if its load was missed."""
    if lifetime.unloaded_latest is None or lifetime.loaded_earliest <= 0:
        return None
    return lifetime.unloaded_latest - lifetime.loaded_earliest


def lived(least: int | None, most: int | None) -> str:
    """How long something was loaded, between two bounds in ns; in words if it still is."""
    if least is None:
        return "still loaded"
    if most is None:
        return f"over {duration(least)}"
    low, high = duration(least), duration(most)
    if not least:
        return f"under {high}"
    return low if low == high else f"{low} to {high}"


def duration(nanoseconds: int) -> str:
    """A time with three digits at the most, and its unit."""
    value = float(nanoseconds)
    for unit, next_unit in (("ns", 1e3), ("µs", 1e3), ("ms", 1e3), ("s", 60.0), ("min", 60.0)):
        if value < next_unit:
            return f"{value:.3g} {unit}"
        value /= next_unit
    return f"{value:,.1f} h"


#: The numbers of frames that are not the kernel's, and of the kernel's own; BPF's are higher.
ELSEWHERE, KERNEL = 0, 1
_FIRST_BPF = 2
#: The normal distribution's quantile for an interval of 95 %.
_Z = 1.96


class Program:
    """What one program used; ``own`` samples ended in it, ``total`` passed through it."""

    def __init__(self, frame: Frame | None) -> None:
        self.main = None if frame is None else frame.program
        self.lifetime = None if frame is None else frame.lifetime
        self.traced = None if frame is None else frame.traced
        self.own = 0
        self.total = 0
        #: Samples by the function that was entered first, and by the one they ended in.
        self.entries: defaultdict[str, int] = defaultdict(int)
        self.functions: defaultdict[str, int] = defaultdict(int)
        self.tasks: defaultdict[str, int] = defaultdict(int)
        #: By source line, the samples that were at it, and how many of them ended there.
        self.lines: defaultdict[Source, list[int]] = defaultdict(lambda: [0, 0])

    @property
    def name(self) -> str:
        """Its main function's, or else that of the function through which it is entered most."""
        entry = max(sorted(self.entries), key=self.entries.__getitem__, default="")
        if self.main is None:
            return entry
        return self.main + "?" * entry.endswith("?")  # As uncertain as what was sampled.


class Counts:
    """The samples of one event."""

    def __init__(self) -> None:
        self.samples = 0
        self.kernel = 0
        self.programs: dict[Key, Program] = {}


class Account:
    """Counts samples one by one, those of each event for themselves."""

    def __init__(self) -> None:
        self._events: defaultdict[str, Counts] = defaultdict(Counts)
        #: The frames of BPF: the key of the program, the function, the frame, and its line.
        self._frames: list[tuple[Key, str, Frame | None, Source | None]] = []
        self._numbers: dict[tuple[Key, str, Source | None], int] = {}

    def frame(self, name: str, frame: Frame | None) -> int:
        """The number of a frame of a BPF program; ``frame`` is None if only its name is known."""
        key = _key(name, None if frame is None else frame.lifetime)
        location = None if frame is None else frame.location
        source = None
        if location is not None:
            source = (location.file, location.line, location.text or None)
        number = self._numbers.setdefault((key, name, source), _FIRST_BPF + len(self._frames))
        if number == _FIRST_BPF + len(self._frames):
            self._frames.append((key, name, frame, source))
        return number

    def add(self, event: str, comm: str, frames: Sequence[int]) -> None:
        """A sample; its frames leaf first.

        One that did not end in the kernel has no frame of the kernel's.
        """
        counts = self._events[event]
        counts.samples += 1
        if not frames or frames[0] == ELSEWHERE:
            return
        counts.kernel += 1
        entered: dict[Program, str] = {}
        for depth, number in enumerate(frames):
            if number < _FIRST_BPF:
                continue
            key, function, known, source = self._frames[number - _FIRST_BPF]
            program = counts.programs.get(key)
            if program is None:
                program = counts.programs[key] = Program(known)
            if depth == 0:
                program.own += 1
                program.functions[function] += 1
            if source is not None and program not in entered:
                at_line = program.lines[source]
                at_line[0] += 1
                at_line[1] += depth == 0
            entered[program] = function
        for program, function in entered.items():
            program.total += 1
            program.entries[function] += 1
            program.tasks[comm] += 1

    def documents(self) -> list[dict[str, Any]]:
        """All of it, an event each, for JSON; times are ns of CLOCK_MONOTONIC.

        The event with the most samples is first; programs are ordered by ``own``.
        """
        events = sorted(self._events.items(), key=lambda item: (-item[1].samples, item[0]))
        return [_document(event, counts) for event, counts in events]


def _document(event: str, counts: Counts) -> dict[str, Any]:
    programs = sorted(
        counts.programs.values(), key=lambda program: (-program.own, -program.total, program.name)
    )
    return {
        "event": event,
        "samples": counts.samples,
        "kernel_samples": counts.kernel,
        "bpf_samples": sum(program.own for program in programs),
        "programs": [_row(program, counts) for program in programs],
    }


def _row(program: Program, counts: Counts) -> dict[str, Any]:
    life = program.lifetime
    name = program.name
    unloaded = life and life.unloaded_latest
    # The hottest lines first.
    lines = sorted(program.lines.items(), key=lambda item: (-item[1][0], item[0][:2]))
    return {
        "program": life and life.prog_id,
        "name": name,
        "kind": bpf_kind(name.rstrip("?")) if life is None else life.symbol.kind,
        "own": _shares(program.own, counts),
        "total": _shares(program.total, counts),
        "functions": _ranked(program.functions),
        "lines": [
            {"file": file, "line": line, "text": text, "samples": samples, "own": own}
            for (file, line, text), (samples, own) in lines
        ],
        "traces": program.traced,
        "tasks": _ranked(program.tasks),
        "pid": life and life.pid,
        "comm": life and life.comm,
        "loaded": life and [max(life.loaded_earliest, 0) or None, life.loaded_latest],
        "unloaded": unloaded and life and [life.unloaded_earliest, unloaded],
        "lived": life and [shortest(life), longest(life)],
    }


def _key(name: str, lifetime: Lifetime | None) -> Key:
    if lifetime is None:
        return ("name", name)
    if lifetime.prog_id is not None and lifetime.symbol.kind == BPF_PROG:
        return ("program", lifetime.prog_id)
    return ("lifetime", id(lifetime))


def _shares(count: int, counts: Counts) -> dict[str, Any]:
    return {
        "samples": count,
        "of_all": share(count, counts.samples),
        "of_kernel": share(count, counts.kernel),
    }


def share(count: int, whole: int) -> dict[str, float]:
    """A share, and the interval that holds the true one in 95 of 100 profiles.

    By Wilson's formula (doi:10.1080/01621459.1927.10502953), good for small counts too.
    It takes samples for independent of each other, as a timer's are.
    """
    if not whole:
        return {"share": 0.0, "low": 0.0, "high": 1.0}
    part, square = count / whole, _Z * _Z
    centre = (part + square / (2 * whole)) / (1 + square / whole)
    spread = part * (1 - part) / whole + square / (4 * whole * whole)
    half = _Z * spread**0.5 / (1 + square / whole)
    return {"share": part, "low": max(0.0, centre - half), "high": min(1.0, centre + half)}


def _ranked(counts: dict[str, int]) -> dict[str, int]:
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))
