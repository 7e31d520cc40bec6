"""Plain attention, as people write it in PyTorch: the baseline, and other ways that code
rounds.

The baseline rounds where the eager attention of model code does: the product QK^T is
rounded, scaled and rounded again, the softmax runs in at least fp32, and P is rounded
before it meets V. Its gradients are autograd's. It is the yardstick "what plain code
costs", not the floor: production flash kernels on GPUs come closer.

WAYS are for `numdev.studies.audit.explanations`: sound code that no recipe of `emulated`
describes, since autograd comes back through every cast. P that is cast before it is
normalised has a gradient that is rounded before it is, and a maximum that is not detached
gets what rounding left of the sum of a row of dS. Sums are in fp32. Memory is O(q_len *
kv_len). A row that sees no key is 0."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from numdev.cases import AttentionCase, additive, empty_rows, explicit_mask, visible
from numdev.kernels import Output, kernel


@kernel(
    "baseline", any_rows=True, claims=lambda case, output, system: {"preset": "eager"}
)
def baseline(case: AttentionCase) -> Output:
    """Plain attention as eager model code does it, every product in the working format.

    Returns out alone, in the case's dtype; softmax is in float32 at least. Rows that see
    no key are 0. NaN and infinity propagate as PyTorch has it."""
    dtype = case.q.dtype
    rows, keys = slice(0, case.q_len), slice(0, case.kv_len)
    k, v = repeat_kv(case)
    S = torch.matmul(case.q, k.transpose(-1, -2)) * case.scale
    if case.softcap is not None:
        S = torch.tanh(S / case.softcap) * case.softcap
    bias = additive(case, rows, keys)
    if bias is not None:
        S = S + bias
    shown = visible(case, rows, keys)
    if shown is not None:
        S = S.masked_fill(~shown, -math.inf)
    S = _append_sinks(case, S)
    P = torch.softmax(S, dim=-1, dtype=torch.promote_types(dtype, torch.float32)).to(
        dtype
    )
    P = P[..., : case.kv_len]
    if shown is not None:
        P = P.masked_fill(~shown, 0.0)  # a row that sees no key is 0, not NaN
    return Output(out=torch.matmul(P, v))


# --- other ways -----------------------------------------------------------------------

Way = Callable[[AttentionCase], Tensor]
"""The output [B, H, q_len, v_dim] in the case's dtype, connected to q, k and v."""
# The score of a hidden key: exp of it is 0 beside any other, and no row is NaN
HIDDEN = -1e30


def _plain_attention(
    case: AttentionCase, wide: tuple[bool, bool, bool], *, sums_wide: bool = False
) -> Tensor:
    """Returns plain attention's output [B, H, q_len, v_dim] in the case's dtype. `wide`
    has three flags: whether the product Q Kᵀ, the softmax and the product P V are in
    fp32. `sums_wide`, with all three alone: gradients of k and v are summed over a group
    of query heads before they are rounded."""
    dtype, (scores, softmax, product) = case.q.dtype, wide
    k, v = repeat_kv(case, wide=sums_wide)
    S = _scores(case, *((case.q.float(), k.float()) if scores else (case.q, k)))
    S = _append_sinks(case, S)
    P = (S.float() if softmax else S).softmax(dim=-1)[..., : case.kv_len]
    return ((P @ v.float()) if product else (P.to(dtype) @ v)).to(dtype)


def _online_softmax_attention(
    case: AttentionCase,
    tile: int | None,
    maximum: str,
    *,
    sums_wide: bool = False,
    from_sink: bool = False,
) -> Tensor:
    """Returns the output [B, H, q_len, v_dim] of an online softmax over tiles of `tile`
    keys (None: one tile of all), in the case's dtype: P is cast for its product, and O
    divided by l at the end. `maximum`: `amax` or `max` lets gradients through that
    function of PyTorch's, `constant` detaches the maximum. `sums_wide`: gradients of k
    and v are summed over a group of query heads before they are rounded. `from_sink`: the
    maximum is never below the sink, which a case must have then."""
    k, v = repeat_kv(case, wide=sums_wide)
    S = _scores(case, case.q.float(), k.float())
    m = S.new_full((*S.shape[:3], 1), HIDDEN)
    if from_sink:
        assert case.sinks is not None
        m = torch.maximum(m, case.sinks.float()[:, None, None])
    l, O = torch.zeros_like(m), S.new_zeros(*S.shape[:3], v.shape[-1])
    width = tile or case.kv_len
    for part, values in zip(S.split(width, dim=-1), v.split(width, dim=2), strict=True):
        if maximum == "max":
            largest = part.max(dim=-1, keepdim=True).values
        else:
            largest = (part if maximum == "amax" else part.detach()).amax(
                dim=-1, keepdim=True
            )
        m_old, m = m, torch.maximum(m, largest)
        a, P = (m_old - m).exp(), (part - m).exp()
        l = a * l + P.sum(dim=-1, keepdim=True)
        O = a * O + P.to(case.q.dtype).float() @ values.float()
    l = l if case.sinks is None else l + (case.sinks.float()[:, None, None] - m).exp()
    return (O / l).to(case.q.dtype)


