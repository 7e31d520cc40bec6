"""Operations: what each is to those who measure, judge and report any of them.

Metrics, rules and reports know no tensor by name: they ask `tensor_spec`. An operation
says its tensors in a module of its own that imports no torch, and is listed here."""

from __future__ import annotations

from numdev.operations.attention import tensors as attention
from numdev.operations.specs import TensorSpec

__all__ = ["TENSOR_NAMES", "TensorSpec", "tensor_spec"]

_BY_NAME = {spec.name: spec for spec in attention.TENSORS}
TENSOR_NAMES = tuple(_BY_NAME)


def tensor_spec(name: str) -> TensorSpec:
    """What is known of a tensor by its name: its operation's word, else that `x.grad` is
    the gradient with respect to x, and every other name an output."""
    if name in _BY_NAME:
        return _BY_NAME[name]
    of_input = name.removesuffix(".grad") if name.endswith(".grad") else None
    return TensorSpec(name=name, of_input=of_input)
