"""Inlined functions by addr2line, here a stand-in that says what it was asked."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from ksym_plugin.perf import text
from ksym_plugin.perf.fold import Inliner
from tests.unit.texts import folded

#: Prints what binutils 2.40 prints: address, then function and place of each, innermost first.
ADDR2LINE = """#!/bin/sh
echo "$@" >> "$ASKED"
case $2 in
0x401136|0x1136) printf '0x1136\\ninner\\na.c:3\\nouter(int)\\na.c:9 (discriminator 2)\\n' ;;
*) printf '%s\\n??\\n??:0\\n' "$2" ;;
esac
"""
#: Symbols of other files have no address, and any name.
NM = "#!/bin/sh\nprintf '0000000000001130 T main\\n%17sU puts\\n%17sU a b\\n' '' ''\n"


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, program in (("addr2line", ADDR2LINE), ("nm", NM)):
        path = tmp_path / name
        path.write_text(program)
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("ASKED", str(tmp_path / "asked"))
    return tmp_path / "asked"


def frame(address: str, symbol: str, file: object) -> bytes:
    return f"\t{address:>16} {symbol} ({file})".encode()


def expanded(line: bytes, context: bool = False) -> bytes:
    found = text.frame(line)
    assert found is not None
    return Inliner(context).expand(found)


def test_functions_come_outermost_first(asked: Path) -> None:
    line = frame("401136", "main+0x6", __file__)
    assert expanded(line) == b"outer(int);inner"
    assert expanded(line, context=True) == b"outer(int):a.c:9;inner:a.c:3"
    assert asked.read_text().splitlines()[0] == f"-a 0x401136 -e {__file__} -i -f -s -C"


def test_an_address_of_the_process_goes_by_its_symbol(asked: Path) -> None:
    assert expanded(frame("55550000bbbb", "main+0x6", __file__)) == b"outer(int);inner"
    assert expanded(frame("55550000bbbb", "other+0x6", __file__)) == b""
    assert expanded(frame("55550000bbbb", "main", __file__)) == b""


@pytest.mark.parametrize(
    "file", ["/does/not/exist", "[vdso]", "/tmp/perf-7.map", "/tmp", "-x", "a\0b", "; touch x"]
)
def test_what_is_no_file_is_not_asked_about(asked: Path, file: str) -> None:
    assert expanded(frame("401136", "main+0x6", file)) == b""
    assert not asked.exists()


def test_folding_asks_once_for_each_line(asked: Path) -> None:
    sample = b"t 1 5.0: 1 e: \n" + frame("401136", "main+0x6", __file__) + b"\n\n"
    unknown = b"t 1 5.0: 1 e: \n" + frame("5", "f(int)+0x6", __file__) + b"\n\n"
    assert folded(sample * 3 + unknown, inline=True) == {"t;outer(int);inner": 3, "t;f": 1}
    assert len(asked.read_text().splitlines()) == 2
    assert folded(sample, inline=True, context=True) == {"t;outer(int):a.c:9;inner:a.c:3": 1}


@pytest.mark.skipif(
    not (shutil.which("gcc") and shutil.which("addr2line")), reason="there is no gcc with binutils"
)
def test_a_real_program(tmp_path: Path) -> None:
    source, program = tmp_path / "a.c", tmp_path / "a.out"
    source.write_text(
        "volatile int sink;\n"
        "static inline __attribute__((always_inline)) void inner(int n) { sink = n; }\n"
        "void outer(int n) { inner(n); }\nint main(void) { outer(3); return 0; }\n"
    )
    command = ["gcc", "-g", "-O1", "-fno-ipa-icf", "-o", program, source]
    subprocess.run(command, check=True, capture_output=True)
    symbols = subprocess.run(["nm", program], check=True, capture_output=True).stdout.split(b"\n")
    (start,) = [int(line.split()[0], 16) for line in symbols if line.endswith(b" T outer")]
    found = {expanded(frame(f"{start + at:x}", f"outer+{at:#x}", program)) for at in range(12)}
    assert b"outer;inner" in found
