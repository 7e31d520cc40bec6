"""The rows that err most: found where they were planted, measured right, and called by name."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from oracles import FEATURES, make_case
from torch import Tensor

from numdev.audit.explanations import NOTABLE, SHOWN, most
from numdev.cases import AttentionCase
from numdev.formats import FORMATS
from numdev.kernels.reference import attend, gradients
from numdev.metrics.row_facts import of_queries
from numdev.metrics.row_words import NOTHING
from numdev.metrics.worst_rows import worst_rows
from numdev.metrics.yardstick import Yardstick
from numdev.report import WorstRow

BFLOAT16 = FORMATS["bfloat16"]


def normal(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def yardstick(case: AttentionCase, tensor: str = "out") -> tuple[Yardstick, Tensor]:
    """What a tensor of the case is held against, and the log-sum-exp."""
    if tensor == "out":
        exact = attend(case)
        parts = (exact.out, exact.term_scale, exact.empty)
    else:
        exact = gradients(case)
        none = exact.empty if tensor == "dq" else torch.zeros_like(exact.unseen)
        parts = (getattr(exact, tensor), getattr(exact, f"{tensor}_terms"), none)
    r, terms, empty = parts
    return Yardstick(reference=r, term_scale=terms, empty=empty, format=BFLOAT16), exact.lse


def dense(case: AttentionCase) -> tuple[Tensor, Tensor]:
    """S and P of the whole case [B, H, q_len, kv_len], from positions and masks by themselves."""
    k = case.k.double().repeat_interleave(case.group, dim=1)
    S = case.q.double() @ k.mT * case.scale
    if case.softcap is not None:
        S = case.softcap * torch.tanh(S / case.softcap)
    if case.mask is not None and case.mask.dtype != torch.bool:
        S = S + case.mask.double()
    i = torch.arange(case.q_len)[:, None] + case.causal_offset
    j = torch.arange(case.kv_len)[None]
    left, right = case.window or (None, None)
    hidden = (j > i) & case.is_causal
    hidden |= (j < i - left) if left is not None else False
    hidden |= (j > i + right) if right is not None else False
    S = S.masked_fill(hidden, -math.inf)
    if case.mask is not None and case.mask.dtype == torch.bool:
        S = S.masked_fill(~case.mask, -math.inf)
    sinks = torch.full((case.heads,), -math.inf) if case.sinks is None else case.sinks
    whole = torch.cat([S, sinks.double()[None, :, None, None].expand(*S.shape[:3], 1)], dim=-1)
    return S, whole.softmax(dim=-1)


def spoiled(case: AttentionCase, at: tuple[int, ...], by: float = 1.0, tensor: str = "out") -> Any:
    """The tensor with tiny errors everywhere, and one row far off."""
    y, lse = yardstick(case, tensor)
    size = torch.where(y.term_scale > 0, y.term_scale, 0.0)
    out = y.reference + 1e-3 * size * normal(9, *y.reference.shape).clamp(-2, 2)
    out[at] = y.reference[at] + by * size[at]
    return out, y, lse


# --- facts, against a dense computation ----------------------------------------------------------


@pytest.mark.parametrize("feature", FEATURES)
def test_facts_of_queries(feature: str) -> None:
    """Every fact of every row, over every feature, against the whole matrix of scores."""
    case = make_case(**{"seed": 3, **FEATURES[feature]})
    y, _ = yardstick(case)
    S, P = dense(case)
    heads = range(case.heads)
    for h in heads:
        out = y.reference.clone()
        out[:, h] += 1e-3 * normal(5, *out[:, h].shape)
        rows = case.q_len * case.q.shape[0]
        found = worst_rows(case, out, y, heads, count=rows)
        assert len(found) == int((~y.empty[:, h]).sum())
        for w in found:
            assert w.head == h
            check_query(case, w, S[w.batch, h, w.row], P[w.batch, h, w.row])


def check_query(case: AttentionCase, w: WorstRow, S: Tensor, P: Tensor) -> None:
    """One row's facts from its scores [kv_len] and probabilities [kv_len + 1], the sink's last."""
    shown = -math.inf != S
    logits = S[shown] if case.sinks is None else torch.cat([S[shown], case.sinks[[w.head]]])
    top, p = float(S.max()), P[P > 0]
    order = S.argsort(descending=True, stable=True)[: int(shown.sum())]
    before = P[order].cumsum(dim=0) - P[order]
    carriers = order[before < 0.9 * P[:-1].sum()]
    V = case.v[w.batch, w.head // case.group].double()[carriers].sign()
    agree = (P[carriers, None] * V).sum(dim=0).abs() / P[carriers].sum()
    expected: dict[str, Any] = {
        "sees": int(shown.sum()),
        "position": int(shown[: max(0, w.row + case.causal_offset)].sum()),
        "max_probability": pytest.approx(float(P[:-1].max()), rel=1e-9),
        "first_key": pytest.approx(float(P[0]), abs=1e-12),
        "sink": None if case.sinks is None else pytest.approx(float(P[-1]), abs=1e-12),
        "lse": pytest.approx(float(logits.double().logsumexp(dim=0)), abs=1e-9),
        "entropy": pytest.approx(-float((p * p.log()).sum()), abs=1e-9),
        "tied": int((top - S <= 1e-12 * max(1.0, abs(top))).sum()),
        "nearly_tied": int((top - S <= 1e-3).sum()),
        "carriers": len(carriers),
        "one_sign": pytest.approx(float(agree.mean()), abs=1e-9),
    }
    assert {name: getattr(w, name) for name in expected} == expected


def test_equal_keys_tie_wherever_they_stand() -> None:
    """Two equal keys share the maximum, at any two places and although the terms of their score are
    10^9 times as large as it, so that its rounding is 10^6 times what counts as equal: it depends
    on the key alone."""
    n, d = 131, 16
    k = normal(0, 1, 1, n, d)
    k[..., 0], k[..., 1] = -400.0, 1880.0 * 2.0**20
    q = normal(1, 1, 1, n, d)
    q[..., 0], q[..., 1] = 1880.0 * 2.0**20, 400.0
    case = make_case(heads=1, q_len=n, kv_len=n, head_dim=d, v_dim=d, scale=1.0)
    for one, other in ((0, 1), (0, 130), (3, 67), (64, 65), (127, 128), (129, 130)):
        twin = k.clone()
        twin[0, 0, [one, other], 2:] = 40.0 * q[0, 0, 5, 2:]
        tensors = {"q": q, "k": twin}
        rows = torch.tensor([5, 17])
        found = of_queries(dataclasses.replace(case, **tensors), 0, torch.zeros_like(rows), rows)
        assert found["tied"].tolist() == [2, 1]


def test_equal_probabilities() -> None:
    """Of n equal scores, n a multiple of ten, exactly nine in ten carry 90 %, and all are tied."""
    for n in range(10, 400, 30):
        case = make_case(heads=1, q_len=2, kv_len=n)
        case = dataclasses.replace(case, q=torch.zeros_like(case.q))
        rows = torch.tensor([0, 1])
        found = of_queries(case, 0, torch.zeros_like(rows), rows)
        assert found["carriers"].tolist() == [n * 9 // 10] * 2
        assert found["tied"].tolist() == found["sees"].tolist() == [n, n]


def test_infinite_and_hidden_scores() -> None:
    """A row that sees nothing has no probability at all; of one whose score is infinite nothing is
    known, and its neighbour is as it was."""
    case = make_case(heads=1, q_len=3, kv_len=4, is_causal=True, causal_offset=-1)
    k = case.k.clone()
    k[0, 0, 1] = math.inf
    rows = torch.tensor([0, 1, 2])
    found = of_queries(
        dataclasses.replace(case, k=k, q=case.q.abs()), 0, torch.zeros_like(rows), rows
    )
    assert found["sees"].tolist() == [0, 1, 2]
    assert (found["max_probability"][0], found["first_key"][1]) == (0, 1)
    assert found["max_probability"][2].isnan()


# --- which rows ----------------------------------------------------------------------------------


@pytest.mark.parametrize("tensor", ["out", "dq", "dk", "dv"])
def test_a_spoiled_row_is_found_and_described(tensor: str) -> None:
    """The head, batch entry and row that were spoiled come first, with their error and place; for
    dk and dv it is a key."""
    case = make_case(batch=2, heads=4, kv_heads=2, q_len=24, kv_len=30, seed=1)
    case = dataclasses.replace(case, grad_out=normal(2, 2, 4, 24, 4))
    keys = tensor in ("dk", "dv")
    out, y, lse = spoiled(case, (1, 1, 7), by=0.5, tensor=tensor)
    found = worst_rows(case, out, y, range(2 if keys else 4), tensor=tensor, lse=lse)
    first = found[0]
    assert (first.batch, first.head, first.row, first.rows) == (1, 1, 7, 30 if keys else 24)
    assert first.ratio == pytest.approx(0.5, rel=1e-6)
    assert first.error == pytest.approx(0.5 * float(y.term_scale[1, 1, 7].norm()), rel=1e-6)
    size = y.reference[1, 1, 7].norm() / y.term_scale[1, 1, 7].norm()
    assert first.cancellation == pytest.approx(float(size))
    where = f"{'key' if keys else 'row'} 7 (of {first.rows}; batch entry 1)"
    assert first.sentence.startswith(f"{where} errs by 0.5 of the size of its terms: ")
    assert len({(w.batch, w.row) for w in found}) == 3
    assert {w.head for w in found} == {1}
    assert found[1].ratio > found[2].ratio


def test_a_sampled_row_is_named_by_its_place_in_the_call() -> None:
    """Of every third row the second is row 3, and its facts are that row's."""
    case = make_case(q_len=24, kv_len=30, seed=1)
    rows = torch.arange(0, 24, 3)
    out, y, _ = spoiled(case.select_rows(rows), (0, 1, 1), by=0.3)
    first = worst_rows(case, out, y, range(2), rows=rows)[0]
    assert (first.head, first.row, first.rows) == (1, 3, 24)
    assert first.lse == pytest.approx(float(attend(case).lse[0, 1, 3]))


