"""Reproducers: a script of its own shows the same figure with torch alone, from a call
made small.

Scripts run in a process in which numdev, numpy and safetensors cannot be imported. Their
figures are held to those of an audit. Faults are planted at one row, at one key."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy
import pytest
import torch
from commands import ran
from gate_rows import row as gate_row
from on_bench import prepare, rows_on
from oracles import make_case, with_grad
from safetensors.torch import load_file

from numdev.cases import AttentionCase, explicit_mask, visible
from numdev.errors import MeasurementError, UsageError
from numdev.formats import format_named
from numdev.kernels import Kernel, find
from numdev.kernels.reference import attend
from numdev.metrics.metrics_by_name import BESIDE_REFERENCE, METRICS
from numdev.sources.captured_calls import open_cases
from numdev.studies.audit import reproducer_script as reproducer
from numdev.studies.audit.finding_reproducers import observed_at_limit, reduce
from numdev.studies.audit.prepared_attention import part
from numdev.system import System

BARE = """
import contextlib, io, json, runpy, sys
from importlib.machinery import PathFinder

class Bare:
    def find_spec(self, name, path=None, target=None):
        blocked = name.split(".")[0] in {blocked!r}
        return None if blocked else PathFinder.find_spec(name, path, target)

sys.meta_path = [Bare() if finder is PathFinder else finder for finder in sys.meta_path]
sys.path[:0] = {path!r}
answers = []
for script in {scripts!r}:
    printed, code = io.StringIO(), None
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as stop:
            code = stop.code
    answers.append((code, printed.getvalue()))
print(json.dumps(answers))
"""
BLOCKED = ("numdev", "numpy", "safetensors", "scipy", "jinja2")
SYSTEM = System(
    device="cpu", cpu="a laptop", cpu_capability="AVX512", packages={"torch": "2"}
)


def run(
    *scripts: Path, path: Path | None = None, bare: bool = True
) -> list[tuple[int, str]]:
    """What scripts exit with and say, run one after another where only torch and the
    modules in `path` can be imported; `bare=False` leaves everything in."""
    names, paths = [str(script) for script in scripts], [str(path)] if path else []
    code = BARE.format(blocked=BLOCKED if bare else (), path=paths, scripts=names)
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 0, ran.stderr
    return [(code, words) for code, words in json.loads(ran.stdout.splitlines()[-1])]


def figure_in(answer: tuple[int, str]) -> float:
    result = re.search(r"^(\S+) \(reported: ", answer[1], re.MULTILINE)
    assert result, answer[1]
    return float(result[1])


def reproduce(
    at: Path,
    case: AttentionCase,
    kernel: Kernel,
    figure: str,
    tensor: str = "out",
    **options: Any,
) -> tuple[Path, float]:
    """Write the reproducer of the head with the largest figure, as an audit measures it;
    the script, and the figure it must print. A case with grad_out is a training step."""
    bench = prepare(case, gradients=case.grad_out is not None)
    rows = [
        row for row in rows_on(bench, kernel, options=options) if row.tensor == tensor
    ]
    row = max(rows, key=lambda row: abs(getattr(row, figure) or 0.0))
    observed = getattr(row, figure) or 0.0
    script = reproducer.write(
        at, case, kernel, options, tensor=tensor, head=row.head or 0, metric=figure,
        observed=observed, words="The output is off.", system=SYSTEM,
    )  # fmt: skip
    return script, observed


LOST_ROW = torch.zeros(9, 12, dtype=torch.bfloat16).index_fill_(
    0, torch.tensor([4]), -math.inf
)
"""An additive mask with a row of -inf alone, of which plain softmax makes NaN for all of
dv."""
EVERYTHING = {"mask": ("holes", "b1qk"), "softcap": 1.5, "sinks": True, "is_causal": True}
GROUPED = {"heads": 4, "kv_heads": 2}
# Kernel, tensor, figure, fields of the case. One with a gradient or a seed is a training
# step.
CALLS: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
    ("sdpa-flash", "out", "row_rel", {"is_causal": True, "kv_heads": 1}),
    ("sdpa-flash", "out", "rms", {"mask": ("bool", "b1qk")}),
    ("sdpa-math", "out", "max_abs", {"mask": ("holes", "qk"), "window": (2, 1)}),
    ("sdpa-default", "out", "rms", {"is_causal": True, "causal_offset": 1}),
    ("baseline", "out", "row_rel", {**EVERYTHING, "kv_heads": 1}),
    ("baseline", "out", "nonfinite", {"is_causal": True}),
    ("baseline", "out", "bias_sign", {"batch": 9}),
    ("sdpa-flash", "out", "bias_feature", {"batch": 4}),
    ("sdpa-flash", "dq", "row_rel", {"is_causal": True}),
    ("sdpa-flash", "dk", "rms", {"mask": ("float", "qk")}),
    ("baseline", "dk", "row_rel", {**GROUPED, "softcap": 2.0, "mask": ("float", "qk")}),
    ("baseline", "dv", "nonfinite", {"mask": LOST_ROW}),
    ("sdpa-math", "dv", "max_abs", {**GROUPED, "is_causal": True}),
    ("sdpa-default", "out", "rms", {"seed": 1}),
)


@pytest.mark.thorough
def test_scripts_print_the_figures_of_the_audit(tmp_path: Path) -> None:
    """With torch alone, for real kernels, over masks, positions, grouped heads, figures,
    gradients and the output of a training step; and they say whether it shows by their
    exit codes."""
    written = []
    for index, (kernel, tensor, figure, fields) in enumerate(CALLS):
        shape = {"batch": 2, "dtype": torch.bfloat16, "q_len": 9, "kv_len": 12, **fields}
        case = make_case(**shape)
        if tensor != "out" or "seed" in fields:
            case = with_grad(case)
        at = tmp_path / str(index)
        written.append(reproduce(at, case, find(kernel), figure, tensor))
    answers = run(*(script for script, _ in written))
    for call, (_, observed), answer in zip(CALLS, written, answers, strict=True):
        assert answer[0] == int(observed != 0), (call, answer[1])
        assert figure_in(answer) == pytest.approx(observed, rel=2e-5), call
        assert f"(reported: {observed:.6g})" in answer[1], call
    assert 0 in [observed for _, observed in written]
    step = written[-1][0]
    assert "requires_grad_()" in step.read_text()
    (stored,) = open_cases(step.with_name("tensors.safetensors")).cases
    assert stored.load().grad_out is None


PLANTED = '''
import torch

def attention(q, k, v, *, causal=False, sm_scale=None, bias=None, flaw=0.0):
    """Sound, but for a factor, and for NaN where a query is large."""
    S = q.float() @ k.float().mT * sm_scale
    if causal:
        S = S.masked_fill(torch.ones(S.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    if bias is not None:
        S = S + bias.float()
    out = torch.softmax(S, dim=-1) @ v.float()
    out = out * (1 + flaw)
    hit = q.abs().amax(dim=-1) > 90
    return out.masked_fill(hit[..., None], torch.nan).to(q.dtype)
'''


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A user's module with a faulty function; gives the path to name it by."""
    folder = tmp_path / "theirs"
    folder.mkdir()
    (folder / "planted_kernel.py").write_text(PLANTED)
    monkeypatch.syspath_prepend(str(folder))
    return "planted_kernel:attention"


