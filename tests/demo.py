"""``make demo``: one process loads BPF programs, another runs them and is profiled.

As root with a perf that has libpython the scenario of ``tests/oracle`` is run and recorded
on the spot, otherwise the recording in ``tests/data`` is used. Either way perf's own
names and ours are judged by what the programs said of themselves.
"""

from __future__ import annotations

import contextlib
import io
import json
import lzma
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile

from ksym_plugin.kernel import identity
from ksym_plugin.perf.handler import Handler, Options
from tests.oracle import probe, truth

REPO = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SHIPPED = os.path.join(REPO, "tests", "data", "two-processes")
KSYM = [sys.executable, "-m", "ksym_plugin.cli"]
SECONDS = 180
#: How many frames of a sample are shown.
SHOWN = 3


class Recording:
    """A recording as perf prints it and as we do, our tally, and the truth."""

    def __init__(self, before: str, after: str, tally: str, known: dict) -> None:
        self.before = before
        self.after = after
        self.tally = tally
        self.truth = known


def unpacked(name: str) -> bytes:
    with lzma.open(os.path.join(SHIPPED, name + ".xz")) as file:
        return file.read()


def call_boot(history: str, boot_id: str | None) -> str:
    """Give the one boot of a history that id, and return the one it had.

    Samples without perf's header are named by the running boot's history only.
    """
    with contextlib.closing(sqlite3.connect(history)) as database, database:
        own: str = database.execute("SELECT boot_id FROM boot").fetchone()[0]
        database.execute("UPDATE boot SET boot_id = ?", (boot_id,))
    return own


def shipped(folder: str) -> Recording:
    """Replay the samples of the shipped recording through the handler, as perf would."""
    history = os.path.join(folder, "ksym.db")
    with open(history, "wb") as file:
        file.write(unpacked("ksym.db"))
    own = call_boot(history, identity.boot_id())
    after, tally = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(after), contextlib.redirect_stderr(tally):
        handler = Handler(Options(history, None, "text"), None)
        for line in unpacked("events.jsonl").splitlines():
            event = json.loads(line)
            event["attr"] = bytes.fromhex(event["attr"])
            handler.process_event(event)
        handler.trace_end()
    # Its text is not of the running boot: that may not have come to its times.
    call_boot(history, own)
    known = json.loads(unpacked("truth.json"))
    before = unpacked("before.txt").decode()
    return Recording(before, after.getvalue(), tally.getvalue(), known)


def run(*command: str, cwd: str = REPO) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": REPO}
    return subprocess.run(
        command, cwd=cwd, env=environment, timeout=SECONDS, capture_output=True, text=True
    )


def on_the_spot(folder: str) -> Recording:
    """Record the scenario, and print it twice."""
    data, history = os.path.join(folder, "perf.data"), os.path.join(folder, "ksym.db")
    scenario = [sys.executable, "-m", "tests.oracle.scenario", "--out", folder, "--clock", "perf"]
    recorded = run(*KSYM, "record", "-o", history, "--", *scenario)
    if recorded.returncode:
        raise RuntimeError(recorded.stderr.strip())
    before = run("perf", "script", "-i", data, "--ns")
    after = run(*KSYM, "script", "-i", data, "-H", history)
    if after.returncode:
        raise RuntimeError(after.stderr.strip())
    with open(os.path.join(folder, "truth.json"), encoding="utf-8") as file:
        return Recording(before.stdout, after.stdout, after.stderr, json.load(file))


def obstacle() -> str:
    """Why nothing can be recorded here, empty if it can."""
    if os.geteuid():
        return "recording needs root"
    if shutil.which("perf") is None:
        return "there is no perf (Debian: apt-get install linux-perf)"
    if "libpython: [ on" not in run("perf", "version", "--build-options").stdout:
        return "this perf runs no Python scripts (built without libpython)"
    return probe.ask()[1]


def sample_of(text: str, at: int) -> str:
    """The sample number ``at`` as printed, its first frames."""
    block = text.split("\n\n")[at].splitlines()
    return "\n".join("    " + line.expandtabs(4) for line in block[: SHOWN + 1])


def show(recording: Recording) -> bool:
    """Print before and after; whether no name was wrong and nearly none missing."""
    scores = {
        "perf script": truth.leaves(recording.before, recording.truth),
        "ksym script": truth.leaves(recording.after, recording.truth),
    }
    bad = [verdict for verdict in scores["perf script"].verdicts if not verdict.right]
    wrong = next((verdict for verdict in bad if verdict.frame.name != truth.UNKNOWN), None)
    if wrong is not None:
        samples = list(truth.samples(recording.before))
        at = next(i for i, one in enumerate(samples) if one.time == wrong.sample.time)
        print(f"\nbefore (perf script), while {wrong.expected} was running:")
        print(sample_of(recording.before, at))
        print("\nafter (ksym script):")
        print(sample_of(recording.after, at))
    print("\nsamples whose leaf is in a BPF program:")
    print(f"  {'':12} {'right':>8} {'wrong':>8} {'unknown':>8}")
    for who, score in scores.items():
        print(f"  {who:12} {score.right:8,} {score.wrong:8,} {score.missing:8,}")
    print("\n" + recording.tally.strip())
    after = scores["ksym script"]
    return after.wrong == 0 and after.share_right >= 0.995


def main() -> int:
    print("One process loads and unloads BPF programs, another runs them and is profiled.")
    why = obstacle()
    with tempfile.TemporaryDirectory() as folder:
        if why:
            print(f"demo: {why}; showing the recording in tests/data")
            recording = shipped(folder)
        else:
            print("demo: recording 60 programs, about 5 s")
            recording = on_the_spot(folder)
        good = show(recording)
    print("\ndemo: " + ("all is as it should be" if good else "names are missing or wrong"))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
