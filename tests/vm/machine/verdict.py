"""What a guest's end means: tests passed, tests failed, or the guest was lost."""

from __future__ import annotations

import os
import xml.etree.ElementTree as ElementTree

from tests.vm.machine.guest import LATE, SILENT

TYPE_CHECKING = False
if TYPE_CHECKING:
    from tests.vm.machine.guest import Outcome

#: Exit statuses beside the job's own.
TIMED_OUT = 124
LOST = 125
NOT_STARTED = 126

_TAIL_LINES = 40


class Verdict:
    """The exit status it asks for, and the line that says so."""

    __slots__ = ("line", "status")

    def __init__(self, status: int, line: str) -> None:
        self.status = status
        self.line = line


def judge(kernel: str, outcome: Outcome, out: str, *, tests: bool) -> Verdict:
    """``tests``: the job was pytest, whose report is in ``out``."""
    where = f"vm: {outcome.release or kernel}"
    took = f"in {outcome.seconds:.0f} s"
    if outcome.status is None:
        tail = console_tail(os.path.join(out, "console.log"))
        line = f"{tail}{where}: GUEST LOST: it {outcome.lost}, {took}; console in {out}"
        return Verdict(TIMED_OUT if outcome.lost in (SILENT, LATE) else LOST, line)
    if not tests:
        return Verdict(outcome.status, f"{where}: status {outcome.status} {took}")
    counts = count(os.path.join(out, "junit.xml"))
    status = outcome.status
    if not counts:
        counts = f"no report, status {status}"
        status = status or 1
    return Verdict(status, f"{where}: {counts} {took}")


def count(junit: str) -> str:
    """``3 passed, 1 failed``, or nothing when there is no report that can be read."""
    try:
        suites = ElementTree.parse(junit).getroot().iter("testsuite")
    except (OSError, ElementTree.ParseError):
        return ""
    sums = dict.fromkeys(("tests", "failures", "errors", "skipped"), 0)
    for suite in suites:
        for name in sums:
            sums[name] += int(suite.get(name, "0"))
    passed = sums["tests"] - sums["failures"] - sums["errors"] - sums["skipped"]
    failed = sums["failures"] + sums["errors"]
    skipped = f", {sums['skipped']} skipped" if sums["skipped"] else ""
    return f"{passed} passed, {failed} failed{skipped}"


def console_tail(path: str) -> str:
    """The end of the console, each line marked as such."""
    with open(path, errors="replace") as console:
        lines = console.read().splitlines()[-_TAIL_LINES:]
    return "".join(f"console: {line.rstrip()}\n" for line in lines)
