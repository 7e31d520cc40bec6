"""Does a kernel compute attention: `numdev kernels --check NAME`.

The small cases of configs/check/conformance.yaml, one feature at a time, are measured as an audit
measures them and held to configs/gate/conformance.yaml. A verdict is right, wrong (with the cause,
where `numdev.explain.wrong_function` names one), raises, or refuses: the kernel says that it
cannot, which is no fault. The value of a row that sees no key is a convention, whether two runs
agree bit by bit a property: both are said, and judged neither way.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from numdev.audit.attempt import copied
from numdev.audit.bench import Bench
from numdev.audit.check import declining
from numdev.audit.plan import Task
from numdev.audit.task import bench_of, measure_task
from numdev.cases import AttentionCase
from numdev.config import CaseConfig, CheckConfig
from numdev.errors import MeasurementError
from numdev.gate.rules import conformance_limits, value_of
from numdev.kernels import Kernel, Output
from numdev.kernels.output import GRADIENTS
from numdev.report import CheckRecord, ConformanceReport, DeviationRow, FeatureRecord
from numdev.sources.opening import Drawn
from numdev.system import System
from numdev.yamlfile import bundled, read_yaml

FORMATS = ("bfloat16", "float16", "float32")
# A head is right within one of these limits, and below `answer`.
EITHER = {"floor": "floor_ratio", "baseline": "baseline_ratio", "prediction": "expected_ratio"}
RANKS: tuple[Literal["wrong", "raises", "refuses", "right"], ...]
RANKS = ("wrong", "raises", "refuses", "right")


def small_cases() -> tuple[CaseConfig, ...]:
    """configs/check/conformance.yaml."""
    return read_yaml(bundled("check/conformance.yaml"), CheckConfig).cases


def conformance(
    kernel: Kernel,
    system: System,
    *,
    cases: Sequence[CaseConfig] | None = None,
    formats: Sequence[str] = FORMATS,
) -> ConformanceReport:
    """Check `kernel` on all cases in all formats; a format in which nothing runs is reported once.
    Raises MeasurementError where the kernel cannot run on `system`, or runs nothing."""
    if missing := kernel.missing(system):
        raise MeasurementError(f"{kernel.name} cannot run here: {missing}")
    checks: list[CheckRecord] = []
    for fmt in formats:
        here = [c for case in cases or small_cases() for c in _checked(kernel, case, fmt, system)]
        first, same = here[0], {"feature": "formats", "check": fmt}
        if any(c.verdict in ("right", "wrong") for c in here):
            runs = {"verdict": "right", "words": ""}
            checks += [*here, first.model_copy(update={**same, **runs})]
        else:
            checks.append(first.model_copy(update=same))
    if not any(c.verdict in ("right", "wrong") for c in checks):
        raise MeasurementError(f"{kernel.name} ran none of the checks: {checks[0].words}")
    return _report(kernel, system, checks)


def _checked(kernel: Kernel, config: CaseConfig, fmt: str, system: System) -> Iterator[CheckRecord]:
    """The verdict on one case in one format; on its log-sum-exp, where there is one."""
    feature = config.entry.partition(": ")[0]
    name = config.name.removeprefix(feature).lstrip(":/ ") or feature

    def record(words: str = "", of: str = feature, verdict: str = "wrong") -> CheckRecord:
        fields = {"feature": of, "check": name, "format": fmt, "verdict": verdict, "words": words}
        return CheckRecord.model_validate(fields)

    backward = feature.startswith("backward")
    drawn = Drawn(config=config, seed=0, source="", device=system.device, gradients=backward)
    case = drawn.load()
    if feature == "attention sinks":
        case = dataclasses.replace(case, sinks=torch.linspace(1.0, 4.0, case.heads).to(case.q))
    bench = bench_of(case, fmt, gradients=backward)
    written: set[str] = set()
    watched = declining(dataclasses.replace(kernel, function=_noting(kernel.function, written)))
    task = Task(
        case=case.ref,
        role="kernel",
        kernel=kernel.name,
        format=fmt,
        gradients=backward,
        repeats=2,
    )
    measured = measure_task(task, watched, bench, system)
    output, lacking = measured.output, [r for r in measured.rows if r.status != "ok"]
    if output is None or lacking:
        verdict = "refuses" if lacking[0].status == "skipped" else "raises"
        yield record(lacking[0].reason or "", verdict=verdict)
        return
    rows = [r for r in measured.rows if r.tensor in (GRADIENTS if backward else ("out",))]
    if written:
        yield record(f"it writes into its inputs ({', '.join(sorted(written))})")
    elif words := _wrong(rows):
        yield record(words)
    else:
        yield record(_convention(output, bench), verdict="right")
    if output.lse is not None and not backward:
        words = _wrong_lse(output.lse, bench)
        yield record(words, "log-sum-exp", "wrong" if words else "right")
    if feature == "batches":
        noise = max(r.noise or 0.0 for r in rows)
        words = f"not bit by bit: runs differ by {noise:.1e} in rms" if noise else "bit by bit"
        yield record(words, "reproducible", "right")


def _noting(function: Callable[..., Any], written: set[str]) -> Callable[..., Any]:
    """A kernel's function that notes which of its inputs it has changed."""

    def run(case: AttentionCase, **options: Any) -> Any:
        before = copied(case)
        result = function(case, **options)
        for name in ("q", "k", "v", "mask", "sinks"):
            x, was = getattr(case, name), getattr(before, name)
            if x is not None and not x.detach().equal(was.detach()):
                written.add(name)
        return result

    return run


