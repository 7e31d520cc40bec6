"""Runs `triton-flash` inside autograd's graph, in Triton's interpreter, and prints what came out.

    TRITON_INTERPRET=1 python tests/training_triton_cases.py

float16: the interpreter computes bfloat16 wrongly.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import torch
from interpreted import prepare

from numdev.cases import AttentionCase, CaseRef
from numdev.kernels import find
from numdev.kernels.training import attended

KERNEL = find("triton-flash")
TILES = {"block_q": 16, "block_kv": 16}


def main() -> None:
    prepare()
    made = torch.Generator().manual_seed(0)
    q, k, v, dO = (torch.randn(1, h, 20, 16, generator=made).half() for h in (2, 1, 1, 2))
    case = AttentionCase(
        ref=CaseRef(case="t"), q=q, k=k, v=v, scale=0.25, is_causal=True, grad_out=dO
    )
    found: dict[str, Any] = {}
    for softmax in ("plain", "stabilised", "guarded"):
        dp = "working" if softmax == "guarded" else "float32"
        options = KERNEL.with_options({**TILES, "softmax": softmax, "dp": dp})
        done = KERNEL.gradients(case, **options)
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        inside = dict(zip("qkv", leaves, strict=True), grad_out=None)
        with torch.autocast("cpu", torch.bfloat16):
            out = attended(KERNEL, dataclasses.replace(case, **inside), options)
        out.backward(dO)
        ours = [out.detach(), *(x.grad for x in leaves)]
        pairs = zip(ours, (done.out, done.dq, done.dk, done.dv), strict=True)
        found[softmax] = [torch.equal(a, b) for a, b in pairs]
        found["differ"] = not torch.equal(ours[0], ours[1])
    print(json.dumps(found))


if __name__ == "__main__":
    main()
