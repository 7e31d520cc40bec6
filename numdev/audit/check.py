"""A check: one kernel on small cases, held to the gate's rules. What `numdev.check` offers.
Nothing is kept on disk but the script of what is found."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from numdev.audit.isolation import attempt, copied
from numdev.audit.plan import Plan, Planned, plan_formats, plan_kernels, recorded
from numdev.audit.reproduce import reproduce
from numdev.audit.run import provenance
from numdev.audit.task import Rows, as_located, measured_here
from numdev.audit.timing import Stopwatch
from numdev.cases import AttentionCase
from numdev.config import CaseConfig, CheckConfig
from numdev.errors import Refused, UsageError, closest, one_line
from numdev.gate.findings import findings_of
from numdev.gate.judging import judge_report
from numdev.gate.rules import Rules
from numdev.gate.verdict import Judgement
from numdev.kernels import Kernel
from numdev.kernels.output import GRADIENTS, differentiate, refuse
from numdev.report import AuditReport
from numdev.report.summary import summarise
from numdev.sources.loss import with_drawn
from numdev.sources.opening import ConfigSource, Located
from numdev.sources.regimes import REGIMES
from numdev.sources.tensorfile import holds_cases, open_cases
from numdev.system import System
from numdev.yamlfile import bundled, read_yaml, validated

SECONDS = 3.0  # how long a finding is made smaller: somebody waits for the test
SEARCHES = 3  # for a name of one tensor: a check that fails shall not take twice as long
SHAPE = {"batch": 2, "heads": 4, "seq_len": 129, "head_dim": 64}  # of a case that does not say
FEATURES = bundled("check/features.yaml")  # one feature a case
Backward = bool | Literal["auto"]
Named = str | Path | Mapping[str, Any] | AttentionCase  # what names a case, or several


def check(
    kernel: Kernel,
    source: CheckSource,
    *,
    formats: Sequence[str],
    rules: Rules,
    backward: Backward,
    system: System,
    reproducers: Callable[[], Path],
    asked: Mapping[str, Any],
) -> tuple[AuditReport, Judgement, bool, list[Path], list[str]]:
    """Measure `kernel` on the source's cases, judge it, and write a script of the gravest finding;
    returns the report, the judgement, whether it passed, the script, and why there is none.
    `reproducers` makes the directory for a script.
    With `backward` True a kernel whose gradients could not be measured does not pass. Raises
    UsageError for a format no kernel can run in, MeasurementError for another system's rules."""
    kernel = declining(kernel)
    rules = rules.model_copy(update={"skipped": "allow"})  # what it declines is said, not judged
    planned = Planned(role="kernel", kernel=kernel, options=recorded(kernel.with_options({})))
    kernels = [*plan_kernels(()), planned]
    plan = Plan(
        system=system,
        formats=plan_formats(formats, kernels),
        kernels=kernels,
        backward=backward is not False,
        repeats=2,
    )
    watch = Stopwatch(system.device)
    watch.most_searches = SEARCHES
    done: dict[str, Rows] = {}
    for located in source:
        tasks = plan.tasks(located.ref)
        done |= {key: rows for key, rows, _ in measured_here(located, tasks, plan, attempt, watch)}
    rows = tuple(row for each in done.values() for row in each.get("row", ()))
    record = plan.record(located.ref for located in source)
    judged = findings_of(rows, record, rules)
    report = AuditReport(
        provenance=provenance(system, source.describe(), "numdev.check"),
        request=dict(asked),
        summary=summarise(rows, judged.findings),
        **judged._asdict(),
        plan=record,
        cases=tuple(case for each in done.values() for case in each.get("case", ())),
        rows=rows,
        timings=watch.seconds(),
    )
    judgement = judge_report(report, rules)
    trained = any(r.tensor in GRADIENTS and r.status == "ok" and r.role == "kernel" for r in rows)
    scripts: list[Path] = []
    said: list[str] = []
    # Of a row that sees no key there is no truth that a script could show an error against.
    serious = [f for f in judged.findings if f.severity != "note" and f.metric != "empty_nonfinite"]
    if wanted := [f for f in serious if f.place is not None][:1]:
        where = reproducers()
        scripts = reproduce(
            wanted, source, plan, attempt, where, said.append, count=1, seconds=SECONDS
        )
    if backward is True and not trained:
        said.append("backward=True asks for gradients, and none could be measured.")
    passed = judgement.outcome == "passed" and (backward is not True or trained)
    return report, judgement, passed, scripts, said