def test_what_is_not_finite_comes_first_and_what_says_nothing_is_left_out() -> None:
    """A NaN is worse than any error. Nothing is said of rows that see no key, nor where there is no
    error; and of sequences with a common beginning one is enough."""
    case = make_case(q_len=12, kv_len=12, seed=2)
    out, y, _ = spoiled(case, (0, 1, 4))
    out[0, 0, 8, :2] = math.nan
    first = worst_rows(case, out, y, range(2))[0]
    assert (first.head, first.row, first.nonfinite) == (0, 8, 2)
    assert "is not finite in 2 elements where the exact result is" in first.sentence
    out[0, 0, 8] = math.nan
    assert worst_rows(case, out, y, range(2))[0].error is None
    case = make_case(q_len=6, kv_len=6, is_causal=True, causal_offset=-2)
    y, _ = yardstick(case)
    out = y.reference.clone()
    for value in (0.0, math.nan):
        out[:, :, :2] = value
        assert worst_rows(case, out, y, range(2)) == []
    case = make_case(q_len=20, kv_len=20, is_causal=True)
    twice = {n: getattr(case, n).repeat(2, 1, 1, 1) for n in ("q", "k", "v")}
    case = dataclasses.replace(case, **twice)
    out, y, _ = spoiled(case, (0, 1, 4))
    out[1] = out[0]
    assert len({w.row for w in worst_rows(case, out, y, range(2))}) == 3


