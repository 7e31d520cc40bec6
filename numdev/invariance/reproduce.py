"""A script for each finding: its kernel along its axis alone, from the same calls."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

from numdev.audit.reproduce import FOLDER
from numdev.config import InvarianceRequest
from numdev.invariance.report import InvarianceReport
from numdev.report import replacing
from numdev.report.foreign import plain

SCRIPT = '''"""{sentence}

Written by numdev, which it needs; exit code 1 where the finding is there."""

import sys
import tempfile
from pathlib import Path

from numdev.config import InvarianceRequest
from numdev.invariance.study import invariance

request = InvarianceRequest.model_validate_json(
    {request!r}
)
report = invariance(request, Path(tempfile.mkdtemp()))
print(*(finding.sentence for finding in report.findings), sep="\\n")
sys.exit(bool(report.findings))
'''


def reproducers(
    report: InvarianceReport, request: InvarianceRequest, directory: Path, **_: Any
) -> list[Path]:
    """The scripts of what was found, in `directory`."""
    paths = []
    for finding in report.findings:
        kernel = {"name": finding.kernel, "options": finding.options}
        alone = {"kernels": (kernel,), "axes": (finding.rule.split()[0],), "logits": False}
        asked = request.model_dump() | alone | {"formats": finding.formats}
        text = InvarianceRequest.model_validate(asked).model_dump_json()
        path = directory / FOLDER / finding.folder / "reproduce.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        sentence = textwrap.fill(plain(finding.sentence).replace('"', "'").replace("\\", "/"), 96)
        with replacing(path) as file:
            file.write(SCRIPT.format(sentence=sentence, request=text))
        paths.append(path)
    return paths
