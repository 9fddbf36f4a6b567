# SPDX-License-Identifier: Apache-2.0
"""What a newer MindSpore Lite needs to convert an export for Ascend. Written here, not run here: it needs a device."""

from __future__ import annotations

from pathlib import Path

from ms_longctx.config.model import LlamaConfig
from ms_longctx.export.plan import Plan

SCRIPT, CONFIG = "convert_for_ascend.sh", "convert_for_ascend.cfg"

_CONFIG = """\
# Untested: for converter_lite of MindSpore Lite 2.3 or later on a machine with Ascend.
[ascend_context]
input_format=ND
precision_mode=enforce_origin
"""
_SCRIPT = """\
#!/usr/bin/env bash
# Untested: converts the MindIR of "ms-longctx export --format mindir --shapes {lengths}" for Ascend
# with converter_lite of MindSpore Lite 2.3 or later (its tools/converter/converter on the PATH, its
# tools/converter/lib on LD_LIBRARY_PATH). usage: {script} MINDIR_DIRECTORY [ascend_oriented:910b]
set -euo pipefail
here=$(cd "$(dirname "${{BASH_SOURCE[0]}}")" && pwd)
source_dir=$1
target=${{2:-ascend_oriented}}
for graph in {graphs}; do
    converter_lite --fmk=MINDIR --modelFile="$source_dir/$graph.mindir" --outputFile="$here/${{graph}}_ascend" \\
        --saveType=MINDIR --optimize="$target" --configFile="$here/{config}"
done
"""


def write_converter_files(folder: Path, plan: Plan, config: LlamaConfig) -> None:
    """Write the command line and the configuration of the converter for the graphs of ``plan``."""
    graphs = " ".join(graph.file for graph in plan.graphs(config, "fp32", ""))
    lengths = ",".join(str(length) for length in plan.lengths)
    script = folder / SCRIPT
    script.write_text(_SCRIPT.format(lengths=lengths, graphs=graphs, script=SCRIPT, config=CONFIG), encoding="utf-8")
    script.chmod(0o755)
    (folder / CONFIG).write_text(_CONFIG, encoding="utf-8")
