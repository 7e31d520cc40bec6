"""Another operation than attention: an RMSNorm with two rounding sites goes through rows,
gate, findings and report, and a wrong eps is caught and named. Nothing outside this file
knows it."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from on_bench import THIS_CPU
from torch import Tensor

from numdev.cases import CaseRef
from numdev.cli.main import cli
from numdev.formats import Format, format_named, format_of, round_to
from numdev.gate.judging import judgement_of, with_conclusions
from numdev.gate.rules import default_rules, rules_as_data
from numdev.kernels import Kernel
from numdev.metrics.deviation import Deviation, Metrics
from numdev.metrics.finiteness import Outside
from numdev.metrics.yardstick import Yardstick
from numdev.report import (
    AuditReport,
    AuditSummary,
    Extent,
    FunctionCallRecord,
    PlannedKernel,
    PlanRecord,
    write,
)
from numdev.studies.audit.case_measurement import measure_task
from numdev.studies.audit.kind import summarised
from numdev.studies.audit.operation import Distance, Everything
from numdev.studies.audit.plan import Task
from numdev.studies.audit.run import provenance
from numdev.studies.audit.section_timing import Stopwatch
from numdev.tensor_properties import TENSORS, TensorSpec

ROWS, WIDTH, EPS = 64, 256, 1e-6


@dataclass(frozen=True, kw_only=True)
class Normed:
    """What an implementation returns: [1, 1, ROWS, WIDTH] each."""

    tensors: Mapping[str, Tensor]
    ran: str | None = None
    ran_backward: str | None = None


def rms_norm(case: Mapping[str, Tensor], eps: float, fmt: Format | None) -> Normed:
    """Forward and backward in fp64; rounded at two sites, n and what comes out, if a
    format is given. Backward, the gradient of n and of x."""

    def site(value: Tensor) -> Tensor:
        return value if fmt is None else round_to(value, fmt)

    x, w, upstream = (case[name].double() for name in ("x", "w", "upstream"))
    r = (x.square().mean(dim=-1, keepdim=True) + eps).rsqrt()
    back = site(upstream * w)
    dx = r * (back - x * r * (back * x * r).mean(dim=-1, keepdim=True))
    return Normed(tensors={"out": site(site(x * r) * w), "x_grad": site(dx)})


def plain(case: Mapping[str, Tensor], *, eps: float = EPS) -> Normed:
    """PyTorch's own bfloat16, as models write it: normalised in fp32, cast, weighted."""
    x = case["x"].requires_grad_()
    wide = x.float()
    n = wide * (wide.square().mean(dim=-1, keepdim=True) + eps).rsqrt()
    out = n.to(x.dtype) * case["w"]
    (dx,) = torch.autograd.grad(out, x, case["upstream"])
    return Normed(tensors={"out": out.detach(), "x_grad": dx}, ran="aten::mul")


def implementation(name: str, function: Any = plain) -> Kernel:
    """One that says to round at the two sites."""
    claim = {"preset": "its two sites"}
    return Kernel(name=name, function=function, claims=lambda *call: claim)


def run(kernel: Kernel, case: Mapping[str, Tensor], options: Any, gradients: bool) -> Any:
    return kernel.function({name: t.detach().clone() for name, t in case.items()})


