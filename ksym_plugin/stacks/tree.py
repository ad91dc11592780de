"""Stacks that begin alike, merged: the boxes of a flame graph.

The stacks are walked in order, so that a box is done with when the next stack leaves it,
and what is too small to be drawn is forgotten there and then.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import Final

#: Far more than any unwinder walks; deeper frames are left out.
MOST_DEEP: Final = 2000


class Box:
    """A frame in its place; ``start``, ``total`` and ``own`` are numbers of samples.

    ``own`` of its samples ended in it. The root has depth 0 and no text.
    """

    __slots__ = ("depth", "own", "start", "text", "total")

    def __init__(self, depth: int, start: float, text: str, own: float) -> None:
        self.depth = depth
        self.start = start
        self.text = text
        self.own = own
        self.total: float = 0


class Layout:
    """Boxes, parents before children; ``hidden`` samples had any frame left out."""

    __slots__ = ("boxes", "hidden")

    def __init__(self, boxes: list[Box]) -> None:
        self.boxes = boxes
        inside = sum(box.total - box.own for box in boxes)
        self.hidden = inside - sum(box.total for box in boxes if box.depth)


def layout(counts: Mapping[str, float], least: float, most: int) -> Layout:
    """Stacks (``root;…;leaf``) as boxes of at least ``least`` samples, siblings by their text.

    ``most`` of them at the most: the smallest go first.
    """
    boxes = [box for box in _closed(counts) if box.total >= least or not box.depth]
    if len(boxes) > most:
        # No box is bigger than the one it stands on, so what is left still stands.
        bar = sorted((box.total for box in boxes), reverse=True)[most]
        boxes = [box for box in boxes if box.total > bar or not box.depth]
    boxes.sort(key=lambda box: (box.start, box.depth))
    return Layout(boxes)


def _closed(counts: Mapping[str, float]) -> Iterator[Box]:
    """All boxes, each when it is complete, the root last."""
    root = Box(0, 0, "", 0)
    path: list[str] = []
    open_boxes: list[Box] = []
    now: float = 0
    # A separator that sorts before all else keeps stacks that begin alike together.
    for stack in sorted(counts, key=lambda text: text.replace(";", "\0")):
        frames = stack.split(";", MOST_DEEP)[:MOST_DEEP]
        shared = 0
        for mine, theirs in zip(frames, path):
            if mine != theirs:
                break
            shared += 1
        for box in reversed(open_boxes[shared:]):
            box.total = now - box.start
            yield box
        del open_boxes[shared:]
        depth = shared
        for text in frames[shared:]:
            depth += 1
            open_boxes.append(Box(depth, now, text, 0))
        open_boxes[-1].own += counts[stack]
        now += counts[stack]
        path = frames
    for box in reversed(open_boxes):
        box.total = now - box.start
        yield box
    root.total = now
    yield root