def _wrong(rows: Sequence[DeviationRow]) -> str:
    """What is wrong with a call, in words; empty if nothing is."""
    bad = [row for row in rows if not _is_right(row)]
    if not bad:
        return ""
    # An error that the baseline makes as well is rounding, however much it looks like a mistake.
    if cause := next((row.suspicion for row in bad if row.suspicion), None):
        return cause
    worst = max(bad, key=lambda row: row.rel or 0.0)
    if strays := sum(row.nonfinite or 0 for row in bad):
        return f"{strays} elements of {worst.tensor} are NaN or infinite and should not be"
    size = f"{100 * worst.rel:.2g} % of the answer" if worst.rel else "more than the answer"
    return f"the error of {worst.tensor} is {size}, and no known mistake explains it"


def _is_right(row: DeviationRow) -> bool:
    """Whether one head's error is rounding."""
    if row.nonfinite or row.rms is None:
        return not row.nonfinite
    limits = conformance_limits()
    values = {name: value_of(row, metric)[0] for name, metric in EITHER.items()}
    near = any(x is not None and float(x) <= limits[name] for name, x in values.items())
    return near and (row.rel is None or row.rel < limits["answer"])


def _wrong_lse(lse: Tensor, bench: Bench) -> str:
    """What is wrong with a log-sum-exp; empty if nothing is. Rows without a key are left out."""
    case, empty = bench.case, bench.reference.empty
    o, r = (torch.where(empty, 0.0, x.double()) for x in (lse, bench.reference.lse))
    # A score is a sum of products, whose errors scale with the factors' sizes, not with the sum.
    sizes = [x.double().norm(dim=-1).amax() for x in (case.q, case.k)]
    largest = abs(case.scale) * float(sizes[0] * sizes[1])
    allowed = 4 * case.format.unit_roundoff * (1 + largest + r.abs())
    mistakes = {
        "": r,
        "it is in base 2; numdev expects the natural logarithm": r / math.log(2),
        "it is the sum of exponentials, not its logarithm": r.exp(),
    }
    off = f"it is off by up to {float((o - r).abs().max()):.2g}, and no known mistake explains it"
    return next((w for w, x in mistakes.items() if bool(((o - x).abs() <= allowed).all())), off)


def _convention(output: Output, bench: Bench) -> str:
    """What stands in rows that see no key; empty where there are none."""
    rows = output.out.double()[bench.reference.empty]
    if not len(rows):
        return ""
    what = "0" if bool((rows == 0).all()) else "NaN" if bool(rows.isnan().all()) else "neither"
    return f"a row that sees no key is {what}{' 0 nor NaN' if what == 'neither' else ''}"


# --- from checks to the report -------------------------------------------------------------------


def _report(kernel: Kernel, system: System, checks: Sequence[CheckRecord]) -> ConformanceReport:
    names = dict.fromkeys(c.feature for c in checks)
    features = [_feature(name, [c for c in checks if c.feature == name]) for name in names]
    bad = [f.feature for f in features if f.verdict in ("wrong", "raises")]
    refused = [f.feature for f in features if f.verdict == "refuses"]
    ran = len(features) - len(refused)
    sentence = f"{kernel.name} conforms in {ran} features."
    if bad:
        sentence = f"{kernel.name} does not conform: {', '.join(bad)}."
    if refused:
        sentence += f" It refuses {', '.join(refused)}."
    return ConformanceReport(
        kernel=kernel.name,
        options={},
        system=system.as_dict(),
        conforms=not bad,
        sentence=sentence,
        features=tuple(features),
        checks=tuple(checks),
    )


def _feature(name: str, checks: Sequence[CheckRecord]) -> FeatureRecord:
    """One feature's verdict, the worst of its checks (`partly` where some are refused), and each
    distinct remark once, with the first place where it holds unless it holds in all."""
    verdicts = {c.verdict for c in checks}
    worst = next(v for v in RANKS if v in verdicts)
    partly = verdicts == {"right", "refuses"}
    remarks: dict[str, list[CheckRecord]] = {}
    for check in checks:
        if check.words and (check.verdict == worst or partly):
            remarks.setdefault(check.words, []).append(check)
    words = []
    for remark, where in remarks.items():
        at = f"{where[0].check}, {where[0].format}"
        more = f", and {len(where) - 1} more" if len(where) > 1 else ""
        words.append(remark if len(where) == len(checks) else f"{remark} ({at}{more})")
    return FeatureRecord(
        feature=name,
        verdict="partly" if partly else worst,
        words="; ".join(words[:3]),
        right=sum(c.verdict == "right" for c in checks),
        checks=len(checks),
    )
