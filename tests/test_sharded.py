"""Attention over merged shards: schedules, merging and its rounding, the claim; and
PyTorch's context parallelism, which is the same. That every order is attention is in
test_oracle.py."""

from __future__ import annotations

import itertools
import os
import signal
from typing import Any

import mpmath
import numpy as np
import pytest
import torch
from oracles import U32, U64, assert_within, make_case, sees, to_cuda
from recipes import drawn as drawn_case
from ring import ring
from test_isolation import gone
from torch import Tensor

from numdev.cases import AttentionCase
from numdev.errors import MeasurementError, Refused
from numdev.formats import FORMATS
from numdev.kernels import Output, context_parallel, find
from numdev.kernels.context_parallel import together
from numdev.kernels.emulation.kernel import emulated_step
from numdev.kernels.key_shards import Merge, merge_parts, schedule
from numdev.kernels.reference import gradients as exact_gradients
from numdev.studies.audit.isolation import attempt
from numdev.system import System

SHARDED = find("sharded")
WHOLE_QUERIES = ("sequential", "tree", "simultaneous")
TENSORS = ("out", "dq", "dk", "dv")
SYSTEM = System.probe("cpu")


def drawn(length: int = 256, kv_len: int | None = None, **fields: Any) -> AttentionCase:
    """A case of normal inputs with an upstream gradient."""
    return drawn_case(
        kv_len or length, rows=length, **{"head_dim": 32, "kv_heads": 2, **fields}
    )


def run(case: AttentionCase, **options: Any) -> Output:
    """A training step."""
    return SHARDED.gradients(case, **SHARDED.with_options(options))


def rms(x: Tensor) -> float:
    return float(x.double().square().mean().sqrt())


def errors(case: AttentionCase, result: Any) -> dict[str, float]:
    """The rms of each tensor's error."""
    exact = exact_gradients(case)
    take = result.get if isinstance(result, dict) else lambda t: getattr(result, t)
    return {t: rms(take(t).double() - getattr(exact, t)) for t in TENSORS}


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_zigzag_is_causal_attention(ranks: int) -> None:
    """Balanced over ranks, with two chunks each, output and gradients are the whole
    call's."""
    case = drawn(12, dtype=torch.float64, is_causal=True)
    exact = exact_gradients(case)
    options = {"order": "zigzag", "inner": "emulated", "merge_format": "float64"}
    result = run(case, shards=ranks, **options)
    for name in TENSORS:
        assert torch.allclose(
            getattr(result, name), getattr(exact, name), rtol=0, atol=1e-12
        ), name


@pytest.mark.parametrize(("order", "fields"), [
    ("ring", {"q_len": 7, "kv_len": 11}),
    ("ring", {"q_len": 2, "kv_len": 9, "is_causal": True, "causal_offset": 7}),
    ("ring", {"q_len": 9, "kv_len": 9, "is_causal": True, "window": (2, 0)}),
    ("sequential", {"q_len": 5, "kv_len": 3, "is_causal": True}),
    ("zigzag", {"q_len": 12, "kv_len": 12, "is_causal": True}),
])  # fmt: skip
def test_every_pair_is_met_once(order: str, fields: dict[str, Any]) -> None:
    """The steps of a schedule hold every visible pair of query and key, and none
    twice."""
    case = make_case(**fields)
    met = [
        (i, j)
        for at in schedule(case, 3, order)
        for rows, keys in itertools.product(*at)
        for i, j in itertools.product(*(range(x.start, x.stop) for x in (rows, keys)))
    ]
    seen = {
        (i, j)
        for i in range(case.q_len)
        for j in range(case.kv_len)
        if sees(case, 0, 0, i, j)
    }
    assert len(met) == len(set(met))
    assert seen <= set(met)


