"""transformers: RoFormerForCausalLM sees later tokens unless its configuration says that
it is a decoder, which is not the default; the class runs, with a line in the log.

Needs transformers. Exit code 1: it shows; 0: it does not; 3: it could not be measured."""

import sys

import torch
import transformers


@torch.no_grad()
def main() -> int:
    print(f"transformers {transformers.__version__}, torch {torch.__version__}, float64")
    change = {}
    for is_decoder in (False, True):
        torch.manual_seed(0)
        config = transformers.RoFormerConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=32,
            is_decoder=is_decoder,
        )
        model = transformers.RoFormerForCausalLM(config).double().eval()
        ids = torch.randint(1, 64, (1, 12))
        other = ids.clone()
        other[0, -1] = ids[0, -1] % 62 + 1
        a, b = (model(x).logits[:, :-1] for x in (ids, other))
        change[is_decoder] = (a - b).abs().max().item() / a.abs().max().item()
        print(
            f"is_decoder={is_decoder}: another last token moves the logits before it by "
            f"{change[is_decoder]:.2e}"
        )
    return int(change[False] > 1e-9)


if __name__ == "__main__":
    sys.exit(main())
