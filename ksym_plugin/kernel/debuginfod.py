"""Debug information from debuginfod servers: only where $DEBUGINFOD_URLS names some."""

from __future__ import annotations

import os

from ksym_plugin.kernel import cache
from ksym_plugin.kernel.elf import ElfError

VARIABLE = "DEBUGINFOD_URLS"
_WAIT = 90.0
_HEX = frozenset("0123456789abcdef")


def is_wanted() -> bool:
    """Whether there are servers to ask."""
    return bool(os.environ.get(VARIABLE, "").split())


def find(build_id: str) -> str:
    """The path of a file with the symbols and DWARF of that build; ElfError if nobody has it.

    It is kept under $XDG_CACHE_HOME, as debuginfod(8) describes the protocol:
    ``GET /buildid/BUILDID/debuginfo``.
    """
    if not build_id or not _HEX.issuperset(build_id):
        raise ElfError("this kernel has no build id", "name its vmlinux with --vmlinux")
    kept = os.path.join(cache.root(), "debuginfo", build_id)
    if os.path.exists(kept):
        return kept
    problems = []
    for url in os.environ.get(VARIABLE, "").split():
        problem = _fetch(f"{url.rstrip('/')}/buildid/{build_id}/debuginfo", kept)
        if not problem:
            return kept
        problems.append(f"{url}: {problem}")
    raise ElfError(
        f"no debuginfod server has build {build_id} ({'; '.join(problems)})",
        "name the kernel's vmlinux or .debug file with --vmlinux",
    )


def _fetch(url: str, kept: str) -> str:
    """Download to ``kept``, whole or not at all; why not, or ``""``."""
    import shutil
    import tempfile
    from http.client import HTTPException
    from urllib.request import urlopen

    if not url.startswith(("http://", "https://")):
        return "no http or https address"
    try:
        os.makedirs(os.path.dirname(kept), mode=0o700, exist_ok=True)
        fd, partial = tempfile.mkstemp(dir=os.path.dirname(kept))
    except OSError as error:
        return f"the file cannot be kept ({error})"
    try:
        # S310 is about other schemes, such as file:, which were turned away above; urllib
        # follows no redirection to one.
        with os.fdopen(fd, "wb") as file, urlopen(url, timeout=_WAIT) as answer:  # noqa: S310
            shutil.copyfileobj(answer, file)
            if answer.length:
                raise OSError(f"{answer.length} bytes are missing")
        os.rename(partial, kept)
    except BaseException as error:
        # Also on Ctrl-C: a kernel's has hundreds of megabytes.
        os.unlink(partial)
        # A ValueError is what a malformed address gives.
        if not isinstance(error, (OSError, HTTPException, ValueError)):
            raise
        return str(error)
    return ""
