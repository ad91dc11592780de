"""The static symbols against scans written independently, and against hostile input."""

from __future__ import annotations

import os
import random
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ksym_plugin.kernel import kallsyms
from ksym_plugin.kernel.kallsyms import Kallsyms
from ksym_plugin.timeline import symbols
from ksym_plugin.timeline.errors import KallsymsError

REPO = Path(__file__).resolve().parents[3]
#: As a 32-bit ARM kernel has it: modules below the image, mapping symbols ($a, $d) inside.
ARM = REPO / "tests" / "data" / "kallsyms-arm.txt"

Row = tuple[int, str, str, str]  # address, type, name, module or ""


def rows_of(text: str) -> list[Row]:
    """A table read the plain way, mapping symbols left out."""
    rows = []
    for line in text.splitlines():
        fields = line.split()
        if re.match(r"\$[adtx](\.|$)", fields[2]):
            continue
        module = fields[3].strip("[]") if len(fields) > 3 else ""
        rows.append((int(fields[0], 16), fields[1], fields[2], module))
    return rows


def owners(rows: list[Row], address: int) -> tuple[set[str], int, int]:
    """The functions at the last address up to this one, that address, and the end."""
    start = max((row[0] for row in rows if row[0] <= address), default=0)
    here = [row for row in rows if row[0] == start]
    names = {row[2] for row in here if row[1] in "tTwW"} - {"_etext", "_einittext"}
    if names and "_etext" in {row[2] for row in here}:
        names.discard("__stop_notes")  # another border, not a function
    later = [row for row in rows if row[0] > start]
    following = min((row[0] for row in later), default=1 << 64)
    module = here[0][3] if here else ""
    unsized = module in ("bpf", "__builtin__ftrace", "__builtin__kprobes")
    near = {row[3] for row in later if row[0] == following}
    if unsized or module not in near:
        following = min(following, start + 4096)
    return names, start, following


def assert_agrees(table: Kallsyms, rows: list[Row], address: int) -> str | None:
    names, start, end = owners(rows, address)
    found = table.find(address)
    if isinstance(found, symbols.Reason):
        assert not names or not address < end, f"{address:#x} should be one of {names}"
        return None
    assert found.name in names
    assert (found.start, found.end) == (start, end)
    assert start <= address < end
    return found.name


# -- random tables ---------------------------------------------------------------------

BASE = 0xFFFFFFFF81000000
# Few distinct places, so that addresses are shared, and both near and far neighbours.
places = st.one_of(
    st.integers(0, 40).map(lambda n: BASE + n * 16),
    st.integers(0, 12).map(lambda n: BASE + 0x10000 + n * 2048),
    st.integers(0, 5).map(lambda n: BASE + 0x100000 * n),
)
core_rows = st.tuples(
    places,
    st.sampled_from("tTwWdDrRbBA"),
    st.sampled_from(["alpha", "beta", "__gamma", "delta.cold", "_etext", "$d", "$x.3", "s_next"]),
    st.just(""),
)
#: In the order in which they are listed; each is one block.
MODULES = ["nf_tables", "fuse", "bpf", "__builtin__ftrace", "__builtin__kprobes"]
module_rows = st.tuples(
    places.map(lambda at: at + 0x40000000),
    st.sampled_from("tTdrb"),
    st.sampled_from(["init_module", "exit_it", "bpf_prog_0011223344556677", "$a", "s_next"]),
    st.sampled_from(MODULES),
)


def one_module_an_address(rows: list[Row]) -> list[Row]:
    first: dict[int, str] = {}
    return [row for row in rows if first.setdefault(row[0], row[3]) == row[3]]


tables = st.tuples(st.lists(core_rows, max_size=40), st.lists(module_rows, max_size=25)).map(
    lambda both: one_module_an_address(
        both[0] + sorted(both[1], key=lambda row: MODULES.index(row[3]))
    )
)


def as_text(rows: list[Row], gap: str = "\t") -> str:
    return "".join(
        f"{at:016x} {kind} {name}" + (f"{gap}[{module}]\n" if module else "\n")
        for at, kind, name, module in rows
    )


@given(rows=tables, gap=st.sampled_from(["\t", "   "]), data=st.data())
@settings(max_examples=150)
def test_find_equals_a_linear_scan(rows: list[Row], gap: str, data: st.DataObject) -> None:
    text = as_text(rows, gap)
    table = Kallsyms.parse(text.encode())
    plain = rows_of(text)
    assert len(table) == len(plain)
    starts = [row[0] for row in plain] or [BASE]
    for _ in range(10):
        address = data.draw(st.sampled_from(starts)) + data.draw(st.integers(-1, 0x1800))
        assert_agrees(table, plain, address)


@given(rows=tables)
@settings(max_examples=60)
def test_by_name_finds_every_line_of_that_name(rows: list[Row]) -> None:
    table = Kallsyms.parse(as_text(rows).encode())
    for name in ("alpha", "s_next", "init_module", "absent"):
        expected = sorted(row[0] for row in rows if row[2] == name)
        assert [found.start for found in table.by_name(name)] == expected


@given(rows=tables, data=st.data())
@settings(max_examples=60)
def test_spelling_of_a_table_makes_no_difference(rows: list[Row], data: st.DataObject) -> None:
    text = as_text(rows)
    plain = Kallsyms.parse(text.encode())
    for odd in (
        re.sub(r"^\w+", lambda match: match[0].upper(), text, flags=re.M),
        text.replace("\n", "\r\n"),
        "\ufeff" + text,
        text.rstrip("\n"),
        text.replace("\n", "\n\n"),
    ):
        table = Kallsyms.parse(odd.encode())
        assert len(table) == len(plain)
        for row in rows:
            address = row[0] + data.draw(st.integers(0, 20))
            assert table.find(address) == plain.find(address)


