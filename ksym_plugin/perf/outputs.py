"""Which output prints in which format."""

from __future__ import annotations

import os
import sys

from ksym_plugin.perf.output import FoldedOutput, TextOutput

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ksym_plugin.perf.data import Recorded
    from ksym_plugin.perf.options import Options
    from ksym_plugin.perf.output import Output


def choose(options: Options, data_path: str | None, recorded: Recorded) -> Output:
    """What prints in the format asked for; the text's own columns need perf's header."""
    if options.format == "text":
        return TextOutput(sys.stdout, recorded.width)
    if options.format == "folded":
        return FoldedOutput(sys.stdout)
    from ksym_plugin.perf import pictures, report

    if options.format == "report":
        return report.ReportOutput(sys.stdout)
    name = os.path.basename(data_path or "") or "perf.data"
    if options.format == "svg":
        return pictures.SvgOutput(sys.stdout, name)
    return pictures.SpeedscopeOutput(sys.stdout, name)
