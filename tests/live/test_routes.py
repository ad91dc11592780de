"""The same samples by every route: one name for each frame, and none that is wrong.

The oracle is the scenario, whose samples say in their comm which program ran.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

import pytest

from ksym_plugin.history.reader import History
from ksym_plugin.timeline.resolver import Resolver
from ksym_plugin.timeline.symbols import Frame
from tests.oracle import procs, scenario, truth

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

KSYM = [sys.executable, "-m", "ksym_plugin.cli"]
HANDLER = f"{procs.REPO}/contrib/perf-script/ksym_handler.py"
SECONDS = 120.0
KINDS = {
    "task": ("--clock", "perf"),
    "all": ("--clock", "mono", "--perf", "all"),
    "events": ("--clock", "perf", "--also=-e page-faults -e context-switches"),
    # Few programs, each for longer: a name may be missing where one follows another.
    "dwarf": ("--clock", "mono", "--count", "10", "--ms", "50", "--also=--call-graph dwarf,1024"),
}

pytestmark = [pytest.mark.usefixtures("perf", "perf_python"), pytest.mark.slow]


class Recorded:
    """One scenario under ``ksym record``."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.history, self.data = str(folder / "x.db"), str(folder / "perf.data")
        work = scenario.command(str(folder), "--count", "30", "--ms", "20", *options)
        procs.run([*KSYM, "record", "-o", self.history, "--", *work], scenario.SECONDS + 30)
        self.truth: dict[str, Any] = json.loads((folder / "truth.json").read_text())

    def script(self, *words: str) -> str:
        line = [*KSYM, "script", "-i", self.data, "-H", self.history, *words]
        return procs.run(line, SECONDS).out

    def route(self, name: str) -> str:
        """The text that a route gives of the samples."""
        ours, plain = ["-H", self.history], ["perf", "script", "-i", self.data]
        if name == "script":
            return self.script("--ns")
        if name == "embedded":
            return procs.run([*plain, "-s", HANDLER, "--", *ours], SECONDS).out
        if name == "program":
            return procs.run([sys.executable, HANDLER, "-i", self.data, *ours], SECONDS).out
        header = ["--header"] if name == "annotate" else []
        text = Path(self.data).with_suffix(f".{name}")
        text.write_text(procs.run([*plain, "--ns", *header], SECONDS).out)
        return procs.run([*KSYM, "annotate", *ours, str(text)], SECONDS).out


@pytest.fixture(scope="module", params=sorted(KINDS))
def recorded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    return Recorded(tmp_path_factory.mktemp("routes"), *KINDS[request.param])


@pytest.fixture(scope="module")
def by_script(recorded: Recorded) -> list[truth.Sample]:
    return list(truth.samples(recorded.route("script")))


def frames(samples: list[truth.Sample]) -> list[list[tuple[int, str]]]:
    """Address and name of the kernel frames of each sample."""
    kernel = [[f for f in sample.frames if f.ip >> 63] for sample in samples]
    return [[(frame.ip, frame.name) for frame in found] for found in kernel]


def test_no_name_is_wrong_and_hardly_one_missing(recorded: Recorded) -> None:
    score = truth.frames(recorded.route("script"), recorded.truth)
    assert score.total > 300
    assert score.wrong == 0, score
    assert score.share_right >= 0.995, score


@pytest.mark.parametrize("route", ["annotate", "embedded", "program"])
def test_each_text_has_the_same_names(
    recorded: Recorded, by_script: list[truth.Sample], route: str
) -> None:
    others = list(truth.samples(recorded.route(route)))
    assert len(others) == len(by_script)
    differing = [
        (one, other) for one, other in zip(frames(by_script), frames(others)) if one != other
    ]
    assert differing == []


def test_the_history_itself_has_the_same_names(
    recorded: Recorded, by_script: list[truth.Sample]
) -> None:
    clock = "monotonic" if recorded.truth["clock"] == "mono" else "perf"
    with History(recorded.history) as history:
        past = history.recorded(history.boots()[-1])
        clocks, resolver = past.clock_map(), Resolver(past)
        for sample in by_script:
            time = clocks.to_monotonic(clock, sample.time)
            for frame in sample.frames:
                if frame.dso == "[bpf]" and frame.name != truth.UNKNOWN:
                    answer = resolver.resolve(frame.ip, time)
                    assert isinstance(answer, Frame), answer
                    assert answer.name == frame.name


def leaves(samples: list[truth.Sample]) -> Counter[str]:
    """How often each program was the leaf."""
    tops = [sample.frames[0] for sample in samples if sample.frames]
    return Counter(frame.name for frame in tops if is_ours(frame.name))


def is_ours(name: str) -> bool:
    """Whether a program is the scenario's: others may run in what others run."""
    return name.startswith("bpf_prog_") and "_oracle_" in name


def timer(recorded: Recorded) -> str:
    """perf's name of the event that has most samples."""
    events = procs.run(["perf", "evlist", "-i", recorded.data], SECONDS).out.splitlines()
    return next(event for event in events if event.startswith("cpu-clock"))


def of_the_timer(recorded: Recorded) -> list[truth.Sample]:
    return list(truth.samples(recorded.script("--ns", "--event", timer(recorded))))


def test_stacks_have_the_same_names(recorded: Recorded) -> None:
    wanted = leaves(of_the_timer(recorded))
    text = Path(recorded.data).with_suffix(".text")
    text.write_text(procs.run(["perf", "script", "-i", recorded.data, "--ns", "--header"], 60).out)
    fold = [*KSYM, "fold", "--all", "--weight", "samples", "-H", recorded.history, str(text)]
    embedded = ["perf", "script", "-i", recorded.data, "-s", HANDLER, "--", "--format", "folded"]
    routes = {
        "script": recorded.script("--format", "folded"),
        "fold": procs.run(fold, SECONDS).out,
        "embedded": procs.run([*embedded, "-H", recorded.history], SECONDS).out,
    }
    for route, folded in routes.items():
        counts: Counter[str] = Counter()
        for line in folded.splitlines():
            stack, _, count = line.rpartition(" ")
            leaf = stack.rpartition(";")[2]
            if is_ours(leaf):
                counts[leaf.rpartition("_[")[0]] += int(count)
        assert counts == wanted, route


def test_the_report_counts_the_same(recorded: Recorded) -> None:
    words = ["report", "-i", recorded.data, "-H", recorded.history, "--json"]
    found = json.loads(procs.run([*KSYM, *words], SECONDS).out)
    samples = of_the_timer(recorded)
    assert found["event"] == timer(recorded)
    assert found["samples"] == len(samples)
    own: Counter[str] = Counter()
    for row in found["programs"]:
        own.update(row["functions"])
    programs = {name: count for name, count in own.items() if is_ours(name)}
    assert programs == leaves(samples)
