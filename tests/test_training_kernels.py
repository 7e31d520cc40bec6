"""Kernels inside a network that learns: the output is theirs, and so are the gradients."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from numdev.cases import AttentionCase, CaseRef
from numdev.errors import Refused
from numdev.kernels import Kernel, find
from numdev.kernels.output import Output
from numdev.kernels.training import attended, crossed

EMULATED: list[dict[str, Any]] = [
    {"compute": "float32"},
    {"compute": "float64"},
    {"compute": "float32", "preset": "eager"},
    {"compute": "float32", "preset": "qiu2025", "block_q": 16, "block_kv": 16},
    {"compute": "float32", "dp": "working", "delta_from": "dP*P"},
    {"compute": "float32", "out": "exact"},
]
KERNELS = [("baseline", {}), ("sdpa-flash", {}), ("sdpa-math", {}), ("sdpa-default", {})]
KERNELS += [("emulated", options) for options in EMULATED]
BF16 = torch.bfloat16


def case(dtype: torch.dtype = BF16, device: str = "cpu", length: int = 40) -> AttentionCase:
    made = torch.Generator().manual_seed(0)
    q, k, v, dO = (
        torch.randn(2, heads, length, 16, generator=made).to(dtype).to(device)
        for heads in (4, 2, 2, 4)
    )
    return AttentionCase(
        ref=CaseRef(case="t"), q=q, k=k, v=v, scale=0.25, is_causal=True, grad_out=dO
    )


def in_network(
    kernel: Kernel, given: AttentionCase, options: dict[str, Any], *, autocast: bool = True
) -> list[torch.Tensor]:
    """The output and the gradients of q, k and v, as a network under autocast would get them."""
    q, k, v = (x.clone().requires_grad_() for x in (given.q, given.k, given.v))
    inside = dataclasses.replace(given, q=q, k=k, v=v, grad_out=None)
    with torch.autocast(given.q.device.type, BF16, enabled=autocast):
        out = attended(kernel, inside, options)
    assert given.grad_out is not None
    out.backward(given.grad_out.to(out.dtype))
    return [out.detach(), *(x.grad for x in (q, k, v) if x.grad is not None)]


def alone(kernel: Kernel, given: AttentionCase, options: dict[str, Any]) -> list[Any]:
    done = kernel.gradients(given, **options)
    return [done.out, done.dq, done.dk, done.dv]


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
@pytest.mark.parametrize(("name", "options"), KERNELS, ids=str)
def test_the_numbers_are_those_of_the_kernels_own_training_step(
    name: str, options: dict[str, Any], dtype: torch.dtype
) -> None:
    """Under autocast, bit for bit, but for the recipes whose large blocks sum in another order:
    those lie within a hundredth of the gradient's own rounding error in bf16."""
    kernel, given = find(name), case(dtype)
    made = kernel.with_options(options)
    for ours, theirs in zip(
        in_network(kernel, given, made), alone(kernel, given, made), strict=True
    ):
        if name != "emulated":
            assert torch.equal(ours, theirs)
        else:
            assert apart(ours, theirs) < 0.02 * 2**-9


def apart(a: torch.Tensor, b: torch.Tensor) -> float:
    """The root mean square of a - b, relative to that of b."""
    return float((a.double() - b.double()).norm() / b.double().norm())


@pytest.mark.parametrize("name", ["baseline", "sdpa-flash", "emulated", "reference"])
def test_autocast_changes_nothing_in_either_pass(name: str) -> None:
    """Inputs in fp32 stay so: cast silently in forward alone, they would give other numbers."""
    kernel, given = find(name), case(torch.float32)
    options = kernel.with_options({"compute": "float32"} if name == "emulated" else {})
    with_it = in_network(kernel, given, options)
    without = in_network(kernel, given, options, autocast=False)
    assert all(torch.equal(a, b) for a, b in zip(with_it, without, strict=True))


def test_what_cannot_be_trained_with_is_refused() -> None:
    """A kernel without a backward, one whose gradients stop on the way, and one that declines."""
    given = case()
    for kernel, words in (
        (Kernel(name="a", function=lambda c: Output(out=c.q), backward=None), "no backward"),
        (Kernel(name="b", function=lambda c: Output(out=c.q.detach())), "cannot follow"),
        (Kernel(name="c", function=lambda c: Output(out=c.q), supports=lambda c: "no"), "no"),
    ):
        with pytest.raises(Refused, match=words):
            in_network(kernel, given, {})


def test_graphs_are_freed_without_the_garbage_collector() -> None:
    """No tensor holds the node that made it: memory would grow by every step until collected."""
    import gc
    import weakref

    class Marker:
        pass

    for options in EMULATED:
        kernel, given = find("emulated"), case(torch.float32)
        gc.disable()
        try:
            q = given.q.clone().requires_grad_()
            inside = dataclasses.replace(given, q=q, grad_out=None)
            out = attended(kernel, inside, kernel.with_options(options))
            assert out.grad_fn is not None
            out.grad_fn.metadata["marker"] = Marker()
            gone = weakref.ref(out.grad_fn.metadata["marker"])
            del out
            assert gone() is None, options
        finally:
            gc.enable()


# --- the output of one kernel, the gradients of another ------------------------------------------


@pytest.mark.parametrize(
    ("ahead", "behind"), [("sdpa-flash", "emulated"), ("emulated", "sdpa-flash")]
)
def test_crossed_kernels_give_each_its_part(ahead: str, behind: str) -> None:
    """The output is the first one's and the gradients are the other's, bit for bit, under autocast;
    and the two do differ, in both."""
    given, s_in_bf16 = case(), {"compute": "float32", "preset": "exact", "scores": "bfloat16"}
    options = {"sdpa-flash": {}, "emulated": find("emulated").with_options(s_in_bf16)}
    one, other = (in_network(find(name), given, options[name]) for name in (ahead, behind))
    q, k, v = (x.clone().requires_grad_() for x in (given.q, given.k, given.v))
    inside = dataclasses.replace(given, q=q, k=k, v=v, grad_out=None)
    with torch.autocast("cpu", BF16):
        out = crossed(find(ahead), inside, options[ahead], find(behind), options[behind])
    assert given.grad_out is not None
    out.backward(given.grad_out.to(out.dtype))
    assert torch.equal(out.detach(), one[0])
    for x, theirs, not_theirs in zip((q, k, v), other[1:], one[1:], strict=True):
        assert x.grad is not None
        assert torch.equal(x.grad, theirs)
        assert not torch.equal(x.grad, not_theirs)
