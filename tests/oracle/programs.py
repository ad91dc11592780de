"""Small BPF programs that burn CPU, assembled by hand; and the BTF that names functions.

The body is straight multiply-and-xor code inside a bounded loop, so nearly every timer
sample that hits a run lands in the program and not in the kernel around it.
"""

from __future__ import annotations

import os
import struct

from tests.oracle import rawbpf

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

_MOV, _MUL, _XOR, _SUB, _RSH = 0xB7, 0x27, 0xA7, 0x17, 0x77
_MOV_REG, _JNE, _CALL, _EXIT, _LD_IMM64, _LDX_W, _ST_W = 0xBF, 0x55, 0x85, 0x95, 0x18, 0x61, 0x62
_PSEUDO_MAP_FD, _PSEUDO_MAP_VALUE, _PSEUDO_CALL, _PSEUDO_FUNC = 1, 2, 1, 4
_TAIL_CALL, _BPF_LOOP = 12, 181
_LOOPS = 24


def insn(code: int, dst: int = 0, src: int = 0, off: int = 0, imm: int = 0) -> bytes:
    return struct.pack("<BBhi", code, dst | src << 4, off, imm)


def _wide(dst: int, src: int, low: int, high: int = 0) -> bytes:
    return insn(_LD_IMM64, dst, src, 0, low) + insn(0, imm=high)


def burn(seed: int, work: int = 200, loops: int = _LOOPS) -> bytes:
    """``work`` instructions, ``loops`` times; uses r6 and r7; ``seed`` changes the tag."""
    steps = (
        insn(_MUL, 6, imm=seed * 2 + 3) if step % 4 else insn(_XOR, 6, imm=seed + step)
        for step in range(work)
    )
    body = b"".join(steps) + insn(_SUB, 7, imm=1)
    back = -(len(body) // 8 + 1)
    return insn(_MOV, 6, imm=seed) + insn(_MOV, 7, imm=loops) + body + insn(_JNE, 7, off=back)


def _finish(result: int = 0) -> bytes:
    return insn(_MOV, 0, imm=result) + insn(_EXIT)


def plain(name: str, seed: int, work: int = 200, prog_type: int = rawbpf.SOCKET_FILTER) -> int:
    """Load one function; kallsyms calls it ``bpf_prog_<tag>_<name>``."""
    return rawbpf.load(burn(seed, work) + _finish(), name, prog_type)


def with_subprograms(
    name: str, functions: Sequence[str], seed: int, work: int = 200, main_work: int | None = None
) -> int:
    """Load a main function that burns and then calls each of the others, which burn too."""
    count = len(functions) - 1
    prologue = burn(seed, work if main_work is None else main_work)
    epilogue = _finish()
    bodies = [burn(seed + 1 + index, work) + _finish() for index in range(count)]
    starts = [0]
    at = len(prologue) // 8 + count + len(epilogue) // 8
    for body in bodies:
        starts.append(at)
        at += len(body) // 8
    first = len(prologue) // 8
    calls = b"".join(
        insn(_CALL, 0, _PSEUDO_CALL, 0, starts[index + 1] - (first + index + 1))
        for index in range(count)
    )
    code = prologue + calls + epilogue + b"".join(bodies)
    return _load_named(code, name, functions, starts)


def with_lines(name: str, function: str, seed: int, rows: int = 60) -> int:
    """Load one function whose source, as it claims, has ``rows`` lines from line 10 on."""
    strings = [b"/src/oracle.bpf.c", *(b"hash = mix(hash, %d);" % row for row in range(rows))]
    blob, first = _with_strings(btf([function]), strings)
    offsets = [first]
    for string in strings:
        offsets.append(offsets[-1] + len(string) + 1)
    info = b"".join(
        struct.pack("<IIII", 2 * row, first, offsets[row + 1], (10 + row) << 10 | 5)
        for row in range(rows)
    )
    btf_fd = rawbpf.load_btf(blob)
    try:
        func_info = struct.pack("<II", 0, _FIRST_FUNC)
        code = burn(seed) + _finish()
        return rawbpf.load(code, name, btf_fd=btf_fd, func_info=func_info, line_info=info)
    finally:
        os.close(btf_fd)


def _with_strings(blob: bytes, strings: Sequence[bytes]) -> tuple[bytes, int]:
    """BTF with more strings, and where the first of these is."""
    *head, length = struct.unpack_from("<HBBIIIII", blob)
    more = b"".join(string + b"\0" for string in strings)
    header = struct.pack("<HBBIIIII", *head, length + len(more))
    return header + blob[len(header) :] + more, length


def _load_named(code: bytes, name: str, functions: Sequence[str], starts: Sequence[int]) -> int:
    btf_fd = rawbpf.load_btf(btf(functions))
    try:
        info = b"".join(
            struct.pack("<II", start, _FIRST_FUNC + index) for index, start in enumerate(starts)
        )
        return rawbpf.load(code, name, btf_fd=btf_fd, func_info=info)
    finally:
        os.close(btf_fd)


# Types 1 to 4 of every blob built below; the functions follow.
_FIRST_FUNC = 5


def btf(functions: Sequence[str]) -> bytes:
    """BTF with ``static int f(void *)`` for the first name and ``(int, void *)`` for others.

    The second shape is what bpf_loop wants of its callback; a plain call does not care.
    """
    strings = b"\0int\0i\0ctx\0"
    types = struct.pack("<IIII", 1, 1 << 24, 4, 1 << 24 | 32)  # 1: int
    types += struct.pack("<III", 0, 2 << 24, 0)  # 2: void *
    types += struct.pack("<IIIII", 0, 13 << 24 | 1, 1, 7, 2)  # 3: int (void *)
    types += struct.pack("<IIIIIII", 0, 13 << 24 | 2, 1, 5, 1, 7, 2)  # 4: int (int, void *)
    for index, function in enumerate(functions):
        types += struct.pack("<III", len(strings), 12 << 24, 4 if index else 3)
        strings += function.encode() + b"\0"
    header = struct.pack("<HBBIIIII", 0xEB9F, 1, 0, 24, 0, len(types), len(types), len(strings))
    return header + types + strings


def long_runner(name: str, functions: Sequence[str], seed: int, flag_fd: int, rounds: int) -> int:
    """One run of it takes ``rounds`` bodies, and first sets element 0 of ``flag_fd`` to 1."""
    main = _wide(1, _PSEUDO_MAP_VALUE, flag_fd) + insn(_ST_W, 1, imm=1)
    main += insn(_MOV, 1, imm=rounds)
    at = len(main) // 8
    main_length = at + 2 + 3 + 2
    main += _wide(2, _PSEUDO_FUNC, main_length - at - 1)
    main += insn(_MOV, 3) + insn(_MOV, 4) + insn(_CALL, imm=_BPF_LOOP) + _finish()
    callback = burn(seed) + _finish()
    return _load_named(main + callback, name, functions, [0, main_length])


def tail_caller(name: str, array_fd: int) -> int:
    """Jump to element 0 of a program array.

    The index is unknown to the verifier: a constant one would be patched into a direct
    jump, and deleting the element would then wait for the run to end.
    """
    code = insn(_LDX_W, 3, 1) + insn(_RSH, 3, imm=31)
    code += _wide(2, _PSEUDO_MAP_FD, array_fd) + insn(_CALL, imm=_TAIL_CALL) + _finish()
    return rawbpf.load(code, name)
