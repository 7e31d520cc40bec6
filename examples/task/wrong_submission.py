"""A submission that forgets the temperature: the task's own check passes it."""

import torch
from task import input_t, output_t


def custom_kernel(data: input_t) -> output_t:
    tensors, _, output = data
    share = torch.softmax(tensors["x"].float(), dim=-1)
    return output.copy_(share * tensors["weight"])
