"""The guarded softmax of `emulated`: in exact arithmetic it is softmax; it meets ties wherever they
are and whatever the scores' size; and what it does to bias. Beside it, what the published softmax
does there: its misprint, its clamp, and where ours becomes NaN.

That `triton-flash` means the same is in `test_triton_flash.py`.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from typing import Any

import pytest
import torch
from oracles import FEATURES, U64, assert_within, attention, error_bounds, make_case
from torch import Tensor

from numdev.cases import AttentionCase, CaseRef
from numdev.diagnose.cures import CURES
from numdev.errors import Refused, UsageError
from numdev.formats import FORMATS, round_to, ulp
from numdev.kernels import find
from numdev.kernels.emulation import backward as emulated_backward
from numdev.kernels.emulation import guarded
from numdev.kernels.emulation.forward import attend
from numdev.kernels.emulation.predict import emulation
from numdev.kernels.emulation.recipe import changed, recipe
from numdev.kernels.emulation.rounding import Rounder
from numdev.kernels.reference import attend as reference
from numdev.kernels.reference import gradients as exact_gradients
from numdev.sources.synthetic import Shapes, draw

KERNEL = find("emulated")
GUARDED: dict[str, Any] = {"softmax": "guarded"}
BF16, FP16 = FORMATS["bfloat16"], FORMATS["float16"]
SHIFTS = (-200, -105, -88, -24, -9, -1, 0, 1, 4, 9, 10, 24, 88, 200)
TILED = ("fa2", "fa2-consistent", "golden2024", "qiu2025")
nan, inf = math.nan, math.inf


# --- helpers -------------------------------------------------------------------------------------


def tied(
    shift: float = 0,
    ties: int = 2,
    n: int = 37,
    dtype: torch.dtype = torch.bfloat16,
    v: Tensor | None = None,
    **changes: Any,
) -> AttentionCase:
    """Every row has whole scores of at most `shift`, and `ties` keys with that, spread evenly from
    the first; V is of one sign. All are numbers of the dtype."""
    made = torch.Generator().manual_seed(ties)
    scores = shift - 1.0 - torch.randint(0, 8, (n,), generator=made)
    scores[torch.linspace(0, n - 1, ties).long()] = float(shift)
    k = scores.view(1, 1, n, 1)
    v = -2.0 - torch.rand(1, 1, n, 8, generator=made) if v is None else v
    q, dO = torch.ones(1, 1, n, 1), torch.randn(1, 1, n, v.shape[-1], generator=made)
    q, k, v, dO = (x.to(dtype) for x in (q, k, v, dO))
    ref = CaseRef(case=f"tied {ties}")
    return AttentionCase(ref=ref, q=q, k=k, v=v, scale=1.0, grad_out=dO, **changes)


def step(case: AttentionCase, **options: Any) -> dict[str, Tensor]:
    found = KERNEL.gradients(case, **options)
    return {name: getattr(found, name) for name in ("out", "lse", "dq", "dk", "dv")}


def worst(found: Tensor, case: AttentionCase) -> float:
    """The largest error of the output in unit roundoffs of its term scale; NaN if any is."""
    exact = reference(case)
    error = (found.double() - exact.out).abs() / exact.term_scale
    u = case.format.unit_roundoff
    return float((error / u).max()) if error.isfinite().all() else nan


def at_site(site: str, case: AttentionCase, **options: Any) -> list[Tensor]:
    """What a forward pass rounds at a site, as it comes out."""
    seen: list[Tensor] = []

    def watched(self: Rounder, name: str, x: Tensor) -> Tensor:
        y = original(self, name, x)
        if name == site:
            seen.append(y.clone())
        return y

    original = Rounder.__call__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Rounder, "__call__", watched)
        KERNEL.attend(case, **options)
    return seen


def published(
    S: Tensor, V: Tensor, *, beta: float, tile: int, printed: bool = False, clamp: float = 0.0
) -> tuple[Tensor, list[Tensor]]:
    """O of scores [rows, keys] and V [keys, d], and every tile's P: the stabilised softmax as Qiu &
    Yao describe it, P V in bf16. `printed`: the running maximum is taken of the unadjusted one, as
    in their algorithm; `clamp`: from below of a tile's row sums, as in their code."""
    m, l = S.new_full(S.shape[:1], -inf), S.new_zeros(S.shape[:1])
    O, seen = S.new_zeros(S.shape[0], V.shape[1]), []
    for start in range(0, S.shape[1], tile):
        here, values = S[:, start : start + tile], V[start : start + tile]
        r = here.amax(dim=1)
        often = (here == r[:, None]).sum(dim=1) > 1
        adjusted = torch.where(often & (r > 0), beta * r, torch.where(often & (r < 0), 0.0, r))
        m_new = torch.maximum(m, r if printed else adjusted)
        P = (here - m_new[:, None]).exp()
        a = (m - m_new).exp()
        l = a * l + P.sum(dim=1).clamp(min=clamp)
        O = a[:, None] * O + round_to(round_to(P, BF16) @ values, BF16)
        m = m_new
        seen.append(P)
    return O / l[:, None], seen