@pytest.mark.thorough
def test_a_function_of_ones_own(planted: str, tmp_path: Path) -> None:
    """It is imported and called with the arguments numdev gave it, options among them; a
    bool mask arrives as the bias it was given as. What is repaired does not show."""
    scripts = []
    for index, fields in enumerate(({"is_causal": True}, {"mask": ("bool", "b1qk")}, {})):
        shape = {"batch": 2, "heads": 4, "kv_heads": 2, "q_len": 8, "kv_len": 8}
        case = make_case(**shape, dtype=torch.bfloat16, **fields)
        case.q[1, 2, 6, 0] = 100.0
        at = tmp_path / str(index)
        script, observed = reproduce(at, case, find(planted), "nonfinite", flaw=0.01)
        assert observed == case.v.shape[-1]
        assert "flaw=0.01" in script.read_text()
        scripts.append(script)
    theirs = tmp_path / "theirs"
    for answer in run(*scripts, path=theirs):
        assert (answer[0], figure_in(answer)) == (1, observed)
    module = theirs / "planted_kernel.py"
    module.write_text(module.read_text().replace("> 90", "> 900"))
    for answer in run(*scripts, path=theirs):
        assert (answer[0], figure_in(answer)) == (0, 0)


@pytest.mark.thorough
def test_a_kernel_for_numdev_needs_numdev(tmp_path: Path) -> None:
    """Its script says so, and cannot measure without."""
    case = make_case(dtype=torch.bfloat16, is_causal=True, softcap=2.0)
    script, observed = reproduce(
        tmp_path, case, find("emulated"), "rms", preset="golden2024"
    )
    assert "Needs PyTorch and numdev" in script.read_text()
    ((code, words),) = run(script)
    assert code == 3
    assert "No module named 'numdev'" in words
    (answer,) = run(script, bare=False)
    assert figure_in(answer) == pytest.approx(observed, rel=2e-5)


