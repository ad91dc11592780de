"""The system call layer, against the kernel's published layout and numbers."""

from __future__ import annotations

import errno
import os
import select
import struct
import subprocess
import sys
from array import array

import pytest

from ksym_plugin.kernel import syscalls
from ksym_plugin.kernel.syscalls import Ticker
from ksym_plugin.timeline.errors import SourceError


@pytest.mark.parametrize(
    ("machine", "numbers"),
    [
        ("x86_64", (321, 298)),
        ("aarch64", (280, 241)),
        ("riscv64", (280, 241)),
        ("s390x", (351, 331)),
        ("ppc64le", (361, 319)),
        ("armv7l", (386, 364)),
    ],
)
def test_numbers_are_those_of_the_kernels_tables(machine, numbers):
    assert syscalls.numbers_for(machine) == numbers


def test_a_32_bit_interpreter_uses_the_32_bit_table():
    assert syscalls.numbers_for("x86_64", True) == syscalls.numbers_for("i686")
    assert syscalls.numbers_for("aarch64", True) == syscalls.numbers_for("armv7l")


def test_an_unknown_machine_is_an_error_with_a_remedy():
    with pytest.raises(SourceError) as caught:
        syscalls.numbers_for("vax")
    assert "vax" in caught.value.problem
    assert caught.value.remedy


@pytest.mark.skipif(sys.byteorder != "little", reason="offsets of flag bits are little-endian")
def test_attr_fields_lie_where_the_kernel_has_them():
    attr = syscalls.perf_event_attr(
        type=1,
        config=9,
        flags=syscalls.USE_CLOCKID | syscalls.KSYMBOL,
        clockid=4,
        wakeup_watermark=77,
        sample_type=5,
        sample_period=6,
        read_format=16,
    )
    assert len(attr) == 112
    assert struct.unpack_from("<II5Q", attr) == (1, 112, 9, 6, 5, 16, 1 << 25 | 1 << 29)
    assert struct.unpack_from("<I", attr, 48) == (77,)
    assert struct.unpack_from("<i", attr, 92) == (4,)
    assert sum(attr) == 1 + 112 + 9 + 6 + 5 + 16 + 2 + 32 + 77 + 4


def test_flags_are_mirrored_for_big_endian_kernels(monkeypatch):
    monkeypatch.setattr(sys, "byteorder", "big")
    attr = syscalls.perf_event_attr(type=0, config=0, flags=syscalls.DISABLED)
    assert struct.unpack_from("=Q", attr, 40) == (1 << 63,)


def test_a_failed_call_carries_the_kernels_errno():
    with pytest.raises(OSError) as caught:
        syscalls.bpf(0xFFFF, array("I", bytes(16)))
    # EINVAL where bpf(2) is allowed, EPERM where it is not, ENOSYS where there is none.
    assert caught.value.errno in (errno.EINVAL, errno.EPERM, errno.ENOSYS)
    with pytest.raises(OSError) as caught:
        syscalls.perf_event_open(bytes(112), -1, -1)
    assert caught.value.errno


def test_importing_it_does_not_load_ctypes():
    code = "import sys, ksym_plugin.kernel.syscalls; sys.exit('ctypes' in sys.modules)"
    root = os.path.dirname(os.path.dirname(os.path.abspath(syscalls.__file__)))
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": root}, check=False
    )
    assert done.returncode == 0


def wait(ticker: Ticker, seconds: float) -> bool:
    return bool(select.select([ticker.fd], [], [], seconds)[0])


def test_ticks_come_again_and_again_and_are_cleared_once_each() -> None:
    ticker = Ticker(0.05)
    try:
        assert not ticker.clear()
        for _ in range(3):
            assert wait(ticker, 5)
            assert ticker.clear()
            assert not ticker.clear()
    finally:
        ticker.close()
    ticker.close()


def test_a_tick_that_was_cleared_late_does_not_hide_the_next() -> None:
    ticker = Ticker(0.1)
    try:
        assert wait(ticker, 5)
        select.select([], [], [], 0.19)
        assert ticker.clear()
        # The next one is due within 0.1 s of whenever that was, and clear() must see it.
        assert wait(ticker, 5)
        assert ticker.clear()
    finally:
        ticker.close()
