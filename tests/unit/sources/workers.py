"""What the processes of a source do in tests: functions, since a process imports what it runs."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from typing import TYPE_CHECKING

from ksym_plugin.sources import bcc_loader
from ksym_plugin.sources.details import LISTENING
from ksym_plugin.timeline.errors import SourceError
from ksym_plugin.timeline.program import GONE, ProgramDetails

if TYPE_CHECKING:
    from ksym_plugin.kernel.worker import Connection

BIG = 3_000_000


def without_the_system_s_bcc(parent: Connection) -> None:
    bcc_loader._SYSTEM = ()
    bcc_loader.compile_and_load(parent)


def details_of(id: int, problem: str = "", lines: bytes = b"") -> ProgramDetails:
    details = ProgramDetails(id, problem)
    details.lines = lines
    details.functions = [(1 << 63, 16, "bpf_prog_aa_\u00e4")]
    return details


def sends_details_of_all_sizes(recorder: Connection) -> None:
    for number in range(5):
        recorder.send(details_of(number, lines=b"x" * (BIG if number == 3 else number)))
    with contextlib.suppress(EOFError):
        recorder.receive()
    recorder.send(details_of(9, GONE))
    recorder.send(0.25)


def listens_and_sends_one(recorder: Connection) -> None:
    recorder.send(LISTENING)
    recorder.send(details_of(1))
    recorder.receive()


def ends(_: Connection) -> None:
    pass


def is_refused(_: Connection) -> None:
    raise SourceError("bpf(2) fails")


def dies_within_a_message(owner: Connection) -> None:
    os.write(owner.fileno(), b"\x20\0\0")
    os._exit(1)


def listens_and_ends(recorder: Connection) -> None:
    recorder.send(LISTENING)
    recorder.send(0.5)


def never_ends(_: Connection) -> None:
    time.sleep(600)


def runs_a_program(owner: Connection) -> None:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as cat:
        owner.send(cat.pid)
        cat.wait()
