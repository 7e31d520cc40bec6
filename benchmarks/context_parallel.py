"""Context parallelism on several GPUs against one: what merging over ranks costs, and why.

    python benchmarks/context_parallel.py [--world 2 4] [--length 4096] [--device cuda]

PyTorch's context parallelism, with and without `convert_to_f32`, balanced and not, beside flash
attention on one GPU, plain attention, and `sharded`, which computes the same division in one
process: with flash attention as its inner kernel on one GPU, and as an emulation in fp32. For each,
the rms of the error over that of the rounding floor, of the output and of each gradient. Then how
each context-parallel row compares with the `sharded` one of the same options: the ratio of their
rms, and which part of the elements is the same bit by bit (flash attention's dq on CUDA adds in no
fixed order, so there it cannot be all).

Where devices are fewer than the largest world, the worlds that do not fit are left out. With
--device cpu ranks are processes over gloo. What fails is printed, and the rest goes on.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from numdev.cases import AttentionCase, CaseRef
from numdev.formats import round_to
from numdev.kernels import Output, find
from numdev.kernels.emulation.predict import emulated_step
from numdev.kernels.ranks import end_all
from numdev.kernels.reference import gradients
from numdev.sources.synthetic import Shapes, draw
from numdev.system import System

TENSORS = ("out", "dq", "dk", "dv")
GIVE_UP = 2
"""After so many failures the ranks are not started again: each may wait for minutes."""
Found = dict[str, Tensor]


class Table:
    """Rows of one case: rms over the floor's, as they come."""

    def __init__(self, case: AttentionCase) -> None:
        self.case = case
        self.failures = 0
        exact = gradients(case)
        self.exact: Found = {t: getattr(exact, t).double() for t in TENSORS}
        self.floor = {t: _rms(round_to(x, case.format) - x) for t, x in self.exact.items()}

    def add(self, name: str, step: Callable[[], Output | Mapping[str, Tensor]]) -> Found | None:
        """Compute a row and print it; None, with the reason in its place, where it fails."""
        started = time.perf_counter()
        try:
            made = step()
            found = made if isinstance(made, Mapping) else {t: getattr(made, t) for t in TENSORS}
            cells = [
                f"{_rms(found[t].double() - self.exact[t]) / self.floor[t]:.4f}" for t in TENSORS
            ]
        except Exception as error:  # one row's failure must not take the others along
            print(f"| {name} | {type(error).__name__}: {str(error).splitlines()[0]} | | | | |")
            return None
        print(f"| {name} | {' | '.join(cells)} | {time.perf_counter() - started:.1f} |", flush=True)
        return dict(found)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--world", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--device", default="auto")
    chosen = parser.parse_args()
    system = System.here(chosen.device)
    place = f"{system.devices} x {system.gpu}" if system.gpu else system.cpu
    print(
        f"{place}, torch {system.packages.get('torch')}; bfloat16, {chosen.heads} heads of "
        f"{chosen.head_dim}, length {chosen.length}"
    )
    fits = [w for w in chosen.world if system.device == "cpu" or w <= system.devices]
    for world in set(chosen.world) - set(fits):
        print(f"\nworld {world} is left out: {system.devices} devices")
    try:
        for causal in (False, True):
            _of_case(_case(chosen, system, causal), fits, system)
    finally:
        end_all()


def _of_case(case: AttentionCase, worlds: list[int], system: System) -> None:
    kind = "causal" if case.is_causal else "not causal"
    print(f"\n## {kind}\n\n| rms over the floor's | {' | '.join(TENSORS)} | s |")
    print("|---|" + "---:|" * (len(TENSORS) + 1), flush=True)
    table = Table(case)
    table.add("plain attention", lambda: find("baseline").gradients(case))
    table.add("flash attention on one device", lambda: find("sdpa-flash").gradients(case))
    divisions = [
        (world, balanced, f32)
        for world in worlds
        for balanced in ((False, True) if case.is_causal else (False,))
        for f32 in (True, False)
    ]
    pairs = [_division(table, *division, system) for division in divisions]
    print(f"\n| against `sharded` | {' | '.join(f'{t} rms, equal' for t in TENSORS)} |")
    print("|---|" + "---:|" * len(TENSORS))
    for name, real, same in pairs:
        if real is None or same is None:
            print(f"| {name} | not both there | | | |")
            continue
        print(f"| {name} | {' | '.join(_beside(table, real, same))} |", flush=True)


def _division(
    table: Table, world: int, balanced: bool, f32: bool, system: System
) -> tuple[str, Found | None, Found | None]:
    """Context parallelism and its explanation: one division over so many ranks, three rows."""
    case, real, sharded = table.case, find("context-parallel"), find("sharded")
    name = f"{world} ranks{', balanced' if balanced else ''}, merged in {'fp32' if f32 else 'bf16'}"
    options: dict[str, Any] = {"shards": world, "order": "zigzag" if balanced else "ring"}
    options["merge_format"] = "float32" if f32 else "promoted"
    made: list[Output] = []

    def on_one() -> Output:
        made.append(sharded.gradients(case, **options))
        return made[0]

    def predicted() -> Mapping[str, Tensor]:
        claim = sharded.claims(case, made[0], system) if made else None
        if claim is None:
            raise ValueError("no emulation stands for it")
        return emulated_step(case, claim)

    def over_ranks() -> Output:
        if table.failures >= GIVE_UP:
            raise ValueError("given up")
        table.failures += 1
        found = real.gradients(case, world=world, convert_to_f32=f32, load_balance=balanced)
        table.failures = 0
        return found

    there = table.add(f"context parallelism, {name}", over_ranks)
    same = table.add(f"`sharded` on one device, {name}", on_one)
    table.add(f"predicted, {name}", predicted)
    return name, there, same


def _beside(table: Table, real: Found, same: Found) -> list[str]:
    cells = []
    for t in TENSORS:
        ratio = _rms(real[t].double() - table.exact[t]) / _rms(same[t].double() - table.exact[t])
        equal = (real[t] == same[t]).double().mean().item()
        cells.append(f"{ratio:.4f}, {equal:.2%}")
    return cells


def _case(chosen: argparse.Namespace, system: System, causal: bool) -> AttentionCase:
    n, d = chosen.length, chosen.head_dim
    shapes = Shapes(
        batch=1, heads=chosen.heads, kv_heads=chosen.heads, q_len=n, kv_len=n, head_dim=d, v_dim=d
    )
    q, k, v = (
        x.to(system.device, torch.bfloat16) for x in draw("normal", shapes, seed=0, options={})
    )
    dO = torch.randn(q.shape, generator=torch.Generator().manual_seed(1)).to(q)
    return AttentionCase(
        ref=CaseRef(case=f"length {n}"), q=q, k=k, v=v, scale=d**-0.5, is_causal=causal, grad_out=dO
    )


def _rms(x: Tensor) -> float:
    return float(x.double().square().mean().sqrt())


if __name__ == "__main__":
    main()
