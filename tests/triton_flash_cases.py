"""Runs `triton-flash` in Triton's interpreter, on the CPU, and prints what came out as JSON.

    TRITON_INTERPRET=1 python tests/triton_flash_cases.py

A process of its own, since triton reads that variable when it is imported. `test_triton_flash.py`
starts it once and asserts. bfloat16 is left to the GPU: the interpreter computes it wrongly.

Every case is compared with fp64 element by element, in shares of a bound. Let u be the unit
roundoff of the working format, w = 2^-24, T the term scale, t the number of tiles a row meets, A =
|scale| sum |q||k| the sum of absolute terms of a score (the largest one), n the length. P is
rounded once and the output once: 2 u T. What options add, in u T: l from rounded P 1; S rounded 2 A
(in numerator and denominator, e^x - 1 <= 1.01 x here); an accumulator that is rounded twice a tile
2 t, O stored 1 a tile; l rounded t. fp32 arithmetic adds (2 d + n + 8 t + 20) (1 + A) w, all of it
in one direction. Where P is subnormal in float16 it is off by up to 2^-25, and n of them are added.

In backward P = exp(S - L) is off by what L and S are, e = 2 A + t + 1 as far as options have it; dS
by that, by its rounding and by delta's error, which is that of O; dq and dk are cast: e + o + 2,
with o of the output, of X = |scale| sum P (D + E) |K|, D = sum |dO||V|, E = sum |dO| T, and 1
more where dP is rounded. dv has e + 2 of sum P |dO|. (dS subnormal: 2^-25 a term, as P.)
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys

import torch
import triton
import triton.language as tl
from interpreted import prepare

from numdev.cases import AttentionCase, CaseRef, additive, visible
from numdev.kernels import find
from numdev.kernels.emulation.predict import emulated_step
from numdev.kernels.emulation.recipe import STABILISED as DEFAULTS
from numdev.kernels.reference import attend as reference
from numdev.kernels.reference import gradients
from numdev.kernels.triton_flash.forward import within
from numdev.sources.synthetic import Shapes, draw
from numdev.system import System

KERNEL = find("triton-flash")
TILES = {"block_q": 16, "block_kv": 16}
HALF, SINGLE = torch.float16, torch.float32
W = 2.0**-24
TENSORS = ("out", "dq", "dk", "dv")


def case(
    dtype=HALF, batch=1, heads=1, kv_heads=1, n=40, m=50, d=24, v_dim=20, seed=0, **changes
) -> AttentionCase:
    made = torch.Generator().manual_seed(seed)
    q, k, v, dO = (
        torch.randn(batch, h, rows, width, generator=made).to(dtype)
        for h, rows, width in (
            (heads, n, d),
            (kv_heads, m, d),
            (kv_heads, m, v_dim),
            (heads, n, v_dim),
        )
    )
    fields = {"scale": 1.5 * d**-0.5, "grad_out": dO, **changes}
    return AttentionCase(ref=CaseRef(case="interpreted"), q=q, k=k, v=v, **fields)


# --- the cases -----------------------------------------------------------------------------------


def bool_mask() -> torch.Tensor:
    mask = torch.rand(40, 50, generator=torch.Generator().manual_seed(1)) < 0.7
    mask[7] = mask[23] = False
    return mask


def additive_mask(dtype: torch.dtype) -> torch.Tensor:
    """[2, 1, 50]: numbers, some keys hidden by the lowest one and some by -inf."""
    mask = torch.randn(2, 1, 50, generator=torch.Generator().manual_seed(2)).to(dtype)
    mask[0, 0, ::7], mask[1, 0, 20:] = torch.finfo(dtype).min, -math.inf
    return mask


def shifted(dtype: torch.dtype) -> AttentionCase:
    """Views whose heads lie behind their rows, as models make them."""
    made = case(dtype, batch=2)
    views = {
        name: getattr(made, name).transpose(1, 2).contiguous().transpose(1, 2)
        for name in ("q", "k", "v", "grad_out")
    }
    return dataclasses.replace(made, **views)


def masked_cases(dtype: torch.dtype):
    """(name, case) of everything that decides who sees whom, and how tensors lie."""
    yield "plain", case(dtype)
    yield "causal", case(dtype, is_causal=True)
    yield "causal, offset 10", case(dtype, is_causal=True, causal_offset=10)
    yield "causal, rows without keys", case(dtype, is_causal=True, causal_offset=-18)
    yield "window", case(dtype, window=(9, 3), causal_offset=4)
    yield "window, open to the left", case(dtype, window=(None, 5))
    yield "causal window, n 70", case(dtype, n=70, m=70, is_causal=True, window=(20, 8))
    yield "bool mask", case(dtype, mask=bool_mask())
    yield "bool mask, causal", case(dtype, mask=bool_mask(), is_causal=True)
    yield "additive mask", case(dtype, heads=2, mask=additive_mask(dtype))
    lowest = torch.full((50,), torch.finfo(dtype).min, dtype=dtype)
    yield "lowest everywhere", case(dtype, mask=lowest)
    yield "grouped", case(dtype, batch=2, heads=4, kv_heads=2, n=20, m=24, is_causal=True)
    sinks = torch.tensor([0.5, 3.0]).to(dtype)
    yield "sinks", case(dtype, heads=2, kv_heads=2, sinks=sinks, is_causal=True)
    yield "one query", case(dtype, batch=2, heads=4, kv_heads=2, n=1, m=37)
    yield "one key", case(dtype, n=20, m=1)
    yield "d 64, v_dim 16", case(dtype, n=33, m=32, d=64, v_dim=16)
    yield "another layout", shifted(dtype)
    yield "negative scale", case(dtype, scale=-0.2)
    yield "no scale", case(dtype, scale=0.0)


OPTIONS = (
    {},
    {"block_q": 32, "block_kv": 32},
    {"kv_order": "descending"},
    {"loop_order": "kv"},
    {"scores": "working"},
    {"p": "float32"},
    {"accumulator": "working"},
    {"row_sum": "working"},
    {"l_from": "rounded"},
    {"delta_from": "dP*P"},
    {"delta_o": "float32"},
    {"dp": "working"},
    {"softmax": "guarded"},
    {"exponential": "exp"},
    {"scores": "working", "accumulator": "working", "row_sum": "working", "loop_order": "kv",
     "kv_order": "descending", "l_from": "rounded", "delta_from": "dP*P", "exponential": "exp"},
    {"softmax": "guarded", "kv_order": "descending", "loop_order": "kv", "l_from": "rounded",
     "dp": "working", "delta_from": "dP*P"},
)  # fmt: skip
"""Each by itself, and together those that may be."""


# --- the bounds ----------------------------------------------------------------------------------


@dataclasses.dataclass
class Truth:
    """fp64's answer to a case, and what its bounds are made of."""

    case: AttentionCase

    def __post_init__(self) -> None:
        case = self.case
        self.exact = gradients(case)
        rows, keys = slice(0, case.q_len), slice(0, case.kv_len)
        q, dO = case.q.double(), case.grad_out.double()
        k, v = (x.double().repeat_interleave(case.group, 1) for x in (case.k, case.v))
        S = case.scale * q @ k.mT
        self.A = abs(case.scale) * float((q.abs() @ k.abs().mT).max())
        added, shown = additive(case, rows, keys), visible(case, rows, keys)
        S = S if added is None else S + added.double()
        S = S if shown is None else S.masked_fill(~shown, -math.inf)
        empty = self.exact.empty
        P = (S - self.exact.lse.masked_fill(empty, 0.0)[..., None]).exp()
        D = dO.abs() @ v.abs().mT + (dO.abs() * self.exact.term_scale).sum(-1)[..., None]
        weights = abs(case.scale) * P * D
        self.terms = {
            "out": self.exact.term_scale,
            "dq": weights @ k.abs(),
            "dk": self._of_group(weights.mT @ q.abs()),
            "dv": self._of_group(P.mT @ dO.abs()),
        }
        largest = {"out": v, "dq": abs(case.scale) * k, "dk": abs(case.scale) * q, "dv": dO}
        self.largest = {name: float(x.abs().max()) for name, x in largest.items()}

    def _of_group(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(1, (self.case.kv_heads, self.case.group)).sum(2)

    def shares(self, found, options) -> dict[str, float]:
        """The largest error of each tensor as a share of its bound; nan where one is not finite."""
        case = self.case
        u = torch.finfo(case.q.dtype).eps / 2
        size = {**TILES, **options}
        t, n = -(-case.kv_len // size["block_kv"]), max(case.q_len * case.group, case.kv_len)
        has = lambda name, value: options.get(name) == value  # noqa: E731
        e = has("scores", "working") * 2 * self.A + has("row_sum", "working") * t
        e += has("l_from", "rounded")
        o = 2 + e + has("accumulator", "working") * 2 * t + has("loop_order", "kv") * t
        arithmetic = (2 * case.q.shape[-1] + n + 8 * t + 20) * (1 + self.A) * W
        lost = n * 2.0**-25 * (1 + u) if case.q.dtype == HALF else 0.0
        found_shares = {}
        of_dS = e + o + 2 + has("dp", "working")
        for name, count in (("out", o), ("dq", of_dS), ("dk", of_dS), ("dv", e + 2)):
            bound = (count * u + 3 * arithmetic) * self.terms[name] + lost * self.largest[name]
            error = (getattr(found, name).double() - getattr(self.exact, name)).abs()
            share = torch.where(error == 0, 0.0, error / bound)
            found_shares[name] = float(share.max()) if share.isfinite().all() else math.nan
        found_shares["lse"] = self._lse_share(found.lse, e * u + 3 * arithmetic)
        return found_shares

    def _lse_share(self, lse: torch.Tensor, relative: float) -> float:
        """L = m + log l: off by what S is and by the relative error of l, and rounded; equal where
        infinite."""
        exact = self.exact.lse
        error = torch.where(lse == exact, 0.0, (lse.double() - exact).abs())
        return float((error / (relative + 2 * W * exact.abs().clamp(min=1.0, max=1e9))).max())


# --- what is printed -----------------------------------------------------------------------------


def accuracy():
    """Shares of the bounds for every case, those of a scale 1 % off, and how empty rows are."""
    for dtype in (HALF, SINGLE):
        for name, made in masked_cases(dtype):
            truth = Truth(made)
            found = KERNEL.gradients(made, **TILES)
            off = gradients(dataclasses.replace(made, scale=1.01 * made.scale))
            empty = truth.exact.empty
            yield {
                "case": f"{name}, {dtype}",
                "shares": truth.shares(found, {}),
                "off": truth.shares(off, {}),
                "empty": int(empty.sum()),
                "in empty rows": float(found.out[empty].abs().sum() + found.dq[empty].abs().sum()),
            }


def positions():
    """Shares of the bounds under windows, offsets, lengths and tiles drawn at random, in fp32."""
    made = torch.Generator().manual_seed(7)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=made))

    for number in range(24):
        sides = [None if draw(0, 3) == 0 else draw(-3, 30) for _ in "lr"]
        fields = {
            "window": None if sides == [None, None] else tuple(sides),
            "is_causal": draw(0, 2) == 0,
            "causal_offset": draw(-20, 40),
        }
        tiles = {"block_q": 16 << draw(0, 2), "block_kv": 16 << draw(0, 2)}
        shape = {"n": draw(1, 70), "m": draw(1, 70)}
        here = case(SINGLE, d=16, v_dim=16, seed=number, **shape, **fields)
        found = KERNEL.gradients(here, **tiles)
        yield {"fields": fields, **tiles, **shape, "shares": Truth(here).shares(found, tiles)}


