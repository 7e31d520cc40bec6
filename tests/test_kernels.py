"""The registry, plain functions as kernels, plugins, and availability on machines not at
hand."""

from __future__ import annotations

import functools
import importlib.metadata
import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from commands import ran
from on_bench import prepare, rows_on
from oracles import GRADIENTS, U64, make_case, step
from recipes import drawn
from torch import Tensor

import numdev
from numdev import kernels, system
from numdev.cases import AttentionCase
from numdev.errors import MeasurementError, UsageError
from numdev.kernels import Kernel, Output, all_kernels, find, kernel, options_of, varlen
from numdev.kernels.plain_functions import adapt
from numdev.kernels.reference import gradients
from numdev.system import Requirement, System

TORCH = {"torch": "2.13.0"}
CPU = System(device="cpu", cpu="a laptop", packages=TORCH)
V100 = System(device="cuda", gpu="Tesla V100", capability=(7, 0), packages=TORCH)
A100 = System(device="cuda", gpu="NVIDIA A100", capability=(8, 0), devices=1)
BOTH = {**TORCH, "triton": "3.6.0"}
H200 = System(device="cuda", gpu="NVIDIA H200", capability=(9, 0), packages=BOTH)
ROOT = Path(numdev.__file__).parent.parent


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Kernel]]:
    """A copy of the registry, which the test may fill; what it installs is forgotten
    after it."""
    copy = all_kernels()
    monkeypatch.setattr(kernels, "_registry", copy)
    yield copy
    kernels.load_all.cache_clear()


# --- the registry ---------------------------------------------------------------------


def test_registering_a_kernel() -> None:
    """A decorated function is found by its name, with options and first line; it is
    callable."""

    @kernel("mine")
    def mine(case: AttentionCase, *, block: int = 64, exact: bool = False) -> Output:
        """A kernel of mine.

        With more to say."""
        return Output(out=case.q * block)

    result = find("mine")
    assert (result.name, result.summary) == ("mine", "A kernel of mine.")
    assert result.options == {"block": 64, "exact": False}
    assert result.function is mine
    case = make_case()
    assert torch.equal(
        result.attend(case, **result.with_options({"block": 2})).out, case.q * 2
    )


def test_two_kernels_of_one_name_are_refused(registry: dict[str, Kernel]) -> None:
    """A taken name is refused, naming both functions; the first one stays."""
    before = registry["baseline"]
    with pytest.raises(UsageError, match="two kernels are named 'baseline'") as caught:

        @kernel("baseline")
        def other(case: AttentionCase) -> Output:
            raise NotImplementedError

    assert "numdev.kernels.baseline:baseline" in caught.value.message
    assert "other" in caught.value.message
    assert find("baseline") is before


SENSELESS: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("sharded", {"shards": 0}, "least 1, got 0"),
    ("sharded", {"shards": True}, "least 1, got True"),
    ("sharded", {"inner": "flex"}, "inner: unknown value 'flex'"),
    ("sharded", {"merge_format": "bfloat8"}, "did you mean 'bfloat16'"),
    ("sharded", {"partial_format": "float32"}, "inner: emulated"),
    ("context-parallel", {"world": 1}, "least 2, got 1"),
    ("context-parallel", {"convert_to_f32": 1}, "convert_to_f32: unknown value 1"),
    ("flash-attn-3", {"num_splits": -1}, "least 0, got -1"),
    ("flex", {"block_n": 48}, "block_n: unknown value 48"),
    ("flex", {"block_n": 64.0}, r"block_n: unknown value 64\.0"),
    ("flex", {"prescale_qk": "yes"}, "prescale_qk: unknown value 'yes'"),
    (
        "flex",
        {"compiled": False, "prescale_qk": True},
        "eager FlexAttention ignores PRESCALE_QK",
    ),
    ("flex", {"tile": 3}, "no option 'tile'"),
    ("baseline", {"tile": 3}, "it has no options"),
    ("emulated", {"preset": ["fa2"]}, r"unknown preset \['fa2'\]"),
    ("emulated", {"kv_order": ["ascending"]}, r"kv_order is \['ascending'\]"),
    ("inductor", {"spelling": "matmull"}, "did you mean 'matmul'"),
)


@pytest.mark.parametrize(("name", "options", "says"), SENSELESS)
def test_senseless_options(name: str, options: dict[str, Any], says: str) -> None:
    """Options that mean nothing, or would be ignored, are usage errors before anything
    runs, whoever calls the kernel."""
    for call in (
        find(name).with_options,
        lambda chosen: find(name).attend(step(), **chosen),
        lambda chosen: find(name).gradients(step(), **chosen),
    ):
        with pytest.raises(UsageError, match=says):
            call(options)