def test_a_rank_begins_with_its_own_keys() -> None:
    """In a ring of three, rank r meets r, r - 1 and r - 2, and all ranks work in each
    round."""
    steps = schedule(make_case(q_len=6, kv_len=6), 3, "ring")
    assert [keys[0].start // 2 for _, keys in steps] == [0, 1, 2, 2, 0, 1, 1, 2, 0]
    assert [rows[0].start // 2 for rows, _ in steps] == [0, 1, 2] * 3


def test_rows_that_a_shard_hides_make_no_nan() -> None:
    """With PyTorch's kernel, whose log-sum-exp of nothing is 0: rows hidden in one shard,
    in all but one and everywhere, forward and backward."""
    mask = torch.ones(12, 12, dtype=torch.bool)
    mask[1, :4], mask[2, 4:], mask[3] = False, False, False
    case = drawn(12, mask=mask)
    for order in ("ring", *WHOLE_QUERIES):
        result = run(case, shards=3, order=order)
        assert torch.isneginf(result.lse[:, :, 3]).all()
        assert not result.out[:, :, 3].any()
        assert all(getattr(result, t).isfinite().all() for t in TENSORS)
        # bf16: two roundings of 2^-9 to each O of at most 4, and the merge's.
        exact = exact_gradients(case)
        assert float((result.out.double() - exact.out).abs().max()) < 4 * 4 * 2.0**-9


def _exactly_merged(parts: list[tuple[Tensor, Tensor]]) -> tuple[Any, Any]:
    """The formula in 90 digits, for O [rows, d] and L [rows]."""
    wide = np.vectorize(lambda x: mpmath.mpf(float(x)), otypes=[object])
    exp, log = (np.vectorize(f, otypes=[object]) for f in (mpmath.exp, mpmath.log))
    with mpmath.workdps(90):
        weights = np.stack([exp(wide(L)) for _, L in parts])
        total = weights.sum(axis=0)
        out = sum(w[:, None] * wide(O) for w, (O, _) in zip(weights, parts, strict=True))
        some = np.array([bool(x) for x in total])
        lse = np.full(len(total), mpmath.ninf, dtype=object)
        lse[some] = log(total[some])
        return np.where(
            some[:, None], out / np.where(some, total, 1)[:, None], mpmath.mpf(0)
        ), lse


def parts_of(number: int) -> list[tuple[Tensor, Tensor]]:
    """Partial results of 6 rows, L between -20 and 20, or -inf beside an O of NaN."""
    g = torch.Generator().manual_seed(number)
    O = torch.randn(number, 6, 4, generator=g).bfloat16()
    L = 40 * torch.rand(number, 6, generator=g) - 20
    L[0, 0] = L[-1, 1] = -torch.inf
    L[:, 2] = -torch.inf
    O[torch.isneginf(L)] = torch.nan
    return [(O[s][None, None], L[s][None, None]) for s in range(number)]


@pytest.mark.parametrize("order", ["sequential", "tree", "simultaneous"])
@pytest.mark.parametrize("number", [2, 3, 8])
def test_merging_equals_the_formula(number: int, order: str) -> None:
    """O and L against mpmath: in fp64, and in fp32 with its u; parts without keys add
    nothing."""
    parts = parts_of(number)
    clean = [(torch.nan_to_num(O[0, 0].double()), L[0, 0].double()) for O, L in parts]
    out, lse = _exactly_merged(clean)
    for name, u in (("float64", U64), ("float32", U32)):
        O, L = merge_parts(
            parts, Merge(order=order, format=name, working=FORMATS["bfloat16"])
        )
        # L is at most 23 and each merge rounds it four times; |O| is at most 4.
        e = number * 4 * 23 * u
        assert_within(L[0, 0], lse, e)
        assert_within(O[0, 0], out, 4 * number * (12 * u + 2 * e))


CLAIMED = {
    "plain": drawn(), "causal": drawn(is_causal=True), "more keys": drawn(64, 192, seed=2),
    "grouped, causal": drawn(heads=4, is_causal=True, seed=1),
    "unequal shards": drawn(130, 190, seed=3),
}  # fmt: skip


@pytest.mark.parametrize("order", ["ring", "sequential", "simultaneous"])
@pytest.mark.parametrize("name", sorted(CLAIMED))
def test_the_claim_predicts_the_errors(name: str, order: str) -> None:
    """The size of all four errors to 2 %, and the errors themselves but for a part that
    is 0.45 of them where a shard is no whole number of tiles, 0.15 elsewhere."""
    case = CLAIMED[name]
    for shards, inner in ((2, "sdpa-flash"), (5, "sdpa-flash"), (4, "emulated")):
        result = run(case, shards=shards, order=order, inner=inner)
        claim = SHARDED.claims(case, result, SYSTEM)
        predicted = emulated_step(case, claim)
        real, expected = errors(case, result), errors(case, predicted)
        for t in TENSORS:
            assert real[t] == pytest.approx(expected[t], rel=0.02), (shards, inner, t)
            left = rms(getattr(result, t).double() - predicted[t].double()) / real[t]
            assert left < 0.45, (shards, inner, t)


def test_what_no_emulation_has_claims_nothing() -> None:
    """Narrow running results over several merges, rounded differences and zigzag; a
    single merge in the working format rounds once, as the cast does, and is predicted."""
    case = drawn(64, is_causal=True)

    def claim(**options: Any) -> Any:
        result = SHARDED.attend(case, **SHARDED.with_options(options))
        return SHARDED.claims(case, result, SYSTEM)

    assert claim(shards=4, merge_format="working") is None
    assert claim(shards=2, merge_format="promoted") is None
    assert claim(shards=2, order="zigzag") is None
    assert claim(shards=2, merge_format="working") is not None
    assert claim(shards=4, merge_format="working", order="simultaneous") is not None
    assert claim(shards=1)["preset"] == "fa2"
    step = run(case, shards=2, merge_format="working")
    assert SHARDED.claims(case, step, SYSTEM) is None


@pytest.mark.parametrize("merge_format", ["working", "promoted", "float32"])
@pytest.mark.parametrize("name", ["float32", "float64"])
def test_what_is_not_narrowed_is_claimed(name: str, merge_format: str) -> None:
    """Merges of a float32 case are computed in float32, of a float64 case in float64."""
    case, is_narrowed = drawn(64), (name, merge_format) == ("float64", "float32")
    case = case.rounded_to(FORMATS[name])
    how = Merge(order="ring", format=merge_format, working=FORMATS[name])
    assert how.between == (FORMATS["float32"] if is_narrowed else None)
    step = run(case, shards=4, merge_format=merge_format)
    assert (SHARDED.claims(case, step, SYSTEM) is None) is is_narrowed


@pytest.mark.parametrize(("order", "merge_format", "shards", "more"), [
    ("ring", "bfloat16", 16, 15 / 2 - 1 / 16), ("tree", "bfloat16", 16, 3.0),
    ("ring", "promoted", 2, 1.0), ("simultaneous", "bfloat16", 16, 0.0),
])  # fmt: skip
def test_the_growth_is_counted(
    order: str, merge_format: str, shards: int, more: float
) -> None:
    """The squares that docs/kernels.md counts, over that of the cast: (n - 1) / 2 - 1 / n
    in a ring, log2 n - 1 in a tree, 2 / n promoted; to 5 % of the sum."""
    case = drawn(1024)
    exact = exact_gradients(case).out
    floor = rms(exact.bfloat16().double() - exact)

    def squares(name: str) -> float:
        options = {"shards": shards, "order": order, "merge_format": name}
        result = SHARDED.attend(case, **SHARDED.with_options(options))
        return (rms(result.out.double() - exact) / floor) ** 2

    assert squares(merge_format) == pytest.approx(squares("float32") + more, rel=0.05)


# --- PyTorch's context parallelism: the same numbers, and ranks that fail -------------

# On a CPU its ranks are processes over gloo that call PyTorch's ring themselves; what
# stands before the ring on CUDA is tested on two GPUs.
PARALLEL = find("context-parallel")
two_gpus = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="needs 2 CUDA devices"
)


@pytest.fixture(autouse=True)
def _ring_on_a_cpu(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not request.node.get_closest_marker("gpu"):
        monkeypatch.setattr(context_parallel, "_ring_attention", ring)


def explained(case: Any, **options: Any) -> tuple[Output, Output]:
    """Context parallelism, and the `sharded` that it should be."""
    real = PARALLEL.gradients(case, **PARALLEL.with_options(options))
    merge = "float32" if options.get("convert_to_f32", True) else "promoted"
    order = "zigzag" if case.is_causal else "ring"
    return real, run(case, shards=2, order=order, merge_format=merge)


@pytest.mark.slow
@pytest.mark.parametrize("convert_to_f32", [True, False])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.one_in(4)
def test_it_is_sharded_bit_by_bit(causal: bool, convert_to_f32: bool) -> None:
    """Output and gradients of two ranks are those of `sharded` with two shards, every
    bit."""
    real, same = explained(drawn(64, is_causal=causal), convert_to_f32=convert_to_f32)
    assert all(torch.equal(getattr(real, t), getattr(same, t)) for t in TENSORS)
    assert real.ran == f"context parallelism: {same.ran}"


@pytest.mark.thorough
def test_a_rank_that_dies_is_one_failed_row() -> None:
    """SIGKILL to a rank: the attempt fails and says so, no rank is left, and the next one
    runs."""
    case = drawn(64)
    PARALLEL.attend(case)
    pids = list(together(2, "cpu").ranks.pids())
    os.kill(pids[1], signal.SIGKILL)
    failed = attempt(PARALLEL, case, {})
    assert failed.status == "failed"
    assert "rank 1 of 2: process 1 terminated with signal SIGKILL" in failed.reason
    assert all(map(gone, pids))
    assert isinstance(attempt(PARALLEL, case, {}), Output)


@pytest.mark.slow
def test_ranks_that_hang_are_ended() -> None:
    """Stopped ranks are not waited for beyond the limit, and no rank is left."""
    ranks = together(2, "cpu")
    pids = list(ranks.ranks.pids())
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    with pytest.raises(MeasurementError, match="2 ranks did not answer"):
        ranks.ask({"scale": 1.0}, limit_s=0.5)
    assert all(map(gone, pids))


@pytest.mark.parametrize(("case", "reason"), [
    (drawn(64, softcap=1.0), "no soft cap"), (drawn(64, window=(2, 0)), "no masks"),
    (drawn(64, mask=torch.ones(64, 64, dtype=torch.bool)), "no masks"),
    (drawn(64, is_causal=True, causal_offset=1), "from the top left"),
    (drawn(32, 64, is_causal=True), "as many queries as keys"),
    (drawn(62, is_causal=True), "62 and 62 are not multiples of 4"),
])  # fmt: skip
def test_what_it_refuses(case: Any, reason: str) -> None:
    """Each in words, before a rank is asked."""
    with pytest.raises(Refused, match=reason):
        PARALLEL.attend(case)


@pytest.mark.gpu
@two_gpus
@pytest.mark.parametrize("convert_to_f32", [True, False])
@pytest.mark.parametrize("causal", [True, False])
def test_on_gpus_it_is_sharded(causal: bool, convert_to_f32: bool) -> None:
    """Two GPUs give the output of `sharded` on one, every bit, and its gradients to 1 %
    of their errors' size (flash attention's backward adds up dq in no fixed order)."""
    case = to_cuda(drawn(1024, heads=4, kv_heads=4, head_dim=64, is_causal=causal))
    real, same = explained(case, convert_to_f32=convert_to_f32)
    assert torch.equal(real.out, same.out)
    result, expected = errors(case, real), errors(case, same)
    for t in TENSORS:
        assert result[t] == pytest.approx(expected[t], rel=0.01), t
