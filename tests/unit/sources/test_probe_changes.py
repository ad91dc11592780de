"""From the bytes of the probe's records to changes."""

from __future__ import annotations

import mmap
import os
import re
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ksym_plugin.sources.probe_records import ADD, DEL, Changes, Record
from ksym_plugin.timeline.symbols import BPF_PROG, BPF_TRAMPOLINE, UNNAMED_BPF, Load, Unload

REPO = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
S = 0xFFFFFFFFC0001000
TAG = "00112233445566aa"
PROG, SUB = f"bpf_prog_{TAG}_main", f"bpf_prog_{TAG}_sub"


def record(
    stamp, kind, start=S, length=60, name=PROG, prog_id=0, tid=7, comm=b"loader", cpu=0, seq=1
):
    """As the C structure lays it out, written down here once more."""
    ints = struct.pack("<QQIIIII", stamp, start, length, seq, prog_id, 5, tid)
    rest = struct.pack("<HBB16s", cpu, kind, int(name.startswith("bpf_prog_")), comm)
    return Record.parse(ints + rest + name.encode() + b"\0")


def test_the_layout_is_that_of_the_c_source():
    with open(os.path.join(REPO, "bpf", "ksym_events.c"), encoding="utf-8") as file:
        body = re.search(r"struct record \{(.*?)\n\};", file.read(), re.S).group(1)
    fields = re.findall(r"^\t(\w+) (\w+)(\[16\])?;", body, re.M)
    assert [(kind, name) for kind, name, _ in fields] == [
        ("u64", "stamp"),
        ("u64", "start"),
        ("u32", "length"),
        ("u32", "seq"),
        ("u32", "id"),
        ("u32", "pid"),
        ("u32", "tid"),
        ("u16", "cpu"),
        ("u8", "kind"),
        ("u8", "is_prog"),
        ("char", "comm"),
    ]
    assert body.rstrip().endswith("char name[KSYM_NAME_SIZE];")


def test_a_load_has_all_that_the_record_tells():
    (load,) = Changes(True).of([record(100, ADD, prog_id=9)])
    assert (load.symbol.start, load.symbol.end, load.symbol.name) == (S, S + 60, PROG)
    assert (load.symbol.kind, load.earliest, load.latest) == (BPF_PROG, 100, 100)
    assert (load.prog_id, load.pid, load.comm, load.open_ended) == (9, 5, "loader", False)


def test_an_unload_names_what_ends():
    (unload,) = Changes(True).of([record(100, DEL)])
    assert (unload.start, unload.earliest, unload.latest) == (S, 100, 100)
    assert (unload.name, unload.prog_id) == (PROG, None)


def test_changes_come_by_time_and_a_place_is_left_before_it_is_taken():
    records = [record(30, ADD, prog_id=2), record(20, DEL), record(30, DEL), record(10, ADD)]
    changes = Changes(True).of(records)
    assert [(change.latest, type(change)) for change in changes] == [
        (10, Load),
        (20, Unload),
        (30, Unload),
        (30, Load),
    ]


def test_a_subprogram_gets_its_program_s_id():
    records = [
        record(10, ADD, S + 64, name=SUB, tid=7),
        record(11, ADD, S + 512, name=SUB, tid=8),
        record(12, ADD, prog_id=3, tid=7),
    ]
    changes = Changes(True).of(records)
    assert [(change.symbol.start, change.prog_id) for change in changes] == [
        (S + 64, 3),
        (S + 512, None),
        (S, 3),
    ]


def test_one_reported_before_comes_again_with_the_id():
    changes = Changes(True)
    (early,) = changes.of([record(10, ADD, S + 64, name=SUB)])
    assert early.prog_id is None
    again, main = changes.of([record(12, ADD, prog_id=3)])
    assert (again.symbol, again.latest, again.prog_id) == (early.symbol, 10, 3)
    assert main.prog_id == 3
    # Once.
    assert len(changes.of([record(13, ADD, S + 600, prog_id=4)])) == 1


@pytest.mark.parametrize("how", ["unloaded", "lost"])
def test_a_subprogram_whose_program_never_came_is_nobody_s(how):
    changes = Changes(True)
    changes.of([record(10, ADD, S + 64, name=SUB)])
    if how == "unloaded":
        changes.of([record(11, DEL, S + 64, name=SUB)])
    else:
        changes.forget()
    (main,) = changes.of([record(12, ADD, prog_id=3)])
    assert main.prog_id == 3


def test_ends_that_are_rounded_are_upper_bounds():
    page = mmap.PAGESIZE
    image = {"name": "bpf_trampoline_64", "start": S}
    exact, rounded = (
        Changes(True).of([record(1, ADD, length=length, **image)])[0] for length in (164, page)
    )
    assert (exact.symbol.kind, exact.open_ended) == (BPF_TRAMPOLINE, False)
    assert rounded.open_ended
    # A kernel in which programs end with their pages.
    assert Changes(False).of([record(1, ADD)])[0].open_ended
    assert not Changes(True).of([record(1, ADD, length=3 * page)])[0].open_ended


def test_a_name_that_is_missing_or_odd_is_one_all_the_same():
    (load,) = Changes(True).of([record(1, ADD, name="")])
    assert load.symbol.name == UNNAMED_BPF
    data = struct.pack("<QQIIIIIHBB16s", 1, S, 8, 1, 0, 5, 7, 0, ADD, 1, b"\xff") + b"a\xffb\0junk"
    odd = Record.parse(data)
    assert (odd.name, odd.comm) == ("a\\xffb", "\\xff")


@given(st.binary(max_size=80))
def test_any_bytes_are_a_record_or_an_error(data):
    try:
        assert Record.parse(data).start >= 0
    except struct.error:
        assert len(data) < 56
