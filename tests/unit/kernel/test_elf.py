"""ELF files against nm-like linear searches, gcc and addr2line."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ksym_plugin.kernel import cache as cache_module
from ksym_plugin.kernel import dwarf
from ksym_plugin.kernel.dwarf import ImageLines
from ksym_plugin.kernel.elf import ElfError, ElfFile, Image
from ksym_plugin.kernel.kallsyms import Kallsyms
from ksym_plugin.timeline.packed import Line
from ksym_plugin.timeline.symbols import UNKNOWN_ADDRESS, Reason, Symbol
from tests.unit.elf_files import (
    DATA_SECTION,
    FUNC,
    GLOBAL,
    LOCAL,
    NOTYPE,
    OBJECT,
    TEXT,
    WEAK,
    Sym,
    vmlinux,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

KASLR = 0x1234_0000
BUILD_ID = "1234"
BASE = TEXT + 0x1000


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """One's own is left alone."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


def elf_of(folder: Path, *symbols: Sym, **more: object) -> ElfFile:
    path = folder / "vmlinux"
    anchor = Sym("_text", TEXT, 0, NOTYPE)
    path.write_bytes(vmlinux([anchor, *symbols], **more))  # type: ignore[arg-type]
    return ElfFile(str(path))


def image_of(folder: Path, *symbols: Sym, behind: Kallsyms | None = None) -> Image:
    return Image(elf_of(folder, *symbols), TEXT + KASLR, BUILD_ID, behind)


def told(found: Symbol | Reason, address: int) -> str | None:
    return f"{found.name}+{address - found.start:#x}" if isinstance(found, Symbol) else None


def test_zero_size_goes_to_the_next_symbol_and_a_size_is_kept(tmp_path: Path) -> None:
    asm, demo = Sym("asm_entry", BASE, 0, NOTYPE), Sym("func_demo", BASE + 0x100, 0x40)
    image = image_of(tmp_path, asm, demo)
    there = BASE + KASLR
    answers = {0x50: "asm_entry+0x50", 0xFF: "asm_entry+0xff", 0x13F: "func_demo+0x3f", 0x180: None}
    assert {at: told(image.find(there + at), there + at) for at in answers} == answers
    assert image.find(0xFFFF_FFFF_C010_0010) is UNKNOWN_ADDRESS


def test_what_the_file_does_not_know_the_kernel_s_table_does(tmp_path: Path) -> None:
    there = BASE + KASLR
    lines = [
        (there, b"T", b"asm_entry"),
        (there + 0x100, b"T", b"func_demo"),
        (there + 0x120, b"t", b"label_inside"),
        (there + 0x160, b"t", b"only_here"),
        (0xFFFF_FFFF_C010_0000, b"t", b"fs_fn\t[fs]"),
    ]
    text = b"".join(b"%016x %b %b\n" % line for line in lines)
    asm, demo = Sym("asm_entry", BASE, 0, NOTYPE), Sym("func_demo", BASE + 0x100, 0x40)
    image = image_of(tmp_path, asm, demo, behind=Kallsyms.parse(text))
    answers = {
        0x50: "asm_entry+0x50",
        0x110: "func_demo+0x10",
        0x130: "label_inside+0x10",
        0x150: "label_inside+0x30",
        0x180: "only_here+0x20",
    }
    assert {at: told(image.find(there + at), there + at) for at in answers} == answers
    module = 0xFFFF_FFFF_C010_0010
    assert told(image.find(module), module) == "fs_fn+0x10"


def test_addresses_below_the_offset_are_nowhere(tmp_path: Path) -> None:
    file = elf_of(tmp_path, Sym("last", (1 << 64) - 32, 32))
    image = Image(file, TEXT + KASLR, None)
    for address in (0, KASLR - 1, (KASLR - 16) % (1 << 64)):
        assert image.find(address) is UNKNOWN_ADDRESS


