"""The reference: attention in fp64 from the inputs as they are, and the rounding floor.

Beside the output it returns what only this pass can give: the log-sum-exp, the *term
scale* sum_j P_ij |V_jd| (the size of what is added up before anything cancels), and which
rows see no key. Such empty rows get out = 0 and lse = -inf (or the sink's logit), and are
left out of every metric.

`gradients` are those of flash attention's backward pass (Dao et al., arXiv 2205.14135,
appendix B.2):

    dP = dO V^T,  delta = rowsum(dO O),  dX = P (dP - delta) / cosh^2(X / cap),
    dQ = scale dX K,  dK = scale dX^T Q,  dV = P^T dO,

without the cosh where there is no soft cap. Query heads that share a kv head are summed.
A sink takes its part of P and gets no gradient. A gradient's term scale is the same sum
with all terms positive, and |dP| + |delta| for their difference: there a backward pass
loses its digits.

There are two paths, alike to fp64 rounding: `numdev.kernels.reference.blocked`, plain
PyTorch on a CPU and for small calls, and `numdev.kernels.reference.fused`, Triton on
CUDA. Results say which it was."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TypeVar

from torch import Tensor

from numdev.cases import AttentionCase
from numdev.errors import Refused
from numdev.formats import Format, round_to
from numdev.kernels import Output, kernel, no_claim
from numdev.kernels.output import upstream
from numdev.kernels.reference import blocked, fused
from numdev.kernels.reference.blocked import Gradients, Reference

R = TypeVar("R", bound=Reference)
SMALL = 1 << 28
"""Scores of a call up to which it goes the plain way, as Triton's compiler takes seconds
for each kind of call. An estimate: above which size the fused path is faster even so is
not measured."""


def attend(case: AttentionCase) -> Reference:
    """Returns O = softmax(S) V with S = bias + softcap(scale * Q K^T) in fp64, with its
    log-sum-exp, term scale and empty rows. An empty row, which sees no key, has O = 0 and
    a log-sum-exp of -inf, or of the sink.

    NaN and infinity in the inputs propagate as the arithmetic has it, but a key of
    probability 0 has no part in the sum, whatever its V holds. Inputs of any format are
    widened exactly. Large calls on CUDA run fused where that path takes them, all others
    blocked."""
    if not case.q.is_cuda or _is_small(case):
        return blocked.attend(case)
    return _with_fallback(case, fused.attend, blocked.attend)


def gradients(case: AttentionCase) -> Gradients:
    """Returns the gradients of sum(dO O) with respect to q, k and v with their term
    scales, beside all that the forward reference returns, in fp64.

    Memory is that of inputs, results and a few blocks of rows. Where P is 0, query and
    key have no part in each other's gradients, whatever Q, K, V and dO hold there;
    elsewhere NaN and infinity propagate as the arithmetic has it. An empty row adds
    nothing to any gradient. Raises UsageError for a case without grad_out."""
    if not case.q.is_cuda or _is_small(case):
        return blocked.gradients(case)
    return _with_fallback(case, fused.gradients, blocked.gradients)


def key_gradients(
    case: AttentionCase, keys: Tensor, whole: Reference
) -> dict[str, Tensor]:
    """Returns `dk`, `dv`, `dk_terms`, `dv_terms` and `unseen` of the kv rows `keys`
    (int64 indices) alone, fp64, each [batch, kv_heads, len(keys), ...]; up to fp64
    rounding they are those of `gradients`. `whole` is the forward reference of all
    queries, `attend(case)`.

    A key's probabilities P_ij = exp(S_ij - L_i) and dX need no other key once L and delta
    are known. The cost is O(q_len keys). Raises UsageError for a case without
    grad_out."""
    upstream(case)
    return blocked.gradients_of_keys(case, keys.to(case.q.device), whole)


def _is_small(case: AttentionCase) -> bool:
    """Whether the call has at most SMALL scores."""
    return case.q.shape[0] * case.heads * case.q_len * case.kv_len <= SMALL


def _with_fallback(
    case: AttentionCase,
    fast: Callable[[AttentionCase], R],
    plain: Callable[[AttentionCase], R],
) -> R:
    """Returns fast(case); where it raises Refused, plain(case) with the reason in `by`.
    Other exceptions, such as memory that runs out, propagate."""
    try:
        return fast(case)
    except Refused as refusal:
        return dataclasses.replace(plain(case), by=f"blocked: {refusal.message}")


def floor_of(reference: Reference, fmt: Format) -> Output:
    """Returns the reference, and its gradients if it has them, rounded once to `fmt`, in
    float64: no kernel that returns this format can have a smaller error everywhere, but
    where a value is beyond the format's largest. It has no log-sum-exp, which kernels
    return in a wider format."""
    floor = Output(out=round_to(reference.out, fmt), ran=reference.by)
    if not isinstance(reference, Gradients):
        return floor
    return dataclasses.replace(
        floor,
        dq=round_to(reference.dq, fmt),
        dk=round_to(reference.dk, fmt),
        dv=round_to(reference.dv, fmt),
    )


def _reference_step(case: AttentionCase) -> Output:
    """Returns out, lse and gradients of the fp64 reference as the Output of a kernel.
    Raises UsageError for a case without grad_out."""
    g = gradients(case)
    return Output(
        out=g.out, lse=g.lse, dq=g.dq, dk=g.dk, dv=g.dv, ran=g.by, ran_backward=g.by
    )


@kernel(
    "reference", any_format=True, any_rows=True, claims=no_claim, backward=_reference_step
)
def reference(case: AttentionCase) -> Output:
    """fp64 from the same rounded inputs: the truth every deviation is measured against.

    Returns out and lse in float64, and in `ran` which path computed them."""
    answer = attend(case)
    return Output(out=answer.out, lse=answer.lse, ran=answer.by)


@kernel(
    "floor",
    any_format=True,
    any_rows=True,
    claims=no_claim,
    backward=lambda case: floor_of(gradients(case), case.format),
)
def floor(case: AttentionCase) -> Output:
    """The reference rounded once to the output format: the smallest error a kernel can
    have.

    Returns out alone, float64 with values of the case's format."""
    return floor_of(attend(case), case.format)
