"""Source lines of a kernel: each addr2line through ours against the other one alone."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ksym_plugin.kernel import dwarf
from ksym_plugin.kernel.dwarf import ImageLines
from ksym_plugin.kernel.elf import ElfError, ElfFile
from ksym_plugin.kernel.vmlinux import Image, open_lines
from ksym_plugin.timeline.errors import KsymError
from ksym_plugin.timeline.symbols import SourceLocation, Symbol
from tests.unit.elf_files import NOTYPE, TEXT, Sym, vmlinux

KASLR = 0x1234_0000
PROGRAMS = {name: shutil.which(name) for name in ("llvm-addr2line", "addr2line")}
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


def stand_in(folder: Path, code: str) -> None:
    """An addr2line of one's own; PATH is for the caller to set."""
    path = folder / "addr2line"
    path.write_text(f"#!/bin/sh\n{code}\n")
    path.chmod(0o755)


@pytest.fixture
def only(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for the only programs there are."""
    folder = tmp_path_factory.mktemp("bin")
    monkeypatch.setenv("PATH", f"{folder}")
    return folder


def first_line(path: Path) -> SourceLocation | None:
    lines = open_lines(Image(ElfFile(str(path)), TEXT + KASLR, None), [].append)
    try:
        return None if lines is None else lines.line(TEXT + KASLR)
    finally:
        if lines is not None:
            lines.close()


def place(told: str) -> tuple[str, str] | None:
    """What addr2line says alone, comparable."""
    file, line = told.split(" ")[0].rsplit(":", 1)
    return None if line in ("?", "0") else (os.path.realpath(file), line)


@pytest.mark.parametrize("program", PROGRAMS)
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
def test_names_as_nm_and_lines_as_the_other_addr2line(
    program: str, compiler: str, flags: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if None in PROGRAMS.values():
        pytest.skip("there are not both addr2lines")
    (other,) = (path for name, path in PROGRAMS.items() if name != program)
    path = linked(tmp_path, compiler, flags)
    image = Image(ElfFile(str(path)), TEXT + KASLR, None)
    names = [line.split() for line in output("nm", "-S", str(path)) if " T " in line]
    end = max(int(row[0], 16) + int(row[1], 16) for row in names if len(row) == 4)
    addresses = range(TEXT, end)
    wanted = output(str(other), "-e", str(path), text="\n".join(map(hex, addresses)))
    (tmp_path / program).symlink_to(str(PROGRAMS[program]))
    monkeypatch.setenv("PATH", str(tmp_path))
    lines = open_lines(image, pytest.fail)
    assert lines is not None
    found = [lines.line(address + KASLR) for address in addresses]
    lines.close()
    assert [line and (os.path.realpath(line.file), str(line.line)) for line in found] == [
        place(told) for told in wanted
    ]
    assert len(found) - found.count(None) > 50
    for row in names:
        start = int(row[0], 16)
        symbol = image.find(start + KASLR)
        assert isinstance(symbol, Symbol)
        if len(row) == 4:
            assert (symbol.name, symbol.end - symbol.start) == (row[3], int(row[1], 16))


def test_a_file_without_dwarf_has_no_lines(tmp_path: Path) -> None:
    path = tmp_path / "vmlinux"
    path.write_bytes(vmlinux([Sym("_text", TEXT, 0, NOTYPE), Sym("f", TEXT + 16, 16)]))
    said: list[str] = []
    assert open_lines(Image(ElfFile(str(path)), TEXT + KASLR, None), said.append) is None
    assert said == [f"{path} has no debug information (DWARF), so no line of the kernel is known"]


@settings(max_examples=30)
@given(data=st.data())
def test_damaged_dwarf_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    from elftools.elf.elffile import ELFFile

    folder = tmp_path_factory.getbasetemp() / "damaged-dwarf"
    if not folder.exists():
        folder.mkdir()
        linked(folder, "gcc", "-g")
    with open(folder / "vmlinux", "rb") as file:
        sections = list(ELFFile(file).iter_sections())
        parts = [part for part in sections if part.name.startswith(".debug_")]
    assert parts
    damaged = bytearray((folder / "vmlinux").read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        part = data.draw(st.sampled_from(parts))
        at = data.draw(st.integers(0, part["sh_size"] - 1))
        damaged[part["sh_offset"] + at] = data.draw(st.integers(0, 255))
    path = folder / "damaged"
    path.write_bytes(damaged)
    lines = ImageLines(str(path), KASLR)
    said = str(path)
    try:
        for address in range(TEXT, TEXT + 64, 8):
            found = lines.line(address + KASLR)
            assert found is None or found.line > 0
    except ElfError as error:
        said = str(error)
    lines.close()
    assert str(path) in said


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


def test_a_section_that_claims_more_than_the_file_has_is_read_or_refused(tmp_path: Path) -> None:
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
    with contextlib.suppress(ElfError):
        found = first_line(path)
        assert found is None or found.line > 0


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


# programs that are no addr2line, or one in trouble


def test_without_an_addr2line_the_package_is_named(only: Path) -> None:
    assert not list(only.iterdir())
    with pytest.raises(KsymError, match="need addr2line; install binutils"):
        ImageLines("vmlinux", 0).line(TEXT)


def test_llvm_s_is_preferred(only: Path) -> None:
    for name in PROGRAMS:
        stand_in(only, f'read asked; echo "$asked"; echo /{name}:7')
        (only / "addr2line").rename(only / f"{name}.made")
    for name in PROGRAMS:
        (only / f"{name}.made").rename(only / name)
    lines = ImageLines("vmlinux", 0)
    assert repr(lines.line(TEXT)) == "SourceLocation(/llvm-addr2line:7)"
    lines.close()


def test_it_has_little_memory_and_asks_no_server(
    only: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEBUGINFOD_URLS", "http://debug.invalid")
    stand_in(only, 'read asked; echo "$asked"; echo "<$DEBUGINFOD_URLS>:$(ulimit -d)"')
    lines = ImageLines("vmlinux", 0)
    line = lines.line(TEXT)
    lines.close()
    assert line is not None
    assert line.file == "<>" and 0 < line.line << 10 <= 2 << 30


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("exit 0", "gives no answer"),
        ("exec /bin/sleep 60", "takes too long"),
        ("while :; do echo; done", "gives no answer"),
        ("while :; do printf 0123456789; done", "gives no answer"),
        ("read asked; echo 0x1; echo a.c:1", "gives no answer"),
        ('read asked; echo "$asked"; echo a.c', "gives no answer"),
        ('read asked; echo "$asked"; echo a.c:-', "gives no answer"),
        ('read asked; printf "$asked\\na.c:1\\nmore\\n"', "gives no answer"),
        ("kill -SEGV $$", "gives no answer"),
    ],
)
def test_a_program_that_fails_is_said_and_ended(
    code: str, said: str, only: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dwarf, "_SECONDS", 1.0 if "long" in said else 60.0)
    stand_in(only, code)
    with pytest.raises(ElfError, match=f"addr2line {said} about vmlinux"):
        ImageLines("vmlinux", 0).line(TEXT)
    told: list[str] = []
    lines = ImageLines("vmlinux", 0, told.append)
    assert [lines.line(TEXT + at) for at in range(3)] == [None] * 3
    assert len(told) == 1 and told[0].startswith("no more source lines of the kernel: addr2line")
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


def test_what_cannot_be_run_is_said(only: Path) -> None:
    stand_in(only, "")
    (only / "addr2line").write_bytes(b"\x7fELF")
    with pytest.raises(KsymError, match="cannot be run"):
        ImageLines("vmlinux", 0).line(TEXT)


def test_a_line_is_asked_for_once(only: Path) -> None:
    stand_in(only, 'at=0; while read asked; do at=$((at + 1)); echo "$asked"; echo a.c:$at; done')
    lines = ImageLines("vmlinux", KASLR)
    found = [lines.line(address) for address in (TEXT + KASLR, TEXT + KASLR + 1, TEXT + KASLR)]
    assert [line and line.line for line in found] == [1, 2, 1]
    assert lines.line(KASLR - 1) is None
    lines.close()


OWNER = """
import signal, sys
sys.path[:] = sys.argv[2:]
from ksym_plugin.kernel.dwarf import ImageLines
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
try:
    print(ImageLines("vmlinux", 0).line(int(sys.argv[1])))
except Exception as error:
    print(error)
"""


def owner(**more: object) -> subprocess.Popen[bytes]:
    words = [sys.executable, "-c", OWNER, str(TEXT), *sys.path]
    return subprocess.Popen(words, stdout=subprocess.PIPE, **more)  # type: ignore[call-overload]


def test_its_end_does_not_end_a_process_that_minds_sigpipe(only: Path) -> None:
    stand_in(only, "exit 0")
    process = owner()
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert b"gives no answer" in out


def test_it_ends_with_its_owner(only: Path, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    # It neither reads nor writes any more, and holds the pipe as long as it runs.
    stand_in(only, f"exec 9>{pipe}; echo >&9; exec /bin/sleep 600")
    process = owner()
    with open(pipe, "rb") as held:
        assert held.readline() == b"\n"
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=60)
        began = time.monotonic()
        assert held.read() == b""
    assert time.monotonic() - began < 300
