"""Where the kernel image begins, from the first lines of kallsyms."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ksym_plugin.kernel import identity
from ksym_plugin.kernel.kallsyms import Kallsyms

TEXT, STEXT = 0xFFFF_FFFF_8100_0000, 0xFFFF_FFFF_8100_0010
PER_CPU = "0000000000000000 A fixed_percpu_data\n0000000000001000 A cpu_debug_store\n"
REST = "ffffffff81000110 t early_setup_idt\nffffffff82200000 T _etext\n"


def start_of(tmp_path: Path, content: str | bytes) -> int | None:
    path = tmp_path / "kallsyms"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return identity.start(str(path))


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
def test_start(tmp_path: Path, lines: str, start: int | None) -> None:
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
    assert identity.start(str(tmp_path / "none")) is None
    assert identity.start(str(tmp_path)) is None


def test_this_kernel() -> None:
    if not os.path.exists("/proc/kallsyms"):
        pytest.skip("no /proc/kallsyms here")
    assert identity.start() == Kallsyms.load().text_start
