"""transformers: a model in float64 computes its rotary angles in float32.

A model that is run in float64 to be the truth of another format is not: its frequencies
are float32, and cosine and sine are computed in float32 whatever the model's dtype.

Needs transformers. Exit code 1: it shows; 0: it does not; 3: it could not be measured."""

import sys

import torch
import transformers


@torch.no_grad()
def main() -> int:
    config = transformers.LlamaConfig(
        hidden_size=64, num_attention_heads=2, num_hidden_layers=1, intermediate_size=64
    )
    model = transformers.LlamaModel(config).double()
    x = torch.zeros(1, 1, 64, dtype=torch.float64)
    positions = torch.arange(4096)[None]
    cos, _ = model.rotary_emb(x, positions)
    frequencies = 10000.0 ** (-torch.arange(0, 32, 2, dtype=torch.float64) / 32)
    angles = positions[0, :, None].double() * frequencies
    exact = torch.cat([angles, angles], -1).cos()
    off = (cos[0] - exact).abs().max().item()
    print(f"transformers {transformers.__version__}, torch {torch.__version__}")
    print(f"dtype of cosine: {cos.dtype}; largest error at 4,096 positions: {off:.2e}")
    return int(off > 1e-12)


if __name__ == "__main__":
    sys.exit(main())
