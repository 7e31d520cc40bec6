"""What single rows of a call look like, recomputed in fp64: some rows of one head at
once.

Of a query's row: its scores, and what the literature makes responsible for errors of
attention (ties of the maximum with V of one sign, arXiv 2510.04212; sinks). Of a key:
what it receives from all queries that read it. Which rows are worth it is decided in
`numdev.operations.attention.worst_rows`.

Scores of n rows are computed against the keys of every batch entry, of which each row
keeps its own: one matrix product. No more of a call is ever in fp64 than one kv head and
these scores.

Legend: S scores, P probabilities, m row maximum, L log-sum-exp."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from numdev.cases import AttentionCase, Places
from numdev.kernels.reference.blocked import scores

CARRIED = 0.9
EQUAL, NEAR = 1e-12, 1e-3  # scores are equal within fp64's own rounding (times 1 or |m|)


def of_queries(case: AttentionCase, head: int, b: Tensor, i: Tensor) -> dict[str, Tensor]:
    """Returns fields of `report.WorstRow` of rows i [n] of batch entries b [n] in a query
    head, by name, fp64 [n] each. `sees`: how many keys the row sees; `position`: how many
    of these lie before its own position; `tied`, `nearly_tied`: how many score as its
    maximum does, or within 0.001 of it; `carriers`: the fewest keys that have CARRIED of
    the probability of keys; `max_probability` of a key; `lse`, in which a sink counts;
    `first_key` (P of key 0); `entropy` in nats, of keys and sink; `one_sign`: 1 where V
    has one sign at all carriers in every feature, less where signs differ; `sink` (its P)
    only for a call with sinks. In a row that sees no key `sees` is 0, and most others are
    NaN or mean nothing."""
    part = case.restrict(heads=[head])
    in_batch_entry = (b, 0, torch.arange(len(b), device=b.device))
    S = _score_rows(part, i, slice(0, case.kv_len))[in_batch_entry]  # [n, kv_len]
    shown, m = S.ne(-math.inf), S.amax(dim=-1, keepdim=True)
    sinks = None if part.sinks is None else part.sinks.detach().double().expand(len(b), 1)
    logits = S if sinks is None else torch.cat([S, sinks], dim=-1)
    L = logits.logsumexp(dim=-1, keepdim=True)
    outcomes = (logits - L).exp()
    P = torch.where(shown, outcomes[:, : case.kv_len], 0.0)
    carriers, below = _mark_carriers(P), m - S
    earlier = (
        torch.arange(case.kv_len, device=b.device) < (i + case.causal_offset)[:, None]
    )
    counts = {
        "sees": shown,
        "position": shown & earlier,
        "tied": below <= EQUAL * m.abs().clamp_min(1.0),
        "nearly_tied": below <= NEAR,
        "carriers": carriers,
    }
    weights = torch.where(carriers, P, 0.0)
    signs = (weights @ part.v.detach().double().sign())[in_batch_entry]  # [n, v_dim]
    facts = {
        **_count_flags(counts),
        "max_probability": P.amax(dim=-1),
        "lse": L[:, 0],
        "first_key": P[:, 0],
        "entropy": -torch.xlogy(outcomes, outcomes).sum(dim=-1),
        "one_sign": signs.abs().mean(dim=-1) / weights.sum(dim=-1),
    }
    return facts if sinks is None else {**facts, "sink": outcomes[:, -1]}


def of_keys(
    case: AttentionCase, head: int, b: Tensor, j: Tensor, lse: Tensor
) -> dict[str, Tensor]:
    """Returns fields of `report.WorstRow` of keys j [n] of batch entries b [n] in a kv
    head, by name, fp64 [n] each, over all queries of all query heads that read the key:
    `sees` (how many see it), `position` (how many of these stand before the key's own
    position), `carriers` (the fewest that give CARRIED of its mass), `max_probability`,
    `mass` (the sum of its P). `lse` [B, H, q_len] is the log-sum-exp of all query
    heads."""
    heads = slice(head * case.group, (head + 1) * case.group)
    S = _score_rows(case.restrict(kv_heads=[head]), slice(0, case.q_len), j)
    S = S[b, :, :, torch.arange(len(b), device=b.device)]  # [n, group, q_len]
    shown = S.ne(-math.inf)
    P = torch.where(shown, (S - lse[:, heads][b].double()).exp(), 0.0).flatten(1)
    earlier = (
        torch.arange(case.q_len, device=b.device)
        < (j - case.causal_offset)[:, None, None]
    )
    counts = {
        "sees": shown.flatten(1),
        "position": (shown & earlier).flatten(1),
        "carriers": _mark_carriers(P),
    }
    return {
        **_count_flags(counts),
        "max_probability": P.amax(dim=-1),
        "mass": P.sum(dim=-1),
    }


def _score_rows(case: AttentionCase, rows: Places, keys: Places) -> Tensor:
    """Returns S [B, heads, rows, keys], fp64, of a case with a single kv head, -inf where
    hidden."""
    q, k = case.q[:, :, rows].detach().double(), case.k[:, :, keys].detach().double()
    return scores(case, (q @ k.mT).mul_(case.scale), rows, keys)


def _mark_carriers(P: Tensor) -> Tensor:
    """Returns which probabilities of P [n, m] are the fewest that make up CARRIED of
    their row's sum, but for the rounding of sums, bool [n, m]: of ten equal ones nine, in
    whatever order they are added up. None of a row whose sum is 0."""
    largest, order = P.sort(dim=-1, descending=True, stable=True)
    before = largest.cumsum(dim=-1) - largest
    carry = before < CARRIED * (1 - EQUAL) * P.sum(dim=-1, keepdim=True)
    return torch.zeros_like(carry).scatter(-1, order, carry)


def _count_flags(flags: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns by name how many flags [n, m] are true in each row, fp64 [n]. One sum
    computes all. `flags`: at least one entry, all of one shape."""
    sums = torch.stack(list(flags.values())).sum(dim=-1, dtype=torch.float64)
    return dict(zip(flags, sums.unbind(), strict=True))
