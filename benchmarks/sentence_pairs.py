"""A sentence encoder with the loss that such encoders are trained with, as a factory for `--model`.

Each is to find its neighbour: sequences 2i and 2i + 1 of a batch are consecutive passages of one
text, their vectors are the mean over tokens, and the loss is the cross-entropy of 20 times the
cosines of every first with every second (all-MiniLM-L6-v2's objective, with passages of a text for
its pairs of sentences). A plain encoder has no loss, so that its upstream gradients would be drawn.

    PYTHONPATH=benchmarks numdev diagnose MODEL/model.safetensors --model sentence_pairs:build \\
        --tokenizer MODEL --text some.txt
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import BertConfig, BertModel

SHARPNESS = 20.0
"""What cosines are multiplied with: that of the model's training script."""


class Pairs(BertModel):  # type: ignore[misc]
    """The encoder under its weights' own names, asked for nothing but the loss."""

    def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
        words = super().forward(input_ids=input_ids).last_hidden_state
        vectors = F.normalize(words.mean(dim=1), dim=-1)
        cosines = vectors[0::2] @ vectors[1::2].mT
        return {
            "loss": F.cross_entropy(
                SHARPNESS * cosines, torch.arange(len(cosines), device=cosines.device)
            )
        }


def build(config: Mapping[str, Any]) -> Pairs:
    return Pairs(BertConfig(**config))
