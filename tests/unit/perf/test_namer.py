"""Which name holds, perf's or the history's, and how that is counted."""

from __future__ import annotations

import os
import re
import tempfile
from operator import itemgetter
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ksym_plugin.history.reader import History
from ksym_plugin.perf.namer import Namer, Tally, format_name, is_bpf_name, unnamed_dso, weigh
from ksym_plugin.stacks.names import strip_nul
from ksym_plugin.timeline.packed import PackedFunctions, pack_functions
from ksym_plugin.timeline.symbols import (
    AMBIGUOUS,
    AMONG_BPF,
    BPF_MODULE,
    BPF_PROG,
    EXACT,
    GAP,
    GRACE,
    HIDDEN,
    IN_MODULE,
    KERNEL,
    LOST,
    MODULE,
    NOT_LOADED,
    OUTSIDE_HISTORY,
    UNKNOWN_ADDRESS,
    Frame,
    Lifetime,
    Load,
    Loss,
    Reason,
    Symbol,
)
from tests.unit.helpers import Held, changes_of, histories, load, questions
from tests.unit.history.test_history import only_past, record

A, B = "bpf_prog_00000000000000aa_a", "bpf_prog_00000000000000bb"
START = 0xFFFF_FFFF_C000_0000
COUNTS = ("confirmed", "renamed", "added", "withdrawn", "unverified")


def bpf(name: str, certainty: str = EXACT) -> Frame:
    return Frame(START + 4, name, 4, BPF_MODULE, BPF_PROG, certainty)


def kernel(name: str) -> Frame:
    return Frame(START + 4, name, 4, None, KERNEL, EXACT)


def counted(answer: Frame | Reason, name: str, dso: str) -> tuple[object, str]:
    """What holds, and the one count that it is."""
    tally = Tally()
    held = weigh(answer, name, dso, tally)
    counts = [count for count in COUNTS if getattr(tally, count)]
    if tally.unknown and not tally.withdrawn:
        counts.append("unknown")
    (count,) = counts
    assert tally.frames == 1
    return held, count


@pytest.mark.parametrize("reason", [NOT_LOADED, AMBIGUOUS])
@pytest.mark.parametrize("name", ["ksys_read", "bpf_prog_run", "bpf_prog_00", "bpf_test_run"])
def test_a_kernel_function_keeps_its_name(reason: Reason, name: str) -> None:
    assert counted(reason, name, "[kernel.kallsyms]") == (name, "confirmed")


@pytest.mark.parametrize("reason", [OUTSIDE_HISTORY, UNKNOWN_ADDRESS, LOST, HIDDEN])
def test_where_the_history_knows_nothing_perf_s_name_stands(reason: Reason) -> None:
    assert counted(reason, "ksys_read", "[kernel.kallsyms]") == ("ksys_read", "confirmed")
    assert counted(reason, "", "[kernel.kallsyms]") == (None, "unknown")


@pytest.mark.parametrize(
    "name, dso",
    [
        (A, "[kernel.kallsyms]"),
        (A, "[bpf]"),
        ("bpf_dispatcher_xdp", "[kernel.kallsyms]"),
        ("bpf_trampoline_6442467359", "bpf_trampoline_6442467359"),
    ],
)
@pytest.mark.parametrize("reason", [AMONG_BPF, NOT_LOADED])
def test_classic_bpf_is_not_given_its_neighbour_s_name(reason: Reason, name: str, dso: str) -> None:
    """perf does that with images, which it takes for a page, and with what has no end."""
    assert counted(reason, name, dso) == (None, "withdrawn")
    assert unnamed_dso(reason, name, dso) == "[bpf]"


@pytest.mark.parametrize(
    "name, dso, count", [(A, A, "unverified"), ("nf_hook", "[nf_tables]", "confirmed")]
)
def test_what_only_perf_was_told_of_keeps_its_name(name: str, dso: str, count: str) -> None:
    assert counted(AMONG_BPF, name, dso) == (name, count)


