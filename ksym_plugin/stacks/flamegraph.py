"""A flame graph as one SVG file, with all it needs inside.

Names are other people's. Characters that XML forbids, or that do not print, are written as
escapes. Names stand in the file as text alone, and the script in it reads them as JSON and
sets them as text. The same stacks make the same bytes.
"""

from __future__ import annotations

import os
import zlib
from collections import defaultdict

from ksym_plugin.stacks.frames import (
    BPF,
    INLINED,
    JIT,
    KERNEL,
    PYTHON,
    SAMPLES,
    UNKNOWN,
    USER,
    StackFrame,
)
from ksym_plugin.stacks.names import cut, for_xml, readable
from ksym_plugin.timeline.symbols import split_bpf_name

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ksym_plugin.stacks.frames import FrameTable, Stacks

#: Far more than any unwinder walks; deeper frames are left out.
MOST_DEEP = 2000
_ROUNDING = 1e-9


class Box:
    """A frame as it is drawn; ``start``, ``total`` and ``own`` are numbers of samples.

    ``own`` of its samples ended in it. ``frame`` is its number in the table of frames; the
    root has depth 0 and the number -1.
    """

    __slots__ = ("depth", "frame", "own", "start", "total")

    def __init__(self, depth: int, start: float, frame: int) -> None:
        self.depth = depth
        self.start = start
        self.frame = frame
        self.own: float = 0
        self.total: float = 0


def layout(stacks: Stacks, least: float, most: int) -> list[Box]:
    """Stacks as boxes of at least ``least`` samples, parents first, siblings by their text.

    There are ``most`` of them at the most; the smallest are left out.
    """
    boxes = [box for box in _closed(stacks) if box.total >= least or not box.depth]
    if len(boxes) > most:
        # No box is bigger than its parent, so the parents of those that stay do so too.
        bar = sorted((box.total for box in boxes), reverse=True)[most]
        boxes = [box for box in boxes if box.total > bar or not box.depth]
    return sorted(boxes, key=lambda box: (box.start, box.depth))


def hidden(boxes: list[Box]) -> float:
    """How many samples had any frame left out."""
    inside = sum(box.total - box.own for box in boxes)
    left_out = inside - sum(box.total for box in boxes if box.depth)
    # Counts with decimals do not add up to the last digit.
    return left_out if left_out > boxes[0].total * _ROUNDING else 0


def _closed(stacks: Stacks) -> Iterator[Box]:
    """All boxes, each when it is complete, the root last."""
    path = [Box(0, 0, -1)]
    now: float = 0
    texts = stacks.table.frames
    by_text = sorted(range(len(texts)), key=lambda number: texts[number].text)
    ranks = {number: rank for rank, number in enumerate(by_text)}
    # By the texts of the frames: those that begin alike are together.
    for stack in sorted(stacks.counts, key=lambda stack: [ranks[number] for number in stack]):
        frames = stack[:MOST_DEEP]
        shared = 0
        for box, frame in zip(path[1:], frames):
            if box.frame != frame:
                break
            shared += 1
        yield from _close(path, 1 + shared, now)
        path += [Box(depth, now, frame) for depth, frame in enumerate(frames[shared:], 1 + shared)]
        path[-1].own += stacks.counts[stack]
        now += stacks.counts[stack]
    yield from _close(path, 0, now)


def _close(path: list[Box], depth: int, now: float) -> Iterator[Box]:
    """Take the boxes from a depth on off a path, the deepest first."""
    while len(path) > depth:
        box = path.pop()
        box.total = now - box.start
        yield box


WIDTH = 1200
#: Frames narrower than so many pixels are left out.
LEAST = 0.1
#: However wide they are: this many are about 2 MB.
_MOST = 20_000

_PAD, _ROW, _TOP, _FOOT = 12, 18, 84, 32
#: The width of a character of the labels, until a browser has measured it.
_COLUMN = 6.7
_SHADES = 3
_ROOT = "root"
#: The classes in the order of the legend, and what they are called.
_KINDS = {
    BPF: "BPF",
    KERNEL: "kernel",
    USER: "user",
    PYTHON: "Python",
    JIT: "JIT",
    INLINED: "inlined",
    UNKNOWN: "unknown",
    _ROOT: "all",
}


def draw(
    stacks: Stacks,
    title: str,
    *,
    width: int | None = None,
    least: float = LEAST,
    inverted: bool = False,
    unit: str = SAMPLES,
    notes: Mapping[int, Sequence[str]] | None = None,
) -> Iterator[str]:
    """The SVG's text, piece by piece.

    ``width`` is in pixels, None for as wide as the window. Frames under ``least`` pixels are left
    out. ``unit`` is that of the numbers. ``notes`` are further lines of frames' tooltips.
    """
    import json

    fixed, width = width, width or WIDTH
    title, unit = readable(title), readable(unit)
    total = sum(stacks.counts.values())
    scale = (width - 2 * _PAD) / (total or 1)
    boxes = layout(stacks, least / scale, _MOST)
    levels = 1 + max(box.depth for box in boxes)
    height = _TOP + levels * _ROW + _FOOT
    names = _Names(stacks.table, boxes)
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="flame" width="{width}" height="{height}"'
        f' viewBox="0 0 {width} {height}">\n<title>{for_xml(title)}</title>\n'
        f"<style>{_file('flame.css')}</style>\n"
    )
    yield from _head(title, _counted(total, unit), total, _shares(stacks, names))
    yield from _frames(boxes, names, scale, levels, inverted)
    yield f'<text class="note" x="{_PAD}" y="{height - 12}">{_foot(boxes, scale)}</text>\n'
    document: dict[str, object] = {
        "pad": _PAD,
        "row": _ROW,
        "top": _TOP,
        "column": _COLUMN,
        "width": width,
        "fixed": fixed,
        "least": least,
        "hidden": hidden(boxes) > 0,
        "height": height,
        "levels": levels,
        "inverted": inverted,
        "unit": unit,
        "kindNames": list(_KINDS.values()),
        "names": names.names,
        "short": names.short,
        "kinds": [list(_KINDS).index(kind) for kind in names.kinds],
        "notes": names.notes(notes or {}),
        "boxes": [
            value
            for box in boxes
            for value in (box.depth, box.start, box.total, box.own, names.index[box.frame])
        ],
    }
    yield f"<metadata>{for_xml(json.dumps(document, separators=(',', ':')))}</metadata>\n"
    yield f"<script><![CDATA[{_file('flame.js')}]]></script>\n</svg>\n"