@pytest.mark.slow
def test_raising_and_noise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that raises gives 1, with its message, and one that runs after all 0; so
    do runs that differ, with their rms, and a deterministic kernel."""
    (tmp_path / "noisy_kernel.py").write_text(
        "import torch\ndef noisy(q, k, v, scale=None):\n    return v + 0.1 * "
        "torch.randn_like(v)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    kernels = ("sdpa-flash", "sdpa-math", "noisy_kernel:noisy", "sdpa-math")
    scripts = []
    for index, name in enumerate(kernels):
        metric = "raises" if index < 2 else "noise"
        case = make_case(v_dim=7) if index < 2 else make_case(q_len=5)
        of: Any = {"metric": metric, "observed": 0.14, "tensor": "out", "head": 0}
        of |= {"words": "Look.", "system": SYSTEM}
        scripts.append(
            reproducer.write(tmp_path / str(index), case, find(name), {}, **of)
        )
    refused, runs, noisy, quiet = run(*scripts, path=tmp_path)
    assert refused[0] == 1
    assert "the kernel raises RuntimeError: No available kernel" in refused[1]
    assert (runs[0], "the kernel runs" in runs[1]) == (0, True)
    assert noisy[0] == 1
    # The difference of two draws of 0.1 N(0, 1): rms 0.14 over 20 elements; the largest
    # of 9.
    assert 0.1 < figure_in(noisy) < 0.3
    assert (quiet[0], figure_in(quiet)) == (0, 0)


def test_a_sum_in_16_bits_shows(tmp_path: Path) -> None:
    """In each gradient, with a group of heads and a soft cap; not in a sound kernel,
    whose error is as large."""
    case = with_grad(
        make_case(
            batch=1, heads=2, kv_heads=1, q_len=256, kv_len=256, head_dim=32,
            dtype=torch.bfloat16,
        )
    )  # fmt: skip
    capped = dataclasses.replace(case, softcap=30.0)
    narrow = {"preset": "fa2", "block_q": 64, "block_kv": 64}
    chosen = [
        (find("planted:narrow_dq_64"), {}, case, "dq"),
        (find("planted:narrow_dk_dv_128"), {}, case, "dk"),
        (find("planted:narrow_dk_dv_128"), {}, case, "dv"),
        (find("emulated"), {**narrow, "dq": "bfloat16"}, capped, "dq"),
        (find("emulated"), narrow, capped, "dq"),
        (find("sdpa-math"), {}, case, "dq"),
        (find("sdpa-math"), {}, case, "dv"),
    ]
    scripts = [
        reproducer.write(
            tmp_path / str(number), of, kernel, options, metric="narrow_sum",
            observed=0.7, tensor=tensor, head=0, words="Look.", system=SYSTEM,
        )
        for number, (kernel, options, of, tensor) in enumerate(chosen)
    ]  # fmt: skip
    answers = run(*scripts, bare=False)
    codes = [code for code, _ in answers]
    assert codes == [1, 1, 1, 1, 0, 0, 0], answers
    shares = [figure_in(answer) for answer in answers]
    assert min(shares[:4]) > 0.5 > 0.1 > max(shares[4:]), shares


WRONG_RESULTS = {  # in place of an output of shape [2, 2, 5, 7]
    "nested": "a nested tensor as out;",
    "sparse": "a torch.sparse_coo tensor as out;",
    "meta": "torch.float32 of shape [2, 2, 5, 7] on meta as out;",
    "nothing": "NoneType as out;",
    "narrow": "torch.float8_e8m0fnu, a format that was not measured as out;",
    "odd_lse": "torch.float32 of shape [2, 2, 5, 1] on cpu as log-sum-exp;",
}


def test_a_result_of_another_form_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In words of the script, not in PyTorch's; a sound result runs."""
    (tmp_path / "odd_results.py").write_text(
        "import torch\n"
        "def out(q, v):\n    return v.mean(2, keepdim=True).expand(*q.shape[:3], -1)\n"
        "def nested(q, k, v):\n    return torch.nested.nested_tensor(list(out(q, v)))\n"
        "def sparse(q, k, v):\n    return out(q, v).to_sparse()\n"
        "def meta(q, k, v):\n    return out(q, v).to('meta')\n"
        "def nothing(q, k, v):\n    return None\n"
        "def narrow(q, k, v):\n    return out(q, v).abs().to(torch.float8_e8m0fnu)\n"
        "def odd_lse(q, k, v):\n    return out(q, v), q[..., :1]\n"
        "def weights(q, k, v):\n    return out(q, v), q @ k.mT\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    case = make_case(
        batch=2, heads=2, q_len=5, kv_len=6, head_dim=8, v_dim=7, dtype=torch.float32
    )
    of: Any = {"metric": "raises", "observed": 0.0, "tensor": "out", "head": 0}
    of |= {"words": "Look.", "system": SYSTEM}
    scripts = [
        reproducer.write(tmp_path / name, case, find(f"odd_results:{name}"), {}, **of)
        for name in (*WRONG_RESULTS, "weights")
    ]
    *wrong, sound = run(*scripts, path=tmp_path)
    for (code, text), words in zip(wrong, WRONG_RESULTS.values(), strict=True):
        assert (code, text.splitlines()[-2]) == (1, f"the kernel returns {words}"), text
    assert (sound[0], "the kernel runs" in sound[1]) == (0, True)


