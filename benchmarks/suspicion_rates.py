"""Does suspicion name the guilty rightly, and leave the sound alone?

    python benchmarks/suspicion_rates.py [--seeds 1] [--only sound|planted] [--small]

Sound: every kernel, format, regime, shape and seed is one independent unit. For each it
is counted whether the search was triggered (`far_off` in any head), whether it then
accused, and whether it would accuse if it were always run (the stricter question: the
trigger does not help).

Planted: attention in fp32 or wider, correct but for one mistake and one rounding of the
output, in every regime and format. Rightly named: the planted cause is the one named,
alone or in a set of causes that coincide on these data. Not named: the cut is less than
tenfold. Wrongly: the rest.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from numdev.cases import AttentionCase, CaseRef, explicit_mask
from numdev.errors import Refused
from numdev.formats import format_named, format_of, round_to
from numdev.kernels import find
from numdev.kernels.reference import attend
from numdev.kernels.reference.blocked import Reference
from numdev.metrics import deviation
from numdev.metrics.deviation import Yardstick
from numdev.operations.attention.explain.wrong_function import far_off, suspect
from numdev.sources.regimes import Shapes, draw

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
    found = suspect(case, out, exact, list(every), far)
    return sorted({s.cause for s in found.values()}) or ["none"]


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
                        said = judge(case, out, exact, always=False)
                        far += said != ["not far off"]
                        accused += said not in (["not far off"], ["none"])
                        said = judge(case, out, exact, always=True)
                        forced += said != ["none"]
                        if said != ["none"]:
                            print(
                                "   ", kernel, regime, fmt, label, seed, said, flush=True
                            )
        print(
            f"| {kernel} | {units} | {refused} | {far} | {accused} | {forced} |",
            flush=True,
        )


# --- planted mistakes -----------------------------------------------------------------

Wrong = Callable[[AttentionCase], Tensor]


def exactly(**changes: Any) -> Wrong:
    """The exact result of a changed case."""
    return lambda case: attend(dataclasses.replace(case, **changes)).out


def changed(change: Callable[[AttentionCase], dict[str, Any]]) -> Wrong:
    return lambda case: attend(dataclasses.replace(case, **change(case))).out


def plain_torch(case: AttentionCase, scale: float) -> Tensor:
    """fp32 attention of its own, in case numdev's reference and alternatives share a
    mistake."""
    q, k, v = (x.float() for x in (case.q, case.k, case.v))
    k, v = (x.repeat_interleave(case.group, dim=1) for x in (k, v))
    S = q @ k.mT * scale
    mask = explicit_mask(case)
    if mask is not None:
        S = S.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else S + mask
    return torch.softmax(S, dim=-1) @ v


def off_by_one(case: AttentionCase, diagonal: int) -> Tensor:
    shown = torch.ones(case.q_len, case.kv_len, dtype=torch.bool).tril(diagonal)
    mask = torch.zeros(shown.shape).masked_fill(~shown, -math.inf)
    q, k, v = (x.float() for x in (case.q, case.k, case.v))
    return torch.softmax(q @ k.mT * case.scale + mask, dim=-1) @ v


def swapped_layout(case: AttentionCase) -> Tensor:
    """A kernel for [batch, length, heads, dim] that is handed [batch, heads, length,
    dim]."""
    q, k, v = (x.float().transpose(1, 2) for x in (case.q, case.k, case.v))
    return (torch.softmax(q @ k.mT * case.scale, dim=-1) @ v).transpose(1, 2)


def output_layout(case: AttentionCase) -> Tensor:
    right = plain_torch(case, case.scale)
    return right.transpose(1, 2).contiguous().view(right.shape)


def all_layouts(case: AttentionCase) -> Tensor:
    """Flat memory, walked with [batch, length, heads, dim] strides, in and out."""
    b, h, n, d = case.q.shape
    q, k, v = (
        x.float().reshape(b, n, h, d).transpose(1, 2) for x in (case.q, case.k, case.v)
    )
    out = torch.softmax(q @ k.mT * case.scale, dim=-1) @ v
    return out.transpose(1, 2).reshape(b, h, n, d)


def unnormalised(case: AttentionCase) -> Tensor:
    S = case.q.float() @ case.k.float().mT * case.scale
    return torch.exp(S - S.amax(dim=-1, keepdim=True)) @ case.v.float()


def padded(case: AttentionCase) -> Tensor:
    more = -case.kv_len % 64
    k, v = (torch.nn.functional.pad(x, (0, 0, 0, more)) for x in (case.k, case.v))
    return plain_torch(dataclasses.replace(case, k=k, v=v), case.scale)


def one_head(case: AttentionCase) -> Tensor:
    out = plain_torch(case, case.scale)
    out[:, 2] = plain_torch(case, case.scale * 2)[:, 2]
    return out


@dataclass(frozen=True, kw_only=True)
class Planted:
    """A mistake, the shape it shows on, and words its name must hold."""

    name: str
    wrong: Wrong
    says: str | tuple[str, ...]
    """Words its cause must hold; of several, any."""
    shape: Shape = SHAPES["plain"]


CAUSAL, GROUPED = SHAPES["causal"], Shape(heads=6, kv_heads=3)
LONG = Shape(q_len=100, kv_len=100)
CAPPED = Shape(changes=(("softcap", 1.0),))
WINDOW = SHAPES["window"]
UNEVEN = Shape(q_len=40, kv_len=100, changes=(("is_causal", True),))
PLANTED = (
    Planted(
        name="scale x 1.01",
        wrong=lambda c: plain_torch(c, c.scale * 1.01),
        says="1.010 times",
    ),
    Planted(
        name="scale x 0.9",
        wrong=lambda c: plain_torch(c, c.scale * 0.9),
        says="0.900 times",
    ),
    Planted(name="no scale", wrong=lambda c: plain_torch(c, 1.0), says="not scaled"),
    Planted(
        name="scale twice",
        wrong=lambda c: plain_torch(c, c.scale**2),
        says="applied twice",
    ),
    Planted(
        name="exp2", wrong=lambda c: plain_torch(c, c.scale * math.log(2)), says="base 2"
    ),
    Planted(
        name="causal + 1", wrong=lambda c: off_by_one(c, 1), says="too many", shape=CAUSAL
    ),
    Planted(
        name="causal - 1", wrong=lambda c: off_by_one(c, -1), says="too few", shape=CAUSAL
    ),
    Planted(
        name="causal ignored",
        wrong=exactly(is_causal=False),
        says="causal mask is ignored",
        shape=CAUSAL,
    ),
    Planted(
        name="causal unasked",
        wrong=exactly(is_causal=True),
        says="causal mask is applied",
    ),
    Planted(
        name="bottom-right",
        wrong=exactly(causal_offset=60),
        says="bottom-right",
        shape=UNEVEN,
    ),
    Planted(
        name="top-left",
        wrong=exactly(causal_offset=0),
        says="top-left",
        shape=SHAPES["bottom-right"],
    ),
    Planted(name="layout", wrong=swapped_layout, says="heads' axis"),
    Planted(name="output layout", wrong=output_layout, says="the output is stored as"),
    Planted(name="layout in memory", wrong=all_layouts, says="and the output are stored"),
    Planted(
        name="kv head rolled",
        wrong=changed(lambda c: {"k": c.k.roll(1, 1), "v": c.v.roll(1, 1)}),
        says="previous kv head",
        shape=GROUPED,
    ),
    Planted(
        name="kv head h % kv_heads",
        wrong=changed(
            lambda c: {"k": c.k.repeat(1, 2, 1, 1), "v": c.v.repeat(1, 2, 1, 1)}
        ),
        says="h % kv_heads",
        shape=GROUPED,
    ),
    Planted(
        name="kv head 0",
        wrong=changed(lambda c: {"k": c.k[:, :1], "v": c.v[:, :1]}),
        says="kv head 0",
        shape=GROUPED,
    ),
    Planted(
        name="mask inverted",
        wrong=changed(lambda c: {"mask": ~c.mask}),  # type: ignore[operator]
        says="inverted",
        shape=SHAPES["bool mask"],
    ),
    Planted(
        name="mask ignored",
        wrong=exactly(mask=None),
        says="ignored",
        shape=SHAPES["bool mask"],
    ),
    Planted(
        name="mask added as 0 and 1",
        wrong=changed(lambda c: {"mask": c.mask.double()}),  # type: ignore[union-attr]
        says="as 0 and 1",
        shape=SHAPES["bool mask"],
    ),
    Planted(
        name="bias ignored",
        wrong=exactly(mask=None),
        says="mask is ignored",
        shape=SHAPES["additive mask, grouped"],
    ),
    Planted(
        name="window ignored",
        wrong=exactly(window=None),
        says="window is ig",
        shape=WINDOW,
    ),
    Planted(
        name="window + 1",
        wrong=exactly(window=(17, 0)),
        says="too wide on the left",
        shape=WINDOW,
    ),
    Planted(
        name="window - 1",
        wrong=exactly(window=(15, 0)),
        says="too narrow on the left",
        shape=WINDOW,
    ),
    Planted(
        name="soft cap ignored",
        wrong=exactly(softcap=None),
        says="soft cap",
        shape=CAPPED,
    ),
    Planted(
        name="sinks ignored",
        wrong=exactly(sinks=None),
        says="sinks",
        shape=Shape(changes=(("sinks", torch.tensor([2.0, 3.0, 4.0, 5.0])),)),
    ),
    Planted(
        name="sinks twice",
        wrong=exactly(sinks=torch.tensor([2.0, 3.0, 4.0, 5.0]) + math.log(2)),
        says="counted twice",
        shape=Shape(changes=(("sinks", torch.tensor([2.0, 3.0, 4.0, 5.0])),)),
    ),
    Planted(
        name="last tile dropped",
        wrong=changed(lambda c: {"k": c.k[:, :, :64], "v": c.v[:, :, :64]}),
        says="last 36 keys",
        shape=LONG,
    ),
    Planted(
        name="last key dropped",
        wrong=changed(lambda c: {"k": c.k[:, :, :-1], "v": c.v[:, :, :-1]}),
        says="last key is",
        shape=LONG,
    ),
    Planted(
        name="padding counts", wrong=padded, says="padded with zeros to 128", shape=LONG
    ),
    Planted(name="no 1/l", wrong=unnormalised, says="row sum"),
    Planted(
        name="V reversed",
        wrong=changed(lambda c: {"v": c.v.flip(2)}),
        says="V is read in reverse",
    ),
    Planted(
        name="V laid out wrongly",
        wrong=changed(lambda c: {"v": c.v.transpose(1, 2).reshape(c.v.shape)}),
        says="v is wrongly stored as [batch, length",
    ),
    Planted(
        name="rows of 0",
        wrong=lambda c: attend(c).out.index_fill(2, torch.arange(15, c.q_len, 16), 0.0),
        says="0 in every 16th row from 15",
    ),
    Planted(name="zeros", wrong=lambda c: torch.zeros(c.q.shape), says="0 everywhere"),
    Planted(
        name="batch 0 for all",
        wrong=changed(lambda c: {"k": c.k[[0, 0]], "v": c.v[[0, 0]]}),
        says="entry 0's k and v",
    ),
    Planted(name="one head's scale x 2", wrong=one_head, says=("2.00", "too large")),
)


def planted(seeds: int, few: slice) -> None:
    """Count how mistakes are named."""
    print("\n| mistake |", *(f"{f} right | none | wrong |" for f in FORMATS))
    print("|---|" + "---|" * 3 * len(FORMATS))
    totals: Counter[tuple[str, str]] = Counter()
    for p in PLANTED[few]:
        cells = []
        for fmt in FORMATS:
            counts: Counter[str] = Counter()
            for regime, seed in (
                (r, s) for r in list(REGIMES)[few] for s in range(seeds)
            ):
                case = make(p.shape, regime, fmt, seed)
                out = round_to(p.wrong(case).double(), case.format).to(case.q.dtype)
                said = judge(case, out, attend(case), always=False)
                counts[verdict(p, said)] += 1
                if verdict(p, said) == "wrong":
                    print("   ", p.name, regime, fmt, seed, said)
            cells.append(f" {counts['right']} | {counts['none']} | {counts['wrong']} |")
            for k, n in counts.items():
                totals[fmt, k] += n
        print(f"| {p.name} |", *cells, flush=True)
    print(
        "| all |",
        *(
            f" {totals[f, 'right']} | {totals[f, 'none']} | {totals[f, 'wrong']} |"
            for f in FORMATS
        ),
    )


def verdict(p: Planted, said: list[str]) -> str:
    """Whether what was said is right, nothing, or wrong."""
    if said in (["not far off"], ["none"]):
        return "none"
    says = (p.says,) if isinstance(p.says, str) else p.says
    return "right" if all(any(s in cause for s in says) for cause in said) else "wrong"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--only", choices=("sound", "planted"))
    parser.add_argument("--small", action="store_true", help="one of everything")
    given = parser.parse_args()
    few = slice(1 if given.small else None)
    start = time.perf_counter()
    print(
        f"torch {torch.__version__}, {torch.get_num_threads()} threads, "
        f"{given.seeds} seeds\n"
    )
    if given.only != "planted":
        sound(given.seeds, few)
    if given.only != "sound":
        planted(given.seeds, few)
    print(f"\n{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
