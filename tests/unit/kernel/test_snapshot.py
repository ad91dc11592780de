"""Snapshots and polls, from lists of programs and kallsyms text written down by hand."""

from __future__ import annotations

import struct
import time

import pytest

from ksym_plugin.kernel import btf, snapshot
from ksym_plugin.kernel.bpf_prog import ProgramInfo
from ksym_plugin.kernel.kallsyms import read_tail
from ksym_plugin.kernel.snapshot import Taker
from ksym_plugin.sources import polling
from ksym_plugin.sources.polling import PollingSource
from ksym_plugin.timeline.errors import SourceError
from ksym_plugin.timeline.symbols import (
    BPF_MODULE,
    BPF_TRAMPOLINE,
    OOL,
    UNNAMED_BPF,
    Load,
    Loss,
    Unload,
)

TAG, SUBTAG = "00112233445566aa", "ffeeddccbbaa9988"
S = 0xFFFFFFFFC0001000

KALLSYMS = f"""\
ffffffff81000000 T _text
ffffffffc0201000 t nf_hook\t[nf_tables]
ffffffffc0300000 t ftrace_trampoline\t[__builtin__ftrace]
{S + 0x400:x} t bpf_trampoline_6442\t[bpf]
{S:x} t bpf_prog_{TAG}_a_rather_long_function\t[bpf]
{S + 0x100:x} t bpf_prog_{SUBTAG}_sub\t[bpf]
ffffffffc0400000 t kprobe_insn_page\t[__builtin__kprobes]
""".encode()


def made(prog_id, name, functions, tags, hidden=False):
    program = ProgramInfo(prog_id, 1, tags[0], name, 500, 0, hidden)
    program.functions, program.tags = functions, tags
    return program


class Kernel:
    """A list of programs, and a kallsyms, in place of the kernel's."""

    def __init__(self, folder):
        self.programs = {}
        self.opened = []
        self.refuses = self.is_hidden = False
        self.path = folder / "kallsyms"
        self.list()

    def list(self, text=b""):
        """What kallsyms has."""
        self.path.write_bytes(text)

    def load(self, prog_id, start):
        self.programs[prog_id] = made(prog_id, f"p{prog_id}", [(start, 64)], [TAG])

    def taker(self, **options):
        return Taker(reader=self, kallsyms=str(self.path), **options)

    def taken(self, *programs):
        """The loads of a snapshot."""
        self.programs = {program.id: program for program in programs}
        return self.taker().take().loads

    def polled(self):
        return PollingSource(reader=self, kallsyms=str(self.path))

    def ids(self, after=0):
        if self.refuses:
            raise SourceError("refused", "be root")
        return iter(sorted(key for key in self.programs if key > after))

    def newer_than(self, after):
        return self.by_id(self.ids(after))

    def by_id(self, ids):
        ids = list(ids)
        self.opened += ids
        return iter([self.programs[key] for key in ids if key in self.programs])

    def function_names(self, prog_id):
        return []


@pytest.fixture
def kernel(tmp_path):
    return Kernel(tmp_path)


@pytest.fixture
def often(monkeypatch):
    """Polls look at everything each time."""
    monkeypatch.setattr(polling, "_SECOND", 0)
    monkeypatch.setattr(polling, "_REST", 0)


def test_lines_are_found_in_the_tail_and_sorted(kernel):
    kernel.list(KALLSYMS)
    tail = read_tail(str(kernel.path))
    assert tail.bpf == [
        (S, f"bpf_prog_{TAG}_a_rather_long_function"),
        (S + 0x100, f"bpf_prog_{SUBTAG}_sub"),
        (S + 0x400, "bpf_trampoline_6442"),
    ]
    assert tail.ool == [
        (0xFFFFFFFFC0300000, "ftrace_trampoline", "__builtin__ftrace"),
        (0xFFFFFFFFC0400000, "kprobe_insn_page", "__builtin__kprobes"),
    ]


