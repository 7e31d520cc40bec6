"""How attention over merged shards is known to round: the emulation it claims to be.

A recipe of `emulated` has splits of the keys, which are shards whose results are merged in full
precision: each split's O is rounded at `merge`, as it is handed over. Backward, each split's dQ is
rounded at `dq_partial`; where queries are divided too (`q_splits`), each part's dK and dV are, at
`dk_partial` and `dv_partial`. Within a shard it is what the inner kernel claims.

No emulation stands for what else there is: a running result that is stored in a narrow format
between two merges, gradients that are added up in one, a rounded difference (`promoted`), and the
shards of `zigzag`, which are two chunks each.

What ran is a sentence of `described`, and a claim reads it again.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from numdev.cases import AttentionCase
from numdev.kernels import Output
from numdev.kernels.emulation.recipe import recipe
from numdev.kernels.sdpa_claims import claims as inner_claims
from numdev.kernels.shards import chunks, part, schedule
from numdev.system import System

Claim = Mapping[str, Any]
EXACT = ("float32", "float64")
"""Merge formats in which a running result keeps what its sum gave, but for fp32 arithmetic."""
SAID = re.compile(
    r"(?P<shards>\d+) shards, (?P<order>[\w-]+), merged in (?P<merge>\w+), "
    r"handed over in (?P<partial>\w+), each by (?P<inner>.*)"
)


def described(shards: int, order: str, merge: str, partial: str, inner: str) -> str:
    """What ran, for example `4 shards, ring, merged in float32, handed over in working, each by
    _scaled_dot_product_flash_attention`."""
    return f"{shards} shards, {order}, merged in {merge}, handed over in {partial}, each by {inner}"


def claims(case: AttentionCase, output: Output, system: System) -> Claim | None:
    """What the merged shards compute like; None where no emulation does."""
    said = SAID.search(output.ran or "")
    if said is None:  # a single shard: the inner kernel itself
        return _inner(case, output.ran or "", system)
    shards, order, backward = int(said["shards"]), said["order"], output.dq is not None
    one_merge = shards == 2 or order == "simultaneous"
    if said["merge"] not in EXACT and (backward or not one_merge or said["merge"] == "promoted"):
        return None
    if order == "zigzag":
        return None
    handed_over = said["partial"]
    claim = dict(_inner(part(case, schedule(case, shards, order)[0]), said["inner"], system))
    claim |= _tiles(case, claim, shards)
    claim |= {"merge": handed_over, "dq_partial": handed_over}
    if order == "ring":
        claim |= {"q_splits": shards, "dk_partial": handed_over, "dv_partial": handed_over}
    return claim


def _inner(case: AttentionCase, ran: str, system: System) -> Claim:
    """What the kernel of one shard claims, for its own call."""
    if ran.startswith("fa2: "):
        return {"preset": "fa2"}
    return inner_claims(case, Output(out=case.q, ran=ran), system)


def _tiles(case: AttentionCase, claim: Claim, shards: int) -> Claim:
    """Splits that are the shards. Where a shard is no whole number of the inner kernel's tiles it
    is one tile: P is then rounded relative to another maximum, which its size hardly shows."""
    fields = {name: claim[name] for name in ("block_kv",) if name in claim}
    width = chunks(case.kv_len, shards)[0].stop
    _, tile = recipe(claim.get("preset", "fa2"), **fields).tile(case.q.shape[-1], case.kv_len)
    return {"splits": shards, "block_kv": width if width % tile else tile}
