"""Kernels inside a network that learns: the output is theirs, and so are the gradients.

Recipes that draw random numbers go on from call to call; with a run's state:
`test_train.py`."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from typing import Any

import pytest
import torch
from recipes import drawn
from torch import Tensor

from numdev.cases import AttentionCase
from numdev.errors import Refused, UsageError
from numdev.kernels import Kernel, all_kernels, find
from numdev.kernels.autograd_operation import attend_in_graph, attend_with_gradients_of
from numdev.kernels.emulation import backward
from numdev.kernels.emulation.recipe import recipe
from numdev.kernels.output import Output

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


def case(dtype: torch.dtype = BF16) -> AttentionCase:
    shape: dict[str, Any] = {"batch": 2, "heads": 4, "kv_heads": 2, "head_dim": 16}
    return drawn(40, dtype=dtype, is_causal=True, **shape)


def in_network(
    kernel: Kernel, passed: AttentionCase, options: dict[str, Any], *, autocast: bool = True,
    generator: torch.Generator | None = None, behind: tuple[Kernel, Any] | None = None,
) -> list[torch.Tensor]:  # fmt: skip
    """The output and the gradients of q, k and v, as a network under autocast would get
    them; `behind`: the gradients by another kernel."""
    q, k, v = (x.clone().requires_grad_() for x in (passed.q, passed.k, passed.v))
    inside = dataclasses.replace(passed, q=q, k=k, v=v, grad_out=None)
    with torch.autocast(passed.q.device.type, BF16, enabled=autocast):
        if behind is None:
            out = attend_in_graph(kernel, inside, options, generator)
        else:
            out = attend_with_gradients_of(kernel, inside, options, *behind)
    out.backward(passed.grad_out.to(out.dtype))
    return [out.detach(), *(x.grad for x in (q, k, v) if x.grad is not None)]


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
@pytest.mark.parametrize(("name", "options"), KERNELS, ids=str)
def test_the_numbers_are_those_of_its_own_step(
    name: str, options: Any, dtype: torch.dtype
) -> None:
    """Under autocast, bit for bit, but for the recipes whose large blocks sum in another
    order: those lie within a hundredth of the gradient's own rounding error in bf16."""
    kernel, passed = find(name), case(dtype)
    created = kernel.with_options(options)
    alone = kernel.gradients(passed, **created)
    tensors = (alone.out, alone.dq, alone.dk, alone.dv)
    for ours, theirs in zip(in_network(kernel, passed, created), tensors, strict=True):
        if name != "emulated":
            assert torch.equal(ours, theirs)
        else:
            distance = (ours.double() - theirs.double()).norm() / theirs.double().norm()
            assert distance < 0.02 * 2**-9


@pytest.mark.parametrize("name", ["baseline", "sdpa-flash", "emulated", "reference"])
def test_autocast_changes_nothing_in_either_pass(name: str) -> None:
    """Inputs in fp32 stay so: cast silently in forward alone, they would give other
    numbers."""
    kernel, passed = find(name), case(torch.float32)
    options = kernel.with_options({"compute": "float32"} if name == "emulated" else {})
    with_it = in_network(kernel, passed, options)
    without = in_network(kernel, passed, options, autocast=False)
    assert all(torch.equal(a, b) for a, b in zip(with_it, without, strict=True))


def test_what_cannot_be_trained_with_is_refused() -> None:
    """A kernel without a backward, one whose gradients stop on the way, and one that
    declines."""
    passed = case()
    for kernel, words in (
        (
            Kernel(name="a", function=lambda c: Output(out=c.q), backward=None),
            "no backward pass",
        ),
        (
            Kernel(name="b", function=lambda c: Output(out=c.q.detach())),
            "no autograd graph",
        ),
        (
            Kernel(name="c", function=lambda c: Output(out=c.q), supports=lambda c: "no"),
            "no",
        ),
    ):
        with pytest.raises(Refused, match=words):
            in_network(kernel, passed, {})


def test_options_are_checked_as_everywhere() -> None:
    """Of every kernel, whether or not it runs here."""
    for kernel in all_kernels().values():
        with pytest.raises(UsageError, match=f"{kernel.name} has no option 'bad'"):
            attend_in_graph(kernel, case(), {"bad": 1})
    with pytest.raises(UsageError, match="block_kv is 0; expected a positive"):
        attend_in_graph(find("emulated"), case(), {"block_kv": 0})


