"""Is the head that `numdev diagnose` ranks first the one whose cure changes most?

    python benchmarks/guilt.py [--seeds 100-111] [--heads 8] [--preset qiu2025] [--preset fa2]

Guilt is decided by intervention, not by our own conditions. A case has several heads, of which 0, 1
or 3 are built to be guilty (two tied keys, V of one sign there and small, dO of one sign); the
others have some of these traits and not the rest. All share layer inputs that look alike. The call
is diagnosed; then each head by itself is made exact, or cured, and the error of dW_Q over all heads
(Frobenius norm) is measured again. Heads do not meet before dW_Q, each of whose rows belongs to one
head, so to cure a head is to replace its part of dQ by the cured recipe's.

So the head whose exactness changes most is, by construction, that with the largest error of dW_Q,
which `numdev diagnose` orders by: there 100 % says only that two ways of computing it agree. The
cures of delta are no such thing. An intervention that changes nothing counts in no case. What is
judged is the gradient, and not the step that an optimiser makes of it.

Rates have 95 % Wilson intervals. Not tested: the spectral norm of W_Q, which is alike here
for all heads.
"""

from __future__ import annotations

import argparse
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from biased_measures import case_of, head, row, step
from torch import Generator, Tensor

from numdev.cases import AttentionCase
from numdev.diagnose.call import diagnosed
from numdev.diagnose.cured import cured
from numdev.diagnose.cures import CURES
from numdev.diagnose.guilt import CONDITIONS, HALF, NORM, at_fault, leading, ranked, used_delta
from numdev.diagnose.report import CureRow, HeadRow, Ranked
from numdev.kernels.emulation.recipe import Recipe, recipe
from numdev.kernels.reference import gradients
from numdev.sources.constructed import layer_input
from numdev.sources.projection import Projection

GUILTY: Mapping[str, Any] = {"count": 2, "tail": 1e-4, "value": 0.125}
INNOCENT: Mapping[str, Mapping[str, Any]] = {
    "ties, dO of random sign": {"count": 2, "tail": 1e-4, "value": 0.125, "grad_sign": 0},
    "ties, V of random sign": {"count": 2, "tail": 1e-4, "v_sign": 0, "tail_sign": 0,
                               "grad_sign": 0},
    "ties, a large tail": {"count": 2, "tail": 4.0, "grad_sign": 0},
    "a sink without ties": {"count": 1, "tail": 1e-2, "v_sign": 0, "tail_sign": 0, "grad_sign": 0},
    "V and dO of one sign, no ties": {"share": 0.0},
    "nothing": {"share": 0.0, "v_sign": 0, "tail_sign": 0, "grad_sign": 0},
}  # fmt: skip
ROWS, DIM = 128, 32
INTERVENTIONS = ("exact", "O in fp32", "delta from dP")
ACTS = 1e-6
"""A cure that takes less than this of the whole error changes nothing: that is fp64's rounding."""
NEARLY = 0.9
"""A cure helps as much as the best if it takes at least so much of what that takes."""


# --- cases ---------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class Built:
    """A call, its projection, and what each head was built as."""

    case: AttentionCase
    projection: Projection
    traits: tuple[str, ...]

    @property
    def guilty(self) -> set[int]:
        return {i for i, trait in enumerate(self.traits) if trait == "guilty"}


def built(seed: int, *, heads: int, guilty: int) -> Built:
    """A call of so many heads, in an order drawn from the seed; dO of each is scaled by a power of
    two between 1/2 and 2, as heads differ."""
    order = random.Random(f"{seed}/{guilty}")
    traits = ["guilty"] * guilty + order.choices(list(INNOCENT), k=heads - guilty)
    order.shuffle(traits)
    parts = [
        case_of(
            GUILTY if trait == "guilty" else INNOCENT[trait],
            seeds=[1000 * seed + i],
            heads=1,
            rows=ROWS,
            keys=ROWS,
            dim=DIM,
        )
        for i, trait in enumerate(traits)
    ]
    scales = [2.0 ** order.choice((-1, 0, 1)) for _ in traits]
    case = side_by_side(parts, scales)
    x, weight = layer_input(case.q, Generator().manual_seed(seed), alike=True)
    projection = Projection(
        x=x.double(), weight=weight.double(), pull=lambda gradient: gradient.transpose(1, 2)
    )
    return Built(case=case, projection=projection, traits=tuple(traits))


def side_by_side(parts: Sequence[AttentionCase], scales: Sequence[float]) -> AttentionCase:
    """Heads of several calls as one call, their dO scaled."""
    q, k, v = (torch.cat([getattr(part, n) for part in parts], dim=1) for n in "qkv")
    grads = [part.grad_out * scale for part, scale in zip(parts, scales, strict=True)]
    first = parts[0]
    return AttentionCase(
        ref=first.ref, q=q, k=k, v=v, grad_out=torch.cat(grads, dim=1), scale=first.scale
    )


# --- interventions -------------------------------------------------------------------------------


