"""The static symbols against scans written independently, and against hostile input."""

from __future__ import annotations

import os
import random
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
    lambda both: one_module_an_address(both[0] + both[1])
)


def as_text(rows: list[Row], gap: str = "\t") -> str:
    return "".join(
        f"{at:016x} {kind} {name}" + (f"{gap}[{module}]\n" if module else "\n")
        for at, kind, name, module in rows
    )


@given(rows=tables, gap=st.sampled_from(["\t", "   "]), data=st.data())
@settings(max_examples=150, deadline=None)
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
@settings(max_examples=60, deadline=None)
def test_by_name_finds_every_line_of_that_name(rows: list[Row]) -> None:
    table = Kallsyms.parse(as_text(rows).encode())
    for name in ("alpha", "s_next", "init_module", "absent"):
        expected = sorted(row[0] for row in rows if row[2] == name)
        assert [found.start for found in table.by_name(name)] == expected


@given(rows=tables, data=st.data())
@settings(max_examples=60, deadline=None)
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
        assert (len(table), table.skipped) == (len(plain), 0)
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
@settings(max_examples=300, deadline=None)
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
    assert table.skipped == (1 if line.strip() else 0)


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
        Kallsyms.load(str(path), modules=None)


def test_a_file_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ksym_plugin.kernel.kallsyms.MAX_BYTES", 1 << 20)
    with pytest.raises(KallsymsError, match=r"larger than .*; name a copy"):
        Kallsyms.load("/dev/zero", modules=None)


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
    table = Kallsyms.load(str(path), modules=None)
    assert (len(table), table.skipped) == (count, 0)
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
    assert (len(table), table.skipped, table.hidden) == (len(rows), 0, False)
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