def test_graphs_are_freed_without_the_garbage_collector() -> None:
    """No tensor holds the node that made it: memory would grow by every step until
    collected."""

    class Marker:
        pass

    for options in EMULATED:
        kernel, passed = find("emulated"), case(torch.float32)
        gc.disable()
        try:
            q = passed.q.clone().requires_grad_()
            inside = dataclasses.replace(passed, q=q, grad_out=None)
            out = attend_in_graph(kernel, inside, kernel.with_options(options))
            out.grad_fn.metadata["marker"] = Marker()
            gone = weakref.ref(out.grad_fn.metadata["marker"])
            del out
            assert gone() is None, options
        finally:
            gc.enable()


@pytest.mark.parametrize(
    ("ahead", "behind"), [("sdpa-flash", "emulated"), ("emulated", "sdpa-flash")]
)
def test_crossed_kernels_give_each_its_part(ahead: str, behind: str) -> None:
    """The first one's output, the other's gradients, bit for bit, under autocast; both
    differ."""
    passed, s_in_bf16 = (
        case(),
        {"compute": "float32", "preset": "exact", "scores": "bfloat16"},
    )
    options = {"sdpa-flash": {}, "emulated": find("emulated").with_options(s_in_bf16)}
    one, other = (
        in_network(find(name), passed, options[name]) for name in (ahead, behind)
    )
    both = in_network(
        find(ahead), passed, options[ahead], behind=(find(behind), options[behind])
    )
    assert torch.equal(both[0], one[0])
    for x, theirs, not_theirs in zip(both[1:], other[1:], one[1:], strict=True):
        assert torch.equal(x, theirs)
        assert not torch.equal(x, not_theirs)


# --- recipes that draw random numbers -------------------------------------------------


def one_signed(length: int = 64) -> AttentionCase:
    """V and dO of one sign each: the error of delta has one too."""
    return drawn(length, heads=4, head_dim=16, one_sign=True, is_causal=True)


def deltas(**options: Any) -> tuple[Tensor, Tensor]:
    """delta of a recipe with dP in bf16, and that which makes each row of dS sum to zero,
    [heads * rows]. V is -2 at most keys and the number below at some, so O rounds to
    -2."""
    passed = one_signed(512)
    below = torch.rand(passed.v.shape, generator=torch.Generator().manual_seed(1)) < 0.2
    passed = dataclasses.replace(
        passed, v=torch.where(below, -2.0 - 2.0**-6, -2.0).bfloat16()
    )
    r = backward.rounder(passed, recipe(dp="working", **options))
    read = backward.run_forward(r).with_upstream(passed.grad_out)
    blocks = [(slice(0, passed.q_len), slice(0, passed.kv_len))]
    other = backward.rounder(passed, recipe(dp="working", delta_from="dP*P"))
    even = backward.delta_of(dataclasses.replace(read, r=other), blocks)
    return backward.delta_of(read, blocks).flatten(), even.flatten()


def test_a_sham_error_is_as_large_and_has_no_sign() -> None:
    """Row by row the error of delta is as large as without it, to fp32's last bits;
    without it the mean is most of its rms, with it none but chance's."""
    random_signs, even = deltas()
    sham, again = deltas(delta_sign="random")
    assert torch.equal(even, again)
    error, drawn = random_signs - even, sham - even
    assert (
        (drawn.abs() - error.abs()).abs()
        <= 4 * 2.0**-24 * (random_signs.abs() + error.abs())
    ).all()
    rms = error.square().mean().sqrt()
    assert error.mean().abs() > 0.5 * rms
    assert drawn.mean().abs() < 4 * rms / len(error) ** 0.5
    assert 0.4 < ((error * drawn) < 0).float().mean() < 0.6


def test_nothing_is_drawn_where_nothing_is_random() -> None:
    """A generator stays as it is under any other recipe, and under kernels that know of
    none."""
    created = torch.Generator().manual_seed(3)
    before = created.get_state()
    for name, options in (("emulated", {"compute": "float32"}), ("baseline", {})):
        in_network(find(name), one_signed(), options, generator=created)
    assert torch.equal(created.get_state(), before)
