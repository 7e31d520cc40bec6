"""The rows that err most: found where they were planted, measured right, and called by
name."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import mpmath
import pytest
import torch
from oracles import FEATURES, attention, make_case, normal
from torch import Tensor

from numdev.cases import AttentionCase
from numdev.formats import FORMATS
from numdev.kernels.reference import attend, gradients
from numdev.metrics.yardstick import Yardstick
from numdev.operations.attention.row_facts import of_queries
from numdev.operations.attention.unusual_rows import NOTHING
from numdev.operations.attention.worst_rows import worst_rows
from numdev.report import WorstRow
from numdev.studies.audit.explanations import NOTABLE, SHOWN, most

BFLOAT16 = FORMATS["bfloat16"]


def yardstick(case: AttentionCase, tensor: str = "out") -> tuple[Yardstick, Tensor]:
    """What a tensor of the case is held against, and the log-sum-exp."""
    exact: Any = attend(case) if tensor == "out" else gradients(case)
    terms = exact.term_scale if tensor == "out" else getattr(exact, f"{tensor}_terms")
    empty = torch.zeros_like(exact.unseen) if tensor in ("dk", "dv") else exact.empty
    r = getattr(exact, tensor)
    return Yardstick(
        reference=r, term_scale=terms, empty=empty, format=BFLOAT16
    ), exact.lse


def spoiled(
    case: AttentionCase, at: tuple[int, ...], by: float = 1.0, tensor: str = "out"
) -> Any:
    """The tensor with tiny errors everywhere, and one row far off."""
    y, lse = yardstick(case, tensor)
    size = torch.where(y.term_scale > 0, y.term_scale, 0.0)
    out = y.reference + 1e-3 * size * normal(*y.reference.shape, seed=9).clamp(-2, 2)
    out[at] = y.reference[at] + by * size[at]
    return out, y, lse


@pytest.mark.parametrize("feature", FEATURES)
def test_facts_of_queries(feature: str) -> None:
    """Every fact of every row, over every feature, from the oracle's probabilities."""
    case = make_case(**{"seed": 3, **FEATURES[feature]})
    y, _ = yardstick(case)
    exact = attention(case)
    for h in range(case.heads):
        out = y.reference.clone()
        out[:, h] += 1e-3 * normal(*out[:, h].shape, seed=5)
        result = worst_rows(
            case, out, y, range(case.heads), count=case.q_len * case.q.shape[0]
        )
        assert len(result) == int((~y.empty[:, h]).sum())
        for w in result:
            assert w.head == h
            at = (w.batch, h, w.row)
            check_query(case, w, exact.weights[at], exact.lse[at])


