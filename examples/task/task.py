"""What a call gets and returns."""

import torch

input_t = tuple[dict[str, torch.Tensor], dict[str, float], torch.Tensor]
output_t = torch.Tensor
