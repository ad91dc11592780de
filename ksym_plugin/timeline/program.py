"""What a history keeps of a BPF program beside where its functions were and when."""

from __future__ import annotations

#: Why there are no lines, if there are none.
GONE = "it was gone before its lines could be read"
HIDDEN = "the kernel does not show its addresses"
NOT_JITED = "it is not JITed"
WITHOUT = "loaded without line information"


class ProgramDetails:
    """One program, as bpf(2) tells.

    ``functions`` are (start, length, name) of the main function and its subprograms in
    the kernel's order, the names spelled as kallsyms does; ``""`` for one that cannot be
    told. ``load_time`` is CLOCK_MONOTONIC ns, never later than the true start of its
    BPF_PROG_LOAD. ``lines`` is what ``line_table.pack`` made of the functions in the
    same order, with its digest; or both are empty, and ``problem`` says why. ``target`` is
    the kernel function that a tracing program is for, ``trampoline`` the key in the name
    of the trampoline that takes calls of it there; ``""`` and 0 for others. Of a program
    that is gone nothing but the id is known.
    """

    __slots__ = (
        "digest",
        "functions",
        "id",
        "lines",
        "load_time",
        "problem",
        "tag",
        "target",
        "trampoline",
        "type",
        "uid",
    )

    def __init__(self, id: int, problem: str) -> None:
        self.id = id
        self.problem = problem
        self.tag = ""
        self.type = 0
        self.uid = 0
        self.load_time = 0
        self.functions: list[tuple[int, int, str]] = []
        self.lines = b""
        self.digest = b""
        self.trampoline = 0
        self.target = ""

    def __repr__(self) -> str:
        return f"ProgramDetails({self.id}, {self.tag}, {self.problem or len(self.lines)})"
