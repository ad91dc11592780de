"""perf.data headers, built by hand after perf.data-file-format.txt."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ksym_plugin.perf import data
from ksym_plugin.perf.data import Recorded
from tests.unit.perf_files import IDENTIFIER, TIME, USUAL, PerfEvent, PerfFile

TEXT = 0xFFFF_FFFF_8100_0000
BUILD_ID = bytes(range(1, 21))
KERNEL_MODE, USER_MODE, HAS_BUILD_ID = 1, 2, 1 << 14
MMAP, COMM, MMAP2 = 1, 3, 10
TRACING, BUILD_IDS, HOST, RELEASE, ARCH, EVENTS, TIMES = 1, 2, 3, 4, 6, 12, 21


def padded(content: bytes, to: int = 8) -> bytes:
    return content + b"\0" * (-len(content) % to)


def record(kind: int, misc: int, body: bytes) -> bytes:
    return struct.pack("=IHH", kind, misc, 8 + len(body)) + body


def mmap(name: bytes, pgoff: int, misc: int = KERNEL_MODE) -> bytes:
    body = struct.pack("=iiQQQ", -1, 0, TEXT, 1 << 24, pgoff) + padded(name + b"\0")
    return record(MMAP, misc, body)


def mmap2(name: bytes, pgoff: int, build_id: bytes | None, size: int = 20) -> bytes:
    body = struct.pack("=iiQQQ", -1, 0, TEXT, 1 << 24, pgoff)
    if build_id is None:
        body += struct.pack("=IIQQ", 1, 2, 3, 4)
    else:
        body += struct.pack("=BBH20s", size, 0, 0, build_id)
    body += struct.pack("=II", 5, 0) + padded(name + b"\0")
    return record(MMAP2, KERNEL_MODE | (HAS_BUILD_ID if build_id else 0), body)


def build_id(name: bytes, value: bytes, misc: int = KERNEL_MODE, size: int = 0) -> bytes:
    body = struct.pack("=i20sB3x", -1, value, size) + padded(name + b"\0", 64)
    return record(0, misc, body)


def string(text: bytes) -> bytes:
    content = padded(text + b"\0", 64)
    return struct.pack("=I", len(content)) + content


def event_names(*names: bytes, ids: int = 2, attr_size: int = 136) -> bytes:
    content = struct.pack("=II", len(names), attr_size)
    for name in names:
        content += b"\1" * attr_size + struct.pack("=I", ids) + string(name) + b"\2" * 8 * ids
    return content


def file_of(records: bytes, features: dict[int, bytes], magic: bytes = b"PERFILE2") -> bytes:
    """A whole perf.data: header, records, the table of features, their contents."""
    flags = [0, 0, 0, 0]
    for bit in features:
        flags[bit // 64] |= 1 << bit % 64
    at = 104 + len(records) + 16 * len(features)
    table = contents = b""
    for _, content in sorted(features.items()):
        table += struct.pack("=QQ", at + len(contents), len(content))
        contents += content
    header = struct.pack("=8sQQ6Q4Q", magic, 104, 136, 0, 0, 104, len(records), 0, 0, *flags)
    return header + records + table + contents


RECORDS = record(COMM, 0, b"\0" * 24) + mmap(b"[kernel.kallsyms]_text", TEXT)
FEATURES = {
    TRACING: b"x" * 40,
    BUILD_IDS: build_id(b"/lib/x.so", b"\xee" * 20, USER_MODE)
    + build_id(b"[kernel.kallsyms]", BUILD_ID),
    HOST: string(b"example"),
    RELEASE: string(b"6.1.0-demo"),
    ARCH: string(b"x86_64"),
    EVENTS: event_names(b"cpu-clock", b"task-clock:u", b"dummy"),
    TIMES: struct.pack("=QQ", 5, 9),
    40: b"what a later perf adds",
    200: b"much later",
}
WHOLE = file_of(RECORDS, FEATURES)


def read(tmp_path: Path, content: bytes) -> Recorded:
    path = tmp_path / "perf.data"
    path.write_bytes(content)
    return data.read(str(path))


def told(recorded: Recorded) -> tuple[object, ...]:
    shown = [name for name in sorted(vars(recorded)) if name not in ("attrs", "features", "names")]
    return tuple(getattr(recorded, name) for name in shown)


NOTHING = told(Recorded())


def test_all_that_is_told(tmp_path: Path) -> None:
    found = read(tmp_path, WHOLE)
    assert found.build_id == BUILD_ID.hex()
    assert (found.host, found.release, found.text_start) == ("example", "6.1.0-demo", TEXT)
    assert (found.arch, found.width) == ("x86_64", len("task-clock:u"))
    assert (found.first_time, found.last_time) == (5, 9)


def test_a_directory_of_recordings(tmp_path: Path) -> None:
    (tmp_path / "perf.data").mkdir()
    (tmp_path / "perf.data" / "data").write_bytes(WHOLE)
    assert data.read(str(tmp_path / "perf.data")).host == "example"
    assert told(data.read(str(tmp_path))) == NOTHING


@pytest.mark.parametrize("path", [None, "-", "", "/nonexistent/perf.data", "/dev/null", "a\0b"])
def test_no_file(path: str | None) -> None:
    assert told(data.read(path)) == NOTHING


@pytest.mark.parametrize("size, length", [(0, 20), (20, 20), (16, 16), (255, 20)])
def test_short_build_ids(tmp_path: Path, size: int, length: int) -> None:
    ids = build_id(b"[kernel.kallsyms]", BUILD_ID, KERNEL_MODE, size)
    assert read(tmp_path, file_of(b"", {BUILD_IDS: ids})).build_id == BUILD_ID[:length].hex()


def test_a_guest_s_or_a_user_s_build_id_is_not_the_kernel_s(tmp_path: Path) -> None:
    ids = build_id(b"[guest.kernel.kallsyms]", b"\xaa" * 20, 4)
    ids += build_id(b"[kernel.kallsyms]", b"\xbb" * 20, USER_MODE)
    assert read(tmp_path, file_of(b"", {BUILD_IDS: ids})).build_id is None


@pytest.mark.parametrize(
    "name, start",
    [
        (b"[kernel.kallsyms]_text", TEXT),
        (b"[kernel.kallsyms]_stext", TEXT),
        (b"[guest.kernel.kallsyms]_text", None),
        (b"[nf_tables]", None),
        (b"[kernel.kallsyms]_text_of_another", None),
    ],
)
def test_the_kernel_s_own_map(tmp_path: Path, name: bytes, start: int | None) -> None:
    assert read(tmp_path, file_of(mmap(name, TEXT), {})).text_start == start
    assert read(tmp_path, file_of(mmap2(name, TEXT, None), {})).text_start == start


@pytest.mark.parametrize(
    "size, ours", [(0, None), (20, BUILD_ID), (16, BUILD_ID[:16]), (255, BUILD_ID)]
)
def test_a_kernel_map_with_its_build_id(tmp_path: Path, size: int, ours: bytes | None) -> None:
    kernel = mmap2(b"[kernel.kallsyms]_text", TEXT, BUILD_ID if ours else None, size)
    found = read(tmp_path, file_of(mmap2(b"[nf]", 0, b"\xcc" * 20) + kernel, {}))
    assert found.text_start == TEXT
    assert found.build_id == (ours.hex() if ours else None)


@pytest.mark.parametrize(
    "names, width", [([], 0), ([b""], 0), ([b"cycles"], 6), ([b"a", b"sched:sched_switch"], 18)]
)
def test_the_longest_name_of_an_event(tmp_path: Path, names: list[bytes], width: int) -> None:
    for ids in (0, 5):
        content = event_names(*names, ids=ids)
        found = read(tmp_path, file_of(b"", {EVENTS: content}))
        assert found.width == width
        assert list(found.attrs) == [name.decode() for name in names]


@pytest.mark.parametrize("form", ["file", "pipe"])
@pytest.mark.parametrize("order", "<>")
def test_either_byte_order_and_what_a_pipe_s_records_tell(
    tmp_path: Path, order: str, form: str
) -> None:
    events = [PerfEvent("cycles", config=1), PerfEvent("page-faults:u", ids=(3, 4))]
    file = PerfFile(*events, order=order, arch="aarch64")
    file.features[HOST] = file.string("pod-7")
    file.features[RELEASE] = file.string("6.1.0-demo")
    # What it announces is no record, whatever it looks like.
    fake = file.record(80, file.pack("Q", HOST) + file.string("fake"))
    file.records.append(file.record(66, file.pack("I", len(fake))) + padded(fake))
    file.kernel_map(TEXT)
    found = read(tmp_path, getattr(file, form)())
    assert (found.host, found.release, found.arch) == ("pod-7", "6.1.0-demo", "aarch64")
    assert (found.text_start, found.width) == (TEXT, len("page-faults:u"))
    assert found.attrs == {event.name: file.attr(event) for event in events}


@pytest.mark.parametrize("order", "<>")
@pytest.mark.parametrize(
    "types, first",
    [
        ([USUAL], 7_000),
        ([USUAL | IDENTIFIER, USUAL | IDENTIFIER], 7_000),
        ([USUAL & ~TIME], None),
        ([USUAL | IDENTIFIER, USUAL], None),
    ],
)
def test_a_pipe_tells_when_its_first_sample_was_taken(
    tmp_path: Path, order: str, types: list[int], first: int | None
) -> None:
    events = [PerfEvent(f"event {at}", kind) for at, kind in enumerate(types)]
    file = PerfFile(*events, order=order)
    file.features[TIMES] = file.pack("QQ", 0, 0)
    file.kernel_map(TEXT)
    for time in (7_000, 8_000):
        file.sample(time=time, ip=TEXT)
    found = read(tmp_path, file.pipe())
    assert (found.first_time, found.last_time, found.text_start) == (first, None, TEXT)


@pytest.mark.parametrize("form", ["file", "pipe"])
def test_a_file_on_standard_input_is_read_and_left_as_it_was(tmp_path: Path, form: str) -> None:
    file = PerfFile()
    file.features[HOST] = file.string("pod-7")
    path = tmp_path / "perf.data"
    path.write_bytes(getattr(file, form)())
    script = (
        "from ksym_plugin.perf import data;"
        "print(data.read('-').host, len(open(0, 'rb', buffering=0).read()))"
    )
    with path.open("rb") as stdin:
        done = subprocess.run(
            [sys.executable, "-c", script],
            cwd=Path(data.__file__).parents[2],
            stdin=stdin,
            capture_output=True,
            check=True,
            timeout=20,
        )
    assert done.stdout.decode().split() == ["pod-7", str(path.stat().st_size)]


@pytest.mark.parametrize("magic", [b"PERFFILE", b"2ELIFREP", b"\0" * 8, b"\x7fELF\0\0\0\0"])
def test_another_format_tells_nothing(tmp_path: Path, magic: bytes) -> None:
    assert told(read(tmp_path, file_of(RECORDS, FEATURES, magic))) == NOTHING


def test_every_truncation(tmp_path: Path) -> None:
    whole = told(read(tmp_path, WHOLE))
    for length in range(0, len(WHOLE), 7):
        found = told(read(tmp_path, WHOLE[:length]))
        # Nothing is made up, but for strings that are cut.
        arch, build_id, first, host, last, release, text_start, width = found
        assert (first, last) in ((None, None), (5, 9))
        assert build_id in (None, whole[1])
        for string, full in ((arch, whole[0]), (host, whole[3]), (release, whole[5])):
            assert str(full).startswith(string or "")
        assert text_start in (None, whole[6])
        assert width <= whole[7]


@settings(max_examples=300)
@given(
    st.lists(
        st.tuples(
            st.integers(0, len(WHOLE) - 8),
            st.sampled_from([0, 1, 7, 0xFFFF, 1 << 31, 1 << 40, 1 << 62, (1 << 63) - 1, 2**64 - 1])
            | st.integers(0, 2**64 - 1),
            st.sampled_from(["=B", "=H", "=I", "=Q"]),
        ),
        max_size=4,
    ),
    st.integers(0, len(WHOLE)),
)
def test_no_header_raises(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[int, int, str]], cut: int
) -> None:
    content = bytearray(WHOLE)
    for at, value, form in changes:
        struct.pack_into(form, content, at, value % (1 << 8 * struct.calcsize(form)))
    found = read(tmp_path_factory.getbasetemp(), bytes(content[: cut or None]))
    assert isinstance(found.width, int)
    assert found.text_start is None or 0 <= found.text_start < 1 << 64
    assert found.build_id is None or len(found.build_id) <= 40


_IN_LITTLE_MEMORY = """
import resource, sys
from ksym_plugin.perf import data
resource.setrlimit(resource.RLIMIT_AS, (256 << 20, 256 << 20))
found = data.read(sys.argv[1])
print(found.host, found.release, found.build_id)
"""


@pytest.mark.parametrize("what", ["data", "feature", "records", "names"])
def test_huge_sizes_are_not_read(tmp_path: Path, what: str) -> None:
    """With four gigabytes of file behind them, so that the sizes are not even wrong."""
    content = bytearray(WHOLE)
    if what == "data":
        struct.pack_into("=Q", content, 48, (4 << 30) - 200)
    elif what == "feature":
        for at in range(1, 4):
            struct.pack_into("=Q", content, 104 + len(RECORDS) + 16 * at + 8, 4 << 30)
    elif what == "records":
        struct.pack_into("=I", content, WHOLE.index(b"example") - 4, 1 << 31)
    else:
        struct.pack_into("=I", content, WHOLE.index(b"\1" * 136) - 8, (1 << 32) - 1)
    path = tmp_path / "perf.data"
    path.write_bytes(content)
    os.truncate(path, 5 << 30)
    done = subprocess.run(
        [sys.executable, "-c", _IN_LITTLE_MEMORY, str(path)],
        cwd=Path(data.__file__).parents[2],
        capture_output=True,
        timeout=20,
        check=False,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    if what in ("records", "names"):
        assert done.stdout.split()[1:] == ["6.1.0-demo", BUILD_ID.hex()]


# Which file the perf this runs inside of reads


@pytest.fixture
def no_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "is_piped", lambda: False)


def path_for(monkeypatch: pytest.MonkeyPatch, *words: str) -> str | None:
    line = "".join(f"{word}\0" for word in words)
    with monkeypatch.context() as patch:
        patch.setattr("builtins.open", lambda *_: __import__("io").BytesIO(line.encode()))
        return data.path_of_running_perf()


@pytest.mark.usefixtures("no_pipe")
@pytest.mark.parametrize(
    "words, path",
    [
        ("perf script", "perf.data"),
        ("perf script -i x/y.data -s h.py", "x/y.data"),
        ("perf script -ix/y.data -s h.py", "x/y.data"),
        ("perf script --input x -s h.py", "x"),
        ("perf script --input=x -s h.py", "x"),
        ("perf script -s h.py -i x -- -H y", "x"),
        ("perf script -s h.py -- -i x", "perf.data"),
        ("perf script -i - -s h.py", "-"),
        ("perf script --inline -s h.py", "perf.data"),
    ],
)
def test_path_of_running_perf(monkeypatch: pytest.MonkeyPatch, words: str, path: str) -> None:
    assert path_for(monkeypatch, *words.split()) == path


def test_perf_reads_a_pipe_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    saved = os.dup(0)
    try:
        os.dup2(reading, 0)
        assert path_for(monkeypatch, "perf", "script") == "-"
        assert path_for(monkeypatch, "perf", "script", "-i", "x") == "x"
    finally:
        os.dup2(saved, 0)
        for fd in (reading, writing, saved):
            os.close(fd)