@pytest.mark.parametrize("reason", [AMONG_BPF, NOT_LOADED])
@pytest.mark.parametrize(
    "dso, shown",
    [
        ("", "[bpf]"),
        ("[kernel.kallsyms]", "[bpf]"),
        ("/lib/modules/6.12/build/vmlinux", "[bpf]"),
        ("[bpf]", "[bpf]"),
        ("[nf_tables]", "[nf_tables]"),
        ("/lib/modules/6.12/kernel/nf_tables.ko", "/lib/modules/6.12/kernel/nf_tables.ko"),
    ],
)
def test_code_among_bpf_is_bpf_s_unless_perf_has_a_module_there(
    reason: Reason, dso: str, shown: str
) -> None:
    assert unnamed_dso(reason, "", dso) == shown
    tally = Tally()
    assert weigh(reason, "", dso, tally) is None
    why = reason if shown == "[bpf]" else UNKNOWN_ADDRESS
    assert tally.unknown == {why.text: 1}


@pytest.mark.parametrize("reason", [UNKNOWN_ADDRESS, OUTSIDE_HISTORY, LOST, HIDDEN, IN_MODULE])
def test_other_reasons_leave_the_dso(reason: Reason) -> None:
    assert unnamed_dso(reason, "", "[kernel.kallsyms]") == "[kernel.kallsyms]"


@pytest.mark.parametrize("certainty", [GRACE, GAP])
def test_what_took_the_place_of_a_program_that_may_be_gone(certainty: str) -> None:
    # A module, say, which perf knows and the history does not.
    assert counted(bpf(A, certainty), "nf_hook", "[nf_tables]") == ("nf_hook", "confirmed")
    frame = bpf(A, certainty)
    assert counted(frame, B, B) == (frame, "renamed")


def test_the_static_tables_fill_in_and_never_rename_the_kernel() -> None:
    frame = kernel("ksys_read")
    assert counted(frame, "", "[kernel.kallsyms]") == (frame, "added")
    assert counted(frame, "ksys_read", "[kernel.kallsyms]") == ("ksys_read", "confirmed")
    assert counted(frame, "__alias", "[kernel.kallsyms]") == ("__alias", "confirmed")
    # But perf took kernel text for a program.
    assert counted(frame, A, A) == (frame, "renamed")


@pytest.mark.parametrize(
    "certainty, text", [(EXACT, A), (GRACE, A), (GAP, A + "?"), ("what comes later", A + "?")]
)
def test_what_is_not_certain_is_marked(certainty: str, text: str) -> None:
    assert format_name(bpf(A, certainty)) == text


@pytest.mark.parametrize(
    "name, cleaned",
    [("f", "f"), ("", ""), ("f\0[bpf]", "f"), ("\0", ""), ("f\0", "f"), ("f[bpf]", "f[bpf]")],
)
def test_a_name_ends_at_its_nul(name: str, cleaned: str) -> None:
    assert strip_nul(name) == cleaned


@pytest.mark.parametrize(
    "name, dso, is_one",
    [
        (A, "", True),
        ("x", "[bpf]", True),
        ("bpf_trampoline_7", "bpf_trampoline_7", True),
        ("bpf_trampoline_7", "[kernel.kallsyms]", False),
        ("bpf_prog_run", "[kernel.kallsyms]", False),
        ("bpf_prog_00000000000000AA", "[x]", False),
    ],
)
def test_what_claims_to_be_bpf(name: str, dso: str, is_one: bool) -> None:
    assert is_bpf_name(name, dso) is is_one


def test_a_tally_in_words() -> None:
    tally = Tally()
    for frame, name in ((bpf(A), A), (bpf(A, GRACE), ""), (bpf(A, GAP), B), (kernel("f"), "f")):
        weigh(frame, name, "", tally)
    weigh(NOT_LOADED, A, A, tally)
    weigh(OUTSIDE_HISTORY, "", "", tally)
    weigh(OUTSIDE_HISTORY, "", "", tally)
    tally.failed("left out", ValueError("why"))
    tally.failed("left out", ValueError("why"))
    lines = [line for line in tally.lines() if " had a name from perf " not in line]
    assert len(lines) == len(tally.lines()) - 1
    assert lines == [
        (
            "7 kernel frames: 2 confirmed, 1 renamed (perf had them wrong),"
            " 1 newly named (perf had missed them), 3 still unknown"
        ),
        "3 of them are BPF: 1 ran after their unload (grace), 1 uncertain (marked ?)",
        "2 unknown: the history does not cover that time",
        f"1 unknown: {NOT_LOADED.text}",
        "2 samples left out: ValueError: why",
    ]


