"""A serving engine's attention call as cases: packed queries, packed or paged keys and values.

The arguments are those of flash-attention's `flash_attn_varlen_func` and `flash_attn_with_kvcache`,
which vLLM and SGLang call (docs/inputs.md).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from numdev.cases import AttentionCase, CaseRef, Window
from numdev.errors import UsageError
from numdev.sources import tensorfile


def varlen_cases(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    module: str = "attention",
    layer: int | None = None,
    call: int = 0,
    source: str = "",
) -> list[AttentionCase]:
    """One case for each sequence of a packed call that has rows, in copies on the CPU.

    q is [tokens, heads, head_dim]; sequence i has the rows from `cu_seqlens_q[i]` to
    `cu_seqlens_q[i + 1]`. k and v are packed likewise by `cu_seqlens_k`, or paged ([pages,
    page_size, kv_heads, dim]): then `block_table` [sequences, pages] names the pages of each and
    `seqused_k` [sequences] how many keys count. Causality and `window_size` (left, right; -1 is no
    limit) align at the last key; `softcap` 0 is none. Cases are `MODULE#CALL/seqI`, their phase
    decode for one query before more than one key, else prefill. Raises UsageError for what does not
    fit together.
    """
    paged = block_table is not None
    rows = _begins(cu_seqlens_q, "cu_seqlens_q", len(q))
    packed = [0]
    if cu_seqlens_k is not None:
        packed = _begins(cu_seqlens_k, "cu_seqlens_k", math.inf if paged else len(k))
    counts = [b - a for a, b in itertools.pairwise(packed)] if seqused_k is None else seqused_k
    counts, n = [int(count) for count in counts], len(rows) - 1
    lists = len(packed) == n + 1
    if block_table is not None:
        lists = block_table.ndim == 2 and len(block_table) >= n
    if q.ndim != 3 or not k.ndim == v.ndim == (4 if paged else 3) or not lists or len(counts) < n:
        given = (q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k, block_table)
        shapes = ", ".join("none" if x is None else str(list(x.shape)) for x in given)
        what = f"q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k, block_table: got {shapes}"
        raise UsageError(what, hint="docs/inputs.md has their shapes")
    window: Window | None = None
    if window_size is not None and any(side >= 0 for side in window_size):
        if len(window_size) != 2:
            raise UsageError(f"window_size: expected (left, right), got {list(window_size)}")
        left, right = (None if side < 0 else int(side) for side in window_size)
        window = (left, 0 if causal else right)
    cases = []
    for i, (start, end) in enumerate(itertools.pairwise(rows)):
        count, own = counts[i], q[start:end]
        if not len(own):
            continue
        if block_table is not None:
            keys = [_gathered(x, block_table[i], count) for x in (k, v)]
        else:
            keys = [x[packed[i] : packed[i + 1]][:count] for x in (k, v)]
        if any(len(x) != count for x in keys):
            raise UsageError(f"sequence {i}: expected {count} keys, got {len(keys[0])}")
        ref = CaseRef(
            case=f"{module}#{call}/seq{i}",
            source=source,
            module=module,
            layer=layer,
            call=call,
            phase="decode" if len(own) == 1 and count > 1 else "prefill",
        )
        case = AttentionCase(
            ref=ref,
            q=_alone(own),
            k=_alone(keys[0]),
            v=_alone(keys[1]),
            scale=q.shape[-1] ** -0.5 if softmax_scale is None else float(softmax_scale),
            is_causal=causal,
            causal_offset=count - len(own),
            window=window,
            softcap=softcap or None,
            sinks=None if sinks is None else sinks.detach().to("cpu", copy=True),
        )
        cases.append(case)
    return cases


def save_cases(path: str | Path, cases: Sequence[AttentionCase]) -> None:
    """Write cases to one captured-tensor file, a TARGET of `numdev audit`: unrounded, whole or not
    at all. Raises UsageError for a name that does not end in `.safetensors`, for no case, and for
    two of one name; MeasurementError where it cannot be written."""
    path, names = Path(path), {case.ref.case for case in cases}
    if path.suffix != ".safetensors":
        raise UsageError(f"{path}: expected a name that ends in .safetensors")
    if not cases or len(names) < len(cases):
        what = f"{path}: expected cases of different names, got {len(cases)} of {len(names)}"
        raise UsageError(what, hint="count `call` up")
    tensorfile.write(path, cases)


def _begins(places: Tensor, name: str, tokens: float) -> list[int]:
    """Where sequences begin, and the last one ends."""
    numbers = [int(x) for x in places.flatten()]
    ascends = numbers == sorted(numbers) and numbers[:1] == [0] and numbers[-1] <= tokens
    if places.ndim != 1 or not ascends:
        raise UsageError(f"{name}: expected 0 and on up to {tokens} at most, got {numbers[:6]}")
    return numbers


def _gathered(cache: Tensor, pages: Tensor, count: int) -> Tensor:
    """The first `count` keys of the pages, [count, kv_heads, dim]; fewer where pages lack."""
    size = cache.shape[1]
    needed = pages[: -(-count // size)].long().to(cache.device)
    if bool(((needed < 0) | (needed >= len(cache))).any()):
        raise UsageError(f"block_table: expected pages below {len(cache)}, got {needed.tolist()}")
    return cache[needed].flatten(0, 1)[:count]


def _alone(x: Tensor) -> Tensor:
    """[length, heads, dim] as a case has it, [1, heads, length, dim], lying as it did."""
    copy = x.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
    return copy.transpose(0, 1).unsqueeze(0)