@triton.jit
def write_places(
    places, start, stop, total, first, last,
    BLOCK: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
):  # fmt: skip
    begin, full, rest, end = within(start, stop, total, first, last, BLOCK, LEFT, RIGHT)
    tl.store(places, begin)
    tl.store(places + 1, full)
    tl.store(places + 2, rest)
    tl.store(places + 3, end)


def ranges():
    """What `within` says of lines, totals and limits drawn at random."""
    made = torch.Generator().manual_seed(8)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=made))

    for _ in range(400):
        start = draw(0, 40)
        first = draw(-40, 40)
        given = [start, start + draw(1, 9), draw(1, 50), first, first + draw(-2, 40)]
        constants = {"BLOCK": 4 << draw(0, 2), "LEFT": draw(0, 2) == 0, "RIGHT": draw(0, 2) == 0}
        places = torch.zeros(4, dtype=torch.int32)
        write_places[(1,)](places, *given, **constants)
        yield {"given": given, **constants, "places": places.tolist()}


def options():
    """For every set of options: shares of the bounds, and the error's size and what is left of it
    under the emulation it claims, and under that of none of these options."""
    system = System(device="cpu")
    wide = {"scale": 2.5 * 32**-0.5, "n": 96, "m": 96, "d": 32, "v_dim": 32}
    for given in OPTIONS:
        made = case(seed=5, is_causal=True, **wide)
        chosen = {**TILES, **given}
        found, truth = KERNEL.gradients(made, **chosen), Truth(made)
        claim = KERNEL.claims(made, found, system)
        yield {
            "options": given,
            "shares": truth.shares(found, given),
            "claimed": against(found, truth, emulated_step(made, claim)),
            "plain": against(found, truth, emulated_step(made, {"preset": "fa2", **TILES})),
        }


