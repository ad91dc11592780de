"""Text that does not tell its clock: no name of ours is wrong, and the right clock is found.

The truth is a list of who was where, from when to when, by CLOCK_MONOTONIC. perf names frames
right, or by what it knew at its start, or not at all.
"""

from __future__ import annotations

import io
import random
import re
from typing import NamedTuple

import pytest

from ksym_plugin.history import locate
from ksym_plugin.history.locate import Choice, Origin
from ksym_plugin.history.reader import Boot
from ksym_plugin.history.writer import HistoryWriter
from ksym_plugin.kernel import identity
from ksym_plugin.kernel.clocks import ClockMap, Instant
from ksym_plugin.perf import session
from ksym_plugin.perf.repaint import Annotator
from ksym_plugin.perf.text_origin import Text, open_renamer
from ksym_plugin.timeline.errors import KsymError
from ksym_plugin.timeline.timeline import Timeline
from tests.unit.helpers import BASE, load, unload

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pathlib import Path

MS = 1_000_000
SECOND = 1_000 * MS
BEGIN, END = 100 * SECOND, 103 * SECOND
HEADER = "# ========\n# captured on    : today\n{}# ========\n#\n"
_FRAME = re.compile(r"\t *([0-9a-f]{16}) (\S+) \(")


class Lived(NamedTuple):
    address: int
    name: str
    loaded: int
    unloaded: int

    def was_at(self, time: int) -> bool:
        return self.loaded <= time < self.unloaded


class Sample(NamedTuple):
    time: int
    lived: Lived