@dataclass(frozen=True, kw_only=True, eq=False)
class Call:
    """The operation's `PreparedCall`: all of its one unit's rows are measured."""

    case: dict[str, Tensor]
    format: Format
    watch: Stopwatch = field(default_factory=Stopwatch)
    distances: Mapping[str, Distance] = field(default_factory=dict)
    by_row: Sequence[str] = ("out", "x_grad")
    unscreened: str | None = None
    exact_by: str | None = "fp64"
    selection: Everything = field(default_factory=Everything)
    dtype: torch.dtype = torch.bfloat16

    @cached_property
    def yardsticks(self) -> dict[str, Yardstick]:
        exact, scale = rms_norm(self.case, EPS, None).tensors, self.term_scales()
        return {
            name: Yardstick(
                reference=exact[name], term_scale=scale[name], format=self.format,
                empty=torch.zeros(1, 1, ROWS, dtype=torch.bool), unrounded=exact[name],
                baseline=self.baseline.tensors[name],
            )
            for name in self.by_row
        }  # fmt: skip

    def term_scales(self) -> dict[str, Tensor]:
        magnitudes = {name: x.abs() for name, x in self.case.items()}
        magnitudes["x"] = -magnitudes["x"]  # so that both terms of dx have one sign
        exact = rms_norm(magnitudes, EPS, None).tensors
        return {name: x.abs() for name, x in exact.items()}

    @cached_property
    def baseline(self) -> Any:
        return run(implementation("plain"), self.case, {}, True)

    restricted = property(lambda self: self.case)
    as_output = staticmethod(lambda tensors, ran=None: Normed(tensors=tensors, ran=ran))
    format_of = staticmethod(lambda x: format_of(x.dtype))
    unpredicted = staticmethod(lambda claim, fmt: None)

    def expected(self, claim: Any, output: Any) -> Mapping[str, Tensor]:
        return rms_norm(self.case, EPS, self.format).tensors

    def outside_sample(self, output: Any) -> Mapping[str, Sequence[Outside]]:
        return {}

    def annotate(
        self,
        output: Any,
        tensor: str,
        units: Sequence[Metrics],
        deviation: Deviation,
        measured: Tensor,
    ) -> None:
        """Names an eps that explains an output ten times better than the right one."""
        exact = self.yardsticks["out"].reference
        for eps in (1e-8, 1e-5) if tensor == "out" else ():
            other = rms_norm(self.case, eps, None).tensors["out"]
            cut = float((measured - exact).norm() / (measured - other).norm())
            if cut >= 10:
                units[0].update({"suspicion": f"eps is {eps:g}", "suspicion_cut": cut})


class RmsNorm:
    """The operation: no rows are sampled, and causes are named with the rows."""

    screened = staticmethod(lambda call, output: call)
    explained = staticmethod(lambda kernel, options, runs, measured, *others: measured)


def audited(kernels: Sequence[Kernel]) -> AuditReport:
    """All roles on one call with rows of very different sizes."""
    generator = torch.Generator().manual_seed(0)
    x, upstream = (torch.randn(1, 1, ROWS, WIDTH, generator=generator) for _ in range(2))
    w = 1 + 0.1 * torch.randn(WIDTH, generator=generator)
    sizes = torch.logspace(-3, 1, ROWS)[:, None]
    case = {"x": x * sizes, "w": w, "upstream": upstream}
    case = {name: t.bfloat16() for name, t in case.items()}
    call = Call(case=case, format=format_named("bfloat16"))
    ref = CaseRef(case="rms_norm", source="drawn", module="norm", call=0)
    roles: list[tuple[Any, Kernel]] = [
        ("precision", implementation("reference")),
        ("floor", implementation("floor")),
        ("baseline", implementation("baseline")),
        *(("kernel", kernel) for kernel in kernels),
    ]
    rows = []
    for role, kernel in roles:
        repeats = 2 if role == "kernel" else 1
        task = Task(case=ref, role=role, kernel=kernel.name, format="bfloat16",
                    gradients=True, repeats=repeats)  # fmt: skip
        rows += measure_task(task, kernel, call, THIS_CPU, run, None, RmsNorm()).rows
    extent = Extent(units=1, rows=ROWS, width=WIDTH)
    report = AuditReport(
        provenance=provenance(THIS_CPU, {}, "numdev.audit"), request={},
        summary=AuditSummary(answer=(), kernels=()), rows=tuple(rows),
        plan=PlanRecord(
            kernels=tuple(PlannedKernel(role=r, kernel=k.name, options={}) for r, k in roles),
            formats=("bfloat16",), calls=(("rms_norm", None),), backward=True, repeats=2,
        ),
        cases=(FunctionCallRecord(case="rms_norm", batch=1, source_format="bfloat16",
                                  tensors={"out": extent, "x_grad": extent}),),
    )  # fmt: skip
    report = report.model_copy(update={"rules": rules_as_data(default_rules())})
    return summarised(with_conclusions(report, judgement_of(report, default_rules())))


