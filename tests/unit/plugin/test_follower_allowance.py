"""What the plugin's thread may use of a CPU, by clocks that a test sets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ksym_plugin.plugin.follower import Allowance

MS = 1_000_000
STEPS = st.lists(st.tuples(st.integers(0, 400 * MS), st.integers(0, 5 * MS)), max_size=60)


class Clocks:
    """Both clocks are moved by hand."""

    def __init__(self) -> None:
        self.now = self.used = 0
        self.allowance = Allowance(lambda: self.now, lambda: self.used)


def test_in_quiet_times_nothing_waits() -> None:
    clocks = Clocks()
    for _ in range(100):
        clocks.now += 100 * MS
        clocks.used += MS // 2
        assert clocks.allowance.rest() == 0.0


def test_after_a_storm_there_is_no_rest_that_goes_on() -> None:
    clocks = Clocks()
    clocks.now, clocks.used = 1_000 * MS, 900 * MS
    assert clocks.allowance.rest() == pytest.approx(0.1)
    clocks.now += 100 * MS
    assert clocks.allowance.rest() == pytest.approx(0.0)


@given(STEPS)
def test_it_uses_no_more_than_its_share_unless_the_longest_rest_is_too_short(
    steps: list[tuple[int, int]],
) -> None:
    clocks = Clocks()
    rests = []
    for quiet, spent in steps:
        clocks.now += quiet + spent
        clocks.used += spent
        rests.append(clocks.allowance.rest())
        assert 0.0 <= rests[-1] <= 0.1
        clocks.now += int(rests[-1] * 1e9)
    if all(rest < 0.1 for rest in rests):
        saved = 20 * MS
        assert clocks.used <= clocks.now / 150 + saved + 1
