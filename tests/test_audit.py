"""An audit from end to end, by kernels of this file, of drawn cases and of the demo."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from on_bench import prepare
from oracles import make_case
from safetensors.torch import save_file
from torch import Tensor

from numdev import report
from numdev.errors import UsageError
from numdev.kernels.emulation.kernel import emulation
from numdev.report import AuditReport, DeviationRow
from numdev.request_models import AuditRequest, CaseConfig, Choice
from numdev.studies.audit.run import audit
from numdev.studies.audit.view import maps

SDPA = ("sdpa-math", "sdpa-flash", "sdpa-default")
calls: list[str] = []


def plain(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False) -> Tensor:
    """Attention in fp32."""
    calls.append("plain")
    S = q.float() @ k.float().mT * q.shape[-1] ** -0.5
    if is_causal:
        S = S.masked_fill(~torch.ones_like(S, dtype=torch.bool).tril(), -math.inf)
    return (torch.softmax(S, dim=-1) @ v.float()).to(q.dtype)


def scaled(
    q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False, by: float = 1.01
) -> Tensor:
    """Wrong by a factor."""
    return plain(q, k, v, is_causal=is_causal) * by


def raises(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
    raise RuntimeError("illegal memory access\nsecond line")


def quits(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
    raise SystemExit(0)


def mutates(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
    """Right, and leaves its inputs in ruins."""
    out = plain(q, k, v, is_causal=is_causal)
    for x in (q, k, v):
        x.fill_(math.nan)
    return out


def returns_nan(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
    return torch.full_like(q, math.nan)


def wrong_shape(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
    return q[:, :, :-1]


def in_fp32(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
    """Returns fp32 whatever it is given."""
    return plain(q.float(), k.float(), v.float(), is_causal=is_causal)


def strange_options(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, dtype: Any = torch.float32,
    threshold: float = math.inf, hook: Any = torch.nn.functional.relu,
) -> Tensor:  # fmt: skip
    """Defaults that JSON cannot hold."""
    assert (dtype, threshold, hook) == (torch.float32, math.inf, torch.nn.functional.relu)
    return plain(q, k, v, is_causal=is_causal)


def case(name: str = "tiny", **changes: Any) -> CaseConfig:
    fields: dict[str, Any] = {
        "batch": 2,
        "heads": 2,
        "seq_len": 12,
        "head_dim": 8,
        "causal": True,
    }
    return CaseConfig(name=name, **{**fields, **changes})


def request(*kernels: str | Choice, **changes: Any) -> AuditRequest:
    names = kernels or SDPA
    fields: dict[str, Any] = {
        "target": "tiny.yaml",
        "cases": (case(),),
        "kernels": tuple(
            k if isinstance(k, Choice) else Choice(name=kernel_of(k)) for k in names
        ),
        "device": "cpu",
    }
    return AuditRequest(**{**fields, **changes})


def kernel_of(name: str) -> str:
    return f"{__name__}:{name}" if name in globals() else name


def rows_of(result: AuditReport, kernel: str, **where: Any) -> list[DeviationRow]:
    rows = [row for row in result.rows if row.kernel == kernel_of(kernel)]
    return [row for row in rows if all(getattr(row, k) == v for k, v in where.items())]


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., AuditReport]:
    """Run a request in a directory of its own."""
    counter = iter(range(1000))

    def audited(*kernels: str | Choice, **changes: Any) -> AuditReport:
        return audit(request(*kernels, **changes), tmp_path / str(next(counter)))

    return audited


Run = Callable[..., AuditReport]


FAILING = {
    "raises": "RuntimeError: illegal memory access",
    "quits": "ended the program (exit code 0)",
    "wrong_shape": "MeasurementError: out: expected a floating-point tensor of shape",
    "mutates": "writes into its inputs (q, k, v)",
}
ODD = ("returns_nan", "in_fp32", "strange_options", "plain")


def test_kernels_cost_their_own_rows(run: Run, tmp_path: Path) -> None:
    """Among kernels that go wrong in every way sound ones have the rows they have alone;
    what goes wrong has its reason or its counts; fp32 for bf16 inputs is held to fp32's
    floor."""
    result, alone = run(*FAILING, *ODD, *SDPA), run(*SDPA)
    theirs = {kernel_of(name) for name in (*FAILING, *ODD)}
    assert [row for row in result.rows if row.kernel not in theirs] == list(alone.rows)
    for name, reason in FAILING.items():
        (row,) = rows_of(result, name)
        assert (row.status, row.head, row.rms) == ("failed", None, None)
        assert row.reason.startswith(reason)
        assert "\n" not in row.reason
    assert {row.status for name in ODD for row in rows_of(result, name)} == {"ok"}
    rows = rows_of(result, "returns_nan")
    assert [(row.nonfinite, row.rms) for row in rows] == [(2 * 12 * 8, None)] * 2
    finding = next(f for f in result.findings if f.rule == "finiteness")
    assert finding.sentence.startswith(
        f"{kernel_of('returns_nan')} (bfloat16) returns 384 elements"
    )
    wide, narrow = rows_of(result, "in_fp32"), rows_of(result, "plain")
    assert {row.out_format for row in wide} == {"float32"}
    assert all(row.floor_ratio > 0.5 for row in wide)
    assert all(a.rms < b.rms / 100 for a, b in zip(wide, narrow, strict=True))
    (row, _) = rows_of(result, "strange_options")
    assert row.options == {"dtype": "torch.float32", "threshold": "inf", "hook": "relu"}
    report.write(result, tmp_path)
    assert report.read(tmp_path) == result


def test_heads_are_selected_by_number(run: Run) -> None:
    """Chosen heads have the rows they have among all, in any order, named twice, or not
    there."""
    whole = run("sdpa-math", cases=(case(heads=4, kv_heads=2),))
    for chosen in ((1, 2), (2, 1), (2, 1, 1, 99)):
        part = run("sdpa-math", cases=(case(heads=4, kv_heads=2),), heads=chosen)
        assert part.rows == tuple(row for row in whole.rows if row.head in (1, 2))
    swapped = run("sdpa-math", heads=(1, 0))
    assert swapped.rows == run("sdpa-math").rows


def test_the_request_is_in_the_report(run: Run, tmp_path: Path) -> None:
    """Enough to run it again: the report's request, read back, is the request with its
    formats by their names in rows, and gives the same rows."""
    asked = request("scaled", "sdpa-math", formats=("bf16", "fp32"), heads=(1,), seed=7)
    result = audit(asked, tmp_path / "first", command="numdev audit tiny.yaml")
    report.write(result, tmp_path / "first")
    stored = report.read(tmp_path / "first")
    again = AuditRequest.model_validate(json.loads(json.dumps(stored.request)))
    assert again == asked.model_copy(update={"formats": ("bfloat16", "float32")})
    assert audit(again, tmp_path / "second").rows == stored.rows
    assert stored.provenance.command == "numdev audit tiny.yaml"
    assert stored.provenance.system["cpu_capability"]
    source = dict(stored.provenance.source)
    assert source.pop("kernel_sources").keys() == {f"{__name__}:scaled"}
    assert source == {"config": "tiny.yaml", "cases": 1}


def test_a_finished_run_is_not_run_again(tmp_path: Path) -> None:
    """The same request calls no kernel and gives the same report; other threads are
    another run."""
    first = audit(request("plain"), tmp_path)
    calls.clear()
    lines: list[str] = []
    second = audit(request("plain"), tmp_path, say=lines.append)
    assert calls == []
    assert lines == ["Every task was finished before; --overwrite measures them again."]
    assert (second.rows, second.summary, second.cases) == (
        first.rows,
        first.summary,
        first.cases,
    )
    audit(request("plain"), tmp_path, overwrite=True)
    assert calls == ["plain"] * 2  # its noise is measured
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        with pytest.raises(UsageError, match="different environment: threads was"):
            audit(request("plain"), tmp_path)
    finally:
        torch.set_num_threads(threads)


def test_an_edited_kernel_is_another_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of the old code must not be taken for the new code's."""
    monkeypatch.syspath_prepend(tmp_path)
    module = tmp_path / "edited_kernel.py"
    module.write_text("def attend(q, k, v, is_causal=False):\n    return v * 1.0\n")
    audit(request(Choice(name="edited_kernel:attend")), tmp_path / "out")
    module.write_text("def attend(q, k, v, is_causal=False):\n    return v * 2.0\n")
    with pytest.raises(UsageError, match="different kernels: edited_kernel:attend was"):
        audit(request(Choice(name="edited_kernel:attend")), tmp_path / "out")


