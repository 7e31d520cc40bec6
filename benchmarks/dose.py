"""Doses that are read off the ladder of nulls beside doses that were planted, and the
first paper's question on the flagship configuration.

    python benchmarks/dose.py planted [--small] [--seeds 20] [--device cuda] [--to DIR]
    python benchmarks/dose.py paper [--steps 1000] [--device cuda] [--to DIR]

`planted`: kernels with a known error, SDPA's output times (1 + 0.00125 n e) with e from
N(0, 1), whose gradients are SDPA's, so that the error is at the output alone. In the
first steps of a run each is read as a dose; beside it stands what is at its output, in
the same unit. Coverage: of how many sets of five of the seeds the 95 % interval holds
what was planted.

`paper`: configs/train/bounds-gpt.yaml whole (six minutes on an H200), then `numdev
bounds`: its first answers, and a short table. Run again with the same --to, it goes on
where it was stopped."""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import yaml
from torch import Tensor

from numdev import report as reports
from numdev.studies.training.bounds import study as bounds
from numdev.studies.training.bounds.answer_sentences import dose_in_words
from numdev.studies.training.bounds.report import BoundsReport
from numdev.studies.training.bounds.rounding_doses import BETWEEN, mean_over_seeds
from numdev.studies.training.config import TrainConfig, resolve
from numdev.studies.training.study import train
from numdev.yamlfile import read_yaml

ROOT = Path(__file__).resolve().parent.parent
FLAGSHIP = ROOT / "configs/train/bounds-gpt.yaml"
PLANTED = (1, 2, 4, 10, 30)
UNIT = 0.00125  # of the output; about the relative rms error of one rounding to bfloat16
RUNGS = (0.0625, 0.25, 1.0, 4.0, 16.0, 64.0)
OF_SEEDS, SETS = 5, 400
SMALL = {
    "model": {"kind": "gpt2", "layers": 2, "width": 64, "heads": 2, "context": 64},
    "data": {"source": "stdlib"},
    "batch": 4,
    "optimiser": {"lr": 1e-3, "warmup": 10, "weight_decay": 0.1},
}
GENERATORS: dict[str, torch.Generator] = {}


# --- kernels with a known error -------------------------------------------------------


def planted(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float, n: int
) -> Tensor:
    """Another e at every call. Gradients are those of SDPA's output."""
    generator = GENERATORS.setdefault(
        f"{q.device} {n}", torch.Generator(q.device).manual_seed(n)
    )
    out: Tensor = F.scaled_dot_product_attention(
        q, k, v, is_causal=is_causal, scale=scale
    )
    e = torch.randn(out.shape, generator=generator, device=out.device)
    exact = out.detach().float()
    wrong = (exact * (1 + UNIT * n * e)).to(out.dtype)
    return (out.float() + (wrong.float() - exact)).to(out.dtype)


def planted_1(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float) -> Tensor:
    return planted(q, k, v, is_causal, scale, 1)


def planted_2(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float) -> Tensor:
    return planted(q, k, v, is_causal, scale, 2)


def planted_4(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float) -> Tensor:
    return planted(q, k, v, is_causal, scale, 4)


def planted_10(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float) -> Tensor:
    return planted(q, k, v, is_causal, scale, 10)


def planted_30(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float) -> Tensor:
    return planted(q, k, v, is_causal, scale, 30)


# --- runs -----------------------------------------------------------------------------


def variants() -> list[dict[str, Any]]:
    """The golden run, flash, low precision, the ladder, and what was planted."""
    tried: list[dict[str, Any]] = [
        {
            "name": "baseline",
            "role": "golden",
            "kernel": "baseline",
            "format": "bfloat16",
        },
        {"name": "flash", "role": "flash", "kernel": "sdpa-flash"},
        {"name": "float32", "role": "low_precision", "format": "float32"},
        {
            "name": "float32 attention",
            "role": "attention_precision",
            "attention_format": "float32",
        },
    ]
    tried += [
        {"name": f"re-rounded at {times:g}", "role": "null_rounding", "times": times}
        for times in RUNGS
    ]
    tried += [
        {"name": f"planted {n}", "role": "flash", "kernel": f"dose:planted_{n}"}
        for n in PLANTED
    ]
    return tried