def test_a_tail_in_any_block_is_found(kernel):
    """The text is read in blocks of 128 KiB, and what is looked for may be cut by one."""
    line = b"ffffffff81000010 t a_function_of_the_image\n"
    for more in range(0, len(KALLSYMS), 7):
        filler = line * ((1 << 17) // len(line)) + b"ffffffff81000010 t " + b"x" * more + b"\n"
        kernel.list(filler + KALLSYMS)
        tail = read_tail(str(kernel.path))
        assert (len(tail.bpf), len(tail.ool)) == (3, 2)


@pytest.mark.parametrize(
    "text",
    [b"", b"0000000000000000 t bpf_prog_x\t[bpf]\n", b"zz t a\t[bpf]\n", b"\t[bpf]\n", b"[bpf]"],
)
def test_hidden_or_broken_lines_are_none(kernel, text):
    kernel.list(text)
    tail = read_tail(str(kernel.path))
    assert (tail.bpf, tail.ool) == ([], [])
    kernel.path.unlink()
    assert read_tail(str(kernel.path)).bpf == []


def test_names_come_from_kallsyms_and_lengths_from_bpf(kernel):
    kernel.list(KALLSYMS)
    before = time.monotonic_ns()
    loads = kernel.taken(made(7, "a_rather_long_f", [(S, 60), (S + 0x100, 40)], [TAG, SUBTAG]))
    assert [
        (load.symbol.start, load.symbol.end, load.symbol.name, load.prog_id, load.open_ended)
        for load in loads
        if load.symbol.kind != OOL
    ] == [
        (S, S + 60, f"bpf_prog_{TAG}_a_rather_long_function", 7, False),
        (S + 0x100, S + 0x100 + 40, f"bpf_prog_{SUBTAG}_sub", 7, False),
        (S + 0x400, S + 0x1400, "bpf_trampoline_6442", None, True),
    ]
    programs = [load for load in loads if load.prog_id]
    assert [load.earliest for load in programs] == [500] * 2
    assert all(before <= load.latest <= time.monotonic_ns() for load in programs)
    assert next(load for load in loads if load.symbol.kind == BPF_TRAMPOLINE).earliest == 0


def test_a_line_about_what_was_there_before_names_nothing(kernel):
    kernel.list(KALLSYMS)
    loads = kernel.taken(made(8, "other", [(S, 60)], [SUBTAG]))
    assert next(load for load in loads if load.prog_id).symbol.name == f"bpf_prog_{SUBTAG}_other"


def test_two_programs_at_one_start_leave_the_younger(kernel):
    kernel.list(KALLSYMS)
    old = made(7, "a_rather_long_f", [(S, 60)], [TAG])
    new = made(8, "a_rather_long_f", [(S, 90)], [TAG])
    (load,) = [one for one in kernel.taken(new, old) if one.prog_id]
    assert (load.prog_id, load.symbol.end) == (8, S + 90)


def test_a_subprogram_nobody_can_name_says_so(kernel):
    loads = kernel.taken(made(7, "main", [(S, 60), (S + 64, 40)], [TAG, SUBTAG]))
    assert [load.symbol.name for load in loads] == [f"bpf_prog_{TAG}_main", UNNAMED_BPF]


def test_without_bpf_each_symbol_reaches_to_the_next_or_a_page(kernel):
    kernel.refuses = True
    kernel.list(KALLSYMS)
    snap = kernel.taker().take()
    ends = {load.symbol.start: load.symbol.end for load in snap.loads}
    assert ends[S] == S + 0x100
    assert ends[S + 0x400] == S + 0x1400
    assert all(load.open_ended for load in snap.loads)
    assert "refused" in snap.limit and "lengths" in snap.limit
    kernel.list()
    with pytest.raises(SourceError, match="be root"):
        kernel.taker().take()


def test_hidden_addresses_have_a_sentence_of_their_own(kernel):
    with pytest.raises(SourceError) as caught:
        kernel.taken(made(7, "x", [], [TAG], True))
    assert "kptr_restrict" in caught.value.remedy and "CAP_SYSLOG" in caught.value.remedy


def _btf(*functions):
    strings, types = b"\0int\0", struct.pack("<IIII", 1, 1 << 24, 4, 32)
    types += struct.pack("<III", 0, 13 << 24, 1)
    for function in functions:
        types += struct.pack("<III", len(strings), 12 << 24, 2)
        strings += function.encode() + b"\0"
    header = struct.pack("<HBBIIIII", 0xEB9F, 1, 0, 24, 0, len(types), len(types), len(strings))
    return header + types + strings


def test_function_names_are_read_from_btf():
    blob = _btf("main_function_with_a_long_name", "sub")
    assert btf.function_names(blob, [3, 4]) == {3: "main_function_with_a_long_name", 4: "sub"}
    assert btf.function_names(blob, [1, 4, 9]) == {4: "sub"}


def test_broken_btf_has_no_names_and_never_raises():
    blob = _btf("a", "b")
    for end in range(len(blob)):
        btf.function_names(blob[:end], [3, 4])
    for at in range(len(blob)):
        btf.function_names(blob[:at] + b"\xff" + blob[at + 1 :], [3, 4])
    assert btf.function_names(b"\0" * 40, [1]) == {}


def test_without_btf_the_names_are_known_without_asking(kernel):
    def never(prog_id):
        raise AssertionError("opened once more")

    kernel.function_names = never
    program = made(7, "main", [(S, 60), (S + 64, 40)], [TAG, SUBTAG])
    program.has_btf = False
    names = [load.symbol.name for load in kernel.taken(program)]
    assert names == [f"bpf_prog_{TAG}_main", f"bpf_prog_{SUBTAG}_F"]


def test_names_of_many_are_read_from_kallsyms_even_without_images(kernel):
    text = ""
    for index in range(snapshot._FEW + 1):
        kernel.load(5 + index, S + 64 * index)
        text += f"{S + 64 * index:x} t bpf_prog_{TAG}_p{5 + index}_and_more\t[bpf]\n"
    kernel.list(text.encode())
    names = [load.symbol.name for load in kernel.taker().take(images=False).loads]
    assert names == [f"bpf_prog_{TAG}_p{5 + index}_and_more" for index in range(len(names))]
    assert len(names) == snapshot._FEW + 1


def test_a_second_snapshot_opens_only_what_is_new(kernel):
    taker = kernel.taker()
    kernel.load(5, S)
    kernel.load(6, S + 64)
    first = taker.take().loads
    assert kernel.opened == [5, 6]
    del kernel.programs[5]
    kernel.load(9, S + 128)
    second = taker.take().loads
    assert kernel.opened == [5, 6, 9]
    assert [(load.prog_id, load.symbol.start) for load in second] == [(6, S + 64), (9, S + 128)]
    # It was there when it was opened, and that is the better time.
    assert [load.latest for load in second if load.prog_id == 6] == [first[1].latest]


def test_what_is_done_to_a_snapshot_does_not_reach_the_next(kernel):
    taker = kernel.taker()
    kernel.load(5, S)
    (load,) = taker.take().loads
    load.earliest, load.prog_id = 600, None
    (again,) = taker.take().loads
    assert (again.earliest, again.prog_id) == (500, 5)


@pytest.mark.parametrize(
    ("text", "listed"), [(f"{S:x} t bpf_prog_{TAG}_p5\t[bpf]\n", True), ("", False)]
)
def test_no_image_is_there_where_kallsyms_shows_programs_alone(kernel, text, listed):
    """As against one that shows no BPF at all (net.core.bpf_jit_kallsyms = 0)."""
    kernel.load(5, S)
    kernel.list(text.encode())
    taken = kernel.taker().take()
    assert [load.prog_id for load in taken.loads] == [5]
    assert taken.lists_images is listed


def test_without_images_kallsyms_is_not_read(kernel):
    kernel.load(5, S)
    kernel.list(KALLSYMS)
    taken = kernel.taker().take(images=False)
    (load,) = taken.loads
    assert not taken.lists_images
    # As far as bpf(2) has it: the long name is in the program's BTF, if it has one.
    assert load.symbol.name == f"bpf_prog_{TAG}_p5"
    assert load.symbol.end == S + 64


def brief(changes):
    return [
        ("load", change.prog_id, change.symbol.start)
        if isinstance(change, Load)
        else ("unload", change.prog_id, change.start)
        if isinstance(change, Unload)
        else ("loss", change.count, change.cause)
        for change in changes
    ]


def test_polls_see_what_came_and_went(kernel, often):
    kernel.load(5, S)
    source = kernel.polled()
    assert brief(source.snapshot()) == [("load", 5, S)]
    kernel.load(6, S + 64)
    (load,) = source.read()
    assert brief([load]) == [("load", 6, S + 64)]
    assert load.earliest < load.latest
    del kernel.programs[5]
    (unload,) = source.read()
    assert brief([unload]) == [("unload", 5, S)]
    assert unload.name == f"bpf_prog_{TAG}_p5"
    assert source.read() == []


def test_a_place_taken_over_between_polls_is_freed_first(kernel, often):
    kernel.load(5, S)
    source = kernel.polled()
    source._list_due = 1 << 63
    del kernel.programs[5]
    kernel.load(6, S)
    unload, load = source.read()
    assert brief([unload, load]) == [("unload", 5, S), ("load", 6, S)]
    assert unload.latest < load.latest


def test_ids_used_up_between_polls_are_a_loss(kernel, often):
    kernel.load(5, S)
    source = kernel.polled()
    began = source._read_at
    kernel.load(7, S + 64)
    loss, _ = source.read()
    # Ids up to 6 may have been used up long before the start: the number is not known.
    assert isinstance(loss, Loss) and (loss.count, loss.since) == (None, began)
    kernel.load(10, S + 128)
    loss, _ = source.read()
    assert isinstance(loss, Loss) and loss.count == 2


def test_images_are_found_by_their_lines(kernel, often):
    source = kernel.polled()
    kernel.list(f"{S:x} t bpf_trampoline_1\t[bpf]\n".encode())
    (load,) = source.read()
    assert load.open_ended and load.symbol.module == BPF_MODULE
    kernel.list()
    (unload,) = source.read()
    assert (unload.start, unload.name) == (S, "bpf_trampoline_1")


def test_the_last_id_going_away_is_no_loss(kernel, often):
    source = kernel.polled()
    for prog_id in (1, 2, 3):
        kernel.load(prog_id, S + 64 * prog_id)
        source.read()
    del kernel.programs[3]
    assert brief(source.read()) == [("unload", 3, S + 64 * 3)]
    kernel.load(4, S)
    assert brief(source.read()) == [("load", 4, S)]


def test_ids_that_start_again_from_below_are_found(kernel, often):
    kernel.load(2**31 - 2, S)
    source = kernel.polled()
    kernel.load(1, S + 64)
    seen = brief(source.read()) + brief(source.read())
    assert ("load", 1, S + 64) in seen
    assert not any(kind == "load" and prog_id != 1 for kind, prog_id, _ in seen)


def test_programs_without_symbols_are_left_out_for_who_would_not_hear_of_their_end(kernel):
    """Sockets' filters of users: one without privileges, which kallsyms lacks, and one with."""
    for prog_id, start in ((5, S), (6, S + 0x100), (7, S + 0x200)):
        kernel.load(prog_id, start)
    for prog_id in (6, 7):
        kernel.programs[prog_id].uid = 1000
    kernel.list(
        f"{S:x} t bpf_prog_{TAG}_p5\t[bpf]\n{S + 0x200:x} t bpf_prog_{TAG}_p7\t[bpf]\n".encode()
    )
    for images in (True, False):
        taker = kernel.taker(symbols_only=True)
        assert [load.prog_id for load in taker.take(images).loads] == [5, 7]
        assert [load.prog_id for load in taker.take(images).loads] == [5, 7]
        assert [load.prog_id for load in kernel.taker().take(images).loads] == [5, 6, 7]
    assert kernel.opened == [5, 6, 7] * 4