def against(found, truth, emulated):
    """By tensor: rms of the error over that of the emulation, and rms of what is left over it."""
    ratios = {}
    for name in TENSORS:
        exact = getattr(truth.exact, name)
        real, expected = (x.double() - exact for x in (getattr(found, name), emulated[name]))
        ratios[name] = [float(x.norm() / expected.norm()) for x in (real, real - expected)]
    return ratios


def two_ties(score: float, dtype: torch.dtype, **changes) -> AttentionCase:
    """Every row has two keys, each with this score, and V = 1."""
    q, k = torch.zeros(1, 1, 16, 16), torch.zeros(1, 1, 2, 16)
    q[..., 0], k[..., 0] = score, 1.0
    q, k, v = q.to(dtype), k.to(dtype), torch.ones(1, 1, 2, 16).to(dtype)
    return AttentionCase(ref=CaseRef(case="ties"), q=q, k=k, v=v, scale=1.0, **changes)


def stabilised():
    """Rows of two tied scores with V = 1: what comes out, plain and stabilised."""
    for dtype, beta, score in (
        (HALF, 2.0, 3.0), (HALF, 2.0, 1.4), (HALF, 2.0, 5.6), (HALF, 7.0, 1.4), (HALF, 2.0, 9.5),
        (HALF, 2.0, 10.0), (SINGLE, 2.0, 10.0), (SINGLE, 7.0, 14.0), (SINGLE, 7.0, 15.0),
        (HALF, 2.0, -4.0), (HALF, 2.0, 0.0), (HALF, 2.0, -18.0), (SINGLE, 2.0, -110.0),
    ):  # fmt: skip
        made = two_ties(score, dtype)
        for exponential in ("exp", "exp2"):
            plain = KERNEL.attend(made, **TILES, exponential=exponential)
            given = {"softmax": "stabilised", "beta": beta, "exponential": exponential}
            found = KERNEL.attend(made, **TILES, **given)
            named = {"softmax": "stabilised", "beta": beta}
            emulated = find("emulated").attend(made, **TILES, **named)
            yield {
                "dtype": str(dtype).removeprefix("torch."),
                "beta": beta,
                "score": float(made.q[0, 0, 0, 0]),
                "plain": float(plain.out[0, 0, 0, 0]),
                "stabilised": float(found.out[0, 0, 0, 0]),
                "lse": float(found.lse[0, 0, 0]),
                "emulated": float(emulated.out[0, 0, 0, 0]),
                "emulated lse": float(emulated.lse[0, 0, 0]),
                "claim": KERNEL.claims(made, found, System(device="cpu")),
            }


