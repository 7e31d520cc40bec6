"""A registered kernel with an option, and a plain function for `--kernel
module:function`."""

import torch

from numdev.cases import explicit_mask
from numdev.kernels import Output, kernel


def _refuse(case):
    return "it has no attention sinks" if case.sinks is not None else None


@kernel("example-chunked", supports=_refuse)
def chunked(case, *, rows: int = 32) -> Output:
    """Attention in fp32, a chunk of query rows at a time."""
    q, k, v = (x.float() for x in (case.q, case.k, case.v))
    k, v = (x.repeat_interleave(case.group, dim=1) for x in (k, v))
    mask = explicit_mask(case)
    if mask is not None:
        mask = mask.expand(*q.shape[:3], k.shape[2])
    parts = []
    for start in range(0, q.shape[2], rows):
        chunk = slice(start, start + rows)
        scores = q[:, :, chunk] @ k.mT * case.scale
        if case.softcap is not None:
            scores = case.softcap * torch.tanh(scores / case.softcap)
        if mask is not None:
            part = mask[:, :, chunk]
            hidden = ~part if part.dtype == torch.bool else part == -torch.inf
            added = torch.zeros(()) if part.dtype == torch.bool else part.float()
            scores = (scores + added).masked_fill(hidden, -torch.inf)
        parts.append(torch.softmax(scores, dim=-1).nan_to_num(0.0) @ v)
    return Output(out=torch.cat(parts, dim=2).to(case.q.dtype))


def plain(q, k, v, is_causal=False, scale=None):
    """The same without a chunk, a mask or a registration."""
    scores = q.float() @ k.float().mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        shown = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        scores = scores.masked_fill(~shown, -torch.inf)
    return (torch.softmax(scores, dim=-1) @ v.float()).to(q.dtype)