# --- what stands out -----------------------------------------------------------------------------


def planted(n: int = 64, **fields: Any) -> AttentionCase:
    """Ordinary rows; one is then given its peculiarity."""
    return make_case(**{"heads": 1, "q_len": n, "kv_len": n, "head_dim": 16, "seed": 7, **fields})


def described(case: AttentionCase, row: int, **changes: Any) -> str:
    case = dataclasses.replace(case, **changes)
    out, y, _ = spoiled(case, (0, 0, row))
    first = worst_rows(case, out, y, [0])[0]
    assert first.row == row
    return first.sentence.partition(": ")[2]


def changes_of(what: str, case: AttentionCase) -> dict[str, Tensor]:
    """Inputs that give row 17 of `planted` one peculiarity."""
    q, k, v = case.q.clone(), case.k.clone(), case.v.clone()
    if what in ("near tie", "tie", "tie, one sign"):
        q[0, 0, 17] = 12 * k[0, 0, 40]
        k[0, 0, 9] = k[0, 0, 40] * (1 + 1e-6 * (what == "near tie"))
        if what == "tie, one sign":
            v[0, 0, [9, 40]] = v[0, 0, [9, 40]].abs()
    elif what == "one sign":
        k[0, 0, :8, 0] = 30.0
        v[0, 0, :8] = v[0, 0, :8].abs()
        q[..., 0] = 0.0
        q[0, 0, 17, 0] = 1.0
    elif what == "cancels":
        k[0, 0, 20] = k[0, 0, 21]
        v[0, 0, 20] = -v[0, 0, 21]
        q[0, 0, 17] = 20 * k[0, 0, 20]
    elif what == "first key":
        q[0, 0, 17] = 40 * k[0, 0, 0]
    else:
        k[0, 0, :, 0] = 1.0
        q[..., 0] = 0.0
        q[0, 0, 17, 0] = -60.0
        return {"q": q, "k": k, "sinks": torch.tensor([-4.0]).double()}
    return {"q": q, "k": k, "v": v}


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("near tie", "2 keys are within 0.001 of its maximum"),
        ("tie", "2 keys share its maximum, P = 0.5 each"),
        ("tie, one sign", "V keeps one sign (1.00; median 0."),
        ("one sign", "V keeps one sign (1.00; median 0."),
        ("cancels", "its terms cancel to"),
        ("first key", "key 0 has P = 1 (median 0.0"),
        ("sink", "the sink has P = 1 (median 0.0"),
        ("sink", "its log-sum-exp is -3.99"),
    ],
)
def test_what_was_planted_stands_out(what: str, says: str) -> None:
    """Each peculiarity of a row is named; with a tie alone V keeps no one sign."""
    case = planted()
    said = described(case, 17, **changes_of(what, case))
    assert says in said
    assert what != "tie" or "one sign (1.00" not in said