def test_what_cannot_be_written_is_said(tmp_path: Path) -> None:
    """A format without a dtype, a gradient of what is not finite; a metric that no figure
    shows."""
    case, passed = with_grad(make_case(dtype=torch.float32)), {"head": 0, "observed": 1.0}
    write = functools.partial(
        reproducer.write, tmp_path, kernel=find("sdpa-math"), options={}, metric="rms", words="",
        system=SYSTEM, **passed,
    )  # fmt: skip
    with pytest.raises(MeasurementError, match="no dtype for tf32"):
        write(case=case.rounded_to(format_named("tf32")), tensor="out")
    case.q[0, 0, 0, 0] = math.inf
    with pytest.raises(MeasurementError, match="cannot differentiate"):
        write(case=case, tensor="dq")
    assert reproducer.figure_for("expected_ratio") == "row_rel"
    assert reproducer.figure_for("bias_p", "feature 3") == "bias_feature"
    with pytest.raises(UsageError, match="a script cannot show 'wrongness'"):
        reproducer.figure_for("wrongness")


# Counts, evidence, and what takes more than the kernel's tensor and the exact one
WITHOUT_FIGURE = """elements empty_nonfinite empty_rows error_rows
    flash_vs_low_precision flash_vs_precision from_baseline_rms imprecision_share
    low_precision_rms overflow precision_rms rms_rows rows_measured sequences
    suspects suspicion_cut suspicion_share"""


def test_every_metric_has_a_figure_or_none_on_purpose() -> None:
    """A metric that is added says which number of a script shows a finding about it."""
    shown = {metric for metric in METRICS - BESIDE_REFERENCE if has_figure(metric)}
    assert METRICS - BESIDE_REFERENCE - shown == set(WITHOUT_FIGURE.split())


def has_figure(metric: str) -> bool:
    """Whether a script has a number for it."""
    try:
        return bool(reproducer.figure_for(metric))
    except UsageError:
        return False


@pytest.mark.parametrize(
    "value",
    [(), [], (1,), (1, ()), [(), [2.5]], "it's", None, True, -0.0, math.inf,
     torch.bfloat16, torch.Size([2, 3]), numpy.float64(0.1)],
)  # fmt: skip
def test_a_literal_is_python_for_the_value(value: object) -> None:
    assert eval(reproducer.literal(value), {"torch": torch}) == value


@pytest.mark.parametrize(
    "value", [signal.SIGINT, torch.zeros(3, 3), {}, 1j, b"x", [time.gmtime(0)]]
)
def test_what_has_no_literal_is_said_in_a_line(value: object) -> None:
    with pytest.raises(UsageError, match="a script cannot spell the value ") as error:
        reproducer.literal(value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("metric", "ratio", "limit", "figure", "bound"), [
    ("expected_ratio", 6.0, 1.5, 0.03, 0.0075),  # it is 0.005 as predicted
    ("expected_ratio", 6.0, None, 0.03, 0.005),
    ("expected_ratio", None, 1.5, 0.03, None), ("expected_ratio", 6.0, 1.5, None, None),
    ("floor_ratio", 6.0, 1.5, 0.03, None),
])  # fmt: skip
def test_the_limit_is_of_the_figure_that_is_printed(
    metric: str,
    ratio: float | None,
    limit: float | None,
    figure: Any,
    bound: float | None,
) -> None:
    """An error of six times what is predicted is at a limit of 1.5 where it is a quarter
    of its size."""
    finding: Any = SimpleNamespace(metric=metric, limit=limit)
    result = observed_at_limit(gate_row(expected_ratio=ratio), figure, finding)
    assert result == (bound if bound is None else pytest.approx(bound, rel=1e-15))


