"""The public API: what it promises of sound kernels, of faulty ones, and of what cannot
be run.

What it says of every planted fault is in tests/test_planted.py."""

from __future__ import annotations

import contextlib
import copy
import doctest
import importlib
import io
import json
import math
import os
import pickle
import re
import statistics
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import models
import planted
import pytest
import torch
import transformers
from on_bench import invoked
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import numdev
from numdev import report as report_io
from numdev import testing
from numdev.cases import AttentionCase, CaseRef
from numdev.errors import MeasurementError, UsageError
from numdev.kernels import find
from numdev.kernels.plain_functions import untested_parameters
from numdev.sources.prompts import argument_names
from numdev.studies.audit import isolation, mistake_search
from numdev.studies.audit.kernel_check import FEATURES, CheckSource, default_cases
from numdev.system import expect_device
from numdev.testing import CheckFailed, check_attention

ROOT = Path(__file__).parent.parent
EAGER = {"preset": "eager"}


def plain(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, scale: float | None = None
) -> Tensor:
    """Plain attention with scores in the working format, as `eager` has it."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scores = (q @ k.transpose(-1, -2)).float() * scale
    if is_causal:
        i, j = (torch.arange(n) for n in scores.shape[-2:])
        scores = scores.masked_fill(j > i[:, None], -math.inf)
    return torch.softmax(scores, dim=-1).to(v.dtype) @ v


def coarse(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    p = torch.softmax((q @ k.mT).float() * q.shape[-1] ** -0.5, dim=-1)
    return (p * 16).to(torch.float8_e4m3fn).to(q.dtype) / 16 @ v


def twice(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return 2 * plain(q, k, v)


def without_backward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with torch.no_grad():
        return plain(q, k, v)


def not_implemented(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    raise NotImplementedError("only 128 features")


@pytest.fixture(autouse=True)
def _little_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripts need not be small, and the fault that draws its tiles' order is seeded."""
    monkeypatch.setattr(testing, "SECONDS", 0.3)
    torch.manual_seed(0)


def failing(function: Callable[..., Any], **passed: Any) -> CheckFailed:
    """What a check raises that must fail, its message fit for pytest in 80 columns."""
    with pytest.raises(CheckFailed) as caught:
        check_attention(function, **{"reproducers": None, **passed})
    message = str(caught.value)
    for line in message.splitlines():
        assert len(line) + 8 <= 80 or line.startswith("  python "), line
    return caught.value


def test_a_sound_kernel_passes_the_default_cases() -> None:
    """Forward and backward in both formats; and it is said what it takes no mask for."""
    result = check_attention(planted.sound)
    assert result.judgement.outcome == "passed"
    rows = [r for r in result.report.rows if r.role == "kernel" and r.status == "ok"]
    assert {r.tensor for r in rows} == {"out", "lse", "dq", "dk", "dv"}
    assert {r.format for r in rows} == {"bfloat16", "float16"}
    plain = [
        c for c in default_cases() if not (c.mask or c.window or c.softcap or c.sinks)
    ]
    assert {r.case for r in rows} == {c.name for c in plain if not c.causal_offset}
    lacks = (
        "Not tested, since the function has no parameter for it: mask, window, "
        "softcap, sinks."
    )
    assert result.skipped[0] == lacks
    assert "(large-values): V is beyond the largest number of float16" in " ".join(
        result.skipped
    )
    assert len(result.skipped) == 3  # and no grouped heads; every shape was tested


@pytest.mark.slow
def test_a_delta_in_16_bits_is_caught_on_the_demo() -> None:
    """By the rms of dq, which is a fifth and more above what is predicted, and its sound
    twin's is not; with all rows alike it is less than a tenth above."""
    report = numdev.audit(
        "demo", kernels=[planted.sound, planted.delta_rounded], layers=(0, 2), length=128,
        backward=True,
    )  # fmt: skip
    wrong = {
        f.kernel.removeprefix("planted:") for f in report.findings if f.severity != "note"
    }
    assert wrong == {"delta_rounded"}
    middle = {}
    for name in ("expected_ratio", "rms_ratio"):
        for kernel in ("sound", "delta_rounded"):
            rows = [
                r for r in report.rows if r.kernel.endswith(kernel) and r.tensor == "dq"
            ]
            middle[kernel, name] = statistics.median(getattr(r, name) for r in rows)
    assert middle["delta_rounded", "rms_ratio"] > 1.2
    assert middle["delta_rounded", "expected_ratio"] < 1.1
    assert middle["sound", "rms_ratio"] == pytest.approx(1, abs=0.015)


@pytest.mark.slow
def test_a_dq_that_is_summed_in_16_bits_is_caught_on_the_demo() -> None:
    """Four tiles of keys make its error 2 % larger at most; its sound twin passes."""
    report = numdev.audit(
        "demo", kernels=[planted.sound, planted.dq_accumulator_rounded], layers=(0,),
        formats="bfloat16", backward=True,
    )  # fmt: skip
    (finding,) = [f for f in report.findings if f.severity != "note"]
    assert (finding.kernel, finding.rule) == (
        "planted:dq_accumulator_rounded",
        "narrow sum",
    )
    assert finding.cause == "dQ is summed in bfloat16 over tiles of 64 keys"
    shares = {
        (r.kernel, r.tensor, r.head): r.narrow_sum
        for r in report.rows
        if r.narrow_sum is not None
    }
    assert {head for _, tensor, head in shares if tensor == "dq"} == {0, 1}
    assert all(
        share > 0.5 if kernel == finding.kernel and tensor == "dq" else share < 0.05
        for (kernel, tensor, _), share in shares.items()
    )


def flash_on_gpu(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=is_causal
        )


def larger_on_gpu(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
    return 1.02 * flash_on_gpu(q, k, v, is_causal)


@pytest.mark.gpu
def test_on_a_gpu_too() -> None:
    """FlashAttention-2 passes the default cases, forward and backward, and 2 % more is
    caught."""
    result = check_attention(flash_on_gpu, device="cuda")
    assert result.report.provenance.system["device"] == "cuda"
    failing(larger_on_gpu, device="cuda", cases="full")


HALVED = """
import torch


def halved(q, k, v):
    P = torch.softmax((q @ k.transpose(-1, -2)).float() * q.shape[-1] ** -0.5, dim=-1)
    return (P / 2).to(v.dtype) @ v
"""


@pytest.mark.thorough
def test_the_script_shows_it_in_a_bare_process(tmp_path: Path, monkeypatch: Any) -> None:
    """In a process that knows nothing of this one's paths: its exit code is 1."""
    (tmp_path / "somebodys.py").write_text(HALVED)  # in a folder on nobody's path
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("somebodys")
    error = failing(
        module.halved,
        cases="decode",
        formats="float16",
        backward=False,
        reproducers=tmp_path / "kept",
    )
    script = error.result.reproducer
    assert str(script) in str(error)
    assert script.is_relative_to(tmp_path / "kept")
    answer = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=120,
        env={"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1"}, cwd=script.parent,
    )  # fmt: skip
    assert answer.returncode == 1, answer.stdout + answer.stderr
    assert "The deviation shows." in answer.stdout


