"""speedscope's files: by the rules of its published schema, and true to the stacks, as its own
page reads them."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from ksym_plugin.stacks.folded import Reader
from ksym_plugin.stacks.speedscope import SCHEMA, write
from tests.unit.stacks.test_flamegraph import HOSTILE
from tests.unit.viewers import Speedscope

_FRAME = st.text(st.characters(exclude_characters=";"), max_size=6)
_SAMPLES = st.lists(
    st.tuples(st.lists(_FRAME, min_size=1, max_size=4).map(";".join), st.integers(1, 9)),
    max_size=6,
)


def written(name: str, *profiles: tuple[str, Any]) -> dict[str, Any]:
    reader = Reader()
    numbered = [
        (title, [(reader.stack(text), weight) for text, weight in samples])
        for title, samples in profiles
    ]
    document = json.loads("".join(write(name, reader.table, numbered)))
    check(document)
    return document


def check(document: dict[str, Any]) -> None:
    """The schema's rules for sampled profiles (speedscope's src/lib/file-format-spec.ts)."""
    assert set(document) <= {
        *("$schema", "shared", "profiles", "name", "activeProfileIndex", "exporter")
    }
    assert document["$schema"] == SCHEMA
    frames = document["shared"]["frames"]
    for frame in frames:
        assert set(frame) <= {"name", "file", "line", "col"}
        assert isinstance(frame["name"], str)
        assert isinstance(frame.get("file", ""), str)
        assert isinstance(frame.get("line", 0), int)
    for profile in document["profiles"]:
        assert profile["type"] == "sampled"
        assert profile["unit"] in ("none", "nanoseconds", "microseconds", "milliseconds", "seconds")
        assert len(profile["samples"]) == len(profile["weights"])
        assert profile["endValue"] - profile["startValue"] == sum(profile["weights"])
        assert all(0 <= at < len(frames) for sample in profile["samples"] for at in sample)


def test_frames_are_shared_and_stacks_are_root_first() -> None:
    document = written("x", ("one", [("a;b_[k]", 2), ("a", 1)]), ("two", [("b_[k];a", 5)]))
    names = [frame["name"] for frame in document["shared"]["frames"]]
    one, two = document["profiles"]
    assert names == ["a", "b"]
    assert [[names[at] for at in sample] for sample in one["samples"]] == [["a", "b"], ["a"]]
    assert (one["weights"], two["weights"]) == ([2, 1], [5])
    assert (one["name"], two["samples"]) == ("one", [[1, 0]])


def test_files_tell_classes_apart() -> None:
    stack = "main;read_[k];bpf_prog_0123456789abcdef_x_[b];work (a.py:3)"
    frames = written("x", ("one", [(stack, 1)]))["shared"]["frames"]
    assert frames == [
        {"name": "main"},
        {"name": "read", "file": "[kernel]"},
        {"name": "bpf_prog_0123456789abcdef_x", "file": "[bpf]"},
        {"name": "work", "file": "a.py", "line": 3},
    ]


def test_no_samples() -> None:
    (profile,) = written("", ("all", []))["profiles"]
    assert (profile["samples"], profile["endValue"]) == ([], 0)


@settings(max_examples=50)
@given(st.text(), st.lists(st.tuples(st.text(), _SAMPLES), max_size=3))
def test_any_samples(name: str, profiles: list[tuple[str, list[tuple[str, int]]]]) -> None:
    document = written(name, *profiles)
    for (_, samples), profile in zip(profiles, document["profiles"]):
        assert profile["weights"] == [weight for _, weight in samples]
        assert [len(sample) for sample in profile["samples"]] == [
            stack.count(";") + 1 for stack, _ in samples
        ]


def test_speedscope_reads_what_was_written(speedscope: Speedscope) -> None:
    app = [("main;read_[k];bpf_prog_0123456789abcdef_x_[b]", 2), ("main", 1), ("main;read_[k]", 4)]
    odd = [(f"main;{HOSTILE[0]}", 3), ("work (a.py:3);main", 1)]
    document = written("all", ("app", app), ("odd", odd))
    assert speedscope.read("x.speedscope.json", json.dumps(document).encode()) == {
        "app": {
            ("main", "read", "bpf_prog_0123456789abcdef_x"): 2,
            ("main",): 1,
            ("main", "read"): 4,
        },
        "odd": {("main", HOSTILE[0]): 3, ("work", "main"): 1},
    }
