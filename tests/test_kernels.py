"""The registry, plain functions as kernels, plugins, and availability on machines not at hand."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import math
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from oracles import assert_within, attention, error_bounds, make_case
from torch import Tensor

from numdev import kernels
from numdev.cases import AttentionCase
from numdev.errors import MeasurementError, UsageError, closest
from numdev.kernels import Kernel, Output, Refused, Requirement, all_kernels, find, kernel
from numdev.kernels.plain import adapt
from numdev.kernels.reference import attend, reference
from numdev.system import System

BUILT_IN = [
    "reference",
    "floor",
    "baseline",
    "emulated",
    "sdpa-math",
    "sdpa-flash",
    "sdpa-efficient",
    "sdpa-cudnn",
    "sdpa-default",
    "triton-flash",
    "flex",
    "flash-attn-2",
    "flash-attn-3",
    "flash-attn-4",
    "xformers",
    "sharded",
    "context-parallel",
]
CPU = System(device="cpu", cpu="a laptop", packages={"torch": "2.13.0"})
H200 = System(
    device="cuda",
    gpu="NVIDIA H200",
    capability=(9, 0),
    packages={"torch": "2.13.0", "triton": "3.6.0"},
)
V100 = System(device="cuda", gpu="Tesla V100", capability=(7, 0), packages={"torch": "2.13.0"})


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Kernel]]:
    """A copy of the registry, which the test may fill; what it installs is forgotten after it."""
    copy = all_kernels()
    monkeypatch.setattr(kernels, "_registry", copy)
    yield copy
    kernels.load_all.cache_clear()


# --- the registry --------------------------------------------------------------------------------


def test_built_in_kernels_are_there() -> None:
    """The built-in kernels come first, in their order, each with a line that says what it is."""
    known = all_kernels()
    assert list(known)[: len(BUILT_IN)] == BUILT_IN
    assert all(known[name].summary.endswith(".") for name in BUILT_IN)
    assert all(known[name].name == name for name in known)


def test_registering_a_kernel() -> None:
    """A decorated function is found by its name, with its options and first line, and stays
    callable."""

    @kernel("mine")
    def mine(case: AttentionCase, *, block: int = 64, exact: bool = False) -> Output:
        """A kernel of mine.

        With more to say.
        """
        return Output(out=case.q * block)

    found = find("mine")
    assert (found.name, found.summary) == ("mine", "A kernel of mine.")
    assert found.options == {"block": 64, "exact": False}
    assert found.function is mine
    case = make_case()
    assert torch.equal(found.attend(case, **found.with_options({"block": 2})).out, case.q * 2)


def test_two_kernels_of_one_name_are_refused(registry: dict[str, Kernel]) -> None:
    """A taken name is refused, naming both functions; the first one stays."""
    before = registry["baseline"]
    with pytest.raises(UsageError, match="two kernels are called 'baseline'") as caught:

        @kernel("baseline")
        def other(case: AttentionCase) -> Output:
            raise NotImplementedError

    assert "numdev.kernels.baseline:baseline" in caught.value.message
    assert "other" in caught.value.message
    assert find("baseline") is before


def test_registering_the_same_function_again_is_fine() -> None:
    """A module that is reloaded registers its kernels anew."""
    for factor in (1.0, 2.0):

        @kernel("again")
        def again(case: AttentionCase, *, factor: float = factor) -> Output:
            return Output(out=case.q)

    assert find("again").options == {"factor": 2.0}


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("sdpa-flsh", "did you mean 'sdpa-flash'?"),
        ("refrence", "did you mean 'reference'?"),
        (
            "zzz",
            "known: baseline, context-parallel, emulated, flash-attn-2, ",
        ),
        ("", "known: baseline"),
    ],
)
def test_an_unknown_kernel_gets_the_closest(name: str, hint: str) -> None:
    """A misspelt name is answered with the nearest one, or with all of them."""
    with pytest.raises(UsageError, match="unknown kernel") as caught:
        find(name)
    assert caught.value.hint is not None
    assert caught.value.hint.startswith(hint)


def test_closest_among_none() -> None:
    """A hint is a sentence also when there is nothing to choose from."""
    assert closest("x", []) == "there is none to choose from"


def test_unknown_options_are_refused() -> None:
    """An option a kernel does not have is named, with the closest; defaults fill in the rest."""

    @kernel("tiled")
    def tiled(case: AttentionCase, *, block_q: int = 64, block_kv: int = 32) -> Output:
        return Output(out=case.q)

    found = find("tiled")
    assert found.with_options({}) == {"block_q": 64, "block_kv": 32}
    assert found.with_options({"block_kv": 8}) == {"block_q": 64, "block_kv": 8}
    with pytest.raises(UsageError, match="kernel tiled has no option 'blok_q'; did you mean 'bloc"):
        found.with_options({"blok_q": 1})
    with pytest.raises(UsageError, match="kernel baseline has no option 'x'; it has no options"):
        find("baseline").with_options({"x": 1})


def test_an_option_needs_a_default() -> None:
    """Every option stands in every row, so one without a value cannot be registered."""
    with pytest.raises(UsageError, match="has no default for its option 'block'"):

        @kernel("incomplete")
        def incomplete(case: AttentionCase, *, block: int) -> Output:
            return Output(out=case.q)


def test_declining_a_case() -> None:
    """What `supports` says becomes the reason, and the function is not called."""

    def never(case: AttentionCase) -> Output:
        raise AssertionError

    declines = Kernel(name="x", function=never, supports=lambda case: "not today")
    with pytest.raises(Refused, match="not today"):
        declines.attend(make_case())


# --- what a kernel may return --------------------------------------------------------------------

SHAPE, ROWS = (1, 2, 4, 4), (1, 2, 4)


@pytest.mark.parametrize(
    ("returned", "lse"),
    [
        (torch.zeros(SHAPE), None),
        ((torch.zeros(SHAPE),), None),
        ((torch.zeros(SHAPE), torch.zeros(ROWS)), ROWS),
        ((torch.zeros(SHAPE), torch.zeros(ROWS), "more", 3), ROWS),
        ((torch.zeros(SHAPE), torch.zeros(1, 2, 32)), None),  # something else, not to be guessed at
        ((torch.zeros(SHAPE), None), None),
        (Output(out=torch.zeros(SHAPE), lse=torch.zeros(ROWS)), ROWS),
        (Output(out=torch.zeros(SHAPE, dtype=torch.bfloat16)), None),
    ],
)
def test_outputs_that_are_taken(returned: Any, lse: tuple[int, ...] | None) -> None:
    """A kernel returns an Output, a tensor, or a tuple that begins with the output."""
    output = Kernel(name="x", function=lambda case: returned).attend(make_case())
    assert tuple(output.out.shape) == SHAPE
    assert (None if output.lse is None else tuple(output.lse.shape)) == lse


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        (None, "it returned NoneType as out"),
        ((), "it returned tuple as out"),
        ([torch.zeros(SHAPE)], "it returned list as out"),
        (torch.zeros(1, 4, 2, 4), r"it returned shape \[1, 4, 2, 4\] as out; expected .*\[1, 2, 4"),
        (torch.zeros(2, 4, 4), "it returned shape"),
        (torch.zeros(SHAPE, dtype=torch.int32), r"it returned torch\.int32 on cpu"),
        (torch.zeros(SHAPE, device="meta"), r"it returned torch\.float32 on meta"),
        (Output(out=torch.zeros(1)), "it returned shape"),
        (Output(out=torch.zeros(SHAPE), lse=torch.zeros(1, 2)), r"returned shape \[1, 2\] as lse"),
    ],
)
def test_outputs_that_are_refused(returned: Any, says: str) -> None:
    """Anything else is an error with what it was, before a metric can trip over it."""
    with pytest.raises(MeasurementError, match=says):
        Kernel(name="x", function=lambda case: returned).attend(make_case())


# --- functions on the command line ---------------------------------------------------------------


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Write a module that can be imported in this test only; gives its name."""
    monkeypatch.syspath_prepend(tmp_path)
    written: list[str] = []

    def write(source: str) -> str:
        name = f"numdev_test_module_{len(written)}"
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(source), encoding="utf-8")
        monkeypatch.delitem(sys.modules, name, raising=False)
        written.append(name)
        return name

    return write


