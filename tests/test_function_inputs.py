"""Input by input: what a check beside a reference says of those that decide nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import function_examples as examples
import pytest
import torch
import torch.nn.functional as F
from click.testing import CliRunner
from loaded import ROOT
from torch import Tensor

import numdev
from numdev.cli.main import cli
from numdev.errors import UsageError
from numdev.function_check import check_beside, check_problem
from numdev.operations.function.input_influence import influences_of
from numdev.operations.function.judged_call import FunctionCall
from numdev.operations.function.reference import FunctionReference
from numdev.operations.function.trees import Arguments
from numdev.report import FunctionReport, InputRecord, read, write
from numdev.testing import CheckResult

PROBLEM = ROOT / "examples" / "problem"


def affine(
    x: Tensor, w: Tensor, b: Tensor, tiny: Tensor, mask: Tensor, rows: Tensor
) -> Tensor:
    """A norm whose last three inputs may decide nothing."""
    y = F.layer_norm(x, x.shape[-1:]) * w + b + tiny
    return torch.where(mask, y, 0)[rows]


def data(seed: int) -> tuple[Tensor, ...]:
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(seed))
    mask = torch.ones(64, 32, dtype=torch.bool)
    rows = torch.arange(16)
    return x, torch.ones(32), torch.zeros(32), torch.full((32,), 1e-9), mask, rows


def by_name(result: CheckResult) -> dict[str, InputRecord]:
    assert isinstance(result.report, FunctionReport)
    return {record.input: record for record in result.report.inputs}


def test_each_input_is_judged_alone_or_told() -> None:
    result = numdev.check(affine, reference=affine, inputs=data)
    records = by_name(result)
    judged = {name: record.is_judged for name, record in records.items()}
    assert judged == {
        "x": True, "w": True, "b": True, "tiny": False, "mask": False, "rows": True, "eps 1e-05 as 0.0001": True,
    }  # fmt: skip
    assert records["mask"].moved == 0
    assert 0 < (records["tiny"].moved or 0) < 3
    [sentence] = result.skipped
    assert sentence.startswith("Inputs that are not judged (float32), since ")
    assert "mask (leaving it out changes nothing)" in sentence
    assert "tiny (moves output by 0.00" in sentence
    assert sentence not in result.notes
    assert result.passed  # of the inputs that are judged


def test_a_bias_of_0_and_a_weight_of_1_are_judged_once_redrawn() -> None:
    records = by_name(numdev.check(affine, reference=affine, inputs=data))
    assert records["x"].case == "seed 0"
    assert records["w"].case == records["b"].case == "seed 0 again"


def test_an_input_that_cancels_is_told_though_it_is_random() -> None:
    """A bias before the mean is taken away."""

    def centred(x: Tensor, b: Tensor) -> Tensor:
        y = x + b
        return y - y.mean(dim=0)

    result = numdev.check(centred, reference=centred, shapes="x=64x32,b=32")
    assert [r.input for r in by_name(result).values() if not r.is_judged] == ["b"]


def test_an_input_that_moves_gradients_alone_is_judged_backward() -> None:
    def scaled_back(x: Tensor, w: Tensor) -> Tensor:
        return x * w.detach() - (x * w).detach() + x.detach()

    same = {"reference": scaled_back, "shapes": "x=64x32,w=32"}
    forward = numdev.check(scaled_back, **same)
    assert not by_name(forward)["w"].is_judged
    backward = by_name(numdev.check(scaled_back, **same, backward=True))["w"]
    assert (backward.is_judged, backward.tensor) == (True, "x_grad")


def test_integers_that_move_or_a_reference_that_raises() -> None:
    def chosen(x: Tensor, limit: Tensor) -> Tensor:
        if int(limit) != 3:
            raise ValueError("limit")
        return x.topk(int(limit)).indices

    def inputs(seed: int) -> tuple[Tensor, Tensor]:
        return examples.top_inputs(seed), torch.tensor(3)

    records = by_name(numdev.check(chosen, reference=chosen, inputs=inputs))
    assert (records["x"].changed or 0) > 0
    assert records["x"].is_judged
    assert records["limit"].reason == "no other value of it is at hand"
    assert not records["limit"].is_judged


def test_parameters_that_are_not_redrawn_are_told(tmp_path: Path) -> None:
    """Where the names of parameters differ each module keeps its own: a bias of 0."""
    shared = by_name(
        check_problem(PROBLEM / "solution.py", problem=PROBLEM / "problem.py")
    )
    assert all(record.is_judged for record in shared.values())
    assert "norm.bias" in shared
    text = (PROBLEM / "solution.py").read_text().replace("self.up", "self.linear")
    (tmp_path / "other_names.py").write_text(text)
    records = by_name(
        check_problem(tmp_path / "other_names.py", problem=PROBLEM / "problem.py")
    )
    lacking = {name for name, record in records.items() if not record.is_judged}
    assert lacking == {"norm.bias", "norm.weight"}


def test_the_command_and_the_report_say_it(tmp_path: Path) -> None:
    target = f"{Path(__file__)}:affine"
    command = ["check", target, "--reference", target, "--inputs", f"{__file__}:data"]
    command += ["--json", "-o", str(tmp_path)]
    ran = CliRunner().invoke(cli, command, standalone_mode=False)
    [sentence] = json.loads(ran.output)["not_tested"]
    assert "mask (leaving it out changes nothing)" in sentence
    report = read(tmp_path)
    assert isinstance(report, FunctionReport)
    assert sentence in report.tested
    (tmp_path / "again").mkdir()
    write(report, tmp_path / "again")
    assert read(tmp_path / "again") == report
    assert "mask" in (tmp_path / "inputs.csv").read_text()


def test_a_number_that_changes_integers_alone_changes_something() -> None:
    def above(x: Tensor) -> Tensor:
        return (x > 0.25).long()

    def inputs(seed: int) -> Tensor:
        return torch.linspace(0, 1, 16)

    record = by_name(numdev.check(above, reference=above, inputs=inputs))[
        "number 0.25 as 0.5"
    ]
    assert (record.moved, record.changed, record.reason) == (0, 4, None)


def test_a_reference_that_raises_on_its_own_arguments_raises() -> None:
    """It is no input for which it does."""

    def raising(x: Tensor) -> Tensor:
        raise ValueError("always")

    arguments = Arguments(positional=(torch.ones(4),), names=("x",))
    of = FunctionReference(function=raising, arguments=arguments, seed=0, backward=False)
    other = Arguments(positional=(torch.zeros(4),), names=("x",))
    call = FunctionCall(name="seed 0", draws=[of], others=[other])
    with pytest.raises(ValueError, match="always"):
        list(influences_of(call))


def test_a_number_that_the_data_cannot_tell_is_said() -> None:
    """An eps beside squares of 1 moves nothing; beside squares of 1e-6 it does. Bounds
    that no number reaches are said too, masks are not."""

    def reference(x: Tensor, w: Tensor, eps: float = 1e-6) -> Tensor:
        return w * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)

    def bounded(x: Tensor, w: Tensor) -> Tensor:
        return (x * w).clamp(-90, 90).masked_fill(w > 99, -1e9)

    def drawn(size: float) -> Callable[[int], tuple[Tensor, ...]]:
        def make(seed: int) -> tuple[Tensor, ...]:
            generator = torch.Generator().manual_seed(seed)
            shapes = ((32, 64), (64,))
            return tuple(size * torch.randn(s, generator=generator) for s in shapes)

        return make

    def not_judged(function: Callable[..., Tensor], size: float) -> str:
        result = check_beside(function, reference=function, inputs=drawn(size))
        assert result.passed, result.in_short
        return " ".join(result.skipped)

    assert "eps 1e-06 as 1e-05" not in not_judged(reference, 1e-3)
    assert "eps 1e-06 as 1e-05 (moves output by " in not_judged(reference, 300.0)
    words = not_judged(bounded, 1.0)
    assert "number -90 as -180 (which changes nothing)" in words
    assert "e+09" not in words


async def awaited(seed: int) -> Tensor:
    return torch.ones(seed)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda seed: [], "expected at least one call, got an empty list"),
        (awaited, "got coroutine"),
        (lambda seed: None, "got NoneType"),
        (lambda seed: (x for x in (1, 2)), "got generator"),
    ],
)
def test_a_function_of_inputs_that_makes_no_call_is_refused(
    make: Callable[[int], object], why: str
) -> None:
    with pytest.raises(UsageError, match=why):
        numdev.check(torch.exp, reference=torch.exp, inputs=make)


async def awaited_result(x: Tensor) -> Tensor:
    return x


def test_what_is_returned_in_place_of_a_tensor_is_said() -> None:
    for function, words in (
        (awaited_result, "a value of type coroutine"),
        (lambda x: x.detach().numpy(), "a value of type ndarray"),
        (lambda x: 3, "a value of type int"),
    ):
        result = numdev.check(
            function, reference=torch.exp, inputs=lambda seed: torch.ones(4) * seed
        )
        text = " ".join(str(result).split())
        assert f"it is missing; what is returned: {words}" in text


def read_in_order(x: Tensor, w: Tensor) -> Tensor:
    """Code that takes w for contiguous: it reads its memory from the first number on."""
    count = min(w.numel(), w.untyped_storage().nbytes() // w.itemsize)
    memory = w.as_strided((count,), (1,), 0)
    return x + memory.repeat(w.numel() // count + 1)[: w.numel()].view(w.shape)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "expanded rows": lambda w: w[:, :1].expand(16, 32),
    "expanded in front": lambda w: w[:4, :].t()[None].expand(3, 32, 4),
    "a slice": lambda w: w[:, 8:24],
    "windows": lambda w: w.flatten().unfold(0, 16, 4),
    "a bias of 0": lambda w: torch.zeros(16, 1).expand(16, 32),
}


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("fmt", [None, "bfloat16"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_argument_has_the_strides_that_it_is_made_with(
    layout: str, fmt: str | None, backward: bool
) -> None:
    strides = set()

    def inputs(seed: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        w = LAYOUTS[layout](torch.randn(16, 32, generator=generator))
        return torch.randn(w.shape, generator=generator), w

    def sound(x: Tensor, w: Tensor) -> Tensor:
        strides.add(w.stride())
        return x.add(w)

    def reference(x: Tensor, w: Tensor) -> Tensor:
        return x + w

    def checked(function: Callable[..., Tensor]) -> CheckResult:
        return check_beside(
            function,
            reference=reference,
            inputs=inputs,
            formats=fmt or (),
            backward=backward,
        )

    assert checked(sound).passed
    assert strides == {inputs(0)[1].stride()}
    assert checked(read_in_order).verdict == "FAIL"
