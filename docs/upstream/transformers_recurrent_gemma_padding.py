"""transformers: RecurrentGemma reads padding.

The attention layers are given the mask; the recurrent blocks and their convolution are
not, so that tokens before a sequence change what its own tokens get. In a batch of
sequences of several lengths, padded on the left as for generation, all but the longest
are computed otherwise than alone. Where the embedding of the padding token is 0, as a new
model's is, nothing shows: the blocks then read zeros.

Needs transformers. Exit code 1: it shows; 0: it does not; 3: it could not be measured."""

import sys

import torch
import transformers

PAD = 4


@torch.no_grad()
def main() -> int:
    torch.manual_seed(0)
    config = transformers.RecurrentGemmaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=8,
        lru_width=32,
        attention_window_size=16,
        pad_token_id=0,
    )
    model = transformers.RecurrentGemmaForCausalLM(config).double().eval()
    ids = torch.randint(1, 64, (1, 12))
    alone = model(ids, use_cache=False).logits
    print(f"transformers {transformers.__version__}, torch {torch.__version__}, float64")
    worst = 0.0
    for other in (0, 7):  # the padding token, whose embedding is 0 here; any other one
        pad = torch.full((1, PAD), other)
        mask = torch.cat([torch.zeros(1, PAD), torch.ones(1, 12)], -1).long()
        padded = model(
            torch.cat([pad, ids], -1),
            attention_mask=mask,
            position_ids=(mask.cumsum(-1) - 1).clamp(min=0),
            use_cache=False,
        ).logits[:, PAD:]
        change = (padded - alone).abs().max().item() / alone.abs().max().item()
        worst = max(worst, change)
        print(f"{PAD} hidden tokens {other} on the left move the logits by {change:.2e}")
    return int(worst > 1e-9)


if __name__ == "__main__":
    sys.exit(main())