def scores_of(case: AttentionCase) -> tuple[Tensor, Tensor]:
    """S [rows, keys] and V [keys, d] of a case with one head and no mask."""
    return case.q[0, 0].double() @ case.k[0, 0].double().T, case.v[0, 0].double()


# --- the weights ---------------------------------------------------------------------------------


def test_weights_are_odd_and_exact() -> None:
    """64 odd numbers over 256, between 1/2 and 1, which bf16 and fp16 hold and no power of two is
    among."""
    w = guarded.weights(tied(n=4000), torch.float64)
    assert sorted(set((w * 256).tolist())) == list(range(129, 256, 2))
    for fmt in (BF16, FP16):
        assert torch.equal(round_to(w, fmt), w)
    assert (torch.frexp(w).mantissa != 0.5).all()


@pytest.mark.parametrize("step_of", [1, 2, 3, 5, 16, 64, 128])
def test_weights_go_evenly_through_rows(step_of: int) -> None:
    """Any 256 rows, one after the other or every nth, have each of 16 classes of weights 10
    to 22 times, of 16 in the mean."""
    w = guarded.weights(tied(n=60000, v=torch.ones(1, 1, 60000, 1)), torch.float64)
    for first in range(0, 60000 - 256 * step_of, 4001):
        some = w[first : first + 256 * step_of : step_of]
        counts = torch.histc(some, bins=16, min=0.5, max=1.0)
        assert 10 <= counts.min() <= counts.max() <= 22, (first, counts)


def test_weights_belong_to_places() -> None:
    """Rows of a sample have the weights they have in the call, and its outputs. In decoding, where
    the row is always the first, the number of keys decides."""
    case = dataclasses.replace(tied(), is_causal=True)
    rows = torch.tensor([3, 4, 20, 36])
    whole, some = KERNEL.attend(case, **GUARDED), KERNEL.attend(case.select_rows(rows), **GUARDED)
    assert torch.equal(whole.out[:, :, rows], some.out)
    steps = [dataclasses.replace(tied(n=n), grad_out=None) for n in range(30, 50)]
    one = [guarded.weights(dataclasses.replace(x, q=x.q[:, :, :1]), torch.float64) for x in steps]
    assert len({float(w) for w in one}) > 15


# --- in exact arithmetic it is softmax -----------------------------------------------------------


@functools.cache
def oracle(name: str) -> tuple[AttentionCase, Any]:
    case = make_case(**FEATURES[name])
    return case, attention(case)


VARIANTS = [
    {"algorithm": algorithm, "kv_order": order, "loop_order": loop, **tile, **GUARDED}
    for algorithm, (order, loop), tile in itertools.product(
        ("fa2", "fa1"),
        (("ascending", "q"), ("descending", "kv")),
        ({"block_kv": 3, "block_q": 2}, {"block_kv": 3, "splits": 2}, {}),
    )
]