def unshifted():
    """Where no two scores are near, and where no key is seen, the stabilised softmax is the plain
    one, bit by bit; with a tolerance that ties everything it is another one, and as right."""
    made = case(mask=bool_mask(), d=16, v_dim=16, heads=1, kv_heads=1)
    truth, plain = Truth(made), KERNEL.gradients(made, **TILES)
    for tolerance in (0.0, 100.0):
        given = {"softmax": "stabilised", "tie_tolerance": tolerance}
        found = KERNEL.gradients(made, **TILES, **given)
        yield {
            "tolerance": tolerance,
            "equal": all(torch.equal(getattr(found, x), getattr(plain, x)) for x in TENSORS),
            "shares": truth.shares(found, {}),
        }


def guarded():
    """The guarded softmax: shares of the bounds for every case, what remains under its claim, and
    how its plain counterpart rounds."""
    for name, made in masked_cases(HALF):
        truth = Truth(made)
        found = KERNEL.gradients(made, **TILES, softmax="guarded")
        empty = truth.exact.empty
        yield {
            "case": name,
            "shares": truth.shares(found, {}),
            "in empty rows": float(found.out[empty].abs().sum() + found.dq[empty].abs().sum()),
        }


def shifted_ties(shift: float, dtype: torch.dtype, sink: bool) -> AttentionCase:
    """Whole scores from shift - 9 to shift, of which every seventh key has the largest: ties within
    and across tiles of 16, and with the sink; the last tile is not full."""
    made = torch.Generator().manual_seed(4)
    scores = shift - torch.randint(1, 10, (53,), generator=made)
    scores[::7] = shift
    q, k = torch.zeros(1, 1, 40, 16), torch.zeros(1, 1, 53, 16)
    q[..., 0], k[..., 0] = 1.0, scores
    v = -2.0 - torch.rand(1, 1, 53, 16, generator=made)
    sinks = torch.tensor([shift]) if sink else None
    q, k, v = (x.to(dtype) for x in (q, k, v))
    ref = CaseRef(case="shifted ties")
    changes = {"sinks": None if sinks is None else sinks.to(dtype)}
    return AttentionCase(ref=ref, q=q, k=k, v=v, scale=1.0, is_causal=True, **changes)