def test_a_function_of_q_k_v(module: Callable[[str], str]) -> None:
    """`module:function` is a kernel under that name, without being registered."""
    name = module(
        """
        import torch

        def attention(q, k, v):
            "My attention."
            return torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, dim=-1) @ v
        """
    )
    found = find(f"{name}:attention")
    assert (found.name, found.summary) == (f"{name}:attention", "My attention.")
    assert found.name not in all_kernels()
    case = make_case()
    torch.testing.assert_close(found.attend(case).out, attend(case).out)


def test_a_function_of_a_case(module: Callable[[str], str]) -> None:
    """A function whose first parameter is `case` gets the case and its options."""
    name = module(
        """
        from numdev.kernels import Output

        def attention(case, *, factor=3.0):
            return Output(out=case.v[:, :, :1].expand_as(case.q) * factor, ran="by hand")
        """
    )
    found = find(f"{name}:attention")
    assert found.options == {"factor": 3.0}
    output = found.attend(make_case(), factor=2.0)
    assert output.ran == "by hand"
    assert torch.equal(output.out[:, :, 0], make_case().v[:, :, 0] * 2)


def test_a_registered_function_by_its_path(module: Callable[[str], str]) -> None:
    """A path to a function that registers itself gives the registered kernel, requirements and
    all."""
    name = module(
        """
        from numdev.kernels import Output, Requirement, kernel

        @kernel("by-path", requires=Requirement(device="cuda"))
        def attention(case):
            return Output(out=case.q)
        """
    )
    found = find(f"{name}:attention")
    assert found is find("by-path")
    assert found.missing(CPU) == "needs CUDA, and this audit runs on CPU"


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("no_such_module_at_all:f", "cannot import 'no_such_module_at_all'.*ModuleNotFoundError"),
        (":f", "cannot import ''"),
        ("{}:atention", "has no function 'atention'; did you mean 'attention'"),
        ("{}:", "has no function ''"),
        ("{}:NUMBER", "has no function 'NUMBER'"),
    ],
)
def test_a_path_that_leads_nowhere(path: str, says: str, module: Callable[[str], str]) -> None:
    """What cannot be imported, or is no function, is said with the path and the closest name."""
    name = module("NUMBER = 3\ndef attention(q, k, v): return q\n")
    with pytest.raises(UsageError, match=says):
        find(path.format(name))