def test_an_empty_tally_is_one_line() -> None:
    (line,) = Tally().lines()
    assert line.startswith("0 kernel frames: ")


@pytest.mark.parametrize("name", ["kprobe_insn_page", "kprobe_optinsn_page", "ftrace_trampoline"])
def test_out_of_line_code_that_perf_was_told_of_stands_where_bpf_had_been(name: str) -> None:
    tally = Tally()
    assert weigh(NOT_LOADED, name, name, tally, True) == name
    assert (tally.confirmed, tally.withdrawn) == (1, 0)


def test_a_module_s_name_that_does_not_hold_is_not_called_bpf() -> None:
    tally = Tally()
    assert weigh(NOT_LOADED, "nft_do_chain", "[nf_tables]", tally, True) is None
    assert unnamed_dso(NOT_LOADED, "nft_do_chain", "[nf_tables]") == ""
    assert tally.unknown == {UNKNOWN_ADDRESS.text: 1}


# The table of docs/how-it-works.md

VMLINUX, NFT = "[kernel.kallsyms]", "[nf_tables]"
THEN = 5_000_000_000


class Said:
    """A lookup that has one answer for the beginning of time and one for what follows."""

    extent = 0

    def __init__(self, *answers: object, has_modules: bool = False) -> None:
        self._answers = answers
        self.has_modules = has_modules

    def at(self, _address: int, time_ns: int) -> object:
        return self._answers[0 if time_ns <= THEN else -1]


def program(name: str, certainty: str = EXACT) -> tuple[Lifetime, str]:
    return Lifetime(load(START, 64, name, 0)), certainty


def module(*names: str) -> tuple[Lifetime, str]:
    """A module whose function at START has all of these names."""
    symbol = Symbol(START, START + 0x1000, "[nf_tables]", MODULE, "nf_tables")
    functions = PackedFunctions(pack_functions([(0, 64, name) for name in names]))
    return Lifetime(Load(symbol, 0, 0, functions=functions)), EXACT


HELD, PERF_S, NONE = "the history's", "perf's", "`[unknown]`"
#: perf's name and dso, what the lookup answers, the name and dso that are printed.
ROWS = {
    ("a name", "the same"): [(A, A, Said(program(A)), A, "[bpf]")],
    ("a name", "another BPF symbol"): [
        (B, B, Said(program(A)), A, "[bpf]"),
        ("_einittext", VMLINUX, Said(program(A)), A, "[bpf]"),
    ],
    ("nothing", "a symbol"): [
        ("", VMLINUX, Said(program(A)), A, "[bpf]"),
        ("", "", Said(module("nft_do")), "nft_do", NFT),
    ],
    ("nothing, or a BPF neighbour's name", "no symbol, but BPF programs around it"): [
        ("", VMLINUX, Said((None, AMONG_BPF)), "", "[bpf]"),
        ("bpf_dispatcher_xdp", VMLINUX, Said((None, AMONG_BPF)), "", "[bpf]"),
    ],
    ("a BPF name", "nothing was there, or it cannot tell which of two"): [
        (A, A, Said((None, NOT_LOADED)), "", "[bpf]"),
        (A, A, Said((None, AMBIGUOUS)), "", ""),
    ],
    ("a BPF name", "changes were lost then"): [(A, A, Said((None, LOST)), A + "?", A)],
    ("a BPF name", "the time is not covered"): [(A, A, Said((None, OUTSIDE_HISTORY)), A, A)],
    ("a name of the kernel or a module", "nothing of BPF was there, or is no longer"): [
        ("ksys_read", VMLINUX, Said((None, UNKNOWN_ADDRESS)), "ksys_read", VMLINUX),
        ("ksys_read", VMLINUX, Said((None, NOT_LOADED)), "ksys_read", VMLINUX),
        ("nf_hook", NFT, Said(program(A, GRACE)), "nf_hook", NFT),
    ],
    ("a name of a module", "one of that function's names"): [
        ("nft_alias", NFT, Said(module("nft_do", "nft_alias"), has_modules=True), "nft_alias", NFT)
    ],
    ("a name of a module", "another function, or another module's"): [
        ("nft_other", NFT, Said(module("nft_do"), has_modules=True), "nft_do", NFT)
    ],
    ("a name of a module", "modules are kept, and none was there, or none of its functions"): [
        ("nft_do", NFT, Said((None, NOT_LOADED), has_modules=True), "", ""),
        ("nft_do", NFT, Said(module(), has_modules=True), "", ""),
    ],
    ("a name", "another symbol within what is known of the time"): [
        (A, A, Said(program(B), program(A)), A + "?", A)
    ],
}
WORDS = {
    "confirmed": "confirmed",
    "renamed": "renamed",
    "newly named": "added",
    "unverified": "unverified",
    "as perf had them": "coarse",
}


