"""Addresses in folded stacks, and which of them get a name."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from ksym_plugin.history.writer import HistoryWriter
from ksym_plugin.perf.repair import Repairer
from tests.unit.helpers import load, timeline_of, unload
from tests.unit.texts import PLACE, SECOND, A, B, one_place, statics

REPO = Path(__file__).parents[3]


def repaired(text: bytes, repairer: Repairer | None = None) -> bytes:
    repairer = repairer or Repairer(one_place(), statics())
    return b"\n".join(map(repairer.line, text.split(b"\n")))


def test_counts_are_kept_as_they_are() -> None:
    text = (
        b"dd;[unknown];read 14.2343983248722834234\n"
        b"dd;[unknown];read;x_[k] 20.\n"
        b"dd;y_[k]\n"
        b"dd;ffffffff81000404 3\n"
        b"dd;ffffffff81000504 3 4\n"
        b"dd;ffffffff81000404  0 \r\n"
    )
    repairer = Repairer(timeline_of(), statics())
    assert repaired(text, repairer) == (
        text.replace(b"ffffffff81000404", b"alpha").replace(b"ffffffff81000504", b"beta")
    )
    assert (repairer.stacks, repairer.named, repairer.unparsed) == (5, 3, 1)


def test_blanks_around_frames_are_kept() -> None:
    text = (
        b"    app::main::h45+38642;    __libc_start+243;    0xffffffff81000404 1\n"
        b"comm;do_sys [kernel];unknown [[kernel]] <0xffffffff81000404> 2\n"
        b"\tffffffff81000404 ;x 1\n"
    )
    assert repaired(text) == (
        b"    app::main::h45+38642;    __libc_start+243;    alpha 1\n"
        b"comm;do_sys [kernel];unknown [[kernel]] <0xffffffff81000404> 2\n"
        b"\talpha ;x 1\n"
    )


def test_addresses_however_they_are_spelled() -> None:
    text = (
        b"dd;[unknown];0x234f2abc;sys_[k];0xFFFFFFFF81000404 1\n"
        b"dd;[[kernel.kallsyms] <ffffffff81000404>]_[k] 2\n"
        b"dd;[unknown <ffffffff81000404>] 1\n"
        b"dd;deadbeef 1\n"
        b"dd;ffffffff81000404_[k] 4\n"
        b"dd;[nf_tables <0xffffffff81000404>] 1\n"
    )
    assert repaired(text) == (
        b"dd;[unknown];0x234f2abc;sys_[k];alpha 1\n"
        b"dd;alpha_[k] 2\n"
        b"dd;alpha 1\n"
        b"dd;deadbeef 1\n"
        b"dd;alpha_[k] 4\n"
        b"dd;alpha 1\n"
    )


def test_a_frame_without_an_address_is_counted() -> None:
    text = b"demo;[libc.so.6];[[kernel.kallsyms]];[[kernel.kallsyms]]_[k];[vmlinux]_[k] 1001001\n"
    repairer = Repairer(one_place(), statics())
    assert repaired(text, repairer) == text
    assert repairer.without_address == 3
    assert any(line.startswith("kernel frames without an address: 3 ") for line in repairer.tally())


def test_comments_separators_and_suffixes() -> None:
    text = (
        b"# mode: wall\n\ncksum;- 6\n"
        b"cksum;_start;main;--;read_[k];ffffffff81000404_[k] 31\n"
        b"P1;T1;<frozen importlib>:load:12 5\n"
    )
    repairer = Repairer(one_place(), statics())
    assert repaired(text, repairer) == text.replace(b"ffffffff81000404", b"alpha")
    assert repairer.unparsed == 0


def test_the_history_s_only_answer_is_taken() -> None:
    past = timeline_of(load(PLACE, 64, A, 5), unload(PLACE, 9), load(PLACE + 64, 64, B, 20))
    text = b"t;ffffffffc0001004;[unknown <ffffffffc0001044>]_[k];ffffffffc0001080 1"
    repairer = Repairer(past)
    assert repaired(text, repairer) == (
        b"t;%s;%s_[k];ffffffffc0001080 1" % (A.encode(), B.encode())
    )
    assert (repairer.named, list(repairer.unnamed.values())) == (2, [1])


def test_the_same_program_again_is_no_other_answer() -> None:
    past = timeline_of(load(PLACE, 64, A, 5), unload(PLACE, 9), load(PLACE, 64, A, 20))
    assert repaired(b"t;ffffffffc0001004 1", Repairer(past)) == b"t;%s 1" % A.encode()


def test_where_several_were_it_is_said_and_a_time_decides() -> None:
    text = b"t;ffffffffc0001004 1"
    repairer = Repairer(one_place())
    assert repaired(text, repairer) == text
    assert any("several programs" in line for line in repairer.tally())
    assert any("--at" in line for line in repairer.tally())
    for at, name in ((5 * SECOND + 500, A), (7 * SECOND, B)):
        assert repaired(text, Repairer(one_place(), None, at)) == b"t;%s 1" % name.encode()
    assert repaired(text, Repairer(one_place(), None, SECOND)) == text


def test_an_image_reaches_no_further_than_what_was_beside_it() -> None:
    trampoline = "bpf_trampoline_6"
    image = load(PLACE, 4096, trampoline, 5, open_ended=True)
    text = b"t;ffffffffc0001010;ffffffffc0001104 1"
    beside = timeline_of(image, load(PLACE + 0x100, 64, A, 20))
    assert repaired(text, Repairer(beside)) == b"t;%s;%s 1" % (trampoline.encode(), A.encode())
    before = timeline_of(
        load(PLACE + 0x100, 64, A, 1), unload(PLACE + 0x100, 3), load(*IMAGE, open_ended=True)
    )
    assert repaired(text, Repairer(before)).startswith(b"t;bpf_trampoline_6;ffffffffc0001104")


def test_an_image_that_comes_and_goes_takes_linear_time() -> None:
    """Never beside the program above it, or once, or always."""
    text = b"t;ffffffffc0001200 1"
    started = time.process_time()
    for overlap, named in (0, True), (1, True), (3000, False):
        changes = []
        for turn in range(3000):
            now = 100 * turn + 5
            late = 20 if turn < overlap else 60
            changes += [
                load(*IMAGE[:3], now, open_ended=True),
                *([load(PLACE + 0x100, 64, A, now + 20)] if turn < overlap else []),
                unload(PLACE, now + 40),
                *([] if turn < overlap else [load(PLACE + 0x100, 64, A, now + late)]),
                unload(PLACE + 0x100, now + 80),
            ]
        line = repaired(text, Repairer(timeline_of(*changes)))
        assert line == (b"t;bpf_trampoline_6 1" if named else text)
    assert time.process_time() - started < 10


IMAGE = (PLACE, 4096, "bpf_trampoline_6", 5)


def test_context_markers_and_user_addresses_are_no_frames_of_the_kernel() -> None:
    text = b"t;ffffffffffffff80;00007f0012345678;0x401000;7fffffffffffffff 1"
    assert repaired(text) == text


@given(st.binary(max_size=120))
@settings(deadline=None, max_examples=300)
def test_any_bytes_come_out_as_they_went_in(text: bytes) -> None:
    assert repaired(text) == text


@given(st.lists(st.sampled_from([b"a", b"ffffffff81000404", b"", b" ", b"_[k]", b"\xff", b"<"])))
def test_only_addresses_change(frames: list[bytes]) -> None:
    line = b";".join(frames) + b" 12"
    wanted = [b"alpha" if frame == b"ffffffff81000404" else frame for frame in frames]
    assert repaired(line) == b";".join(wanted) + b" 12"


def test_hostile_lines_take_linear_time() -> None:
    started = time.process_time()
    for line in (b"[" * 10**6, b"<" * 10**6, b";" * 10**6, b"1 " * 500_000, b"[x <" * 250_000):
        assert repaired(line + b" 5") == line + b" 5"
    assert time.process_time() - started < 10


def test_folded_text_from_the_command_line(tmp_path: Path) -> None:
    path = str(tmp_path / "ksym.db")
    writer = HistoryWriter(path, "made up", 1, None)
    for lifetime in one_place().lifetimes():
        writer.note(lifetime)
    writer.close(9 * SECOND)
    text = b"t;ffffffffc0001004 1\r\nt;\xff;[unknown <ffffffffc0001004>]_[k] 2.50"

    def annotate(*words: str) -> tuple[bytes, bytes, int]:
        command = [sys.executable, "-m", "ksym_plugin.cli", "annotate", "-H", path, *words]
        environment = {**os.environ, "PYTHONPATH": str(REPO)}
        done = subprocess.run(command, input=text, capture_output=True, env=environment)
        return done.stdout, done.stderr, done.returncode

    out, err, _ = annotate("--folded")
    assert out == text
    assert b"2 left: several programs were at this address" in err
    out, err, _ = annotate("--folded", "--at", "7", "--clock", "monotonic")
    assert out == b"t;%s 1\r\nt;\xff;%s_[k] 2.50" % (B.encode(), B.encode())
    assert b"2 stacks: 2 addresses named, 0 left" in err
    assert annotate("--at", "7")[2] == 2
