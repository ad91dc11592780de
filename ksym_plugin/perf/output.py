"""What the handler prints: perf script's own text, or folded stacks.

Both are fed entries of a callchain, leaf first, as (address, name, offset, dso); an
unknown name is empty, an unknown offset None.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Final, TextIO

    Entry = tuple[int, str, "int | None", str]

#: perf's sign that samples carry no CPU.
_NO_CPU: Final = 0xFFFF_FFFF
_FLUSH: Final = 1 << 16
_UNKNOWN: Final = "[unknown]"


class TextOutput:
    """``perf script``'s default text. BPF frames have ``([bpf])`` for their dso, which
    the readers of this format take for the kernel's."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._parts: list[str] = []
        self._size = 0

    def sample(self, event: dict[str, Any], entries: list[Entry], kernel: set[int]) -> None:
        parts = [_header(event)]
        for address, name, offset, dso in entries:
            if not name:
                parts.append(f"\t{address:16x} {_UNKNOWN} ({dso or _UNKNOWN})\n")
            elif offset is None:
                parts.append(f"\t{address:16x} {name} ({dso})\n")
            else:
                parts.append(f"\t{address:16x} {name}+{offset:#x} ({dso})\n")
        parts.append("\n")
        text = "".join(parts)
        self._parts.append(text)
        self._size += len(text)
        if self._size >= _FLUSH:
            self.flush()

    def flush(self) -> None:
        self._stream.write("".join(self._parts))
        self._parts.clear()
        self._size = 0

    def close(self) -> None:
        self.flush()


class FoldedOutput:
    """Folded stacks: ``comm;root;…;leaf count``, kernel frames ending in ``_[k]``."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._stacks: dict[str, int] = {}
        self._names: dict[tuple[str, str, bool], str] = {}

    def sample(self, event: dict[str, Any], entries: list[Entry], kernel: set[int]) -> None:
        names = self._names
        stack = [str(event.get("comm") or "").replace(";", ":")]
        for address, name, _, dso in reversed(entries):
            key = (name, dso, address in kernel)
            text = names.get(key)
            if text is None:
                text = names[key] = _folded(*key)
            stack.append(text)
        line = ";".join(stack)
        self._stacks[line] = self._stacks.get(line, 0) + 1

    def close(self) -> None:
        lines = [f"{stack} {count}\n" for stack, count in sorted(self._stacks.items())]
        self._stream.write("".join(lines))


def _folded(name: str, dso: str, in_kernel: bool) -> str:
    name = name or f"[{dso.rpartition('/')[2].strip('[]') or 'unknown'}]"
    name = name.replace(";", ":").replace("\n", " ")
    return name + "_[k]" if in_kernel else name


def _header(event: dict[str, Any]) -> str:
    sample = event.get("sample") or {}
    seconds, nanoseconds = divmod(int(sample.get("time") or 0), 1_000_000_000)
    cpu = sample.get("cpu", _NO_CPU)
    place = "" if cpu == _NO_CPU else f" [{cpu:03d}]"
    # perf aligns the name of the task only where no callchain follows.
    comm = str(event.get("comm") or ":-1")
    comm = comm if event.get("callchain") else comm.rjust(16)
    return (
        f"{comm} {sample.get('tid', -1):7d}{place} {seconds:5d}.{nanoseconds // 1000:06d}: "
        f"{sample.get('period', 1):10d} {event.get('ev_name', '')}: \n"
    )


def to_stderr(line: str) -> None:
    print(f"ksym: {line}", file=sys.stderr)
