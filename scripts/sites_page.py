"""Write docs/sites.md from numdev.kernels.emulation.recipe. `make test` fails when the
page is stale."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from numdev.kernels.emulation.recipe import (
    BACKWARD,
    FORWARD,
    PRESETS,
    SITES,
    STABILISED,
    TILINGS,
    Recipe,
)
from numdev.studies.audit.explanations import designs

PAGE = Path(__file__).parent.parent / "docs" / "sites.md"

HEAD = """\
# Rounding sites and presets

Written by `python scripts/sites_page.py` from `numdev/kernels/emulation/recipe.py`.

The kernel `emulated` computes tiled attention in fp64 and rounds each step, once and correctly, to
the format its **site** has. A **preset** gives every site a value: `working` (the case's format),
`wide` (float32, or the working format where that is wider), `exact` (not rounded), or a format's
name. Every site is an option of the kernel, and so is what
else decides the numbers; what is not given is as the preset says:

```yaml
kernels:
  - {name: emulated, preset: fa2}
  - {name: emulated, preset: fa2, p: e8m3, block_kv: 32}
  - {name: emulated, preset: golden2024, memory: 16384}
  - {name: emulated, preset: fa2, delta_from: dP*P, dp: working}
```

## What a preset stands for
"""

ABOUT = {
    "fa2": "A production kernel: everything in fp32, but P in the working format "
    "and one cast at "
    "the end. Backward: P and dS in the working format for their products, δ from "
    "the cast O, "
    "accumulators in fp32, and each query head's dK and dV cast before a group is "
    "summed.",
    "fa2-consistent": "The same with l from the rounded P, so that the weights sum to 1.",
    "fa4": "FlashAttention-4 on Blackwell: `fa2`, the last tile first, with a "
    "running maximum that "
    "moves only when it has grown by more than log₂ 256, exp2 by a polynomial in a "
    "part of P, and "
    "a group's dK and dV summed in fp32.",
    "eager": "Model code without tiles: S rounded, scaled and rounded again, "
    "softmax in fp32, P "
    "rounded, P V summed in fp32 and cast. Backward is autograd's: dP rounded, "
    "softmax's backward "
    "in fp32 from the P it kept, dS rounded, scaled and rounded again.",
    "golden2024": "Golden et al.: FlashAttention-1 with every step in the working "
    "format. They "
    "measured no gradients; backward is FlashAttention-1's Algorithm 4 under the "
    "same assumption.",
    "qiu2025": "Qiu & Yao's PyTorch code under autocast: products in the working "
    "format, exp and "
    "sums in fp32, and m, l, O kept in the working format between tiles. Backward "
    "the same, under "
    "autocast too: dP, dO ∘ O and the tiles' gradients are in the working format, "
    "and so is what "
    "they are added up in.",
    "exact": "No rounding at any site: attention in fp64, in tiles.",
}

MIDDLE = """\

## What is rounded to what

S scores, P probabilities, m row maximum, l row sum, O output, L log-sum-exp. ∘ is elementwise.
"""

BETWEEN = """\

In backward dO is the gradient with respect to O, and so on; δ is rowsum(dO ∘ O). S is computed
again through the forward's own sites (`q_scaled` to `bias`), since kernels do both times what they
do; `s` is for one that is coarser the second time.
"""

STRUCTURE = """\

Some sites have a value that holds once another option brings them into play: `q_scaled` with
`scale_in: q`, `k_scaled` with `scale_again: k_log2`, `state` with `loop_order: kv`, `ds_scaled`
with `ds_scale: before`, `delta_o` with `delta_from: dO*O`, `dk_partial` and `dv_partial` with
grouped heads and `group_sum: separate`. A format without infinity cannot stand where -inf must be
held: `bias`, `max`, `exponent`, `lse`, `s`, `lse_read`, `p_backward`.

## What else decides the numbers

Tiles are block_q × block_kv, d the head_dim, M the option `memory` in elements ({memory} unless
given). `memory` applies FlashAttention-1's rule in any preset; `block_q` and `block_kv` replace
the rule.
"""

TAIL = """\

- `algorithm`: `fa2` normalises O after the last tile. `fa1` gives each tile a maximum of its own
  and normalises after every tile. `plain` divides P by l before it meets V, with all keys at once.
- `block_kv` and `kv_order` change the numbers: P is rounded relative to the maximum so far, and the
  accumulators once per tile. `block_q` changes none, in round-to-nearest: to a row that sees no key
  of a tile the tile is P = 0, a = 1, which changes nothing that is rounded already. (`fa1`
  multiplies O by l and divides by l again; once O = round(X / l), round(round(O l) / l) is O, for
  all significands of bf16.) Rounding toward zero under a causal mask or a window, O shrinks a
  little at every such tile.
- `max_lag` (`fa4`: 8) lets the running maximum stay until it has grown by more, in log₂:
  FlashAttention-4 spares most of its rescaling so. P is then up to 2^`max_lag`, and its largest is
  not 1 but rounded.
- `exponential: cubic` is FlashAttention-4's exp2 on units that multiply and add: 2^⌊y⌋ times a
  cubic in the fraction, off by up to 8.8e-5; 0 below 2^-127. `fa4` has it in keys 12 to 15 of every
  16, but for the first and the last 32 of a tile of 128, as that kernel's defaults do where no mask
  cuts the tile. A sink joins at the start here, at the end there.
- `scale_in: q_log2` multiplies Q by scale log₂ e, as kernels with exp2 may. `scale_again` is where
  the scale is in backward, if not the same: with `k_log2` K is multiplied by scale log₂ e and
  rounded, and dQ is made of that K, as in Triton's tutorial.
- `loop_order` changes the numbers only through `state`. With `golden2024` it changes none, since O
  is in the working format all along; with `fa2` the outer loop `kv` rounds O after every tile.
- `exponential: fexp_u20` is the fast exp of PyTorch's fused CPU kernel under AVX2 and AVX-512, for all keys. That
  kernel takes 8 or 16 at once and has the exact one for those left over: it is `fa2` with `block_kv: 512, exponential: fexp_u20x8` or `fexp_u20x16`; its plain build has the exact one for all.
- `softmax: stabilised` is Qiu & Yao's (arXiv 2510.04212): where more than one score of a row and a
  tile lies within `tie_tolerance` ({tie_tolerance:g}) of their maximum r, the row is shifted by
  `beta` ({beta:g}) times r if r > 0 and by 0 if not, so that no P is exactly 1. Online softmax goes
  on with that, rounded at `max`, as the tile's maximum. Nothing changes in exact arithmetic, nor
  where no row is tied, or at r = 0. Backward has P of L, or of m and l, as ever. Its limits are
  those of [`triton-flash`](kernels.md), in whatever formats `exp` and `p` have: a row is NaN where
  (beta − 1) r is beyond −log of their smallest normal number (9.7 in float16, 87 in bfloat16 and
  float32, 708 in exact fp64), or where r < 0 and every P is lost. With two tied keys, V of one sign
  and nothing rounded but P V, to bfloat16, the mean error is −0.22 ± 0.01 ulp with P = 1, and
  0.000 ± 0.001 stabilised; where P, l and O are rounded too, up to a tenth of it is left.
- `softmax: guarded` multiplies P with an odd number over 256 of the row's own, between 1/2 and 1,
  so that none is 1 where maxima are equal; O / l and L take it back. It meets all ties, depends on
  no score, and is refused with `algorithm: plain`, where P is normalised before it meets V, and
  with formats for `exp` and `p` of fewer than 8 bits.
  [Derivations](derivations.md#tied-maxima-the-stabilised-and-the-guarded-softmax) have
  both measured.
- `p_from: lse` has P = exp(S − L) in backward. `m_and_l` has exp(S − m) / l, which is what autograd
  kept, and what FlashAttention-1 recomputes (Algorithm 4, line 13).
- `delta_from`: δ = rowsum(dO ∘ O), or rowsum(dP ∘ P), which is what autograd's softmax has, and one
  of the second paper's interventions. `delta_o` rounds O as it was before `out`: `delta_o: exact`
  has δ from the O that was not cast.
- `delta_sign: random` is a sham for experiments: the error of δ, against rowsum(dP ∘ P) of the same
  P and dP, has a sign drawn for each row, from `seed`. It is as large as ever, and has no bias.
- `ds_scale: before` scales dS before it is rounded for its products; `after` scales the products.
- `group_sum`: with grouped heads dK and dV are summed from those of every query head, or the same
  sums run on through the group.
- In backward P is normalised from the start, so tiles change nothing but the running sums `dq`,
  `dk`, `dv` (and `delta` with `dP*P`), in which `block_q` and `block_kv` both tell. Which loop is
  the outer one decides nothing there: what a kernel keeps between tiles has its site, a wide one
  where it keeps it in registers, as FlashAttention-2 does. Where queries are divided (`q_splits`)
  each part has a dK and dV of its own, and where keys are (`splits`) each split a dQ.
- PyTorch's fused CPU kernel adds every tile to the gradient in the working format. It is `fa2` with
  `{{dq: working, dk: working, dv: working, group_sum: running, block_kv: 512, exponential:
  fexp_u20x16}}` (under AVX-512) and `block_q` 256 from length 768 on, 64 from 192 on, else 32. Plain `fa2`, with sums
  in fp32, predicts its dq to 16 %, but dv errs 1.3 to 2.3 times as much as predicted.
- `sdpa-math` computes in fp32 and casts once: `exact` with `out`, `dq_out`, `dk_out` and `dv_out`
  `working`.
- `rounding` (`nearest`, `toward_zero`, `stochastic` with `seed`) holds for every site. In
  `numdev train` what is drawn goes on from step to step, from the run's seed and this one.
- `compute: float32` does the arithmetic in fp32 and rounds at the same sites; float32 sites then
  cost nothing. [How far it may be from fp64](#arithmetic-in-float32) is derived below.

## How public kernels round

Without a claim a kernel is held to `fa2`, and where it errs beyond that to these
(configs/designs.yaml; those marked *tried*) and to PyTorch's own operators and autograd's
gradients. Each has a sound kernel in `benchmarks/planted/designs.py`, written without the emulation, that
`check_attention` passes undeclared.

DESIGNS
## Limits

The sum inside one product or row sum is exact up to its one rounding: kernels accumulate it in at
least fp32. So are approximate exp (but those named) and reciprocal. So an emulation predicts the
size of a 16-bit kernel's error, but not its bias (with ties a relative error of 1e-6 in l moves the
output by 0.1 ulp), and says nothing of a kernel that returns fp32.

## Arithmetic in float32

`compute: float32` rounds at the same sites in fp32, TF32 and autocast off (float32 sites are then
free). How far it may be from fp64, for `fa2`. Let u be the unit roundoff of the working format, w =
2^-24, d the head_dim, n the length, t the number of tiles, and A = |scale| sum |q||k|, the sum of
absolute terms in a score.

- Two scores differ by at most (d + 4) w A: d for the product, 2 for the scale and its product, 2
  for the fp64 mode's own roundings to fp32. The maximum differs by as much, and S - m rounds once
  in each mode, 4 w A. With exp (4 w) and its rounding, P before `p` differs by a relative
  (2 d + 12) w A + 6 w. Every tile rescales once more, by a factor that differs by 4 w A + 8 w.
  In sum e = (2 d + 12 + 4 t) w A + (6 + 8 t) w. The sums in l and P V add (n + 4) w each.
- Rounding is monotone: where e carries a P over a boundary it lands one ulp away, 2 u relative
  (above the subnormals); elsewhere both modes get the same P. The cast at the end is monotone too.

With T the term scale, therefore, always |o32 - o64| <= (2 u + 2 e + (2 n + 8) w) T + ulp(o): every
P on the other side of its boundary, all in one direction. Measured (lengths 256 and 1024, normal,
wide and tied scores, all presets): 0.1 % of the outputs differ in bf16 and up to 2 % in fp16, by a
root mean square of at most 7 % and 18 % of the emulated error, whose own rms agrees to 0.1 %.

Gradients. With u, w, d, n, t and A as above and v_dim = d: L differs by at most the S do, by
(4 d + 12 + 4 t) w A + (n + 10 + 8 t) w with what its sum adds, and by its own rounding, w |L| in
each mode, |L| <= A + log n. So P differs by a relative e = (6 d + 24 + 4 t) w A + (n + 20 + 8 t +
2 log n) w before it is rounded, dP by (d + 2) w D with D = sum |dO||V|, and delta by (d + 2) w E
with E = sum |dO||O|, and by 2 u E more where O fell on two sides of a boundary. A dS then lies 2 u
apart (rounding is monotone), an accumulator adds (n + 4 t) w. In sum, with X the sum over tiles of
scale P (D + E) |K| for dq (|Q| for dk), and of P |dO| for dv,

    |dq32 - dq64| <= (4 u + 3 e + (2 n + 4 d + 8 t + 16) w) X + ulp(dq),   the same for dk,
    |dv32 - dv64| <= (2 u + 2 e + (2 n + 8 t) w) X + ulp(dv),

which is every rounding on its other side, and all in one direction.

Predictions take many tiles at once where no sum is rounded between them. What differs is fp32
rounding, which no site models: by (2 n + 8 t) 2^-24 of the term scale at most, about 1e-7 usually,
and then a P now and then falls on the other side of its boundary. Before the last cast the two lie
apart by a root mean square of at most 0.3 % of the error in bf16 and 2 % in fp16; the cast takes at
most 0.05 % and 0.2 % of the outputs to the neighbouring number. A tile that a row cannot see is not
skipped there. 0 times infinity is not 0, so where anything comes out that is not finite, the tiles
decide, one by one. The kernel `emulated` always goes tile by tile.

In backward a block holds all heads, and as many rows and keys as memory allows, for a recipe of any
algorithm in fp32 whose dq, dk and dv are not rounded from tile to tile (`is_at_once`). What differs
is fp32 rounding in the sums, and in O, l and L: a P or dS differs by about 1e-7, and now and then
falls on the other side of its boundary, within the bound above. Measured on a CPU in bf16: 2e-4 of
the elements differ, by a root mean square of 0.6 % of the error and at most 5 %, whose own rms
agrees to 0.1 %; in ties, where all of a dk may hang on the rounding of one O, by 8 % and to 1 %.
"""


def render() -> str:
    """The page."""
    names = list(PRESETS)
    return "".join(
        [
            HEAD,
            "\n",
            _table(["preset", ""], ([f"`{name}`", ABOUT[name]] for name in names)),
            MIDDLE,
            "\n",
            _sites("forward", FORWARD),
            BETWEEN,
            "\n",
            _sites("backward", BACKWARD),
            STRUCTURE.format(memory=PRESETS["golden2024"].memory),
            "\n",
            _table(
                ["", *(f"`{name}`" for name in names)],
                ([row, *(_shown(PRESETS[n], row) for n in names)] for row in STRUCTURES),
            ),
            TAIL.format(**STABILISED).replace("DESIGNS\n", _designs()),
        ]
    )


STRUCTURES = (
    "algorithm",
    "tiles",
    "kv_order",
    "loop_order",
    "l_from",
    "scale_in",
    "scale_again",
    "exponential",
    "max_lag",
    "softmax",
    "p_from",
    "delta_from",
    "delta_sign",
    "ds_scale",
    "group_sum",
    "rounding",
    "compute",
)


def _designs() -> str:
    rows = (
        [
            d["kernel"] + (", *tried*" if "tried" in d else ""),
            "`"
            + ", ".join(f"{name}: {value}" for name, value in d["claim"].items())
            + "`",
            d["rounds"],
            d["source"],
        ]
        for d in designs()
    )
    return _table(["kernel", "options", "how it rounds", "source"], rows) + "\n"


def _sites(title: str, sites: Sequence[str]) -> str:
    return _table(
        [title, "what is rounded", *(f"`{name}`" for name in PRESETS)],
        (
            [f"`{s}`", SITES[s].rounds, *(preset.sites[s] for preset in PRESETS.values())]
            for s in sites
        ),
    )


def _shown(preset: Recipe, row: str) -> str:
    return TILINGS[preset.tiling][0] if row == "tiles" else str(getattr(preset, row))


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
