"""A small diffusion transformer (Peebles and Xie, "Scalable Diffusion Models with Transformers").

Images are cut into patches, each a token; attention sees all of them. The time of a noisy image
reaches every block through adaLN: it shifts and scales what the norms return and gates what blocks
add. The network predicts the noise (Ho et al., "Denoising Diffusion Probabilistic Models",
eq. 14), under the cosine schedule of Nichol and Dhariwal.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from numdev.training.config import ModelConfig
from numdev.training.network import LAYER_EPS, Attend, Batch, Network, sdpa

TIMES = 1000
"""How many degrees of noise there are."""
LONGEST_PERIOD = 10000.0


def kept_of_image(times: Tensor) -> Tensor:
    """The share of a noisy image's variance that is the image, float32, of times in [0, TIMES):
    cos²((t / T + s) / (1 + s) · π / 2) with s = 0.008."""
    share = ((times.float() + 1) / TIMES + 0.008) / 1.008
    return (share * math.pi / 2).cos().square().clamp(min=1e-5)


def noisy(images: Tensor, noise: Tensor, times: Tensor) -> Tensor:
    """Images [batch, 1, side, side] with as much noise as their times [batch] say."""
    kept = kept_of_image(times)[:, None, None, None]
    return kept.sqrt() * images + (1 - kept).sqrt() * noise


def normed(x: Tensor) -> Tensor:
    return F.layer_norm(x.float(), (x.shape[-1],), eps=LAYER_EPS).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, config: ModelConfig, attend: Attend) -> None:
        super().__init__()
        self.heads, self.attend = config.heads, attend
        self.q_proj, self.k_proj, self.v_proj, self.proj_out = (
            nn.Linear(config.width, config.width) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            project(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        merged: Tensor = self.proj_out(self.attend(q, k, v, False).transpose(1, 2).flatten(2))
        return merged


class MLP(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.proj_in = nn.Linear(config.width, config.hidden)
        self.proj_out = nn.Linear(config.hidden, config.width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.proj_out(F.gelu(self.proj_in(x), approximate="tanh"))
        return out


class Block(nn.Module):
    def __init__(self, config: ModelConfig, attend: Attend) -> None:
        super().__init__()
        self.attn = Attention(config, attend)
        self.mlp = MLP(config)
        self.modulation = nn.Linear(config.width, 6 * config.width)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = self.modulation(time)[:, None].chunk(
            6, dim=-1
        )
        x = x + gate * self.attn(normed(x) * (1 + scale) + shift)
        out: Tensor = x + mlp_gate * self.mlp(normed(x) * (1 + mlp_scale) + mlp_shift)
        return out


class Denoiser(Network):
    def __init__(self, config: ModelConfig, attend: Attend = sdpa) -> None:
        super().__init__()
        assert config.image is not None
        assert config.patch is not None
        self.heads, self.width, self.patch = config.heads, config.width, config.patch
        tokens, pixels = (config.image // config.patch) ** 2, config.patch**2
        self.patch_embed = nn.Linear(pixels, config.width)
        self.position_embed = nn.Parameter(torch.zeros(tokens, config.width))
        self.time_embed = nn.Sequential(
            nn.Linear(config.width, config.width), nn.SiLU(), nn.Linear(config.width, config.width)
        )
        self.blocks = nn.ModuleList(Block(config, attend) for _ in range(config.layers))
        self.head_modulation = nn.Linear(config.width, 2 * config.width)
        self.head = nn.Linear(config.width, pixels)

    def forward(self, images: Tensor, times: Tensor) -> Tensor:
        """The noise in noisy images [batch, 1, side, side] at int64 times [batch]."""
        side = images.shape[-1] // self.patch
        cut = images[:, 0].unflatten(1, (side, self.patch)).unflatten(3, (side, self.patch))
        patches = cut.transpose(2, 3).flatten(3).flatten(1, 2).to(self.patch_embed.weight.dtype)
        x = self.patch_embed(patches) + self.position_embed
        time = F.silu(self.time_embed(self._waves(times).to(x.dtype)))
        for block in self.blocks:
            x = block(x, time)
        shift, scale = self.head_modulation(time)[:, None].chunk(2, dim=-1)
        found = self.head(normed(x) * (1 + scale) + shift)
        found = found.unflatten(1, (side, side)).unflatten(3, (self.patch, self.patch))
        whole: Tensor = found.transpose(2, 3).flatten(3).flatten(1, 2)[:, None]
        return whole

    def loss(self, batch: Batch) -> Tensor:
        """Squared error a pixel."""
        found = self(noisy(batch["images"], batch["noise"], batch["times"]), batch["times"])
        return F.mse_loss(found.float(), batch["noise"])

    def query_weights(self) -> Iterator[Tensor]:
        for block in self.blocks:
            attention = block.attn
            assert isinstance(attention, Attention)
            yield attention.q_proj.weight.unflatten(0, (self.heads, -1))

    @torch.no_grad()
    def start_as_identity(self) -> None:
        """adaLN-Zero: blocks add nothing at first, and the prediction is zero."""
        for block in self.blocks:
            assert isinstance(block, Block)
            block.modulation.weight.zero_()
        self.head_modulation.weight.zero_()
        self.head.weight.zero_()

    def _waves(self, times: Tensor) -> Tensor:
        """[batch, width]: cosines and sines of the times, with periods up to LONGEST_PERIOD."""
        half = self.width // 2
        place = torch.arange(half, device=times.device, dtype=torch.float32)
        angles = times.float()[:, None] * torch.exp(-math.log(LONGEST_PERIOD) * place / half)
        return torch.cat([angles.cos(), angles.sin()], dim=-1)
