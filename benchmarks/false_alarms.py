"""How many checks of sound kernels are accused?

    OMP_NUM_THREADS=1 python benchmarks/false_alarms.py [--seeds 20] [--first 0] [--only NAME]
    OMP_NUM_THREADS=1 python benchmarks/false_alarms.py --cases configs/check/features.yaml

A check is a kernel in a format on a seed's inputs: all default cases of `numdev check`
(or those of `--cases`), forward and backward, with the default rules, as the kernel's
author would run it. Sound kernels of different designs, none of which declares how it
rounds unless it says so:

- the designs of public kernels, written out without numdev (`benchmarks/designs.py`);
- eager attention as people spell it, whose gradients autograd makes through its casts
  (`numdev.kernels.baseline.WAYS`);
- PyTorch's operators, and the baseline;
- emulations in tiles, orders and splits other than they claim, or undeclared.

Prints each check that is accused or not judged, and a line for each kernel."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from designs import DESIGNS, kernel, through_casts

from numdev.kernels import Kernel, Output, find, of_function
from numdev.kernels.baseline import WAYS
from numdev.report import Outcome
from numdev.testing import check

FORMATS = ("bfloat16", "float16")
OPERATORS = ("sdpa-flash", "sdpa-math", "sdpa-default", "baseline")
ROUNDS_SUMS = ("eager", "fa2-consistent")
FA3: Mapping[str, Any] = {"dk_partial": "wide", "dv_partial": "wide"}
EMULATED: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {
    # by name, what is claimed and what is run beside it
    "FlashAttention-2, tiles of 16": ({"preset": "fa2"}, {"block_kv": 16, "block_q": 16}),
    "FlashAttention-2, tiles of 32": ({"preset": "fa2"}, {"block_kv": 32}),
    "FlashAttention-2, tiles of 96, last first": (
        {"preset": "fa2"}, {"block_kv": 96, "kv_order": "descending"},
    ),
    "FlashAttention-2, three splits": ({"preset": "fa2"}, {"splits": 3, "block_kv": 32}),
    "FlashAttention-3, tiles of 48": ({"preset": "fa2", **FA3}, {"block_kv": 48}),
    "FlashAttention-3, tiles of 176": ({"preset": "fa2", **FA3}, {"block_kv": 176}),
    "FlashAttention-4": ({"preset": "fa4"}, {}),
    "fa2-consistent, tiles of 32": ({"preset": "fa2-consistent"}, {"block_kv": 32}),
    "eager": ({"preset": "eager"}, {}),
}  # fmt: skip


def kernels() -> Iterator[Kernel]:
    """All of them, each under a name of its own."""
    for name in DESIGNS:
        yield of_function(name, kernel(name))
    yield of_function("through casts", through_casts)
    for words, way in WAYS.items():
        yield Kernel(name=words, function=way)
    for name in OPERATORS:
        yield find(name)
    for name, (claim, ran) in EMULATED.items():
        yield emulating(f"{name}, declared", claim, ran, declared=True)
        if claim["preset"] == "fa2":
            yield emulating(f"{name}, undeclared", claim, ran, declared=False)


def emulating(
    name: str, claim: Mapping[str, Any], ran: Mapping[str, Any], *, declared: bool
) -> Kernel:
    """An emulation as a kernel, in fp32 arithmetic. One that rounds its scores or row
    sums returns no log-sum-exp: made of them it would lack the digits that a backward
    pass needs."""
    emulated = find("emulated")
    options = {**claim, **ran, "compute": "float32"}

    def returned(output: Output) -> Output:
        return replace(output, lse=None) if claim["preset"] in ROUNDS_SUMS else output

    claims: dict[str, Any] = (
        {"claims": lambda case, output, system: claim} if declared else {}
    )
    return Kernel(
        name=name,
        function=lambda case: returned(emulated.attend(case, **options)),
        backward=lambda case: returned(emulated.gradients(case, **options)),
        **claims,
    )


def counted(sound: Kernel, seed: int, cases: Path | None) -> Counter[str]:
    """What the checks of one kernel on one seed come to, one for each format."""
    result = check(sound, cases=cases, formats=FORMATS, seeds=seed)
    count: Counter[str] = Counter()
    for verdict in result.report.verdicts:
        count["checks"] += 1
        if verdict.outcome is Outcome.EXCEEDED:
            count["accused"] += 1
        elif verdict.outcome is Outcome.NOT_JUDGED:
            count["not judged"] += 1
    for finding in result.report.findings:
        if finding.severity != "note":
            print(f"  seed {seed}: {finding.sentence}", flush=True)
    return count


def told(count: Counter[str]) -> str:
    return (
        f"{count['accused']} of {count['checks']} accused, {count['not judged']} "
        "not judged"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description="How many checks of sound kernels are accused?"
    )
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--only", help="kernels with this in their names")
    parser.add_argument(
        "--cases", type=Path, help="a YAML file in place of the default cases"
    )
    given = parser.parse_args()
    torch.set_num_threads(1)
    every: Counter[str] = Counter()
    chosen = [each for each in kernels() if (given.only or "") in each.name]
    for sound in chosen:
        count: Counter[str] = Counter()
        for seed in range(given.first, given.first + given.seeds):
            count += counted(sound, seed, given.cases)
        every += count
        print(f"{sound.name}: {told(count)}", flush=True)
    print(f"{len(chosen)} kernels: {told(every)}")


if __name__ == "__main__":
    main()
