"""Spells what the accelerator runs in angle brackets, and leaves the rest to others."""

from ksym_hooks import hookimpl


@hookimpl
def ksym_format_frame(frame):
    return f"<{frame.name}>" if frame.module == "[accelerator]" else None
