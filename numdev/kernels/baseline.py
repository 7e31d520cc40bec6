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
kv_len). In WAYS a row that sees no key is 0."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from numdev.cases import AttentionCase, additive, empty_rows, explicit_mask, visible
from numdev.kernels import Output, kernel
from numdev.kernels.output import pull_back, upstream_in
from numdev.kernels.tiled_softmax import TiledSoftmax


@kernel(
    "baseline", any_rows=True, claims=lambda case, output, system: {"preset": "eager"}
)
def baseline(case: AttentionCase) -> Output:
    """Plain attention as eager model code does it, every product in the working format.

    Returns out alone, in the case's dtype. Scores are in it too; the softmax is in
    float32, in float64 for a float64 case. Rows whose keys are hidden by position, a bool
    mask or an additive mask's lowest number are 0; a row of -inf alone in the mask is
    NaN. NaN and infinity propagate as in PyTorch. Memory is O(q_len · kv_len)."""
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
    if case.sinks is not None:
        S = _append_sinks(case.sinks, S)
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
    has three flags: whether the product Q Kᵀ, the softmax, and the product P V are in
    fp32. `sums_wide`: k and v are cast to fp32 before they are repeated, so that their
    gradients are summed over a group of query heads before they are rounded; only where
    all three flags are True. Without sinks a row that sees no key is not 0 here."""
    dtype, (scores, softmax, product) = case.q.dtype, wide
    k, v = repeat_kv(case, wide=sums_wide)
    S = _scores(case, *((case.q.float(), k.float()) if scores else (case.q, k)))
    if case.sinks is not None:
        S = _append_sinks(case.sinks, S)
    P = (S.float() if softmax else S).softmax(dim=-1)[..., : case.kv_len]
    return ((P @ v.float()) if product else (P.to(dtype) @ v)).to(dtype)


@dataclass(frozen=True)
class OnlineSoftmax:
    """An online softmax over tiles of `tile` keys (None: one tile of all keys), in fp32.
    P is cast to the case's dtype for its product with V, and O is divided by the row's
    sum l at the end. Called with a case it returns the output [B, H, q_len, v_dim], in
    the case's dtype, in autograd's graph; rows that see no key are 0."""

    tile: int | None
    maximum: str  # of MAXIMUM: how gradients go through the maximum, or not
    sums_wide: bool = False
    """Gradients of k and v are summed over a group of query heads before they are
    rounded."""
    from_sink: bool = False
    """The maximum is never below the sink, which a case must have then."""

    def __call__(self, case: AttentionCase) -> Tensor:
        k, v = repeat_kv(case, wide=self.sums_wide)
        S = _scores(case, case.q.float(), k.float())
        parts = S.split(self.tile or case.kv_len, dim=-1)
        is_constant = self.maximum == "constant"
        maxima = [_largest(p.detach() if is_constant else p, self.maximum) for p in parts]
        return self._add_tiles(case, parts, maxima, v)

    def steps(self, case: AttentionCase) -> dict[str, Output]:
        """Returns one Output for each key of MAXIMUM, in its order: the output with dq,
        dk and dv, bit for bit as `differentiate` gives them for the softmax with that
        `maximum`. `self.maximum` is not read. `out` and `dv` are the same in all: only
        what the maximum adds to the gradient of the scores differs. Raises UsageError for
        a case without a grad_out."""
        q, k, v = (x.detach().requires_grad_() for x in (case.q, case.k, case.v))
        with torch.enable_grad():
            case = dataclasses.replace(case, q=q, k=k, v=v)
            keys, values = repeat_kv(case, wide=self.sums_wide)
            S, V = _scores(case, q.float(), keys.float()), values.float()
        first, tile = self._first_maximum(case, S.detach()), self.tile or case.kv_len
        tiles = TiledSoftmax(S.detach(), V.detach(), first, tile, q.dtype)
        m, l, O, through_sink = tiles.m, tiles.l, tiles.O, None
        if case.sinks is not None:
            of_sink = (case.sinks.float()[:, None, None] - m).exp()
            l = l + of_sink
        empty = empty_rows(case)[..., None]
        out = (O / l).to(q.dtype).masked_fill(empty, 0.0)
        upstream = upstream_in(case, q.dtype).masked_fill(empty, 0.0).float()
        dl = (-upstream * ((O / l) / l)).sum(dim=-1, keepdim=True)
        if case.sinks is not None:
            through_sink = -(dl * of_sink)
        dS, dV, dm = tiles.gradients(upstream / l, dl, through_sink)
        (dv,) = pull_back([V], [dV], [v])
        steps = {}
        for name in MAXIMUM:
            is_constant = name == "constant"
            total = dS if is_constant else dS + tiles.through_maxima(dm, name)
            dq, dk = pull_back([S], [total], [q, k], retain_graph=True)
            steps[name] = Output(out=out, dq=dq, dk=dk, dv=dv)
        return steps

    def _add_tiles(
        self,
        case: AttentionCase,
        parts: Sequence[Tensor],
        maxima: Sequence[Tensor],
        v: Tensor,
    ) -> Tensor:
        """Returns the output [B, H, q_len, v_dim] in the case's dtype. For each tile,
        `parts` has the scores of its keys [B, H, q_len, keys], as `_scores` gives them:
        scaled, and hidden keys already lowest. `maxima`: their largest in each row, [B,
        H, q_len, 1]. All tiles but the last are of one width. v has as many heads as q.
        Of the case, sinks join the sum l, and rows that see no key become 0."""
        m = self._first_maximum(case, parts[0])
        l, O = torch.zeros_like(m), m.new_zeros(*m.shape[:3], v.shape[-1])
        values = v.float().split(parts[0].shape[-1], dim=2)
        for part, largest, V in zip(parts, maxima, values, strict=True):
            m_old, m = m, torch.maximum(m, largest)
            a, P = (m_old - m).exp(), (part - m).exp()
            l = a * l + P.sum(dim=-1, keepdim=True)
            O = a * O + P.to(case.q.dtype).float() @ V
        if case.sinks is not None:
            l = l + (case.sinks.float()[:, None, None] - m).exp()
        return (O / l).to(case.q.dtype).masked_fill(empty_rows(case)[..., None], 0.0)

    def _first_maximum(self, case: AttentionCase, S: Tensor) -> Tensor:
        """Returns the maximum before the first tile, [B, H, q_len, 1], in the dtype of
        the scores S: -1e30, or with `from_sink` each head's sink where that is larger."""
        m = S.new_full((*S.shape[:3], 1), HIDDEN)
        if not self.from_sink:
            return m
        assert case.sinks is not None
        return torch.maximum(m, case.sinks.float()[:, None, None])