@pytest.mark.parametrize("name", FEATURES)
def test_exact_is_attention(name: str) -> None:
    """With all sites exact, every algorithm, order, tiles and splits give the 90-digit answer to
    within fp64 rounding, with all features; a weight adds a rounding or two."""
    case, exact = oracle(name)
    out, lse = error_bounds(case, exact)
    more = (-(-case.kv_len // 3) + 3) * 8 * U64
    for options in VARIANTS:
        O, L = attend(case, recipe("exact", **options))
        assert_within(O, exact.out, out + more * exact.term_scale.astype(float))
        assert_within(L, exact.lse, lse + more)


@pytest.mark.parametrize("name", ["plain", "grouped", "everything", "wide logits", "sinks"])
@pytest.mark.parametrize("p_from", ["lse", "m_and_l"])
def test_exact_is_the_gradient(name: str, p_from: str) -> None:
    """So are both ways to have P again in backward: within 1000 u of the sums of absolute terms."""
    case = make_case(**FEATURES[name])
    made = torch.Generator().manual_seed(3)
    dO = torch.randn(*case.q.shape[:3], case.v.shape[-1], generator=made)
    case = dataclasses.replace(case, grad_out=dO.to(case.q.dtype))
    exact = exact_gradients(case)
    for options in VARIANTS:
        made_of = recipe("exact", p_from=p_from, **options)
        found = emulated_backward.gradients(case, made_of)[2:]
        for x, tensor in zip(found, ("dq", "dk", "dv"), strict=True):
            terms = getattr(exact, f"{tensor}_terms")
            assert ((x - getattr(exact, tensor)).abs() <= 1000 * U64 * terms).all(), options


# --- ties, wherever they are ---------------------------------------------------------------------


@pytest.mark.parametrize("preset", TILED)
@pytest.mark.parametrize("compute", ["float64", "float32"])
def test_the_size_of_the_scores_is_no_matter(preset: str, compute: str) -> None:
    """From -200 to 200, where scores, their maximum and their differences are exact, output and
    gradients of q are the same bits, and the log-sum-exp follows; ties from 2 to all, a last tile
    that is not full, in bf16 and fp16."""
    for dtype, ties in itertools.product((torch.bfloat16, torch.float16), (2, 5, 37)):
        options = {"preset": preset, "compute": compute, "block_kv": 16, "lse": "exact", **GUARDED}
        first = KERNEL.attend(tied(0, ties, dtype=dtype), **options)
        for shift in SHIFTS:
            found = KERNEL.attend(tied(shift, ties, dtype=dtype), **options)
            assert torch.equal(found.out, first.out), (dtype, ties, shift)
            assert found.lse is not None
            assert first.lse is not None
            lse = found.lse.double() - shift - first.lse.double()
            assert lse.abs().max() <= (2.0**-15 if compute == "float32" else 1e-5)


CHANGES: dict[str, dict[str, Any]] = {
    "none": {},
    "causal": {"is_causal": True},
    "window": {"window": (11, 3)},
    "window across tiles": {"window": (20, None), "is_causal": True, "causal_offset": 5},
    "bool mask": {"mask": torch.arange(37) % 3 != 1},
    "additive mask": {"mask": torch.where(torch.arange(37) % 5 == 2, -inf, 0.0).bfloat16()},
    "lowest mask": {
        "mask": torch.where(torch.arange(37) < 17, torch.finfo(torch.bfloat16).min, 0.0).bfloat16()
    },
    "sink": {"sinks": "shift"},
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("order", ["ascending", "descending"])
def test_right_whatever_is_tied(name: str, order: str) -> None:
    """Within 4 roundings of fp64 (P, O, and l where it is of rounded P, in units of the term scale)
    for ties from 2 to all, shifts from -200 to 200, every tile, and masks, windows and sinks."""
    for shift, ties, tile in itertools.product((-200, -9, 0, 9, 200), (2, 3, 37), (4, 16, 64)):
        changes = dict(CHANGES[name])
        if "sinks" in changes:
            changes["sinks"] = torch.tensor([float(shift)]).bfloat16()
        case = tied(shift, ties, **changes)
        for preset in ("fa2", "fa2-consistent"):
            out = KERNEL.attend(
                case, preset=preset, block_kv=tile, kv_order=order, compute="float32", **GUARDED
            ).out
            assert worst(out, case) <= 4.0, (shift, ties, tile, preset)


def test_the_bound_rejects_a_lost_tie() -> None:
    """Without one of two tied keys the answer is beyond it."""
    case = tied(0, 2, v=-1.0 - (torch.arange(37) > 0).float().view(1, 1, 37, 1))
    seen = dataclasses.replace(case, mask=torch.arange(37) > 0)
    assert worst(KERNEL.attend(seen, **GUARDED).out, case) > 4.0


@pytest.mark.parametrize("order", ["ascending", "descending"])
@pytest.mark.parametrize("sink", [False, True])
def test_no_maximum_is_a_power_of_two(order: str, sink: bool) -> None:
    """Wherever tied keys lie, each has P = w of its row, exactly, in the tile that meets the
    maximum and in all that come after; plain softmax has 1. (With a maximum of each tile's own, the
    largest of every tile has.)"""
    for shift, ties in itertools.product((-30, 0, 30), (2, 3, 37)):
        case = tied(shift, ties, sinks=torch.tensor([float(shift)]).bfloat16() if sink else None)
        w = guarded.weights(case, torch.float64)[:, None]
        for P in at_site("p", case, preset="golden2024", block_kv=8, **GUARDED):
            assert torch.equal(P[0, 0].amax(dim=-1).double(), w[:, 0])
        for preset in ("fa2", "fa2-consistent", "qiu2025"):
            options = {"preset": preset, "block_kv": 8, "kv_order": order}
            P = torch.cat(at_site("p", case, **options, **GUARDED), dim=-1)[0, 0].double()
            assert torch.equal((w == P).sum(dim=1), torch.full((37,), ties)), (preset, shift)
            assert (w >= P).all()
            plain = torch.cat(at_site("p", case, **options), dim=-1)
            assert ((plain == 1.0).sum(dim=-1) == ties).all()


def test_a_later_maximum_is_met_too() -> None:
    """Where maxima rise from tile to tile, the largest P of each tile that raises them is w."""
    case = dataclasses.replace(tied(), k=torch.arange(37.0).view(1, 1, 37, 1).bfloat16())
    w = guarded.weights(case, torch.float64)
    for P in at_site("p", case, block_kv=8, **GUARDED):
        assert torch.equal(P[0, 0].amax(dim=-1).double(), w)


@pytest.mark.parametrize(
    "changes",
    [
        {"is_causal": True, "causal_offset": -20},
        {"window": (3, -4)},
        {"mask": torch.zeros(37, 1, dtype=torch.bool)},
        {"mask": torch.full((37,), torch.finfo(torch.float32).min)},
        {"mask": torch.full((37,), -inf)},
    ],
)
@pytest.mark.parametrize("preset", TILED)
def test_a_row_without_keys(preset: str, changes: dict[str, Any]) -> None:
    """It is 0, its log-sum-exp -inf and its gradient 0, and nothing is NaN."""
    case = tied(**changes)
    empty = reference(case).empty
    found = step(case, preset=preset, block_kv=8, **GUARDED)
    assert empty.any()
    assert (found["lse"][empty] == -inf).all()
    assert not found["out"][empty].any()
    assert not found["dq"][empty].any()
    assert all(x.isfinite().all() for name, x in found.items() if name != "lse")


@pytest.mark.parametrize("bad", [nan, inf, -inf])
@pytest.mark.parametrize("where", ["k", "v"])
def test_what_is_not_finite_stays_what_it_is(bad: float, where: str) -> None:
    """An infinity or a NaN in K or V comes out where plain softmax has it come out."""
    case = tied(3, 5)
    x = getattr(case, where).clone()
    x[0, 0, 20, 0] = bad
    case = dataclasses.replace(case, is_causal=True, **{where: x})
    for preset in TILED:
        plain, found = (step(case, preset=preset, block_kv=8, **o) for o in ({}, GUARDED))
        for name in plain:
            kinds = [[x.isnan(), x == inf, x == -inf] for x in (plain[name], found[name])]
            assert all(map(torch.equal, *kinds)), (preset, name)


def test_small_probabilities_lose_a_binade_at_most() -> None:
    """fp16 loses P below 2^-24 to zero; guarded it does so below 2^-23. What is not lost there is
    still right to the spacing of its subnormals."""
    for exponent in (10, 15, 20, 22):
        k = torch.tensor([0.0, 0.0, -exponent * math.log(2.0)]).view(1, 1, 3, 1).half()
        v = torch.tensor([0.0, 0.0, 1.0]).view(1, 1, 3, 1).half()
        q = torch.ones(1, 1, 3, 1).half()
        case = AttentionCase(ref=CaseRef(case="x"), q=q, k=k, v=v, scale=1.0)
        out = KERNEL.attend(case, out="exact", **GUARDED).out.double()
        share = reference(case).out
        assert ((out - share).abs() <= 2.0**-25 + 2.0**-11 * share).all()


# --- what is published, and what became of it ----------------------------------------------------


def test_as_printed_it_is_the_plain_softmax() -> None:
    """With the running maximum taken of unadjusted ones, the algorithm as it is printed has P = 1
    for every tie, and the very output of online softmax. Guarded none is."""
    for shift, ties in itertools.product((-30, 5, 30), (2, 37)):
        case = tied(shift, ties)
        S, V = scores_of(case)
        printed, seen = published(S, V, beta=2.0, tile=8, printed=True)
        beta_one, _ = published(S, V, beta=1.0, tile=8, printed=True)
        assert torch.equal(printed, beta_one)
        assert sum(int((P == 1.0).sum()) for P in seen) == 37 * ties
        options = {"preset": "exact", "p": "bfloat16", "pv": "bfloat16", "block_kv": 8}
        plain = KERNEL.attend(case, **options).out[0, 0]
        assert torch.allclose(printed, plain, rtol=1e-12, atol=0.0)
        P = torch.cat(at_site("p", case, **options, **GUARDED), dim=-1)
        assert not (P == 1.0).any()


@pytest.mark.parametrize(("beta", "last_right"), [(2.0, 23), (7.0, 3)])
def test_the_clamp_is_wrong_without_a_sign(beta: float, last_right: int) -> None:
    """With a tile's row sums kept above 1e-10, as in the authors' code, two tied keys and V = 1
    give 1 up to r of 23 with beta 2 and 3 with beta 7, as ln(2e10) / (beta - 1) has it, and beyond
    it less and less, finite all along. Guarded it is 1."""
    for shift in range(1, 40):
        case = tied(shift, 2, n=2, v=torch.ones(1, 1, 2, 1))
        S, V = scores_of(case)
        O, _ = published(S, V, beta=beta, tile=8, clamp=1e-10)
        right = shift <= last_right
        assert (shift * (beta - 1) < math.log(2e10)) == right
        assert bool(((O - 1.0).abs() < 0.01).all()) == right, shift
        assert O.isfinite().all()
        assert KERNEL.attend(case, **GUARDED).out.eq(1.0).all()


def test_the_clamp_depends_on_the_shift() -> None:
    """Adding a number to all scores takes its output from right to a third and to nothing: far
    below 0, where the shift is 0, as far above. Guarded, no bit changes."""
    right = {}
    for shift in (-200, -40, -20, 4, 12, 40, 200):
        case = tied(shift, 5)
        O, _ = published(*scores_of(case), beta=2.0, tile=64, clamp=1e-10)
        error = (O - reference(case).out[0, 0]).abs().max()
        right[shift] = bool(error < 0.02 * 3)
    assert right == {-200: False, -40: False, -20: True, 4: True, 12: True, 40: False, 200: False}


def test_where_the_stabilised_softmax_is_nan() -> None:
    """Ours says so where the published one is silently wrong: in fp16 from r = 10 on, in bf16 from
    88 on, and where r is so far below 0 that l is 0 (in fp16 P is lost before, and the output 0).
    Guarded every one is right."""
    for dtype, lost in ((torch.float16, {-200, -105, 10, 24, 88, 200}), (torch.bfloat16, None)):
        lost = {-200, -105, 88, 200} if lost is None else lost
        found = {
            shift: worst(KERNEL.attend(tied(shift, dtype=dtype), softmax="stabilised").out,
                         tied(shift, dtype=dtype))
            for shift in SHIFTS
        }  # fmt: skip
        assert {shift for shift, error in found.items() if math.isnan(error)} == lost
        for shift in SHIFTS:
            case = tied(shift, dtype=dtype)
            assert worst(KERNEL.attend(case, **GUARDED).out, case) <= 4.0


# --- what it is for ------------------------------------------------------------------------------


def sink_errors(ties: int, weight: float | None = None, **options: Any) -> tuple[Tensor, Tensor]:
    """Errors of P V of a tile [rows, d], in ulps, for keys that are tied and have the same V of one
    sign in every row, beside a tail of 0.4 % of their weight: and under what weights."""
    n, d = 1024, 64
    made = torch.Generator().manual_seed(ties)
    scores = -11.0 + torch.randn(n, 64, generator=made)
    scores[:, :ties] = 0.0
    k = torch.eye(64).view(1, 1, 64, 64)
    v = -2.0 - 0.5 * torch.rand(1, 1, 64, d, generator=made)
    q, k, v = (x.bfloat16() for x in (scores.view(1, 1, n, 64), k, v))
    case = AttentionCase(ref=CaseRef(case="sinks"), q=q, k=k, v=v, scale=1.0)
    with pytest.MonkeyPatch.context() as patch:
        if weight is not None:
            constant = lambda case, dtype: torch.full((case.q_len,), weight, dtype=dtype)  # noqa: E731
            patch.setattr(guarded, "weights", constant)
        given = {"preset": "exact", "p": "bfloat16", "block_kv": 64, **options}
        (exact,), (found,) = (at_site("pv", case, **given, pv=x) for x in ("exact", "bfloat16"))
    return ((found - exact) / ulp(exact, BF16))[0, 0], exact


@pytest.mark.parametrize("ties", [2, 3, 4, 8])
def test_neither_rows_nor_features_are_biased(ties: int) -> None:
    """The error of P V with sinks: over all, within 4 standard errors of 0 and below 0.01 ulp; of a
    feature over its rows, where 1024 independent errors leave 0.009, at most 0.025 in rms. As for
    plain softmax a feature's is 0.2 ulp and more."""
    error, _ = sink_errors(ties, **GUARDED)
    of_features = error.mean(dim=0)
    assert error.mean().abs() < min(0.01, 4 * float(of_features.std()) / 8)
    assert of_features.square().mean().sqrt() < 0.025
    assert error.square().mean().sqrt() == pytest.approx(12**-0.5, abs=0.01)
    plain, _ = sink_errors(ties)
    assert plain.mean(dim=0).square().mean().sqrt() > 0.2


@pytest.mark.parametrize("ties", [2, 3, 4, 8])
def test_one_weight_for_all_rows_would_not_do(ties: int) -> None:
    """181/256 in every row takes the common sign away, but a feature's error is the same in all
    rows: 0.15 ulp and more, ten times what the rows' own weights leave."""
    error, _ = sink_errors(ties, 181 / 256, **GUARDED)
    assert error.mean(dim=0).square().mean().sqrt() > 0.15


def signed_error(case: AttentionCase, **options: Any) -> tuple[float, float]:
    """Mean error in ulps of the output over heads and features, and its standard error; rows of
    one head and feature share their tied values, and are one observation."""
    exact = reference(case).out
    error = (KERNEL.attend(case, **options).out.double() - exact) / ulp(exact, BF16)
    means = error.mean(dim=2).flatten()
    return float(means.mean()), float(means.std() / math.sqrt(len(means)))


def one_signed() -> AttentionCase:
    """Two tied keys a row, V of one sign."""
    shapes = Shapes(batch=1, heads=8, kv_heads=4, q_len=192, kv_len=192, head_dim=32, v_dim=32)
    q, k, v = list(draw("one_signed_gradient", shapes, seed=1, options={"strength": 16.0}))[:3]
    q, k, v = (x.bfloat16() for x in (q, k, v))
    return AttentionCase(ref=CaseRef(case="one signed"), q=q, k=k, v=v, scale=32**-0.5)


@pytest.mark.parametrize(
    "options",
    [
        {"preset": "exact", "pv": "bfloat16"},
        {"pv": "working"},
        {"pv": "working", "l_from": "rounded"},
        {"preset": "qiu2025"},
    ],
)
def test_the_bias_of_ties_is_gone(options: dict[str, Any]) -> None:
    """Two tied keys, all of V negative, P V in bf16: plain softmax errs by about -0.2 ulp in the
    mean, guarded by a tenth of that at most, with l from P before or after it is rounded."""
    case = one_signed()
    plain, _ = signed_error(case, **options)
    found, _ = signed_error(case, **options, **GUARDED)
    assert plain < -0.14
    assert abs(found) < 0.1 * abs(plain)


def test_nothing_is_lost_where_nothing_is_to_gain() -> None:
    """With P V summed in fp32, as in `fa2`, the rms of the error is as of plain softmax, to 5 %, on
    ties and off."""
    for case in (one_signed(), dataclasses.replace(one_signed(), q=one_signed().q / 16)):
        exact = reference(case).out
        a, b = (
            float((KERNEL.attend(case, **o).out.double() - exact).norm()) for o in ({}, GUARDED)
        )
        assert b == pytest.approx(a, rel=0.05)


# --- as an option --------------------------------------------------------------------------------


def test_predictions_go_tile_by_tile() -> None:
    """A prediction with it has the very numbers of the tiles."""
    case, claim = one_signed(), {"preset": "fa2", "block_kv": 32, **GUARDED}
    assert torch.equal(emulation(case, claim), KERNEL.attend(case, compute="float32", **claim).out)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"beta": 2.0}, "beta is of the stabilised softmax"),
        ({"tie_tolerance": 0.0}, "of the stabilised softmax"),
        ({"algorithm": "plain"}, "as plain"),
        ({"preset": "eager"}, "as plain"),
    ],
)
def test_senseless_options_are_refused(options: dict[str, Any], words: str) -> None:
    """Before anything runs: what belongs to the other softmax, and the algorithm in which a weight
    cancels before P meets V."""
    with pytest.raises(UsageError, match=words):
        KERNEL.with_options({**GUARDED, **options})