def test_a_module_that_raises(module: Callable[[str], str]) -> None:
    """An import runs foreign code; what it raises is reported with the path, as a usage error."""
    name = module("raise ZeroDivisionError('oh')")
    with pytest.raises(UsageError, match=rf"{name}:f.*ZeroDivisionError\('oh'\)"):
        find(f"{name}:f")


# --- plain functions: parameters by their names --------------------------------------------------


def recorded(parameters: str) -> tuple[Kernel, dict[str, Any]]:
    """A plain function with these parameters as a kernel, and the arguments it will be given."""
    seen: dict[str, Any] = {}
    scope: dict[str, Any] = {"seen": seen}
    exec(
        f"def f({parameters}):\n"
        "    seen.update(locals())\n"
        "    return seen['q'].new_zeros(*seen['q'].shape[:3], seen['v'].shape[-1])\n",
        scope,
    )
    return adapt("plain", scope["f"]), seen


def reason(found: Kernel, case: AttentionCase) -> str:
    with pytest.raises(Refused) as refused:
        found.attend(case)
    return refused.value.message


@pytest.mark.parametrize("causal", ["is_causal", "causal"])
@pytest.mark.parametrize("scale", ["scale", "softmax_scale", "sm_scale", "scaling"])
def test_causality_and_scale(causal: str, scale: str) -> None:
    """They are passed under whatever name the function has for them."""
    found, seen = recorded(f"q, k, v, {causal}=False, {scale}=None")
    found.attend(make_case(is_causal=True, scale=0.3))
    assert (seen[causal], seen[scale]) == (True, 0.3)