SHAPE = (1, 2, 4, 4)


@pytest.mark.parametrize(("returned", "says"), [
    ((), "out: .* got tuple"), ([torch.zeros(SHAPE)], "out: .* got list"),
    (torch.zeros(1, 4, 2, 4), r"out: expected .*\[1, 2, 4.* got shape \[1, 4, 2, 4\]"),
    (torch.zeros(SHAPE, dtype=torch.int32), r"got torch\.int32 on cpu"),
    (torch.zeros(SHAPE, device="meta"), r"got torch\.float32 on meta"),
    (
        Output(out=torch.zeros(SHAPE), lse=torch.zeros(1, 2)),
        r"log-sum-exp: expected .* got shape \[1, 2\]",
    ),
])  # fmt: skip
def test_outputs_that_are_refused(returned: Any, says: str) -> None:
    """Anything else is an error with what it was, before a metric can trip over it."""
    with pytest.raises(MeasurementError, match=says):
        Kernel(name="x", function=lambda case: returned).attend(make_case())


SHORT = torch.zeros(1, 2, 4, 4)


@pytest.mark.parametrize(("changes", "says"), [
    ({"dk": None}, "its backward returned no dk"),
    ({"dq": None, "dv": None}, "its backward returned no dq and no dv"),
    ({"dq": SHORT}, r"dq: expected .*\[1, 4, 4, 4\].* got shape \[1, 2, 4, 4\]"),
    ({"dk": SHORT}, r"dk: expected .*\[1, 2, 5, 4\].* got shape \[1, 2, 4, 4\]"),
    ({"dv": SHORT}, r"dv: expected .*\[1, 2, 5, 7\].* got shape \[1, 2, 4, 4\]"),
    ({"dv": 3}, "dv: .* got int"), ({"out": SHORT}, "out: expected"),
])  # fmt: skip
def test_gradients_that_are_none_of_the_case(changes: dict[str, Any], says: str) -> None:
    """Missing or misshapen gradients are an error with what they were."""
    case = step(heads=4, kv_heads=2, v_dim=7)
    g = gradients(case)
    whole = replace(Output(out=g.out, dq=g.dq, dk=g.dk, dv=g.dv), **changes)
    wrong = Kernel(name="x", function=lambda c: g.out, backward=lambda c: whole)
    with pytest.raises(MeasurementError, match=says):
        wrong.gradients(case)


def test_an_input_without_influence_has_gradient_zero() -> None:
    """The mean of V depends on V alone."""
    case = step()
    mean = Kernel(
        name="x", function=lambda c: c.v.mean(2, keepdim=True).expand_as(c.q).clone()
    )
    result = mean.gradients(case)
    assert torch.equal(result.dq, torch.zeros_like(case.q))
    assert torch.equal(result.dk, torch.zeros_like(case.k))
    expected = (case.grad_out.sum(dim=2, keepdim=True) / 5).expand_as(case.v)
    torch.testing.assert_close(result.dv, expected, rtol=4 * U64, atol=4 * U64)


@pytest.mark.parametrize("narrow", [torch.float32, torch.bfloat16])
def test_the_upstream_gradient_comes_in_the_outputs_dtype(narrow: torch.dtype) -> None:
    """Where the output is narrower than the case, dO is rounded to it, once."""
    case = step(kv_len=4)
    value = 1 + 2.0**-8 + 2.0**-40
    case = replace(case, grad_out=torch.full_like(case.grad_out, value))
    result = Kernel(name="x", function=lambda c: c.v.to(narrow)).gradients(case)
    expected = 1.0078125 if narrow == torch.bfloat16 else 1 + 2.0**-8
    assert (result.dv == expected).all()
    assert result.dv.dtype == torch.float64
    wide = Kernel(name="x", function=lambda c: c.v.double()).gradients(
        step(dtype=narrow, kv_len=4)
    )
    assert wide.dv.dtype == narrow


def test_the_baselines_empty_rows_give_no_nan() -> None:
    """The softmax of a row that sees nothing is NaN, and neither it nor its gradient gets
    out."""
    mask = torch.ones(4, 5, dtype=torch.bool)
    mask[1] = False
    case = step(mask=mask, dtype=torch.bfloat16)
    result = find("baseline").gradients(case)
    assert all(getattr(result, x).isfinite().all() for x in GRADIENTS)
    assert (result.dq[:, :, 1] == 0).all()


# --- plain functions: parameters by their names ---------------------------------------


