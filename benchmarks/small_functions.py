"""Small functions of every kind, as people write them, that tests and a benchmark run
exactly.

None casts, so that each is also defined on fp64 tensors as it stands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Function = Callable[..., Any]
Registry = dict[str, tuple[Function, Callable[[torch.Generator], tuple[Any, ...]]]]
FUNCTIONS: Registry = {}


def function(*shapes: Any, into: Registry = FUNCTIONS) -> Callable[[Function], Function]:
    """Registers a function with its arguments: normal values of these shapes, or other
    objects."""

    def register(f: Function) -> Function:
        def inputs(generator: torch.Generator) -> tuple[Any, ...]:
            return tuple(
                x(generator) if callable(x) else _drawn(x, generator) for x in shapes
            )

        into[f.__name__] = (f, inputs)
        return f

    return register


def _drawn(shape: Any, generator: torch.Generator) -> Any:
    return torch.randn(shape, generator=generator) if isinstance(shape, tuple) else shape


def integers(shape: tuple[int, ...], below: int) -> Callable[[torch.Generator], Tensor]:
    return lambda generator: torch.randint(below, shape, generator=generator)


def positive(shape: tuple[int, ...]) -> Callable[[torch.Generator], Tensor]:
    return lambda generator: torch.rand(shape, generator=generator) + 0.1


# --- elementwise ----------------------------------------------------------------------


@function((48, 128), (48, 128))
def affine(x: Tensor, y: Tensor) -> Tensor:
    return 0.7 * x + y / 3 - 1.1


@function((48, 128), (48, 128))
def swiglu(x: Tensor, y: Tensor) -> Tensor:
    return F.silu(x) * y


@function((48, 128))
def gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


@function((48, 128))
def gelu_by_hand(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.erf(x / 2**0.5))


@function((48, 128))
def softplus(x: Tensor) -> Tensor:
    return F.softplus(x, beta=1.5)


@function((48, 128))
def mish(x: Tensor) -> Tensor:
    return F.mish(x)


@function((48, 128), (48, 128))
def complex_product(x: Tensor, y: Tensor) -> Tensor:
    return torch.stack(
        (x[:, ::2] * y[:, ::2] - x[:, 1::2] * y[:, 1::2], x[:, ::2] * y[:, 1::2])
    )


@function(positive((48, 128)))
def power_and_logarithm(x: Tensor) -> Tensor:
    return x**1.7 + torch.log1p(x) * torch.sqrt(x)


@function((48, 128))
def clamp_and_where(x: Tensor) -> Tensor:
    return torch.where(x > 0.3, x.clamp(max=0.9), 0.1 * x)


@function((48, 128), (128,))
def lerp(x: Tensor, weight: Tensor) -> Tensor:
    return torch.lerp(x, 2 * x, torch.sigmoid(weight))


# --- reductions -----------------------------------------------------------------------


@function((256, 128))
def mean(x: Tensor) -> Tensor:
    return x.mean(dim=-1)


@function((256, 128))
def variance(x: Tensor) -> Tensor:
    return x.var(dim=-1)


@function((256, 128))
def logsumexp(x: Tensor) -> Tensor:
    return torch.logsumexp(x, dim=-1)


@function(positive((256, 24)))
def product(x: Tensor) -> Tensor:
    return x.prod(dim=-1)


@function((256, 128))
def vector_norm(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dim=-1)


@function((256, 128))
def amax_and_range(x: Tensor) -> Tensor:
    return x.amax(dim=-1) - x.amin(dim=-1)


# --- norms ----------------------------------------------------------------------------


@function((48, 128), (128,))
def rms_norm_by_hand(x: Tensor, weight: Tensor) -> Tensor:
    return weight * (x * torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + 1e-6))


@function((48, 128), (128,))
def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, (128,), weight, 1e-6)


@function((48, 128), (128,), (128,))
def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, (128,), weight, bias)


@function((8, 16, 12, 12), (16,), (16,))
def group_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.group_norm(x, 4, weight, bias)


@function((16, 8, 12, 12), (8,), (8,))
def batch_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.batch_norm(x, None, None, weight, bias, training=True)


@function((48, 128))
def normalize(x: Tensor) -> Tensor:
    return F.normalize(x, dim=-1)


# --- softmax and losses ---------------------------------------------------------------


@function((48, 128))
def softmax(x: Tensor) -> Tensor:
    return (2 * x).softmax(dim=-1)


@function((48, 128))
def log_softmax(x: Tensor) -> Tensor:
    return x.log_softmax(dim=-1)


@function((48, 128), integers((48,), 128))
def cross_entropy(x: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(x, target, reduction="none")


@function((48, 128), integers((48,), 128))
def cross_entropy_by_hand(x: Tensor, target: Tensor) -> Tensor:
    return torch.logsumexp(x, -1) - x.gather(-1, target[:, None])[:, 0]


@function((48, 128), (48, 128))
def smooth_l1(x: Tensor, y: Tensor) -> Tensor:
    return F.smooth_l1_loss(x, y, reduction="none", beta=0.7)


@function((48, 128), (48, 128))
def divergence(x: Tensor, y: Tensor) -> Tensor:
    return F.kl_div(x.log_softmax(-1), y.softmax(-1), reduction="none").sum(dim=-1)


# --- products -------------------------------------------------------------------------


@function((32, 128), (128, 48))
def matmul(x: Tensor, y: Tensor) -> Tensor:
    return x @ y


@function((32, 64), (96, 64), (96,), (64, 96))
def mlp(x: Tensor, up: Tensor, bias: Tensor, down: Tensor) -> Tensor:
    return F.linear(F.gelu(F.linear(x, up, bias)), down)


@function((4, 24, 32), (4, 32, 24))
def batched_product(x: Tensor, y: Tensor) -> Tensor:
    return torch.bmm(x, y) * 0.125


@function((4, 8, 32), (4, 8, 32))
def einsum(x: Tensor, y: Tensor) -> Tensor:
    return torch.einsum("bid,bjd->bij", x, y)


@function((2, 4, 24, 16), (2, 4, 24, 16), (2, 4, 24, 16))
def attention_by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    hidden = torch.ones(24, 24, dtype=torch.bool).triu(1)
    scores = (q @ k.mT * 16**-0.5).masked_fill(hidden, float("-inf"))
    return scores.softmax(dim=-1) @ v


@function((4, 8, 14, 14), (12, 8, 3, 3), (12,))
def convolution(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.conv2d(x, weight, bias, padding=1)


@function((4, 8, 40), (8, 1, 4))
def depthwise_convolution(x: Tensor, weight: Tensor) -> Tensor:
    return F.silu(F.conv1d(F.pad(x, (3, 0)), weight, groups=8))


@function((4, 8, 12, 12))
def pooling(x: Tensor) -> Tensor:
    return F.max_pool2d(x, 2) + F.avg_pool2d(x, 2)


# --- recurrences, indices, views ------------------------------------------------------


@function((96, 32), integers((64,), 96))
def embedding(table: Tensor, tokens: Tensor) -> Tensor:
    return F.embedding(tokens, table) * 32**0.5


@function((2, 4, 24, 16), (24, 8))
def rope(x: Tensor, angle: Tensor) -> Tensor:
    cos, sin = (torch.cat((f(angle), f(angle)), dim=-1) for f in (torch.cos, torch.sin))
    turned = torch.cat((-x[..., 8:], x[..., :8]), dim=-1)
    return x * cos + turned * sin


@function((48, 64))
def cumulative_sum(x: Tensor) -> Tensor:
    return x.cumsum(dim=-1)


@function(positive((48, 16)))
def cumulative_product(x: Tensor) -> Tensor:
    return x.cumprod(dim=-1)


@function((24, 16, 8), (24, 16, 8))
def gated_recurrence(x: Tensor, gate: Tensor) -> Tensor:
    state, states = torch.zeros_like(x[0]), []
    for value, open_by in zip(x, gate.sigmoid(), strict=True):
        state = open_by * state + (1 - open_by) * value
        states.append(state)
    return torch.stack(states)


@function((48, 32))
def top_k_routing(x: Tensor) -> Tensor:
    weights, _ = x.softmax(dim=-1).topk(4, dim=-1)
    return weights / weights.sum(dim=-1, keepdim=True)


@function((48, 32), integers((48, 8), 32))
def gather(x: Tensor, index: Tensor) -> Tensor:
    return x.gather(-1, index) * 1.3


@function((64, 32), integers((64,), 16))
def scatter_add(x: Tensor, index: Tensor) -> Tensor:
    return torch.zeros(16, 32, dtype=x.dtype).index_add(0, index, x)


@function((48, 32), (12, 32), integers((12,), 48))
def index_put(x: Tensor, y: Tensor, index: Tensor) -> Tensor:
    return x.index_put((index,), y, accumulate=True)


@function((48, 64))
def in_place(x: Tensor) -> Tensor:
    out = x.clone()
    out[:, :32].mul_(1.1).add_(x[:, 32:], alpha=0.3)
    out[::2] = out[1::2].sigmoid()
    return out.relu_() / 3


@function((48, 64), (64,))
def in_place_of_views(x: Tensor, shift: Tensor) -> Tensor:
    out = torch.empty_like(x)
    out.copy_(x)
    for begin in range(0, 64, 16):
        column = out.t()[begin : begin + 16]
        column.sub_(column.mean(dim=-1, keepdim=True))
    return out.t_().t_().add_(shift)


@function((32, 48), (48, 16))
def running_products(x: Tensor, y: Tensor) -> Tensor:
    total = torch.zeros(32, 16, dtype=x.dtype)
    for a, b in zip(x.split(16, dim=1), y.split(16), strict=True):
        total += a @ b
    return total


@function((4, 8, 9, 9))
def interpolation(x: Tensor) -> Tensor:
    return F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False)