# -- hostile input ---------------------------------------------------------------------

fragments = st.sampled_from(
    [
        b"ffffffff81000000 T good\n",
        b"c0100000 t narrow\n",
        b"0000000000000000 A zero\n",
        b"ffffffff81000000",
        b" T ",
        b"\t[bpf]",
        b"\t[\n",
        b"]",
        b"$a",
        b"\r\n",
        b"\n",
        b"\x00",
        b"\xff\xfe",
        b" " * 40,
        b"0" * 40,
    ]
)


@given(st.one_of(st.binary(max_size=200), st.lists(fragments, max_size=30).map(b"".join)))
@settings(max_examples=300)
def test_no_bytes_make_it_raise(data: bytes) -> None:
    table = Kallsyms.parse(data)
    for address in (0, 0xC0100004, 0xFFFFFFFF81000004, (1 << 64) - 1, 1 << 70, -5):
        found = table.find(address)
        assert isinstance(found, (symbols.Symbol, symbols.Reason))
        if isinstance(found, symbols.Symbol):
            assert found.start <= address < found.end
            found.name.encode()
    assert isinstance(table.by_name("good"), list)
    assert table.text_start is None or table.text_start > 0


def test_names_that_are_no_utf8_are_escaped() -> None:
    table = Kallsyms.parse(b"ffffffff81000000 T caf\xe9\n")
    found = table.find(0xFFFFFFFF81000000)
    assert isinstance(found, symbols.Symbol)
    assert found.name == r"caf\xe9"


def test_a_crowd_at_one_address_is_ranked_once() -> None:
    lines = [b"ffffffff81000000 t __key.%d\n" % number for number in range(50_000)]
    lines.append(b"ffffffff81000000 T the_function\nffffffff81000800 t next_one\n")
    table = Kallsyms.parse(b"".join(lines))
    first = table.find(0xFFFFFFFF81000000)
    assert isinstance(first, symbols.Symbol)
    assert first.name == "the_function"
    # The same object: 50,000 names were not weighed again.
    assert all(table.find(0xFFFFFFFF81000000 + offset) is first for offset in range(0x800))


@pytest.mark.parametrize(
    "line", [b"\t" * 50_000, b"0" * 50_000, b"ffff T" + b" " * 50_000 + b"x y"]
)
def test_a_long_line_costs_linear_time(line: bytes) -> None:
    table = Kallsyms.parse(b"ffffffff81000000 T good\n" + line + b"\n")
    assert len(table) == 1


# -- files -----------------------------------------------------------------------------


def test_an_unreadable_file_says_so_and_what_to_do(tmp_path: Path) -> None:
    missing = tmp_path / "no-kallsyms"
    with pytest.raises(KallsymsError) as caught:
        Kallsyms.load(str(missing))
    assert str(caught.value) == (
        f"{missing} cannot be read: No such file or directory; "
        "name a readable copy of /proc/kallsyms"
    )
    with pytest.raises(KallsymsError, match="Is a directory"):
        Kallsyms.load(str(tmp_path))


@pytest.mark.parametrize("content", [b"", b"\n\n", b"this is no table\n" * 3])
def test_a_file_without_symbols_is_an_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "kallsyms"
    path.write_bytes(content)
    with pytest.raises(KallsymsError, match=r"holds no symbols; .*CONFIG_KALLSYMS"):
        Kallsyms.load(str(path), listing=None)


def test_a_file_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ksym_plugin.kernel.kallsyms.MAX_BYTES", 1 << 20)
    with pytest.raises(KallsymsError, match=r"larger than .*; name a copy"):
        Kallsyms.load("/dev/zero", listing=None)


def test_hidden_addresses_load_and_say_why(tmp_path: Path) -> None:
    path = tmp_path / "kallsyms"
    path.write_bytes(b"0000000000000000 T _text\n0000000000000000 t any_fn\n")
    table = Kallsyms.load(str(path))
    assert table.hidden
    reason = table.find(0xFFFFFFFF81000000)
    assert isinstance(reason, symbols.Reason)
    assert "kptr_restrict" in reason.text


def test_a_table_larger_than_a_block_is_cut_at_lines(tmp_path: Path) -> None:
    count = 40_000
    lines = [f"{BASE + 16 * n:016x} t fn_{n}" for n in range(count)]
    lines[17_000] = lines[17_000].replace("ffff", "FFFF").replace(" t ", "   t  ")
    path = tmp_path / "kallsyms"
    path.write_text("\n".join(lines))
    table = Kallsyms.load(str(path), listing=None)
    assert len(table) == count
    for number in range(0, count, 777):
        found = table.find(BASE + 16 * number + 5)
        assert isinstance(found, symbols.Symbol)
        assert found.name == f"fn_{number}"


def test_module_sizes_come_from_proc_modules(tmp_path: Path) -> None:
    table = tmp_path / "kallsyms"
    table.write_bytes(b"ffffffffc0100000 t mod_a\t[a]\nffffffffc0180000 t mod_b\t[b]\n")
    modules = tmp_path / "modules"
    modules.write_text(
        "b 12288 0 - Live 0xffffffffc0180000 (OE)\na 16384 1 b, Live 0x0000000000000000\n"
    )
    loaded = Kallsyms.load(str(table), str(modules))
    (found,) = loaded.by_name("mod_b")
    assert found.end - found.start == 12288
    (found,) = loaded.by_name("mod_a")  # hidden: a page must do
    assert found.end - found.start == 4096


