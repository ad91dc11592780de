"""What turns a table into the kernel's: worked out by hand."""

from __future__ import annotations

from ksym_plugin.timeline.reconcile import differences
from ksym_plugin.timeline.symbols import Lifetime, Load
from tests.unit.helpers import BASE, load

A, B = "bpf_prog_00000000000000aa_a", "bpf_prog_00000000000000bb_b"
SINCE, BEGAN, ENDED = 100, 200, 210


def changes(live: list[Load], snapshot: list[Load]) -> list[tuple]:
    held = {one.symbol.start: Lifetime(one) for one in live}
    found = differences(held, snapshot, False, (SINCE, BEGAN, ENDED))
    return [
        (type(change).__name__, change.earliest, change.latest)  # type: ignore[union-attr]
        for change in found
    ]


def test_what_is_there_and_known_is_told_again_as_it_was() -> None:
    assert changes([load(BASE, 64, A, 50, 1)], [load(BASE, 64, A, (40, 205), 1)]) == [
        ("Load", 40, 205)
    ]


def test_what_is_gone_went_since_and_what_is_new_came_since() -> None:
    told = changes([load(BASE, 64, A, 50, 1)], [load(BASE, 64, B, (90, 205), 2)])
    assert told == [("Unload", SINCE, ENDED), ("Load", SINCE, 205)]


def test_a_window_never_ends_before_it_begins() -> None:
    """A snapshot that knows a program of before tells when it was first seen."""
    assert changes([], [load(BASE, 64, A, (40, 60), 1)]) == [("Load", 60, 60)]
