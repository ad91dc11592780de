"""``scripts/vm``: the tests of ``tests/vm/guest``, or another job, on stock kernels."""

from __future__ import annotations

import argparse
import concurrent.futures
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading

from tests.vm.machine import cache, children, guest, verdict

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

KERNELS = ("6.1", "6.12")
TESTS = "tests/vm/guest"
#: What pytest may take after its time to name the tests that were not run.
REPORT_SECONDS = 180
_REPO = os.path.dirname(os.path.dirname(os.path.dirname(cache.HERE)))
# -v: a line a test, by which a slow guest is told from one that hangs; and the console ends
# with the test that a lost guest was at.
_PYTEST = (
    "-c tests/vm/guest.ini --rootdir . -v -ra -p no:cacheprovider --durations=15 "
    "--junitxml=/job/out/junit.xml"
)
_printing = threading.Lock()


def main() -> int:
    options = _options()
    os.chdir(_REPO)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _stop)
    try:
        problem = missing()
        images = "" if problem else cache.folder()
    except (children.Failed, OSError) as error:
        print(f"vm: {error}")
        problem = "the guests' image could not be made; why is said above"
    if problem:
        return _cannot(problem)
    kernels = options.kernel or KERNELS
    files = checkout()
    with concurrent.futures.ThreadPoolExecutor(len(kernels)) as pool:
        try:
            jobs = [pool.submit(_one, images, kernel, files, options) for kernel in kernels]
            results = [job.result() for job in jobs]
        except BaseException:
            children.stop()
            raise
    for result in results:
        print(result.line)
    return max(result.status for result in results)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/vm",
        description="Run tests/vm/guest on stock Debian kernels under QEMU, side by side.",
        epilog="All other arguments go to the pytest in the guest.",
        allow_abbrev=False,
    )
    parser.add_argument("--kernel", action="append", choices=KERNELS, help="only this one")
    parser.add_argument("--shell", metavar="SCRIPT", help="run this with bash instead of pytest")
    parser.add_argument(
        "--silence", type=float, default=300, help="seconds after which a silent guest is lost"
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=45,
        help="after which tests are no longer begun, and a guest still at work is soon lost",
    )
    parser.add_argument("--out", default="build/vm", help="where results go, a folder a kernel")
    options, rest = parser.parse_known_args()
    options.pytest = rest[1:] if rest[:1] == ["--"] else rest
    options.out = os.path.abspath(options.out)
    return options


def _stop(number: int, _frame: object) -> NoReturn:
    sys.exit(128 + number)


def missing() -> str:
    """What keeps guests from running here, in one sentence, or nothing."""
    if platform.machine() != "x86_64":
        return "the guests' image can be made on x86-64 only"
    wanted = [guest.QEMU, "debugfs", "e2fsck", "setpriv"]
    if not cache.have():
        if os.geteuid() != 0:
            return "making the guests' image needs root"
        wanted += ["mmdebstrap", "mke2fs", "apt-get"]
    lacking = [name for name in wanted if shutil.which(name) is None]
    return f"not installed: {' '.join(lacking)}" if lacking else ""


def _cannot(problem: str) -> int:
    """Skipped for a user, failed on CI."""
    if os.environ.get("CI", "") in ("true", "1"):
        print(f"FAILED: no guest could be started: {problem}")
        return verdict.NOT_STARTED
    print(f"SKIPPED: {problem}")
    return 0


def checkout() -> list[str]:
    """The files of the checkout as they are now, without those that git ignores."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
    names = {os.fsdecode(name) for name in listed.split(b"\0") if name}
    return sorted(name for name in names if os.path.lexists(name))


def _one(
    images: str, kernel: str, files: list[str], options: argparse.Namespace
) -> verdict.Verdict:
    os.makedirs(options.out, exist_ok=True)
    work = tempfile.mkdtemp(prefix=f".{kernel}-", dir=options.out)

    def show(line: str) -> None:
        with _printing:
            print(f"{kernel:4} | {line}", flush=True)

    try:
        job = script(kernel, options)
        limits = guest.Limits(options.silence, options.minutes * 60 + REPORT_SECONDS)
        outcome = guest.run(images, kernel, job, files, work, limits, show)
        os.chmod(work, 0o755)
        final = os.path.join(options.out, kernel)
        shutil.rmtree(final, ignore_errors=True)
        os.rename(work, final)
    except (children.Failed, OSError) as error:
        return verdict.Verdict(verdict.NOT_STARTED, f"vm: {kernel}: NOT STARTED: {error}")
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return verdict.judge(kernel, outcome, final, tests=options.shell is None)


def script(kernel: str, options: argparse.Namespace) -> str:
    """The job: the script asked for, or pytest with its report among the results."""
    head = f'export PYTHONPATH="$PWD:$PWD/hooks" KSYM_GUEST={kernel}'
    # With columns for why a test failed: pytest cuts the lines of its summary off.
    head += f" KSYM_GUEST_MINUTES={options.minutes:g} COLUMNS=160\n"
    if options.shell is not None:
        return f"{head}{options.shell}\n"
    paths = [] if any(os.path.exists(a.split("::")[0]) for a in options.pytest) else [TESTS]
    arguments = shlex.join([*options.pytest, *paths])
    return f"{head}exec python3 -m pytest {_PYTEST} {arguments}\n"


if __name__ == "__main__":
    sys.exit(main())