class _Names:
    """The frames that are drawn, each once, by their numbers in the table; the root has -1."""

    def __init__(self, table: FrameTable, boxes: list[Box]) -> None:
        self._frames = table.frames
        numbers = dict.fromkeys(box.frame for box in boxes)
        frames = [StackFrame("all", _ROOT, "") if at < 0 else table.frames[at] for at in numbers]
        self.index = {frame: index for index, frame in enumerate(numbers)}
        self.names = [readable(_located(frame)) for frame in frames]
        self.kinds = [frame.kind for frame in frames]
        #: The labels of BPF programs: their own names, without the kernel's prefix and tag.
        self.short: dict[int, str] = {}
        for index, frame in enumerate(frames):
            program = split_bpf_name(frame.name) if frame.kind == BPF else None
            if program is not None and program[1]:
                self.short[index] = readable(program[1])

    def label(self, index: int) -> str:
        return self.short.get(index) or self.names[index]

    def notes(self, notes: Mapping[int, Sequence[str]]) -> dict[int, list[str]]:
        drawn = [number for number in notes if number in self.index]
        return {
            self.index[number]: [readable(line) for line in notes[number]]
            for number in sorted(drawn, key=lambda number: self._frames[number].text)
        }


def _located(frame: StackFrame) -> str:
    location = frame.location
    if location is None or not location.file:
        return frame.name
    line = f":{location.line}" if location.line else ""
    return f"{frame.name} ({location.file}{line})"


def _frames(
    boxes: list[Box], names: _Names, scale: float, levels: int, inverted: bool
) -> Iterator[str]:
    """The rectangles, and the labels of those that have room for one."""
    labels = []
    yield '<g class="frames">\n'
    for box in boxes:
        index = names.index[box.frame]
        name, kind = names.names[index], names.kinds[index]
        x, wide = _PAD + box.start * scale, box.total * scale
        y = _TOP + _ROW * (box.depth if inverted else levels - 1 - box.depth)
        shade = zlib.crc32(name.encode("utf-8")) % _SHADES if box.depth else 0
        drawn = wide - 0.5 if wide > 3 else wide
        yield (
            f'<rect class="{kind}{shade}" x="{x:.2f}" y="{y}" width="{drawn:.2f}"'
            f' height="{_ROW - 1}"/>\n'
        )
        label = cut(names.label(index), int((wide - 8) / _COLUMN))
        if label:
            labels.append(f'<text x="{x + 4:.2f}" y="{y + _ROW - 6}">{for_xml(label)}</text>\n')
    yield from ('</g>\n<g class="labels">\n', *labels, "</g>\n")


def _head(title: str, whole: str, total: float, shares: Mapping[str, float]) -> Iterator[str]:
    """The title, how much was counted, and the share of each class, by leaves."""
    yield f'<text class="title" x="{_PAD}" y="28">{for_xml(cut(title, 60))}</text>\n'
    yield f'<text class="note" x="{_PAD}" y="47">{for_xml(whole)}</text>\n<g>\n'
    x = _PAD
    for kind, name in _KINDS.items():
        if kind not in shares:
            continue
        label = f"{name} {100 * shares[kind] / (total or 1):.1f} %"
        yield f'<rect class="{kind}0" x="{x}" y="58" width="12" height="12" rx="3"/>'
        yield f'<text class="key" x="{x + 18}" y="68">{label}</text>\n'
        x += 18 + 8 * len(label) + 10
    yield "</g>\n"


def _counted(total: float, unit: str) -> str:
    number = f"{total:,}" if isinstance(total, int) else f"{total:,.12g}"
    return "1 sample" if (number, unit) == ("1", "samples") else f"{number} {unit}"


def _shares(stacks: Stacks, names: _Names) -> dict[str, float]:
    """Samples by the class of the frame that they ended in; classes that only call have 0."""
    shares = defaultdict(float, dict.fromkeys(names.kinds, 0.0))
    del shares[_ROOT]
    for stack, count in stacks.counts.items():
        shares[stacks.table.frames[stack[-1]].kind] += count
    return shares


def _foot(boxes: list[Box], scale: float) -> str:
    left_out = hidden(boxes)
    if not left_out:
        return "Every frame is drawn."
    least = _about(min(box.total for box in boxes) * scale)
    share = _about(100 * left_out / boxes[0].total)
    return f"Frames under {least} px are not drawn; they cut {share} % of the samples short."


def _about(number: float) -> str:
    """Two digits, without an exponent where a number is big."""
    return f"{number:.2g}" if number < 99.5 else f"{number:,.0f}"


def _file(name: str) -> str:
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), name)
    with open(path, encoding="utf-8") as file:
        return file.read()