@pytest.mark.parametrize("content", ["b twelve 0 - Live 0xffffffffc0180000\n", "b\n", ""])
def test_an_odd_modules_file_is_as_good_as_none(tmp_path: Path, content: str) -> None:
    table = tmp_path / "kallsyms"
    table.write_bytes(b"ffffffffc0180000 t mod_b\t[b]\n")
    modules = tmp_path / "modules"
    modules.write_text(content)
    (found,) = Kallsyms.load(str(table), str(modules)).by_name("mod_b")
    assert found.end - found.start == 4096


# -- real tables -----------------------------------------------------------------------


def test_a_table_of_32_bit_arm() -> None:
    text = ARM.read_bytes()
    table = Kallsyms.parse(text)
    rows = rows_of(text.decode())
    assert (len(table), table.hidden) == (len(rows), False)
    assert table.text_start == 0xC0008000
    # By eye, from the file: functions, a module below the image with mapping symbols
    # inside, the exit text behind _einittext, and the holes that nobody owns.
    for address, expected in {
        0xC0008000: "stext",
        0xC0100130: "run_one_initcall",
        0xC01002AC: "run_one_initcall",
        0xC0700008: "begin_kernel",
        0xBF00AE84: "scan_argument",
        0xBF00AEEE: "scan_argument",
        0xBF000000: "demo_spi_irq",
        0xC0717048: "mailbox_exit",
        0xC06578E4: None,
        0xC0690000: None,
        0xC0802010: None,
        0xBF00B200: None,
    }.items():
        found = table.find(address)
        name = found.name if isinstance(found, symbols.Symbol) else None
        assert name == expected, hex(address)
    assert table.is_kernel(0xBF000000)
    assert table.is_kernel(0xC0008000)
    assert not table.is_kernel(0xBEFF0000)
    named = [assert_agrees(table, rows, row[0] + step) for row in rows for step in (0, 4, 40)]
    assert sum(name is not None for name in named) >= 60