def test_another_file_at_the_same_path_is_another_run(tmp_path: Path) -> None:
    """Rows of the old tensors must not be taken for the new ones'."""
    path = tmp_path / "calls.safetensors"
    asked = request("plain", target="calls", checkpoint=str(path), cases=())
    for value in (1.0, 2.0):
        tensors = {f"0.{name}": torch.full((1, 2, 4, 8), value) for name in "qkv"}
        save_file(tensors, path, metadata={"numdev": '{"version": 1}'})
        if value == 1.0:
            audit(asked, tmp_path / "out")
    with pytest.raises(
        UsageError, match="holds a run with a different source: sha256 was"
    ):
        audit(asked, tmp_path / "out")


def test_a_checkpoint_is_audited_by_layer_and_head(tmp_path: Path) -> None:
    """The chosen layers of the demo, all their heads, eight sequences; sound kernels near
    floor."""
    asked = request(target="demo", checkpoint="demo", cases=(), layers=(1, 2), length=24)
    result = audit(asked, tmp_path)
    assert {row.layer for row in result.rows} == {1, 2}
    assert len({row.head for row in result.rows}) == result.cases[0].heads
    rows = rows_of(result, "sdpa-math", tensor="out")
    assert all(0.9 < row.floor_ratio < 1.5 for row in rows)
    assert all(row.flash_vs_precision > 0 for row in rows)
    assert [line.cells[0].text for line in next(maps(result)).rows] == ["1", "2"]


def test_each_kernel_is_held_to_its_own_tiles() -> None:
    """Whatever was predicted for other tiles before."""
    bench = prepare(make_case(dtype=torch.bfloat16, q_len=200, kv_len=200))
    for size in (16, 128):
        claim = {"preset": "fa2", "block_kv": size}
        assert torch.equal(
            bench.predicted(claim)["out"], emulation(bench.restricted, claim)
        )


@pytest.mark.parametrize("fmt", ["bfloat16", "float16", "float32", "float64"])
def test_every_format(run: Run, fmt: str) -> None:
    """Each format is audited in its own dtype; in float64 every row says
    reference-limited."""
    result = run("plain", "sdpa-math", formats=(fmt,))
    assert {row.format for row in result.rows} == {fmt}
    rows = rows_of(result, "sdpa-math")
    assert {row.out_format for row in rows} == {fmt}
    assert {row.reason for row in rows} == (
        {"reference-limited"} if fmt == "float64" else {None}
    )
    unit = {"bfloat16": 2**-8, "float16": 2**-11, "float32": 2**-24, "float64": 2**-53}[
        fmt
    ]
    assert all(0 < row.rms < 8 * unit for row in rows)
    (costs,) = {row.precision_rms == 0 for row in rows}
    assert costs == (fmt in ("float32", "float64"))  # inputs are drawn in fp32
