"""The measurement of a check: one kernel on small cases, judged by the gate's rules.
`numdev.testing` calls it."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Literal

from numdev.cases import AttentionCase, expect_values
from numdev.errors import Refused, UsageError, closest, one_line
from numdev.formats import all_finite
from numdev.gate.judgement import Judgement
from numdev.gate.judging import judgement_of, with_conclusions
from numdev.gate.rules import Rules, rules_as_data
from numdev.kernels import Kernel
from numdev.kernels.output import differentiate, refuse
from numdev.report import AuditReport, AuditSummary, CaseRecord
from numdev.request_models import CaseConfig, CheckConfig
from numdev.sources.captured_calls import holds_cases, open_cases
from numdev.sources.case_sources import ConfigSource, Located
from numdev.sources.input_regimes import REGIMES
from numdev.sources.upstream_gradients import with_drawn_gradient
from numdev.studies.audit.case_measurement import (
    Rows,
    Unmeasured,
    as_located,
    measured_here,
)
from numdev.studies.audit.deviation_rows import bare_row
from numdev.studies.audit.isolation import Failure, attempt, copied
from numdev.studies.audit.mistake_search import Failing, conclude
from numdev.studies.audit.plan import Plan
from numdev.studies.audit.prepared_attention import case_record
from numdev.studies.audit.run import provenance
from numdev.studies.audit.section_timing import Stopwatch
from numdev.system import System
from numdev.yamlfile import bundled_path, read_yaml, validated

# Of a case that does not say
SHAPE = {"batch": 2, "heads": 4, "seq_len": 129, "head_dim": 64}
FEATURES = bundled_path("check/features.yaml")  # one feature a case
Backward = bool | Literal["auto"]
Named = str | Path | Mapping[str, object] | AttentionCase  # what names a case, or several


def measured(
    source: CheckSource, plan: Plan, rules: Rules, request: Mapping[str, object]
) -> tuple[AuditReport, Judgement]:
    """Returns the report and the judgement of a plan's kernel on the source's cases,
    under the rules. A case that `Kernel.supports` declines gets skipped rows alone, of
    every role. The causes of calls that fail are searched together, when all are
    measured. `plan`: with one kernel of the role `kernel`; `request`: goes into the
    report as it is. Raises what loading a case raises."""
    watch = Stopwatch(plan.system.device)
    watch.searching = False  # calls that fail are named together, when all are measured
    later: list[Failing] = []
    done: dict[str, Rows] = {}
    kernel = next(planned.kernel for planned in plan.kernels if planned.role == "kernel")
    for located in source:
        tasks, case = list(plan.tasks(located.ref)), located.load()
        if why := kernel.supports(case):  # nobody to set floor and baseline beside
            declined = Failure("skipped", why)
            done[located.ref.case] = {
                "case": [case_record(case, located.axes, plan.formats)]
            }
            done |= {task.key: {"row": [bare_row(task, declined)]} for _, task in tasks}
            continue
        drawn = as_located(case, located.axes)  # once: it takes a tenth of a small call
        work = Unmeasured(drawn, tasks, plan, watch)
        done |= {key: rows for key, rows, _ in measured_here(work, attempt, later)}
    conclude(later)
    rows = tuple(row for each in done.values() for row in each.get("row", ()))
    report = AuditReport(
        provenance=provenance(
            plan.system, source.describe(), "numdev.check", plan.kernels
        ),
        request=dict(request),
        summary=AuditSummary(answer=(), kernels=()),
        plan=plan.record(located.ref for located in source),
        cases=tuple(case for each in done.values() for case in each.get("case", ())),
        rows=rows,
        timings=watch.seconds(),
    )
    report = report.model_copy(update={"rules": rules_as_data(rules)})
    judgement = judgement_of(report, rules)
    return with_conclusions(report, judgement), judgement


def declining(kernel: Kernel) -> Kernel:
    """Returns a copy of the kernel whose functions raise Refused in three cases: for V
    with an infinity, in place of NotImplementedError, and where PyTorch says that the
    chosen SDPA operator does not take the call. A backward `autograd` becomes a function
    that differentiates the forward pass; a kernel without a backward still has none."""

    def refusing(function: Callable[..., object]) -> Callable[..., object]:
        """Returns a function of a kernel, with these exceptions turned into Refused."""

        @functools.wraps(function)
        def run(case: AttentionCase, **options: object) -> object:
            """Returns what the kernel's function returns. Raises Refused where it
            declines the case, and its other exceptions as they are."""
            refuse(
                (
                    not all_finite([case.v]) and case.v.isinf().any(),
                    f"V is beyond the largest number of {case.format.name}",
                )
            )
            try:
                return function(case, **options)
            except RuntimeError as error:  # NotImplementedError is one
                if isinstance(error, NotImplementedError) or "No available kernel" in str(
                    error
                ):
                    raise Refused(one_line(error)) from error
                raise

        return run

    step = kernel.backward
    if step == "autograd":

        def step(case: AttentionCase, **options: object) -> object:
            return differentiate(lambda c: kernel.function(c, **options), case)

    backward = refusing(step) if callable(step) else None
    return dataclasses.replace(
        kernel, function=refusing(kernel.function), backward=backward
    )


class CheckSource(ConfigSource):
    """The cases of a check; `named` None: those of configs/check/default.yaml. `named`:
    names of these or of regimes of inputs, YAML files, captured tensors, mappings with
    the keys of a YAML case, or AttentionCases. Drawn cases come once for each seed, with
    grad_out where `gradients` is True. AttentionCases and captured calls come once; with
    `gradients` one without a grad_out gets one that is drawn with the first seed. Raises
    UsageError for an unknown name, for a wrong key or value, for a file that cannot be
    read, for a case without values, for no case or no seed, and for two cases of one name
    and seed."""

    def __init__(
        self,
        named: Sequence[Named] | None,
        seeds: Sequence[int],
        device: str,
        *,
        gradients: bool,
    ) -> None:
        if not seeds:
            raise UsageError(
                "seeds: expected at least one, got none", hint="for example seeds=0"
            )
        self._seeds, self._device, self._gradients = tuple(seeds), device, gradients
        self.target = "default cases" if named is None else "given cases"
        self.cases = [] if named is not None else self._draw_cases(default_cases())
        for number, each in enumerate(named or ()):
            self.cases += self._open_named(each, number)
        if not self.cases:
            raise UsageError(
                "cases: expected at least one, got none", hint="leave it out for all"
            )
        names = Counter((located.ref.case, located.ref.seed) for located in self.cases)
        (name, _), count = names.most_common(1)[0]
        if count > 1:
            raise UsageError(
                f"{count} cases are named {name!r}", hint="name each differently"
            )

    def _open_named(self, named: Named, number: int) -> Sequence[Located]:
        """Returns the located cases of one entry: a case, a mapping, a YAML file, a name,
        or captured tensors. A mapping without a name gets `case ` and `number`, and of
        SHAPE the sizes that it lacks. Raises UsageError for an unknown name, a wrong key
        or value, and a file that cannot be read or has no cases."""
        seed = self._seeds[0] if self._gradients else None
        if isinstance(named, AttentionCase):
            expect_values(named, f"attention case {named.ref.case!r}")
            return [as_located(with_drawn_gradient(copied(named, self._device), seed))]
        if isinstance(named, Mapping):
            return self._draw_cases(
                _parse_case({"name": f"case {number}", **SHAPE, **named})
            )
        path = Path(named)
        if path.suffix in (".yaml", ".yml"):
            return self._draw_cases(read_yaml(path, CheckConfig).cases)
        if not isinstance(named, Path) and not path.exists():
            return self._draw_cases(_named_configs(named))
        if not holds_cases(path):
            raise UsageError(
                f"{path}: holds no captured tensors",
                hint="see docs/inputs.md, or give a .yaml",
            )
        return open_cases(path, device=self._device, upstream=seed).cases

    def _draw_cases(self, configs: Sequence[CaseConfig]) -> list[Located]:
        """Returns the located cases of configurations, each once for every seed. Nothing
        is drawn yet."""
        on, seeds = System(device=self._device), self._seeds
        source = ConfigSource(self.target, configs, seeds, on, gradients=self._gradients)
        return list(source)


# Keys: the least that most kernels take at once; their tiles are multiples of it
TILE = 64
LEAST_IN_TILE = 16  # keys in the last tile from which on an error there is no small one


def _has_distinct_group(c: CaseRecord) -> bool:
    """Whether there are several kv heads, fewer than query heads, and a group has another
    number of query heads than there are kv heads."""
    return 1 < c.kv_heads < c.heads != c.kv_heads**2


def _has_more_queries(c: CaseRecord) -> bool:
    """Whether there are more queries than keys."""
    return c.q_len > c.kv_len


def _has_more_keys(c: CaseRecord) -> bool:
    """Whether there are more keys than queries, and several queries."""
    return 1 < c.q_len < c.kv_len


def _has_single_query(c: CaseRecord) -> bool:
    """Whether there is one query, and several keys."""
    return c.q_len == 1 < c.kv_len


def _has_full_last_tile(c: CaseRecord) -> bool:
    """Whether the keys fill two or more whole tiles of TILE."""
    return c.kv_len > TILE and not c.kv_len % TILE


def _has_partial_last_tile(c: CaseRecord) -> bool:
    """Whether the keys are more than one tile of TILE, and the last tile has at least
    LEAST_IN_TILE keys and is not full."""
    return c.kv_len > TILE and c.kv_len % TILE >= LEAST_IN_TILE


def _has_length_of_head_dim(c: CaseRecord) -> bool:
    """Whether the numbers of queries and of keys, and the head dimension, are equal."""
    return c.q_len == c.kv_len == c.head_dim


def _has_other_v_dim(c: CaseRecord) -> bool:
    """Whether V has another width than q and k."""
    return c.v_dim != c.head_dim


def _has_batch(c: CaseRecord) -> bool:
    """Whether there are several sequences."""
    return c.batch > 1


SHAPES: Mapping[str, Callable[[CaseRecord], bool]] = {
    "a group size unlike the number of kv heads": _has_distinct_group,
    "more queries than keys": _has_more_queries,
    "more keys than queries": _has_more_keys,
    "a single query": _has_single_query,
    "several tiles of keys, the last one full": _has_full_last_tile,
    "several tiles of keys, the last one partly full": _has_partial_last_tile,
    "a length equal to head_dim": _has_length_of_head_dim,
    "V of another width": _has_other_v_dim,
    "several sequences": _has_batch,
}
"""What sizes of a call may be to each other, where code that takes one for another goes
wrong."""


def untested_shapes(called: Collection[CaseRecord]) -> list[str]:
    """Returns which of SHAPES no call has, in words and in the order of SHAPES; last `a
    window to both sides`, where calls have windows and none of them to both."""
    untested = [words for words, has in SHAPES.items() if not any(map(has, called))]
    windows = [case.window for case in called if case.window is not None]
    if windows and not any(left and right for left, right in windows):
        untested.append("a window to both sides")
    return untested


def default_cases() -> tuple[CaseConfig, ...]:
    """Returns the cases of configs/check/default.yaml, which is read each time."""
    return read_yaml(bundled_path("check/default.yaml"), CheckConfig).cases


def _named_configs(name: str) -> Sequence[CaseConfig]:
    """Returns the configurations that a name stands for: one case of the default set; or
    of a regime of inputs two, without and with causality. Raises UsageError for an
    unknown name."""
    defaults = {config.name: config for config in default_cases()}
    if name in defaults:
        return [defaults[name]]
    if name not in REGIMES:
        what = f"{name!r} is not a case, an input regime or a file"
        raise UsageError(what, hint=closest(name, [*defaults, *REGIMES]))
    return _parse_case({**SHAPE, "name": name, "inputs": name, "causal": [False, True]})


def _parse_case(case: Mapping[str, object]) -> Sequence[CaseConfig]:
    """Returns the configurations of a mapping with the keys of a YAML case; lists in it
    are a grid. Raises UsageError for a wrong key or value, and for a grid of too many
    cells."""
    return validated({"cases": [case]}, CheckConfig, "cases").cases