def recorded(parameters: str) -> tuple[Kernel, dict[str, Any]]:
    """A plain function with these parameters as a kernel, and the arguments it will be
    given."""
    seen: dict[str, Any] = {}
    scope: dict[str, Any] = {"seen": seen}
    zeros = "seen['q'].new_zeros(*seen['q'].shape[:3], seen['v'].shape[-1])"
    exec(f"def f({parameters}):\n    seen.update(locals())\n    return {zeros}\n", scope)
    return adapt("plain", scope["f"]), seen


@pytest.mark.parametrize("name", ["bias", "attn_bias"])
def test_a_bias_is_additive(name: str) -> None:
    """A parameter that is called a bias is added to the scores: it never gets a bool
    mask."""
    result, seen = recorded(f"q, k, v, {name}=None")
    result.attend(make_case(is_causal=True))
    lower = torch.ones(4, 5, dtype=torch.float64).tril()
    assert torch.equal(
        seen[name], torch.zeros_like(lower).masked_fill(lower == 0, -math.inf)
    )
    assert seen[name].dtype == torch.float64


def test_a_causal_flag_is_no_mask() -> None:
    """A default of causal=True does not get at a case that is not causal. A function
    without either lacks the flag, though a mask would do."""
    result, seen = recorded("q, k, v, causal=True")
    result.attend(make_case())
    assert seen["causal"] is False
    for parameters, changes, lacking in (
        ("q, k, v", {}, "causal flag: no parameter is named is_causal or causal"),
        ("q, k, v, causal=False", {"causal_offset": 1}, "mask: no parameter is named"),
    ):
        why = recorded(parameters)[0].supports(make_case(is_causal=True, **changes))
        assert str(why).startswith(f"the function takes no {lacking}")


@pytest.mark.parametrize("name", ["window_size", "window"])
def test_windows(name: str) -> None:
    """A window is a pair with -1 for no limit, as flash-attention has it."""
    result, seen = recorded(f"q, k, v, causal=False, {name}=(-1, -1)")
    result.attend(make_case(window=(3, None), is_causal=True))
    assert (seen[name], seen["causal"]) == ((3, -1), True)
    result.attend(make_case())
    assert seen[name] == (-1, -1)


def test_the_usual_scale_needs_no_parameter() -> None:
    """1 / sqrt(d) and d ** -0.5 may differ in the last bit, and both are the usual
    scale."""
    result, _ = recorded("q, k, v")
    for d in range(1, 257):
        assert result.supports(make_case(head_dim=d, scale=d**-0.5)) is None
        assert result.supports(make_case(head_dim=d, scale=1 / math.sqrt(d))) is None
        assert result.supports(make_case(head_dim=d, scale=d**-0.5 * (1 + 1e-14)))


@pytest.mark.parametrize(("parameters", "says"), [
    ("q, k", r"takes \(q, k\): q, k and v must be its first three arguments"),
    ("", r"takes \(\): q, k and v"),
    ("*args, **kwargs", "q, k and v must be its first three arguments"),
    ("q, k, *, v", "q, k and v must be its first three arguments"),
    ("q, k, v, lengths", (r"takes \(q, k, v, lengths\): numdev does not know what to pass")),
    ("q, k, v, a, b, *, c", "know what to pass for a, b, c"),
    ("qkv, causal, scale", "expected q, k or v, got causal"),
])  # fmt: skip
def test_a_function_that_cannot_be_read(parameters: str, says: str) -> None:
    """Parameters of unknown meaning are named; nothing is guessed."""
    with pytest.raises(UsageError, match=says) as caught:
        recorded(parameters)
    assert "AttentionCase named 'case'" in (caught.value.hint or "")


