"""A submission, written out."""

import torch
from task import input_t, output_t


def custom_kernel(data: input_t) -> output_t:
    tensors, config, output = data
    x = tensors["x"].float() / config["temperature"]
    powers = torch.exp(x - x.amax(dim=-1, keepdim=True))
    share = powers / powers.sum(dim=-1, keepdim=True)
    return output.copy_(share * tensors["weight"])
