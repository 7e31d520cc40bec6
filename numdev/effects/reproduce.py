"""A script for each finding on the model itself, which needs torch and transformers alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from numdev.audit.reproduce import FOLDER
from numdev.config import demo_checkpoint
from numdev.effects.report import EffectsReport

SCRIPT = '''"""{sentence}

Made by numdev; needs torch and transformers alone. Exits with 1 where the difference shows."""

import sys

import torch
import transformers

IDS = torch.tensor([[{tokens}]])
N = {length}  # tokens that are changed, hidden or decoded

other = IDS.clone()

def model(way="sdpa"):
    cls = transformers.{architecture}
    return cls.from_pretrained({path!r}, dtype=torch.float64, attn_implementation=way).eval()

@torch.no_grad()
def output(ids, way="sdpa", **more):
    return model(way)(input_ids=ids, **more)[0]

{body}
difference = float((one - two).abs().max() / one.std())
print(f"largest difference: {{difference:.3g}} of the output's size")
sys.exit(difference > 1e-4)
'''
WAYS = 'one, two = output(IDS, "sdpa"), output(IDS, "eager")'
BODIES: Mapping[str, str] = {
    "eager": WAYS,
    "sdpa": WAYS,
    "causality": """other[:, -N:] = IDS[:, -N:].roll(1, dims=1)
one, two = (output(ids)[:, :-N] for ids in (IDS, other))""",
    "mask": """mask = torch.ones_like(IDS)
mask[:, :N] = 0
other[:, :N] = IDS[:, N : 2 * N]
one, two = (output(ids, attention_mask=mask)[:, N:] for ids in (IDS, other))""",
    "cache": """whole, past, parts = model(), None, []
with torch.no_grad():
    for ids in (IDS[:, :-N], *IDS[:, -N:].split(1, dim=1)):
        answer = whole(input_ids=ids, past_key_values=past, use_cache=True)
        past = answer.past_key_values
        parts.append(answer[0])
one, two = output(IDS)[:, -N:], torch.cat(parts, dim=1)[:, -N:]""",
}


def reproducers(report: EffectsReport, directory: Path) -> list[Path]:
    """Write the scripts of a report's findings; those for which one can be written."""
    path = report.request["checkpoint"]
    path = demo_checkpoint() if path == "demo" else Path(path).resolve()
    written, can = [], (path / "config.json").is_file() and bool(report.tokens)
    for finding in (f for f in report.findings if f.rule in BODIES and can):
        file = directory / FOLDER / finding.folder / "reproduce.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        text = SCRIPT.format(
            sentence=finding.sentence,
            tokens=", ".join(map(str, report.tokens)),
            length=min(4, len(report.tokens) // 3),
            architecture=report.provenance.source["architecture"],
            path=str(path),
            body=BODIES[finding.rule],
        )
        file.write_text(text, encoding="utf-8")
        written.append(file)
    return written
