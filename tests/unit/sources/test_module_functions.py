"""Which functions are in a module: by its file, or by the lines of kallsyms."""

from __future__ import annotations

import gzip
import lzma
import os
import select
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ksym_plugin.kernel import elf, kallsyms
from ksym_plugin.kernel.elf import ElfError
from ksym_plugin.sources import modules
from ksym_plugin.sources.modules import FunctionReader
from ksym_plugin.timeline.packed import PackedFunctions
from tests.unit.elf_files import LOCAL, WEAK, Sym, vmlinux
from tests.unit.sources import workers

BASE = 0xFFFF_FFFF_C100_0000
SECTIONS = {".text": BASE, ".init.text": BASE + 0x8000}
SYMBOLS = [
    Sym("cleanup_module", 0x200, 0x20),
    Sym("m_exit", 0x200, 0x20, binding=LOCAL),
    Sym("first", 0x0, 0x30),
    Sym("weak_first", 0x0, 0x30, binding=WEAK),
    Sym("assembly", 0x40),
    Sym("second", 0x80, 0x100),
]
TABLE = f"""\
ffffffff81000000 T _text
ffffffff81000010 T core_function
{BASE:016x} t __pfx_first\t[m]
{BASE + 0x10:016x} t first\t[m]
{BASE + 0x2000:016x} d data\t[m]
{BASE + 0x80:016x} T second\t[m]
{BASE + 0x200:016x} t m_exit\t[m]
{BASE + 0x200:016x} T cleanup_module\t[m]
{BASE + 0x10FF0:016x} t lonely\t[other_module]
ffffffffc2000000 t bpf_prog_0123456789abcdef_p\t[bpf]
{BASE + 0x40:016x} t not_read\t[m]
"""


def laid_out(folder: Path, name: str, data: bytes) -> Path:
    """A module's file as depmod knows it."""
    tree = folder / "6.0-test"
    (tree / "kernel/lib").mkdir(parents=True)
    (tree / "kernel/lib" / name).write_bytes(data)
    (tree / "modules.dep").write_text(
        f"kernel/fs/other.ko: kernel/lib/{name}\nkernel/lib/{name}:\n"
    )
    return tree / "kernel/lib" / name


@pytest.mark.parametrize(
    ("name", "pack"),
    [("my-mod.ko", bytes), ("my-mod.ko.xz", lzma.compress), ("my-mod.ko.gz", gzip.compress)],
)
def test_functions_are_those_of_the_file_at_its_sections(
    tmp_path: Path, name: str, pack: object
) -> None:
    pytest.importorskip("elftools")
    file = laid_out(tmp_path, name, pack(vmlinux(SYMBOLS, 0x400, type=1)))  # type: ignore[operator]
    path = elf.module_path("my_mod", "6.0-test", str(tmp_path))
    assert path == str(file)
    assert path is not None
    rows = elf.read_module(path, SECTIONS, "1234").functions()
    assert rows == [
        (BASE, 0x30, "first"),
        (BASE, 0x30, "weak_first"),
        (BASE + 0x40, 0x40, "assembly"),
        (BASE + 0x80, 0x100, "second"),
        (BASE + 0x200, 0x20, "cleanup_module"),
        (BASE + 0x200, 0x20, "m_exit"),
    ]


def test_a_file_is_used_only_if_it_is_what_was_loaded(tmp_path: Path) -> None:
    pytest.importorskip("elftools")
    path = str(laid_out(tmp_path, "m.ko", vmlinux(SYMBOLS, 0x400, type=1)))
    for build_id in ("123456", None):
        with pytest.raises(ElfError, match="not what was loaded"):
            elf.read_module(path, SECTIONS, build_id)


def test_init_code_is_told_apart() -> None:
    rows = [(BASE + at, 8, str(at)) for at in (0, 0x1000, 0x7FF8, 0x8000, 0x8100, 0x9000)]
    sections = {**SECTIONS, ".data": BASE + 0x2000, ".exit.text": BASE + 0x9000}
    stays, goes = modules.split_init(rows, sections)
    assert [name for *_, name in goes] == [str(0x8000), str(0x8100)]
    assert sorted(stays + goes) == rows


@pytest.mark.parametrize("name", ["m.ko.xz", "m.ko.gz", "m.ko.zst", "m.ko.lz4", "m.ko"])
def test_what_cannot_be_unpacked_is_an_error(tmp_path: Path, name: str) -> None:
    pytest.importorskip("elftools")
    path = str(laid_out(tmp_path, name, b"neither packed nor a module"))
    with pytest.raises(ElfError):
        elf.read_module(path, SECTIONS, "1234")


def test_a_module_from_elsewhere_has_no_file(tmp_path: Path) -> None:
    laid_out(tmp_path, "m.ko", b"")
    assert elf.module_path("own", "6.0-test", str(tmp_path)) is None
    assert elf.module_path("m", "6.1-test", str(tmp_path)) is None


def functions_in(folder: Path, table: str) -> dict:
    path = folder / "kallsyms"
    path.write_text(table)
    return kallsyms.functions_by_module(str(path), str(folder / "modules"))


