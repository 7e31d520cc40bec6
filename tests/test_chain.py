"""The numbers of a diagnosis against known answers, definitions and loops over rows and
keys, what cures change in them, and what of it a real kernel shows from outside."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from oracles import FEATURES, normal, step, to_cuda
from scipy import stats
from torch import Tensor

from numdev.cases import AttentionCase, CaseRef, visible
from numdev.errors import Refused, UsageError
from numdev.formats import FORMATS, round_to, ulp
from numdev.kernels import Kernel, Output, find
from numdev.kernels.emulation import forward as fwd
from numdev.kernels.emulation.recipe import Recipe, changed, recipe
from numdev.kernels.emulation.rounding import Rounder
from numdev.sources.query_projection import Projection
from numdev.studies.diagnose.bias_chain import Diagnosis, diagnose_call
from numdev.studies.diagnose.cures import CURES, NONE, cure_rows, kernel_rows
from numdev.studies.diagnose.exact_and_rounded_passes import exact_passes, rounded_passes
from numdev.studies.diagnose.head_error_means import (
    BLOCKS,
    STEPS,
    largest_eigenvalue,
    mean_by_head,
    numbers_by_head,
    t_by_head,
)
from numdev.studies.diagnose.report import CureRow

BF16 = FORMATS["bfloat16"]
SHARES = ("tied", "ones", "powers", "one_signed")


def drawn(**fields: Any) -> AttentionCase:
    """A case with an upstream gradient; 40 tokens in bfloat16 if nothing else is said."""
    usual = {"dtype": torch.bfloat16, "q_len": 40, "kv_len": 40, "head_dim": 8}
    return step(**{**usual, **fields})


def tying(**fields: Any) -> AttentionCase:
    """Scores of which many are equal: q and k hold few numbers."""
    case = drawn(**fields)
    few = {
        name: getattr(case, name).float().round().clamp(-1, 1).bfloat16() for name in "qk"
    }
    return dataclasses.replace(case, **few, scale=0.5)


def plain_projection(case: AttentionCase, width: int = 12, seed: int = 9) -> Projection:
    """W_Q with nothing between it and the call."""
    g = torch.Generator().manual_seed(seed)
    b, h, n, d = case.q.shape
    x = torch.randn(b, n, width, generator=g, dtype=torch.float64)
    weight = torch.randn(h * d, width, generator=g, dtype=torch.float64)
    return Projection(x=x, weight=weight, pull=lambda dq: dq.transpose(1, 2))


def numbers(row: Any, *names: str) -> list[float | None]:
    return [getattr(row, name) for name in names]


def assert_same(result: Any, expected: Any, rel: float = 1e-9) -> None:
    """Numbers that agree to fp64 rounding; None only beside None."""
    assert len(result) == len(expected)
    for x, y in zip(result, expected, strict=True):
        assert (x is None) == (y is None), (result, expected)
        assert x is None or x == pytest.approx(y, rel=rel, abs=1e-13), (result, expected)


class Tapped(Rounder):
    """Keeps what was rounded at `p`, in the order of the tiles."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.weights: list[Tensor] = []

    def __call__(self, site: str, x: Tensor) -> Tensor:
        rounded = super().__call__(site, x)
        if site == "p":
            self.weights.append(rounded.clone())
        return rounded


