"""What stands after the handler's name: ``-H FILE``, ``--format FORMAT`` and their like."""

from __future__ import annotations

from ksym_plugin.kernel.clocks import CLOCKS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Final

FORMATS: Final = ("text", "folded", "svg", "speedscope", "report")
#: These tell of source lines without being asked to.
_LINED: Final = ("svg", "speedscope", "report")


class Options:
    """The handler's options.

    ``lines`` says that source lines are asked for, ``vmlinux`` names the kernel's file.
    ``input`` is the perf.data that a script reads itself, where it is a program of its own.
    """

    __slots__ = ("clock", "format", "history", "input", "lines", "vmlinux")

    def __init__(
        self, history: str | None, clock: str | None, format: str, input: str | None = None
    ) -> None:
        self.history = history
        self.clock = clock
        self.format = format
        self.input = input
        self.lines = False
        self.vmlinux: str | None = None

    @property
    def wants_lines(self) -> bool:
        """Whether the output tells source lines."""
        return self.lines or self.format in _LINED


def parse(arguments: list[str], is_embedded: bool = True) -> Options:
    """Exits as argparse does on what it does not know (status 2), before perf reads a sample."""
    import argparse

    parser = argparse.ArgumentParser(
        prog="perf script -s ksym_handler.py --",
        description="Print perf's samples with every kernel frame named as it was when sampled.",
    )
    parser.add_argument(
        "-H", "--history", metavar="FILE", help="what ksym record wrote (default: see ksym script)"
    )
    parser.add_argument(
        "--clock", choices=CLOCKS, help="the clock of the samples, if perf does not tell it"
    )
    parser.add_argument(
        "--format", choices=FORMATS, default="text", help="report: JSON, which ksym report reads"
    )
    parser.add_argument(
        "--lines",
        action="store_true",
        help="source lines in text and folded stacks: of BPF, with --vmlinux of the kernel too",
    )
    parser.add_argument(
        "--vmlinux",
        metavar="FILE",
        help="name kernel functions from this vmlinux or .debug file (needs pyelftools)",
    )
    if not is_embedded:
        parser.add_argument("-i", "--input", metavar="FILE", help="what perf recorded")
    chosen = parser.parse_args(arguments)
    options = Options(chosen.history, chosen.clock, chosen.format, getattr(chosen, "input", None))
    options.lines, options.vmlinux = chosen.lines, chosen.vmlinux
    return options