_SYMS = st.lists(
    st.builds(
        Sym,
        st.sampled_from(["a", "_b", "__c", "dd", "$x", "$d.7", "e"]),
        st.integers(0, 40).map(lambda at: BASE + at),
        st.sampled_from([0, 0, 1, 5, 20, 1 << 63]),
        st.sampled_from([NOTYPE, FUNC, FUNC, OBJECT]),
        st.sampled_from([LOCAL, GLOBAL, WEAK]),
        st.sampled_from([1, 1, 1, DATA_SECTION, 0]),
    ),
    max_size=10,
)


@given(_SYMS, st.integers(-2, 70))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_finds_what_a_linear_search_finds(tmp_path: Path, syms: list[Sym], offset: int) -> None:
    address = BASE + offset
    found = elf_of(tmp_path, *syms).find(address)
    code = [Sym("_text", TEXT, 0, NOTYPE)] + [
        one
        for one in syms
        if one.section == 1 and one.type in (NOTYPE, FUNC) and one.name[0] != "$"
    ]
    sizes = {at: max(one.size for one in code if one.value == at) for at in {s.value for s in code}}
    covering = [at for at, size in sizes.items() if at <= address < at + size]
    nearest = max(at for at in sizes if at <= address)
    start = max(covering) if covering else nearest if not sizes[nearest] else None
    assert (found and found[0]) == start
    if found:
        assert found[2] in {one.name for one in code if one.value == found[0]}


def test_of_several_names_the_one_kallsyms_prefers(tmp_path: Path) -> None:
    names = [
        Sym("weak_one", BASE, 16, FUNC, WEAK),
        Sym("__se_sys_read", BASE, 16, FUNC, LOCAL),
        Sym("__x64_sys_read", BASE, 16),
        Sym("mark", BASE, 0, NOTYPE),
    ]
    found = elf_of(tmp_path, *names).find(BASE + 1)
    assert found is not None
    assert found[2] == "__x64_sys_read"


def test_another_kernel_s_file_is_refused(tmp_path: Path) -> None:
    file = elf_of(tmp_path, build_id=b"\xab\xcd")
    assert file.build_id == "abcd"
    with pytest.raises(ElfError, match="another kernel"):
        Image(file, TEXT, BUILD_ID)
    assert Image(file, TEXT, None).offset == 0
    with pytest.raises(ElfError, match="not known"):
        Image(file, None, "abcd")


