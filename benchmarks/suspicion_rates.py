"""Does suspicion name the guilty rightly, and leave the sound alone?

    python benchmarks/suspicion_rates.py [--seeds 1] [--only sound|planted] [--small]

Sound: every kernel, format, regime, shape and seed is one independent unit. For each it
is counted whether the search was triggered (`far_off` in any head), whether it then
accused, and whether it would accuse if it were always run (the stricter question: the
trigger does not help).

Planted: faults of `planted` in fp64, correct but for one mistake and one rounding of the
output, in every regime and format. Rightly named: the planted cause is the one named,
alone or in a set of causes that coincide on these data. Not named: the cut is less than
tenfold. Wrongly: the rest.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from planted import CATALOGUE, Planted
from planted.function import exactly
from torch import Tensor

from numdev.cases import AttentionCase, CaseRef
from numdev.errors import Refused
from numdev.formats import format_named, format_of, round_to
from numdev.kernels import find
from numdev.kernels.reference import attend
from numdev.kernels.reference.blocked import Reference
from numdev.metrics import deviation
from numdev.metrics.deviation import Yardstick
from numdev.operations.attention.explain.wrong_function import far_off, suspect
from numdev.sources.input_regimes import Shapes, draw

REGIMES: dict[str, tuple[str, dict[str, Any]]] = {
    "normal": ("normal", {}),
    "logits x 4": ("normal", {"logits": 4.0}),
    "logits x 16": ("normal", {"logits": 16.0}),
    "sink": ("sink", {}),
    "ties": ("ties", {}),
    "outliers": ("outliers", {}),
}
FORMATS = ("bfloat16", "float16", "float32")
SOUND = ("sdpa-math", "sdpa-flash", "baseline")


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes and features of a drawn case."""

    batch: int = 2
    heads: int = 4
    kv_heads: int = 4
    q_len: int = 96
    kv_len: int = 96
    dim: int = 64
    mask: str | None = None
    changes: tuple[tuple[str, Any], ...] = ()


SHAPES = {
    "plain": Shape(),
    "causal": Shape(changes=(("is_causal", True),)),
    "grouped, causal": Shape(kv_heads=2, changes=(("is_causal", True),)),
    "bool mask": Shape(mask="bool"),
    "additive mask, grouped": Shape(kv_heads=2, mask="additive"),
    "window": Shape(changes=(("is_causal", True), ("window", (16, 0)))),
    "bottom-right": Shape(
        q_len=40, kv_len=100, changes=(("is_causal", True), ("causal_offset", 60))
    ),
    "decode": Shape(q_len=1, kv_len=100),
    "two keys": Shape(q_len=5, kv_len=2, heads=2, kv_heads=2),
}


def make(shape: Shape, regime: str, fmt: str, seed: int) -> AttentionCase:
    """A drawn case in a format."""
    name, options = REGIMES[regime]
    sizes = Shapes(
        batch=shape.batch,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        q_len=shape.q_len,
        kv_len=shape.kv_len,
        head_dim=shape.dim,
        v_dim=shape.dim,
    )
    q, k, v = draw(name, sizes, seed=seed, options=options, label=f"{shape}")
    generator = torch.Generator().manual_seed(seed)
    mask = None
    full = (shape.batch, 1, shape.q_len, shape.kv_len)
    if shape.mask == "bool":
        mask = torch.rand(full, generator=generator) < 0.7
        mask[..., 0] = True
    elif shape.mask == "additive":
        mask = torch.randn(full, generator=generator)
    case = AttentionCase(
        ref=CaseRef(case="drawn"), q=q, k=k, v=v, scale=shape.dim**-0.5, mask=mask
    )
    case = dataclasses.replace(case, **dict(shape.changes))
    return case.rounded_to(format_named(fmt))


def judge(
    case: AttentionCase, out: Tensor, exact: Reference, *, always: bool
) -> list[str]:
    """What is said of an output: the distinct causes over its heads."""
    baseline = find("baseline").attend(case).out
    yardstick = Yardstick(
        reference=exact.out,
        term_scale=exact.term_scale,
        empty=exact.empty,
        format=format_of(out.dtype),
        baseline=baseline,
    )
    metrics = deviation.measure(out, yardstick).heads
    every = range(case.heads)
    far = [h for h in every if always or far_off(metrics[h])]
    if not far:
        return ["not far off"]
    suspected = suspect(case, out, exact, list(every), far)
    return sorted({s.cause for s in suspected.values()}) or ["none"]


# --- sound kernels --------------------------------------------------------------------


