"""ELF files against nm-like linear searches."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ksym_plugin.kernel.elf import ElfError, ElfFile
from ksym_plugin.kernel.kallsyms import Kallsyms
from ksym_plugin.kernel.vmlinux import Image
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

#: Whole 2 MB, as arm64 and x86 have it.
KASLR = 0x1240_0000
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
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
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


BOTH = {"_text": TEXT, "_stext": TEXT + 0x10000}


@pytest.mark.parametrize(
    ("linked", "kernel", "offset"),
    [
        ({"_stext": TEXT}, {"_stext": TEXT + 0x1C20_0000}, 0x1C20_0000),
        ({"_stext": TEXT}, {"_text": TEXT + KASLR}, None),
        ({"_text": TEXT}, {"_stext": TEXT + KASLR}, None),
        (BOTH, {"_stext": TEXT + 0x10000 + KASLR}, KASLR),
        (BOTH, {"_text": TEXT + KASLR}, KASLR),
        (BOTH, {"_text": TEXT + KASLR, "_stext": TEXT + 0x10000 + KASLR}, KASLR),
        (BOTH, {"_text": TEXT + KASLR, "_stext": TEXT + 0x20000 + KASLR}, None),
        ({"_stext": TEXT}, {}, None),
        (BOTH, {"_text": 0, "_stext": 0}, None),
        ({"_text": TEXT}, {"_text": TEXT - 0x100_0000}, None),
        (BOTH, {"_text": TEXT - 0x20_0000}, None),
    ],
)
@pytest.mark.parametrize("is_cached", [False, True])
def test_the_offset_is_the_distance_of_one_symbol(
    tmp_path: Path,
    linked: dict[str, int],
    kernel: dict[str, int],
    offset: int | None,
    is_cached: bool,
) -> None:
    path = tmp_path / "vmlinux"
    path.write_bytes(vmlinux([Sym(name, at, 0, NOTYPE) for name, at in linked.items()]))
    os.utime(path, (1, 1))
    file = ElfFile.cached(str(path)) if is_cached else ElfFile(str(path))
    lines = "".join(f"{at:016x} T {name}\n" for name, at in kernel.items())
    table = Kallsyms.parse((lines + f"{'0' * 16} t other\n").encode())
    if offset is None:
        with pytest.raises(ElfError, match="not known; read /proc/kallsyms as root"):
            Image(file, table.text_start, None, table)
    else:
        assert Image(file, table.text_start, None, table).offset == offset


@pytest.mark.parametrize(
    ("linked", "start", "offset"),
    [
        # On arm64 KASLR moves a kernel by 64 KB too, which is how far these are apart.
        (BOTH, TEXT + KASLR, None),
        (BOTH, TEXT + 0x10000 + KASLR, None),
        (BOTH, TEXT + 0x8000 + KASLR, None),
        (BOTH, TEXT - 0x20_0000, None),
        ({"_stext": TEXT}, TEXT + KASLR, None),
        ({"_text": TEXT}, TEXT + 0x4000, 0x4000),
        ({"_text": TEXT, "_stext": TEXT}, TEXT + 0x4000, 0x4000),
        ({}, TEXT, None),
    ],
)
def test_where_a_recording_does_not_say_which_symbol_it_is(
    tmp_path: Path, linked: dict[str, int], start: int, offset: int | None
) -> None:
    path = tmp_path / "vmlinux"
    path.write_bytes(vmlinux([Sym(name, at, 0, NOTYPE) for name, at in linked.items()]))
    if offset is None:
        with pytest.raises(ElfError, match="not known"):
            Image(ElfFile(str(path)), start, None)
    else:
        assert Image(ElfFile(str(path)), start, None).offset == offset


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
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
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
