"""The service: what systemd makes of its file, and a recorder that may do no more than it."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from tests import service
from tests.oracle import procs

SECONDS = 60
KSYM = [sys.executable, "-m", "ksym_plugin.cli"]
#: Loads one program, says what the kernel calls it, and ends.
ONE_PROGRAM = """
import json
from tests.oracle import programs, rawbpf
info = rawbpf.info(programs.plain("served", 5))
print(json.dumps([rawbpf.kallsyms_bpf()[info.starts[0]], info.id, info.starts[0], info.lens[0]]))
"""


def test_systemd_finds_nothing_wrong(tmp_path: Path):
    # It looks for the program itself, which need not be installed here.
    text = service.PATH.read_text(encoding="utf-8").replace("/usr/local/bin/ksym", "/bin/true")
    copy = tmp_path / service.PATH.name
    copy.write_text(text, encoding="utf-8")
    done = procs.run(["systemd-analyze", "verify", str(copy)], SECONDS)
    assert done.err == ""


def test_its_capabilities_are_enough_to_record_programs_with_their_addresses(tmp_path: Path):
    bounded = ",".join(["-all", *(f"+{name}" for name in service.capabilities())])
    history = str(tmp_path / "x.db")
    # bcc and the children it forks have no other temporary folder there either.
    with tempfile.TemporaryDirectory() as scratch:
        done = procs.run(
            [
                *("setpriv", f"--bounding-set={bounded}", "--no-new-privs"),
                *("env", f"TMPDIR={scratch}"),
                *(*KSYM, "record", "-o", history, "--"),
                *(sys.executable, "-c", ONE_PROGRAM),
            ],
            SECONDS,
        )
    name, prog_id, start, size = json.loads(done.out)
    words = ["show", "--all", "--json", "-H", history, name]
    found = json.loads(procs.run([*KSYM, *words], SECONDS).out)
    (life,) = found["symbols"]
    assert (life["program"], int(life["start"], 16)) == (prog_id, start)
    assert int(life["end"], 16) == start + size
    assert life["unloaded"] is not None