@pytest.mark.parametrize("site", ["p", "exp"])
def test_a_format_that_rounds_the_weights_is_refused(site: str) -> None:
    """fp8 has no 8 bits: the largest weight would be 1 in it."""
    with pytest.raises(Refused, match="needs 8 bits"):
        KERNEL.attend(tied(), **{site: "float8_e5m2"}, **GUARDED)


def test_it_takes_the_place_of_the_stabilised_softmax() -> None:
    """A recipe changed to it keeps neither beta nor tolerance."""
    made = changed(recipe(softmax="stabilised", beta=7.0), **GUARDED)
    assert (made.softmax, made.beta, made.tie_tolerance) == ("guarded", None, None)


def test_it_is_a_cure_of_every_tiled_recipe() -> None:
    """`CURES` has it, also for a recipe that is stabilised already; of `eager` it is refused."""
    for preset in TILED:
        for start in (recipe(preset), recipe(preset, softmax="stabilised")):
            assert CURES["guarded"].of(start).softmax == "guarded"
    with pytest.raises(UsageError, match="as plain"):
        CURES["guarded"].of(recipe("eager"))


def test_what_ran_says_so() -> None:
    """With its name, and nothing of it where it is not in force."""
    assert str(KERNEL.attend(tied(), **GUARDED).ran).endswith(", guarded softmax")
    assert "guarded" not in str(KERNEL.attend(tied()).ran)
