"""PyTorch's own attention of packed sequences, `torch.nn.attention.varlen.varlen_attn`.

The sequences of a batch are laid behind one another. A mask of keys that shows the first
few of each sequence becomes their lengths, and the rest is not given to the operator at
all. Causality is aligned bottom-right, as FlashAttention's, which it calls."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from numdev.cases import AttentionCase
from numdev.kernels import Output, Requirement, kernel
from numdev.kernels.output import Reason, refuse, why_not

MODULE = "torch.nn.attention.varlen"


def _unsupported(case: AttentionCase) -> str | None:
    """Returns why `varlen_attn` cannot run the case; None where it can."""
    return why_not(*_limits(case))


def _limits(case: AttentionCase) -> Iterator[Reason]:
    """Yields each limit of `varlen_attn` as (whether the case exceeds it, what to say),
    for `why_not`."""
    offset, mask = case.kv_len - case.q_len, case.mask
    shape = () if mask is None or mask.dtype != torch.bool else mask.shape
    of_keys = mask is None or (len(shape) == 4 and shape[1:3] == (1, 1))
    elsewhere = case.is_causal and case.causal_offset != offset
    has_stride = any(x.stride(-1) != 1 for x in (case.q, case.k, case.v))
    has_more = case.softcap is not None or case.sinks is not None
    yield importlib.util.find_spec(MODULE) is None, "this PyTorch has no varlen_attn"
    yield has_more, "it has no soft cap and no sinks"
    yield has_stride, "a last dimension with a stride"
    yield case.window is not None, "its windows differ between versions"
    yield not of_keys, "of masks it takes lengths alone: [batch, 1, 1, keys], bool"
    yield mask is not None and case.is_causal, "lengths would move its causal diagonal"
    yield elsewhere, f"aligns bottom-right, an offset of {offset}"


@kernel(
    "varlen-attn",
    requires=Requirement(device="cuda", capability=(8, 0)),
    supports=_unsupported,
)
def varlen_attn(case: AttentionCase, *, uncovered: bool = False) -> Output:
    """PyTorch's attention of packed sequences.

    A sequence's keys are those that its mask shows, which must be its first ones. A
    sequence without keys is one of length 0. With `uncovered` True its queries are
    instead put behind all others and in no sequence, as padding is; what the operator
    gives for these, as out or as gradient, is returned as it is, though exactly it is 0.
    Returns out and lse in the case's order. Raises Refused where this PyTorch lacks an
    argument that the case needs, a mask shows other keys than a sequence's first, or with
    `uncovered` no sequence has a key."""
    module = importlib.import_module(MODULE)
    takes = inspect.signature(module.varlen_attn).parameters.keys()  # of this PyTorch's
    lengths = _lengths(case)
    arguments = {
        "is_causal": case.is_causal,  # before the windows of 2.12
        "window_size": (-1, 0 if case.is_causal else -1),
        "scale": case.scale,
        "enable_gqa": case.group > 1,
    }
    usual = math.isclose(case.scale, case.q.shape[-1] ** -0.5)
    refuse(
        ("scale" not in takes and not usual, "this PyTorch's varlen_attn takes no scale"),
        (
            case.is_causal and not takes & {"is_causal", "window_size"},
            "this PyTorch's varlen_attn is not causal",
        ),
    )
    b, _, n, _ = case.q.shape
    covered = lengths > 0 if uncovered else torch.ones_like(lengths, dtype=torch.bool)
    refuse((not bool(covered.any()), "no sequence has a key"))
    order = torch.argsort(~covered, stable=True)
    place, lengths, count = order.argsort(), lengths[order], int(covered.sum())
    seen = torch.arange(case.kv_len, device=case.q.device) < lengths[:, None]
    q = case.q[order].transpose(1, 2).flatten(0, 1)
    k, v = (x[order].transpose(1, 2)[seen] for x in (case.k, case.v))
    if "enable_gqa" not in takes and case.group > 1:
        k, v = (x.repeat_interleave(case.group, dim=1) for x in (k, v))
    ends = torch.nn.functional.pad(lengths[:count].cumsum(0), (1, 0)).int()
    rows = torch.arange(count + 1, device=q.device, dtype=torch.int32) * n
    out, lse = module.varlen_attn(
        *(q, k, v, rows, ends, n, int(lengths.max())),
        return_aux=module.AuxRequest(lse=True),
        **{name: x for name, x in arguments.items() if name in takes},
    )
    return Output(
        out=out.unflatten(0, (b, n)).transpose(1, 2)[place],
        lse=lse.unflatten(1, (b, n)).transpose(0, 1)[place],
        ran=f"{MODULE}.varlen_attn",
    )


def _lengths(case: AttentionCase) -> Tensor:
    """Returns how many keys each sequence has, int64 [batch]: all, or as many as its mask
    shows. Raises Refused for a mask that shows others than the first keys."""
    full = torch.full((case.q.shape[0],), case.kv_len, device=case.q.device)
    if case.mask is None:
        return full
    shown = case.mask[:, 0, 0].expand(len(full), case.kv_len)
    lengths: Tensor = shown.sum(dim=1)
    first = torch.arange(case.kv_len, device=shown.device) < lengths[:, None]
    refuse(
        (not first.equal(shown), "its mask shows more than the first keys of a sequence")
    )
    return lengths