def table() -> dict[tuple[str, str], tuple[str, str]]:
    """What is printed, and how it is counted, by what perf and the history say."""
    text = (Path(__file__).parents[3] / "docs" / "how-it-works.md").read_text(encoding="utf-8")
    (lines,) = re.findall(r"\| perf says \|.*\n\|---.*\n((?:\|.*\n)+)", text)
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines.splitlines()]
    return {(one, other): (printed, counted) for one, other, printed, counted in cells}


def test_every_row_of_the_table_has_a_case() -> None:
    assert list(table()) == list(ROWS)


@pytest.mark.parametrize("row", ROWS, ids=": ".join)
def test_what_is_printed_and_how_it_is_counted(row: tuple[str, str]) -> None:
    printed, counted = table()[row]
    for name, dso, lookup, shown, shown_dso in ROWS[row]:
        namer = Namer(lookup)
        window = (THEN, THEN + ("within" in row[1]))
        decision, where = namer.decide(START + 4, window, name, dso, 4)
        text = format_name(decision) if isinstance(decision, Frame) else decision or ""
        assert (text, where) == (shown, shown_dso)
        assert printed.startswith("`[unknown]") == (not text)
        assert ("`?`" in printed) == text.endswith("?")
        if printed in (HELD, PERF_S):
            assert (text == name) == (printed == PERF_S)
        counts = {count: number for count, number in vars(namer.tally).items() if number}
        counts.pop("bpf", None), counts.pop("withdrawn", None)
        assert list(counts) == [WORDS.get(counted, "unknown")]


def told(namer: Namer, address: int, time: int, name: str) -> object:
    decision, dso = namer.decide(address, (time, time), name, name or VMLINUX, 0)
    text = format_name(decision) if isinstance(decision, Frame) else decision
    return text, getattr(decision, "offset", None), dso


@given(histories(images=True), st.booleans(), st.integers(0, 60), st.integers(0, 1 << 30))
@settings(max_examples=60, deadline=None)
def test_what_is_kept_of_a_frame_is_what_would_be_decided_again(
    held: list[Held], gap: bool, since: int, seed: int
) -> None:
    """In the order of time, where most is kept, and in any other."""
    changes: list = list(changes_of(held))
    if gap:
        changes.append(Loss(100 + since, 110 + since, "test"))
    names = ["", *sorted({one.name for one in held})[:2]]
    asked = [(*question, name) for question in questions(held) for name in names]
    asked = Random(seed).sample(asked, min(len(asked), 1_000))
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "h.db")
        record(path, changes, started=-10)
        with History(path) as history:
            for order in (sorted(asked, key=itemgetter(1)), asked):
                namer, tally = Namer(only_past(history)), Tally()
                fresh = only_past(history)
                for question in order:
                    alone = Namer(fresh)
                    assert told(namer, *question) == told(alone, *question), question
                    tally.add(alone.tally)
                assert vars(namer.tally) == vars(tally)