@pytest.mark.parametrize("name", ["attn_mask", "mask", "attention_mask"])
def test_masks(name: str) -> None:
    """A mask is passed as it is; causality and window become one where no parameter takes them."""
    found, seen = recorded(f"q, k, v, {name}=None")
    case = make_case(mask=("bool", "qk"))
    found.attend(case)
    assert torch.equal(seen[name], case.mask)
    found.attend(make_case(is_causal=True, window=(1, 0)))
    lower = torch.ones(4, 5, dtype=torch.bool).tril()
    assert torch.equal(seen[name], lower & lower.triu(-1))
    found.attend(make_case())
    assert seen[name] is None


@pytest.mark.parametrize("name", ["bias", "attn_bias"])
def test_a_bias_is_additive(name: str) -> None:
    """A parameter that is called a bias is added to the scores: it never gets a bool mask."""
    found, seen = recorded(f"q, k, v, {name}=None")
    found.attend(make_case(is_causal=True))
    lower = torch.ones(4, 5, dtype=torch.float64).tril()
    assert torch.equal(seen[name], torch.zeros_like(lower).masked_fill(lower == 0, -math.inf))
    assert seen[name].dtype == torch.float64


def test_a_mask_says_everything_at_once() -> None:
    """With a mask, causality goes into it, and the function is told not to be causal besides."""
    found, seen = recorded("q, k, v, mask=None, causal=True")
    found.attend(make_case(mask=torch.ones(4, 5, dtype=torch.bool), is_causal=True))
    assert torch.equal(seen["mask"], torch.ones(4, 5, dtype=torch.bool).tril())
    assert seen["causal"] is False


def test_functions_that_are_causal_by_default() -> None:
    """A default of causal=True does not get at a case that is not causal."""
    found, seen = recorded("q, k, v, causal=True")
    found.attend(make_case())
    assert seen["causal"] is False


def test_an_offset_becomes_a_mask() -> None:
    """`causal` is PyTorch's top-left alignment; another one needs a mask."""
    found, seen = recorded("q, k, v, is_causal=False, attn_mask=None")
    found.attend(make_case(is_causal=True, causal_offset=1))
    assert seen["is_causal"] is False
    assert torch.equal(seen["attn_mask"], torch.ones(4, 5, dtype=torch.bool).tril(1))
    found, _ = recorded("q, k, v, is_causal=False")
    assert "takes no mask" in reason(found, make_case(is_causal=True, causal_offset=1))


@pytest.mark.parametrize("name", ["window_size", "window"])
def test_windows(name: str) -> None:
    """A window is a pair with -1 for no limit, as flash-attention has it."""
    found, seen = recorded(f"q, k, v, causal=False, {name}=(-1, -1)")
    found.attend(make_case(window=(3, None), is_causal=True))
    assert (seen[name], seen["causal"]) == ((3, -1), True)
    found.attend(make_case())
    assert seen[name] == (-1, -1)


def test_soft_cap_and_sinks() -> None:
    """They are passed where the case has them, and left at the function's default elsewhere."""
    found, seen = recorded("q, k, v, softcap=0.0, s_aux=None")
    case = make_case(softcap=5.0, sinks=True)
    found.attend(case)
    assert seen["softcap"] == 5.0
    assert torch.equal(seen["s_aux"], case.sinks)
    found.attend(make_case())
    assert (seen["softcap"], seen["s_aux"]) == (0.0, None)


def test_grouped_heads() -> None:
    """Keys and values are repeated, unless the function can be told that heads are grouped."""
    case = make_case(heads=4, kv_heads=2)
    found, seen = recorded("q, k, v")
    found.attend(case)
    assert torch.equal(seen["k"], case.k[:, [0, 0, 1, 1]])
    assert torch.equal(seen["v"], case.v[:, [0, 0, 1, 1]])
    found, seen = recorded("q, k, v, enable_gqa=False")
    found.attend(case)
    assert seen["enable_gqa"] is True
    assert torch.equal(seen["k"], case.k)
    found.attend(make_case())
    assert seen["enable_gqa"] is False


