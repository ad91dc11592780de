"""``ksym resolve --vmlinux``: an image by hand, with a history and a kernel to match or not."""

from __future__ import annotations

import json

import pytest

from ksym_plugin.history.writer import HistoryWriter
from ksym_plugin.kernel import identity
from tests.unit.cli.test_cli import Machine, ksym, machine, place, refused
from tests.unit.elf_files import NOTYPE, TEXT, Sym, vmlinux

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["machine", "place"]
KASLR = 0x1234_0000
THERE = TEXT + KASLR + 0x1000
HIDDEN = b"0000000000000000 T _text\n"


@pytest.fixture(autouse=True)
def image(place: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(identity, "build_id", lambda: "1234")
    monkeypatch.delenv("DEBUGINFOD_URLS", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(place / "cache"))
    symbols = [Sym("_text", TEXT, 0, NOTYPE), Sym("do_work", TEXT + 0x1000, 0x20)]
    (place / "vmlinux").write_bytes(vmlinux(symbols))
    return "vmlinux"


def record(text_start: int | None) -> None:
    writer = HistoryWriter("ksym.db", "made up", 1, text_start)
    writer.close(1000)


def names(*words: str) -> list[str | None]:
    result = ksym("resolve", "--json", *words)
    assert result.exit_code == 0, result.stderr
    return [entry["name"] for entry in json.loads(result.stdout)]


WORDS = ("--at", "0.0000005", "--clock", "monotonic", f"{THERE + 4:x}", f"{THERE + 0x30:x}")


def test_where_kallsyms_is_hidden_the_history_s_offset_does(
    machine: Machine,
) -> None:
    machine.kallsyms(HIDDEN)
    record(TEXT + KASLR)
    assert names(*WORDS) == [None, None]
    assert names("--vmlinux", "vmlinux", *WORDS) == ["do_work", None]


def test_a_history_of_another_boot_has_its_own_offset(machine: Machine) -> None:
    record(TEXT + KASLR)
    machine.boot("another boot")
    assert names("--vmlinux", "vmlinux", *WORDS) == ["do_work", None]


def test_another_build_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "build_id", lambda: "99")
    record(TEXT + KASLR)
    refused(ksym("resolve", "--vmlinux", "vmlinux", *WORDS), "another kernel", "1234", "99")


def test_without_an_offset_nothing_is_guessed(machine: Machine) -> None:
    machine.kallsyms(HIDDEN)
    record(None)
    result = ksym("resolve", "--vmlinux", "vmlinux", *WORDS)
    assert result.exit_code == 1
    assert "not known" in result.stderr and result.stdout == ""


def test_lines_need_a_file_or_a_server() -> None:
    record(TEXT + KASLR)
    refused(ksym("resolve", "--lines", *WORDS), "--vmlinux", "DEBUGINFOD_URLS")


def test_that_a_file_s_kernel_cannot_be_checked_is_said(
    place: Path,
) -> None:
    record(TEXT + KASLR)
    assert "build id" not in ksym("resolve", "--vmlinux", "vmlinux", hex(THERE)).stderr
    symbols = [Sym("_text", TEXT, 0, NOTYPE), Sym("do_work", TEXT + 0x1000, 0x20)]
    (place / "bare").write_bytes(vmlinux(symbols, build_id=b""))
    messages = ksym("resolve", "--vmlinux", "bare", hex(THERE)).stderr
    assert "no telling whether bare is of this very kernel" in messages
