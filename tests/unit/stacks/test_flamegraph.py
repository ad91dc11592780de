"""The SVG as a document: valid, self-contained, the same every time, and bounded.

Its boxes are tested against sums over every prefix of the stacks.
"""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ksym_plugin.cli import flamegraph
from ksym_plugin.stacks import folded
from ksym_plugin.stacks.flamegraph import MOST_DEEP, Box, draw, hidden, layout
from ksym_plugin.stacks.names import cut, readable
from tests.unit.cli.test_cli import ksym

SPACE = "{http://www.w3.org/2000/svg}"
STACKS = {
    "sh;main;read_[k];bpf_prog_0123456789abcdef_count_[b]": 40,
    "sh;main;read_[k]": 20,
    "sh;main;[unknown]": 10,
    "py;py::work:/a.py": 30,
}
HOSTILE = (
    "</script><script>window.pwned = 1</script>",
    "]]></style><script>window.pwned = 1</script>",
    "\"><image href='x' onerror='window.pwned = 1'/>",
    "<!--&amp;&#x41;",
    "a\0b\x1b[31mc\x7f\x85\ufffe\u202etxt",
    "\udcff\ud800",
    "__proto__",
    "x" * 100_000,
    "名前" * 500,
)


def drawn(counts: dict[str, float], **options: object) -> str:
    return "".join(draw(folded.stacks_of(counts), "Flame graph", **options))  # type: ignore[arg-type]


def data_of(text: str) -> dict:
    return json.loads(ET.fromstring(text).find(f"{SPACE}metadata").text)


def rects(text: str) -> list[ET.Element]:
    return list(ET.fromstring(text).find(f"{SPACE}g[@class='frames']"))


def named(text: str) -> dict[str, ET.Element]:
    data = data_of(text)
    return {data["names"][n]: rect for n, rect in zip(data["boxes"][4::5], rects(text))}


def test_widths_are_shares() -> None:
    found = named(drawn(STACKS, width=1024))
    assert {name: round(float(rect.get("width")) / 10) for name, rect in found.items()} == {
        "all": 100,
        "sh": 70,
        "main": 70,
        "read": 60,
        "bpf_prog_0123456789abcdef_count": 40,
        "[unknown]": 10,
        "py": 30,
        "work (/a.py)": 30,
    }


def test_classes_have_colours_and_shares_of_their_own() -> None:
    text = drawn(STACKS)
    classes = {name: rect.get("class")[:-1] for name, rect in named(text).items()}
    assert classes["bpf_prog_0123456789abcdef_count"] == "bpf"
    assert (classes["read"], classes["main"], classes["[unknown]"]) == ("kernel", "user", "unknown")
    keys = [e.text for e in ET.fromstring(text).iter(f"{SPACE}text") if e.get("class") == "key"]
    assert keys == ["BPF 40.0 %", "kernel 20.0 %", "user 0.0 %", "Python 30.0 %", "unknown 10.0 %"]
    styles = set(re.findall(r"^\.([a-z]+\d) |\} \.([a-z]+\d) ", text, re.MULTILINE))
    assert {rect.get("class") for rect in rects(text)} <= {name for pair in styles for name in pair}


def test_bpf_frames_are_labelled_by_the_program_s_own_name() -> None:
    root = ET.fromstring(drawn(STACKS))
    labels = [element.text for element in root.find(f"{SPACE}g[@class='labels']")]
    assert "count" in labels
    assert "bpf_prog_0123456789abcdef_count" not in labels


def test_roots_stand_below_or_hang_above() -> None:
    def y(text: str, name: str) -> int:
        return int(named(text)[name].get("y"))

    upright, inverted = drawn(STACKS), drawn(STACKS, inverted=True)
    assert y(upright, "all") > y(upright, "sh") > y(upright, "main")
    assert y(inverted, "all") < y(inverted, "sh") < y(inverted, "main")


def test_notes_are_a_frame_s() -> None:
    frame = "bpf_prog_0123456789abcdef_count_[b]"
    stacks = folded.stacks_of(STACKS)
    number, gone = (stacks.table.number(folded.frame_of(text)) for text in (frame, "gone"))
    text = "".join(draw(stacks, "x", notes={number: ["program 7 <b>"], gone: ["never"]}))
    data = data_of(text)
    ((number, lines),) = data["notes"].items()
    assert (data["names"][int(number)], lines) == (frame[:-4], ["program 7 <b>"])