def test_required_parameters_are_always_given() -> None:
    """A known parameter without a default gets "none" in flash-attention's words."""
    found, seen = recorded("q, k, v, causal, sm_scale, mask, window, softcap, sinks, enable_gqa")
    found.attend(make_case())
    none = {"causal": False, "mask": None, "window": (-1, -1), "softcap": 0.0, "sinks": None}
    assert {name: seen[name] for name in none} == none
    assert (seen["sm_scale"], seen["enable_gqa"]) == (0.5, False)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"mask": ("bool", "qk")}, "takes no mask: no parameter is named attn_mask or mask or"),
        ({"is_causal": True}, "takes no mask"),
        ({"window": (1, 1)}, "takes no mask"),
        ({"softcap": 5.0}, "takes no softcap: no parameter is named softcap or soft_cap or"),
        ({"sinks": True}, "takes no sinks"),
        ({"scale": 0.3}, "takes no scale"),
    ],
)
def test_what_a_function_cannot_be_told_is_refused(fields: dict[str, Any], says: str) -> None:
    """A case that needs a parameter the function does not have is skipped with that reason."""
    found, _ = recorded("q, k, v")
    assert says in reason(found, make_case(**fields))


def test_the_usual_scale_needs_no_parameter() -> None:
    """1 / sqrt(d) and d ** -0.5 may differ in the last bit, and both are the usual scale."""
    found, _ = recorded("q, k, v")
    for d in range(1, 257):
        assert found.supports(make_case(head_dim=d, scale=d**-0.5)) is None
        assert found.supports(make_case(head_dim=d, scale=1 / math.sqrt(d))) is None
        assert found.supports(make_case(head_dim=d, scale=d**-0.5 * (1 + 1e-14)))


def test_other_parameters_are_options() -> None:
    """What has a default and no known meaning is an option; *args and **kwargs are nothing."""
    found, seen = recorded("q, k, v, *args, causal=False, block=64, dropout_p=0.0, **kwargs")
    assert found.options == {"block": 64, "dropout_p": 0.0}
    found.attend(make_case(), **found.with_options({"block": 16}))
    assert (seen["block"], seen["args"], seen["kwargs"]) == (16, (), {})


@pytest.mark.parametrize(
    ("parameters", "says"),
    [
        ("q, k", r"takes \(q, k\): q, k and v must be its first three arguments"),
        ("", r"takes \(\): q, k and v"),
        ("*args, **kwargs", "q, k and v must be its first three arguments"),
        ("q, k, *, v", "q, k and v must be its first three arguments"),
        ("q, k, v, lengths", r"takes \(q, k, v, lengths\): the meaning of lengths is unknown"),
        ("q, k, v, a, b, *, c", "the meaning of a, b, c is unknown"),
        ("qkv, causal, scale", "causal stands where q, k and v belong"),
    ],
)
def test_a_function_that_cannot_be_read(parameters: str, says: str) -> None:
    """Parameters of unknown meaning are named; nothing is guessed."""
    with pytest.raises(UsageError, match=says) as caught:
        recorded(parameters)
    assert "AttentionCase named 'case'" in (caught.value.hint or "")


def test_a_builtin_has_no_parameters_to_read() -> None:
    """PyTorch's own function is a builtin: that is said, and `sdpa-*` are there for it."""
    with pytest.raises(UsageError, match="cannot read the function's parameters"):
        find("torch.nn.functional:scaled_dot_product_attention")


