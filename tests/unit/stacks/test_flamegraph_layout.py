"""The boxes of a flame graph, against sums over every prefix of the stacks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ksym_plugin.stacks.flamegraph import MOST_DEEP, Box, Layout, layout
from ksym_plugin.stacks.folded import stacks_of

#: With characters that sort before the separator, and names that begin other names.
_FRAME = st.sampled_from(["a", "a!", "a b", "ab", "b", "", ";"[:0] + "~", "a\x01"])
_STACKS = st.dictionaries(
    st.lists(_FRAME, min_size=1, max_size=5).map(";".join), st.integers(1, 50), max_size=12
)


def by_prefix(counts: dict[str, int]) -> dict[tuple[str, ...], tuple[int, int]]:
    """Each path with its samples, and those that ended there."""
    sums: dict[tuple[str, ...], tuple[int, int]] = {(): (sum(counts.values()), 0)}
    for stack, count in counts.items():
        path = tuple(stack.split(";"))
        for end in range(1, len(path) + 1):
            total, own = sums.get(path[:end], (0, 0))
            sums[path[:end]] = (total + count, own + count * (end == len(path)))
    return sums


def laid_out(
    counts: dict[str, int], least: float = 0, most: int = 10**6
) -> tuple[Layout, dict[tuple[str, ...], Box]]:
    """The layout, and its boxes by their paths; parents come before children."""
    stacks = stacks_of(counts)
    laid = layout(stacks, least, most)
    frames = stacks.table.frames
    found = {}
    path: list[str] = []
    for box in laid.boxes:
        del path[max(0, box.depth - 1) :]
        if box.depth:
            path.append(frames[box.frame].text)
        assert len(path) == box.depth, "a box without the one it stands on"
        assert tuple(path) not in found, "a box drawn twice"
        found[tuple(path)] = box
    return laid, found


@given(_STACKS)
def test_every_prefix_is_a_box(counts: dict[str, int]) -> None:
    laid, found = laid_out(counts)
    assert {path: (box.total, box.own) for path, box in found.items()} == by_prefix(counts)
    assert laid.hidden == 0


@given(_STACKS)
def test_boxes_lie_within_their_parents_and_beside_each_other(counts: dict[str, int]) -> None:
    _, found = laid_out(counts)
    edge: dict[tuple[str, ...], float] = {}
    for path, box in found.items():
        if path:
            parent = found[path[:-1]]
            assert box.start >= edge.get(path[:-1], parent.start)
            assert box.start + box.total <= parent.start + parent.total
            edge[path[:-1]] = box.start + box.total


@given(_STACKS, st.integers(0, 60), st.integers(1, 20))
def test_what_is_left_out(counts: dict[str, int], least: int, most: int) -> None:
    laid, found = laid_out(counts, least, most)
    sums = by_prefix(counts)
    assert {path: (box.total, box.own) for path, box in found.items()}.items() <= sums.items()
    assert len(found) <= most
    assert all(box.total >= least for path, box in found.items() if path)
    cut = [path for path in sums if path not in found and path[:-1] in found]
    assert laid.hidden == sum(sums[path][0] for path in cut)
    kept = min((box.total for path, box in found.items() if path), default=0)
    assert all(sums[path][0] <= kept or not kept for path in cut)


def test_the_order_of_the_input_does_not_matter() -> None:
    counts = {"b;c": 1, "a": 2, "a;z": 3, "a!;c": 4}
    _, forward = laid_out(counts)
    _, backward = laid_out(dict(reversed(counts.items())))
    assert [(path, box.start) for path, box in forward.items()] == [
        (path, box.start) for path, box in backward.items()
    ]


def test_depth_is_bounded() -> None:
    laid, _ = laid_out({";".join("x" * 50_000): 1})
    assert max(box.depth for box in laid.boxes) == MOST_DEEP
