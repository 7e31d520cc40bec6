"""`check_attention`: an audit with a verdict, as an assertion in a kernel author's own tests."""

from __future__ import annotations

import dataclasses
import itertools
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from numdev.audit.check import Backward, CheckSource, Named, check
from numdev.audit.isolation import threads
from numdev.audit.script import folder_of, name_of
from numdev.cases import AttentionCase
from numdev.errors import UsageError
from numdev.gate import check_words as checkwords
from numdev.gate.rules import Rules, default_rules_for_checks, read_rules
from numdev.gate.verdict import Judgement
from numdev.kernels import Kernel, find, of_function
from numdev.kernels.plain import takes
from numdev.report import AuditReport
from numdev.system import System
from numdev.yamlfile import validated

Thresholds = str | Path | Mapping[str, Any] | Rules | None
Cases = Named | Sequence[Named] | None


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    """What a check found. As a string, its sentences."""

    kernel: str  # `module:function`, where it can be imported as that; else the function's name
    passed: bool
    report: AuditReport = field(repr=False)  # as `numdev audit` makes it
    judgement: Judgement = field(repr=False)  # as `numdev gate` makes it
    skipped: tuple[str, ...] = ()  # what was not tested, a sentence for each reason
    reproducer: Path | None = None  # of a failed check: shows the gravest finding by itself
    words: str = field(repr=False)

    def __str__(self) -> str:
        return self.words

    @property
    def in_short(self) -> str:
        """A failed check in one line."""
        return checkwords.in_short(self.report, self.judgement)


class CheckFailed(AssertionError):
    """A kernel exceeds a limit, or could not be measured, which is no pass. `result` has it all."""

    def __init__(self, result: CheckResult) -> None:
        super().__init__(str(result))
        self.result = result


def check_attention(
    function: Callable[..., Any] | Kernel,
    *,
    cases: Cases = None,
    formats: str | Sequence[str] = ("bfloat16", "float16"),
    backward: Backward = "auto",
    device: str = "auto",
    seeds: int | Sequence[int] = 0,
    thresholds: Thresholds = None,
    claims: Mapping[str, Any] | None = None,
    reproducers: str | Path | None = None,
) -> CheckResult:
    """Raise CheckFailed unless `function(q, k, v, ...)` computes attention as well as it can.

    q is [batch, heads, q_len, head_dim], k [batch, kv_heads, kv_len, head_dim], v [batch, kv_heads,
    kv_len, v_dim]; it returns the output [batch, heads, q_len, v_dim], or a tuple of that and the
    log-sum-exp [batch, heads, q_len]. What else it takes is read off its parameters' names
    (docs/kernels.md); a `Kernel` is checked as it is. What it has no parameter for, and what it
    raises NotImplementedError or `numdev.kernels.Refused` for, is skipped, and said. There is no
    tolerance to choose: errors are held against the fp64 result of the same rounded inputs, its one
    rounding (the floor), and what the kernel's own roundings predict, by the rules of `numdev
    gate`. On the CPU PyTorch uses one thread meanwhile.

    `cases`: one, or a list, of: a name from configs/check/default.yaml; a regime of inputs
    (docs/hazards.md); a path of captured tensors or of a YAML file; a mapping with keys of a YAML
    case (docs/inputs.md), the rest filled in; an AttentionCase. None: the whole default set.
    `formats`: names, as `bfloat16`. `backward`: True: dq, dk and dv must be measured; False: they
    are not; "auto": they are where autograd can follow. `seeds`: of drawn inputs; each is another
    set of cases. `thresholds`: a gate file, its content as a mapping, or None for the default
    rules. `claims`: options of `emulated` that say how the function rounds, as
    `{"preset": "eager"}`; None: as it was registered, else as FlashAttention-2 does.
    `reproducers`: a directory for the script of a failed check; None makes a temporary one.

    Raises CheckFailed, an AssertionError, where a limit is exceeded, a call failed, or nothing was
    measured; UsageError for wrong arguments, MeasurementError for rules made for another system."""
    __tracebackhide__ = True
    if isinstance(function, Kernel):
        kernel, name, folder = function, function.name, None
    else:
        name, folder = name_of(function), folder_of(function)
        kernel = of_function(name, function)
    if claims is not None:
        find("emulated").with_options(claims)  # refuses what is no option
        kernel = dataclasses.replace(kernel, claims=lambda case, output, system: claims)
    one = isinstance(cases, str | Path | Mapping | AttentionCase)
    listed: Any = [cases] if one else cases
    formats = (formats,) if isinstance(formats, str) else tuple(formats)
    seeds = (seeds,) if isinstance(seeds, int) else tuple(seeds)
    rules = _rules(thresholds)
    if not formats:
        raise UsageError("formats: expected at least one, got none")
    asked = {
        "target": name,
        "formats": list(formats),
        "backward": backward,
        "seeds": list(seeds),
        "rules": rules.name,
        "claims": None if claims is None else dict(claims),
    }
    # The calls are tiny, and threads would wait for each other: where a test-suite keeps all cores
    # busy they make a check ten times slower.
    with threads(1):
        system = System.here(device)
        source = CheckSource(listed, seeds, system.device, gradients=backward is not False)
        report, judgement, passed, scripts, said = check(
            kernel, source, formats=formats, rules=rules, backward=backward, system=system,
            folder=folder, asked=asked, reproducers=lambda: _directory(reproducers, name),
        )  # fmt: skip
    parts = (name, report, judgement)
    left_out = tuple(checkwords.not_tested(report))
    if kernel.adapted is not None and not takes("gqa", kernel.adapted):
        left_out += tuple(checkwords.repeated(report))  # it cannot be told of grouped heads
    words = checkwords.success(*parts, left_out)
    if not passed:
        words = checkwords.failure(*parts, scripts, said, left_out)
    result = CheckResult(
        kernel=name, passed=passed, report=report, judgement=judgement,
        skipped=left_out, reproducer=next(iter(scripts), None), words=words,
    )  # fmt: skip
    if not passed:
        raise CheckFailed(result)
    return result


def _rules(thresholds: Thresholds) -> Rules:
    """Raises UsageError, naming the key, for what are no rules."""
    if thresholds is None:
        return default_rules_for_checks()
    if isinstance(thresholds, Rules):
        return thresholds
    if isinstance(thresholds, Mapping):
        return validated({"name": "given", **thresholds}, Rules, "thresholds")
    return read_rules(Path(thresholds))


def _directory(given: str | Path | None, name: str) -> Path:
    """A folder of its own for this check."""
    if given is None:
        return Path(tempfile.mkdtemp(prefix="numdev-check-"))
    stem = Path(given) / re.sub(r"[^\w.-]+", "-", name)
    tried = (stem.with_name(f"{stem.name}-{i}" if i > 1 else stem.name) for i in itertools.count(1))
    return next(path for path in tried if not path.exists())
