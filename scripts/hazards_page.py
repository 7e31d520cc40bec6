"""Write docs/hazards.md from the registered regimes and masks. `make test` fails when the page is
stale."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from numdev.sources.draws import Regime
from numdev.sources.synthetic import MASKS, REGIMES

PAGE = Path(__file__).parent.parent / "docs" / "hazards.md"

HEAD = """\
# Hazards: inputs that have hurt somebody

Written by `python scripts/hazards_page.py` from `numdev/sources/regimes.py`,
`numdev/sources/probes.py` and `numdev/sources/synthetic.py`.

Random normals hide nearly every real bug. A **regime** draws q, k, v (and dO) by name; its
parameters are set beside the name, and each may be a list:

```yaml
cases:
  - {name: far, heads: 2, seq_len: [64, 704], head_dim: 64, mask: all_true,
     inputs: {name: far_below, lse: [-120, -490]}}
```

A sweep over all of them, over lengths, head dimensions, masks, layouts and windows that have been
trouble, is bundled:

```
numdev sweep configs/sweep/hazards.yaml
```

dO is N(0, 1) where the regime does not say otherwise. All numbers are drawn in fp32 from the seed
and rounded to the audited format; q, k and v are the same whether gradients are asked for or not.

## Regimes
"""
PROBES = """
## Probes: the answer is known

Of these the exact output is known without a reference (`numdev.sources.synthetic.answer`),
under any bool mask, causality or window. They hold the reference itself to account.
"""
MASKED = """
## Masks

The key `mask` of a case. A mask is drawn apart, so q, k and v are the same with it and without.
True means seen. A fully masked row's value is a convention: such rows are left out of every metric.
"""
LAYOUTS = """
## Layouts

The key `layout` of a case says how q, k and v lie in memory, which decides what backends can run:
`contiguous`; `transposed`, views of [batch, length, heads, dim]; `packed`, slices of one tensor
[batch, length, heads + 2 kv_heads, dim]. Rounding to a format and copying keep the strides; each
tensor then has a storage of its own.
"""


def render() -> str:
    """The page."""
    probes = {name: r for name, r in REGIMES.items() if r.answer is not None}
    others = {name: r for name, r in REGIMES.items() if r.answer is None}
    return "".join(
        [
            HEAD,
            *(_regime(name, others[name]) for name in sorted(others)),
            PROBES,
            *(_regime(name, probes[name]) for name in sorted(probes)),
            MASKED,
            "\n",
            _table(["mask", ""], ([f"`{n}`", _sentence(f.__doc__)] for n, f in MASKS.items())),
            LAYOUTS,
        ]
    )


def _regime(name: str, regime: Regime) -> str:
    given = ", ".join(f"`{key}` {value}" for key, value in regime.parameters.items())
    lines = [
        f"\n### {name}\n\n{regime.summary}\n",
        f"- parameters: {given}" if given else "- no parameters",
        f"- stresses: {regime.stresses}",
        f"- origin: {regime.origin}",
    ]
    return "\n".join(lines) + "\n"


def _sentence(text: str | None) -> str:
    return " ".join((text or "").split())


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