def test_a_plain_function_that_raises() -> None:
    """What a kernel raises comes out as it is; the bench turns it into a `failed` row."""

    def broken(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        raise ValueError("tile size")

    with pytest.raises(ValueError, match="tile size"):
        adapt("broken", broken).attend(make_case())


def test_a_plain_function_is_audited_as_given() -> None:
    """Layout is the function's border: a transposed result is refused, not silently mended."""

    def transposed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return q.transpose(1, 2)

    with pytest.raises(MeasurementError, match=r"it returned shape \[1, 4, 2, 4\]"):
        adapt("transposed", transposed).attend(make_case())


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"is_causal": True},
        {"is_causal": True, "causal_offset": 1},
        {"window": (1, 1)},
        {"mask": ("bool", "b1qk")},
        {"mask": ("holes", "bhqk"), "is_causal": True},
        {"heads": 4, "kv_heads": 2, "is_causal": True},
        {"scale": 0.3, "v_dim": 3},
    ],
)
def test_pytorchs_sdpa_by_its_signature_is_right(fields: dict[str, Any]) -> None:
    """Every case a function with PyTorch's parameters takes is the reference's case."""

    def attention_by_torch(
        q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
    ):  # type: ignore[no-untyped-def]
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )

    case, found = make_case(**fields), adapt("plain", attention_by_torch)
    exact, output = attention(case), found.attend(case, **found.options)
    out = output.out.masked_fill(torch.tensor(exact.empty)[..., None], 0.0)
    assert_within(out, exact.out, error_bounds(case, exact)[0])


# --- plugins -------------------------------------------------------------------------------------


def install(monkeypatch: pytest.MonkeyPatch, *values: str) -> None:
    """Entry points of these values, as if packages with them were installed."""
    points = [
        importlib.metadata.EntryPoint(name=f"plugin{i}", value=value, group=kernels.ENTRY_POINTS)
        for i, value in enumerate(values)
    ]

    def entry_points(*, group: str) -> Sequence[importlib.metadata.EntryPoint]:
        return points if group == kernels.ENTRY_POINTS else []

    monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)
    kernels.load_all.cache_clear()


PLUGIN = """
from numdev.kernels import Output, Requirement, kernel

@kernel("plugged", requires=Requirement(package="plugged-attention"))
def plugged(case, *, tile=8):
    "A plugin's kernel."
    return Output(out=case.q)
"""


