"""Whom does the gate accuse, and whom does it let pass?

    OMP_NUM_THREADS=1 python benchmarks/gate_rates.py [--seeds 21] [--to FILE.md] [--small]

A trial is one report through `numdev.gate.judge` with the default rules: one kernel, a
training step run twice on two calls of 8 sequences, 4 heads and 130 tokens in bf16, on
the CPU. The first call is causal and normal, so that every fault can show; the second
comes from a regime of inputs that changes with the seed, hazards and probes among them,
so that 21 seeds meet every regime once. A report that passes (exit code 0) clears its
kernel, one that exceeds (1) accuses it, and one that could not be judged (3) does
neither: it stops a merge too, and is counted apart.

Sound kernels are those of `benchmarks/power.py`. Faults are those of `planted.flash`, and
`numdev.kernels.emulation.faults` in every dose. Kernels that go wrong as processes
(`planted.processes`) have no rate: each is tried once, isolated, beside a sound one.

Intervals are those of Clopper and Pearson, "The use of confidence or fiducial limits
illustrated in the case of the binomial" (1934), at 95 %.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import torch
from planted import CATALOGUE, of_family
from planted.flash import FAULTS
from power import REGIMES, SOUND
from scipy.stats import binomtest

from numdev.cases import AttentionCase, CaseRef
from numdev.gate.judging import judge
from numdev.gate.row_tests import run_tests, threshold_tests
from numdev.gate.rules import Rules, default_rules
from numdev.kernels import Kernel
from numdev.kernels.emulation.faults import CONTROLS
from numdev.report import DeviationRow, PlanRecord
from numdev.sources.input_regimes import Shapes, draw
from numdev.studies.audit import prepared_attention as bench_module
from numdev.studies.audit.case_measurement import bench_of, measure_task
from numdev.studies.audit.isolation import Isolated, Runner, attempt
from numdev.studies.audit.plan import Task
from numdev.studies.audit.prepared_attention import Bench
from numdev.system import System

FORMAT = "bfloat16"
SIZES = Shapes(batch=8, heads=4, kv_heads=4, q_len=130, kv_len=130, head_dim=32, v_dim=32)
LIMIT_S = 5.0
TWICE = PlanRecord(kernels=(), formats=(), calls=(), repeats=2)  # kernels run twice


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One kernel in one report."""

    kind: str
    """`sound`, `planted`, or `dosed`."""
    name: str
    outcome: str
    by: tuple[str, ...]
    """The rules that were exceeded."""


def drawn(regime: str, seed: int, *, causal: bool) -> AttentionCase:
    name, options = REGIMES[regime]
    x = draw(name, SIZES, seed=seed, options=options, label=regime, gradients=True)
    return AttentionCase(
        ref=CaseRef(case=f"{regime}{' causal' if causal else ''}", seed=seed),
        q=x.q,
        k=x.k,
        v=x.v,
        scale=SIZES.head_dim**-0.5,
        is_causal=causal,
        grad_out=x.grad_out,
    )


@functools.cache
def this_machine() -> System:
    """Asked once: it reads the metadata of all packages."""
    return System.probe("cpu")


def benches(seed: int) -> list[Bench]:
    """The two calls of a report."""
    regime = list(REGIMES)[seed % len(REGIMES)]
    cases = drawn("normal", seed, causal=True), drawn(regime, seed, causal=False)
    return [bench_of(c, FORMAT, gradients=True) for c in cases]


def rows_of(
    kernel: Kernel,
    on: Sequence[Bench],
    dose: float | None = None,
    run: Runner | None = None,
) -> list[DeviationRow]:
    """A kernel's rows, those of a planted fault too as a kernel's, as the gate takes
    them."""
    rows: list[DeviationRow] = []
    for bench in on:
        task = Task(
            case=bench.case.ref,
            role="kernel",
            kernel=kernel.name,
            options={} if dose is None else {"dose": dose},
            format=FORMAT,
            gradients=run is None,
            repeats=2 if dose is None else 1,  # emulations repeat themselves
        )
        rows += measure_task(task, kernel, bench, this_machine(), run or attempt).rows
    return rows


def trial(
    kind: str, name: str, rows: Sequence[DeviationRow], rules: Rules | None = None
) -> Trial:
    rules = rules or default_rules()
    tests = [*threshold_tests(rows, TWICE, rules), *run_tests(rows, TWICE, rules)]
    judged = judge(tests, rules)
    by = dict.fromkeys(t.rule for t in judged.tests if t.standing == "exceeded")
    return Trial(kind=kind, name=name, outcome=judged.outcome, by=tuple(by))