def test_the_running_kernels_table() -> None:
    try:
        text = Path("/proc/kallsyms").read_text()
    except OSError as error:
        pytest.skip(f"/proc/kallsyms cannot be read: {error}")
    rows = [row for row in rows_of(text) if row[3] == ""]
    if not any(row[0] for row in rows):
        pytest.skip("kernel addresses are hidden from this user")
    if os.uname().machine not in ("x86_64", "aarch64"):
        pytest.skip("the plain scan knows only kernels in the upper half of 64 bits")
    table = Kallsyms.load()
    end = next((row[0] for row in rows if row[2] == "_etext"), max(row[0] for row in rows))
    start = next(row[0] for row in rows if row[2] in ("_stext", "_text"))
    assert table.text_start in {row[0] for row in rows if row[2] in ("_text", "_stext")}
    within = sorted(row for row in rows if start <= row[0] <= end)
    pick = random.Random(11)
    for place in pick.sample(range(len(within) - 200), 300):
        at = within[place][0]
        following = next((row[0] for row in within[place:] if row[0] > at), at + 1)
        address = pick.choice([at, following - 1, (at + following) // 2])
        names = {r[2] for r in within[max(0, place - 200) : place + 200] if r[0] == at}
        found = table.find(address)
        assert isinstance(found, symbols.Symbol), f"{address:#x} {names}"
        assert (found.start, found.end) == (at, following)
        assert found.name in names


def test_where_a_section_ends_nothing_is_called_after_it() -> None:
    table = Kallsyms.parse(
        b"ffffffff81000000 T _text\nffffffff81000000 T startup_64\n"
        b"ffffffff81001a80 T paravirt_ret0\nffffffff81001a87 T __entry_text_end\n"
        b"ffffffff81104104 T srso_alias_safe_ret\nffffffff81200000 T __split_text_end\n"
        b"ffffffff81200000 T run_init\n"
    )
    assert table.find(0xFFFFFFFF81001A86).name == "paravirt_ret0"
    assert table.find(0xFFFFFFFF81001A87) is symbols.UNKNOWN_ADDRESS
    assert table.find(0xFFFFFFFF81019E75) is symbols.UNKNOWN_ADDRESS
    assert table.find(0xFFFFFFFF81104104).name == "srso_alias_safe_ret"


def test_every_function_of_the_running_kernel_has_its_name() -> None:
    """The compiler's padding ``__pfx_NAME`` stands before functions alone (objtool)."""
    try:
        rows = rows_of(Path("/proc/kallsyms").read_text())
    except OSError as error:
        pytest.skip(f"/proc/kallsyms cannot be read: {error}")
    padding = {(row[0], row[2][len("__pfx_") :]) for row in rows if row[2].startswith("__pfx_")}
    functions = [row for row in rows if row[0] and (row[0] - 16, row[2]) in padding]
    if not functions:
        pytest.skip("this kernel hides its addresses, or has no such padding")
    table = Kallsyms.load()
    unnamed = [row for row in functions if row[2] not in table.aliases(row[0])]
    assert not unnamed


def test_functions_that_begin_like_linker_marks_have_names() -> None:
    check(
        b"ffffffff81000000 T _text\nffffffff8119d2f0 t __stop_cpus.constprop.0\n"
        b"ffffffff81cfc650 T __stop_tty\nffffffff81cfc6c0 T start_tty\n"
        b"ffffffff81d00000 t __start_removing_path\nffffffff81d00100 T __stop_notes\n"
        b"ffffffff81d00100 R __start_rodata\n"
        b"ffffffff82a00000 D __stop_notes\nffffffff82a00010 R __stop___param\n",
        {
            0xFFFFFFFF81CFC655: "__stop_tty+0x5",
            0xFFFFFFFF81CFC6C5: "start_tty+0x5",
            0xFFFFFFFF8119D2F0: "__stop_cpus.constprop.0+0x0",
            0xFFFFFFFF81D00000: "__start_removing_path+0x0",
            0xFFFFFFFF81D00100: "-",
            0xFFFFFFFF82A00000: "-",
            0xFFFFFFFF82A00014: "-",
        },
    )


# -- modules' init functions, whose memory is others' ------------------------------------

KEPT = (
    b"ffffffffc13cc600 t xfs_like_a\t[fs_demo]\nffffffffc13cc900 t xfs_like_b\t[fs_demo]\n"
    b"ffffffffc1400000 t foo_start\t[foo]\nffffffffc1400900 t foo_more\t[foo]\n"
)
FREED = b"ffffffffc1400450 t init_fs_demo\t[fs_demo]\n"
SIZES = {"fs_demo": (0xFFFFFFFFC13CC000, 0x2000), "foo": (0xFFFFFFFFC1400000, 0x1000)}


@pytest.mark.parametrize(
    "text",
    [
        KEPT + FREED,
        KEPT + FREED + b"ffffffffc1400460 t bar_init\t[foo]\n",
        KEPT + FREED + b"ffffffffc2000000 t bpf_prog_0123456789abcdef_p\t[bpf]\n",
    ],
)
def test_a_freed_init_function_does_not_stand_before_what_is_there(text: bytes) -> None:
    expected = {
        0xFFFFFFFFC1400460: "foo_start+0x460 [foo]",
        0xFFFFFFFFC1400904: "foo_more+0x4 [foo]",
        0xFFFFFFFFC13CC904: "xfs_like_b+0x4 [fs_demo]",
    }
    for sizes in (None, SIZES):
        assert check(text, expected, sizes).by_name("init_fs_demo") == []


def test_a_freed_init_function_right_behind_its_module_is_told_by_the_module_s_place() -> None:
    lines = KEPT.splitlines(keepends=True)
    text = b"".join(lines[2:] + lines[:2]) + FREED
    check(text, {0xFFFFFFFFC1400460: "foo_start+0x460 [foo]"}, SIZES)


def test_the_order_of_a_sorted_copy_tells_nothing() -> None:
    lines = [
        b"ffffffffc1000000 t a_fn\t[a]\n",
        b"ffffffffc1001000 t b_fn\t[b]\n",
        b"ffffffffc1002000 t a_init\t[a]\n",
    ]
    check(
        b"".join(lines),
        {0xFFFFFFFFC1000004: "a_fn+0x4 [a]", 0xFFFFFFFFC1002004: "a_init+0x4 [a]"},
    )


def test_a_module_s_init_has_a_name_while_it_runs(tmp_path: Path) -> None:
    table, listing = tmp_path / "kallsyms", tmp_path / "modules"
    table.write_bytes(
        b"ffffffffc0100000 t mod_fn\t[m]\nffffffffc0300000 t mod_init\t[m]\n"
        b"ffffffffc0200000 d mod_data\t[m]\n"
    )
    for state, named in (("Loading", True), ("Live", False), ("Unloading", False)):
        listing.write_text(f"m 8192 0 - {state} 0xffffffffc0100000\n")
        loaded = Kallsyms.load(str(table), str(listing))
        assert (loaded.by_name("mod_init") != []) is named, state
        assert answer(loaded, 0xFFFFFFFFC0300004) == ("mod_init+0x4 [m]" if named else "-")
        assert answer(loaded, 0xFFFFFFFFC0100004) == "mod_fn+0x4 [m]"


def test_a_page_of_kprobes_gives_way_to_a_named_slot_in_it() -> None:
    page = b"ffffffffc00d6000 t kprobe_optinsn_page\t[__builtin__kprobes]\n"
    for slot in (b"t bpf_trampoline_1\t[bpf]\n", b"t slot\t[optprobes]\n", b"W weak\n"):
        line = b"ffffffffc00d6000 " + slot
        for text in (page + line, line + page):
            found = Kallsyms.parse(text).find(0xFFFFFFFFC00D6004)
            assert isinstance(found, symbols.Symbol)
            assert found.name == slot[2:].split()[0].decode()


def test_the_vsyscall_page_is_no_kernel_s() -> None:
    table = Kallsyms.parse(
        b"ffffffff81000000 T _text\nffffffffff5fffff t before\nffffffffff600000 t inside\n"
        b"ffffffffff601000 t behind\n"
    )
    for address in (0xFFFFFFFFFF600000, 0xFFFFFFFFFF600400, 0xFFFFFFFFFF600FFF):
        assert not table.is_kernel(address)
        assert table.find(address) is symbols.UNKNOWN_ADDRESS
    assert answer(table, 0xFFFFFFFFFF601000) == "behind+0x0"


# -- tables that misled other tools, each with its right answers -----------------------


def answer(table: Kallsyms, address: int) -> str:
    """``name+0xoffset [module]``, or ``-`` for no name."""
    found = table.find(address)
    if isinstance(found, symbols.Reason):
        return "-"
    assert found.start <= address < found.end
    suffix = f" [{found.module}]" if found.module else ""
    return f"{found.name}+{address - found.start:#x}{suffix}"


def check(
    text: bytes,
    expected: dict[int, str],
    module_sizes: dict[str, tuple[int, int]] | None = None,
) -> Kallsyms:
    table = Kallsyms.parse(text, module_sizes)
    assert {at: answer(table, at) for at in expected} == expected
    return table


def test_all_zero_is_hidden_and_names_nothing() -> None:
    table = Kallsyms.parse(
        b"0000000000000000 T _text\n0000000000000000 T _stext\n"
        b"0000000000000000 t alpha_fn\n0000000000000000 T beta_fn\n"
        b"0000000000000000 T _etext\n0000000000000000 t gamma_fn\t[demo_mod]\n"
    )
    assert table.hidden
    for address in (0, 1, 0x1000, 0xFFFFFFFF81000000, (1 << 64) - 1):
        assert table.find(address) is symbols.HIDDEN
    assert table.by_name("alpha_fn") == []
    assert table.aliases(0) == []
    assert table.text_start is None
    assert table.is_kernel(0xFFFFFFFF81000000)
    assert not table.is_kernel(0x7F0000001234)


def test_hidden_on_32_bits() -> None:
    table = Kallsyms.parse(b"00000000 T _text\n00000000 t alpha_fn\n")
    assert table.hidden
    assert table.find(0xC0008000) is symbols.HIDDEN
    assert table.is_kernel(0xC0008000)
    assert not table.is_kernel(0x8000)


def test_percpu_offsets_are_neither_hidden_nor_names() -> None:
    table = check(
        b"0000000000000000 A __per_cpu_start\n0000000000001000 A fixed_percpu_data\n"
        b"000000000002a000 A __per_cpu_end\nffffffff91000000 T _text\n"
        b"ffffffff91000000 T _stext\nffffffff91000240 T first_fn\nffffffff92000000 T _etext\n",
        {
            0x0: "-",
            0x1010: "-",
            0x2A008: "-",
            0x7F0000001234: "-",
            0xFFFFFFFF90FFFFFF: "-",
            0xFFFFFFFF91000250: "first_fn+0x10",
        },
    )
    assert not table.hidden
    assert table.text_start == 0xFFFFFFFF91000000


def test_etext_bounds_text_whatever_its_type() -> None:
    check(
        b"ffffffffa5000000 T _text\nffffffffa5000100 T last_real_fn\n"
        b"ffffffffa5400000 D _etext\nffffffffa6000000 D some_data\n"
        b"ffffffffc0100000 t mod_fn\t[demo]\n",
        {
            0xFFFFFFFFA53FFFFF: "last_real_fn+0x3ffeff",
            0xFFFFFFFFA5400000: "-",
            0xFFFFFFFFA5400010: "-",
            0xFFFFFFFFA6000008: "-",
            0xFFFFFFFFC0100008: "mod_fn+0x8 [demo]",
        },
    )


def test_nothing_owns_the_holes_after_text_and_init_text() -> None:
    check(
        b"ffffffffa5000000 T _text\nffffffffa5000100 T last_real_fn\n"
        b"ffffffffa5400000 T _etext\nffffffffa5400000 T __stop_notes\n"
        b"ffffffffa7000000 T _sinittext\nffffffffa7000000 t first_init\n"
        b"ffffffffa7000040 t last_init\nffffffffa7000080 T _einittext\n"
        b"ffffffffa7000200 t drop_driver\nffffffffa8000000 D _sdata\n",
        {
            0xFFFFFFFFA5400000: "-",
            0xFFFFFFFFA6000000: "-",
            0xFFFFFFFFA7000044: "last_init+0x4",
            0xFFFFFFFFA7000080: "-",
            0xFFFFFFFFA7000100: "-",
            0xFFFFFFFFA7000204: "drop_driver+0x4",
        },
    )


def test_function_that_starts_where_a_section_ends_is_named() -> None:
    check(
        b"ffffffffa7000000 t last_init\nffffffffa7000080 T _einittext\n"
        b"ffffffffa7000080 t drop_driver\nffffffffa7000090 t other\n",
        {0xFFFFFFFFA7000084: "drop_driver+0x4"},
    )


def test_modules_in_any_order() -> None:
    table = check(
        b"ffffffff9a000000 T _text\nffffffff9a000400 T core_fn\nffffffff9b000000 T _etext\n"
        b"ffffffffc0900000 t strp_like_exit\t[strp_demo]\n"
        b"ffffffffc0500000 t wifi_rx\t[wifi_demo]\nffffffffc0500300 t wifi_tx\t[wifi_demo]\n"
        b"ffffffffc0700000 t mac_poll\t[mac_demo]\n",
        {
            0xFFFFFFFFC0500310: "wifi_tx+0x10 [wifi_demo]",
            0xFFFFFFFFC0700004: "mac_poll+0x4 [mac_demo]",
            0xFFFFFFFFDF0099CD: "-",
        },
    )
    found = table.find(0xFFFFFFFFC0500310)
    assert isinstance(found, symbols.Symbol)
    assert (found.kind, found.module) == (symbols.MODULE, "wifi_demo")


def test_mapping_symbols_are_dropped_before_anything_else() -> None:
    table = check(
        b"bf00ae80 t $a\t[binfmt_demo]\nbf00ae80 t scan_arg\t[binfmt_demo]\n"
        b"bf00aeec t $d\t[binfmt_demo]\nbf00af00 t $x.7\t[binfmt_demo]\n"
        b"bf00af00 t open_exec\t[binfmt_demo]\nffff800010080000 t $x\n"
        b"ffff800010080000 T _stext\nffff800010081000 T el0_demo\nffff800010081008 d $d",
        {
            0xBF00AE84: "scan_arg+0x4 [binfmt_demo]",
            0xBF00AEF0: "scan_arg+0x70 [binfmt_demo]",
            0xBF00AF08: "open_exec+0x8 [binfmt_demo]",
            0xFFFF80001008100C: "el0_demo+0xc",
        },
    )
    assert table.by_name("$a") == table.by_name("$x.7") == []


@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
def test_only_mapping_names_are_dropped(newline: bytes) -> None:
    lines = [
        b"ffff800010081000 t real",
        b"ffff800010081008 t $d.realtime.7",
        b"ffff800010081010 t $dollar_fn",
        b"ffff800010081020 t $a",
    ]
    table = Kallsyms.parse(newline.join(lines))
    assert answer(table, 0xFFFF80001008100C) == "real+0xc"
    assert answer(table, 0xFFFF800010081024) == "$dollar_fn+0x14"
    assert len(table) == 2


def test_padding_before_a_function_is_not_the_function() -> None:
    table = check(
        b"ffffffff81000180 t __pfx_setup_demo\nffffffff81000190 t setup_demo\n"
        b"ffffffff81000460 T __pfx_next_demo\nffffffff81000470 T next_demo\n",
        {
            0xFFFFFFFF81000190: "setup_demo+0x0",
            0xFFFFFFFF81000470: "next_demo+0x0",
            0xFFFFFFFF81000465: "__pfx_next_demo+0x5",
        },
    )
    assert [found.start for found in table.by_name("setup_demo")] == [0xFFFFFFFF81000190]


def test_tab_or_blanks_before_the_module() -> None:
    table = check(
        b"ffffffffc0030000 t bpf_prog_1122334455667788_demo\t[bpf]\n"
        b"ffffffffc0030400 t bpf_prog_99aabbccddeeff00_two      [bpf]\n"
        b"ffffffffc0100000 T fuse_demo        [fuse]\n",
        {
            0xFFFFFFFFC0030001: "bpf_prog_1122334455667788_demo+0x1 [[bpf]]",
            0xFFFFFFFFC0030402: "bpf_prog_99aabbccddeeff00_two+0x2 [[bpf]]",
            0xFFFFFFFFC0100003: "fuse_demo+0x3 [fuse]",
        },
    )
    for name in ("bpf_prog_1122334455667788_demo", "bpf_prog_99aabbccddeeff00_two"):
        (found,) = table.by_name(name)
        assert (found.kind, found.module) == (symbols.BPF_PROG, symbols.BPF_MODULE)


@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
def test_no_newline_at_the_end_upper_case_and_bit_63(newline: bytes) -> None:
    table = Kallsyms.parse(
        newline.join(
            [
                b"00000000000000EA t write_demo",
                b"A0000000000000CA d table_demo",
                b"A0000000000000FA T bench_demo\t[bench_mod]",
            ]
        )
    )
    assert answer(table, 0xA0000000000000FA) == "bench_demo+0x0 [bench_mod]"
    assert answer(table, 0xA0000000000000CA) == "-"
    assert answer(table, 0xEA) == "-"
    assert [found.start for found in table.by_name("table_demo")] == [0xA0000000000000CA]
    assert [found.start for found in table.by_name("write_demo")] == [0xEA]


def test_pages_of_kprobes_and_ftrace_are_one_page_long() -> None:
    table = check(
        b"ffffffffc0040000 t bpf_prog_0011223344556677_x\t[bpf]\n"
        b"ffffffffc0212000 t ftrace_trampoline\t[__builtin__ftrace]\n"
        b"ffffffffc0213000 t ftrace_trampoline\t[__builtin__ftrace]\n"
        b"ffffffffc00d4000 t kprobe_insn_page\t[__builtin__kprobes]\n"
        b"ffffffffc00d6000 t kprobe_optinsn_page\t[__builtin__kprobes]\n",
        {
            0xFFFFFFFFC0040FFF: "bpf_prog_0011223344556677_x+0xfff [[bpf]]",
            0xFFFFFFFFC0041000: "-",
            0xFFFFFFFFC0212010: "ftrace_trampoline+0x10 [__builtin__ftrace]",
            0xFFFFFFFFC0213FFF: "ftrace_trampoline+0xfff [__builtin__ftrace]",
            0xFFFFFFFFC0214008: "-",
            0xFFFFFFFFC00D4004: "kprobe_insn_page+0x4 [__builtin__kprobes]",
            0xFFFFFFFFC00D5000: "-",
            0xFFFFFFFFC00D6004: "kprobe_optinsn_page+0x4 [__builtin__kprobes]",
        },
        module_sizes={"unrelated": (0xFFFFFFFFC0900000, 4096)},
    )
    assert [found.kind for found in table.by_name("ftrace_trampoline")] == [symbols.OOL] * 2


def test_preferred_names_and_reachable_aliases() -> None:
    table = check(
        b"ffffffff83000000 T _stext\nffffffff83000000 T _text\nffffffff83000000 t pvh_demo\n"
        b"ffffffff83000400 W weak_name\nffffffff83000400 T strong_name\n"
        b"ffffffff83000800 t __do_thing\nffffffff83000800 t do_thing\nffffffff83000c00 T tail\n",
        {
            0xFFFFFFFF83000404: "strong_name+0x4",
            0xFFFFFFFF83000804: "do_thing+0x4",
            0xFFFFFFFF830003FF: "_stext+0x3ff",
        },
    )
    assert table.aliases(0xFFFFFFFF83000010) == ["_stext", "_text", "pvh_demo"]
    assert table.aliases(0xFFFFFFFF83000410) == ["strong_name", "weak_name"]
    assert table.aliases(0xFFFFFFFF82000000) == []
    for name, start in (("weak_name", 0x400), ("__do_thing", 0x800), ("pvh_demo", 0)):
        assert [found.start - 0xFFFFFFFF83000000 for found in table.by_name(name)] == [start]


@pytest.mark.parametrize(
    ("better", "worse"),
    [
        (b"t local_strong", b"W weak_global"),
        (b"T aglobal", b"t zlocal_and_longer"),
        (b"T irq_entries", b"T __irqentry_text_start"),
        (b"T ___three_underscores_demo", b"T __start___param"),
        (b"T x", b"T _longer"),
        (b"T longer_name", b"T short"),
        (b"T name_a", b"T name_b"),
    ],
)
def test_each_rule_of_preference(better: bytes, worse: bytes) -> None:
    for pair in ((better, worse), (worse, better)):
        text = b"".join(b"ffffffff83000000 %b\n" % name for name in pair)
        assert answer(Kallsyms.parse(text), 0xFFFFFFFF83000000) == better[2:].decode() + "+0x0"


def test_one_name_at_many_addresses() -> None:
    table = check(
        b"ffffffff81100000 t s_next\nffffffff81200000 t s_next\n"
        b"ffffffffc0300000 t s_next\t[demo]\nffffffff81200040 t other\n",
        {
            0xFFFFFFFF81100010: "s_next+0x10",
            0xFFFFFFFF81200010: "s_next+0x10",
            0xFFFFFFFF81200048: "other+0x8",
            0xFFFFFFFFC0300010: "s_next+0x10 [demo]",
        },
    )
    assert [(found.start, found.module) for found in table.by_name("s_next")] == [
        (0xFFFFFFFF81100000, None),
        (0xFFFFFFFF81200000, None),
        (0xFFFFFFFFC0300000, "demo"),
    ]


def test_names_are_verbatim() -> None:
    check(
        b"ffffffff84000000 t ovl_demo.llvm.10133695243223489999\n"
        b"ffffffff84000100 t copy_demo.isra.0\nffffffff84000200 t copy_demo.cold\n"
        b"ffffffff84000300 t copy_demo.part.0.constprop.0\n",
        {
            0xFFFFFFFF84000000: "ovl_demo.llvm.10133695243223489999+0x0",
            0xFFFFFFFF84000101: "copy_demo.isra.0+0x1",
            0xFFFFFFFF84000202: "copy_demo.cold+0x2",
            0xFFFFFFFF84000303: "copy_demo.part.0.constprop.0+0x3",
        },
    )


def test_another_boots_addresses_stay_unresolved() -> None:
    table = check(
        b"ffffffff9d000000 T _text\nffffffff9d000100 T some_fn\n"
        b"ffffffffa0000000 t odd_fn\t[odd]\nffffffffa0000100 d odd_data\t[odd]\n",
        {0xFFFFFFFFB6E0017B: "-", 0xFFFFFFFFA0000108: "-", 0xFFFFFFFF9D0FFFFF: "-"},
    )
    assert table.text_start == 0xFFFFFFFF9D000000


JUNK = (
    b"ffffffff85000000 T ok_one\n\nzzzz T not_hex\nffffffff85000100\nffffffff85000200 T\n"
    b"ffffffff85000300 T ok_two\t\nffffffff85000400 ? odd_type\n"
)


def test_junk_lines_are_skipped() -> None:
    table = check(
        JUNK,
        {
            0xFFFFFFFF85000004: "ok_one+0x4",
            0xFFFFFFFF850002FF: "ok_one+0x2ff",
            0xFFFFFFFF85000304: "ok_two+0x4",
            0xFFFFFFFF85000404: "-",
        },
    )
    (found,) = table.by_name("ok_two")
    assert found.module is None


def test_only_kernel_addresses_can_have_a_name() -> None:
    table = check(
        b"0000000000000000 A __per_cpu_start\n000000000047a000 t odd_low_symbol\n"
        b"0606258d4c544000 t odd_symbol\nffffffffad000000 T _text\n"
        b"ffffffffad036600 T one_fn\nffffffffad135f00 t two_fn\nffffffffae000000 T _etext\n",
        {
            0xFFFFFFFFAD135F6F: "two_fn+0x6f",
            0xFFFFFFFFAD0366FA: "one_fn+0xfa",
            0x47A920: "-",
            0x606258D4C544155: "-",
            0x5966605DD52F8E00: "-",
            1 << 64: "-",
            -1: "-",
        },
    )
    assert table.is_kernel(0xFFFFFFFFAD135F6F)
    for address in (0x47A920, 0x5966605DD52F8E00, 1 << 64):
        assert not table.is_kernel(address)


def test_images_are_bpf_too() -> None:
    table = check(
        b"ffffffffc0040000 t bpf_prog_1111111111111111_prog\t[bpf]\n"
        b"ffffffffc0042000 t bpf_trampoline_6442500001\t[bpf]\n"
        b"ffffffffc0043000 t bpf_trampoline_6442500002_1\t[bpf]\n"
        b"ffffffffc0044000 t bpf_dispatcher_xdp\t[bpf]\n",
        {
            0xFFFFFFFFC004207D: "bpf_trampoline_6442500001+0x7d [[bpf]]",
            0xFFFFFFFFC0043018: "bpf_trampoline_6442500002_1+0x18 [[bpf]]",
            0xFFFFFFFFC0044010: "bpf_dispatcher_xdp+0x10 [[bpf]]",
        },
    )
    for address, kind in (
        (0xFFFFFFFFC0040000, symbols.BPF_PROG),
        (0xFFFFFFFFC004207D, symbols.BPF_TRAMPOLINE),
        (0xFFFFFFFFC0044010, symbols.BPF_DISPATCHER),
    ):
        found = table.find(address)
        assert isinstance(found, symbols.Symbol)
        assert found.kind == kind


def test_the_main_program_is_preferred_to_a_subprogram_at_its_start() -> None:
    table = check(
        b"ffffffffa0257cf8 t bpf_prog_b07c000000000000_F\t[bpf]\n"
        b"ffffffffa02592e0 t bpf_prog_2dce000000000000_F\t[bpf]\n"
        b"ffffffffa0257cf8 t bpf_prog_ae31000000000000__dummy_tracepoi\t[bpf]\n",
        {0xFFFFFFFFA0257D00: "bpf_prog_ae31000000000000__dummy_tracepoi+0x8 [[bpf]]"},
    )
    assert table.aliases(0xFFFFFFFFA0257D00) == [
        "bpf_prog_ae31000000000000__dummy_tracepoi",
        "bpf_prog_b07c000000000000_F",
    ]
    # Listed last decides, not the name's length: turned round, the other one wins.
    turned = Kallsyms.parse(
        b"ffffffffa0257cf8 t bpf_prog_ae31000000000000__dummy_tracepoi\t[bpf]\n"
        b"ffffffffa0257cf8 t bpf_prog_b07c000000000000_F\t[bpf]\n"
    )
    assert answer(turned, 0xFFFFFFFFA0257CF8) == "bpf_prog_b07c000000000000_F+0x0 [[bpf]]"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("bpf_prog_30304e82b4033ea3_kprobe__demo", symbols.BPF_PROG),
        ("bpf_prog_30304e82b4033ea3", symbols.BPF_PROG),
        ("bpf_prog_30304e82b4033ea3_a.b.c", symbols.BPF_PROG),
        ("bpf_prog_deadbeef_x", symbols.OTHER_BPF),
        ("bpf__tcp_congestion_ops_init", symbols.BPF_STRUCT_OPS),
    ],
)
def test_kinds_of_bpf_lines(name: str, kind: str) -> None:
    table = Kallsyms.parse(b"ffffffffc0040000 t %b\t[bpf]\n" % name.encode())
    found = table.find(0xFFFFFFFFC0040000)
    assert isinstance(found, symbols.Symbol)
    assert (found.name, found.kind) == (name, kind)