def test_a_sound_norm_passes_and_a_wrong_eps_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no page speaks of attention."""
    monkeypatch.chdir(tmp_path)
    report = audited([implementation("fused")])
    assert [row.tensor for row in report.rows if row.kernel == "fused"] == [
        "out",
        "x_grad",
    ]
    for row in report.rows:
        if row.kernel == "fused":
            assert row.expected_ratio == pytest.approx(1, abs=0.02), row.tensor
    assert report.passed, [finding.sentence for finding in report.findings]

    wrong = implementation("fused", lambda case: plain(case, eps=1e-5))
    report = audited([wrong])
    assert not report.passed
    assert "eps is 1e-05" in report.findings[0].sentence
    assert report.findings[0].sentence.startswith(
        "fused (bfloat16) is wrong: eps is 1e-05"
    )
    assert "In 1 of 1 results, worst at rms_norm." in report.findings[0].details
    write(report, tmp_path)
    options = {
        "gate": ("--junit", tmp_path / "junit.xml", "--summary", tmp_path / "gate.md"),
        "report": ("--format", "html"),
        "compare": (tmp_path,),
    }
    codes = {}
    for command, more in options.items():
        ran = CliRunner().invoke(
            cli, [command, str(tmp_path), *map(str, more)], standalone_mode=False
        )
        codes[command] = ran.return_value
        shown = re.sub(r"<(script|style).*?</\1>", "", ran.output, flags=re.DOTALL)
        words = re.sub("</?span[^>]*>", "", shown)  # a number is never broken over lines
        assert "eps is 1e-05" in words or command == "compare"
        assert not OF_ATTENTION.findall(shown), command
    assert (codes["gate"], codes["compare"]) == (1, 0)
    for file in ("junit.xml", "gate.md"):
        text = re.sub(r"\bhead 0\b", "", (tmp_path / file).read_text())  # a place's field
        assert not OF_ATTENTION.findall(text), file


@pytest.mark.parametrize("factor", [1.0, 1 + 2**-7, math.nan])
@pytest.mark.parametrize("tensor", ["out", "x_grad"])
def test_every_tensor_of_an_operation_is_judged(tensor: str, factor: float) -> None:
    """By the default rules: two ulps more in any of them is no pass."""

    def scaled(case: Mapping[str, Tensor]) -> Normed:
        tensors = dict(plain(case).tensors)
        tensors[tensor] = tensors[tensor] * factor
        return Normed(tensors=tensors)

    report = audited([implementation("fused", scaled)])
    assert report.passed == (factor == 1)
    accused = {finding.tensor for finding in report.findings}
    assert accused == (set() if factor == 1 else {tensor})


def test_tensors_with_properties_are_still_no_attentions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An operation adds its tensors to TENSORS; a comparison has its words then too."""
    spec = TensorSpec(name="x_grad", of_input="x", words="the gradient of x")
    monkeypatch.setitem(TENSORS, "x_grad", spec)
    monkeypatch.chdir(tmp_path)
    write(audited([implementation("fused")]), tmp_path)
    ran = CliRunner().invoke(cli, ["compare", str(tmp_path), str(tmp_path)])
    assert "x_grad" in ran.output
    assert not OF_ATTENTION.findall(ran.output)


# But for the name of a rule, and of what an HTML page is made of
OF_ATTENTION = re.compile(
    r"(?i)[^\n.]*\b(?<!typical )(?<!<)(?<!</)(?:heads?|eager|attention|quer(?:y|ies)|q, k, v)\b[^\n.]*"
)