@pytest.mark.parametrize(
    "data", [b"", b"\x7fELF", b"MZ" + bytes(500), b"\x7fELF\2\1\1" + bytes(90)]
)
def test_what_is_no_elf_is_said(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(data)
    with pytest.raises(ElfError) as caught:
        ElfFile(str(path))
    assert caught.value.remedy
    with pytest.raises(ElfError, match="cannot be read"):
        ElfFile(str(tmp_path / "absent"))


@given(st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_a_damaged_file_is_read_or_refused(tmp_path: Path, data: st.DataObject) -> None:
    whole = bytearray(vmlinux([Sym("_text", TEXT, 0, NOTYPE), Sym("f", BASE, 16)]))
    for _ in range(data.draw(st.integers(1, 3))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path / "x"
    path.write_bytes(whole[: data.draw(st.sampled_from([len(whole), len(whole) // 2]))])
    try:
        found = ElfFile(str(path)).find(BASE + 4)
    except ElfError:
        return
    assert found is None or found[0] <= BASE + 4 < found[1]


def test_a_module_is_where_its_sections_are(tmp_path: Path) -> None:
    path = tmp_path / "fs.ko"
    path.write_bytes(vmlinux([Sym("fs_fn", 0x40, 0x20), Sym("other", 0x80, 8)], type=1))
    first = ElfFile(str(path), {".text": 0xFFFF_FFFF_C03C_C000})
    second = ElfFile(str(path), {".text": 0xFFFF_FFFF_C13C_C000})
    old, new = 0xFFFF_FFFF_C03C_C041, 0xFFFF_FFFF_C13C_C041
    assert first.find(old) == (old - 1, old + 0x1F, "fs_fn")
    assert second.find(new) == (new - 1, new + 0x1F, "fs_fn")
    assert second.find(old) is first.find(new) is None
    assert len(ElfFile(str(path))) == 0


SOURCE = """
static volatile int sink;
static inline int twice(int value)
{
	return value + value;
}
__attribute__((noinline)) int work_%(n)d(int value)
{
	for (int at = 0; at < value; at++)
		sink += twice(at) ^ %(n)d;
	return sink;
}
"""
START = """
	.text
	.globl _text, asm_entry
_text:
asm_entry:
	nop
	nop
	ret
"""


def linked(folder: Path, compiler: str, flags: str) -> Path:
    """A kernel of three files, at a kernel's addresses."""
    for tool in (compiler, "ld", "addr2line", "nm"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
    (folder / "start.S").write_text(START)
    files = ["start.S"]
    for number in range(2):
        files.append(f"work{number}.c")
        (folder / files[-1]).write_text(SOURCE % {"n": number})
    made = folder / "vmlinux"
    words = [compiler, *flags.split(), "-O2", "-ffreestanding", "-fno-pic", "-mcmodel=kernel"]
    for file in files:
        subprocess.run([*words, "-c", file, "-o", file + ".o"], cwd=folder, check=True, timeout=60)
    subprocess.run(
        ["ld", f"-Ttext={TEXT:#x}", "-e", "_text", "--build-id", "-o", str(made)]
        + [file + ".o" for file in files],
        cwd=folder,
        check=True,
        timeout=60,
    )
    return made


def output(*words: str, text: str = "") -> list[str]:
    done = subprocess.run(words, input=text, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    ("compiler", "flags"),
    [
        ("gcc", "-g"),
        ("gcc", "-gdwarf-4"),
        ("gcc", "-g -ffunction-sections"),
        ("clang", "-g"),
        ("clang", "-gdwarf-4"),
        ("clang", "-g -ffunction-sections"),
        ("gcc", "-gdwarf-2 -gstrict-dwarf"),
        ("gcc", "-gdwarf-5 -gz=zlib"),
    ],
)
def test_names_as_nm_and_lines_as_addr2line(compiler: str, flags: str, tmp_path: Path) -> None:
    path = linked(tmp_path, compiler, flags)
    image = Image(ElfFile(str(path)), TEXT + KASLR, None)
    lines = ImageLines(image)
    names = [line.split() for line in output("nm", "-S", str(path)) if " T " in line]
    end = max(int(row[0], 16) + int(row[1], 16) for row in names if len(row) == 4)
    addresses = range(TEXT, end)
    wanted = output("addr2line", "-e", str(path), text="\n".join(map(hex, addresses)))
    assert len(wanted) == len(addresses)
    compared = 0
    for address, place in zip(addresses, wanted):
        found = lines.line(address + KASLR)
        file, line = place.split(" ")[0].rsplit(":", 1)
        if line in ("?", "0"):
            assert found is None
            continue
        assert found is not None
        assert (os.path.realpath(found.file), str(found.line)) == (os.path.realpath(file), line)
        compared += 1
    assert compared > 50
    lines.close()
    for row in names:
        start = int(row[0], 16)
        told_name = image.find(start + KASLR)
        assert isinstance(told_name, Symbol)
        if len(row) == 4:
            assert (told_name.name, told_name.end - told_name.start) == (row[3], int(row[1], 16))


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_damaged_dwarf_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    from elftools.elf.elffile import ELFFile

    folder = tmp_path_factory.getbasetemp() / "damaged"
    if not folder.exists():
        folder.mkdir()
        linked(folder, "gcc", "-g")
    with open(folder / "vmlinux", "rb") as file:
        sections = list(ELFFile(file).iter_sections())
        parts = [part for part in sections if part.name.startswith(".debug_")]
    if not parts:
        pytest.skip("gcc is not installed")
    damaged = bytearray((folder / "vmlinux").read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        part = data.draw(st.sampled_from(parts))
        at = data.draw(st.integers(0, part["sh_size"] - 1))
        damaged[part["sh_offset"] + at] = data.draw(st.integers(0, 255))
    path = folder / "damaged"
    path.write_bytes(damaged)
    lines = ImageLines(Image(ElfFile(str(path)), TEXT + KASLR, None))
    said = str(path)
    try:
        for address in range(TEXT, TEXT + 64, 8):
            found = lines.line(address + KASLR)
            assert found is None or found.line > 0
    except ElfError as error:
        said = str(error)
    lines.close()
    assert str(path) in said


def test_a_file_without_dwarf_has_no_lines(tmp_path: Path) -> None:
    lines = ImageLines(image_of(tmp_path, Sym("f", BASE, 16)))
    assert not lines.exist
    assert lines.line(BASE + KASLR) is None
    lines.close()


def first_line(path: Path) -> Line | None:
    lines = ImageLines(Image(ElfFile(str(path)), TEXT + KASLR, None))
    try:
        return lines.line(TEXT + KASLR)
    finally:
        lines.close()


def test_lines_once_told_need_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "SETTLED_NS", 0)
    path = linked(tmp_path, "gcc", "-g")
    wanted = first_line(path)
    assert wanted is not None

    def unwanted(_: str) -> NoReturn:
        raise AssertionError

    image = Image(ElfFile(str(path)), TEXT + KASLR, None)
    monkeypatch.setattr(dwarf, "opened", unwanted)
    lines = ImageLines(image)
    assert lines.exist
    found = lines.line(TEXT + KASLR)
    lines.close()
    assert found is not None
    assert (found.file, found.line) == (wanted.file, wanted.line)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--compress-debug-sections=zlib-gnu", "decompress-debug-sections"),
        ("--compress-debug-sections=zstd", "decompress-debug-sections"),
        ("--only-keep-debug", None),
        ("--strip-all", "no symbols"),
        ("--remove-section .debug_line", "-"),
        ("--remove-section .debug_abbrev", "-"),
        ("--strip-debug --add-gnu-debuglink=vmlinux", "-"),
        ("--strip-debug --add-section .gnu_debugaltlink=start.S", "-"),
        ("--add-section .gnu_debugaltlink=start.S", None),
    ],
)
def test_what_objcopy_makes_is_read_or_refused(
    words: str, said: str | None, tmp_path: Path
) -> None:
    """``said``: nothing where there is a line, - where there is none, else the refusal."""
    linked(tmp_path, "gcc", "-g")
    made = subprocess.run(
        ["objcopy", *words.split(), "vmlinux", "made"],
        cwd=tmp_path,
        capture_output=True,
        timeout=60,
        check=False,
    )
    if made.returncode:
        pytest.skip(f"objcopy {words}: {made.stderr.decode()}")
    if said in (None, "-"):
        assert (first_line(tmp_path / "made") is None) == (said == "-")
    else:
        with pytest.raises(ElfError, match=said):
            first_line(tmp_path / "made")


def test_a_section_that_claims_more_than_the_file_has_is_refused(tmp_path: Path) -> None:
    from elftools.elf.elffile import ELFFile

    path = linked(tmp_path, "gcc", "-g")
    made = bytearray(path.read_bytes())
    with open(path, "rb") as file:
        elf = ELFFile(file)
        number = next(n for n, one in enumerate(elf.iter_sections()) if one.name == ".debug_str")
        header = elf["e_shoff"] + number * elf["e_shentsize"]
    struct.pack_into("<I", made, header + 4, 8)  # SHT_NOBITS
    struct.pack_into("<Q", made, header + 32, 1 << 40)
    path.write_bytes(made)
    with pytest.raises(ElfError, match="damaged"):
        first_line(path)


def test_strings_that_dwz_moved_away_are_done_without(tmp_path: Path) -> None:
    """DW_FORM_GNU_strp_alt, 0x1f21, in place of the directory's DW_FORM_line_strp."""
    from elftools.elf.elffile import ELFFile

    path = linked(tmp_path, "gcc", "-gdwarf-5")
    with open(path, "rb") as file:
        section = ELFFile(file).get_section_by_name(".debug_abbrev")
        start, table = section["sh_offset"], section.data()
    comp_dir = table.index(b"\x1b\x1f")
    # One byte more: the form of what follows, DW_AT_low_pc or DW_AT_ranges, stays.
    made = bytearray(path.read_bytes())
    made[start : start + len(table)] = table[:comp_dir] + b"\x1b\xa1\x3e" + table[comp_dir + 2 : -1]
    path.write_bytes(made)
    found = first_line(path)
    assert found is None or found.line > 0