def run(config: Path, to: Path, *, device: str, steps: int | None = None) -> BoundsReport:
    """Train, write the report beside the journal, and read its bounds."""

    def progress(what: str, done: int, total: int) -> None:
        print(f"\r{done} of {total}: {what}    ", end="", file=sys.stderr, flush=True)

    request = resolve(
        read_yaml(config, TrainConfig), config.name, steps=steps, device=device
    )
    report = train(request, to, progress=progress)
    print(file=sys.stderr)
    assert report is not None
    reports.write(report, to)
    return bounds.bounds(to)


def table_of_planted(report: BoundsReport, run_of: Path) -> list[str]:
    """A row for each kernel: what is at its output, and its dose in each window with
    coverage."""
    rows = reports.read(run_of).outputs
    lines = [
        "| kernel | at its output, floors | gradient | step 1 | early |",
        "|---|---|---|---|---|",
    ]
    for name in dict.fromkeys(d.variant for d in report.doses):
        errors = {
            row.seed: row.from_golden
            for row in rows
            if row.variant == name and row.from_golden
        }
        cause = statistics.geometric_mean(errors.values()) if errors else None
        cells = [name, "–" if cause is None else f"{cause:.2f}"]
        for window in ("start", "first", "early"):
            dose = next(
                d for d in report.doses if (d.variant, d.window) == (name, window)
            )
            cells.append(dose_in_words(dose) + coverage(dose.by_seed, cause))
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def coverage(by_seed: dict[int, float], cause: float | None) -> str:
    """Of how many sets of OF_SEEDS seeds the interval holds the cause."""
    seeds = sorted(by_seed)
    if cause is None or len(seeds) < 2 * OF_SEEDS:
        return ""
    draw = random.Random(0)
    inside = 0
    for _ in range(SETS):
        _, low, high = mean_over_seeds(
            [by_seed[seed] for seed in draw.sample(seeds, OF_SEEDS)]
        )
        inside += (
            low is not None
            and high is not None
            and low / BETWEEN <= cause <= high * BETWEEN
        )
    return f"; {100 * inside / SETS:.0f} %"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("part", choices=("planted", "paper"))
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--to", type=Path)
    options = parser.parse_args(arguments)
    sys.path.insert(0, str(Path(__file__).resolve().parent))  # where `dose:planted_1` is
    with tempfile.TemporaryDirectory() as folder:
        to = options.to or Path(folder) / "run"
        if options.part == "paper":
            report = run(FLAGSHIP, to, device=options.device, steps=options.steps)
            print("\n".join(report.summary.answer), end="\n\n")
            print("\n".join(table_of_planted(report, to)))
            print(
                "\n| floors | gradient | step 1 | early | merged |\n|---|---|---|---|---|"
            )
            for times, rungs in itertools.groupby(
                sorted(report.ladder, key=lambda r: r.times), lambda r: r.times
            ):
                ratios = {r.window: r.ratio for r in rungs}
                cells = [ratios.get(w) for w in ("start", "first", "early", "saturated")]
                row = (f"{times:g}", *("–" if x is None else f"{x:.2f}" for x in cells))
                print(f"| {' | '.join(row)} |")
            print(report.saturation.model_dump(exclude={"early", "late"}))
            return
        content = dict(SMALL) if options.small else yaml.safe_load(FLAGSHIP.read_text())
        content |= {
            "variants": variants(),
            "seeds": options.seeds,
            "title": "Planted doses",
        }
        content |= {"steps": options.steps or 2, "record": [1, 2]}
        content.pop("record_every", None)
        config = Path(folder) / "planted.yaml"
        config.write_text(yaml.safe_dump(content, sort_keys=False))
        print("\n".join(table_of_planted(run(config, to, device=options.device), to)))


if __name__ == "__main__":
    main()
