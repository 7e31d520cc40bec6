"""Is a sound kernel suspected on hazardous inputs?

    python benchmarks/suspicion_hazards.py

By the rule of `numdev audit`, and in one of three shapes with the search forced on kernels that are
not far off, over inputs that have hurt somebody: log-sum-exp far below 0, a massive channel, wide,
uniform and one-hot scores, V = 1 and of one sign, one query, nearly constant keys, low-rank keys,
fp16 near overflow.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from numdev.audit.bench import Bench
from numdev.cases import AttentionCase, CaseRef
from numdev.errors import Refused
from numdev.explain.wrong_function import far_off, suspect
from numdev.kernels import find
from numdev.metrics import deviation
from numdev.sources.synthetic import Shapes, draw

Change = Callable[[AttentionCase], dict[str, torch.Tensor]]


def _below(by: float, split: float = 1.0) -> Change:
    def change(c: AttentionCase) -> dict[str, torch.Tensor]:
        q, k = c.q.clone(), c.k.clone()
        q[..., 0], k[..., 0] = split, by / c.scale / split
        return {"q": q, "k": k}

    return change


def _channel(c: AttentionCase) -> dict[str, torch.Tensor]:
    q, k = c.q.clone(), c.k.clone()
    q[..., 3], k[..., 3] = 448.0, 1880.0
    return {"q": q, "k": k}


HAZARDS: dict[str, Change] = {
    "log-sum-exp -120": _below(-120.0),
    "log-sum-exp -490": _below(-490.0),
    "log-sum-exp -5e4": _below(-5e4, 64.0),
    "massive channel": _channel,
    "logits x 16": lambda c: {"q": c.q * 16},
    "logits x 0.25": lambda c: {"q": c.q / 4},
    "uniform scores": lambda c: {"q": c.q * 0},
    "one-hot": lambda c: {"q": c.k.repeat_interleave(c.group, 1)[:, :, : c.q_len] * 8},
    "V = 1": lambda c: {"v": torch.ones_like(c.v)},
    "V of one sign": lambda c: {"v": c.v.abs() + 1},
    "nearly constant keys": lambda c: {"k": c.k[:, :, :1] + 0.01 * c.k},
    "low-rank keys": lambda c: {"k": c.k[..., :1] * c.k[:, :, :1]},
    "fp16 near overflow": lambda c: {"v": c.v.clamp(-3, 3) * 2e4},
    "one query": lambda c: {"q": c.q[:, :, -1:]},
}


def main() -> None:
    units = far = accused = forced = 0
    for dim, causal, kv_heads in ((32, False, 4), (80, True, 4), (128, True, 2)):
        shapes = Shapes(
            batch=2, heads=4, kv_heads=kv_heads, q_len=129, kv_len=129, head_dim=dim, v_dim=dim
        )
        q, k, v = draw("normal", shapes, seed=dim, options={})
        plain = AttentionCase(
            ref=CaseRef(case="hazard"), q=q, k=k, v=v, scale=dim**-0.5, is_causal=causal
        )
        for name, change in HAZARDS.items():
            offset = plain.kv_len - 1 if name == "one query" and causal else 0
            case = dataclasses.replace(plain, **change(plain), causal_offset=offset)
            bench = Bench(case.ref, lambda case=case: case)
            for fmt in ("bfloat16", "float16", "float32"):
                prepared = bench.at(fmt)
                for kernel in ("sdpa-math", "sdpa-flash", "baseline"):
                    try:
                        out = find(kernel).attend(prepared.case).out
                    except Refused:
                        continue
                    units += 1
                    metrics = deviation.measure(out, prepared.yardstick)
                    heads = list(range(case.heads))
                    suspects = [h for h in heads if far_off(metrics[h])]
                    far += bool(suspects)
                    search = suspects or (heads if dim == 80 else [])
                    if not search:
                        continue
                    found = suspect(prepared.case, out, prepared.reference, heads, search)
                    accused += bool(found) and bool(suspects)
                    forced += bool(found) and not suspects
                    for suspicion in list(found.values())[:1]:
                        print(f"  {kernel} {fmt} {name} d {dim}: {suspicion}", flush=True)
    print(f"{units} units: {far} far off, {accused} accused by the rule; {forced} of those not far")
    print("off would be, were the search forced (in one of the three shapes)")


if __name__ == "__main__":
    main()