@pytest.mark.parametrize(("source", "says"), [
    ("raise RuntimeError('no driver')", r"RuntimeError\('no driver'\)"),
    ("import no_such_module_at_all", "no_such_module_at_all"), ("def", "SyntaxError"),
])  # fmt: skip
def test_a_plugin_that_raises(
    source: str, says: str, tmp_path: Path, monkeypatch: Any
) -> None:
    """A broken plugin is named, with what it raised, where it is listed or asked for; it
    stops nothing else and does not look like a bug of numdev's."""
    (tmp_path / "a_plugin.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    entry = importlib.metadata.EntryPoint("plugin0", "a_plugin", kernels.ENTRY_POINTS)
    result = lambda *, group: [entry] if group == entry.group else []  # noqa: E731
    monkeypatch.setattr(importlib.metadata, "entry_points", result)
    kernels.load_all.cache_clear()
    reason = f"the kernel plugin a_plugin.*cannot be loaded.*{says}"
    assert find("baseline").broken is None
    assert re.search(reason, str(all_kernels()["plugin0"].missing(CPU)))
    with pytest.raises(UsageError, match=reason):
        find("plugin0")
    with pytest.raises(UsageError, match=f"unknown kernel 'its-kernel'.*{reason}"):
        find("its-kernel")


# --- machines we do not have ----------------------------------------------------------


NO_CUDA = "needs CUDA, but this run is on CPU"


@pytest.mark.parametrize(("system", "needs", "missing"), [
    (CPU, "sdpa-flash", None), (CPU, "sdpa-efficient", NO_CUDA), (H200, "sdpa-cudnn", None),
    (V100, "sdpa-efficient", None),
    (V100, "sdpa-cudnn", "needs compute capability 8.0 or newer; Tesla V100 has 7.0"),
    (CPU, "triton-flash", NO_CUDA), (H200, "triton-flash", None),
    (V100, "triton-flash", "needs the package triton, which is not installed"),
    (A100, "sdpa-cudnn", None), (A100, Requirement(devices=1, device="cuda"), None),
    (A100, Requirement(devices=2), "needs 2 CUDA devices, found 1"),
    (A100, Requirement(device="cpu"), "needs CPU, but this run is on CUDA"),
])  # fmt: skip
def test_availability_anywhere(system: System, needs: Any, missing: str | None) -> None:
    """Whether a kernel can run on a machine is a function of that machine's snapshot.
    What is exactly enough is enough."""
    assert (find(needs) if isinstance(needs, str) else needs).missing(system) == missing


SAYS = {
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 "
    "01:15:15 UTC 2023\n"
    "GCC version:  gcc version 12.2.0 (Debian 12.2.0-14)\n": "535.104.05",
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release "
    "Build  (root)\n"
    "GCC version:  gcc version 13.3.0\n": "580.159.04",
    "something else entirely\n": None,
}


def test_the_driver_is_what_its_module_says(tmp_path: Path) -> None:
    """And none where there is no module."""
    path = tmp_path / "version"
    assert system._first_match(path, system._MODULE) is None
    for text, version in SAYS.items():
        path.write_text(text)
        assert system._first_match(path, system._MODULE) == version


def test_this_machine_is_as_torch_has_it_now() -> None:
    """Versions, the instruction set of its kernels, the precision of products in fp32."""
    system, before = System.probe("cpu"), torch.get_float32_matmul_precision()
    assert system.packages["torch"] == importlib.metadata.version("torch")
    assert system.cpu_capability == torch.backends.cpu.get_cpu_capability()
    try:
        for precision in ("medium", "highest"):
            torch.set_float32_matmul_precision(precision)
            settings = System.probe("cpu").settings
            assert settings["float32_matmul_precision"] == precision
    finally:
        torch.set_float32_matmul_precision(before)


# --- a third party's package ----------------------------------------------------------

PLUGIN_CASES = """
cases:
  - {name: small, batch: 1, heads: 2, seq_len: 24, head_dim: 16, causal: true}
formats: [bfloat16]
kernels: [{name: example-chunked, rows: 8}, {name: "example_attention:plain"}]
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the example package, installed there by pip without a network."""
    work = tmp_path_factory.mktemp("plugin")
    # setuptools builds beside the source
    source = shutil.copytree(ROOT / "tests" / "plugin_example", work / "source")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    target = ["--no-build-isolation", "--target", str(work / "site"), str(source)]
    subprocess.run([*pip, *target], check=True, capture_output=True, timeout=120)
    return work / "site"


@pytest.mark.slow
@pytest.mark.thorough
def test_an_installed_kernel_is_audited_by_name(installed: Path) -> None:
    """The package's registered kernel, with its option, and its plain function are
    measured."""
    config = installed.parent / "small.yaml"
    config.write_text(PLUGIN_CASES)
    env = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}{os.pathsep}{installed}",
        "OMP_NUM_THREADS": "1",
    }
    command = [
        sys.executable,
        "-m",
        "numdev",
        "audit",
        str(config),
        "--device",
        "cpu",
        "--json",
    ]
    installation: Any = {"env": env, "cwd": installed.parent}
    answer = subprocess.run(
        command, **installation, capture_output=True, text=True, timeout=120
    )
    assert answer.returncode == 0, answer.stderr
    rows = [r for r in json.loads(answer.stdout)["rows"] if r["role"] == "kernel"]
    by_kernel = {r["kernel"]: r for r in rows if r["tensor"] == "out"}
    assert set(by_kernel) == {"example-chunked", "example_attention:plain"}
    assert by_kernel["example-chunked"]["options"] == {"rows": 8}
    for row in by_kernel.values():
        assert row["status"] == "ok"
        assert row["suspicion"] is None
        assert row["floor_ratio"] < 2  # fp32 arithmetic and one rounding


