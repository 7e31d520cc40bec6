"""The kinds of reports, and what each brings: the one place where a study is registered.

A kind lives in its own folder. All other code (reading, judging, comparing, showing) asks
here, and knows no kind by name. What a kind brings needs neither torch nor a GPU."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from numdev.errors import UsageError

if TYPE_CHECKING:
    from pydantic import BaseModel

    from numdev.gate.compare_report import Compared
    from numdev.gate.judgement import Beside, Judgement, Statement, Test
    from numdev.gate.row_pairs import RowKeys
    from numdev.gate.rules import Rules
    from numdev.report.document import Node, Style
    from numdev.report.records.reports import Finding, Report

R = TypeVar("R", bound="Report")

REGISTERED: Mapping[str, str] = {
    "audit": "numdev.studies.audit.kind:AUDIT",
    "function": "numdev.studies.audit.function_reports:FUNCTION",
    "sweep": "numdev.studies.audit.kind:SWEEP",
    "effects": "numdev.studies.effects.kind:EFFECTS",
    "invariance": "numdev.studies.invariance.kind:INVARIANCE",
    "logprobs": "numdev.studies.logprobs.kind:LOGPROBS",
    "compare": "numdev.gate.compare_kind:COMPARE",
    "train": "numdev.studies.training.kinds:TRAIN",
    "bounds": "numdev.studies.training.kinds:BOUNDS",
    "weights": "numdev.studies.training.kinds:WEIGHTS",
    "diagnose": "numdev.studies.diagnose.kind:DIAGNOSE",
}


@dataclass(frozen=True, kw_only=True)
class Judged(Generic[R]):
    """How reports of a kind are judged by rules. All functions are pure: they read a
    report's plan and rows, never its summary."""

    check: Callable[[R], None]
    """Raises MeasurementError for a report that contradicts its plan, or itself."""
    tests: Callable[[R, Rules], Iterator[Test]]
    """Exactly one for each thing planned."""
    findings: Callable[[Judgement, R], tuple[Sequence[Finding], Sequence[str]]]
    """What is wrong, the gravest first; and sentences on what was tested and what was
    not."""
    summarised: Callable[[R], R]
    """A report that has its findings, with all else that follows from its rows: its
    summary."""
    beside: Callable[[R, Rules], Beside] = lambda report, rules: {}
    """Further fields of a Judgement: `power`, `fa_rule`."""
    passing: Callable[[R, Sequence[Test]], Statement | None] = lambda report, tests: None
    """What to say of a kernel that passed; None where a view has better."""


@dataclass(frozen=True, kw_only=True)
class Kind(Generic[R]):
    report: type[R]
    blocks: Callable[[R], Iterator[Node]]
    """What is shown of a report below its verdicts."""
    styles: Callable[[R], Sequence[Style]] = lambda report: ()
    """The styles of the first sentences of its answer, where these are verdicts."""
    judged: Judged[R] | None = None
    moves: Callable[[R, R], tuple[RowKeys[Any], Compared]] | None = None
    """What moved from an older report to a newer one."""
    has_map: bool = False  # of cells, on its page, that findings link to
    limits: type[BaseModel] | None = None
    """The model of the limits that a rules file has under the kind's name."""


def kind_of(name: str) -> Kind[Any]:
    """Returns the kind of reports of a name in REGISTERED, and imports its module. Raises
    KeyError for another name."""
    module, _, attribute = REGISTERED[name].partition(":")
    kind: Kind[Any] = getattr(importlib.import_module(module), attribute)
    return kind


def judged_by(name: str) -> Judged[Any]:
    """Returns how reports of a kind, by its name in REGISTERED, are judged. Raises
    UsageError for a kind that is not judged, KeyError for an unknown name."""
    judged = kind_of(name).judged
    if judged is None:
        raise UsageError(f"expected a report that is judged, got one of {name}")
    return judged