def errors(given: Built, made: Recipe) -> Tensor:
    """The squared error of dW_Q of each head, [H], under a recipe, against the exact call."""
    back = given.projection.pull(step(given.case, made).dq.double() - gradients(given.case).dq)
    dw_q = torch.einsum("bthd,btw->hdw", back, given.projection.x)
    return dw_q.square().sum(dim=(1, 2))


def gains(before: Tensor, after: Tensor) -> Tensor:
    """By how much the whole error falls if one head alone has its squared error changed, [H]."""
    whole = before.sum()
    return whole.sqrt() - (whole - before + after).clamp_min(0.0).sqrt()


def left_by(cures: Sequence[CureRow], heads: Sequence[HeadRow]) -> dict[str, float]:
    """Cure to what is left of dW_Q's error over all heads, as a share, where all heads have it.
    Without cures that cannot be computed or break."""
    whole: dict[str, list[float]] = {}
    for cure in cures:
        ok = cure.dw_q_error is not None and not cure.nonfinite
        error = (cure.dw_q_error or 0.0) * (heads[cure.head].dw_q_norm or 0.0) if ok else math.inf
        whole.setdefault(cure.cure, []).append(error)
    total = {name: math.hypot(*values) for name, values in whole.items()}
    before = total.pop("none")
    return {name: value / before for name, value in total.items() if math.isfinite(value)}


# --- orders --------------------------------------------------------------------------------------


def by_delta(head: HeadRow) -> float:
    used = used_delta(head)
    return 0.0 if used is None else used.dw_q or 0.0


def size(head: HeadRow) -> float:
    return head.dw_q_norm or 0.0


ORDERS: Mapping[str, Callable[[HeadRow], float]] = {
    "δ, relative": by_delta,
    "δ": lambda head: by_delta(head) * size(head),
    "imbalance": lambda head: (head.dw_q_unbalanced or 0.0) * size(head),
    "all": lambda head: (head.dw_q_error or 0.0) * size(head),
}
"""By |dW_Q error| that the error of delta makes, over the head's own |dW_Q|; by the same, absolute;
by that which delta makes by not fitting its own dP and P; by all of it, as `ranked` does."""
FAULT = "at fault, then all"
"""As the answer of `numdev diagnose` has it."""


def orders(answers: Sequence[Ranked], heads: Sequence[HeadRow]) -> dict[str, list[int]]:
    """Order to heads, the first first."""
    found = {
        name: [head.head for head in sorted(heads, key=of, reverse=True)]
        for name, of in ORDERS.items()
    }
    assert found["all"] == [answer.head for answer in answers]
    first = leading(answers).head
    found[FAULT] = [first, *(a.head for a in answers if a.head != first)]
    return found


# --- counting ------------------------------------------------------------------------------------


@dataclass
class Tally:
    """What happened over the cases of one kind."""

    cases: int = 0
    acts: Counter[str] = field(default_factory=Counter)
    """By intervention: it changes something."""
    hit: Counter[tuple[str, str]] = field(default_factory=Counter)
    """By order and intervention: the first head is the one whose cure changes dW_Q most."""
    near: Counter[tuple[str, str]] = field(default_factory=Counter)
    """The same: one of the first three is."""
    first_built: Counter[str] = field(default_factory=Counter)
    """By order: the first head is one built to be guilty."""
    most_built: int = 0
    """The head whose exactness changes most is one built to be guilty."""
    helped: int = 0
    """Cases in which some cure takes half of the error of dW_Q over all heads."""
    cure: int = 0
    """Of these: the first cure of the head that the answer is about, where all heads have it, takes
    nearly as much as the best."""
    full: int = 0
    """Heads built to be guilty that meet all conditions."""
    found: int = 0
    """Heads built to be guilty that are said to be at fault."""
    said_any: int = 0
    """Some other head meets all conditions."""
    fault_any: int = 0
    """Some other head is said to be at fault."""
    accused: Counter[str] = field(default_factory=Counter)
    """Other heads at fault, by trait."""


def meets_all(answer: Ranked) -> bool:
    return {*CONDITIONS} - {NORM} <= {*answer.conditions}


def judge(given: Built, made: Recipe, tally: Tally) -> None:
    """One case: diagnosis, interventions, and what came of it."""
    diagnosis = diagnosed(given.case, made, given.projection)
    cures, heads = cured(diagnosis), diagnosis.heads
    answers = ranked(heads, cures)
    found, before = orders(answers, heads), errors(given, made)
    tally.cases += 1
    for name in INTERVENTIONS:
        change = gains(
            before, errors(given, recipe("exact") if name == "exact" else CURES[name].of(made))
        )
        most = int(change.argmax())
        if float(change[most]) > ACTS * float(before.sum().sqrt()):
            tally.acts[name] += 1
            for order, places in found.items():
                tally.hit[order, name] += places[0] == most
                tally.near[order, name] += most in places[:3]
        if name == "exact":
            tally.most_built += most in given.guilty
    for order, places in found.items():
        tally.first_built[order] += places[0] in given.guilty
    judge_cures(left_by(cures, heads), leading(answers), tally)
    accuse(given, answers, tally)