def test_a_plugin_is_found(module: Callable[[str], str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels of an entry point's module join the built-in ones, however often one asks."""
    install(monkeypatch, module(PLUGIN))
    for _ in range(2):
        assert [*all_kernels()][-1] == "plugged"
    assert find("plugged").options == {"tile": 8}
    with pytest.raises(UsageError, match="did you mean 'plugged'"):
        find("pluged")


def test_what_is_installed_is_looked_through_once(
    module: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However often kernels are asked for, entry points are listed once a process."""
    asked: list[str] = []
    install(monkeypatch, module(PLUGIN))
    listed = importlib.metadata.entry_points

    def counted(*, group: str) -> Sequence[importlib.metadata.EntryPoint]:
        asked.append(group)
        return listed(group=group)

    monkeypatch.setattr(importlib.metadata, "entry_points", counted)
    for _ in range(3):
        assert find("plugged").name in all_kernels()
    assert asked == [kernels.ENTRY_POINTS]


def test_a_plugin_that_takes_a_taken_name(
    module: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plugin cannot replace a built-in kernel; it is listed as one that cannot be loaded."""
    install(monkeypatch, module(PLUGIN.replace('"plugged"', '"reference"')))
    known = all_kernels()
    assert known["reference"].function is reference
    with pytest.raises(UsageError, match="two kernels are called 'reference'"):
        find("plugin0")


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("raise RuntimeError('no driver')", r"RuntimeError\('no driver'\)"),
        ("import no_such_module_at_all", "no_such_module_at_all"),
        ("def", "SyntaxError"),
    ],
)
def test_a_plugin_that_raises(
    source: str, says: str, module: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broken plugin is named, with what it raised, where it is listed or asked for; it stops
    nothing else and does not look like a bug of numdev's."""
    name = module(source)
    install(monkeypatch, name)
    reason = f"the kernel plugin {name}.*cannot be loaded.*{says}"
    assert find("baseline").broken is None
    assert re.search(reason, str(all_kernels()["plugin0"].missing(CPU)))
    with pytest.raises(UsageError, match=reason):
        find("plugin0")
    with pytest.raises(UsageError, match=f"unknown kernel 'its-kernel'.*{reason}"):
        find("its-kernel")


def test_a_broken_plugin_leaves_the_name_of_a_kernel_alone(
    module: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An entry point called like a built-in kernel does not hide it when it cannot be loaded."""
    name = module("raise RuntimeError")
    point = importlib.metadata.EntryPoint(name="baseline", value=name, group=kernels.ENTRY_POINTS)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [point])
    kernels.load_all.cache_clear()
    assert all_kernels()["baseline"].broken is None
    assert all_kernels()[f"baseline ({name})"].broken


# --- machines we do not have ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("system", "name", "missing"),
    [
        (CPU, "sdpa-math", None),
        (CPU, "sdpa-flash", None),
        (CPU, "sdpa-default", None),
        (CPU, "sdpa-efficient", "needs CUDA, and this audit runs on CPU"),
        (CPU, "sdpa-cudnn", "needs CUDA, and this audit runs on CPU"),
        (H200, "sdpa-flash", None),
        (H200, "sdpa-efficient", None),
        (H200, "sdpa-cudnn", None),
        (V100, "sdpa-efficient", None),
        (V100, "sdpa-cudnn", "needs compute capability 8.0 or newer; Tesla V100 has 7.0"),
        (CPU, "triton-flash", "needs CUDA, and this audit runs on CPU"),
        (H200, "triton-flash", None),
        (V100, "triton-flash", "needs the package triton, which is not installed"),
    ],
)
def test_availability_anywhere(system: System, name: str, missing: str | None) -> None:
    """Whether a kernel can run on a machine is a function of that machine's snapshot."""
    assert find(name).missing(system) == missing


@pytest.mark.parametrize(
    ("requirement", "system", "missing"),
    [
        (Requirement(), CPU, None),
        (Requirement(device="cpu"), H200, "needs CPU, and this audit runs on CUDA"),
        (Requirement(capability=(9, 0)), H200, None),
        (Requirement(capability=(8, 9)), H200, None),
        (
            Requirement(capability=(10, 0)),
            H200,
            "needs compute capability 10.0 or newer; NVIDIA H200 has 9.0",
        ),
        (
            Requirement(capability=(8, 0)),
            CPU,
            "needs compute capability 8.0 or newer, and this audit runs on CPU",
        ),
        (Requirement(package="triton"), H200, None),
        (Requirement(package="triton"), CPU, "needs the package triton, which is not installed"),
        (
            Requirement(device="cuda", capability=(9, 0), package="flash-attn-3"),
            H200,
            "needs the package flash-attn-3, which is not installed",
        ),
        (
            Requirement(device="cuda", capability=(9, 0), package="flash-attn-3"),
            CPU,
            "needs CUDA, and this audit runs on CPU",
        ),
    ],
)
def test_requirements(requirement: Requirement, system: System, missing: str | None) -> None:
    """The first thing missing is said in a sentence; what is not asked for is never missing."""
    assert requirement.missing(system) == missing


def test_this_machine() -> None:
    """The probe agrees with PyTorch, prints as plain data, and changes nothing."""
    here = System.here("cpu")
    assert here.device == "cpu"
    assert here.packages["torch"] == importlib.metadata.version("torch")
    assert here.cpu_capability == torch.backends.cpu.get_cpu_capability()
    assert (here.gpu, here.capability) == (None, None)
    assert here == System.here("cpu")
    assert here.as_dict()["packages"].items() <= here.packages.items()
    assert here.as_dict()["packages"]["torch"] == here.packages["torch"]
    assert dataclasses.replace(here, threads=99).as_dict()["threads"] == 99


def test_devices_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """An unknown device, or CUDA without one, is a usage error; `auto` takes what there is."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert System.here("auto").device == "cpu"
    with pytest.raises(UsageError, match="no CUDA device is available here; use --device cpu"):
        System.here("cuda")
    with pytest.raises(UsageError, match="unknown device 'tpu'"):
        System.here("tpu")