def test_a_file_for_reproducers_is_refused_at_the_beginning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    def never(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        raise AssertionError("it is not run")

    words = r"/file: expected a directory .*, got a file; choose another reproducers$"
    with pytest.raises(UsageError, match=words):
        testing.check(never, cases="decode", reproducers=tmp_path / "file")


def test_an_exceptions_words_are_harmless() -> None:
    """Control characters are spelled out, in the message and in the line of pytest's
    summary."""

    def raising(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        raise RuntimeError("red \x1b[31m\u202e.")

    error = failing(raising, cases=["full", "causal"], formats="float16")
    for text in (str(error), error.result.in_short):
        words = " ".join(text.split())
        assert words.isprintable()
        assert (
            "(float16) failed in 1 of 2 calls: RuntimeError: red \\x1b[31m\\u202e."
            in words
        )


def test_a_second_parameter_of_one_meaning_was_not_tested() -> None:
    """A call sets one of them, the first that NAMES has."""

    def biased(
        q: Tensor, k: Tensor, v: Tensor, mask: Any = None, bias: Any = None
    ) -> Tensor:
        assert bias is None
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    assert untested_parameters(biased, ()) == ["mask", "bias"]
    passed: dict[str, Any] = {"formats": "float16", "backward": False, "claims": EAGER}
    left_out = check_attention(biased, cases="additive-mask", **passed).skipped
    assert "Not tested, since no call that ran sets it: bias." in left_out


def test_heads_that_were_repeated_were_not_tested() -> None:
    """That kv heads were repeated is said; wrong grouping is caught in a function that is
    told."""

    def swapped(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
        group = q.shape[1] // k.shape[1]
        return plain(q, k.repeat(1, group, 1, 1), v.repeat(1, group, 1, 1), is_causal)

    def with_flag(
        q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, enable_gqa: bool = False
    ) -> Tensor:
        return swapped(q, k, v, is_causal)

    passed: dict[str, Any] = {"formats": "float16", "backward": False, "claims": EAGER}
    _, left_out = check_attention(swapped, cases=["full", "grouped"], **passed).skipped
    assert left_out.startswith("Not tested: fewer kv heads than query heads (grouped).")
    assert check_attention(swapped, cases="full", **passed).skipped == (
        "Not tested, since no call that ran sets it: is_causal.",
        "Not tested, since no call that ran has it: a group size unlike the number "
        "of kv heads, "
        "more queries than keys, more keys than queries, a single query, several "
        "tiles of keys, "
        "the last one full, several tiles of keys, the last one partly full, a "
        "length equal to "
        "head_dim, V of another width, several sequences.",
    )
    error = failing(with_flag, cases="grouped", **passed)
    assert "query head h reads kv head h % kv_heads" in " ".join(str(error).split())
    assert "fewer kv heads" not in str(error)


def test_shapes_and_gradients_that_were_not_tested_are_named() -> None:
    """What a kernel declines is said by its shape; gradients of masks are not
    measured."""

    def kernel(
        q: Tensor, k: Tensor, v: Tensor, attn_mask: Any = None, is_causal: bool = False
    ) -> Tensor:
        if q.shape[2] > k.shape[2] or v.shape[3] != q.shape[3]:
            raise NotImplementedError("a grid of its own")
        out: Tensor = planted.wrapper(q, k, v, attn_mask, is_causal)
        return out

    cases = ["full", "more-queries", "v-of-another-width", "bias-by-head", "decode", "six-on-two",
             "length-of-head-dim", "continued"]  # fmt: skip
    left_out = check_attention(kernel, cases=cases, formats="bfloat16").skipped
    shapes = (
        "Not tested, since no call that ran has it: more queries than keys, V "
        "of another width."
    )
    assert shapes in left_out
    assert "Not tested: the gradients of additive masks (bias-by-head)." in left_out


@pytest.mark.thorough
def test_what_is_claimed_is_not_said_to_be_something_else() -> None:
    """Only a function that claims nothing, errs no more than a way of rounding may, and
    by no step that has a name, is told how to declare one."""

    def shaken(q: Tensor, k: Tensor, v: Tensor, size: float = 1e-3) -> Tensor:
        O = plain(q, k, v)
        return O * (1 + size * (1e4 * O.float()).cos()).to(O.dtype)

    far = lambda q, k, v: shaken(q, k, v, 0.1)  # noqa: E731
    wrong: dict[str, Any] = {"cases": "full", "formats": "float16", "backward": False}
    words = "One that rounds elsewhere by design says so in options of `emulated`"
    assert words in " ".join(str(failing(shaken, **wrong)).split())
    assert words not in " ".join(str(failing(shaken, claims=EAGER, **wrong)).split())
    assert words not in " ".join(str(failing(far, **wrong)).split())
    assert words not in " ".join(str(failing(coarse, **wrong)).split())


@pytest.mark.parametrize(("function", "passed", "words"), [
    (not_implemented, {}, "only 128 features"),
    (planted.refuses, {}, "head_dim 4 is too small"),
    (plain, {"cases": "padding"}, "no parameter for it: mask"),
    (without_backward, {"backward": True, "claims": EAGER}, "none could be measured"),
])  # fmt: skip
def test_nothing_measured_raises(
    function: Any, passed: dict[str, Any], words: str
) -> None:
    """A kernel that refuses every call, or every backward pass that was asked for."""
    error = failing(function, **{"cases": "full", "formats": "float16", **passed})
    assert "no pass" in " ".join(str(error).split())
    assert words in " ".join(str(error).split())
    assert "not measured" in error.result.in_short


def names(
    cases: Any, seeds: tuple[int, ...] = (0,), gradients: bool = False
) -> list[str]:
    return [
        c.ref.case for c in CheckSource(cases, seeds, "cpu", gradients=gradients).cases
    ]


def test_cases_by_every_kind_of_name(tmp_path: Path) -> None:
    """A default case, a regime, a mapping with a grid, a file, and a call at hand."""
    (tmp_path / "mine.yaml").write_text(
        "cases: [{name: a, heads: 1, seq_len: 2, head_dim: 8}]"
    )
    call = next(iter(CheckSource(["decode"], (0,), "cpu", gradients=False).cases)).load()
    assert names(["causal"]) == ["causal"]
    assert names(["ties"]) == ["ties/causal=False", "ties/causal=True"]
    assert names([{"seq_len": [3, 5]}]) == ["case 0/seq_len=3", "case 0/seq_len=5"]
    assert names([tmp_path / "mine.yaml"], (0, 1)) == ["a", "a"]
    assert names([call, "full"]) == ["decode", "full"]
    case = CheckSource([call], (0,), "cpu", gradients=True).cases[0].load()
    assert case.grad_out is not None
    assert torch.equal(case.q, call.q)


@pytest.mark.parametrize(("cases", "words"), [
    (["causel"], "did you mean 'causal'"), ([{"seqlen": 3}], "did you mean 'seq_len'"),
    (["full", "full"], "2 cases are named 'full'"), ([], "cases: expected at least one"),
    ([Path("nowhere")], "no captured tensors"),
])  # fmt: skip
def test_wrong_cases_are_named(cases: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        names(cases)


@pytest.mark.parametrize(("wide", "says"), [
    (lambda q, k, v: plain(q.double(), k.double(), v.double()), ("float64 where {} (out).")),
    (lambda q, k, v: plain(q, k, v).float(), ("float32 where {} (out); all its values are repr")),
])  # fmt: skip
def test_another_format_than_asked_for_is_said(wide: Any, says: str) -> None:
    """What was rounded to bfloat16 before is held to bfloat16's floor, whatever its
    dtype."""
    result = check_attention(wide, cases="full", formats="bfloat16", claims=EAGER)
    assert says.format("bfloat16 was requested") in " ".join(str(result).split())


def test_thresholds_are_the_gates(tmp_path: Path) -> None:
    """A mapping and a file say the same, a limit no kernel keeps fails; what is wrong is
    named."""
    strict = {"thresholds": [{"name": "tight", "metric": "floor_ratio", "at_most": 0.5}]}
    (tmp_path / "tight.yaml").write_text(json.dumps({"name": "given", **strict}))
    passed: dict[str, Any] = {"cases": "full", "formats": "float16", "backward": False}
    first = failing(plain, thresholds=strict, **passed)
    again = failing(plain, thresholds=tmp_path / "tight.yaml", **passed)
    assert "breaks the rule `tight`" in " ".join(str(first).split())
    verdicts, others = (
        [t.model_dump() for t in each.result.judgement.tests] for each in (first, again)
    )
    assert verdicts == others
    with pytest.raises(UsageError, match="did you mean 'thresholds'"):
        check_attention(plain, thresholds={"threshold": []}, **passed)
    with pytest.raises(
        UsageError, match="function: expected a function or a Kernel, got 'sdpa-math'"
    ):
        check_attention("sdpa-math")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="has no option 'presett'"):
        check_attention(plain, claims={"presett": "eager"}, **passed)


@pytest.mark.thorough
def test_threads_and_autograd_are_left_as_they_were(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Small calls run on one thread, a large one on all, as the report says; PyTorch's
    threads are restored, also by a check that fails."""
    monkeypatch.setattr(isolation, "SMALL", 4 * 40**2)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        larger = lambda q, k, v: 1.25 * plain(q, k, v)  # noqa: E731
        result = numdev.check(larger, cases="decode", formats="float16", backward=False)
        assert (torch.get_num_threads(), result.passed) == (2, False)
        large = {"name": "large", "heads": 4, "seq_len": 40, "head_dim": 8}
        how: Any = {"cases": ["decode", large], "formats": "float16", "backward": False}
        assert [x.threads for x in numdev.check(plain, **how).report.cases] == [1, 2]
    finally:
        torch.set_num_threads(before)


@pytest.mark.thorough
def test_a_sound_kernel_passes_every_feature() -> None:
    """`numdev check` passes what it does not refuse, and says what it refuses."""
    done = invoked("check", "sdpa-flash", "--json", "--case", FEATURES)
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert (result["passed"], result["verdict"]) == (True, "PASS")
    assert {r["tensor"] for r in result["report"]["rows"]} >= {
        "out",
        "lse",
        "dq",
        "dk",
        "dv",
    }
    assert any("soft cap" in words for words in result["not_tested"])


@pytest.mark.parametrize("backward", [False, True])
def test_writing_into_the_inputs_is_wrong(backward: bool) -> None:
    """A kernel that scales k in place is found out although its answer and gradients are
    right."""
    how: Any = {"formats": "bfloat16", "backward": backward}
    error = failing(planted.writes_into_k, cases="full", **how)
    assert "writes into its inputs (k)" in " ".join(str(error).split())


def test_a_second_output_of_another_shape_is_said() -> None:
    """Attention weights are not judged, as a wrong log-sum-exp would be; a check and an
    audit say so."""
    odd = lambda q, k, v: (plain(q, k, v), q @ k.mT)  # noqa: E731
    result = check_attention(odd, cases="full", formats="bfloat16", backward=False)
    words = "attention weights [1, 4, 129, 129], expected the log-sum-exp [1, 4, 129]."
    assert words in " ".join(str(result).split())
    assert any(words in sentence for sentence in result.report.tested)


@pytest.mark.parametrize(
    ("second", "got"),
    [(lambda q: q[..., :1], "shape [1, 2, 4, 1]"), (lambda q: q[:, 0, :, 0], "shape [1, 4]"),
     (lambda q: q[..., 0].mT, "shape [1, 4, 2]"),
     (lambda q: q.new_zeros(1, 2, 8), "shape [1, 2, 8]"),
     (lambda q: q[..., 0].long(), "torch.int64 on cpu"), (lambda q: [0.0], "list"),
     (lambda q: 0.0, "float"), (lambda q: q[..., 0].to_sparse(), "a torch.sparse_coo tensor")],
)  # fmt: skip
@pytest.mark.parametrize("backward", [False, True])
def test_a_log_sum_exp_that_is_none_does_not_pass(
    second: Any, got: str, backward: bool
) -> None:
    """Another shape or type in its place fails the call: dropped, nobody would have
    judged it."""
    case = {"batch": 1, "heads": 2, "seq_len": 4, "head_dim": 8}
    odd = lambda q, k, v: (plain(q, k, v), second(q.detach()))  # noqa: E731
    result = numdev.check(odd, cases=case, formats="bfloat16", backward=backward)
    assert result.verdict != "PASS"
    words = (
        "log-sum-exp: expected a floating-point tensor of shape [1, 2, 4] on "
        f"cpu, got {got}"
    )
    assert words in " ".join(str(result).split())


def as_nested(x: Tensor, layout: torch.layout = torch.strided) -> Tensor:
    return torch.nested.nested_tensor(list(x.detach()), layout=layout)


def as_float4(x: Tensor) -> Tensor:
    """Bits alone, of the same shape."""
    return torch.zeros(x.shape, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)


class Elsewhere(Tensor):
    """A tensor that says that it is on Apple's GPU."""

    device = property(lambda self: torch.device("mps"))


def test_tensors_on_another_device_are_refused() -> None:
    """In a line, which says what was expected and what came."""
    q = torch.randn(1, 2, 4, 8)
    for of, words in (
        (q.to("meta"), "q: expected a tensor with values, got one on the device meta"),
        (q.as_subclass(Elsewhere), "q: expected a tensor on cpu or cuda, got one on mps; move it with .cpu()"),
    ):  # fmt: skip
        with pytest.raises(UsageError) as caught:
            numdev.measure(of, of, of, of)
        assert str(caught.value) == words
    with pytest.raises(
        UsageError, match="k: expected a tensor on cpu or cuda, got one on xpu"
    ):
        expect_device("k", "xpu")
    expect_device("k", "cuda")


def test_calls_without_values_are_refused() -> None:
    """In an audit also where they are not the first call."""

    def call(name: str, device: str) -> AttentionCase:
        q = torch.zeros(1, 2, 4, 8, device=device)
        return AttentionCase(ref=CaseRef(case=name), q=q, k=q, v=q, scale=1.0)

    words = "attention case 'b': expected tensors with values, got meta"
    with pytest.raises(UsageError, match=words):
        numdev.audit([call("a", "cpu"), call("b", "meta")], kernels="sdpa-math")
    with pytest.raises(UsageError, match=words):
        numdev.check(plain, cases=call("b", "meta"))


OUTPUTS: Mapping[str, Callable[[Tensor], object]] = {
    "a nested tensor": as_nested,
    "a nested tensor ": partial(as_nested, layout=torch.jagged),
    "a torch.sparse_coo tensor": lambda x: x.detach().to_sparse(),
    "torch.complex64 on cpu": lambda x: x.float() + 0j,
    "torch.bfloat16 on meta": lambda x: x.to("meta"),
    "ndarray": lambda x: x.detach().float().numpy(),
    "None": lambda x: None,
    "dict": lambda x: {"out": x},
    "torch.float8_e8m0fnu, which numdev has no format for": lambda x: (
        x.detach().abs().float().to(torch.float8_e8m0fnu)
    ),
    "torch.float4_e2m1fn_x2, which numdev has no format for": as_float4,
}


@pytest.mark.parametrize("got", OUTPUTS)
def test_what_is_no_output_is_the_kernels_fault(got: str) -> None:
    """A line says what was expected and what came; in place of the log-sum-exp too."""
    case = {"batch": 1, "heads": 2, "seq_len": 4, "head_dim": 8}
    as_got = OUTPUTS[got]
    wrong = {
        "out: expected a floating-point tensor of shape [1, 2, 4, 8]": (
            lambda q, k, v: as_got(plain(q, k, v))
        ),
        "log-sum-exp: expected a floating-point tensor of shape [1, 2, 4]": (
            lambda q, k, v: (plain(q, k, v), as_got(q[..., 0]))
        ),
    }
    for words, kernel in wrong.items():
        if got == "None" and "log-sum-exp" in words:  # it offers none
            continue
        result = numdev.check(kernel, cases=case, formats="bfloat16", backward=False)
        [row] = [row for row in result.report.rows if row.role == "kernel"]
        reason = f"MeasurementError: {words} on cpu, got {got.strip()}"
        assert (result.verdict, row.status, row.reason) == (
            "NOT JUDGED",
            "failed",
            reason,
        )


def test_what_is_found_in_one_call_is_held_against_all_others(monkeypatch: Any) -> None:
    """One search names every head that fails, whichever call it was made in."""
    searches = []
    whole = mistake_search.Failing.causes
    monkeypatch.setattr(mistake_search.Failing, "causes", lambda self, hints=None: (
        searches.append(hints is None), whole(self, hints))[1])  # fmt: skip
    larger = lambda q, k, v: 1.01 * plain(q, k, v)  # noqa: E731
    error = failing(larger, cases=["full", "cross"], formats="bfloat16", backward=False)
    rows = [r for r in error.result.report.rows if r.role == "kernel"]
    assert {r.suspicion for r in rows} == {"the output is 1.010 times the exact one"}
    assert searches[:2] == [True, False]  # then come those of its reproducer


def test_a_small_fault_everywhere_hides_no_large_one() -> None:
    """A factor in all calls, and a mask that is ignored: the worst call's comes first,
    with the heads that it explains."""

    def two(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        return 1.003 * plain(q, k, v)

    error = failing(
        two, cases=["full", "cross", "padding"], formats="bfloat16", backward=False
    )
    causes = [
        (f.cause, f.count) for f in error.result.report.findings if f.rule == "function"
    ]
    assert causes == [
        ("the mask is ignored", 2),
        ("the output is 1.003 times the exact one", 6),
    ]


def test_a_wrong_log_sum_exp_is_one_finding_and_accuses_no_gradient() -> None:
    """Of calls of more keys than gradients are searched on, of rows that see no key, and
    of one whose dq is that of another way of rounding. The worst head is one that sees
    few keys."""

    cases = ["full", "empty-rows", "bias-by-head"]
    error = failing(planted.lse_constant, cases=cases, formats="float16")
    report = error.result.report
    (finding,) = [f for f in report.findings if f.severity == "exceeded"]
    assert (finding.cause, finding.count) == ("in the log-sum-exp, +0.1 is added", 10)
    assert finding.place is not None
    assert finding.place.case == "empty-rows"
    other = {
        r.case for r in report.rows if r.tensor == "dq" and "autograd" in (r.claim or "")
    }
    assert other == {"bias-by-head"}


def test_a_wrong_gradient_accuses_no_other() -> None:
    """A dk without its scale is named; the dq beside it is held to the way that explains
    it."""

    cases = ["bias-by-head", "full"]
    error = failing(planted.dk_unscaled, cases=cases, formats="float16")
    report = error.result.report
    (finding,) = [f for f in report.findings if f.severity == "exceeded"]
    assert (finding.cause, finding.count) == ("dk lacks the scale", 8)
    other = {r.tensor for r in report.rows if "autograd" in (r.claim or "")}
    assert other == {"out", "dq", "dv"}


def test_a_key_that_is_lost_in_one_call_is_sought_in_all() -> None:
    """Its number is estimated, and then tried in calls that alone could not tell it: one
    finding, in every head of every call that has such a key."""

    def lossy(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keep = [j for j in range(k.shape[2]) if j != 140]
        return plain(q, k[:, :, keep], v[:, :, keep])

    cases: Any = [
        {"name": "150", "seq_len": 150},
        {"name": "200", "seq_len": 200},
        "full",
    ]
    error = failing(lossy, cases=cases, formats="bfloat16", backward=False)
    (finding,) = [f for f in error.result.report.findings if f.severity == "exceeded"]
    assert (finding.cause, finding.count, finding.judged) == ("key 140 is dropped", 8, 12)


def test_keys_beyond_a_tile_are_one_finding() -> None:
    """In calls of 129, 161 and 99 keys, which lose 1, 33 and 35."""
    cases = ["full", "cross", "decode"]
    error = failing(planted.tail_64, cases=cases, formats="bfloat16", backward=False)
    (finding,) = [f for f in error.result.report.findings if f.severity == "exceeded"]
    assert finding.cause == "keys beyond the last full tile of 64 are dropped"
    assert (finding.count, finding.judged) == (10, 10)


def test_a_kernel_is_held_to_the_way_that_explains_it_elsewhere() -> None:
    """Plain attention where V is 1: what it errs there is too little to tell how it
    rounds, and more than FlashAttention-2's roundings would."""

    def eager(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        S = torch.matmul(q, k.mT) * q.shape[-1] ** -0.5
        return torch.matmul(S.softmax(-1, dtype=torch.float32).to(q.dtype), v)

    shape = {"heads": 2, "seq_len": 64, "head_dim": 64}
    ones = {**shape, "name": "ones", "inputs": "ones"}
    assert numdev.check(eager, cases=["full", "cross", ones], formats="bfloat16").passed


def test_eager_attention_at_huge_scores() -> None:
    """Near -5e4 a bfloat16 score holds no difference below 256; the error is
    predicted."""
    case = {"heads": 2, "seq_len": 64, "head_dim": 64,
            "inputs": {"name": "far_below", "lse": -5.0e4, "q": 64.0}}  # fmt: skip
    result = check_attention(
        find("baseline"), cases=case, formats="bfloat16", backward=False
    )
    rows = [r for r in result.report.rows if r.role == "kernel"]
    assert all(r.rel is not None and r.rel > 0.5 for r in rows)
    assert all(r.expected_ratio == pytest.approx(1.0, abs=0.1) for r in rows)


def test_measure_is_the_definition() -> None:
    """rms and the largest error against fp64 by hand; what has another shape is no
    output."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, h, 9, 8, generator=generator).half() for h in (4, 2, 2))
    out = torch.randn(2, 4, 9, 8, generator=generator).half()
    k4, v4 = (x.double().repeat_interleave(2, dim=1) for x in (k, v))
    scores = q.double() @ k4.transpose(-1, -2) * 0.5
    scores = scores.masked_fill(torch.ones(9, 9).triu(1).bool(), -math.inf)
    error = out.double() - scores.softmax(dim=-1) @ v4
    rows = numdev.measure(out, q, k, v, scale=0.5, is_causal=True)
    assert [row.head for row in rows] == [0, 1, 2, 3]
    for row in rows:
        of_head = error[:, row.head or 0]
        assert row.rms == pytest.approx(float(of_head.square().mean().sqrt()), rel=1e-12)
        assert row.max_abs == pytest.approx(float(of_head.abs().max()), rel=1e-12)
    with pytest.raises(MeasurementError, match="cannot be measured"):
        numdev.measure(out[:, :1], q, k, v)


def test_audit_leaves_what_the_command_leaves(tmp_path: Path) -> None:
    """A report on disk that equals the returned one; and with no output, nothing."""
    (tmp_path / "c.yaml").write_text(
        "cases: [{name: a, heads: 1, seq_len: 9, head_dim: 8}]"
    )
    passed: dict[str, Any] = {"kernels": ["sdpa-math"], "device": "cpu", "seed": 3}
    result = numdev.audit(tmp_path / "c.yaml", output=tmp_path / "out", **passed)
    assert (tmp_path / "out" / "report.html").exists()
    assert (
        json.loads((tmp_path / "out" / "report.json").read_text())["request"]["seed"] == 3
    )
    again = numdev.audit(tmp_path / "c.yaml", **passed)
    assert again.rows == result.rows
    assert numdev.compare(str(tmp_path / "out"), again).exit_code == 0
    with pytest.raises(UsageError, match="no such file"):
        numdev.audit("nowhere")
    with pytest.raises(UsageError, match="rows"):
        numdev.audit(tmp_path / "c.yaml", rows=0)


def test_what_is_in_memory_is_audited(tmp_path: Path) -> None:
    """A model, its calls, a function: one engine, and a source that says what it was. The
    model is as it was; the same one continues, and another is refused."""
    model, ids = (
        models.gemma3(attn_implementation="eager"),
        torch.arange(40).view(2, 20) + 3,
    )
    passed: dict[str, Any] = {
        "formats": "float16",
        "backward": True,
        "layers": [1],
        "heads": [0, 1],
    }
    kernels = ["sdpa-math", lambda q, k, v, attn_mask=None: plain(q, k, v)]
    lines: list[str] = []
    for words in ("", "Every task was finished before; --overwrite measures them again."):
        result = numdev.audit(
            model, ids, kernels=kernels, output=tmp_path, say=lines.append, **passed
        )
        assert words in ("", *lines)
    assert model.config._attn_implementation == "eager"
    assert not any(p.grad is not None for p in model.parameters())
    source = result.provenance.source
    assert source["checkpoint"] == "Gemma3ForCausalLM in memory"
    assert source["prompt"] == "input_ids [2, 20]"
    assert {r.layer for r in result.rows} == {1}
    assert {f.kernel for f in result.findings if f.severity == "exceeded"} == {"<lambda>"}
    calls = numdev.capture(model, {"input_ids": ids}, backward=True)
    again = numdev.audit(calls, kernels="sdpa-math", **passed)
    assert again.provenance.source["captured_from"] == "Gemma3ForCausalLM"
    numbers = [[(r.head, r.tensor, r.rms, r.max_abs) for r in x.rows if r.kernel == "sdpa-math"]
               for x in (result, again)]  # fmt: skip
    assert numbers[0] == numbers[1] != []
    next(model.parameters()).data.mul_(2)
    with pytest.raises(UsageError, match="holds"):
        numdev.audit(model, ids, kernels=kernels, output=tmp_path, **passed)
    for wrong, words in (
        (dict(target=model), "inputs: expected the model's inputs"),
        (dict(target=model, inputs=ids, length=8), "'length' does not apply: "),
        (dict(target=model, inputs=ids, lenght=8), "did you mean 'length'"),
        (
            dict(target=[calls[0], calls[0]]),
            "2 cases are named 'model.layers.0.self_attn#0'",
        ),
        (dict(target=calls, kernels=[plain, plain]), "two functions are named '"),
        (dict(target="demo", cases=calls), "a target or cases"),
    ):
        with pytest.raises(UsageError, match=words):
            numdev.audit(**wrong)  # type: ignore[arg-type]


def test_a_report_shows_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a line, as a table, as a page in a frame that its text cannot leave; where
    matplotlib is, as a figure with a map for each kernel, and where it is not by a plain
    line."""
    case = {"name": '"><b>', "heads": 3, "seq_len": 9, "head_dim": 8, "inputs": "normal"}
    report = numdev.audit(cases=case, kernels=["sdpa-math", twice])
    line = "<AuditReport cases: FAIL (test_api:twice); 15 rows; 1 finding>"
    assert str(report) == repr(report) == line
    assert not report.passed
    table = report.to_pandas()
    assert table[table.kernel == "test_api:twice"].floor_ratio.min() > 100
    shown = report._repr_html_()
    assert re.findall("</?[a-z]+", shown) == ["<p", "</p", "<iframe", "</iframe"]
    assert shown.count('"') == 4  # of the frame's two attributes
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for call, words in (
        (lambda: report.plot(), "needs matplotlib"),
        (lambda: report.plot("floor"), "did you mean 'floor_ratio'"),
        (lambda: report.to_pandas("row"), "did you mean 'rows'"),
    ):
        with pytest.raises(UsageError, match=words):
            call()
    monkeypatch.undo()
    pytest.importorskip("matplotlib").use("Agg")
    axes = report.plot("rms")
    assert [a.get_title() for a in axes] == ["baseline", "sdpa-math", "test_api:twice"]
    drawn = axes[2].images[0].get_array()
    assert drawn.tolist() == [
        [r.rms for r in report.rows if r.kernel == "test_api:twice"]
    ]


class Wrong(TorchDispatchMode):
    """PyTorch's CPU kernel with an output 2 % too large."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if "flash_attention_for_cpu" in str(func) and "backward" not in str(func):
            result[0].mul_(1.02)
        return result


def trained(watched: bool, seen: list[dict[str, Any]], dropout: float) -> list[Tensor]:
    """Weights, gradients and the generator's state after three steps of a model in
    bfloat16, one of whose layers drops out of its attention too."""
    torch.manual_seed(0)
    layers = [torch.nn.TransformerEncoderLayer(16, 4, 16, rate, batch_first=True)
              for rate in (0.0, dropout)]  # fmt: skip
    model = torch.nn.Sequential(*layers, torch.nn.Dropout(0.5)).train()
    with (
        numdev.watch(model, every=2, tell=seen.append)
        if watched
        else contextlib.nullcontext()
    ):
        for _ in range(3):
            model.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(torch.randn(2, 300, 16)).square().mean()
            loss.backward()
            with torch.no_grad():
                for p in model.parameters():
                    p -= p.grad
            model.eval()(torch.randn(1, 3, 16))
            model.train()
    return [
        torch.get_rng_state(),
        *model.parameters(),
        *(p.grad for p in model.parameters()),
    ]


def test_watching_changes_no_number() -> None:
    """Weights, gradients and random numbers are those of a training that nobody watches;
    of every second step each attention call is measured, in other heads each time."""
    seen: list[dict[str, Any]] = []
    plain, watched = (trained(is_on, seen, 0.1) for is_on in (False, True))
    assert all(torch.equal(x, y) for x, y in zip(plain, watched, strict=True))
    assert [(n["step"], n["layer"], n["heads"]) for n in seen] == [
        (0, 0, [0, 1]), (0, 1, [0, 1]), (2, 0, [2, 3]), (2, 1, [2, 3]),
    ]  # fmt: skip
    assert [n["kernel"] for n in seen[:2]] == ["sdpa-flash", "sdpa-default"]
    for n in seen:
        assert (n["format"], n["nonfinite"], n["finding"]) == ("bfloat16", 0, None)
        assert n["expected_ratio"] == pytest.approx(1, abs=0.1)


class Products(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = torch.matmul(x, x.transpose(-2, -1))
        return torch.matmul(torch.softmax(scores, dim=-1), x)


class Embedded(torch.nn.Module):
    """A layer behind an attention by hand, and a module of TorchScript."""

    def __init__(self, layer: torch.nn.Module, scripted: torch.nn.Module) -> None:
        super().__init__()
        self.layer, self.scripted = layer, scripted

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.scripted(x)
        return self.layer(torch.softmax(x @ x.transpose(-2, -1), dim=-1) @ x)


def test_watching_finds_a_fault(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """What a model itself computed is printed where it is wrong, with the place.
    Attention that cannot be seen is logged; what is asked wrongly is refused; closed,
    nothing is looked at."""
    model, x = (
        torch.nn.TransformerEncoderLayer(16, 2, 16, 0.0).train(),
        torch.randn(40, 2, 16),
    )
    with numdev.watch(model, every=1) as watch, Wrong():
        model(x)
    printed = capsys.readouterr().out
    assert printed.startswith(
        "numdev.watch, step 0: sdpa-flash (float32) is wrong in 2 of 2 heads: "
    )
    assert "1.020 times" in printed
    model(x)
    assert watch.step == 0
    # Which multiplies by hand where it returns weights
    unseen = torch.nn.MultiheadAttention(16, 2)
    with numdev.watch(unseen):
        unseen(x, x, x)
    assert "attention ran but was not seen in MultiheadAttention; watch" in caplog.text
    assert "transformers' interface" not in caplog.text  # which watch does not see
    # By hand, in a module with no name of a projection; of TorchScript, without hooks
    caplog.clear()
    model.linear1 = Embedded(model.linear1, torch.jit.script(Products()))
    with numdev.watch(model):
        model(x)
    assert "not seen in linear1, linear1.scripted; watch" in caplog.text
    assert not capsys.readouterr().out
    for wrong, words in (
        ({"every": 0}, "every: expected at least 1"),
        ({}, "compiled model"),
    ):
        if not wrong:
            model.compile()
        with pytest.raises(UsageError, match=words):
            numdev.watch(model, **wrong)


class Attending(torch.nn.Module):
    """One call of attention, then `after`."""

    after: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        x = torch.nn.functional.scaled_dot_product_attention(x, x, x)
        if self.after:
            self.after()
        return x


def test_a_watched_model_on_another_device_is_said_to_be_there(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Not that it made no attention call."""
    model = Attending().to("meta")
    with numdev.watch(model):
        model(torch.zeros(1, 4, 8, device="meta"))
    [record] = caplog.records
    words = "output of attention: expected a tensor with values, got one on the device"
    assert words in record.getMessage()


def modes() -> int:
    return len(torch.overrides._get_current_function_mode_stack())


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, ValueError, KeyboardInterrupt])
def test_a_watched_models_own_error_is_what_comes(
    error: type[BaseException], caplog: Any
) -> None:
    """As it was raised, and the next step is measured as if nothing had been."""

    def fail() -> None:
        raise error("of the model")

    model, x, seen = Attending().train(), torch.randn(1, 2, 5, 8), list[dict[str, Any]]()
    with numdev.watch(model, every=1, tell=seen.append):
        model.after = fail
        with pytest.raises(error, match=r"^of the model$"):
            model(x)
        model.after = None
        model(x)
        assert modes() == 0
    assert [n["step"] for n in seen][-1:] == [1]
    assert not caplog.text
    assert not model.linear._forward_hooks
    with numdev.watch(model, every=1):
        model.after = fail
        with pytest.raises(error):
            model(x)
    assert modes() == 0
    assert not model._forward_hooks
    assert not model.linear._forward_hooks


def _saved(model: torch.nn.Module) -> torch.nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    # So that it is read where numdev is not installed
    assert b"numdev" not in file.getvalue()
    file.seek(0)
    loaded: torch.nn.Module = torch.load(file, weights_only=False)
    return loaded


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), _saved],
    ids=["deepcopy", "pickle", "torch.save"],
)  # fmt: skip
def test_a_watched_model_is_copied_and_saved(copied: Any) -> None:
    """Before, between and after its steps; a copy computes the same, and is not
    watched."""
    model, x, seen = (
        torch.nn.TransformerEncoderLayer(8, 2, 8, 0.0),
        torch.randn(2, 5, 8),
        [],
    )
    with numdev.watch(model.train(), every=1, tell=seen.append) as watch:
        for step in range(2):
            copy_of = copied(model)
            assert torch.equal(copy_of(x), model(x))
            assert watch.step == step
    assert {n["step"] for n in seen} == {0, 1}
    assert torch.equal(copied(model)(x), model(x))


def test_a_scripted_model_is_refused_in_one_line() -> None:
    """Nothing that runs in it can be seen, and its forward has no signature."""
    x = torch.randn(1, 5, 8)
    model = torch.jit.trace(torch.nn.Linear(8, 8), x)
    with pytest.raises(
        UsageError, match=r"inputs: no signature found for <torch\.Script"
    ):
        numdev.audit(model, x)
    with pytest.raises(UsageError, match="got a ScriptMethod"):
        argument_names(model.forward)


def test_a_watched_bias_for_causality_is_no_tensor_of_numbers() -> None:
    """PyTorch's own bias holds none: the calls are measured as what SDPA makes of it, and
    nothing is wrong with them."""

    class Biased(torch.nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            q = super().forward(x).unflatten(-1, (2, 4)).transpose(1, 2)
            return torch.nn.functional.scaled_dot_product_attention(
                q[:, :, -3:], q, q, causal_lower_right(3, x.shape[1])
            )

    model, seen = Biased(8, 8).train(), list[dict[str, Any]]()
    with numdev.watch(model, every=1, tell=seen.append):
        model(torch.randn(1, 7, 8)).sum().backward()
    assert [(n["finding"], n["nonfinite"]) for n in seen] == [(None, 0)]
    assert seen[0]["floor_ratio"] < 20


class Heads(torch.nn.Linear):
    """Attention of two heads by `attend`, with q = k = v."""

    def __init__(self, attend: Any) -> None:
        super().__init__(16, 16)
        self.attend = attend

    def forward(self, x: Tensor) -> Tensor:
        q = super().forward(x).unflatten(-1, (2, 8)).transpose(1, 2)
        result: Tensor = self.attend(q, q, q)
        return result.transpose(1, 2).flatten(2)


def test_watched_inputs_that_are_not_finite_are_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Nothing can be judged of them, and no silence says that all is well."""
    model = Heads(torch.nn.functional.scaled_dot_product_attention).train()
    seen: list[dict[str, Any]] = []
    with numdev.watch(model, every=1, tell=seen.append):
        model(torch.full((1, 20, 16), math.nan))
        assert "Heads#0: q, k or v holds NaN or infinity" in caplog.text
    assert [(n["finding"], n["nonfinite"]) for n in seen] == [(None, None)]


@pytest.mark.parametrize("way", ["frozen", "checkpointed"])
def test_a_watched_layer_without_a_graph_is_of_the_kernel_that_ran(way: str) -> None:
    """Of a frozen layer, and of one that is computed again backward, autograd keeps no
    graph. The math path would be said to have run, and its claim be judged by."""
    attention = torch.nn.functional.scaled_dot_product_attention
    model, x = Heads(attention).train(), torch.randn(1, 80, 16, requires_grad=True)
    if way == "frozen":
        model, x = model.requires_grad_(False), x.detach()
    whole = torch.nn.Sequential(model, torch.nn.Linear(16, 16)).train()
    if way == "checkpointed":
        again = partial(checkpoint, model.forward, use_reentrant=True)
        model.forward = again  # type: ignore[method-assign]
    seen: list[dict[str, Any]] = []
    with (
        numdev.watch(whole, every=1, tell=seen.append),
        torch.autocast("cpu", torch.bfloat16),
    ):
        whole(x).sum().backward()
    assert [n["kernel"] for n in seen] == ["sdpa-flash"]
    assert seen[0]["expected_ratio"] == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize("kind", ["additive", "causal"])
def test_a_watched_mask_is_what_autocast_makes_of_it(kind: str) -> None:
    """What a cast of the mask changes is not the kernel's error. PyTorch's math path has
    one rounding, the floor's."""
    distances = -0.0371 * (torch.arange(80.0)[:, None] - torch.arange(80.0)).abs()
    mask: Any = distances if kind == "additive" else causal_lower_right(80, 80)
    attention = torch.nn.functional.scaled_dot_product_attention

    def by_math(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return attention(q, k, v, attn_mask=mask)

    model, seen = Heads(by_math).train(), list[dict[str, Any]]()
    with (
        numdev.watch(model, every=1, tell=seen.append),
        torch.autocast("cpu", torch.bfloat16),
    ):
        model(torch.randn(1, 80, 16)).sum().backward()
    assert [(n["kernel"], n["finding"]) for n in seen] == [("sdpa-math", None)]
    assert seen[0]["floor_ratio"] == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize("compiled", ["module", "function"])
def test_what_is_compiled_in_a_watched_model_is_said_to_be_unseen(
    compiled: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Also what was compiled since the model is watched. It was measured on tensors
    without values, and the kernel was said to have failed."""
    torch._dynamo.reset()
    attention = torch.nn.functional.scaled_dot_product_attention
    attend: Any = lambda q, k, v: attention(q, k, v)  # noqa: E731
    if compiled == "function":
        attend = torch.compile(attend, backend="aot_eager")
    inner, seen = Heads(attend), list[dict[str, Any]]()
    model = torch.nn.Sequential(inner).train()
    with numdev.watch(model, every=1, tell=seen.append):
        if compiled == "module":
            inner.compile(backend="aot_eager")
        for _ in range(2):
            model(torch.randn(1, 20, 16)).sum().backward()
    assert not seen
    words = {"module": "in a compiled model", "function": "was not seen in 0"}
    assert words[compiled] in caplog.text


def test_two_threads_run_a_watched_model_at_once() -> None:
    """Each gets its own numbers; one of them is observed, and no mode or hook is left."""
    model, seen = Attending().train(), list[dict[str, Any]]()
    both = threading.Barrier(2, timeout=30)
    model.after = both.wait
    inputs = torch.randn(2, 1, 2, 5, 8)
    results: dict[int, Any] = {}

    def work(i: int) -> None:
        try:
            results[i] = [model(inputs[i]) for _ in range(4)], modes()
        except Exception as error:
            both.abort()
            results[i] = error

    with numdev.watch(model, every=1, tell=seen.append) as watch:
        threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert watch.step == 7
    assert len({n["step"] for n in seen}) == len(seen) >= 4
    assert all(n["module"] == "Attending" and n["finding"] is None for n in seen)
    model.after = None
    for i in range(2):
        assert not isinstance(results[i], Exception), results[i]
        outs, left = results[i]
        assert left == 0
        assert all(torch.equal(out, model(inputs[i])) for out in outs)
    assert not model._forward_hooks
    assert not model.linear._forward_hooks


def test_the_trainer_is_watched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The examples of docs/api.md, in a run of transformers' Trainer."""
    text = (ROOT / "docs" / "api.md").read_text().partition("## While a model trains")[2]
    logged: list[Any] = []
    log = types.SimpleNamespace(log=logged.append)
    add = types.SimpleNamespace(add_scalar=lambda *scalars: logged.append(scalars))
    monkeypatch.setitem(sys.modules, "wandb", log)  # type: ignore[arg-type]
    board = types.SimpleNamespace(SummaryWriter=lambda: add)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", board)  # type: ignore[arg-type]
    names: dict[str, Any] = {"model": models.llama()}
    for block in re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        exec(block, names)
    ids = torch.arange(16) + 3
    how: Any = {"max_steps": 1, "report_to": [], "use_cpu": True, "save_strategy": "no"}
    callback = names["Numerics"]()
    transformers.Trainer(
        names["model"], transformers.TrainingArguments(str(tmp_path), disable_tqdm=True, **how),
        train_dataset=[{"input_ids": ids, "labels": ids}] * 2, callbacks=[callback],
    ).train()  # fmt: skip
    assert callback.watch.step == 0
    assert [next(iter(x)) for x in logged[:2]] == [
        f"numerics/layer{i}/error_over_floor" for i in (0, 1)
    ]
    assert [x[0::2] for x in logged[2:]] == [
        ("numerics/layer0", 0),
        ("numerics/layer1", 0),
    ]


@pytest.mark.slow
def test_names_are_imported_when_asked_for() -> None:
    """`import numdev` imports no torch; its names are there, and none is a
    module's too."""
    code = (
        "import sys, numdev; assert not {'torch', 'pydantic'} & {*sys.modules}; "
        "assert {'audit', 'check_attention'} <= {*dir(numdev)}; assert not "
        "hasattr(numdev, 'x'); "
        "import numdev.sources.capture; assert callable(numdev.capture)"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT
    )
    assert answer.returncode == 0, answer.stderr
    assert all(callable(x) and x.__doc__ for x in map(numdev.__getattr__, numdev.__all__))
    assert not {p.stem for p in (ROOT / "numdev").iterdir()} & set(numdev.__all__)


def test_the_page_is_true() -> None:
    """Every example of docs/api.md gives what it says."""
    text = (ROOT / "docs" / "api.md").read_text()
    blocks = re.findall(r"^```pycon\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    examples = doctest.DocTestParser().get_doctest(
        "\n".join(blocks), {}, "api.md", None, 0
    )
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    lines: list[str] = []
    result = doctest.DocTestRunner(optionflags=flags).run(examples, out=lines.append)
    assert result.attempted > 10
    assert not result.failed, "".join(lines)


def test_invariance_in_python(tmp_path: Path) -> None:
    """Bit-identical along what is required passes, and what is not fails; the report is
    kept where it is asked to be."""
    shapes = "[{heads: 2, kv_heads: 2, seq_len: 32, head_dim: 16, batch: 2}]"
    (tmp_path / "cases.yaml").write_text(f"cases: {shapes}\n")
    target = tmp_path / "cases.yaml"
    sound = numdev.invariance(
        target, kernels="sdpa-math", require="batch", output=tmp_path / "r"
    )
    assert sound.passed
    assert sound.plan.axes == ("batch",)
    assert report_io.read(tmp_path / "r") == sound
    split = numdev.invariance(target, kernels=["planted:batch_split"], require=["batch"])
    assert not split.passed
    with pytest.raises(UsageError, match="there is no axis 'btach'"):
        numdev.invariance(target, axes="btach")


@pytest.mark.slow
def test_effects_in_python(tmp_path: Path) -> None:
    """A small model with one kernel, without single sites: its KL is a number."""
    target = models.saved("llama", tmp_path / "m")
    report = numdev.effects(
        target, kernels="sdpa-math", length=12, sequences=2, sites=False
    )
    whole = next(run for run in report.summary.runs if run.kind == "whole")
    assert whole.cost is not None
    assert whole.cost.mean > 0