def sound(seeds: int, few: slice) -> None:
    """Count accusations of sound kernels."""
    print("| kernel | units | refused | far off | accused | accused if always searched |")
    print("|---|---|---|---|---|---|", flush=True)
    for kernel in SOUND[few]:
        units = refused = far = accused = forced = 0
        for regime in list(REGIMES)[few]:
            for fmt in FORMATS[few]:
                for label, shape in list(SHAPES.items())[few]:
                    for seed in range(seeds):
                        case = make(shape, regime, fmt, seed)
                        try:
                            out = find(kernel).attend(case).out
                        except Refused:
                            refused += 1
                            continue
                        exact = attend(case)
                        units += 1
                        names = judge(case, out, exact, always=False)
                        far += names != ["not far off"]
                        accused += names not in (["not far off"], ["none"])
                        names = judge(case, out, exact, always=True)
                        forced += names != ["none"]
                        if names != ["none"]:
                            print(
                                "   ", kernel, regime, fmt, label, seed, names, flush=True
                            )
        print(
            f"| {kernel} | {units} | {refused} | {far} | {accused} | {forced} |",
            flush=True,
        )


# --- planted mistakes -----------------------------------------------------------------

SINKS = Shape(changes=(("sinks", torch.tensor([2.0, 3.0, 4.0, 5.0])),))
CAUSAL, GROUPED = SHAPES["causal"], Shape(heads=6, kv_heads=3)
LONG = Shape(q_len=100, kv_len=100)
CAPPED = Shape(changes=(("softcap", 1.0),))
UNEVEN = Shape(q_len=40, kv_len=100, changes=(("is_causal", True),))
SHOWN: Mapping[Shape, str] = {
    # where, which faults of `planted`
    SHAPES[
        "plain"
    ]: "scale-101 scale-095 scale-forgotten scale-twice scale-ln2 causal-always "
    "heads-for-length out-misread all-misread no-row-sum v-reversed v-misread rows-16th zeros "
    "batch-kv-0 scale-of-one-head",
    CAUSAL: "causal-plus1 causal-minus1 causal-ignored",
    UNEVEN: "causal-bottom-right",
    SHAPES["bottom-right"]: "causal-top-left",
    GROUPED: "kv-next kv-modulo kv-first",
    SHAPES["bool mask"]: "mask-inverted mask-ignored mask-as-numbers",
    SHAPES["additive mask, grouped"]: "mask-ignored",
    SHAPES["window"]: "window-ignored window-plus1 window-minus1",
    CAPPED: "cap-ignored",
    SINKS: "sinks-ignored sinks-twice",
    LONG: "tail-64 last-key padding-counts",
}
PLANTED = [
    (CATALOGUE[name], shape) for shape, names in SHOWN.items() for name in names.split()
]


def wrong(entry: Planted, case: AttentionCase) -> Tensor:
    """What a fault returns, rounded once."""
    return round_to(exactly(entry, case), case.format).to(case.q.dtype)


def planted(seeds: int, few: slice) -> None:
    """Count how mistakes are named."""
    print("\n| mistake |", *(f"{f} right | none | wrong |" for f in FORMATS))
    print("|---|" + "---|" * 3 * len(FORMATS))
    totals: Counter[tuple[str, str]] = Counter()
    for entry, shape in PLANTED[few]:
        cells = []
        for fmt in FORMATS:
            counts: Counter[str] = Counter()
            for regime, seed in (
                (r, s) for r in list(REGIMES)[few] for s in range(seeds)
            ):
                case = make(shape, regime, fmt, seed)
                words = judge(case, wrong(entry, case), attend(case), always=False)
                counts[verdict(entry, words)] += 1
                if verdict(entry, words) == "wrong":
                    print("   ", entry.name, regime, fmt, seed, words)
            cells.append(f" {counts['right']} | {counts['none']} | {counts['wrong']} |")
            for k, n in counts.items():
                totals[fmt, k] += n
        print(f"| {entry.name} |", *cells, flush=True)
    print(
        "| all |",
        *(
            f" {totals[f, 'right']} | {totals[f, 'none']} | {totals[f, 'wrong']} |"
            for f in FORMATS
        ),
    )


def verdict(entry: Planted, words: list[str]) -> str:
    """Whether the words are right, nothing, or wrong."""
    if words in (["not far off"], ["none"]):
        return "none"
    right = all(re.search(entry.says or "", cause) for cause in words)
    return "right" if right else "wrong"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--only", choices=("sound", "planted"))
    parser.add_argument("--small", action="store_true", help="one of everything")
    options = parser.parse_args()
    few = slice(1 if options.small else None)
    start = time.perf_counter()
    print(
        f"torch {torch.__version__}, {torch.get_num_threads()} threads, "
        f"{options.seeds} seeds\n"
    )
    if options.only != "planted":
        sound(options.seeds, few)
    if options.only != "sound":
        planted(options.seeds, few)
    print(f"\n{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