def _largest(part: Tensor, function: str) -> Tensor:
    """Returns the largest score of each row, [B, H, rows, 1]. `function`: `max` takes it
    by `torch.max`, whose gradient goes to one score; any other name by `torch.amax`,
    whose gradient is shared by equal scores."""
    if function == "max":
        return part.max(dim=-1, keepdim=True).values
    return part.amax(dim=-1, keepdim=True)


def _append_sinks(sinks: Tensor, S: Tensor) -> Tensor:
    """Returns the scores [B, H, rows, keys] with each head's sink, in their dtype,
    appended as one more key, [B, H, rows, keys + 1]. `sinks`: [H]."""
    sink = sinks.to(S.dtype)[None, :, None, None].expand(*S.shape[:3], 1)
    return torch.cat([S, sink], dim=-1)


def repeat_kv(case: AttentionCase, *, wide: bool = False) -> list[Tensor]:
    """Returns [k, v] with as many heads as q: each kv head repeated for the query heads
    of its group, in fp32 if `wide`. Where there is nothing to repeat or cast they are the
    case's own tensors."""
    group = case.group
    heads = [x.float() if wide else x for x in (case.k, case.v)]
    return [x if group == 1 else x.repeat_interleave(group, dim=1) for x in heads]


def _scores(case: AttentionCase, q: Tensor, k: Tensor) -> Tensor:
    """Returns the scores S [B, H, q_len, kv_len] of q and k, which have the same number
    of heads: scaled, soft-capped, then with the additive mask. Causality, window and mask
    are the case's. A key that position, a bool mask or a -inf hides scores -1e30, or in
    float16 the lowest number. An additive mask's lowest number is added as any other
    is."""
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
_ONLINE: Mapping[str, OnlineSoftmax] = {
    f"as autograd rounds exp(S - m), cast before P V{tiled}, {through}": OnlineSoftmax(
        tile, maximum
    )
    for tile, tiled in TILES.items()
    for maximum, through in MAXIMUM.items()
}
WAYS: Mapping[str, Way] = {
    **{
        f"as autograd rounds {words}": _with_empty_rows_zero(
            partial(_plain_attention, wide=wide)
        )
        for words, wide in PLAIN.items()
    },
    **_ONLINE,
}
"""By what is said of a kernel that rounds so, the likeliest first."""


def written_ways(case: AttentionCase) -> dict[str, Way]:
    """Returns all ways in which a call may be written in PyTorch, the likeliest first. A
    key says how a kernel rounds that is written so; the value is a function from a case
    to the output [B, H, q_len, v_dim]. The first ways are WAYS. Where query heads share
    keys, ways follow that cast k and v to fp32 before they repeat them. Where there are
    sinks, ways follow whose first maximum is the sink; where there is both, ways with
    both come last."""
    ways = dict(WAYS)
    grouped, sunk = case.group > 1, case.sinks is not None
    if grouped:
        ways |= _varied(", dk and dv summed in fp32", sums_wide=True)
        wide = partial(_plain_attention, wide=(True, True, True), sums_wide=True)
        ways["as autograd rounds all in fp32, dk and dv summed in fp32"] = (
            _with_empty_rows_zero(wide)
        )
    if sunk:
        ways |= _varied(", the sink in the maximum", from_sink=True)
    if grouped and sunk:
        words = ", the sink in the maximum, dk and dv summed in fp32"
        ways |= _varied(words, from_sink=True, sums_wide=True)
    return ways


def _varied(
    words: str, *, sums_wide: bool = False, from_sink: bool = False
) -> dict[str, Way]:
    """Returns all online softmaxes of WAYS with these options set, by name. A name is the
    one in WAYS with `words` behind it."""
    return {
        f"{name}{words}": OnlineSoftmax(way.tile, way.maximum, sums_wide, from_sink)
        for name, way in _ONLINE.items()
    }
