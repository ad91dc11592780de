"""Programs that read perf script's text read the same samples once it is repaired.

speedscope's own page does (``scripts/setup browser``). Two more are asked where a folder that
``$KSYM_REFERENCE`` names has them, as no registry of packages does: ``FlameGraph``, a checkout
with stackcollapse-perf.pl, and ``firefox-linux-perf.mjs``, a bundle for node, such as esbuild
makes, of ``convertPerfScriptProfile`` in firefox-devtools/profiler's
src/profile-logic/import/linux-perf.ts. The bundle exports ``samples(text)``, which calls that
function and returns what it made of each sample, in any order: ``{thread, time, frames}``.
``thread`` holds the task's name; ``frames`` are strings, root first.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable

import pytest

from ksym_plugin.perf.repaint import Annotator
from ksym_plugin.timeline.resolver import Locator
from tests.unit.texts import REFERENCE, TABLE, A, B, Lines, one_place, renamer
from tests.unit.viewers import Speedscope

#: Of a sample: its task and its time, which is the task's name in stackcollapse-perf.pl.
Read = dict[tuple[str, object], list[str]]

NODE = """
const { samples } = await import(process.argv[1])
let text = ""
for await (const part of process.stdin.setEncoding("utf8")) text += part
process.stdout.write(JSON.stringify(samples(text)))
"""
CALLER = b"\tffffffff81000404 alpha+0x4 ([kernel.kallsyms])\n"
USER = (
    b"\t          401000 main+0x4 (/bin/x)\n",
    b"\t    55d0c0de1150 std::vector<int, std::less<> >::f(int (*)(char))+0x10 (/opt/app)\n",
    b"\t    55d0c0de1150 inner (inlined)\n",
    b"\t    7ffd1c5fe9a0 [unknown] ([vdso])\n",
    b"\t    7f1f551c3da3 [unknown] (/tmp/perf-77.map)\n\tff2ea9cf8122e02e [unknown] ([unknown])\n",
)
#: What perf may say of the one place, and of addresses of the kernel's table.
PLACE = b"\tffffffffc0001004 "
LEAVES = (
    PLACE + b"[unknown] ([unknown])\n",
    PLACE + b"bpf_prog_00000000000000cc_c+0x4 (bpf_prog_00000000000000cc_c)\n",
    PLACE + b"bpf_prog_00000000000000cc_c (bpf_prog_00000000000000cc_c)\n",
    PLACE + f"{A}+0x4 ({A})\n".encode(),
    b"\tffffffff81000504 [unknown] ([kernel.kallsyms])\n",
    CALLER,
    b"",
)
#: While nobody was there, A, and B.
TIMES = ("4.5000%02d000", "5.5000%02d000", "6.6000%02d000")
FORMS = {
    "default": "demo{n} {tid} [000] {time}:    1001001 cycles: \n",
    "pid": "demo{n} 77/{tid} [001] {time}:    1001001 cpu-clock:u: \n",
    "no-period": "demo{n} 77/{tid} {time}: cycles: \n",
    "events": "demo{n} 77/{tid} [001] {time}:          1 {event}: \n",
}


def written(form: str) -> bytes:
    """A sample of each leaf in each time; its task and thread are its own."""
    text = b"# ========\n# captured on    : Tue Dec  1 11:36:00 2026\n# ========\n#\n"
    for n, (time, leaf) in enumerate((time, leaf) for time in TIMES for leaf in LEAVES):
        event = ("cycles", "page-faults")[n % 2]
        text += FORMS[form].format(n=n, tid=80 + n, time=time % n, event=event).encode()
        text += leaf + (CALLER if leaf else b"") + b"".join(USER[n % 3 :]) + b"\n"
    return text


def frames_of(text: bytes) -> dict[str, list[bytes]]:
    """The lines of each sample's frames by task, root first; source lines are no frames."""
    found = {}
    for sample in text.split(b"#\n", 1)[1].split(b"\n\n")[:-1]:
        header, *lines = sample.split(b"\n")
        frames = [line for line in lines if line.startswith(b"\t")]
        found[header.split()[0].decode()] = frames[::-1]
    return found


def output_of(command: list[str], text: bytes) -> str:
    program = os.path.join(REFERENCE, command[-1])
    done = subprocess.run(
        [*command[:-1], program], input=text, capture_output=True, check=True, timeout=60
    )
    return done.stdout.decode()


def by_stackcollapse(text: bytes) -> Read:
    read: Read = {}
    for line in output_of(["perl", "FlameGraph/stackcollapse-perf.pl"], text).splitlines():
        stack, count = line.rsplit(" ", 1)
        task, *frames = stack.split(";")
        read[task, count] = frames
    return read


def by_firefox(text: bytes) -> Read:
    command = ["node", "--input-type=module", "-e", NODE, "firefox-linux-perf.mjs"]
    samples = json.loads(output_of(command, text))
    return {(sample["thread"], sample["time"]): sample["frames"] for sample in samples}


def require_same(read: Callable[[bytes], Read], form: str, with_lines: bool) -> None:
    """Samples and depths are the same before and after, names but for the kernel's."""
    text = written(form)
    annotator = Annotator(renamer(one_place(), TABLE), Locator(Lines()) if with_lines else None)
    repaired = annotator.feed(text) + annotator.close()
    before, after = read(text), read(repaired)
    assert before.keys() == after.keys()
    is_all = read is by_firefox or form != "events"  # The others take those of one event.
    assert len(before) == (21 if is_all else 11)
    old, new = frames_of(text), frames_of(repaired)
    for key, frames in before.items():
        found = re.match(r"demo(\d+)", key[0])
        assert found and len(after[key]) == len(frames) == len(old[found[0]])
        for was, now, line, shown in zip(frames, after[key], old[found[0]], new[found[0]]):
            assert was == now or line != shown
        time, leaf = divmod(int(found[1]), len(LEAVES))
        name = after[key][-1]
        if LEAVES[leaf].startswith(PLACE):
            assert [who in name for who in (A, B, "cc_c")] == [time == 1, time == 2, False]
        elif LEAVES[leaf]:
            assert name.startswith("alpha" if LEAVES[leaf] == CALLER else "beta")


FORMATS = pytest.mark.parametrize("form", FORMS)
LINES = pytest.mark.parametrize("with_lines", [False, True])


@FORMATS
@LINES
def test_speedscope_reads_as_before(speedscope: Speedscope, form: str, with_lines: bool) -> None:
    def read(text: bytes) -> Read:
        profiles = speedscope.read("perf.txt", text)
        return {
            (thread, weight): list(stack)
            for thread, stacks in profiles.items()
            for stack, weight in stacks.items()
        }

    require_same(read, form, with_lines)


@pytest.mark.reference
@pytest.mark.parametrize("read", [by_stackcollapse, by_firefox])
@FORMATS
@LINES
def test_others_read_as_before(read: Callable[[bytes], Read], form: str, with_lines: bool) -> None:
    require_same(read, form, with_lines)