def shifts():
    """Outputs of the same ties under shifts of all scores, and those of `emulated`."""
    for dtype in (HALF, SINGLE):
        for sink in (False, True):
            words = {**TILES, "softmax": "guarded", "exponential": "exp"}
            first = KERNEL.attend(shifted_ties(0.0, dtype, sink), **words).out
            for shift in (-200.0, -24.0, -1.0, 1.0, 4.0, 24.0, 200.0):
                made = shifted_ties(shift, dtype, sink)
                found, exact = KERNEL.attend(made, **words), reference(made)
                claim = KERNEL.claims(made, found, System(device="cpu"))
                emulated = find("emulated").attend(made, **claim)
                yield {
                    "shift": shift,
                    "equal": torch.equal(found.out, first),
                    "error": float((found.out.double() - exact.out).abs().max()),
                    "lse": float((found.lse.double() - exact.lse).abs().max()),
                    "emulated": float((found.out.double() - emulated.out.double()).abs().max()),
                    "u": torch.finfo(dtype).eps / 2,
                }


STABILISED = (
    {},
    {"beta": 1.5, "tie_tolerance": 0.5, "delta_from": "dP*P"},
    {"kv_order": "descending", "l_from": "rounded", "scores": "working", "tie_tolerance": 0.0},
    {"loop_order": "kv", "accumulator": "working", "row_sum": "working"},
)


def tied(dtype=HALF):
    """On ties, under every set of options of the stabilised softmax: the error's size and what is
    left of it, under the emulation of the same words and under that of the plain softmax."""
    shapes = Shapes(batch=1, heads=2, kv_heads=1, q_len=96, kv_len=96, head_dim=32, v_dim=32)
    system = System(device="cpu")
    for given in STABILISED:
        for regime, strength in (("ties", 5.0), ("one_signed_gradient", 4.0)):
            drawn = draw(regime, shapes, seed=6, options={"strength": strength})
            q, k, v = (x.to(dtype) for x in list(drawn)[:3])
            made = case(dtype, heads=2, kv_heads=1, n=96, m=96, d=32, v_dim=32, seed=7)
            made = dataclasses.replace(made, q=q, k=k, v=v, scale=32**-0.5, is_causal=True)
            if regime == "one_signed_gradient":
                made = dataclasses.replace(made, mask=torch.full((96,), -9.0, dtype=dtype))
            chosen = {**TILES, **given}
            beside = {name: chosen.pop(name) for name in DEFAULTS if name in given}
            plain = KERNEL.claims(made, KERNEL.attend(made, **chosen), system)
            named = {"softmax": "stabilised", **beside}
            found, truth = KERNEL.gradients(made, **chosen, **named), Truth(made)
            yield {
                "options": given,
                "regime": regime,
                "same words": against(found, truth, emulated_step(made, {**plain, **named})),
                "plain": against(found, truth, emulated_step(made, plain)),
            }


def main() -> None:
    prepare()
    torch.set_num_threads(1)
    sections = (
        accuracy, positions, ranges, options, guarded, shifts, stabilised, unshifted, tied,
    )  # fmt: skip
    parts = {f.__name__: list(f()) for f in sections}
    json.dump(parts, sys.stdout)


if __name__ == "__main__":
    main()
