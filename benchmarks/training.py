"""What does a whole training step cost with each attention?

    python benchmarks/training.py [--device cuda] [--steps 30] [--config FILE] [--batch N]

The model, data and batch of a configuration, one variant for each kernel that can run here. The
variants take turns, a step each, so that the clock's moods meet all of them; the median of their
times stands for each, synchronised before and after. A step is forward, backward, clipping and
update. Ratios are to `baseline`, and of triton-flash to sdpa-flash, in one run. Prints Markdown.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import torch

from numdev.config import Choice
from numdev.kernels import find
from numdev.system import System
from numdev.training.config import TrainConfig, Variant, resolve
from numdev.training.data import Data, load
from numdev.training.deterministic import deterministic
from numdev.training.lane import Lane
from numdev.yamlfile import read_yaml

KERNELS = (
    Choice(name="baseline"),
    Choice(name="sdpa-flash"),
    Choice(name="sdpa-math"),
    Choice(name="sdpa-default"),
    Choice(name="triton-flash"),
    Choice(name="triton-flash", options={"softmax": "stabilised"}),
    Choice(name="emulated", options={"compute": "float32"}),
    Choice(name="emulated", options={"compute": "float32", "preset": "eager"}),
    Choice(name="emulated", options={"compute": "float32", "preset": "qiu2025"}),
)
FIRST = 3
"""Steps that pay for allocation and compilation."""


def main() -> None:
    parser = argparse.ArgumentParser(description="a training step by attention kernel")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--config", type=Path, default=Path("configs/train/bounds-gpt.yaml"))
    parser.add_argument("--batch", type=int, help="in place of the configuration's")
    given = parser.parse_args()
    with deterministic(wanted=True):
        compared(given)


def compared(given: argparse.Namespace) -> None:
    """The table."""
    system = System.here(given.device)
    request = resolve(read_yaml(given.config, TrainConfig), given.config.name)
    batch = given.batch or request.batch
    device = torch.device(system.device)
    data = load(request.data, request.model, batch, device)
    lanes = {}
    for choice in KERNELS:
        if find(choice.name).missing(system) is None:
            changes = {"kernel": choice, "attention_format": None, "format": "bfloat16"}
            variant = request.golden.model_copy(update=changes)
            lanes[label(variant)] = Lane(variant, request.model, data.vocabulary, 0, device)
    took = times(lanes, data, given.steps, device)
    where = system.gpu or system.cpu
    print(f"{where}, torch {torch.__version__}, {given.config.name}, batch {batch}\n")
    print("| kernel | ms a step | x baseline | x sdpa-flash |")
    print("|---|---|---|---|")
    for name, ms in took.items():
        ratios = (f"{ms / took[other]:.2f}" for other in ("baseline", "sdpa-flash"))
        print(f"| {name} | {ms:.2f} | {' | '.join(ratios)} |")


def times(lanes: dict[str, Lane], data: Data, steps: int, device: torch.device) -> dict[str, float]:
    """The median milliseconds of a step of each lane."""
    found: dict[str, list[float]] = {name: [] for name in lanes}
    for step in range(1, steps + FIRST + 1):
        batch = data.batch(0, step)
        for name, lane in lanes.items():
            settle(device)
            began = time.perf_counter()
            lane.step(batch, step, steps + FIRST)
            settle(device)
            found[name].append((time.perf_counter() - began) * 1e3)
    return {name: statistics.median(all_[FIRST:]) for name, all_ in found.items()}


def settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def label(variant: Variant) -> str:
    options = ", ".join(f"{name}={value}" for name, value in variant.kernel.options.items())
    return f"{variant.kernel.name}({options})" if options else variant.kernel.name


if __name__ == "__main__":
    main()