@contextmanager
def _no_search() -> Iterator[None]:
    """The search for what is computed instead takes most of the time, and of a faulty
    kernel could only add to what is caught. Sound ones have to stand it."""
    with patch.object(bench_module, "suspect", return_value={}):
        yield


def trials(seed: int, few: slice) -> Iterator[Trial]:
    """All kernels and faults, or `few` of each."""
    on = benches(seed)
    for kernel in (CATALOGUE[name].kernel for name in SOUND[few]):
        yield trial("sound", kernel.name, rows_of(kernel, on))
    with _no_search():
        for fault in FAULTS[few]:
            yield trial("planted", fault.name, rows_of(fault.kernel, on))
        for control in list(CONTROLS.values())[few]:
            for dose in control.doses[few]:
                rows = rows_of(control.kernel(), on, dose)
                yield trial("dosed", f"{control.name} {dose:g}", rows)


def broken(few: slice) -> Iterator[tuple[str, Trial, Trial]]:
    """Each with the default rules, and with itself as a required kernel."""
    on = benches(0)[1:]  # plain functions of q, k, v take no causal one
    beside = rows_of(CATALOGUE["sound"].kernel, on)
    for entry in of_family("process")[few]:
        with Isolated(LIMIT_S) as run, _no_search():
            rows = [*beside, *rows_of(entry.kernel, on, run=run)]
        required = default_rules().model_copy(update={"required": (entry.address,)})
        name = entry.name
        yield name, trial("broken", name, rows), trial("broken", name, rows, required)


# --- tables ---------------------------------------------------------------------------


def interval(count: int, of: int) -> str:
    """`86 to 100 %`."""
    ends = binomtest(count, of).proportion_ci(method="exact")
    return f"{100 * ends.low:.0f} to {100 * ends.high:.0f} %"


def table(trials: Sequence[Trial], kind: str, words: tuple[str, str]) -> list[str]:
    """A line for each kernel and one for all; `words` are for exceeded and passed."""
    these = [t for t in trials if t.kind == kind]
    lines = [
        f"| | reports | {words[0]} | {words[1]} | not judged | {words[0]}, 95 % | by |"
    ]
    lines.append("|---|--:|--:|--:|--:|---|---|")
    for name in (*dict.fromkeys(t.name for t in these), *(("all",) if these else ())):
        mine = [t for t in these if name in ("all", t.name)]
        count = Counter(t.outcome for t in mine)
        rules = Counter(rule for t in mine for rule in t.by)
        by = ", ".join(f"{rule} {times}" for rule, times in rules.most_common(3))
        numbers = (len(mine), count["exceeded"], count["passed"], count["unmeasured"])
        shown = " | ".join(map(str, numbers))
        lines.append(f"| {name} | {shown} | {interval(numbers[1], numbers[0])} | {by} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description="Whom does the gate accuse?")
    parser.add_argument("--seeds", type=int, default=len(REGIMES))
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--to", type=Path, help="write the tables here too")
    parser.add_argument(
        "--small", action="store_true", help="one kernel and one fault of a kind"
    )
    options = parser.parse_args()
    few = slice(1 if options.small else None)
    torch.set_num_threads(1)
    start, tried = time.time(), []
    for seed in range(options.first, options.first + options.seeds):
        tried += trials(seed, few)
        print(f"seed {seed}: {time.time() - start:.0f} s", file=sys.stderr)
    lines = ["Sound kernels", "", *table(tried, "sound", ("accused", "cleared"))]
    lines += ["", "Faulty kernels", "", *table(tried, "planted", ("caught", "missed"))]
    lines += ["", "Faults by dose", "", *table(tried, "dosed", ("caught", "missed"))]
    lines += ["", "Kernels that go wrong as processes, beside a sound one", ""]
    lines += ["| | default rules | and required |", "|---|---|---|"]
    lines += [f"| {name} | {a.outcome} | {b.outcome} |" for name, a, b in broken(few)]
    ran = f"{options.seeds} seeds from {options.first}, {FORMAT}, {this_machine().cpu_capability}"
    lines += ["", f"{ran}, torch {torch.__version__}, {time.time() - start:.0f} s."]
    text = "\n".join(lines) + "\n"
    print(text)
    if options.to:
        options.to.write_text(text)


if __name__ == "__main__":
    main()
