"""Write docs/sites.md from numdev.kernels.emulation.recipe. `make test` fails when the page is
stale."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from numdev.kernels.emulation.recipe import (
    ABOUT,
    BACKWARD,
    FORWARD,
    PRESETS,
    SITES,
    STABILISED,
    TILINGS,
    Recipe,
)

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
`scale_in: q`, `state` with `loop_order: kv`, `ds_scaled` with `ds_scale: before`, `delta_o` with
`delta_from: dO*O`, `dk_partial` and `dv_partial` with grouped heads and `group_sum: separate`. A
format without infinity cannot stand where -inf must be held: `bias`, `max`, `exponent`, `lse`, `s`,
`lse_read`, `p_backward`.

## What else decides the numbers

Tiles are block_q × block_kv, d the head_dim, M the option `memory` in elements ({memory} unless
given). `memory` applies FlashAttention-1's rule in any preset; `block_q` and `block_kv` replace
the rule.
"""

TAIL = """\

- `algorithm`: `fa2` normalises O after the last tile. `fa1` gives each tile a maximum of its own
  and normalises after every tile. `plain` divides P by l before it meets V, with all keys at once.
- `block_kv` and `kv_order` change the numbers: P is rounded relative to the maximum so far, and the
  accumulators once per tile. `block_q` changes none, since rows are independent, but with `fa1` and
  `rounding: toward_zero` under a causal mask or a window: there O shrinks a little at every tile
  that a row's block sees and the row does not.
- `loop_order` changes the numbers only through `state`. With `golden2024` it changes none, since O
  is in the working format all along; with `fa2` the outer loop `kv` rounds O after every tile.
- `exponential: fexp_u20` is the fast exp of PyTorch's fused CPU kernel under AVX2 and AVX-512. That
  kernel is `fa2` with `block_kv: 512, exponential: fexp_u20`; its plain build has the exact one.
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
  [Method](method.md#tied-maxima-the-stabilised-and-the-guarded-softmax) has both measured.
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
  the outer one decides nothing there: what a kernel keeps between tiles has its site.
- PyTorch's fused CPU kernel adds every tile to the gradient in the working format. It is `fa2` with
  `{{dq: working, dk: working, dv: working, group_sum: running, block_kv: 512, exponential:
  fexp_u20}}` and `block_q` 256 from length 768 on, 64 from 192 on, else 32. Plain `fa2`, with sums
  in fp32, predicts its dq to 16 %, but dv errs 1.3 to 2.3 times as much as predicted.
- `sdpa-math` computes in fp32 and casts once: `exact` with `out`, `dq_out`, `dk_out` and `dv_out`
  `working`.
- `rounding` (`nearest`, `toward_zero`, `stochastic` with `seed`) holds for every site. In
  `numdev train` what is drawn goes on from step to step, from the run's seed and this one.
- `compute: float32` does the arithmetic in fp32 and rounds at the same sites; float32 sites then
  cost nothing. How far it may be from fp64 is derived in `numdev/kernels/emulation/forward.py` and
  `numdev/kernels/emulation/backward.py`.

## Limits

The sum inside one product or row sum is exact up to its one rounding: kernels accumulate it in at
least fp32. So an emulation predicts the size of a 16-bit kernel's error, but not its bias, and says
nothing of a kernel that returns fp32.
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
            TAIL.format(**STABILISED),
        ]
    )


STRUCTURES = (
    "algorithm",
    "tiles",
    "kv_order",
    "loop_order",
    "l_from",
    "scale_in",
    "exponential",
    "softmax",
    "p_from",
    "delta_from",
    "delta_sign",
    "ds_scale",
    "group_sum",
    "rounding",
    "compute",
)


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
