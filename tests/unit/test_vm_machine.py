"""The host's side of the guests, with a QEMU that is a script: it gets the real image file,
finds the job in it and leaves results there with e2fsprogs, as a guest's kernel would.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tests.vm.machine import cache, children, guest, verdict

REPO = Path(__file__).resolve().parents[2]

TOOLS = ("mke2fs", "debugfs", "e2fsck", "setpriv")
SBIN = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
pytestmark = pytest.mark.skipif(
    any(shutil.which(tool, path=SBIN) is None for tool in TOOLS),
    reason=f"needs {', '.join(TOOLS)}",
)

# What the scripts below are made of: the image's path, the console's lines, the results.
PRELUDE = """\
#!/bin/sh
for word; do
    case $word in *file=*) image=${word#*file=}; image=${image%%,*} ;; esac
done
put() { # TEXT NAME: as the guest would write it
    printf '%s' "$1" >"$SCRATCH/$$"
    debugfs -w -R "write $SCRATCH/$$ $2" "$image" >/dev/null 2>&1
}
up() { printf '\\033[2JGUEST_UP 6.12.95-test\\r\\n'; }
echo boot >>"$SCRATCH/boots"
"""

PASSING = '<testsuites><testsuite tests="4" failures="0" errors="0" skipped="1"/></testsuites>'
FAILING = '<testsuites><testsuite tests="4" failures="1" errors="1" skipped="0"/></testsuites>'


class Machine:
    """A cache with an image, a QEMU to be written, and what one run of it came to."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.images = folder / "cache" / cache.key()
        self.out = folder / "out"
        self.shown: list[str] = []
        for place in (self.images, self.out, folder / "bin", folder / "root/job/out"):
            place.mkdir(parents=True)
        (self.images / "vmlinuz-6.12").touch()
        image = str(self.images / "image")
        command = ["mke2fs", "-q", "-t", "ext4", "-d", str(folder / "root"), image, "16M"]
        monkeypatch.setenv("PATH", f"{folder / 'bin'}{os.pathsep}{SBIN}")
        monkeypatch.setenv("SCRATCH", str(folder))
        monkeypatch.setenv("KSYM_VM_CACHE", str(folder / "cache"))
        monkeypatch.delenv("CI", raising=False)
        subprocess.run(command, check=True)

    def qemu(self, body: str) -> None:
        script = self.folder / "bin" / guest.QEMU
        script.write_text(PRELUDE + textwrap.dedent(body))
        script.chmod(0o755)

    def run(self, body: str, seconds: float = 20, overall: float = 60) -> verdict.Verdict:
        self.qemu(body)
        files = ["tests/vm/guest.ini"]
        limits = guest.Limits(seconds, overall)
        outcome = guest.run(
            str(self.images), "6.12", "true\n", files, str(self.out), limits, self.shown.append
        )
        return verdict.judge("6.12", outcome, str(self.out), tests=True)

    def boots(self) -> int:
        return (self.folder / "boots").read_text().count("boot")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.chdir(REPO)
    return Machine(tmp_path, monkeypatch)


def test_passed(machine: Machine) -> None:
    found = machine.run(f"""
        echo firmware; up; echo 'test_a PASSED'
        put '{PASSING}' /job/out/junit.xml; put 0 /job/status
        echo GUEST_DONE; echo 'reboot: Power down'
    """)
    assert found.status == 0
    assert found.line.startswith("vm: 6.12.95-test: 3 passed, 0 failed, 1 skipped in ")
    assert machine.shown == ["test_a PASSED"]
    assert "firmware" in (machine.out / "console.log").read_text()
    assert (machine.out / "junit.xml").read_text() == PASSING


def test_failed_is_not_lost(machine: Machine) -> None:
    found = machine.run(f"up; put '{FAILING}' /job/out/junit.xml; put 1 /job/status")
    assert found.status == 1
    assert "2 passed, 2 failed" in found.line
    assert "LOST" not in found.line
    assert machine.boots() == 1


def test_a_good_status_without_a_report_is_a_failure(machine: Machine) -> None:
    found = machine.run("up; put 0 /job/status")
    assert found.status == 1
    assert "no report" in found.line


def test_the_job_reaches_the_image(machine: Machine) -> None:
    machine.run("""
        debugfs -R "dump /job/in.tar $SCRATCH/in.tar" "$image" 2>/dev/null
        up; put 0 /job/status
    """)
    command = ["tar", "-xOf", str(machine.folder / "in.tar")]
    script = subprocess.run([*command, "job"], check=True, stdout=subprocess.PIPE).stdout
    name = "tests/vm/guest.ini"
    file = subprocess.run([*command, f"work/{name}"], check=True, stdout=subprocess.PIPE).stdout
    assert script == b"true\n"
    assert file == (REPO / name).read_bytes()


def test_one_that_died_is_lost_and_never_booted_again(machine: Machine) -> None:
    found = machine.run(f"up; put '{PASSING}' /job/out/junit.xml; echo 'Kernel panic - here'")
    assert found.status == verdict.LOST
    assert "GUEST LOST: it died" in found.line
    assert "console: Kernel panic - here" in found.line
    assert machine.boots() == 1


def test_one_that_falls_silent_is_cut(machine: Machine) -> None:
    found = machine.run("up; echo 'test_b'; exec sleep 60", seconds=0.5)
    assert found.status == verdict.TIMED_OUT
    assert "GUEST LOST: it printed nothing for too long" in found.line
    assert "console: test_b" in found.line
    assert machine.shown == ["test_b"]


def test_one_that_is_slow_is_waited_for_as_long_as_it_prints(machine: Machine) -> None:
    began = time.monotonic()
    found = machine.run(
        f"""
        up; for turn in 1 2 3 4 5 6; do echo "test_$turn PASSED"; sleep 0.5; done
        put '{PASSING}' /job/out/junit.xml; put 0 /job/status
        """,
        seconds=2,
    )
    assert time.monotonic() - began > 2
    assert found.status == 0
    assert machine.shown == [f"test_{turn} PASSED" for turn in range(1, 7)]


def test_one_that_goes_on_and_on_is_cut(machine: Machine) -> None:
    found = machine.run("up; while :; do echo test_c; sleep 0.1; done", overall=1)
    assert found.status == verdict.TIMED_OUT
    assert "GUEST LOST: it took too long" in found.line
    assert machine.boots() == 1


def test_half_a_line_is_progress_and_is_shown_when_it_is_whole(machine: Machine) -> None:
    found = machine.run(
        f"""
        up; printf 'test_'; sleep 1.2; printf 'c '; sleep 1.2; echo PASSED
        put '{PASSING}' /job/out/junit.xml; put 0 /job/status
        """,
        seconds=2,
    )
    assert found.status == 0
    assert machine.shown == ["test_c PASSED"]


def test_a_boot_that_hangs_is_cut_and_tried_again(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guest, "BOOT_SECONDS", 0.5)
    found = machine.run("while :; do echo still here; sleep 0.1; done")
    assert "GUEST LOST: it never came up" in found.line
    assert machine.boots() == 3


def test_one_done_but_late_to_switch_off_is_done(machine: Machine) -> None:
    body = f"up; put '{PASSING}' /job/out/junit.xml; put 0 /job/status; exec sleep 60"
    assert machine.run(body, seconds=2).status == 0


def test_one_that_never_came_up_is_tried_three_times(machine: Machine) -> None:
    found = machine.run("echo 'Booting from ROM'")
    assert found.status == verdict.LOST
    assert "GUEST LOST: it never came up" in found.line
    assert machine.boots() == 3


def test_coming_up_at_the_second_try_is_enough(machine: Machine) -> None:
    found = machine.run(f"""
        [ "$(wc -l <"$SCRATCH/boots")" -gt 1 ] || exit 0
        up; put '{PASSING}' /job/out/junit.xml; put 0 /job/status
    """)
    assert found.status == 0
    assert machine.boots() == 2


def test_a_qemu_that_gives_up_is_no_guest(machine: Machine) -> None:
    with pytest.raises(children.Failed, match="status 1: no such CPU"):
        machine.run("echo 'no such CPU'; exit 1")
    assert machine.boots() == 1


def test_a_full_disk_starts_nothing(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "GUEST_BYTES", 1 << 60)
    with pytest.raises(children.Failed, match="MiB left"):
        machine.run("up")
    assert not (machine.folder / "boots").exists()


def command_line(machine: Machine, *arguments: str) -> list[str]:
    out = str(machine.folder / "results")
    return [sys.executable, "-m", "tests.vm.machine", "--out", out, *arguments]


def vm(machine: Machine, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command_line(machine, *arguments),
        env={**os.environ, **env},
        check=False,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_the_command_ends_with_the_jobs_status(machine: Machine) -> None:
    machine.qemu("up; put found /job/out/what; put 7 /job/status")
    done = vm(machine, "--kernel", "6.12", "--shell", "exit 7")
    assert done.returncode == 7
    assert "vm: 6.12.95-test: status 7 in" in done.stdout
    assert (machine.folder / "results/6.12/what").read_text() == "found"


def test_the_worse_of_two_kernels_counts(machine: Machine) -> None:
    machine.qemu(f"""
        up; put '{PASSING}' /job/out/junit.xml
        case "$*" in *vmlinuz-6.12*) put 0 /job/status ;; esac
    """)
    done = vm(machine)
    assert done.returncode == verdict.LOST
    assert "3 passed, 0 failed" in done.stdout
    assert "GUEST LOST: it died" in done.stdout


GUEST_TESTS = """
import time
import pytest

def test_done(): pass

def test_long():
    time.sleep(60)

@pytest.fixture(scope="module")
def prepared():
    raise AssertionError("prepared")

def test_left_over(prepared): pass

@pytest.mark.only_on("6.1")
def test_of_the_other_kernel(): pass
"""


def test_when_its_time_is_over_pytest_ends_and_names_what_was_not_run(tmp_path: Path) -> None:
    shutil.copy(REPO / "tests/vm/guest/conftest.py", tmp_path)
    (tmp_path / "test_guest.py").write_text(GUEST_TESTS)
    guests = {"KSYM_GUEST": "6.12", "KSYM_GUEST_MINUTES": "0.3", "COLUMNS": "200"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-c", str(REPO / "tests/vm/guest.ini"), "-ra", tmp_path],
        env={**os.environ, **guests},
        check=False,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert done.returncode == 1
    assert "1 failed, 1 passed, 1 deselected, 1 error" in done.stdout
    assert "::test_long - Failed: the guest's 0.3 minutes ended here" in done.stdout
    assert "::test_left_over - Failed: not run: the guest's 0.3 minutes are over" in done.stdout


@pytest.mark.parametrize("ci, status, word", [("", 0, "SKIPPED: "), ("true", 126, "FAILED: ")])
def test_no_qemu(machine: Machine, ci: str, status: int, word: str) -> None:
    tools = machine.folder / "tools"
    tools.mkdir()
    for tool in ("debugfs", "e2fsck", "setpriv"):
        (tools / tool).symlink_to(shutil.which(tool) or "")
    done = vm(machine, CI=ci, PATH=str(tools))
    assert done.returncode == status
    assert done.stdout.startswith(word)
    assert f"not installed: {guest.QEMU}" in done.stdout


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_runner_that_ends_takes_all_along(machine: Machine, number: signal.Signals) -> None:
    machine.qemu("echo $$ >>$SCRATCH/pids; up; exec sleep 60")
    command = command_line(machine, "--shell", "sleep 60")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as runner:
        pids = machine.folder / "pids"
        until(lambda: pids.exists() and len(pids.read_text().split()) == 2)
        runner.send_signal(number)
    assert runner.returncode != 0
    # stdout has ended, and QEMU had none of it: it may take the kernel a moment.
    for pid in pids.read_text().split():
        until(lambda pid=pid: not alive(int(pid)))
    assert sorted(os.listdir(machine.images)) == ["image", "vmlinuz-6.12"]


def alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def until(true: object, seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


class Builder:
    """A recipe that is a script of ours, and a cache that is empty."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.recipe = folder / "recipe"
        self.base = folder / "cache"
        self.recipe.mkdir()
        (self.recipe / "guest-init").touch()
        (self.recipe / "unshare").write_text('#!/bin/sh\nshift 5\nexec "$@"\n')
        (self.recipe / "unshare").chmod(0o755)
        monkeypatch.setenv("PATH", f"{self.recipe}{os.pathsep}{SBIN}")
        monkeypatch.setenv("KSYM_VM_CACHE", str(self.base))
        monkeypatch.setattr(cache, "HERE", str(self.recipe))
        monkeypatch.setattr(cache, "BUILD_BYTES", 1)

    def build(self, body: str) -> None:
        script = self.recipe / "build-image"
        script.write_text(f"#!/bin/sh\n{body}\n")
        script.chmod(0o755)


@pytest.fixture
def builder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Builder:
    return Builder(tmp_path, monkeypatch)


def test_an_image_is_made_once_for_a_recipe(builder: Builder) -> None:
    builder.build("echo 1 >$1/image")
    first = cache.folder()
    made = os.stat(os.path.join(first, "image")).st_ino
    assert cache.folder() == first
    assert os.stat(os.path.join(first, "image")).st_ino == made
    builder.build("echo 2 >$1/image")
    assert not cache.have()
    second = cache.folder()
    assert Path(second, "image").read_text() == "2\n"
    assert sorted(os.listdir(builder.base)) == sorted(
        ["lock", os.path.basename(first), os.path.basename(second)]
    )


def test_a_build_that_fails_leaves_nothing(builder: Builder) -> None:
    builder.build("echo half >$1/image; echo No space left on device; exit 3")
    with pytest.raises(children.Failed, match=r"(?s)status 3.*No space left"):
        cache.folder()
    assert os.listdir(builder.base) == ["lock"]


def test_a_build_without_room_does_not_begin(
    builder: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    builder.build("echo 1 >$1/image")
    monkeypatch.setattr(cache, "BUILD_BYTES", 1 << 60)
    with pytest.raises(children.Failed, match="are needed"):
        cache.folder()
    assert os.listdir(builder.base) == ["lock"]


def test_what_a_killed_build_left_is_swept(builder: Builder) -> None:
    (builder.base / "build-cut/root").mkdir(parents=True)
    unused, used = builder.base / "old", builder.base / "young"
    unused.mkdir()
    used.mkdir()
    os.utime(unused, (0, 0))
    builder.build("echo 1 >$1/image")
    assert cache.folder()
    assert sorted(os.listdir(builder.base)) == sorted([cache.key(), "lock", "young"])


def test_two_at_once_build_once(builder: Builder) -> None:
    builder.build("echo built >>$1/../count; sleep 0.3; echo 1 >$1/image")
    code = "import sys; from tests.vm.machine import cache; cache.HERE = sys.argv[1]"
    code += "; cache.BUILD_BYTES = 1; print(cache.folder())"
    command = [sys.executable, "-c", code, str(builder.recipe)]
    runs = [subprocess.Popen(command, cwd=REPO, stdout=subprocess.PIPE) for _ in range(2)]
    said = [run.communicate(timeout=60)[0].decode().splitlines()[-1] for run in runs]
    assert [run.returncode for run in runs] == [0, 0]
    assert said[0] == said[1]
    assert (builder.base / "count").read_text() == "built\n"
