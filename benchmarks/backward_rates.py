"""Are sound kernels' gradients cleared, ill-conditioned ones among them?

    python benchmarks/backward_rates.py [--seeds 3]

Puts kernels whose backward is sound through `numdev.audit.conformance.backward` on inputs whose gradients
cancel (wide logits, sinks, ties) and counts the units called wrong, and those for which a mistake
was named.
"""

from __future__ import annotations

import argparse
from collections import Counter

from numdev.audit.conformance.backward import verdict_of
from numdev.audit.conformance.cases import Check, case_of
from numdev.errors import Refused
from numdev.kernels import find

REGIMES = (
    ("normal", {}),
    ("normal", {"logits": 4.0}),
    ("normal", {"logits": 16.0}),
    ("sink", {}),
    ("ties", {}),
    ("outliers", {}),
)
SHAPES = (
    {"q_len": 64},
    {"q_len": 129, "changes": {"is_causal": True}},
    {"q_len": 96, "heads": 4, "kv_heads": 2},
)


def main() -> None:
    parser = argparse.ArgumentParser(description="Are sound kernels' gradients cleared?")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    print("| kernel | format | units | called wrong | a mistake named |")
    print("|---|---|---|---|---|")
    for name in ("sdpa-math", "sdpa-flash", "baseline"):
        for fmt in ("bfloat16", "float16", "float32"):
            seen: Counter[str] = Counter()
            for seed in range(given.seeds):
                for regime, options in REGIMES:
                    for number, shape in enumerate(SHAPES):
                        place = f"{regime}{options}{number}{seed}"
                        check = Check(
                            feature="backward", name=place, inputs=regime, options=options, **shape
                        )
                        case, _ = case_of(check, fmt, given.device)
                        try:
                            verdict, words = verdict_of(find(name), {}, case)
                        except (Refused, RuntimeError):
                            continue
                        seen["units"] += 1
                        seen["wrong"] += verdict == "wrong"
                        seen["named"] += "times what it should be" in words or " is 0" in words
                        if verdict == "wrong":
                            print(f"  {name} {fmt} {place}: {words}")
            print(f"| {name} | {fmt} | {seen['units']} | {seen['wrong']} | {seen['named']} |")


if __name__ == "__main__":
    main()
