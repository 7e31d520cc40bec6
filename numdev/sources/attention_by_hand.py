"""Notice attention that a model multiplies by hand, by what it computes, or has computed
by another operator than SDPA, by that operator's name.

Two tensors with a batch are multiplied: scores. A softmax or an exponential makes weights
of them, and the product of weights with another tensor is attention. In between come
scales, masks, casts and views, and no layer with parameters. A router's softmax is of no
such product, a depth's expectation multiplies none. Unseen are tensors without a batch,
sums of products that no product makes, and what is no operator of PyTorch."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Literal

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

Stage = Literal["scores", "weights"]
BATCHED = 3  # axes of a product with a batch
# Names of functions and methods of torch, without the underscores around them
PRODUCTS = frozenset({"matmul", "rmatmul", "bmm", "baddbmm", "einsum"})
EXPONENTIALS = frozenset({"softmax", "exp", "exp2"})
# After both scores are scores, and weights are weights
ARITHMETIC = frozenset(
    {"add", "iadd", "radd", "sub", "isub", "rsub", "subtract", "neg", "where", "tanh"}
    | {"mul", "imul", "rmul", "multiply", "div", "idiv", "truediv", "itruediv", "divide"}
    | {"masked_fill", "clamp", "clip", "clamp_min", "clamp_max", "maximum", "dropout"}
)
CASTS_AND_VIEWS = frozenset(
    {"to", "float", "double", "half", "bfloat16", "type", "type_as", "nan_to_num"}
    | {"view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "permute"}
    | {"transpose", "swapaxes", "contiguous", "clone", "expand", "getitem", "narrow"}
    | {"cat", "concat", "index_select"}
)
KEEPS = ARITHMETIC | CASTS_AND_VIEWS
# In names of operators that attend: flex_attention, _flash_attn_forward. Such a one reads
# at least a query, a key and a value.
ATTENDS, READ = re.compile("attention|attn|sdpa|fmha"), 3


class AttentionByHand:
    """The scores and weights that are in memory, followed from function to function."""

    def __init__(self) -> None:
        self.stages = WeakTensorKeyDictionary()

    def ends_attention(
        self, func: Callable[..., object], arguments: Sequence[object], result: object
    ) -> bool:
        """Whether `func`, which has made `result` of `arguments`, was the second product
        of an attention, or an operator that attends. Notes what it has made of scores and
        weights: its result where that is one tensor; no other result is followed."""
        name = getattr(func, "__name__", "").strip("_")
        if ATTENDS.search(name):
            tensors = [x for x in tree_leaves(arguments) if isinstance(x, Tensor)]
            batched = [x for x in tensors if x.ndim >= BATCHED and x.is_floating_point()]
            return len(batched) >= READ
        if name not in PRODUCTS | EXPONENTIALS | KEEPS or not isinstance(result, Tensor):
            return False
        tensors = [x for x in tree_leaves(arguments) if isinstance(x, Tensor)]
        stages = {self.stages.get(x) for x in tensors} - {None}
        stage: Stage | None = None
        if name in PRODUCTS:
            if "weights" in stages:
                return True
            batched = [x for x in tensors if x.ndim >= BATCHED]
            is_of_layer = any(isinstance(x, nn.Parameter) for x in tensors)
            stage = "scores" if len(batched) > 1 and not is_of_layer else None
        elif "weights" in stages or (stages and name in EXPONENTIALS):
            stage = "weights"
        elif stages:
            stage = "scores"
        if stage is not None:
            self.stages[result] = stage
        return False