@pytest.mark.parametrize("name", ["bpf_prog_run", "bpf_prog_get_curr_or_next"])
def test_kernel_functions_are_not_bpf(name: str) -> None:
    table = Kallsyms.parse(b"ffffffff81040000 t %b\n" % name.encode())
    found = table.find(0xFFFFFFFF81040000)
    assert isinstance(found, symbols.Symbol)
    assert (found.kind, found.module) == (symbols.KERNEL, None)


C13 = b"ffffffffc0100000 t mod_a\t[a]\nffffffffc0180000 t mod_b\t[b]\n"


def test_a_modules_size_bounds_its_last_symbol() -> None:
    check(
        C13,
        {
            0xFFFFFFFFC01C5754: "-",
            0xFFFFFFFFC0182FFF: "mod_b+0x2fff [b]",
            0xFFFFFFFFC0183000: "-",
            0xFFFFFFFFC0100FFF: "mod_a+0xfff [a]",
            0xFFFFFFFFC0101000: "-",
        },
        module_sizes={"b": (0xFFFFFFFFC0180000, 0x3000)},
    )


def test_without_sizes_one_page_does() -> None:
    check(C13, {0xFFFFFFFFC01C5754: "-", 0xFFFFFFFFC0180FFF: "mod_b+0xfff [b]"})