def churn(seed: int, length: int, addresses: int = 3) -> list[Lived]:
    """Programs that follow each other at a few addresses, each there for about ``length``."""
    dice = random.Random(seed)
    lived = []
    for at in range(addresses):
        now = BEGIN - dice.randrange(length)
        while now < END:
            ends = now + dice.randrange(length // 2, length * 3 // 2)
            lived.append(Lived(BASE + 0x1000 * at, f"bpf_prog_{len(lived):016x}_p", now, ends))
            now = ends + dice.randrange(1, length // 10)
    return lived


def sampled(lived: list[Lived], seed: int, number: int = 400) -> list[Sample]:
    dice = random.Random(seed)
    found = []
    while len(found) < number:
        time = dice.randrange(BEGIN, END)
        there = [life for life in lived if life.was_at(time)]
        if there:
            found.append(Sample(time, dice.choice(there)))
    return sorted(found)


def history(folder: Path, lived: list[Lived], behind: int) -> str:
    """A history of them, in which perf's clock is ``behind`` CLOCK_MONOTONIC."""
    path = str(folder / "ksym.db")
    writer, timeline = HistoryWriter(path, "test", BEGIN - SECOND, None), Timeline()
    changes = [(life.loaded, 1, load(life.address, 200, life.name, life.loaded)) for life in lived]
    changes += [
        (life.unloaded, 0, unload(life.address, life.unloaded, life.name))
        for life in lived
        if life.unloaded < END
    ]
    for _, _, change in sorted(changes, key=lambda change: change[:2]):
        lifetime = timeline.apply(change)
        assert lifetime is not None
        writer.note(lifetime)
    for at in (BEGIN - SECOND, END + SECOND):
        writer.tick(Instant(at, at, 10**18 + at, at - behind))
    writer.close(END + SECOND)
    return path


def text_of(samples: list[Sample], behind: int, names: str, lived: list[Lived]) -> str:
    """perf's text on a clock that is ``behind`` CLOCK_MONOTONIC.

    With ``names`` "right", "stale" or "none", of every third frame none.
    """
    first: dict[int, str] = {}
    for life in lived:
        first.setdefault(life.address, life.name)
    lines = []
    for number, (time, life) in enumerate(samples):
        stamp = time - behind
        name = {"right": life.name, "stale": first[life.address]}.get(names, "")
        if number % 3 == 0 or not name:
            frame = f"\t{life.address + 8:16x} [unknown] ([unknown])"
        else:
            frame = f"\t{life.address + 8:16x} {name}+0x8 ({name})"
        head = f"app 7 [000] {stamp // SECOND}.{stamp % SECOND:09d}: 1 cpu-clock: "
        lines += [head, frame, ""]
    return "\n".join(lines) + "\n"


def annotated(text: str, path: str, clock: str | None = None) -> str:
    source = Text(io.BytesIO(text.encode()))
    with open_renamer(source, Choice(path), clock) as renamer:
        assert renamer is not None
        annotator = Annotator(renamer)
        return b"".join([*map(annotator.feed, source.pieces()), annotator.close()]).decode()


def annotated_or_refused(text: str, path: str) -> str | None:
    try:
        return annotated(text, path)
    except KsymError as error:
        if "--header" in str(error) and "--clock perf|monotonic" in str(error):
            return None
        raise


def names_in(text: str) -> list[str]:
    return [found[2].partition("+")[0] for found in map(_FRAME.match, text.split("\n")) if found]


def verdicts(before: str, after: str, samples: list[Sample]) -> tuple[int, int]:
    """How many frames without a name got the right one; how many names that we gave are wrong."""
    right = wrong = 0
    for perf, ours, sample in zip(names_in(before), names_in(after), samples):
        right += perf == "[unknown]" and ours == sample.lived.name
        wrong += ours not in (perf, sample.lived.name)
    return right, wrong


@pytest.fixture(autouse=True)
def boot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "boot_id", lambda: "this boot")
    monkeypatch.setattr("time.monotonic_ns", lambda: 200 * SECOND)


@pytest.mark.parametrize("names", ["right", "stale", "none"])
@pytest.mark.parametrize("length", [30 * MS, 400 * MS, 100 * SECOND])
# Of perf's clock in the history, and of the text's: CLOCK_MONOTONIC, perf's, or one that no
# history knows.
@pytest.mark.parametrize(
    "shift, behind",
    [(s * MS // 10, b * MS // 10) for s in (13, 3000) for b in (0, s, 3071)],
)
def test_no_name_is_wrong(tmp_path: Path, names: str, length: int, shift: int, behind: int) -> None:
    lived = churn(shift + behind, length)
    samples = sampled(lived, length)
    path = history(tmp_path, lived, shift)
    before = text_of(samples, behind, names, lived)
    after = annotated_or_refused(before, path)
    is_told = behind in (0, shift) and (names == "right" or length == 100 * SECOND)
    if after is None:
        assert not is_told
        return
    right, wrong = verdicts(before, after, samples)
    assert wrong == 0
    if is_told:
        assert right > 0.7 * len(samples) / 3


def test_the_times_choose_the_boot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lived = churn(1, 30 * MS)
    samples = sampled(lived, 2)
    monkeypatch.setattr(identity, "boot_id", lambda: "another boot")
    path = history(tmp_path, lived, 0)
    monkeypatch.setattr(identity, "boot_id", lambda: "this boot")
    HistoryWriter(path, "test", 5 * SECOND, None).close(20 * SECOND)
    before = text_of(samples, 0, "right", lived)
    right, wrong = verdicts(before, annotated(before, path, "monotonic"), samples)
    assert (right, wrong) == (names_in(before).count("[unknown]"), 0)


@pytest.mark.parametrize(
    "header, clock",
    [
        ("", None),
        ("# event : name = cpu-clock:u, , id = { 1 }, type = 1 (software), freq = 1\n", "perf"),
        ("# event : name = a, type = 1, use_clockid = 1, x = 1, clockid = 1\n", "monotonic"),
        (
            (
                "# event : name = a, , id = { 1, 2 }, use_clockid = 1, clockid = 0\n"
                "# event : name = b c, , id = { 3 }, size = 136\n"
                "# event : name = d, , id = { 4 }, use_clockid = 1, clockid = 4\n"
            ),
            {b"a": "realtime", b"b c": "perf"},
        ),
    ],
)
def test_a_header_tells_the_clock_of_each_event(header: str, clock: object) -> None:
    text = Text(io.BytesIO(HEADER.format(header).encode()))
    assert text.clock == clock
    assert text.unplaced == ([b"d"] if isinstance(clock, dict) else [])


def test_a_clock_that_no_history_knows_is_refused(tmp_path: Path) -> None:
    header = "# event : name = a, size = 136, use_clockid = 1, clockid = 4\n"
    lived = churn(1, 30 * MS)
    samples = sampled(lived, 2, 60)
    path = history(tmp_path, lived, 0)
    text = HEADER.format(header) + text_of(samples, 0, "right", lived)
    with pytest.raises(KsymError, match="a clock that a history cannot place"):
        annotated(text, path)
    assert verdicts(text, annotated(text, path, "monotonic"), samples) == (20, 0)


@pytest.mark.parametrize(
    "known, is_of_now, said",
    [
        ({"release": "6.1"}, True, 0),
        ({"release": "6.2", "text_start": BASE}, False, 0),
        ({"host": "pod", "text_start": BASE}, True, 1),
        # A fleet has one build on many hosts.
        ({"host": "pod", "build_id": "aa"}, False, 0),
        ({"host": "pod"}, False, 0),
        ({"build_id": "bb"}, False, 0),
        ({"build_id": "aa", "times": {"monotonic": (1, 199 * SECOND)}}, True, 0),
        ({"build_id": "aa", "times": {"monotonic": (1, 300 * SECOND)}}, False, 0),
        # By perf's clock it is 400 s.
        ({"build_id": "aa", "times": {"perf": (1, 300 * SECOND)}}, True, 0),
    ],
)
def test_what_can_be_of_the_running_system(
    monkeypatch: pytest.MonkeyPatch, known: dict[str, object], is_of_now: bool, said: int
) -> None:
    told: list[str] = []
    monkeypatch.setattr(
        locate, "running_boot", lambda: Boot(0, "this boot", "here", "6.1", "aa", BASE, 1)
    )
    now = Instant(200 * SECOND, 0, 0, 400 * SECOND)
    monkeypatch.setattr(session, "clocks_now", lambda: ClockMap([now]))
    assert session.is_of_now(Origin("perf.data", **known), told.append) == is_of_now
    assert len(told) == said


def test_the_kernel_s_image_is_told_by_functions_and_not_by_what_lies_behind_them() -> None:
    lines = (
        b"app 7 [000] 5.000000000: 1 cycles:\n"
        b"\tffffffff81001010 do_it+0x10 ([kernel.kallsyms])\n"
        b"\tffffffffc0001010 _einittext+0x3c829740 ([kernel.kallsyms])\n"
        b"\tffffffffc05330c8 ftrace_trampoline+0xc8 ([kernel.kallsyms])\n\n"
    )
    start = Text(io.BytesIO(lines)).start(False)
    assert start.functions == {0xFFFF_FFFF_8100_1010}
