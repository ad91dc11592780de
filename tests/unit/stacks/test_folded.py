"""Folded text: what is a stack, what is not, and what its frames are."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ksym_plugin.stacks import folded, frames
from ksym_plugin.timeline.symbols import SourceLocation

TAG = "bpf_prog_0123456789abcdef"


def parsed(text: str | bytes) -> dict[str, float]:
    data = text.encode() if isinstance(text, str) else text
    return folded.parse(data.splitlines(keepends=True)).by_text()


@pytest.mark.parametrize(
    "text, counts",
    [
        ("a;b;c 12\n", {"a;b;c": 12}),
        ("a;b 1\na;b 2\n", {"a;b": 3}),
        ("a;b 1.5\r\nc 2\r\n", {"a;b": 1.5, "c": 2}),
        ("a b;c d 3", {"a b;c d": 3}),
        ("a;worker 7 12\nb;c 1\n", {"a;worker 7": 12, "b;c": 1}),
        ("a\t4\n", {"a": 4}),
        ("\ufeffa;b 1\n", {"a;b": 1}),
        ("a 0\nb 1\n", {"b": 1}),
        ("a;Ldemo/Out;::write_[j] 3\n", {"a;Ldemo/Out:::write_[j]": 3}),
        (b"a;\xff\xfe 2\n", {"a;\udcff\udcfe": 2}),
    ],
)
def test_stacks(text: str | bytes, counts: dict[str, float]) -> None:
    assert parsed(text) == counts


def test_a_difference_is_one_where_every_line_has_two_counts() -> None:
    assert parsed("a;b 10 12\na 1 3\na;c 5 0\n") == {"a;b": 12, "a": 3}
    assert parsed("a;b 10 12\na 3\n") == {"a;b 10": 12, "a": 3}


@pytest.mark.parametrize(
    "line",
    ["a;b", "a;b x", "12", "a;b -1", "a;b 1e9", "a;b nan", "a;b 1.", "a " + "9" * 5000, "a ²"],
)
def test_what_is_no_stack_is_counted(line: str) -> None:
    stacks = folded.parse([line.encode(), b"\n", b"ok;ok 1\n"])
    kept = {"ok;ok": 1} if line != "a;b 1." else {"ok;ok": 1, "a;b": 1}
    assert (stacks.by_text(), stacks.skipped) == (kept, 2 - len(kept))


@given(st.lists(st.binary(max_size=30)))
def test_any_bytes(lines: list[bytes]) -> None:
    stacks = folded.parse(lines)
    assert stacks.skipped <= len(lines)
    assert all(count > 0 for count in stacks.by_text().values())


_TEXT = st.text(st.characters(codec="utf-8", exclude_characters=";\ufeff"), min_size=1, max_size=5)
_STACK = st.lists(_TEXT.filter(lambda t: t.split() == [t]), min_size=1, max_size=4)


@given(st.lists(st.tuples(_STACK, st.integers(1, 99)), min_size=1))
def test_what_was_written_comes_back(stacks: list[tuple[list[str], int]]) -> None:
    expected: dict[str, int] = {}
    for names, count in stacks:
        text = ";".join(names).replace(";::", ":::")
        expected[text] = expected.get(text, 0) + count
    lines = [f"{';'.join(names)} {count}\n".encode() for names, count in stacks]
    assert folded.parse(lines).by_text() == expected


@pytest.mark.parametrize(
    "text, name, kind",
    [
        ("main", "main", frames.USER),
        ("vfs_read_[k]", "vfs_read", frames.KERNEL),
        ("java/lang/Thread:::run_[j]", "java/lang/Thread:::run", frames.JIT),
        ("std::move_[i]", "std::move", frames.INLINED),
        ("anything_[b]", "anything", frames.BPF),
        (f"{TAG}_count_[k]", f"{TAG}_count", frames.BPF),
        (f"{TAG}_count", f"{TAG}_count", frames.BPF),
        (f"{TAG}?_[k]", f"{TAG}?", frames.BPF),
        ("bpf_trampoline_6442467359_[k]", "bpf_trampoline_6442467359", frames.BPF),
        # Functions of the kernel that are no BPF programs.
        ("bpf_trampoline_update_[k]", "bpf_trampoline_update", frames.KERNEL),
        ("bpf_prog_run_[k]", "bpf_prog_run", frames.KERNEL),
        ("bpf_dispatcher_change_prog_[k]", "bpf_dispatcher_change_prog", frames.KERNEL),
        ("[unknown]", "[unknown]", frames.UNKNOWN),
        ("", "[unknown]", frames.UNKNOWN),
        ("[unknown]_[k]", "[unknown]", frames.KERNEL),
        ("[libc.so.6]", "[libc.so.6]", frames.USER),
        ("operator()(int)", "operator()(int)", frames.USER),
        ("f (libx.so)", "f (libx.so)", frames.USER),
    ],
)
def test_classes(text: str, name: str, kind: str) -> None:
    frame = folded.frame_of(text)
    assert (frame.name, frame.kind) == (name, kind)


@pytest.mark.parametrize(
    "text, name, file, line",
    [
        ("py::work:/srv/app.py", "work", "/srv/app.py", 0),
        ("py::work", "work", "", 0),
        ("work (srv/app.py:12)", "work", "srv/app.py", 12),
        ("work (app.py)", "work", "app.py", 0),
        (
            "_find (<frozen importlib._bootstrap>:241)",
            "_find",
            "<frozen importlib._bootstrap>",
            241,
        ),
    ],
)
def test_python(text: str, name: str, file: str, line: int) -> None:
    frame = folded.frame_of(text)
    location = SourceLocation(file, line) if file else None
    assert (frame.kind, frame.name, frame.location) == (frames.PYTHON, name, location)


@given(st.text())
def test_any_frame_has_a_name(text: str) -> None:
    assert isinstance(folded.frame_of(text).name, str)
