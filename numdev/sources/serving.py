"""A serving engine's attention call as cases: packed queries, packed or paged keys and values.

The arguments are those of flash-attention's `flash_attn_varlen_func` and `flash_attn_with_kvcache`,
which vLLM and SGLang call, so a wrapper around either passes on what it was given. docs/inputs.md
has the recipes.
"""

from __future__ import annotations

import itertools
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
    """One case for each sequence of a packed call that has rows, in copies on the CPU: engines
    overwrite caches.

    q is [tokens, heads, head_dim]; sequence i has the rows from `cu_seqlens_q[i]` to
    `cu_seqlens_q[i + 1]`. k and v are packed likewise by `cu_seqlens_k`, or paged ([pages,
    page_size, kv_heads, dim]): then `block_table` [sequences, pages] names the pages of each and
    `seqused_k` [sequences] how many keys count. Causality and `window_size` (left, right; -1 is no
    limit) align at the last key; `softcap` 0 is none. Cases are `MODULE#CALL/seqI`, their phase
    decode for one query before more than one key, else prefill. Raises UsageError for what does not
    fit together.
    """
    rows = _begins(cu_seqlens_q, "cu_seqlens_q", q.shape[0])
    n, paged = len(rows) - 1, block_table is not None
    keys = _lengths(cu_seqlens_k, seqused_k, n)
    begins = None
    if not paged and cu_seqlens_k is not None and k.ndim == 3:
        begins = _begins(cu_seqlens_k, "cu_seqlens_k", k.shape[0])
    shapes = ", ".join(str(list(x.shape)) for x in (q, k, v))
    for wrong, what, hint in (
        (
            q.ndim != 3 or k.ndim != v.ndim or k.ndim != (4 if paged else 3),
            f"q, k, v of shapes {shapes} are no packed call",
            "q is [tokens, heads, dim]; k and v too, or [pages, page_size, kv_heads, dim]",
        ),
        (
            block_table is not None and (block_table.ndim != 2 or len(block_table) < n),
            f"a block_table of shape {list(getattr(block_table, 'shape', ()))}, and {n} sequences",
            "it is [sequences, pages]",
        ),
        (
            begins is not None and len(begins) != len(rows),
            f"{n} sequences of queries, and {len(begins or ()) - 1} of packed keys",
            "cu_seqlens_q and cu_seqlens_k have one length",
        ),
        (not paged and begins is None, "packed k and v need cu_seqlens_k", "or give a block_table"),
    ):
        if wrong:
            raise UsageError(what, hint=hint)
    found = []
    for i, count in enumerate(keys):
        own = q[rows[i] : rows[i + 1]]
        if not len(own):
            continue
        if block_table is not None:
            read = [_gathered(x, block_table[i], count) for x in (k, v)]
        else:
            assert begins is not None
            read = [x[begins[i] : begins[i + 1]][:count] for x in (k, v)]
        if any(len(x) != count for x in read):
            there = " and ".join(str(len(x)) for x in read)
            raise UsageError(f"sequence {i}: {there} keys and values, and it should read {count}")
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
            k=_alone(read[0]),
            v=_alone(read[1]),
            scale=q.shape[-1] ** -0.5 if softmax_scale is None else float(softmax_scale),
            is_causal=causal,
            causal_offset=count - len(own),
            window=_window(window_size, causal),
            softcap=softcap or None,
            sinks=None if sinks is None else sinks.detach().to("cpu", copy=True),
        )
        found.append(case)
    return found


def save_cases(path: str | Path, cases: Sequence[AttentionCase]) -> None:
    """Write cases to one captured-tensor file, a TARGET of `numdev audit`: unrounded, whole or not
    at all. Raises UsageError for a name that does not end in `.safetensors`, for no case, and for
    two of one name; MeasurementError where it cannot be written."""
    path = Path(path)
    names = [case.ref.case for case in cases]
    twice = next((name for name in names if names.count(name) > 1), None)
    if path.suffix != ".safetensors":
        raise UsageError(f"{path}: is no .safetensors file", hint="end its name so")
    if not names or twice:
        what = f"two cases are called {twice!r}" if twice else "there is no case"
        raise UsageError(f"{path}: {what}", hint="count `call` up, so that names differ")
    tensorfile.write(path, cases)


def _begins(places: Tensor, name: str, tokens: int) -> list[int]:
    """Where sequences begin, and the last one ends. Raises UsageError unless they ascend from 0 to
    at most the number of tokens."""
    found = [int(x) for x in places.flatten().tolist()]
    ascends = all(a <= b for a, b in itertools.pairwise(found))
    if places.ndim != 1 or len(found) < 2 or found[0] != 0 or not ascends or found[-1] > tokens:
        raise UsageError(
            f"{name} {found[:6]} does not ascend from 0 to at most {tokens} tokens",
            hint="it has one entry more than there are sequences",
        )
    return found


def _lengths(begins: Tensor | None, used: Tensor | None, sequences: int) -> list[int]:
    """How many keys each sequence has."""
    if used is not None:
        found = [int(x) for x in used.flatten().tolist()]
    elif begins is not None:
        found = [int(x) for x in (begins[1:] - begins[:-1]).tolist()]
    else:
        raise UsageError("nothing says how many keys there are", hint="give seqused_k")
    if len(found) < sequences:
        raise UsageError(f"{sequences} sequences of queries, and {len(found)} of keys")
    return found[:sequences]


def _gathered(cache: Tensor, pages: Tensor, count: int) -> Tensor:
    """The first `count` keys of the pages, [count, kv_heads, dim]."""
    size = cache.shape[1]
    needed = pages[: -(-count // size)].long().to(cache.device)
    if len(needed) * size < count:
        raise UsageError(f"{count} keys do not fit into {len(needed)} pages of {size}")
    if bool(((needed < 0) | (needed >= cache.shape[0])).any()):
        raise UsageError(f"the block table names a page beyond the {cache.shape[0]} there are")
    return cache[needed].flatten(0, 1)[:count]


def _alone(x: Tensor) -> Tensor:
    """[length, heads, dim] as a case has it, [1, heads, length, dim], lying as it did."""
    copy = x.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
    return copy.transpose(0, 1).unsqueeze(0)


def _window(sides: Sequence[int] | None, causal: bool) -> Window | None:
    if sides is None or all(side < 0 for side in sides):
        return None
    if len(sides) != 2:
        raise UsageError(f"window_size {list(sides)} is not (left, right)", hint="-1 is no limit")
    left, right = (None if side < 0 else int(side) for side in sides)
    return (left, 0 if causal else right)