def by_definition(case: AttentionCase, created: Recipe, h: int) -> dict[str, float]:
    """Ties, ones, powers and V's signs of a head by loops, of the P that met V."""
    r = Tapped(created, case)
    fwd.forward(r, *(x.double() for x in (case.q, case.k, case.v)))
    block = created.tile(case.q.shape[-1], case.kv_len)[1]
    starts = list(range(0, case.kv_len, block))
    order = starts[::-1] if created.kv_order == "descending" else starts
    rows: dict[str, list[float]] = {name: [] for name in SHARES}
    for b, i in itertools.product(range(len(case.q)), range(case.q_len)):
        exact = torch.tensor(
            [score(case, b, h, i, j) for j in range(case.kv_len)]
        ).double()
        S = [float(r("scaled", r("scores", x / case.scale) * case.scale)) for x in exact]
        seen = [j for j, x in enumerate(S) if x > -math.inf]
        if len(seen) < 2:
            continue
        top, P = max(S), exact.softmax(0).tolist()
        near = [j for j in seen if S[j] >= top - 1e-3]
        rows["tied"].append(S.count(top) > 1)
        if len(near) > 1:
            signs = case.v[b, h // case.group, near].double().sign().sum(0).abs() == len(
                near
            )
            rows["one_signed"].append(float(signs.double().mean()))
        met, ones, powers = -math.inf, 0, 0.0
        for start, weights in zip(order, r.weights, strict=True):
            tile = [j for j in seen if start <= j < start + block]
            largest_in_tile = max((S[j] for j in tile), default=-math.inf)
            met = max(met, largest_in_tile)
            under = largest_in_tile if created.algorithm == "fa1" else met
            for j in tile:
                p = float(weights[b, h, i, j - start])
                ones += p == 1.0 and under == top
                powers += P[j] if p > 0 and math.log2(p) % 1 == 0 else 0.0
        rows["ones"].append(ones > 1)
        rows["powers"].append(powers)
    return {name: sum(x) / len(x) for name, x in rows.items()}