def _append_sinks(case: AttentionCase, S: Tensor) -> Tensor:
    """Returns the scores with each head's sink appended as one more key, [B, H, rows,
    keys + 1]; unchanged for a case without sinks."""
    if case.sinks is None:
        return S
    sink = case.sinks.to(S.dtype)[None, :, None, None].expand(*S.shape[:3], 1)
    return torch.cat([S, sink], dim=-1)


def repeat_kv(case: AttentionCase, *, wide: bool = False) -> list[Tensor]:
    """Returns [k, v] with as many heads as q: each kv head repeated for the query heads
    of its group, in fp32 if `wide`."""
    group = case.group
    heads = [x.float() if wide else x for x in (case.k, case.v)]
    return [x if group == 1 else x.repeat_interleave(group, dim=1) for x in heads]


def _scores(case: AttentionCase, q: Tensor, k: Tensor) -> Tensor:
    """Returns the scores S [B, H, q_len, kv_len] of q and of k, which has as many heads:
    scaled, soft-capped, with the additive mask. Hidden keys score -1e30, or the lowest
    number of a narrower dtype, so that no row becomes NaN."""
    S = q @ k.mT * case.scale
    S = S if case.softcap is None else case.softcap * (S / case.softcap).tanh()
    mask = explicit_mask(case)
    if mask is None:
        return S
    if mask.dtype != torch.bool:
        S, mask = S + mask, mask > -math.inf
    return S.masked_fill(~mask, max(HIDDEN, torch.finfo(S.dtype).min))


def _with_empty_rows_zero(way: Way) -> Way:
    """Returns a function like `way` whose rows that see no key are 0 and have no
    gradient."""
    return lambda case: way(case).masked_fill(empty_rows(case)[..., None], 0.0)


PLAIN = {  # in fp32: the product Q Kᵀ, the softmax, the product P V
    "all in fp32": (True, True, True),
    "a softmax in fp32, cast before P V": (True, True, False),
    "a softmax in the working format": (False, False, False),
    "S in the working format and the rest in fp32": (False, True, True),
}
MAXIMUM = {
    "amax": "the maximum's gradient included",
    "max": "the gradient of the first maximum included",
    "constant": "the maximum detached",
}
TILES: Mapping[int | None, str] = {
    None: "",
    **{n: f" in tiles of {n} keys" for n in (64, 128, 32)},
}
_ONLINE = {
    f"exp(S - m), cast before P V{tiled}, {through}": partial(
        _online_softmax_attention, tile=tile, maximum=maximum
    )
    for tile, tiled in TILES.items()
    for maximum, through in MAXIMUM.items()
}
_WRITTEN: Mapping[str, partial[Tensor]] = {
    **{words: partial(_plain_attention, wide=wide) for words, wide in PLAIN.items()},
    **_ONLINE,
}
WAYS: Mapping[str, Way] = {
    f"as autograd rounds {words}": _with_empty_rows_zero(way)
    for words, way in _WRITTEN.items()
}
"""By what is said of a kernel that rounds so, the likeliest first."""


def written_ways(case: AttentionCase) -> dict[str, Way]:
    """Returns all ways in which a call may be written in PyTorch, by what is said of a
    kernel that rounds so: WAYS, and where query heads share keys those that have k and v
    in fp32 before they repeat them; where there are sinks those whose maximum is of the
    sink too."""
    ways = dict(WAYS)
    grouped, sunk = case.group > 1, case.sinks is not None
    variants: list[tuple[str, dict[str, bool]]] = [
        (", dk and dv summed in fp32", {"sums_wide": True}),
        (", the sink in the maximum", {"from_sink": True}),
        (
            ", the sink in the maximum, dk and dv summed in fp32",
            {"sums_wide": True, "from_sink": True},
        ),
    ]
    for words, options in variants:
        sink = "from_sink" in options
        if ("sums_wide" in options and not grouped) or (sink and not sunk):
            continue
        for name in _ONLINE if sink else (*_ONLINE, "all in fp32"):
            way = _with_empty_rows_zero(partial(_WRITTEN[name], **options))
            ways[f"as autograd rounds {name}{words}"] = way
    return ways