def marked(
    row: tuple[int, int, int], key: int, **fields: Any
) -> tuple[AttentionCase, Any]:
    """A case, and the question whether query row (b, h, i) still sees key j in it."""
    case = make_case(dtype=torch.float32, **fields)
    b, h, i = row
    case.q[b, h, i, 0] = 1000.0
    case.k[b, h // case.group, key, 0] = 2000.0
    case.v[:, :, :, 0] = torch.arange(case.kv_len).float()

    def shows(c: AttentionCase) -> bool:
        shown = visible(c, slice(0, c.q_len), slice(0, c.kv_len))
        full = torch.ones(*c.q.shape[:3], c.kv_len, dtype=torch.bool)
        full = full if shown is None else full & shown
        k = c.k.repeat_interleave(c.group, dim=1)
        pair = (c.q[..., :, None, 0] == 1000) & (k[..., None, :, 0] == 2000)
        return bool((pair & full).any())

    return case, shows


@pytest.mark.parametrize("fields", [
    {"heads": 6, "kv_heads": 2, "is_causal": True}, {"mask": ("bool", "b1qk"), "seed": 3},
    {"mask": ("float", "1hqk"), "is_causal": True, "window": (60, None)},
])  # fmt: skip
def test_one_row_and_one_key_are_found(fields: dict[str, Any]) -> None:
    """A fault that needs one query row and one key it sees is reduced to these two, in
    one head and one sequence, in a few dozen steps, without the mask and causality that
    it does not need. Of a head that was not named the group stays."""
    passed = {"batch": 3, "heads": 6, "q_len": 90, "kv_len": 90, **fields}
    case, shows = marked((1, 5, 70), 37, **passed)
    if case.mask is not None and case.mask.dtype == torch.bool:
        case.mask[1, 0, 70, 37] = True
    counted = Mock(side_effect=shows)
    small = reduce(case, counted, 30, head=5)
    assert small.q.shape == small.k.shape == (1, 1, 1, 4)
    assert (small.mask, small.is_causal, small.causal_offset) == (None, False, 0)
    assert counted.call_count < 120
    assert reduce(case, shows, 30).q.shape == (1, case.group, 1, 4)


def test_a_smaller_call_is_the_same_call() -> None:
    """Each row of a smaller call sees what it saw among the keys that are left: scores
    agree with those of the whole call wherever both exist."""
    positions = {"is_causal": True, "causal_offset": 1, "window": (4, None)}
    shape = {"batch": 2, "heads": 4, "kv_heads": 2, "q_len": 9, "kv_len": 11}
    case = make_case(**shape, **positions, mask=("holes", "b1qk"), sinks=True)
    small = part(case, row=range(3, 8), key=range(2, 9))
    shown: Any = visible(small, slice(0, 5), slice(0, 7))
    original: Any = visible(case, slice(0, 9), slice(0, 11))
    assert torch.equal(shown, original[..., 3:8, 2:9])
    added, whole = explicit_mask(small), explicit_mask(case)
    assert torch.equal(added, whole[..., 3:8, 2:9])
    one = part(case, head=range(3, 4), kv_head=range(1, 2), batch=range(1, 2))
    # fp64 sums of 11 terms of size 1 in another order.
    assert torch.allclose(attend(one).out, attend(case).out[1:, 3:], rtol=0, atol=1e-14)


def test_a_finding_that_comes_and_goes() -> None:
    """A fault seen in every second run is reduced all the same, the result shows when
    asked, and one that never shows is an error."""
    case, shows = marked((0, 1, 30), 17, heads=2, q_len=40, kv_len=40)
    generator = torch.Generator().manual_seed(0)

    def sometimes(c: AttentionCase) -> bool:
        return shows(c) and bool(torch.rand((), generator=generator) < 0.6)

    small = reduce(case, sometimes, 30)
    assert shows(small)
    assert small.q_len * small.kv_len < 40 * 40 / 8
    with pytest.raises(MeasurementError, match="could not be reproduced"):
        reduce(case, lambda c: False, 1)


def test_what_was_named_in_another_call_is_reduced_by_its_error(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The scale is wrong in batch entry 1 alone, which errs most where there is one
    query; the mistake is named where there are several. The reproducer keeps the entry
    that errs and one before it."""
    command = ("check", "planted:entry_1_scaled", "--case", "full", "--case", "decode")
    code, out, err = ran(capsys, *command, "--format", "bfloat16", "-o", tmp_path)
    assert (code, "in batch entry 1 alone" in " ".join(out.split())) == (1, True)
    assert "No reproducer" not in err
    [script] = tmp_path.glob("**/reproduce.py")
    tensors = load_file(script.with_name("tensors.safetensors"))
    assert tensors["0.q"].shape == (2, 1, 1, 64)
