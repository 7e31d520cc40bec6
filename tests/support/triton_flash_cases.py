"""`triton-flash` in Triton's interpreter, on the CPU.

    TRITON_INTERPRET=1 python -m pytest tests/support/triton_flash_cases.py

A process of its own, since triton reads that variable when it is imported;
`test_triton.py` starts it. bfloat16 is left to the GPU: the interpreter computes it
wrongly.

Every case is compared with fp64 element by element, in shares of a bound. Let u be the
unit roundoff of the working format, w = 2^-24, T the term scale, t the number of tiles a
row meets, A = |scale| sum |q||k| the sum of absolute terms of a score (the largest one),
n the length. P is rounded once and the output once: 2 u T. What options add, in u T: l
from rounded P 1; S rounded 2 A (in numerator and denominator, e^x - 1 <= 1.01 x here); an
accumulator that is rounded twice a tile 2 t, O stored 1 a tile; l rounded t. fp32
arithmetic adds (2 d + n + 8 t + 20) (1 + A) w, all of it in one direction. Where P is
subnormal in float16 it is off by up to 2^-25, and n of them are added.

In backward P = exp(S - L) is off by what L and S are, e = 2 A + t + 1 as far as options
have it; dS by that, by its rounding and by delta's error, which is that of O; dq and dk
are cast: e + o + 2, with o of the output, of X = |scale| sum P (D + E) |K|, D = sum
|dO||V|, E = sum |dO| T, and 1 more where dP is rounded. dv has e + 2 of sum P |dO|. (dS
subnormal: 2^-25 a term, as P.)"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from fused_bounds import of_group, operands, weights
from fused_cases import LARGE
from oracles import FEATURES, step
from test_training_kernels import in_network

from numdev.cases import AttentionCase, CaseRef
from numdev.formats import FORMATS, format_of, round_to
from numdev.kernels import find
from numdev.kernels.emulation.kernel import emulated_step
from numdev.kernels.reference import gradients
from numdev.kernels.triton_flash.forward import tile_range
from numdev.system import System

KERNEL = find("triton-flash")
CPU = System(device="cpu")
TILES = {"block_q": 16, "block_kv": 16}
HALF, SINGLE = torch.float16, torch.float32
W = 2.0**-24
TENSORS = ("out", "dq", "dk", "dv")


WHOLE = ("causal", "causal, bottom-right", "causal, rows without keys", "window", "causal window",
         "bool mask per head", "additive mask", "additive mask, nothing seen", "grouped", "wide",
         "another layout")  # fmt: skip
"""Of the cases that the fused path is held to, in which the scale decides something."""


def cases(dtype: torch.dtype) -> Iterator[tuple[str, AttentionCase]]:
    """Everything that decides who sees whom, and how tensors lie: in one tile, and in
    several."""
    for name, fields in FEATURES.items():
        if "softcap" not in fields:
            yield name, step(**fields, dtype=dtype)
    for name in WHOLE:
        yield f"large: {name}", LARGE[name].rounded_to(format_of(dtype))


OPTIONS = (
    {}, {"block_q": 32, "block_kv": 32}, {"kv_order": "descending"}, {"loop_order": "kv"},
    {"scores": "working"}, {"p": "float32"}, {"accumulator": "working"}, {"row_sum": "working"},
    {"l_from": "rounded"}, {"delta_from": "dP*P"}, {"delta_o": "float32"}, {"dp": "working"},
    {"softmax": "guarded"}, {"exponential": "exp"},
    {"scores": "working", "accumulator": "working", "row_sum": "working", "loop_order": "kv",
     "kv_order": "descending", "l_from": "rounded", "delta_from": "dP*P", "exponential": "exp"},
    {"softmax": "guarded", "kv_order": "descending", "loop_order": "kv", "l_from": "rounded",
     "dp": "working", "delta_from": "dP*P"},
)  # fmt: skip
"""Each by itself, and together those that may be."""


@dataclasses.dataclass
class Truth:
    """fp64's answer to a case, and what its bounds are made of."""

    case: AttentionCase

    def __post_init__(self) -> None:
        case = self.case
        self.exact = gradients(case)
        q, dO, k, v = operands(case)
        P, _ = weights(case, self.exact, q, k)
        self.A = abs(case.scale) * float((q.abs() @ k.abs().mT).max())
        D = dO.abs() @ v.abs().mT + (dO.abs() * self.exact.term_scale).sum(-1)[..., None]
        dS = abs(case.scale) * P * D
        self.terms = {
            "out": self.exact.term_scale,
            "dq": dS @ k.abs(),
            "dk": of_group(case, dS.mT @ q.abs()),
            "dv": of_group(case, P.mT @ dO.abs()),
        }
        largest = {
            "out": v,
            "dq": abs(case.scale) * k,
            "dk": abs(case.scale) * q,
            "dv": dO,
        }
        self.largest = {name: float(x.abs().max()) for name, x in largest.items()}

    def shares(self, result, options) -> dict[str, float]:
        """The largest error of each tensor as a share of its bound; nan where one is not
        finite."""
        case = self.case
        u = torch.finfo(case.q.dtype).eps / 2
        size = {**TILES, **options}
        t, n = (
            -(-case.kv_len // size["block_kv"]),
            max(case.q_len * case.group, case.kv_len),
        )
        has = lambda name, value: options.get(name) == value  # noqa: E731
        e = has("scores", "working") * 2 * self.A + has("row_sum", "working") * t
        e += has("l_from", "rounded")
        o = 2 + e + has("accumulator", "working") * 2 * t + has("loop_order", "kv") * t
        arithmetic = (2 * case.q.shape[-1] + n + 8 * t + 20) * (1 + self.A) * W
        lost = n * 2.0**-25 * (1 + u) if case.q.dtype == HALF else 0.0
        found_shares = {}
        of_dS = e + o + 2 + has("dp", "working")
        for name, count in (("out", o), ("dq", of_dS), ("dk", of_dS), ("dv", e + 2)):
            bound = (count * u + 3 * arithmetic) * self.terms[name] + lost * self.largest[
                name
            ]
            error = (getattr(result, name).double() - getattr(self.exact, name)).abs()
            share = torch.where(error == 0, 0.0, error / bound)
            found_shares[name] = (
                float(share.max()) if share.isfinite().all() else math.nan
            )
        found_shares["lse"] = self._lse_share(result.lse, e * u + 3 * arithmetic)
        return found_shares

    def _lse_share(self, lse: torch.Tensor, relative: float) -> float:
        """L = m + log l: off by what S is and by the relative error of l, and rounded."""
        exact = self.exact.lse
        error = torch.where(lse == exact, 0.0, (lse.double() - exact).abs())
        return float(
            (error / (relative + 2 * W * exact.abs().clamp(min=1.0, max=1e9))).max()
        )


# --- the right function ---------------------------------------------------------------


@pytest.mark.parametrize("dtype", [HALF, SINGLE])
@pytest.mark.one_in(2)
def test_every_case_is_within_its_bound(dtype: torch.dtype) -> None:
    """Output, log-sum-exp and gradients err by less than roundings can add up to; rows
    without keys are 0, whether position or a mask empties them; and a scale 2 % off is
    beyond the bound of every tensor of the large cases. So is the guarded softmax in
    those, in fp16."""
    emptied = set()
    for name, created in cases(dtype):
        truth = Truth(created)
        is_guarded_too = dtype == HALF and name.startswith("large")
        for softmax in ("plain", "guarded") if is_guarded_too else ("plain",):
            result = KERNEL.gradients(created, **TILES, softmax=softmax)
            assert max(truth.shares(result, {}).values()) <= 1.0, (name, softmax)
            assert not result.out[truth.exact.empty].any()
            assert not result.dq[truth.exact.empty].any()
        if truth.exact.empty.any():
            emptied.add(name)
        if name.startswith("large") and not truth.exact.empty.all():
            off = truth.shares(
                gradients(dataclasses.replace(created, scale=1.02 * created.scale)), {}
            )
            assert min(off.values()) > 1.0, (name, off)
    assert emptied >= {"large: causal, rows without keys", "large: bool mask per head"}


@triton.jit
def write_places(
    places, start, stop, total, first, last,
    BLOCK: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
):  # fmt: skip
    begin, full, ragged, end = tile_range(
        start, stop, total, first, last, BLOCK, LEFT, RIGHT
    )
    tl.store(places, begin)
    tl.store(places + 1, full)
    tl.store(places + 2, ragged)
    tl.store(places + 3, end)


def test_ranges_of_tiles_are_exact() -> None:
    """The tiles visited are those that some line meets, and those taken for full are
    full: nothing is lost, and nothing is computed in vain at either end. Without a limit
    on a side the sweep that checks there is the other one's."""
    created = torch.Generator().manual_seed(8)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=created))

    for _ in range(400):
        start = draw(0, 40)
        stop, total, first = start + draw(1, 9), draw(1, 50), draw(-40, 40)
        last, block = first + draw(-2, 40), 4 << draw(0, 2)
        left, right = draw(0, 2) == 0, draw(0, 2) == 0
        places = torch.zeros(4, dtype=torch.int32)
        passed = (start, stop, total, first, last)
        write_places[(1,)](places, *passed, BLOCK=block, LEFT=left, RIGHT=right)
        begin, full, ragged, end = places.tolist()
        i, j = torch.arange(start, stop)[None, :], torch.arange(total)[:, None]
        met = torch.ones(total, stop - start, dtype=torch.bool)
        met = met & (j >= i + first) if left else met
        met = met & (j <= i + last) if right else met
        assert 0 <= begin <= full <= ragged, passed
        assert begin % block == full % block == ragged % block == 0, passed
        assert left or begin == full, passed
        assert met[full:ragged].all(), passed
        assert ragged == full or ragged <= total, passed
        some = met.any(1).nonzero().flatten().tolist()
        if some:
            assert begin == some[0] // block * block, passed
            assert end == some[-1] + 1, passed
            whole = range(0, total // block * block, block)
            full_tiles = [t for t in whole if met[t : t + block].all()]
            assert list(range(full, ragged, block)) == full_tiles, passed


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.one_in(3)
def test_options_compute_what_they_claim(options: dict[str, Any]) -> None:
    """Every option is within its bound in fp16, with what it may add. Under its claim the
    rms error is as the emulation has it, to 3 %, and element by element less than 0.25 of
    it is left: a P whose last bits differ, as by the processor, may fall on the other
    side of a boundary."""
    shape = {
        "heads": 1,
        "q_len": 96,
        "kv_len": 96,
        "head_dim": 32,
        "scale": 2.5 * 32**-0.5,
    }
    created = step(seed=5, dtype=HALF, is_causal=True, **shape)
    result, truth = KERNEL.gradients(created, **{**TILES, **options}), Truth(created)
    assert max(truth.shares(result, options).values()) <= 1.0
    predicted = emulated_step(created, KERNEL.claims(created, result, CPU))
    for name in TENSORS:
        exact = getattr(truth.exact, name)
        real, expected = (
            x.double() - exact for x in (getattr(result, name), predicted[name])
        )
        assert float(real.norm() / expected.norm()) == pytest.approx(1.0, abs=0.03), name
        left = float((real - expected).norm() / expected.norm())
        assert left < 0.25, name


@pytest.mark.parametrize(
    ("dtype", "beta", "score"),
    [
        (HALF, 2.0, 1.4), (HALF, 7.0, 1.4), (HALF, 2.0, 9.5), (HALF, 2.0, 10.0),
        (SINGLE, 7.0, 14.0), (SINGLE, 7.0, 15.0), (HALF, 2.0, -4.0), (HALF, 2.0, -18.0),
        (SINGLE, 2.0, -110.0),
    ],
)  # fmt: skip
@pytest.mark.one_in(3)
def test_stabilised_softmax_of_ties(
    dtype: torch.dtype, beta: float, score: float
) -> None:
    """Two tied scores with V = 1 are 1 exactly in plain softmax, whose P is 1.
    Stabilised, P is the rounded exp of the shift, and so the output is off by how that
    rounds; beyond the format's range the row is NaN, not a number; so it is far below 0,
    where even l is 0, with a log-sum-exp of -inf. Otherwise the log-sum-exp hears nothing
    of the shift. `emulated` with the same words has the same rows."""
    q, k = torch.zeros(1, 1, 16, 16), torch.zeros(1, 1, 2, 16)
    q[..., 0], k[..., 0] = score, 1.0
    q, k, v = q.to(dtype), k.to(dtype), torch.ones(1, 1, 2, 16).to(dtype)
    created = AttentionCase(ref=CaseRef(case="ties"), q=q, k=k, v=v, scale=1.0)
    score, words = float(q[0, 0, 0, 0]), {"softmax": "stabilised", "beta": beta}
    plain = KERNEL.attend(created, **TILES)
    result = KERNEL.attend(created, **TILES, **words)
    out, lse = float(result.out[0, 0, 0, 0]), float(result.lse[0, 0, 0])
    assert float(plain.out[0, 0, 0, 0]) == 1.0
    assert KERNEL.claims(created, result, CPU) is None
    below, fmt = (beta - 1.0) * score if score > 0 else -score, FORMATS[str(dtype)[6:]]
    P = torch.tensor(math.exp(-below), dtype=SINGLE).double()
    O = float(round_to(round_to(P, fmt) / P, fmt))
    if (score > 0 and math.exp(-below) < fmt.smallest_normal) or math.isnan(O):
        assert math.isnan(out)
        assert math.isnan(lse) if score > 0 else lse == -math.inf
    else:
        assert out == O
        # m is beta times the score and log l takes it back: 4 roundings of numbers that
        # large.
        spread = 4 * W * max(1.0, beta * abs(score))
        assert lse == pytest.approx(score + math.log(2.0), abs=spread)
    emulated = find("emulated").attend(created, **TILES, **words)
    assert repr(float(emulated.out[0, 0, 0, 0])) == repr(out)
    spread = 8 * W * max(1.0, beta * abs(score))
    assert lse == pytest.approx(float(emulated.lse[0, 0, 0]), abs=spread, nan_ok=True)


@pytest.mark.parametrize(
    "words",
    [{}, {"softmax": "stabilised"}, {"softmax": "guarded", "dp": "working"}],
    ids=str,
)
def test_training_gives_the_numbers_of_its_own_step(words: dict[str, str]) -> None:
    """Output and gradients, bit for bit, also under autocast, with grouped heads."""
    created = step(dtype=HALF, q_len=20, kv_len=20, head_dim=16, is_causal=True)
    options = KERNEL.with_options({**TILES, **words})
    done, result = (
        KERNEL.gradients(created, **options),
        in_network(KERNEL, created, options),
    )
    assert all(
        torch.equal(x, getattr(done, n)) for x, n in zip(result, TENSORS, strict=True)
    )