def test_kallsyms_tells_up_to_the_first_line_of_bpf(tmp_path: Path) -> None:
    functions = functions_in(tmp_path, TABLE)
    assert functions["m"] == [
        (BASE, 0x10, "__pfx_first"),
        (BASE + 0x10, 0x70, "first"),
        (BASE + 0x80, 0x180, "second"),
        # Nothing of this module's code follows: not more than its page.
        (BASE + 0x200, 0xE00, "cleanup_module"),
        (BASE + 0x200, 0xE00, "m_exit"),
    ]
    assert functions["other_module"] == [(BASE + 0x10FF0, 0x10, "lonely")]
    assert set(functions) == {"m", "other_module"}


@pytest.mark.parametrize("cut", range(30, len(TABLE), 41))
def test_it_tells_the_same_however_it_is_cut(cut: int, tmp_path: Path) -> None:
    """The text is read in blocks of 128 KiB: here a block ends after so much of the table."""
    filler = "ffffffff81000010 T " + "x" * ((1 << 17) - cut - 20) + "\n"
    assert functions_in(tmp_path, filler + TABLE) == functions_in(tmp_path, TABLE)


def question(name: str, base: int = BASE, size: int = 0x4000) -> modules.Question:
    return name, base, size, {}, None


def answered(tmp_path: Path, *questions: modules.Question, table: str = TABLE) -> list:
    path, listing = tmp_path / "kallsyms", tmp_path / "modules"
    path.write_text(table)
    return modules.answers(list(questions), "6.0-test", str(path), str(listing))


def test_without_a_file_kallsyms_answers_in_order(tmp_path: Path) -> None:
    before = time.monotonic_ns()
    lost, there = answered(tmp_path, question("gone"), question("m"))
    when, (start, length, data), init = there
    assert init is None
    assert (start, length) == (BASE, 0x1000)
    assert before < when < time.monotonic_ns()
    assert PackedFunctions(data).names(0x205) == ["cleanup_module", "m_exit"]
    assert lost is None


def test_init_functions_that_were_freed_are_not_its(tmp_path: Path) -> None:
    """ftrace's names of them follow all modules, or the module itself where it is the last."""
    freed = f"{BASE + 0x3_0000:016x} t init_module\t[m]\n{BASE - 0x2000:016x} t helper\t[m]\n"
    module, bpf = TABLE.split("ffffffffc2000000")
    bpf = "ffffffffc2000000" + bpf
    ((_, code, _),) = answered(tmp_path, question("m"))
    (tmp_path / "modules").write_text(f"m 16384 0 - Live {BASE:#x}\n")
    lonely = next(line for line in module.splitlines(True) if "lonely" in line)
    for table in (module + freed + bpf, module.replace(lonely, "") + freed + bpf):
        ((_, found, init),) = answered(tmp_path, question("m"), table=table)
        assert init is None
        assert found[:1] == code[:1]
        names = [PackedFunctions(found[2]).names(at)[0] for at in (0, 0x15, 0x80, 0x200)]
        assert names == ["__pfx_first", "first", "second", "cleanup_module"]


@pytest.mark.parametrize(("base", "size"), [(BASE + 0x1000, 0x4000), (BASE, 0x800)])
def test_functions_of_another_place_are_not_its(tmp_path: Path, base: int, size: int) -> None:
    """It was loaded anew while kallsyms was read."""
    assert answered(tmp_path, question("m", base, size)) == [None]


def test_an_unreadable_table_tells_no_functions(tmp_path: Path) -> None:
    assert modules.answers([question("m")], "x", str(tmp_path / "none")) == [None]


def wait(reader: FunctionReader) -> list:
    give_up = time.monotonic() + 30
    while time.monotonic() < give_up:
        found = reader.read()
        if found is not None:
            return found
        time.sleep(0.005)
    raise AssertionError("no answer")


def test_the_process_answers_and_ends() -> None:
    reader = FunctionReader()
    assert reader.fileno() == -1
    reader.ask([question("no_such_module_here")] * 2)
    assert reader.fileno() >= 0
    assert not os.get_inheritable(reader.fileno())
    answers = wait(reader)
    assert answers == [None, None]
    assert reader.fileno() == -1
    reader.close()


@pytest.mark.parametrize(
    "function",
    [workers.ends, workers.is_refused, workers.dies_within_a_message, workers.never_ends],
)
def test_a_process_that_fails_or_hangs_has_no_answers(
    function: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(modules, "answer", function)
    monkeypatch.setattr(modules, "_LIMIT", 0.2 if function is workers.never_ends else 100)
    reader = FunctionReader()
    reader.ask([question("m")])
    assert wait(reader) == []
    assert reader.fileno() == -1
    with pytest.raises(ChildProcessError):  # There is no child, running or not.
        os.waitpid(-1, os.WNOHANG)


def test_what_a_process_runs_ends_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modules, "answer", workers.runs_a_program)
    reader = FunctionReader()
    reader.ask([])
    select.select([reader], [], [], 10)
    assert reader._worker is not None
    pid = reader._worker.receive(10)
    assert os.path.exists(f"/proc/{pid}")
    reader.close()
    give_up = time.monotonic() + 10
    while _is_at_work(pid) and time.monotonic() < give_up:
        time.sleep(0.01)
    assert not _is_at_work(pid)


def _is_at_work(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
