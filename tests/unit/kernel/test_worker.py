"""Processes that run a function of ours: what they send, and that nothing of them is left."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ksym_plugin.kernel import worker as module
from ksym_plugin.kernel.worker import Connection, Worker
from ksym_plugin.timeline.errors import SourceError
from tests.unit.hosts import fds

if TYPE_CHECKING:
    from collections.abc import Iterator

REPO = Path(__file__).resolve().parents[3]
BIG = 1 << 20
BOTH = pytest.mark.parametrize("is_forked", [False, True])


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    before = fds()
    yield
    assert fds() == before
    with pytest.raises(ChildProcessError):  # There is no child, running or not.
        os.waitpid(-1, os.WNOHANG)


def answers(owner: Connection) -> None:
    while True:
        owner.send(owner.receive())


def fails(owner: Connection) -> None:
    raise owner.receive()


def gives_a_descriptor(owner: Connection) -> None:
    read, write = os.pipe()
    os.write(write, b"x" * 3)
    owner.send("here it is", [read])
    owner.receive()


def tells_its_group(owner: Connection) -> None:
    owner.receive()
    owner.send(os.getpgrp())


def dies(owner: Connection) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def prints(owner: Connection) -> None:
    os.write(1, b"out\n")
    os.write(2, b"err\n")
    owner.send(os.read(0, 9))


@BOTH
def test_messages_come_whole_and_in_order(is_forked: bool) -> None:
    worker = Worker(answers, is_forked)
    for message in (None, "a", bytes(BIG), [(1, 2)], "z"):
        worker.send(message)
        assert worker.receive(20) == message
    assert worker.read() == []
    worker.finish()
    with pytest.raises(EOFError):
        worker.receive(20)
    assert worker.fileno() == -1
    worker.close()
    worker.close()


@BOTH
@pytest.mark.parametrize("error", [SourceError("no", "do"), OSError(errno.EPERM, "not you", "f")])
def test_what_it_raises_is_raised_here(is_forked: bool, error: Exception) -> None:
    worker = Worker(fails, is_forked)
    worker.send(error)
    with pytest.raises(type(error)) as caught:
        worker.receive(20)
    assert str(caught.value) == str(error)
    assert vars(caught.value) == vars(error)
    worker.close()


@BOTH
def test_one_that_dies_is_no_answer(is_forked: bool) -> None:
    worker = Worker(dies, is_forked)
    with pytest.raises(EOFError):
        worker.receive(20)
    worker.close()


@BOTH
def test_one_that_does_not_answer_is_ended(is_forked: bool) -> None:
    worker = Worker(answers, is_forked)
    with pytest.raises(TimeoutError):
        worker.receive(0.01)
    worker.close()


@BOTH
def test_descriptors_belong_to_who_takes_them(is_forked: bool) -> None:
    worker = Worker(gives_a_descriptor, is_forked)
    assert worker.receive(20) == "here it is"
    (fd,) = worker.fds
    assert not os.get_inheritable(fd)
    assert os.read(fd, 9) == b"xxx"
    worker.close()
    assert worker.fds == []
    worker = Worker(gives_a_descriptor, is_forked)
    worker.receive(20)
    (fd,) = worker.fds
    worker.fds = []
    worker.close()
    os.close(fd)


def test_what_is_posted_waits_for_nobody() -> None:
    sender, receiver = map(Connection, socket.socketpair())
    sender.post("first", bytes(BIG), "last")
    messages = []
    while sender.unsent:
        before = len(sender.unsent)
        messages += receiver.read()
        sender.post()
        assert len(sender.unsent) < before
    messages += receiver.read()
    assert messages == ["first", bytes(BIG), "last"]
    sender.close()
    receiver.close()


@BOTH
def test_one_of_which_the_kernel_keeps_no_status_is_ended(is_forked: bool) -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        worker = Worker(answers, is_forked)
        worker.send("x")
        worker.receive(20)
        worker.close()
        worker.close()
    finally:
        signal.signal(signal.SIGCHLD, before)


@BOTH
def test_a_terminal_s_signals_do_not_reach_it(is_forked: bool) -> None:
    worker = Worker(tells_its_group, is_forked)
    worker.send("go")
    assert worker.receive(20) != os.getpgrp()
    worker.close()


def test_its_words_go_where_they_shall(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with open(tmp_path / "output", "w+b") as output:
        worker = Worker(prints, output=output.fileno())
        assert worker.receive(20) == b""
        worker.close()
        output.seek(0)
        assert output.read() == b"out\nerr\n"
    for is_forked, errors in ((False, "err\n"), (True, "")):
        worker = Worker(prints, is_forked)
        assert worker.receive(20) == b""
        worker.close()
        assert capfd.readouterr() == ("", errors)


@BOTH
def test_one_that_cannot_be_started_leaves_nothing(
    is_forked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EAGAIN, "no more processes")

    monkeypatch.setattr(module, "_fork" if is_forked else "_start", fail)
    with pytest.raises(OSError, match="no more processes"):
        Worker(answers, is_forked)


@pytest.mark.parametrize("is_forked", ["", "True"])
def test_it_ends_when_its_owner_is_killed(is_forked: str) -> None:
    code = (
        "from ksym_plugin.kernel.worker import Worker\n"
        "from tests.unit.kernel.test_worker import answers\n"
        f"worker = Worker(answers, bool({is_forked!r}))\n"
        "worker.send('x'); worker.receive(20); print(worker._process.pid, flush=True); input()\n"
    )
    call = [sys.executable, "-c", code]
    with subprocess.Popen(
        call, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=REPO, text=True
    ) as owner:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        owner.kill()
    give_up = time.monotonic() + 20
    while _is_at_work(pid):
        assert time.monotonic() < give_up
        time.sleep(0.01)


def _is_at_work(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_proc_tells_of_processes_and_threads() -> None:
    call = ["sh", "-c", "sleep 100 & echo $!; wait"]
    with subprocess.Popen(call, stdout=subprocess.PIPE) as shell:
        assert shell.stdout is not None
        inner = int(shell.stdout.readline())
        assert set(module.family(os.getpid())) >= {os.getpid(), shell.pid, inner}
        assert module.family(shell.pid) == [shell.pid, inner]
        assert module.thread_ids(inner) == [inner]
        assert module.thread_status(inner)["PPid"] == [str(shell.pid)]
        assert module.thread_status(threading.get_native_id())["Tgid"] == [str(os.getpid())]
        os.kill(inner, signal.SIGKILL)
    assert module.thread_ids(inner) == []
    assert module.thread_status(inner) == {}
    assert module.family(inner) == [inner]
    assert module.mapped_files(inner) == b""
    assert os.fsencode(os.path.realpath(sys.executable)) in module.mapped_files(os.getpid())