def declining(kernel: Kernel) -> Kernel:
    """The kernel, with a NotImplementedError taken for a refusal (in backward: there is none), and
    what PyTorch raises where the chosen SDPA operator takes no such call."""

    def refusing(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(case: AttentionCase, **options: Any) -> Any:
            refuse((case.v.isinf().any(), f"V is beyond the largest number of {case.format.name}"))
            try:
                return function(case, **options)
            except RuntimeError as error:  # NotImplementedError is one
                if isinstance(error, NotImplementedError) or "No available kernel" in str(error):
                    raise Refused(one_line(error)) from error
                raise

        return run

    step = kernel.backward
    if step == "autograd":

        def step(case: AttentionCase, **options: Any) -> Any:
            return differentiate(lambda c: kernel.function(c, **options), case)

    backward = refusing(step) if callable(step) else None
    return dataclasses.replace(kernel, function=refusing(kernel.function), backward=backward)


class CheckSource(ConfigSource):
    """Cases named by a kernel's author (None: configs/check/default.yaml): a name of these or of a
    regime of inputs, a YAML file, captured tensors, a mapping with the keys of a YAML case, a call
    at hand. Drawn ones come once for each seed, with grad_out if wanted. Raises UsageError for a
    name that is none, for what cannot be read, and for two cases of one name."""

    def __init__(
        self, named: Sequence[Named] | None, seeds: Sequence[int], device: str, *, gradients: bool
    ) -> None:
        if not seeds:
            raise UsageError("no seed is given", hint="give one, for example seeds=0")
        self._seeds, self._device, self._gradients = tuple(seeds), device, gradients
        self.target = "default cases" if named is None else "given cases"
        self.cases = [] if named is not None else self._drawn(default_cases())
        for number, each in enumerate(named or ()):
            self.cases += self._located(each, number)
        if not self.cases:
            raise UsageError("cases: expected at least one, got none", hint="leave it out for all")
        names = Counter((located.ref.case, located.ref.seed) for located in self.cases)
        (name, _), count = names.most_common(1)[0]
        if count > 1:
            raise UsageError(f"{count} cases are named {name!r}", hint="name each differently")

    def _located(self, named: Named, number: int) -> Sequence[Located]:
        seed = self._seeds[0] if self._gradients else None
        if isinstance(named, AttentionCase):
            return [as_located(with_drawn(copied(named, self._device), seed))]
        if isinstance(named, Mapping):
            return self._drawn(_configured({"name": f"case {number}", **SHAPE, **named}))
        path = Path(named)
        if path.suffix in (".yaml", ".yml"):
            return self._drawn(read_yaml(path, CheckConfig).cases)
        if not isinstance(named, Path) and not path.exists():
            return self._drawn(_by_name(named))
        if not holds_cases(path):
            raise UsageError(
                f"{path}: holds no captured tensors", hint="see docs/inputs.md, or give a .yaml"
            )
        return open_cases(path, device=self._device, upstream=seed).cases

    def _drawn(self, configs: Sequence[CaseConfig]) -> list[Located]:
        on, seeds = System(device=self._device), self._seeds
        source = ConfigSource(self.target, configs, seeds, on, gradients=self._gradients)
        return list(source)


def default_cases() -> tuple[CaseConfig, ...]:
    """configs/check/default.yaml."""
    return read_yaml(bundled("check/default.yaml"), CheckConfig).cases


def _by_name(name: str) -> Sequence[CaseConfig]:
    """A case of the default set, or a regime of inputs, without and with a causal mask."""
    known = {config.name: config for config in default_cases()}
    if name in known:
        return [known[name]]
    if name not in REGIMES:
        raise UsageError(
            f"no case, no regime of inputs and no file is named {name!r}",
            hint=closest(name, [*known, *REGIMES]),
        )
    return _configured({**SHAPE, "name": name, "inputs": name, "causal": [False, True]})


def _configured(case: Mapping[str, Any]) -> Sequence[CaseConfig]:
    return validated({"cases": [case]}, CheckConfig, "cases").cases
