"""How many checks of sound kernels are accused?

    OMP_NUM_THREADS=1 python benchmarks/false_alarms.py [--seeds 20] [--first 0] [--only NAME]
    OMP_NUM_THREADS=1 python benchmarks/false_alarms.py --cases configs/check/features.yaml
    OMP_NUM_THREADS=1 python benchmarks/false_alarms.py --audit

A check is a kernel in a format on a seed's inputs: all default cases of `numdev check`
(or those of `--cases`), forward and backward, with the default rules, as the kernel's
author would run it. The kernels are the sound ones of `planted`, of different designs, none
of which declares how it rounds unless it says so.

Prints each check that is accused or not judged, and a line for each kernel. With --audit
all are audited on the demo checkpoint, with gradients, one audit a seed: a check is then a
design in a format."""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path

import torch
from planted import Planted, of_family

import numdev
from numdev.kernels import Kernel
from numdev.report import Outcome
from numdev.testing import check

FORMATS = ("bfloat16", "float16")


def audited(chosen: list[Planted], seed: int) -> Counter[str]:
    """All of them in one audit of the demo checkpoint, before the default rules."""
    kernels = [
        each.function if isinstance(each.function, Kernel | str) else each.address
        for each in chosen
    ]
    names = [k.name if isinstance(k, Kernel) else k for k in kernels]
    report = numdev.audit(
        "demo", kernels=kernels, backward=True, seed=seed, length=128, formats=FORMATS
    )
    count = Counter(checks=len(FORMATS) * len(names))
    ran = {(r.kernel, r.format) for r in report.rows if r.tensor == "dq" and r.rms}
    count["not judged"] = count["checks"] - sum(name in names for name, _ in ran)
    wrong = [f for f in report.findings if f.severity == "exceeded"]
    count["accused"] = len({(f.kernel, fmt) for f in wrong for fmt in f.formats})
    for finding in wrong:
        print(f"  seed {seed}: {finding.sentence}", flush=True)
    return count


def counted(sound: Planted, seed: int, cases: Path | None) -> Counter[str]:
    """What the checks of one kernel on one seed come to, one for each format."""
    result = check(sound.kernel, cases=cases, formats=FORMATS, seeds=seed)
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


def summed(count: Counter[str]) -> str:
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
    parser.add_argument("--audit", action="store_true", help="on the demo checkpoint")
    options = parser.parse_args()
    torch.set_num_threads(1)
    every: Counter[str] = Counter()
    seeds = range(options.first, options.first + options.seeds)
    chosen = [each for each in of_family("sound") if (options.only or "") in each.name]
    for sound in () if options.audit else chosen:
        count: Counter[str] = Counter()
        for seed in seeds:
            count += counted(sound, seed, options.cases)
        every += count
        print(f"{sound.name}: {summed(count)}", flush=True)
    for seed in seeds if options.audit else ():
        every += audited(chosen, seed)
    print(f"{len(chosen)} kernels: {summed(every)}")


if __name__ == "__main__":
    main()
