"""More small functions, by which no limit of a check beside a reference was chosen: what
limits do to them is reported (`functions.py`).

As `small_functions`, none casts."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from small_functions import Registry, integers, positive
from small_functions import function as registered
from torch import Tensor

MORE: Registry = {}
function = partial(registered, into=MORE)


# --- elementwise and quantised --------------------------------------------------------


@function((48, 128), (128,))
def scaled_tanh(x: Tensor, alpha: Tensor) -> Tensor:
    return torch.tanh(alpha * x) * 1.7 + 0.1 * x


@function((48, 128))
def hard_swish(x: Tensor) -> Tensor:
    return x * F.relu6(x + 3) / 6


@function((48, 128))
def fake_quantised(x: Tensor) -> Tensor:
    scale = x.abs().amax(dim=-1, keepdim=True) / 7
    return (x / scale).round().clamp(-7, 7) * scale


@function(positive((32,)), (16,))
def sinusoids(place: Tensor, phase: Tensor) -> Tensor:
    angle = place[:, None] * torch.exp(-0.3 * torch.arange(16, dtype=place.dtype)) + phase
    return torch.cat((angle.sin(), angle.cos()), dim=-1)


# --- norms ----------------------------------------------------------------------------


@function((8, 16, 10, 10), (16,), (16,))
def instance_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.instance_norm(x, weight=weight, bias=bias)


@function((48, 96), (48, 96), (96,))
def added_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return F.rms_norm(total, (96,), weight, 1e-5), total


@function((48, 128), (128,), (128,))
def layer_norm_by_hand(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    centred = x - x.mean(dim=-1, keepdim=True)
    variance = centred.square().mean(dim=-1, keepdim=True)
    return centred / torch.sqrt(variance + 1e-5) * weight + bias


@function((40, 64), (40, 1))
def weight_norm(v: Tensor, g: Tensor) -> Tensor:
    return g * v / v.norm(dim=1, keepdim=True)


@function((6, 12, 20), (12,))
def group_norm_by_hand(x: Tensor, weight: Tensor) -> Tensor:
    parts = x.reshape(6, 3, 80)
    mean, variance = parts.mean(-1, keepdim=True), parts.var(-1, keepdim=True)
    normed = ((parts - mean) * torch.rsqrt(variance + 1e-5)).reshape(x.shape)
    return normed * weight[:, None]


# --- products -------------------------------------------------------------------------


@function((32, 64), (96, 64), (96, 64), (64, 96))
def swiglu_mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down) * 0.02


@function((32, 64), (64,), (48, 64))
def norm_and_linear(x: Tensor, weight: Tensor, matrix: Tensor) -> Tensor:
    return F.linear(F.rms_norm(x, (64,), weight, 1e-6), matrix)


@function((32, 64), (48, 64), (8, 64), (48, 8))
def low_rank_adapter(x: Tensor, matrix: Tensor, down: Tensor, up: Tensor) -> Tensor:
    return F.linear(x, matrix) + 0.25 * F.linear(F.linear(x, down), up)


@function((48, 512), (512, 24))
def long_product(x: Tensor, y: Tensor) -> Tensor:
    return x @ y


@function((24, 24), (24, 24))
def triangular_product(x: Tensor, y: Tensor) -> Tensor:
    return torch.triu(x) @ torch.tril(y)


@function((2, 8, 24, 16), (2, 2, 24, 16), (2, 2, 24, 16))
def grouped_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (x.repeat_interleave(4, dim=1) for x in (k, v))
    place = torch.arange(24)
    hidden = (place[:, None] < place) | (place[:, None] - place > 8)
    scores = (q @ k.mT * 0.25).masked_fill(hidden, float("-inf"))
    return scores.softmax(dim=-1) @ v


@function((2, 4, 24, 16), (2, 4, 24, 16), (2, 4, 24, 16))
def fused_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@function((2, 24, 16), (2, 24, 16), (2, 24, 16))
def linear_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k = F.elu(q) + 1, F.elu(k) + 1
    return (q @ (k.mT @ v)) / (q @ k.sum(dim=1)[..., None])


@function((4, 12, 12, 12), (18, 4, 3, 3), (18,))
def grouped_convolution(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.relu(F.conv2d(x, weight, bias, groups=3, padding=1))


@function((3, 8, 7, 7), (8, 6, 3, 3))
def transposed_convolution(x: Tensor, weight: Tensor) -> Tensor:
    return F.conv_transpose2d(x, weight, stride=2)


@function((3, 8, 48), (12, 8, 3), (12,))
def dilated_convolution(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.conv1d(x, weight, bias, dilation=4, padding=4)


@function((2, 4, 6, 8, 8), (6, 4, 3, 3, 3))
def volume_convolution(x: Tensor, weight: Tensor) -> Tensor:
    return F.conv3d(x, weight)


@function((24, 12), (24, 12))
def distances(x: Tensor, y: Tensor) -> Tensor:
    return (x[:, None] - y[None]).square().sum(-1).sqrt()


@function((24, 32), (20, 32))
def cosine_similarity(x: Tensor, y: Tensor) -> Tensor:
    return F.cosine_similarity(x[:, None], y[None], dim=-1)


# --- losses ---------------------------------------------------------------------------


@function((48, 20), integers((48,), 20))
def focal_loss(x: Tensor, target: Tensor) -> Tensor:
    nll = F.cross_entropy(x, target, reduction="none")
    return 0.25 * (1 - torch.exp(-nll)).square() * nll


@function((64, 16), (64, 16), (64, 16))
def triplet_loss(x: Tensor, near: Tensor, far: Tensor) -> Tensor:
    return F.triplet_margin_loss(x, near, far, reduction="none")


@function((32, 24), (32, 24))
def contrastive_loss(x: Tensor, y: Tensor) -> Tensor:
    scores = F.normalize(x, dim=-1) @ F.normalize(y, dim=-1).T / 0.2
    return F.cross_entropy(scores, torch.arange(32), reduction="none")


@function((64, 64), integers((64,), 64))
def smoothed_cross_entropy(x: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(x, target, label_smoothing=0.1)


@function((64, 16), positive((64, 16)))
def binary_cross_entropy(x: Tensor, y: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(x, y / 1.1)


@function((64, 32), (64, 32))
def mean_huber(x: Tensor, y: Tensor) -> Tensor:
    return F.huber_loss(x, y, delta=0.8)


# --- recurrences ----------------------------------------------------------------------


@function((2, 20, 8), (2, 20, 8), (8, 4), (2, 20, 4), (2, 20, 4))
def selective_scan(x: Tensor, step: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    dt = F.softplus(step)
    state, outputs = torch.zeros(2, 8, 4, dtype=x.dtype), []
    for t in range(20):
        decay = torch.exp(-dt[:, t, :, None] * a.exp())
        state = decay * state + (dt[:, t] * x[:, t])[..., None] * b[:, t, None]
        outputs.append((state * c[:, t, None]).sum(-1))
    return torch.stack(outputs, dim=1)


@function((8, 12), (8, 16), (8, 16), (64, 12), (64, 16))
def lstm_cell(x: Tensor, h: Tensor, c: Tensor, w: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:  # fmt: skip
    i, f, g, o = (F.linear(x, w) + F.linear(h, u)).chunk(4, dim=-1)
    new = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(new), new


@function((2, 16, 8), (2, 16, 8), (2, 16, 8), (2, 16, 1))
def delta_rule(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    state, outputs = torch.zeros(2, 8, 8, dtype=q.dtype), []
    for t in range(16):
        key = F.normalize(k[:, t], dim=-1)[..., None]
        lacking = v[:, t, None] - key.mT @ state
        state = state + torch.sigmoid(beta[:, t, :, None]) * key @ lacking
        outputs.append((q[:, t, None] @ state)[:, 0])
    return torch.stack(outputs, dim=1)


@function((48, 40))
def reversed_cumulative_sum(x: Tensor) -> Tensor:
    return x.flip(-1).cumsum(dim=-1).flip(-1)


@function((48, 40))
def running_logsumexp(x: Tensor) -> Tensor:
    return torch.logcumsumexp(x, dim=-1)


# --- indices and views ----------------------------------------------------------------


@function((2, 4, 24, 16), (24, 8))
def rope_interleaved(x: Tensor, angle: Tensor) -> Tensor:
    a, b = x[..., ::2], x[..., 1::2]
    c, s = angle.cos(), angle.sin()
    return torch.stack((a * c - b * s, a * s + b * c), dim=-1).flatten(-2)


@function((60, 16), integers((20, 6), 60))
def embedding_bag(table: Tensor, tokens: Tensor) -> Tensor:
    return F.embedding_bag(tokens, table, mode="mean")


@function((32, 16), (16, 6), (6, 16, 12))
def mixture_of_experts(x: Tensor, router: Tensor, experts: Tensor) -> Tensor:
    weights, chosen = (x @ router).softmax(dim=-1).topk(2, dim=-1)
    weights = weights / weights.sum(dim=-1, keepdim=True)
    out = torch.einsum("td,tkdh->tkh", x, experts[chosen])
    return (weights[..., None] * out).sum(dim=1)


@function((80, 12), integers((80,), 10))
def segment_means(x: Tensor, segment: Tensor) -> Tensor:
    zero = torch.zeros(10, 12, dtype=x.dtype)
    index = segment[:, None].expand(80, 12)
    return zero.scatter_reduce(0, index, x, "mean", include_self=False)


@function((80,), integers((80,), 10))
def segment_softmax(x: Tensor, segment: Tensor) -> Tensor:
    e = torch.exp(x)
    return e / torch.zeros(10, dtype=x.dtype).index_add(0, segment, e)[segment]


@function((30, 12), (30, 12), integers((30,), 30))
def scatter_update(x: Tensor, y: Tensor, index: Tensor) -> Tensor:
    return x.scatter_add(0, index[:, None].expand(30, 12), y * 0.5)


@function((12, 40, 8), integers((12,), 40))
def masked_mean(x: Tensor, length: Tensor) -> Tensor:
    inside = torch.arange(40) <= length[:, None]
    return (x * inside[..., None]).sum(1) / (length[:, None] + 1)


@function((4, 16, 6, 6))
def shuffled_pixels(x: Tensor) -> Tensor:
    return F.adaptive_avg_pool2d(F.pixel_shuffle(x, 2), 4) * 1.3


@function((24, 40))
def sorted_differences(x: Tensor) -> Tensor:
    return x.sort(dim=-1).values.diff(dim=-1)