def score(case: AttentionCase, b: int, h: int, i: int, j: int) -> float:
    shown = visible(case, slice(i, i + 1), slice(j, j + 1))
    if shown is not None and not bool(shown.expand(len(case.q), case.heads, 1, 1)[b, h]):
        return -math.inf
    dot = (case.q[b, h, i].double() * case.k[b, h // case.group, j].double()).sum()
    return float(case.scale * dot)


RECIPES: dict[str, Recipe] = {
    "qiu2025": recipe("qiu2025"),
    "qiu2025 in tiles": recipe("qiu2025", block_q=64, block_kv=16),
    "descending": recipe("qiu2025", block_q=64, block_kv=16, kv_order="descending"),
    "fa1": recipe("golden2024", block_q=64, block_kv=16),
    "eager": recipe("eager"),
    "fa2": recipe("fa2"),
}


@pytest.mark.parametrize("name", RECIPES)
def test_ties_and_powers_are_those_that_loops_find(name: str) -> None:
    """Of tied maxima, P-bar of 1, powers of two and V's signs, by tile; hidden keys are
    none."""
    more = (
        {"is_causal": True}
        if name == "fa2"
        else {"mask": ("bool", "b11k"), "kv_heads": 1}
    )
    case, created = (
        tying(batch=2, **(more if name in ("fa2", "eager") else {})),
        RECIPES[name],
    )
    row, expected = diagnose_call(case, created).heads[1], by_definition(case, created, 1)
    assert row.tied
    assert row.powers
    assert (row.ones == 0) == (name == "eager")  # normalised before it meets V
    assert_same(numbers(row, *SHARES), [expected[n] for n in SHARES])
    for name in SHARES:
        one_row_off = expected | {name: expected[name] + 1 / row.rows}
        with pytest.raises(AssertionError):
            assert_same(numbers(row, *SHARES), [one_row_off[n] for n in SHARES])


VECTOR = {"accurate": -4.703990459442139, "rounded": -4.71875}
TAIL = 1815 / 2**21
"""121 * 2^-18 times 15 * 2^-3: numbers of bf16."""


def paper() -> AttentionCase:
    """The paper's two tied keys and a tail: scores 0, 0 and log(121 / 2^18) to 24
    bits."""
    score = math.log(121 / 2**18)
    parts, left = [], score
    for _ in range(3):
        parts.append(float(torch.tensor(left).bfloat16()))
        left -= parts[-1]
    k = torch.tensor([[0.0] * 3, [0.0] * 3, parts])
    v = torch.tensor([[-2.40625], [-2.296875], [-1.875]])
    passed = {"q": torch.ones(1, 3), "k": k, "v": v, "grad_out": torch.ones(1, 1)}
    tensors = {name: x[None, None].bfloat16() for name, x in passed.items()}
    return AttentionCase(ref=CaseRef(case="paper"), scale=1.0, **tensors)


UNNORMALISED = recipe("exact", sites={"p": "working", "pv": "working"})


def test_the_papers_vector_rounds_away_from_zero() -> None:
    """-4.703990459442139 becomes -4.71875, which is an error of -0.472 ulp, outward."""
    case = paper()
    result = rounded_passes(case, UNNORMALISED)
    assert result.product.item() == VECTOR["rounded"]
    assert result.product_exact.item() == VECTOR["accurate"] == -4.703125 - TAIL
    off = 0.014759540557861328 / 2**-5
    assert_same([diagnose_call(case, UNNORMALISED).heads[0].pv_bias], [off])


def one_signed(tail: float, heads: int = 8, width: int = 128) -> AttentionCase:
    """Rows of two tied keys of one exponent, V in [-4, -2), and a tail of `tail` ulp of
    the sum."""
    g = torch.Generator().manual_seed(3)
    v = -2 - 2 * torch.rand(1, heads, 2, width, generator=g, dtype=torch.float64)
    v = round_to(v, FORMATS["bfloat16"]).clamp(-3.984375, -2.0)
    last = torch.full((1, heads, 1, width), -tail * 2**-5 * 2**10, dtype=torch.float64)
    k = (
        torch.tensor([0.0, 0.0, -10 * math.log(2.0)])
        .view(1, 1, 3, 1)
        .expand(1, heads, 3, 1)
    )
    q = torch.ones(1, heads, 20, 1)
    dO = torch.ones(1, heads, 20, width)
    created = {"q": q, "k": k, "v": torch.cat([v, last], dim=2), "grad_out": dO}
    tensors = {n: x.bfloat16() for n, x in created.items()}
    return AttentionCase(ref=CaseRef(case="one sign"), scale=1.0, **tensors)


@pytest.mark.parametrize("tail", [0.03, 0.125])
def test_two_terms_and_a_tail_err_by_a_quarter_ulp(tail: float) -> None:
    """Outward, to four standard errors of 1024 sums; by nothing once the product is
    exact."""
    created = UNNORMALISED
    rows = diagnose_call(one_signed(tail), created).heads
    result = sum(row.pv_bias or 0.0 for row in rows) / len(rows)
    error = 4 * 0.25 / math.sqrt(1024)
    assert result == pytest.approx(0.25 - tail, abs=error)
    assert abs(result + 0.25 - tail) > 2 * error  # the other sign would not do
    assert all(row.pv_t is not None and row.pv_t > 5 for row in rows)
    cured = diagnose_call(one_signed(tail), recipe("exact", sites={"p": "working"})).heads
    assert all(row.pv_bias == 0.0 for row in cured)


VARIANTS = {
    "fa2": recipe("qiu2025", block_kv=8),
    "plain": recipe("eager", sites={"pv": "working"}),
    "fa1": recipe("golden2024", block_kv=8),
    "kv loop": recipe("qiu2025", block_kv=8, loop_order="kv"),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_biases_are_means_of_errors_in_ulps(name: str) -> None:
    """P V and O by their definitions, over the rows that see more than one key."""
    case, created = drawn(is_causal=True), VARIANTS[name]
    row, result, truth = (
        diagnose_call(case, created).heads[0],
        rounded_passes(case, created),
        exact_passes(case, None),
    )
    exact, scale = truth.exact.out[0, 0, 1:], truth.exact.term_scale[0, 0, 1:]
    assert_bias(row.out_bias, result.out[0, 0, 1:] - exact, exact, scale)
    product, rounded = result.product_exact[0, 0, 1:], result.product[0, 0, 1:]
    l = (truth.exact.lse - result.saved.m)[0, 0, 1:, None].exp()
    assert_bias(
        row.pv_bias, rounded - product, product, scale * (1.0 if name == "plain" else l)
    )


def assert_bias(bias: float | None, error: Tensor, exact: Tensor, scale: Tensor) -> None:
    """The sum, element by element, of one sequence."""
    parts = (x.flatten().tolist() for x in (error, exact, scale))
    outward = [
        e
        / 2.0 ** (math.floor(math.log2(max(abs(x), terms / 16))) - 7)
        * math.copysign(1.0, x)
        for e, x, terms in zip(*parts, strict=True)
    ]
    assert_same([bias], [math.fsum(outward) / len(outward)])


GENTLE = {
    n: f for n, f in FEATURES.items() if f.get("kv_len", 5) > 1 and "no key" not in n
}


@pytest.mark.parametrize("name", GENTLE)
def test_formula_2_is_the_whole_error_where_only_delta_errs(name: str) -> None:
    """To fp64 rounding, whatever the call has; with dS rounded too it is not."""
    case = step(**GENTLE[name])
    projection = plain_projection(case)
    rows = diagnose_call(
        case, recipe("exact", sites={"delta": "bfloat16"}), projection
    ).heads
    counted = [row for row in rows if row.dw_q_error]
    assert counted or name == "scale 0"  # where dQ is 0
    for row in counted:
        assert row.moved == pytest.approx(row.dw_q_error, rel=1e-9)
    both = recipe("exact", sites={"delta": "bfloat16", "ds": "bfloat16"})
    far = [r for r in diagnose_call(case, both, projection).heads if r.dw_q_error]
    assert bool(far) == bool(counted)
    assert not far or any(
        abs((r.moved or 0.0) / (r.dw_q_error or 1.0) - 1) > 1e-6 for r in far
    )


def test_numbers_of_delta_and_dw_q_are_their_definitions() -> None:
    """Densely, where delta and dQ alone are rounded; a row that sees one key does not
    count."""
    case = drawn(batch=2, heads=4, kv_heads=2, is_causal=True)
    projection = plain_projection(case)
    created = recipe("exact", sites={"delta": "bfloat16", "dq_out": "bfloat16"})
    norm, x = np.linalg.norm, projection.x.numpy()
    W = projection.weight.view(case.heads, -1, x.shape[-1]).numpy()
    spectral = [norm(w, ord=2) for w in W]
    for h, row in enumerate(diagnose_call(case, created, projection).heads):
        q, dO = (x[:, h].double().numpy() for x in (case.q, case.grad_out))
        k, v = (x[:, h // case.group].double().numpy() for x in (case.k, case.v))
        P = np.tril(np.exp(case.scale * q @ k.mT))
        P /= P.sum(-1, keepdims=True)
        dP, O, PK = dO @ v.mT, P @ v, P @ k
        delta = (P * dP).sum(-1)
        off = round_to(torch.from_numpy(delta), BF16).numpy() - delta
        dS = P * (dP - (delta + off)[..., None])
        exact, dq = (case.scale * ds @ k for ds in (P * (dP - delta[..., None]), dS))
        error = round_to(torch.from_numpy(dq), BF16).numpy() - exact
        whole, wrong, moved = (
            norm(np.einsum("bnd,bnw->dw", g, x))
            for g in (exact, error, case.scale * off[..., None] * PK)
        )
        terms = np.einsum("bnd,bnw->bndw", PK[:, 1:], x[:, 1:]).reshape(
            -1, PK[0, 0].size * x[0, 0].size
        )
        energies = np.linalg.svd(terms, compute_uv=False) ** 2
        size = np.sqrt((np.abs(dO * O).sum(-1)[:, 1:] ** 2).mean())
        assert_same(
            numbers(row, "delta_mean", "ds_row_sum", "dw_q_norm", "dw_q_error", "moved",
                    "similarity", "spectral_norm", "spectral_ratio"),
            [(off / size)[:, 1:].mean(), norm(dS.sum(-1)[:, 1:]) / norm(np.abs(dS).sum(-1)[:, 1:]),
             whole, wrong / whole, moved / whole, energies[0] / energies.sum(), spectral[h],
             spectral[h] / np.median(spectral)],
        )  # fmt: skip


def test_a_delta_that_fits_its_own_p_is_no_imbalance() -> None:
    """Delta from rounded S and dP is wrong and in balance; with l rounded it no longer
    is."""
    for fields in ({}, FEATURES["sinks"]):
        case = step(dtype=torch.bfloat16, **fields)
        sites = {"scaled": "bfloat16", "dp": "bfloat16"}
        created = recipe("exact", sites=sites, delta_from="dP*P")
        for row in diagnose_call(case, created, plain_projection(case)).heads:
            assert abs(row.delta_mean or 0.0) > 1e-6
            assert (row.dw_q_error or 0.0) > 1e-5
            assert (row.moved or 0.0) < 1e-12
        created = recipe(
            "exact", sites={**sites, "row_sum": "bfloat16"}, delta_from="dP*P"
        )
        rows = diagnose_call(case, created, plain_projection(case)).heads
        assert any((row.moved or 0.0) > 1e-5 for row in rows)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", FEATURES)
def test_every_feature_is_diagnosed_or_explained(name: str, dtype: torch.dtype) -> None:
    """Every number is finite or null with its reason; and whatever has a reason is
    null."""
    case = step(dtype=dtype, **FEATURES[name])
    for created in (recipe("qiu2025"), recipe("eager")):
        result = diagnose_call(case, created, plain_projection(case))
        for row in result.heads:
            missing = {
                n
                for n, x in vars(row).items()
                if x is None and n not in ("step", "layer")
            }
            assert missing == set(row.nulls), row.nulls
            assert all(row.nulls.values())
            assert row.model_validate_json(row.model_dump_json()) == row


def test_what_cannot_be_known_is_null() -> None:
    """W_Q without a projection, the row sums of dS with a soft cap or a sink, P V of
    splits."""
    row = diagnose_call(drawn(), recipe("qiu2025")).heads[0]
    assert row.similarity is row.spectral_norm is row.dw_q_error is row.moved is None
    assert "not known" in row.nulls["similarity"]
    for fields, reason in (({"softcap": 5.0}, "soft cap"), ({"sinks": True}, "sink")):
        row = diagnose_call(drawn(**fields), recipe("qiu2025")).heads[0]
        assert row.ds_row_sum is None
        assert reason in row.nulls["ds_row_sum"]
    row = diagnose_call(drawn(), recipe("fa2", block_kv=16, splits=2)).heads[0]
    assert row.pv_bias is None
    assert "split" in row.nulls["pv_bias"]
    assert row.out_bias is not None


def test_a_case_that_cannot_be_diagnosed_is_refused() -> None:
    """Without an upstream gradient, and where the arithmetic would round the inputs."""
    case = drawn(q_len=4, kv_len=4, dtype=torch.float64)
    with pytest.raises(UsageError, match="grad_out"):
        diagnose_call(dataclasses.replace(case, grad_out=None), recipe("fa2"))
    with pytest.raises(Refused, match="float32"):
        diagnose_call(case, recipe("fa2", compute="float32"))


def test_stochastic_rounding_leaves_the_rest_of_a_pair_alone() -> None:
    """P is drawn alike with the product rounded and not, and P V differs by under an ulp
    of it."""
    case = drawn(is_causal=True)
    result = rounded_passes(case, recipe("qiu2025", rounding="stochastic"))
    off = (result.product - result.product_exact).abs()
    assert bool((off <= ulp(result.product_exact, BF16) * 1.01).all())
    assert off.max() > 0


@pytest.mark.gpu
def test_cuda_and_cpu_agree() -> None:
    """Sizes to 2 %: the device sums in another order, and some roundings fall
    elsewhere."""
    case = tying(batch=3, heads=4, kv_heads=2, is_causal=True)
    projection = plain_projection(case)
    result = diagnose_call(case, recipe("qiu2025"), projection)
    again = diagnose_call(to_cuda(case), recipe("qiu2025"), to_cuda(projection))
    names = ("tied", "ones", "powers", "one_signed", "ds_row_sum", "similarity", "dw_q_error",
             "dw_q_norm", "spectral_norm")  # fmt: skip
    for a, b in zip(again.heads, result.heads, strict=True):
        assert a.nulls == b.nulls
        assert_same(numbers(a, *names), numbers(b, *names), rel=2e-2)


def everything(x: Tensor) -> Tensor:
    return torch.ones(x.shape, dtype=torch.bool)


def test_t_is_scipys_over_means_of_blocks() -> None:
    """Sixteen blocks of a sequence; a wrong number of blocks gives another t."""
    x = normal(2, 3, 64) + 0.3
    result = t_by_head(x, everything(x))
    for head in range(3):
        blocks = x[:, head].reshape(2 * BLOCKS, -1).mean(dim=-1)
        assert float(result[head]) == pytest.approx(
            stats.ttest_1samp(blocks, 0.0).statistic
        )
        rows = stats.ttest_1samp(x[:, head].flatten(), 0.0).statistic
        assert float(result[head]) != pytest.approx(rows, rel=1e-3)


def test_a_spread_below_half_a_step_is_not_measured() -> None:
    """Rows that all err alike give no endless t where a grid is known, and none where it
    is not."""
    x = torch.full((1, 1, 64), 0.25, dtype=torch.float64)
    half_step = 0.5 / 4  # of a block's mean, of 4 rows
    expected = 0.25 / (half_step / math.sqrt(BLOCKS))
    assert float(t_by_head(x, everything(x), step=1.0)[0]) == pytest.approx(expected)
    assert math.isnan(t_by_head(x, everything(x))[0])


def test_few_blocks_have_no_t() -> None:
    """Three rows are three blocks, one too few; no row has no mean."""
    x = normal(1, 1, 3)
    assert math.isnan(t_by_head(x, everything(x))[0])
    longer = normal(1, 1, 4)
    assert math.isfinite(t_by_head(longer, everything(longer))[0])
    nothing = {"mean": mean_by_head(x, ~everything(x)), "t": t_by_head(x, ~everything(x))}
    assert numbers_by_head(nothing) == [{"mean": None, "t": None}]


def test_the_largest_eigenvalue_is_numpys() -> None:
    """To fp64 rounding where the steps span the space, or its rank; nearly where they do
    not."""
    for n, rank in ((STEPS, STEPS), (100, 7), (1, 1)):
        x = normal(2, n, rank)
        gram = x @ x.mT
        expected = np.linalg.eigvalsh(gram.numpy())[:, -1]
        assert largest_eigenvalue(gram).numpy() == pytest.approx(expected, rel=1e-10)
    x = normal(2, 300, 600)  # a bulk without a direction that stands out
    expected = np.linalg.eigvalsh((x @ x.mT).numpy())[:, -1]
    result = largest_eigenvalue(x @ x.mT).numpy()
    assert result == pytest.approx(expected, rel=1e-2)
    assert (result <= expected * (1 + 1e-12)).all()
    assert result != pytest.approx(expected * 1.02, rel=1e-2)


@pytest.fixture(scope="module")
def diagnosis() -> Diagnosis:
    case = tying(heads=4, kv_heads=2, is_causal=True)
    return diagnose_call(
        case, recipe("qiu2025"), plain_projection(case), checkpoint="c", step=7
    )


@pytest.fixture(scope="module")
def rows(diagnosis: Diagnosis) -> tuple[CureRow, ...]:
    return cure_rows(diagnosis)


def of(rows: tuple[CureRow, ...], cure: str, head: int = 0) -> CureRow:
    (row,) = (row for row in rows if (row.cure, row.head) == (cure, head))
    return row


def test_dq_errs_as_that_of_the_kernel(
    diagnosis: Diagnosis, rows: tuple[CureRow, ...]
) -> None:
    """|error| / |exact| of dq of `emulated`."""
    case = diagnosis.truth.case
    passed, exact = (find(n).gradients(case, **o).dq.double() for n, o in
                    (("emulated", {"preset": "qiu2025"}), ("reference", {})))  # fmt: skip
    for head in range(4):
        a, b = passed[:, head], exact[:, head]
        assert_same([of(rows, NONE, head).dq_rel], [float((a - b).norm() / b.norm())])


def test_a_contradiction_has_its_reason() -> None:
    """Plain attention has no rounded row sum to take."""
    case = drawn(q_len=12, kv_len=12)
    row = of(cure_rows(diagnose_call(case, recipe("eager"))), "l from rounded P", 1)
    assert row.out_bias is row.delta_mean is None
    assert "divides P by l" in (row.reason or "")
    assert row.options == {"l_from": "rounded"}


def test_where_a_cure_breaks_it_is_counted() -> None:
    """Of large tied scores the stabilised softmax loses two heads' rows, and no
    others."""
    case = dataclasses.replace(drawn(q_len=6, kv_len=6, heads=4, kv_heads=2), scale=1.0)
    q, k = torch.ones_like(case.q) * 8, torch.ones_like(case.k)
    k[:, 1] = 8  # scores 64 and 512
    rows = cure_rows(
        diagnose_call(dataclasses.replace(case, q=q, k=k * 1.0), recipe("qiu2025"))
    )
    counts = [of(rows, "stabilised", head).nonfinite for head in range(4)]
    assert counts == [0, 0, 4 * 6 * 8, 4 * 6 * 8]
    broken = of(rows, "stabilised", 3)
    assert broken.out_bias is broken.dq_rel is broken.reason is None
    assert of(rows, NONE, 3).nonfinite == 0


def test_delta_from_dp_makes_rows_of_ds_sum_to_zero() -> None:
    """Under qiu2025, with l and products in fp32 beside the formula; none alone does."""
    case = drawn(q_len=32, kv_len=32)
    case = dataclasses.replace(case, v=case.v.abs() + 1, grad_out=case.grad_out.abs())  # type: ignore[union-attr]
    created = recipe("qiu2025", sites={"ds": "exact"})
    options = CURES["delta from dP"].options

    def sums(options: Mapping[str, Any]) -> list[float]:
        rows = diagnose_call(case, changed(created, **options)).heads
        return [row.ds_row_sum or 0.0 for row in rows]

    whole = max(sums(options))
    assert whole < 1e-5
    for left_out in options:
        assert min(sums({n: x for n, x in options.items() if n != left_out})) > 20 * whole


def test_a_kernel_that_cannot_or_does_not_has_its_reason(diagnosis: Diagnosis) -> None:
    """One row for each head all the same."""

    def raises(case: AttentionCase) -> Output:
        raise ValueError("no")

    forward_only = dataclasses.replace(find("floor"), name="forward", backward=None)
    for kernel, reason in (
        (Kernel(name="mine", function=raises), "ValueError: no"),
        (forward_only, "no backward pass"),
    ):
        rows = kernel_rows(diagnosis, kernel, {})
        assert [row.head for row in rows] == [0, 1, 2, 3]
        assert {row.reason for row in rows} == {reason}
        assert all(row.out_bias is row.delta_mean is row.dq_rel is None for row in rows)
