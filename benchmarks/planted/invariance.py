"""Kernels that change along one axis each, and sound ones. `rule` is the axis whose finding
a wrong one has; one that only cuts its keys otherwise has none."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from numdev.cases import AttentionCase, explicit_mask
from numdev.kernels import Output, find, kernel
from planted.record import plant, planted

CUTS: dict[str, dict[str, Any]] = {
    "split": {"splits": 4}, "tile": {"block_kv": 32}, "order": {"kv_order": "descending"},
    "both": {"block_kv": 32, "splits": 2}, "whole": {"block_kv": 1024},
}  # fmt: skip
# When a kernel changes how it cuts the keys, by the axis along which that is.
WHEN: dict[str, Callable[[AttentionCase], bool]] = {
    "batch": lambda c: c.q.shape[0] in (1, 8),
    "heads": lambda c: c.kv_heads == 1,
    "rows": lambda c: c.q_len == 1 and c.is_causal,
    "longer": lambda c: c.q_len == c.kv_len and c.q_len > 64 and c.mask is None,
    "chunks": lambda c: 16 < c.q_len < c.kv_len and c.is_causal,
    "decode": lambda c: c.q_len == 1 and not c.is_causal,
    "mask": lambda c: c.mask is not None and c.mask.ndim == 2 and c.q_len == 64,
    "strides": lambda c: c.q.stride(-1) != 1,
    "paged": lambda c: c.k.stride(1) < c.k.stride(2) and c.q.stride(1) > c.q.stride(2),
    "threads": lambda c: torch.get_num_threads() > 1,
}


def emulated(case: AttentionCase, **options: Any) -> torch.Tensor:
    """FlashAttention-2, by default with 16 keys a tile: rows and sequences as if
    alone."""
    return find("emulated").attend(case, **{"block_kv": 16, **options}).out


def _switching(axis: str, cut: str) -> Callable[[AttentionCase], torch.Tensor]:
    def switching(case: AttentionCase) -> torch.Tensor:
        return emulated(case, **(CUTS[cut] if WHEN[axis](case) else {}))

    return switching


SWITCHES = {
    "batch": "split tile order both whole", "heads": "split tile order",
    "rows": "split tile order both", "longer": "tile order whole",
    "chunks": "tile order both whole", "decode": "split tile order both whole",
    "mask": "split tile order", "strides": "split order both", "paged": "split order tile",
    "threads": "split tile order",
}  # fmt: skip
for _axis, _cuts in SWITCHES.items():
    for _cut in _cuts.split():
        plant(f"{_axis}-{_cut}", "invariance", f"Has {CUTS[_cut]} along `{_axis}`.",
              _switching(_axis, _cut))  # fmt: skip


@planted("invariance", "FlashAttention-2, 16 keys a tile.")
def in_tiles_of_16(case: AttentionCase) -> torch.Tensor:
    return emulated(case)


@planted(
    "invariance", "Sound; the log-sum-exp comes with the output, but not in decoding."
)
def lse_of_several_rows(case: AttentionCase) -> Output:
    output = find("emulated").attend(case, block_kv=16)
    return output if case.q_len > 1 else dataclasses.replace(output, lse=None)


@planted("invariance", "Another answer at every second call.", rule="repeat")
def noisy(case: AttentionCase, *, calls: Any = None) -> torch.Tensor:
    counted.append(1)
    return emulated(case) * (1 + 2.0**-7 * (len(counted) % 2))


counted: list[int] = []


@planted(
    "invariance",
    "A maximum over all sequences: where another's scores are far higher, exp underflows.",
    rule="neighbours",
)
def shared_maximum(case: AttentionCase) -> torch.Tensor:
    alone = torch.cat([emulated(_sequence(case, i)) for i in range(case.q.shape[0])])
    largest = case.q.float().abs().amax()
    of_sequence = case.q.float().abs().amax(dim=(1, 2, 3), keepdim=True)
    return torch.where(largest > 3 * of_sequence, alone * 0.9, alone)


@planted(
    "invariance",
    "One maximum for a whole call, before its mask: where other rows, or hidden keys, have far higher scores, exp underflows.",
    rule="neighbours",
)
def maximum_of_all(case: AttentionCase) -> torch.Tensor:
    q, k, v = (
        case.q.float(),
        *(x.float().repeat_interleave(case.group, 1) for x in (case.k, case.v)),
    )
    scores = q @ k.mT * case.scale
    largest, shown = scores.amax(), explicit_mask(case)
    if shown is not None and shown.dtype == torch.bool:
        scores = scores.masked_fill(~shown, -torch.inf)
    elif shown is not None:
        scores = scores + shown
    P = (scores - largest).exp()
    return (P.to(case.q.dtype).float() @ v / P.sum(-1, keepdim=True)).to(case.q.dtype)


@planted(
    "invariance",
    "Tiles of 16 keys in the working format, whose maximum is part of autograd's graph: what rounding leaves of a row's sum of dS goes to the key that holds it.",
)
def attached_maximum(case: AttentionCase) -> torch.Tensor:
    k, v = (x.repeat_interleave(case.group, 1) for x in (case.k, case.v))
    shown = explicit_mask(case)
    largest = torch.full((*case.q.shape[:3], 1), -1e30, dtype=case.q.dtype)
    total, out = torch.zeros_like(largest), torch.zeros_like(case.q)
    for at in range(0, case.kv_len, 16):
        scores = case.q @ k[:, :, at : at + 16].mT * case.scale
        if shown is not None:
            scores = scores.masked_fill(~shown[..., at : at + 16], -torch.inf)
        before, largest = (
            largest,
            torch.maximum(largest, scores.max(-1, keepdim=True).values),
        )
        P, factor = (scores - largest).exp(), (before - largest).exp()
        total = total * factor + P.sum(-1, keepdim=True)
        out = out * factor + P @ v[:, :, at : at + 16]
    return out / total


def _sequence(case: AttentionCase, i: int) -> AttentionCase:
    mask = case.mask
    if mask is not None and mask.ndim == 4 and mask.shape[0] > 1:
        mask = mask[i : i + 1]
    q, k, v = (x[i : i + 1] for x in (case.q, case.k, case.v))
    return dataclasses.replace(case, q=q, k=k, v=v, mask=mask)


@planted(
    "invariance",
    "The key behind the last one too, with a weight of a thousandth, where there is memory.",
    rule="beyond",
)
def reads_beyond(case: AttentionCase) -> torch.Tensor:
    v, (b, h, n, d) = case.v, case.v.shape
    end = v.storage_offset() + sum(
        (s - 1) * t for s, t in zip(v.shape, v.stride(), strict=True)
    )
    if end + v.stride(2) >= v.untyped_storage().size() // v.element_size():
        return emulated(case)
    more = v.as_strided((b, h, n + 1, d), v.stride(), v.storage_offset())[:, :, n:]
    return emulated(case) + (more * 1e-3).repeat_interleave(case.group, 1)


@planted("invariance", "The key before the first.", rule="beyond")
def reads_before(case: AttentionCase) -> torch.Tensor:
    k, (b, h, _, d) = case.k, case.k.shape
    if k.storage_offset() < k.stride(2):
        return emulated(case)
    more = k.as_strided((b, h, 1, d), k.stride(), k.storage_offset() - k.stride(2))
    return emulated(case) + (more * 1e-3).repeat_interleave(case.group, 1)


@planted("invariance", "A thousandth of every value, seen or not.", rule="hidden")
def reads_hidden(case: AttentionCase) -> torch.Tensor:
    mean = case.v.float().mean(2, keepdim=True).repeat_interleave(case.group, 1) * 1e-3
    return emulated(case) + (mean.to(case.q.dtype) if case.mask is not None else 0)


@planted("invariance", "Leaves the last row as it is in memory.", rule="unwritten")
def last_row_unwritten(case: AttentionCase) -> torch.Tensor:
    out = torch.empty_like(case.q)
    out[:, :, :-1] = emulated(case)[:, :, :-1]
    return out


@planted("invariance", "Leaves the last head as it is in memory.", rule="unwritten")
def last_head_unwritten(case: AttentionCase) -> torch.Tensor:
    out = case.q.new_empty(case.q.shape)
    out[:, :-1] = emulated(case)[:, :-1]
    return out


@planted("invariance", "Leaves the first sequence as it is in memory.", rule="unwritten")
def first_sequence_unwritten(case: AttentionCase) -> torch.Tensor:
    out = torch.empty(case.q.shape, dtype=case.q.dtype)
    out[1:] = emulated(case)[1:]
    return out


@planted("invariance", "P in an 8-bit format where there is one query.", rule="decode")
def cast_in_decode(case: AttentionCase) -> torch.Tensor:
    return emulated(case, **({"p": "float8_e4m3fn"} if WHEN["decode"](case) else {}))


@planted("invariance", "P in an 8-bit format in a chunk of a prefill.", rule="chunks")
def cast_in_chunks(case: AttentionCase) -> torch.Tensor:
    return emulated(case, **({"p": "float8_e4m3fn"} if WHEN["chunks"](case) else {}))


@planted(
    "invariance", "The last key is left out where there is one query.", rule="decode"
)
def lacks_a_key_in_decode(case: AttentionCase) -> torch.Tensor:
    if WHEN["decode"](case):
        case = dataclasses.replace(case, k=case.k[:, :, :-1], v=case.v[:, :, :-1])
    return emulated(case)


memory: dict[Any, torch.Tensor] = {}


@planted(
    "invariance",
    "Half as much again where there is a mask; every output in the same memory.",
    rule="mask",
)
def same_memory(case: AttentionCase) -> torch.Tensor:
    out = emulated(case) * (1.5 if case.mask is not None and case.mask.ndim == 2 else 1.0)
    return memory.setdefault(out.shape, torch.empty_like(out)).copy_(out)


@planted(
    "invariance",
    "A thousandth of the first values of all sequences together.",
    rule="neighbours",
)
def leak(case: AttentionCase) -> torch.Tensor:
    return emulated(case) + 1e-3 * case.v[:, :, 0].float().mean().to(case.q.dtype)


@planted(
    "invariance", "Half of one row of one head is missing in a batch of 8.", rule="batch"
)
def one_row(case: AttentionCase) -> torch.Tensor:
    out = emulated(case)
    if case.q.shape[0] == 8:
        out[1, 1, 5] *= 0.5
    return out


@planted("invariance", "0.5 is added to the log-sum-exp in a batch of 8.", rule="batch")
def wrong_lse(case: AttentionCase) -> Any:
    done = find("emulated").attend(case, block_kv=16)
    return done.out, done.lse + (0.5 if case.q.shape[0] == 8 else 0.0)


@planted("invariance", "Half as much again in one of ten calls.", rule="repeat")
def rarely(case: AttentionCase) -> torch.Tensor:
    counted.append(1)
    return emulated(case) * (1.5 if len(counted) % 10 == 3 else 1.0)


@planted(
    "invariance",
    "Other tiles at every second call, and minus three times as much in a batch of 8.",
)
def noise_and_batch(case: AttentionCase) -> torch.Tensor:
    counted.append(1)
    out = emulated(case, block_kv=16 << len(counted) % 2)
    return out * (-3 if case.q.shape[0] == 8 else 1)


@planted(
    "invariance", "Other tiles at every second call, where another sequence holds NaN."
)
def noise_beside_nan(case: AttentionCase) -> torch.Tensor:
    counted.append(1)
    return emulated(case, block_kv=16 << int(case.k.isnan().any()) * (len(counted) % 2))


@planted("invariance", "Sound, in a format that Python's own pickle cannot read.")
def eight_bits(case: AttentionCase) -> torch.Tensor:
    return emulated(case).to(torch.float8_e4m3fn)


@planted("invariance", "PyTorch's, without a parameter for a mask.")
def takes_no_mask(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool
) -> torch.Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal)


@planted(
    "invariance",
    "A mask that is added counts double; a hidden key is hidden either way.",
    rule="mask",
)
def other_mask(case: AttentionCase) -> torch.Tensor:
    return emulated(case) * (
        1.05 if case.mask is not None and case.mask.ndim == 2 else 1.0
    )


@planted(
    "invariance",
    "P in an 8-bit format, as it says; a prefill and a decode step walk their keys differently.",
)
@kernel("fp8-cache", claims=lambda *_: {"preset": "fa2", "p": "float8_e4m3fn"})
def fp8_cache(case: AttentionCase) -> torch.Tensor:
    """P in an 8-bit format; a prefill walks its keys from the first tile of 32, a decode
    step from the last of 16."""
    if WHEN["decode"](case):
        return emulated(case, p="float8_e4m3fn", kv_order="descending")
    return emulated(case, p="float8_e4m3fn", block_kv=32)
