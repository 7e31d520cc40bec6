"""How often `numdev compare` says that something moved where nothing did.

Audits of drawn cases in every regime named, for several seeds. Compared are: each report with
itself; the same inputs through a tiled kernel with another tile, whose sums have another order; and
all pairs of seeds, whose inputs are other ones. Printed: comparisons, numbers judged, and in how
many comparisons anything moved, with what.

    python benchmarks/compare_nulls.py [--seeds 30 40] [--regimes normal outliers ...]
"""

from __future__ import annotations

import argparse
import itertools
import math
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from numdev.audit.study import audit
from numdev.config import AuditRequest, CaseConfig, Choice
from numdev.gate.compare_audits import compared
from numdev.report import AuditReport

REGIMES = ("normal", "outliers", "ties", "near_constant_keys", "low_rank", "massive_channel")
TILES = (32, 40)


def plain(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False) -> Tensor:
    """Attention in float32, without a tile."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1).float(), v.repeat_interleave(group, 1).float()
    S = q.float() @ k.mT * q.shape[-1] ** -0.5
    if is_causal:
        S = S.masked_fill(~torch.ones_like(S, dtype=torch.bool).tril(), -math.inf)
    return (torch.softmax(S, dim=-1) @ v).to(q.dtype)


def tiled(
    q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False, tile: int = TILES[0]
) -> Tensor:
    """Flash attention's forward pass, P in the working format; backward by autograd."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    m = torch.full((*q.shape[:3], 1), -1e30)
    l, o = torch.zeros_like(m), torch.zeros(*q.shape[:3], v.shape[-1])  # noqa: E741
    rows = torch.arange(q.shape[2])[:, None]
    for start in range(0, k.shape[2], tile):
        part = slice(start, start + tile)
        S = q.float() @ k[:, :, part].float().mT * q.shape[-1] ** -0.5
        if is_causal:
            S = S.masked_fill(rows < torch.arange(start, start + S.shape[-1]), -math.inf)
        larger = torch.maximum(m, S.amax(-1, keepdim=True)).detach()
        P, decay = torch.exp(S - larger), torch.exp(m - larger)
        l = l * decay + P.sum(-1, keepdim=True)  # noqa: E741
        o = o * decay + P.to(q.dtype).float() @ v[:, :, part].float()
        m = larger
    return (o / l).to(q.dtype)


def audited(seed: int, regimes: Iterable[str], tile: int) -> AuditReport:
    cases = tuple(
        CaseConfig(
            name=f"{regime}{'-causal' * causal}", batch=2, heads=4, kv_heads=2, seq_len=96,
            head_dim=16, causal=causal, inputs={"name": regime},
        )
        for regime in regimes
        for causal in (True, False)
    )  # fmt: skip
    names = ("sdpa-flash", "compare_nulls:plain")
    kernels = (*(Choice(name=n) for n in names), Choice(name="compare_nulls:tiled",
               options={"tile": tile}))  # fmt: skip
    request = AuditRequest(
        target="nulls", cases=cases, kernels=kernels, seed=seed, gradients=True, device="cpu",
        reproducers=0,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as directory:
        return audit(request, Path(directory))


def tell(what: str, pairs: Iterable[tuple[AuditReport, AuditReport]]) -> None:
    seen = [compared(a, b) for a, b in pairs]
    alarms = sum(bool(found.moves) for found in seen)
    print(f"{what}: {len(seen)} comparisons, {sum(f.tests for f in seen)} numbers, {alarms} moved")
    moved = Counter(
        (m.kernel, m.tensor, m.place.case, m.metric) for found in seen for m in found.moves
    )
    for where, count in moved.most_common():
        print("   ", count, *where)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs=2, default=(30, 40))
    parser.add_argument("--regimes", nargs="+", default=REGIMES)
    chosen = parser.parse_args()
    seeds = range(*chosen.seeds)
    one, other = ([audited(s, chosen.regimes, tile) for s in seeds] for tile in TILES)
    tell("itself", ((a, a) for a in one))
    tell("other tile", zip(one, other, strict=True))
    tell("other seed", itertools.combinations(one, 2))


if __name__ == "__main__":
    main()