def test_the_same_stacks_make_the_same_bytes() -> None:
    assert drawn(STACKS) == drawn(dict(reversed(STACKS.items())))


def test_nothing_is_fetched_from_elsewhere() -> None:
    text = drawn(STACKS)
    assert set(re.findall(r"https?://[^\"\s]*", text)) == {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xhtml",
    }
    assert not re.search(r"href|@import|url\(|src=", text)


@pytest.mark.parametrize("name", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_names_are_text(name: str) -> None:
    stacks = folded.stacks_of({f"{name};b": 1})
    text = "".join(draw(stacks, name, notes={0: [name]}))
    text.encode("utf-8")
    root = ET.fromstring(text)
    assert [element.tag for element in root.iter()].count(f"{SPACE}script") == 1
    assert not list(root.iter(f"{SPACE}image"))
    assert max(map(len, data_of(text)["names"])) <= 4 * 500


@settings(max_examples=60)
@given(st.dictionaries(st.text(st.characters(), max_size=8), st.integers(1, 9), max_size=5))
def test_any_names_are_valid_xml(counts: dict[str, int]) -> None:
    text = drawn(counts)
    data = data_of(text)
    assert len(rects(text)) == len(data["boxes"]) // 5
    assert "\0" not in text


def test_no_stacks_at_all() -> None:
    assert [rect.get("class") for rect in rects(drawn({}))] == ["root0"]


def test_narrow_frames_are_left_out_and_their_share_is_said() -> None:
    counts = {"a;big": 980.0, **{f"a;small{number}": 1.0 for number in range(20)}}
    text = drawn(counts, width=1024, least=2.0)
    assert set(named(text)) == {"all", "a", "big"}
    assert "cut 2 % of the samples short" in text
    assert "Every frame is drawn" in drawn(counts, width=1024)


def test_counts_with_decimals_are_no_puzzle() -> None:
    text = drawn({f"a;b{number}": 0.1 for number in range(10)})
    assert ">1 sample<" in text and "Every frame is drawn" in text
    assert ">1.5 samples<" in drawn({"a": 1.5})
    assert "Frames under 1,176 px are not drawn; they cut 100 % of" in drawn({"a": 1}, least=1e9)


def test_size_is_bounded_however_many_stacks_there_are() -> None:
    frames = [f"some_function_of_usual_length_{number}" for number in range(97)]
    counts = {
        ";".join(frames[(one * step) % 97] for step in range(1, 12)) + f";{one}": 1.0 + one % 50
        for one in range(30_000)
    }
    text = drawn(counts, least=0)
    assert len(text.encode()) < 3_000_000
    assert 15_000 < len(rects(text)) <= 20_000


# Boxes

#: With characters that sort before the separator, and names that begin other names.
ANY_FRAME = st.sampled_from(["a", "a!", "a b", "ab", "b", "", "~", "a\x01"])
ANY_STACKS = st.dictionaries(
    st.lists(ANY_FRAME, min_size=1, max_size=5).map(";".join), st.integers(1, 50), max_size=12
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
) -> tuple[list[Box], dict[tuple[str, ...], Box]]:
    """The boxes, and the same by their paths; parents come before children."""
    stacks = folded.stacks_of(counts)
    boxes = layout(stacks, least, most)
    frames = stacks.table.frames
    found = {}
    path: list[str] = []
    for box in boxes:
        del path[max(0, box.depth - 1) :]
        if box.depth:
            path.append(frames[box.frame].text)
        assert len(path) == box.depth, "a box without the one it stands on"
        assert tuple(path) not in found, "a box drawn twice"
        found[tuple(path)] = box
    return boxes, found


@given(ANY_STACKS)
def test_every_prefix_is_a_box(counts: dict[str, int]) -> None:
    boxes, found = laid_out(counts)
    assert {path: (box.total, box.own) for path, box in found.items()} == by_prefix(counts)
    assert hidden(boxes) == 0


@given(ANY_STACKS)
def test_boxes_lie_within_their_parents_and_beside_each_other(counts: dict[str, int]) -> None:
    _, found = laid_out(counts)
    edge: dict[tuple[str, ...], float] = {}
    for path, box in found.items():
        if path:
            parent = found[path[:-1]]
            assert box.start >= edge.get(path[:-1], parent.start)
            assert box.start + box.total <= parent.start + parent.total
            edge[path[:-1]] = box.start + box.total


@given(ANY_STACKS, st.integers(0, 60), st.integers(1, 20))
def test_what_is_left_out(counts: dict[str, int], least: int, most: int) -> None:
    boxes, found = laid_out(counts, least, most)
    sums = by_prefix(counts)
    assert {path: (box.total, box.own) for path, box in found.items()}.items() <= sums.items()
    assert len(found) <= most
    assert all(box.total >= least for path, box in found.items() if path)
    cut = [path for path in sums if path not in found and path[:-1] in found]
    assert hidden(boxes) == sum(sums[path][0] for path in cut)
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
    boxes, _ = laid_out({";".join("x" * 50_000): 1})
    assert max(box.depth for box in boxes) == MOST_DEEP


# Names


@pytest.mark.parametrize(
    "name, text",
    [
        ("plain(int, char const*)", "plain(int, char const*)"),
        ("naïve 名前", "naïve 名前"),
        ("a\x1bb\0", "a\\x1bb\\x00"),
        ("\udcff", "\\xff"),
        ("\ud800\u202e", "\\ud800\\u202e"),
        ("\U000e0001", "\\ue0001"),
        ("a\u00a0b", "a b"),
        ("x" * 501, "x" * 499 + "…"),
    ],
)
def test_readable(name: str, text: str) -> None:
    assert readable(name) == text


@pytest.mark.parametrize(
    "name, room, text",
    [
        ("abcdef", 6, "abcdef"),
        ("abcdef", 5, "abcd…"),
        ("abcdef", 2, ""),
        ("名前名前", 8, "名前名前"),
        ("名前名前", 7, "名前…"),
    ],
)
def test_cut(name: str, room: int, text: str) -> None:
    assert cut(name, room) == text


# The command


def run(text: str | bytes, *words: str):
    return ksym("flamegraph", *words, stdin=text)


def test_command_draws_stdin(tmp_path) -> None:
    done = run("a;b 1\njunk\n", "--title", "T<t>", "-o", str(tmp_path / "x.svg"))
    assert done.exit_code == 0
    text = (tmp_path / "x.svg").read_text(encoding="utf-8")
    assert ET.fromstring(text).find(f"{SPACE}title").text == "T<t>"
    assert set(named(text)) == {"all", "a", "b"}


def test_command_reads_a_file_and_names_it(tmp_path) -> None:
    (tmp_path / "in.folded").write_bytes(b"a;\xffb 1\n")
    done = run("", str(tmp_path / "in.folded"), "--inverted", "--width", "900")
    assert done.exit_code == 0
    assert ET.fromstring(done.stdout).get("width") == "900"
    assert ET.fromstring(done.stdout).find(f"{SPACE}title").text == "in.folded"
    assert "a" in named(done.stdout) and "\\xffb" in named(done.stdout)


def test_what_has_no_lines_does_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flamegraph, "_LONGEST", 16)
    done = run(b"a;b 1\n" + b"x" * 100 + b";y 5\nc;d 2\n" + b"z" * 15 + b"\n", "--format", "svg")
    assert set(named(done.stdout)) == {"all", "a", "b", "c", "d"}
    assert done.stderr == "ksym: 2 lines without a stack and a count left out\n"


def test_command_for_speedscope() -> None:
    done = run("a;b 2\na 1\n", "--format", "speedscope")
    assert json.loads(done.stdout)["profiles"][0]["weights"] == [1, 2]


@pytest.mark.parametrize("text", ["", "perf script output?\n", "12\n"])
def test_command_without_stacks_says_so(text: str) -> None:
    done = run(text)
    assert done.exit_code == 1
    assert done.stdout == ""


def test_bpf_is_a_class_in_what_others_fold() -> None:
    counts = folded.parse([b"sh;bpf_prog_0123456789abcdef_count_[k] 5\n"]).by_text()
    found = named(drawn(counts))
    assert found["bpf_prog_0123456789abcdef_count"].get("class").startswith("bpf")
