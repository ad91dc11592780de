"""Does bpf(2) answer at all? Asked in a child, because a kernel that hangs there hangs for good.

``python3 -m tests.oracle.probe`` is the child: it loads one program, runs it once and prints
``ok``, or prints what the kernel answered instead.
"""

from __future__ import annotations

import os
import subprocess
import sys

from tests.oracle import procs, programs, rawbpf

ANSWERS = "answers"
REFUSES = "refuses"
HANGS = "hangs"

HANG_REASON = "bpf(2) hangs on this host: a program load did not return within {:g} s"

_SECONDS = 15.0


def ask(seconds: float = _SECONDS) -> tuple[str, str]:
    """(ANSWERS, "") or (REFUSES or HANGS, the reason in one sentence)."""
    return judge([sys.executable, "-m", "tests.oracle.probe"], seconds)


def judge(command: list[str], seconds: float) -> tuple[str, str]:
    """What the child's behaviour means. Never waits for a child that does not come back."""
    child = procs.start(command, out=subprocess.PIPE)
    assert child.stdout is not None
    try:
        answer = procs.read_line(child.stdout.fileno(), seconds).decode(errors="replace").strip()
    except procs.Failed:
        procs.end_group(child, 0.5)
        return HANGS, HANG_REASON.format(seconds)
    if not procs.end_group(child):
        return HANGS, HANG_REASON.format(seconds)
    if answer == "ok":
        return ANSWERS, ""
    return REFUSES, f"bpf(2) cannot be used: {answer or 'the probe died'}"


def main() -> None:
    try:
        fd = programs.plain("probe", 1, work=4)
        rawbpf.test_run(fd, 1)
        os.close(fd)
    except OSError as error:
        print(str(error).splitlines()[0])
    else:
        print("ok")


if __name__ == "__main__":
    main()
