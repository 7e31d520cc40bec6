"""The steps in which PyTorch's kernels compute an operator, where these are not its
formula's, or more than one.

A run that rounds every operation takes these steps in the operator's place, and rounds
each. Only single operators may stand here: what PyTorch composes of others (`to`,
`matmul`) arrives whole below autograd, and counts as a view or as one operation.

Attention follows FlashAttention-2 (Dao, 2023, arXiv 2307.08691), as PyTorch's
kernels do on a CPU and a GPU: it computes in float32 at least, but the weights that meet
the values, the output and the gradient of the scores are in the inputs' format. Its
gradients take the sum over a row from the rounded output, so that one number's rounding
goes along a whole row."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import torch
from torch import Tensor
from torch._ops import OpOverload

from numdev.exact.operator_arguments import operator_argument
from numdev.exact.unsupported_operations import unsupported_error

aten = torch.ops.aten
OWN_DRAWS = "it drops weights at random, by numbers of its own"
# What convolves and rounds, and then adds the bias: seen on an H200 (PyTorch 2.11), where
# 9,999 of 10,000 elements and more were equal to that. Other kernels round once.
ADD_BIAS_AFTERWARDS = frozenset(
    ("Cudnn", "CudnnTranspose", "SlowDilated2d", "SlowDilated3d")
)
# What the steps of a kernel err besides, in a clause, by a word of its operator's name
WHY = {
    "attention": "attention is one kernel here, which takes the row sums of its "
    "gradients from the rounded output",
    "convolution": "the bias of a convolution is added to a rounded result here",
}
Steps = Callable[[OpOverload, Sequence[object], Mapping[str, object]], object]


def kernel_steps(
    func: OpOverload, args: Sequence[object], *, uses_cudnn: bool
) -> Steps | None:
    """Returns what computes an operator in the steps of its kernel; None where it is one
    step, or nobody has looked. `uses_cudnn`: whether PyTorch may choose cuDNN for a
    convolution."""
    if func is aten.convolution.default:
        is_two = _adds_bias_afterwards(args, uses_cudnn=uses_cudnn)
        return convolution if is_two else None
    return OF_ATTENTION.get(func)


def why_kernels_err(names: Iterable[str]) -> str:
    """Returns why the steps of kernels err more than formulas do: the clauses of WHY
    whose word is part of one of these operators' names, each once, joined by `; `. Empty
    where none is."""
    names = list(names)
    clauses = (why for word, why in WHY.items() if any(word in name for name in names))
    return "; ".join(clauses)


def logsumexp(
    func: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]
) -> Tensor:
    """Returns log(sum(exp(x))) in the steps of PyTorch's own formula; -inf for the sum of
    no numbers. The largest real part is subtracted before, unless it is plus or minus
    infinity, and added to the logarithm."""
    call = _KernelCall(func, args, kwargs)
    x, dims = call.tensor("self"), cast(list[int], call["dim"])
    keepdim = bool(call["keepdim"])
    if not x.numel():
        return x.exp().sum(dims, keepdim=keepdim).log()
    largest = torch.real(x).amax(dims, keepdim=True)
    largest = torch.where(largest.abs() == torch.inf, torch.zeros_like(largest), largest)
    total = (x - largest).exp().sum(dims, keepdim=keepdim)
    return total.log() + (largest if keepdim else largest.squeeze(dims))


def convolution(
    func: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]
) -> Tensor:
    """Returns a convolution in two operations: without its bias, and that result with the
    bias added. `args`: the operator's, with a bias."""
    x, weight, bias, *options = args
    out: Tensor = func(x, weight, None, *options, **kwargs)
    return out + cast(Tensor, bias).reshape(-1, *[1] * (out.ndim - 2))


def _adds_bias_afterwards(args: Sequence[object], *, uses_cudnn: bool) -> bool:
    """Whether PyTorch has a convolution's result rounded before the bias is added to
    it: by the kernel that it takes for these arguments. False without a bias."""
    if args[2] is None:
        return False
    before = torch._C._get_cudnn_enabled()
    torch._C._set_cudnn_enabled(uses_cudnn)
    try:
        chosen = torch._C._select_conv_backend(*args)
    finally:
        torch._C._set_cudnn_enabled(before)
    return chosen.name in ADD_BIAS_AFTERWARDS