def test_the_tutorials_example(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    """The plain function of docs/kernels.md has the mistake that the page says numdev
    names."""
    page = (ROOT / "docs" / "kernels.md").read_text(encoding="utf-8")
    blocks = [b.split("```")[0] for b in page.split("```python\n")[1:]]
    (tmp_path / "mine.py").write_text(next(b for b in blocks if "def my_attention" in b))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    config = tmp_path / "small.yaml"
    config.write_text(
        "cases: [{name: s, heads: 2, seq_len: 48, head_dim: 16, causal: true}]"
    )
    audit = ("audit", config, "--kernel", "mine:my_attention", "--device", "cpu")
    code, out, _ = ran(capsys, *audit, "-o", tmp_path / "report")
    assert code == 0
    assert " ".join(out.split()).startswith(
        "FAIL mine:my_attention bfloat16 is wrong: the causal mask is off by one: each "
        "query sees one key too many. In 2 of 2 heads"
    )


@pytest.mark.parametrize("axes", ["h11", "11k", "1k", "bh1k", "b1qk"])
def test_varlen_attn_takes_masks_of_lengths_alone(axes: str) -> None:
    """A mask over heads, of as many as there are keys, is no length of a sequence."""
    supports = find("varlen-attn").supports
    shape = {"batch": 2, "heads": 4, "q_len": 4, "kv_len": 4}
    assert "lengths alone" in (supports(make_case(mask=("bool", axes), **shape)) or "")
    assert "lengths alone" not in (
        supports(make_case(mask=("bool", "b11k"), **shape)) or ""
    )


def packed_attention(fault: bool) -> Any:
    """`varlen_attn` in plain PyTorch; with the fault, queries in no sequence get NaN."""

    def varlen_attn(
        q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, *,
        return_aux: Any, window_size: Any, scale: float, enable_gqa: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        outs, lses = [], []
        for i in range(len(cu_q) - 1):
            rows, keys = slice(cu_q[i], cu_q[i + 1]), slice(cu_k[i], cu_k[i + 1])
            S = torch.einsum("qhd,khd->hqk", q[rows], k[keys]) * scale
            outs.append(torch.einsum("hqk,khd->qhd", S.softmax(-1), v[keys]))
            lses.append(S.logsumexp(-1))
        more = q[int(cu_q[-1]) :]
        outs.append(more * (float("nan") if fault else 0.0))
        lses.append(torch.full((q.shape[1], len(more)), -math.inf))
        return torch.cat(outs), torch.cat(lses, dim=1)

    return SimpleNamespace(varlen_attn=varlen_attn, AuxRequest=lambda lse: None)


def test_an_option_by_position_is_refused() -> None:
    """No request could ask for it: it is given by name alone."""

    def mine(case: AttentionCase, uncovered: bool = False) -> Output:
        return Output(out=case.v)

    words = "expected a function of a case, got one of case, uncovered"
    with pytest.raises(UsageError, match=words) as caught:
        options_of(mine)
    assert caught.value.hint == "write options behind a `*`"
    assert find("varlen-attn").options == {"uncovered": False}


@pytest.mark.parametrize("fault", [False, True])
def test_queries_that_no_sequence_covers(
    fault: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a sequence without keys are laid behind all others; the others come out as
    they do without it, each in its place; and NaN in their gradients is not finite where
    0 is exact."""
    packed = packed_attention(fault)
    monkeypatch.setattr(
        varlen, "importlib", SimpleNamespace(import_module=lambda name: packed)
    )
    case = drawn(9, dtype=torch.float32, batch=3, heads=2, kv_heads=2, head_dim=8)
    mask = (
        torch.tensor([False, True, True])[:, None, None, None].expand(3, 1, 1, 9).clone()
    )
    mask[1, ..., 5:] = False
    case = replace(case, mask=mask)
    attend = functools.partial(find("varlen-attn").function, uncovered=True)
    bench = prepare(case, gradients=True)
    if not fault:
        assert torch.allclose(attend(case).out.double(), bench.reference.out, atol=1e-5)
    rows = rows_on(bench, Kernel(name="packed", function=attend))
    nonfinite = {
        name: sum(r.nonfinite for r in rows if r.tensor == name) for name in GRADIENTS
    }
    assert nonfinite == {"dq": 2 * 9 * 8 if fault else 0, "dk": 0, "dv": 0}
    assert sum(r.nonfinite for r in rows if r.tensor == "out") == 0
