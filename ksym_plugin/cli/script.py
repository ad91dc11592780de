"""``ksym script``: perf script with every kernel frame named."""

from __future__ import annotations

import itertools
import os
import re
import signal
import subprocess
import sys

import click

import ksym_plugin
from ksym_plugin.cli import inputs, options
from ksym_plugin.history import locate
from ksym_plugin.timeline.errors import KsymError

#: Tells the handler, which perf's own interpreter runs, where this package is.
PACKAGE = "KSYM_PACKAGE"
_OURS = ("-i", "-H", "--input", "--history", "--boot", "--format", "--clock", "--vmlinux")
_FLAGS = ("-h", "--help", "--lines")
_VERSION_SECONDS = 20


class PassingCommand(click.Command):
    """Takes our options out of the arguments and leaves all others to perf as they are."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ours, theirs = split(args)
        return super().parse_args(ctx, [*ours, "--", *theirs])


def split(args: list[str]) -> tuple[list[str], list[str]]:
    """Our arguments and perf's, in order: ``-Fip`` is perf's ``-F ip`` and holds no ``-i``."""
    ours: list[str] = []
    theirs: list[str] = []
    rest = iter(args)
    for arg in rest:
        if arg == "--":  # All that follows is perf's; to perf itself it would mean the handler's.
            theirs += rest
        elif arg in _OURS:
            ours += [arg, *itertools.islice(rest, 1)]
        elif arg in _FLAGS or arg.startswith(("-i", "-H")) or arg.split("=")[0] in _OURS:
            ours.append(arg)
        else:
            theirs.append(arg)
    return ours, theirs


@click.command(
    name="script",
    cls=PassingCommand,
    short_help="perf script, with every kernel frame named.",
    epilog="Example: ksym script --format svg > flames.svg",
    options_metavar="[OPTIONS]",
)
@options.perf_data
@options.history
@click.option(
    "--format",
    "form",
    type=click.Choice(["text", "folded", "svg", "speedscope"]),
    default="text",
    show_default=True,
    help="perf script's text, one line a stack, a flame graph, or a file for speedscope.",
)
@click.option(
    "--lines",
    "with_lines",
    is_flag=True,
    help="Source lines in text and folded stacks too: of BPF, and of the kernel if its file is"
    " there.",
)
@click.option(
    "--vmlinux",
    "image",
    metavar="FILE",
    help="The kernel's vmlinux or .debug file: for names, and with --lines for its lines.",
)
@options.samples_clock
@click.argument("perf_options", nargs=-1, type=click.UNPROCESSED, metavar="[PERF OPTIONS]...")
def command(
    data: str | None,
    history: locate.Choice,
    form: str,
    with_lines: bool,
    image: str | None,
    clock: str | None,
    perf_options: tuple[str, ...],
) -> None:
    """Print what perf recorded, with every kernel frame named as it was when sampled.

    Runs perf script on its own handler; further options go to perf script, and its exit
    status is passed on. They choose samples (--comms, --time, --cpu); what is printed of
    each stays the same (-F and --ns change nothing). The history may also lie beside the
    perf.data.

    svg and speedscope have the source lines of BPF programs that were compiled with -g;
    --lines prints them below the frames of the text. Without --vmlinux, the kernel's file
    is looked for on the servers in $DEBUGINFOD_URLS.
    """
    file = inputs.vmlinux_for_data(image, with_lines, data)
    call, environment = handler_call(data, history, form, clock, perf_options)
    if with_lines:
        call.append("--lines")
    if file is not None:
        call += ["--vmlinux", file]
        environment.update(inputs.environment())
    sys.stdout.flush()
    # Python ignores it, and what is ignored stays so across exec.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    os.execvpe("perf", call, environment)  # noqa: S606 - no shell is wanted


def handler_call(
    data: str | None,
    history: locate.Choice,
    form: str,
    clock: str | None,
    perf_options: tuple[str, ...],
) -> tuple[list[str], dict[str, str]]:
    """The call of perf script on our handler, and its environment.

    The handler's own options may be added at its end. KsymError if perf cannot run it, or
    ``perf_options`` do not begin with an option.
    """
    if perf_options and not perf_options[0].startswith("-"):
        raise KsymError(
            f"'{perf_options[0]}' is no option of perf script", "name a perf.data with -i"
        )
    package = package_folder()
    call = ["perf", "script", *(("-i", data) if data else ()), "-s", handler(package)]
    call += [*perf_options, "--", "--format", form]
    found = locate.find(history, data)
    if found is not None:
        call += ["--history", found]
    if history.boot is not None:
        call += ["--boot", history.boot]
    if clock is not None:
        call += ["--clock", clock]
    require_python()
    return call, {**os.environ, PACKAGE: package}


def package_folder() -> str:
    """The folder that holds this package."""
    return os.path.dirname(os.path.dirname(os.path.abspath(ksym_plugin.__file__)))


def handler(package: str) -> str:
    """The script perf runs, from a checkout or from a wheel."""
    for parts in (
        ("contrib", "perf-script", "ksym_handler.py"),
        ("ksym_plugin", "_contrib", "ksym_handler.py"),
    ):
        path = os.path.join(package, *parts)
        if os.path.exists(path):
            return path
    raise KsymError(f"ksym_handler.py is missing from {package}", "install ksym-plugin again")


def require_python() -> None:
    """KsymError if there is no perf, or one that cannot run Python scripts."""
    try:
        done = subprocess.run(
            ["perf", "version", "--build-options"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_VERSION_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise KsymError("perf version does not come back", "see what keeps perf waiting") from None
    except OSError as error:
        raise KsymError(
            f"perf cannot be run ({error.strerror})", "install it (Debian: apt install linux-perf)"
        ) from None
    # "             libpython: [ on  ]  # HAVE_LIBPYTHON_SUPPORT"
    if re.search(rb"^\s*libpython\s*:.*OFF", done.stdout, re.MULTILINE):
        raise KsymError(
            "this perf was built without libpython and runs no Python scripts",
            "install one that has it (Debian: apt install linux-perf)",
        )