def judge_cures(left: Mapping[str, float], first: Ranked, tally: Tally) -> None:
    """Whether the cure that is named first helps."""
    best = 1 - min(left.values())
    if best >= HALF:
        tally.helped += 1
        taken = 1 - left.get(first.cured_by[0], 1.0) if first.cured_by else 0.0
        tally.cure += taken >= NEARLY * best


def accuse(given: Built, answers: Sequence[Ranked], tally: Tally) -> None:
    """Who meets all conditions, and who is said to be at fault."""
    others = [answer for answer in answers if answer.head not in given.guilty]
    faults = [a.head for a in others if at_fault(a.conditions, a.missing)]
    tally.said_any += any(meets_all(answer) for answer in others)
    tally.fault_any += bool(faults)
    built_so = [answer for answer in answers if answer.head in given.guilty]
    tally.full += sum(meets_all(a) for a in built_so)
    tally.found += sum(at_fault(a.conditions, a.missing) for a in built_so)
    tally.accused.update(given.traits[h] for h in faults)


def rate(hits: int, of: int) -> str:
    """A rate and its 95 % Wilson interval."""
    if not of:
        return "–"
    z = 1.959964
    middle, wide = hits + z * z / 2, z * math.sqrt(hits * (of - hits) / of + z * z / 4)
    low, high = ((middle + sign * wide) / (of + z * z) for sign in (-1, 1))
    return f"{hits}/{of} [{max(low, 0.0):.2f}, {min(high, 1.0):.2f}]"


Kind = tuple[str, int]
"""A preset, and how many heads are built to be guilty."""


def tallies(
    presets: Sequence[str], *, seeds: Sequence[int], heads: int
) -> Iterator[tuple[Kind, Tally]]:
    for preset in presets:
        for guilty in (0, 1, 3):
            tally = Tally()
            for seed in seeds:
                judge(built(seed, heads=heads, guilty=guilty), recipe(preset), tally)
            yield (preset, guilty), tally


def total(found: Mapping[Kind, Tally], preset: str) -> Tally:
    """Of a preset, whatever was built."""
    whole = Tally()
    for (name, _), tally in found.items():
        if name == preset:
            for part in fields(Tally):
                setattr(whole, part.name, getattr(whole, part.name) + getattr(tally, part.name))
    return whole


def show_orders(preset: str, guilty: object, tally: Tally, built_so: int) -> None:
    """A row for each order of heads."""
    for order in (*ORDERS, FAULT):
        counts = [
            f"{rate(tally.hit[order, name], tally.acts[name])}, {tally.near[order, name]}"
            if tally.acts[name]
            else "–"
            for name in INTERVENTIONS
        ]
        row(preset, guilty, order, *counts, rate(tally.first_built[order], built_so))


def show_faults(preset: str, guilty: object, tally: Tally, built_so: int, heads: int) -> None:
    n = tally.cases
    row(preset, guilty, rate(tally.said_any, n), rate(tally.fault_any, n),
        rate(tally.full, heads), rate(tally.found, heads), rate(tally.most_built, built_so),
        rate(tally.cure, tally.helped))  # fmt: skip


def seeds_of(text: str) -> range:
    """`100-111`, both included."""
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)


def main() -> None:
    parser = argparse.ArgumentParser(description="Is the head ranked first the guilty one?")
    parser.add_argument("--seeds", type=seeds_of, default=seeds_of("100-111"))
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--preset", action="append")
    given = parser.parse_args()
    presets = given.preset or ["qiu2025", "fa2", "eager"]
    n = len(given.seeds)
    found = dict(tallies(presets, seeds=given.seeds, heads=given.heads))
    sums = {preset: total(found, preset) for preset in presets}
    first, last = given.seeds[0], given.seeds[-1]
    print(f"Seeds {first} to {last}, {given.heads} heads, torch {torch.__version__}.")
    print("The first head is the one whose cure changes dW_Q most, and after the comma: one of the")
    print("first three is. Last: the first is one built to be guilty.\n")
    head("attention", "built", "order", *INTERVENTIONS, "is built guilty")
    for (preset, guilty), tally in found.items():
        show_orders(preset, guilty, tally, n if guilty else 0)
    for preset, tally in sums.items():
        show_orders(preset, "all", tally, 2 * n)
    print("\nAccusations, and, where some cure takes half of dW_Q's error, the first one named:\n")
    head("attention", "built", "some other meets all", "some other at fault", "built, meet all",
         "built, at fault", "most is built", "first cure helps as the best")  # fmt: skip
    for (preset, guilty), tally in found.items():
        show_faults(preset, guilty, tally, n if guilty else 0, guilty * n)
    for preset, tally in sums.items():
        show_faults(preset, "all", tally, 2 * n, 4 * n)
    accused = sum((tally.accused for tally in found.values()), Counter[str]())
    print(f"\nother heads said to be at fault, by trait: {dict(accused) or 'none'}")


if __name__ == "__main__":
    main()