def test_few_rows_tell_of_ties_alone() -> None:
    """Of one query nothing is usual, but a tie is a tie; rows that see few keys stand out."""
    case = planted(1, kv_len=64)
    assert described(case, 0) == f"{NOTHING} (with 0 rows to compare it with)."
    k = case.k.clone()
    k[0, 0, 3] = k[0, 0, 60]
    assert described(case, 0, k=k, q=12 * k[:, :, 3:4]).startswith("2 keys share its maximum")
    assert "keys that it sees: 2 (median 3" in described(planted(is_causal=True), 1)


# --- which of them -------------------------------------------------------------------------------


def kept(head: int, **changes: Any) -> WorstRow:
    """A row as an audit keeps it, of a sound kernel but for the changes."""
    fields: dict[str, Any] = {
        "case": "c", "source": "s", "module": "m", "layer": 0, "call": 0, "seed": 0, "kernel": "k",
        "format": "bfloat16", "tensor": "out", "head": head, "batch": 0, "row": 1, "rows": 9,
        "nonfinite": 0, "error": 1e-3, "ratio": 1.4, "predicted": True, "cancellation": 1.0,
        "sees": 9, "position": 4, "max_probability": 0.5, "sentence": "",
    }  # fmt: skip
    return WorstRow(**{**fields, **changes})


def test_the_worst_rows_are_shown() -> None:
    """What is not finite first, predicted or not, then by ratio; each row once, three in all. What
    is less than twice what is predicted, or stands beside no prediction, is noise."""
    lost = kept(3, nonfinite=4, error=None, ratio=None, predicted=False)
    large, limit = kept(1, ratio=30.0), kept(0, ratio=NOTABLE)
    assert most([kept(5), limit, large, lost]) == (lost, large, limit)
    assert most([large, large.model_copy(update={"kernel": "same"})]) == (large,)
    assert len(most([kept(h, ratio=9.0) for h in range(5)])) == SHOWN
    assert most([kept(0), kept(1, ratio=NOTABLE * 0.999), kept(2, ratio=None)]) == ()
    assert most([kept(0, ratio=50.0, predicted=False)]) == ()
