"""The shipped recording, replayed: what the handler makes of a real run, without perf."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests import demo
from tests.oracle import truth

if TYPE_CHECKING:
    from pathlib import Path


def test_every_leaf_in_a_program_is_named_right(tmp_path: Path) -> None:
    recording = demo.shipped(str(tmp_path))
    before = truth.leaves(recording.before, recording.truth)
    after = truth.leaves(recording.after, recording.truth)
    assert before.wrong > 100
    assert before.missing > 100
    assert len(after.verdicts) == len(before.verdicts)
    assert (after.wrong, after.missing) == (0, 0)


def test_tally_counts_what_perf_had_missed_and_named_wrong(tmp_path: Path) -> None:
    recording = demo.shipped(str(tmp_path))
    before = truth.frames(recording.before, recording.truth)
    assert f" {before.wrong:,} renamed" in recording.tally
    assert f" {before.missing:,} newly named" in recording.tally


def test_demonstration_shows_a_frame_before_and_after(tmp_path: Path, capsys: object) -> None:
    assert demo.show(demo.shipped(str(tmp_path)))
