"""Cases, stored weights and options as a report holds them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from numdev.cases import AttentionCase
from numdev.formats import Format, round_to
from numdev.report import CaseRecord, WeightRow


def case_record(case: AttentionCase, axes: Mapping[str, Any] | None = None) -> CaseRecord:
    """What a case is, in plain data, for the report."""
    mask: Literal["none", "bool", "additive"] = "none"
    if case.mask is not None:
        mask = "bool" if case.mask.dtype == torch.bool else "additive"
    return CaseRecord(
        case=case.ref.case,
        batch=case.q.shape[0],
        heads=case.heads,
        kv_heads=case.kv_heads,
        q_len=case.q_len,
        kv_len=case.kv_len,
        head_dim=case.q.shape[3],
        v_dim=case.v.shape[3],
        source_format=case.format.name,
        mask=mask,
        is_causal=case.is_causal,
        causal_offset=case.causal_offset,
        window=case.window,
        softcap=case.softcap,
        sinks=case.sinks is not None,
        scale=case.scale,
        grad_out=case.grad_out_from or ("given" if case.grad_out is not None else None),
        axes=dict(axes or {}),
    )


def weight_row(name: str, tensor: Tensor, fmt: Format) -> WeightRow:
    """What casting a stored tensor to a format costs.

    Elements the format cannot hold, or that were not finite to begin with, are counted and left
    out of the averages.
    """
    wide = tensor.double()
    error = round_to(wide, fmt) - wide
    usable = error.isfinite()
    size, norm = error[usable].abs(), float(wide[usable].norm())
    mean = float(size.mean()) if size.numel() else None
    return WeightRow(
        tensor=name,
        shape=tuple(tensor.shape),
        stored=str(tensor.dtype).removeprefix("torch."),
        format=fmt.name,
        elements=tensor.numel(),
        nonfinite=int((~usable).sum()),
        max_abs=float(size.max()) if size.numel() else None,
        mean_abs=mean,
        rel=float(size.norm()) / norm if size.numel() and norm else None,
        w1=mean,
    )


def recorded(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options as a report can hold them: what JSON has no word for (a dtype, infinity) by name."""
    return {name: _plain(value) for name, value in options.items()}


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    return getattr(value, "__qualname__", None) or repr(value)