# -- where the image begins, from the first lines ----------------------------------------

TEXT, STEXT = 0xFFFF_FFFF_8100_0000, 0xFFFF_FFFF_8100_0010
PER_CPU = "0000000000000000 A fixed_percpu_data\n0000000000001000 A cpu_debug_store\n"
REST = "ffffffff81000110 t early_setup_idt\nffffffff82200000 T _etext\n"


def start_of(tmp_path: Path, content: str | bytes) -> int | None:
    path = tmp_path / "kallsyms"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return kallsyms.text_start(str(path))


@pytest.mark.parametrize(
    "lines, start",
    [
        (f"{PER_CPU}{TEXT:x} T startup_64\n{TEXT:x} T _stext\n{TEXT:x} T _text\n{REST}", TEXT),
        (f"{TEXT:x} T _text\n{STEXT:x} T _stext\n{REST}", TEXT),
        (f"{STEXT:x} T _stext\n{REST}", STEXT),
        (f"{STEXT:x} T _stext\n", STEXT),
        (f"{TEXT:x} t _text\n{REST}", TEXT),
        (f"{PER_CPU}{REST}", None),
        ("0000000000000000 T _text\n0000000000000000 T _stext\n", None),
        ("0000000000000000 T _stext\n0000000000000000 T _text\n", None),
        ("c0008000 T stext\nc0008000 T _text\n", 0xC000_8000),
        ("", None),
    ],
)
def test_where_the_image_begins(tmp_path: Path, lines: str, start: int | None) -> None:
    assert start_of(tmp_path, lines) == start
    if start is not None:
        assert Kallsyms.parse(lines.encode(), {}).text_start == start


@pytest.mark.parametrize(
    "content",
    [b"\0" * 4096, b"\xff\xfe junk here\n", b"xyz T _text\n", b"12\n\n\n", b"no newline at all"],
)
def test_what_is_no_kallsyms_tells_nothing(tmp_path: Path, content: bytes) -> None:
    assert start_of(tmp_path, content) is None


def test_a_module_s_symbol_is_not_the_kernel_s_start(tmp_path: Path) -> None:
    lines = f"{STEXT:x} T _stext\n{REST}ffffffffc0000000 t _text\t[odd]\n"
    assert start_of(tmp_path, lines) == STEXT


def test_a_file_without_end_is_not_read_to_it(tmp_path: Path) -> None:
    line = b"ffffffff81000110 t early_setup_idt\n"
    assert (
        start_of(tmp_path, line * (6 * 2**20 // len(line)) + b"ffffffff81000000 T _text\n") is None
    )


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    assert kallsyms.text_start(str(tmp_path / "none")) is None
    assert kallsyms.text_start(str(tmp_path)) is None


def test_the_start_of_this_kernel() -> None:
    if not os.path.exists("/proc/kallsyms"):
        pytest.skip("no /proc/kallsyms here")
    assert kallsyms.text_start() == Kallsyms.load().text_start