def check_query(
    case: AttentionCase, w: WorstRow, weights: dict[int, Any], lse: Any
) -> None:
    """One row's facts from the probabilities of the keys it sees and its log-sum-exp."""
    S = {j: float(mpmath.log(x) + lse) for j, x in weights.items()}
    P, carriers = {j: float(x) for j, x in weights.items()}, list[int]()
    for j in sorted(P, key=lambda j: -S[j]):
        if sum(P[c] for c in carriers) < 0.9 * sum(P.values()):
            carriers.append(j)
    signs = case.v[w.batch, w.head // case.group].double()[carriers].sign()
    carried = torch.tensor([P[j] for j in carriers], dtype=torch.float64)
    top, sink = max(S.values()), float(1 - sum(weights.values()))
    summed = [*P.values(), *([] if case.sinks is None else [sink])]
    expected: dict[str, Any] = {
        "sees": len(P),
        "position": sum(j < w.row + case.causal_offset for j in P),
        "max_probability": pytest.approx(max(P.values()), rel=1e-9),
        "first_key": pytest.approx(P.get(0, 0.0), abs=1e-12),
        "sink": None if case.sinks is None else pytest.approx(sink, abs=1e-12),
        "lse": pytest.approx(float(lse), abs=1e-9),
        "entropy": pytest.approx(
            -sum(p * math.log(p) for p in summed if p > 0), abs=1e-9
        ),
        "tied": sum(top - x <= 1e-12 * max(1.0, abs(top)) for x in S.values()),
        "nearly_tied": sum(top - x <= 1e-3 for x in S.values()),
        "carriers": len(carriers),
        "one_sign": pytest.approx(
            float((carried @ signs).abs().mean() / carried.sum()), abs=1e-9
        ),
    }
    assert {name: getattr(w, name) for name in expected} == expected


def facts(case: AttentionCase, *rows: int) -> dict[str, Tensor]:
    """Of rows of the first head and batch entry."""
    return of_queries(
        case, 0, torch.zeros(len(rows), dtype=torch.long), torch.tensor(rows)
    )


def test_equal_keys_tie_wherever_they_stand() -> None:
    """Two equal keys share the maximum, wherever they are and although the terms of their
    score are 10^9 times as large, so that rounding is 10^6 times what counts as equal:
    the same for both."""
    n, d = 131, 16
    k = normal(1, 1, n, d, seed=0)
    k[..., 0], k[..., 1] = -400.0, 1880.0 * 2.0**20
    q = normal(1, 1, n, d, seed=1)
    q[..., 0], q[..., 1] = 1880.0 * 2.0**20, 400.0
    case = make_case(heads=1, q_len=n, kv_len=n, head_dim=d, v_dim=d, scale=1.0)
    for one, other in ((0, 1), (0, 130), (3, 67), (64, 65), (127, 128), (129, 130)):
        twin = k.clone()
        twin[0, 0, [one, other], 2:] = 40.0 * q[0, 0, 5, 2:]
        result = facts(dataclasses.replace(case, q=q, k=twin), 5, 17)
        assert result["tied"].tolist() == [2, 1]


def test_equal_probabilities() -> None:
    """Of n equal scores, n a multiple of ten, exactly nine in ten carry 90 %, and all are
    tied."""
    for n in range(10, 400, 30):
        case = make_case(heads=1, q_len=2, kv_len=n)
        result = facts(dataclasses.replace(case, q=torch.zeros_like(case.q)), 0, 1)
        assert result["carriers"].tolist() == [n * 9 // 10] * 2
        assert result["tied"].tolist() == result["sees"].tolist() == [n, n]


def test_infinite_and_hidden_scores() -> None:
    """A row that sees nothing has no probability at all; of one whose score is infinite
    nothing is known, and its neighbour is as it was."""
    case = make_case(heads=1, q_len=3, kv_len=4, is_causal=True, causal_offset=-1)
    k = case.k.clone()
    k[0, 0, 1] = math.inf
    result = facts(dataclasses.replace(case, k=k, q=case.q.abs()), 0, 1, 2)
    assert result["sees"].tolist() == [0, 1, 2]
    assert (result["max_probability"][0], result["first_key"][1]) == (0, 1)
    assert result["max_probability"][2].isnan()


@pytest.mark.parametrize("tensor", ["out", "dq", "dk", "dv"])
def test_a_spoiled_row_is_found_and_described(tensor: str) -> None:
    """What was spoiled comes first, with its error and place; for dk and dv it is a
    key."""
    case = make_case(batch=2, heads=4, kv_heads=2, q_len=24, kv_len=30, seed=1)
    case = dataclasses.replace(case, grad_out=normal(2, 4, 24, 4, seed=2))
    keys = tensor in ("dk", "dv")
    out, y, lse = spoiled(case, (1, 1, 7), by=0.5, tensor=tensor)
    result = worst_rows(case, out, y, range(2 if keys else 4), tensor=tensor, lse=lse)
    first = result[0]
    assert (first.batch, first.head, first.row, first.rows) == (
        1,
        1,
        7,
        30 if keys else 24,
    )
    size, terms = (float(x[1, 1, 7].norm()) for x in (y.reference, y.term_scale))
    numbers = (first.ratio, first.error, first.cancellation)
    assert numbers == pytest.approx((0.5, 0.5 * terms, size / terms), rel=1e-6)
    where = f"{'key' if keys else 'row'} 7 (of {first.rows}; batch entry 1)"
    assert first.sentence.startswith(
        f"{where} has an error of 0.5 of the size of its terms: "
    )
    assert len({(w.batch, w.row) for w in result}) == 3
    assert {w.head for w in result} == {1}
    assert result[1].ratio > result[2].ratio


def test_a_sampled_row_is_named_by_its_place_in_the_call() -> None:
    """Of every third row the second is row 3, and its facts are that row's."""
    case = make_case(q_len=24, kv_len=30, seed=1)
    rows = torch.arange(0, 24, 3)
    out, y, _ = spoiled(case.restrict(rows=rows), (0, 1, 1), by=0.3)
    first = worst_rows(case, out, y, range(2), rows=rows)[0]
    assert (first.head, first.row, first.rows) == (1, 3, 24)
    assert first.lse == pytest.approx(float(attend(case).lse[0, 1, 3]))


def test_what_is_not_finite_comes_first_and_what_says_nothing_is_left_out() -> None:
    """A NaN is worse than any error. Nothing is said of rows that see no key, nor where
    there is no error; and of sequences with a common beginning one is enough."""
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


# --- what stands out ------------------------------------------------------------------


def planted(n: int = 64, **fields: Any) -> AttentionCase:
    """Ordinary rows; one is then given its peculiarity."""
    return make_case(
        **{"heads": 1, "q_len": n, "kv_len": n, "head_dim": 16, "seed": 7, **fields}
    )


def described(case: AttentionCase, row: int, **changes: Any) -> str:
    case = dataclasses.replace(case, **changes)
    out, y, _ = spoiled(case, (0, 0, row))
    first = worst_rows(case, out, y, [0])[0]
    assert first.row == row
    return first.sentence.partition(": ")[2]


def changes_of(what: str, case: AttentionCase) -> dict[str, Tensor]:
    """Inputs that give row 17 of `planted` one peculiarity."""
    q, k, v = case.q.clone(), case.k.clone(), case.v.clone()
    if "tie" in what:
        q[0, 0, 17] = 12 * k[0, 0, 40]
        k[0, 0, 9] = k[0, 0, 40] * (1 + 1e-6 * (what == "near tie"))
        if "one sign" in what:
            v[0, 0, [9, 40]] = v[0, 0, [9, 40]].abs()
    elif what == "cancels":
        k[0, 0, 20] = k[0, 0, 21]
        v[0, 0, 20] = -v[0, 0, 21]
        q[0, 0, 17] = 20 * k[0, 0, 20]
    elif what == "first key":
        q[0, 0, 17] = 40 * k[0, 0, 0]
    else:  # one row looks along the first feature
        q[..., 0], q[0, 0, 17, 0] = 0.0, 1.0 if what == "one sign" else -60.0
        k[0, 0, : 8 if what == "one sign" else 64, 0] = (
            30.0 if what == "one sign" else 1.0
        )
        if what == "sink":
            return {"q": q, "k": k, "sinks": torch.tensor([-4.0]).double()}
        v[0, 0, :8] = v[0, 0, :8].abs()
    return {"q": q, "k": k, "v": v}


@pytest.mark.parametrize(("what", "says"), [
    ("near tie", "2 keys are within 0.001 of its maximum"),
    ("tie", "2 keys share its maximum, P = 0.5 each"),
    ("tie, one sign", "V keeps one sign (1.00; median 0."),
    ("one sign", "V keeps one sign (1.00; median 0."), ("cancels", "its terms cancel to"),
    ("first key", "key 0 has P = 1 (median 0.0"), ("sink", ("the sink has P = 1 (median 0.0")),
    ("sink", "its log-sum-exp is -3.99"),
])  # fmt: skip
def test_what_was_planted_stands_out(what: str, says: str) -> None:
    """Each peculiarity of a row is named; with a tie alone V keeps no one sign."""
    case = planted()
    words = described(case, 17, **changes_of(what, case))
    assert says in words
    assert what != "tie" or "one sign (1.00" not in words


def test_few_rows_tell_of_ties_alone() -> None:
    """Of one query nothing is usual, but a tie is a tie; rows that see few keys stand
    out."""
    case = planted(1, kv_len=64)
    assert described(case, 0) == f"{NOTHING} (with 0 rows to compare it with)."
    k = case.k.clone()
    k[0, 0, 3] = k[0, 0, 60]
    assert described(case, 0, k=k, q=12 * k[:, :, 3:4]).startswith(
        "2 keys share its maximum"
    )
    assert "keys that it sees: 2 (median 3" in described(planted(is_causal=True), 1)


def worst_row(head: int, **changes: Any) -> WorstRow:
    """A row as an audit keeps it, of a sound kernel but for the changes."""
    fields: dict[str, Any] = {
        "case": "c", "source": "s", "module": "m", "layer": 0, "call": 0, "seed": 0, "kernel": "k",
        "format": "bfloat16", "tensor": "out", "head": head, "batch": 0, "row": 1, "rows": 9,
        "nonfinite": 0, "error": 1e-3, "ratio": 1.4, "predicted": True, "cancellation": 1.0,
        "sees": 9, "position": 4, "max_probability": 0.5, "sentence": "",
    }  # fmt: skip
    return WorstRow(**{**fields, **changes})


def test_the_worst_rows_are_shown() -> None:
    """What is not finite first, predicted or not, then by ratio; each row once, three in
    all. What is less than twice what is predicted, or stands beside no prediction, is
    noise."""
    lost = worst_row(3, nonfinite=4, error=None, ratio=None, predicted=False)
    large, limit = worst_row(1, ratio=30.0), worst_row(0, ratio=NOTABLE)
    assert most([worst_row(5), limit, large, lost]) == (lost, large, limit)
    assert most([large, large.model_copy(update={"kernel": "same"})]) == (large,)
    assert len(most([worst_row(h, ratio=9.0) for h in range(5)])) == SHOWN
    assert (
        most(
            [worst_row(0), worst_row(1, ratio=NOTABLE * 0.999), worst_row(2, ratio=None)]
        )
        == ()
    )
    assert most([worst_row(0, ratio=50.0, predicted=False)]) == ()
