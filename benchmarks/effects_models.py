"""Does `numdev effects` accuse sound models, and do any attention implementations
disagree?

    python benchmarks/effects_models.py [FORMAT ...] [--only NAME ...]

A tiny model with wide random weights of each architecture of scripts/models_table.py, 8
sequences of 32 tokens, SDPA's flash and math backends. Printed is what the sites come to
beside the whole, the largest cost of a kernel over what its rounding model makes, and
every finding. All are sound, as far as transformers is: a finding is either a false
alarm, or a fault of the model's code."""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers

from numdev.errors import NumdevError
from numdev.request_models import effects_request
from numdev.studies.effects.study import effects

sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))
from models_table import INSTEAD, NAMES, SMALL

ASKED: dict[str, Any] = {
    "kernels": ("sdpa-flash", "sdpa-math"),
    "length": 32,
    "generate": 4,
}


def built(name: str, folder: Path) -> Path:
    cls = getattr(transformers, name)
    fields = cls.config_class().to_dict()
    small = {key: value for key, value in SMALL.items() if key in fields}
    for part in ("text_config", "vision_config"):
        if isinstance(fields.get(part), dict):
            small[part] = {
                key: value for key, value in SMALL.items() if key in fields[part]
            }
    small |= INSTEAD.get(name, {}) | {
        k: 0.3 for k in ("initializer_range", "init_std") if k in fields
    }
    torch.manual_seed(0)
    cls(cls.config_class(**small)).save_pretrained(folder / name)
    return folder / name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("formats", nargs="*", default=["bfloat16"])
    parser.add_argument("--only", nargs="*", default=NAMES)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    pairs = accused = refused = 0
    print(f"transformers {transformers.__version__}, torch {torch.__version__}")
    for name in asked.only:
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                with contextlib.redirect_stderr(io.StringIO()):
                    path = built(name, Path(folder))
                    request = effects_request(
                        str(path), {**ASKED, "formats": asked.formats}
                    )
                    report = effects(request, Path(folder) / "out")
            except NumdevError as error:
                refused += 1
                print(
                    f"{name:34} refused: {error.message.replace(str(folder), '')[:90]}",
                    flush=True,
                )
                continue
        sums = ", ".join(f"{b.format} {b.parts.mean:.2f}" for b in report.summary.budgets)
        over = [
            r.over.mean for r in report.summary.runs if r.kind == "attention" and r.over
        ]
        pairs += len(asked.formats)
        accused += report.outcome == "exceeded"
        print(
            f"{name:34} sum {sums}; over {max(over, default=0):.2f}; {report.outcome}",
            flush=True,
        )
        for finding in report.findings:
            print(f"    {finding.sentence}", flush=True)
    print(
        f"{pairs} pairs of model and format, {accused} models with a finding, "
        f"{refused} refused"
    )


if __name__ == "__main__":
    main()