@dataclass(frozen=True)
class _KernelCall:
    """A call of an operator, whose arguments are read by name."""

    func: OpOverload
    args: Sequence[object]
    kwargs: Mapping[str, object]

    def __getitem__(self, name: str) -> object:
        return operator_argument(self.func, tuple(self.args), self.kwargs, name)

    def tensor(self, *names: str) -> Tensor:
        """Returns the argument of the first of `names` that the operator has and that is
        not None; one of them is a tensor."""
        values = map(self.__getitem__, names)
        return cast(Tensor, next(x for x in values if x is not None))

    @cached_property
    def dtype(self) -> torch.dtype:
        """Returns the dtype of attention's inputs."""
        return self.tensor("query").dtype

    @cached_property
    def inside(self) -> torch.dtype:
        """Returns the dtype that attention computes in: float32 at least."""
        is_wide = self.dtype in (torch.float32, torch.float64)
        return self.dtype if is_wide else torch.float32

    def rounded(self, x: Tensor) -> Tensor:
        """Returns a tensor of the dtype `inside` rounded to the inputs' format, of the
        same dtype."""
        return _in_dtype(_in_dtype(x, self.dtype), self.inside)

    def read(self, *names: str) -> Tensor:
        """Returns a tensor in the dtype `inside`, keys and values once for each query
        head that shares them."""
        x = _in_dtype(self.tensor(*names), self.inside)
        is_shared = names[0] in ("key", "value") and self.sharing > 1
        return x.repeat_interleave(self.sharing, -3) if is_shared else x

    @cached_property
    def sharing(self) -> int:
        """Returns how many query heads share one of keys and values."""
        return self.tensor("query").shape[-3] // self.tensor("key").shape[-3]

    @cached_property
    def scale(self) -> float:
        """Returns what scores are multiplied with: by default one over the root of the
        queries' width."""
        scale = cast(float | None, self["scale"])
        return self.tensor("query").shape[-1] ** -0.5 if scale is None else scale

    @cached_property
    def bias(self) -> Tensor | None:
        """Returns the mask: bools, False for what is left out, or what is added to the
        scores; None without one."""
        biases = (self["attn_mask"], self["attn_bias"])
        return cast(Tensor | None, next((x for x in biases if x is not None), None))

    def scores(self) -> Tensor:
        """Returns the scores [..., queries, keys] with their mask, -inf for what is left
        out, in the dtype `inside`."""
        scores = _product(self.read("query"), self.read("key").mT) * self.scale
        if self.bias is not None and self.bias.dtype == torch.bool:
            scores = scores.masked_fill(~self.bias, -torch.inf)
        elif self.bias is not None:
            scores = scores + _in_dtype(self.bias, self.inside)
        if self["is_causal"]:
            size, device = scores.shape[-2:], scores.device
            later = torch.ones(size, dtype=torch.bool, device=device).triu(1)
            scores = scores.masked_fill(later, -torch.inf)
        return scores


def _in_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns a tensor rounded to a dtype; itself where it has that."""
    return x if x.dtype == dtype else aten._to_copy.default(x, dtype=dtype)


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Returns the matrix products [..., m, n] of `left` [..., m, k] and `right` [..., k,
    n], whose other axes multiply to the same number."""
    pairs = (x.reshape(-1, *x.shape[-2:]) for x in (left, right))
    return torch.bmm(*pairs).reshape(*left.shape[:-1], right.shape[-1])


def attention(
    func: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]
) -> tuple[object, ...]:
    """Returns what an operator of fused attention returns: the output in the inputs'
    dtype, the log-sum-exp of each row, and for all else a stand-in, which may be None.
    For a row that sees no key both are 0. Raises Unsupported where weights are dropped at
    random."""
    call = _KernelCall(func, args, kwargs)
    if call["dropout_p"]:
        raise unsupported_error(func, OWN_DRAWS)
    scores = call.scores()
    largest = scores.amax(-1, keepdim=True)
    largest = largest.masked_fill(largest == -torch.inf, 0.0)
    weights = (scores - largest).exp()
    total = weights.sum(-1, keepdim=True)
    total = total.masked_fill(total == 0, 1.0)
    output = _product(call.rounded(weights), call.read("value")) / total
    # As kernels lay it out: heads beside each other, so that views of it are views
    output = _in_dtype(output, call.dtype)
    output = output.transpose(1, 2).contiguous().transpose(1, 2)
    of_rows = (largest + total.log()).squeeze(-1)
    results: dict[str, object] = {"output": output}
    results |= dict.fromkeys(("logsumexp", "log_sumexp"), of_rows)
    results |= {"max_q": scores.shape[-2], "max_k": scores.shape[-1]}
    results |= dict.fromkeys(("rng_state", "unused"), torch.zeros(2, dtype=torch.int64))
    return tuple(results.get(x.name) for x in func._schema.returns)


def attention_backward(
    func: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]
) -> tuple[Tensor | None, ...]:
    """Returns the gradients of queries, keys and values that an operator of fused
    attention returns, and from one that has a fourth result that of its bias: None where
    there is no bias, or nobody asks for it."""
    call = _KernelCall(func, args, kwargs)
    back = call.read("grad_out", "grad_out_")
    query, key, value = (call.read(name) for name in ("query", "key", "value"))
    of_rows = call.read("logsumexp").unsqueeze(-1)
    weights = (call.scores() - of_rows).exp()
    row_sums = (back * call.read("out")).sum(-1, keepdim=True)
    of_scores = call.rounded(weights * (_product(back, value.mT) - row_sums))
    of_query = _product(of_scores, key) * call.scale
    of_key = _product(of_scores.mT, query) * call.scale
    of_value = _product(call.rounded(weights).mT, back)
    gradients: list[Tensor | None] = [_in_dtype(of_query, call.dtype)]
    for x in (of_key, of_value):
        shared = _in_dtype(x, call.dtype)
        if call.sharing > 1:
            shared = shared.unflatten(-3, (-1, call.sharing)).sum(-3)
        gradients.append(shared)
    if len(func._schema.returns) > 3:
        is_asked = cast(Sequence[bool], call["grad_input_mask"])[3]
        bias = call.bias if is_asked else None
        gradients.append(
            None
            if bias is None
            else _in_dtype(of_scores.sum_to_size(bias.shape), bias.dtype)
        )
    return tuple(gradients)


OF_ATTENTION: Mapping[OpOverload, Steps] = {
    getattr(aten, f"_scaled_dot_product_{name}{end}").default: steps
    for name in (
        "flash_attention_for_cpu", "flash_attention", "efficient_attention",
        "cudnn_attention",
    )
    for end, steps in (("", attention), ("_backward", attention_backward))
}  # fmt: skip
