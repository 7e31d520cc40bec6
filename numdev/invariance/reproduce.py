"""A script for each finding: its kernel along its axis alone, from the same calls."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

from numdev.audit.reproduce import FOLDER
from numdev.audit.script import folder_of
from numdev.config import InvarianceRequest
from numdev.gate.rules import Rules
from numdev.invariance.report import InvarianceReport
from numdev.report import replacing
from numdev.report.foreign import plain

SCRIPT = '''"""{sentence}

Written by numdev, which it needs. Exit code 1: the finding is there; 0: it is not; 2: it could not
be looked for."""

import sys
import tempfile
from pathlib import Path

sys.path.extend({folders!r})
try:
    from numdev.config import InvarianceRequest
    from numdev.gate.rules import InvarianceLimits, default_rules
    from numdev.invariance.study import invariance

    request = InvarianceRequest.model_validate_json(
        {request!r}
    )
    limits = InvarianceLimits.model_validate_json(
        {limits!r}
    )
    rules = default_rules().model_copy(update={{"invariance": limits}})
    report = invariance(request, Path(tempfile.mkdtemp()), rules=rules)
except Exception as error:
    print(error, file=sys.stderr)
    sys.exit(2)
print(*(finding.sentence for finding in report.findings), sep="\\n")
sys.exit(bool(report.findings))
'''


def reproducers(
    report: InvarianceReport, request: InvarianceRequest, rules: Rules, directory: Path, **_: Any
) -> list[Path]:
    """The scripts of what was found by the rules, in `directory`."""
    paths = []
    source = request.checkpoint
    if source is not None and Path(source).exists():
        request = request.model_copy(update={"checkpoint": str(Path(source).resolve())})
    for finding in report.findings:
        kernel = {"name": finding.kernel, "options": finding.options}
        alone = {"kernels": (kernel,), "axes": (finding.rule.split()[0],), "logits": False}
        asked = request.model_dump() | alone | {"formats": finding.formats}
        path = directory / FOLDER / finding.folder / "reproduce.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        sentence = plain(finding.sentence).replace('"', "'").replace("\\", "/")
        folder = folder_of(finding.kernel.partition(":")[0])
        text = SCRIPT.format(
            sentence=textwrap.fill(sentence, 96),
            folders=[folder] if ":" in finding.kernel and folder else [],
            request=InvarianceRequest.model_validate(asked).model_dump_json(),
            limits=rules.invariance.model_dump_json(),
        )
        with replacing(path) as file:
            file.write(text)
        paths.append(path)
    return paths
