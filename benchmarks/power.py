"""What do the default rules catch, and whom do they accuse?

    python benchmarks/power.py [--seeds 1] [--first 0] [--only sound|faulty] [--to units.jsonl]
    python benchmarks/power.py --from units.jsonl

A unit is one kernel on one case (a regime of inputs, a shape, a seed) in one format, a
training step run twice and judged by `configs/gate/default.yaml` as a report would be:
all heads of out, lse, dq, dk and dv. Beside each stands flash-attention's rule on the
same unit: no error above twice plain attention's plus its floor, in the output or in a
gradient.

Sound kernels must not be accused. Kernels of `planted.flash` must be caught,
wherever their fault can show in a case; each miss is sorted by what the fault did to the
errors, beside the same kernel without it. Planted faults of growing dose
(`numdev.kernels.emulation.faults`) are judged likewise.

Every instruction set runs in a process of its own and draws seeds of its own.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from planted import CATALOGUE
from planted.flash import FAULTS
from power_tables import tables

from numdev.cases import AttentionCase, CaseRef
from numdev.formats import format_named
from numdev.gate.row_tests import threshold_tests
from numdev.gate.rules import default_rules
from numdev.kernels import Kernel
from numdev.kernels.emulation.faults import CONTROLS
from numdev.metrics.metrics_by_name import value_of
from numdev.report import DeviationRow, PlanRecord
from numdev.sources.input_regimes import Shapes, draw
from numdev.studies.audit import prepared_attention as bench_module
from numdev.studies.audit.case_measurement import bench_of, measure_task
from numdev.studies.audit.plan import Task
from numdev.studies.audit.prepared_attention import Bench
from numdev.system import System

REGIMES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "normal": ("normal", {}),
    "logits x 4": ("normal", {"logits": 4.0}),
    "logits x 16": ("normal", {"logits": 16.0}),
    "outliers": ("outliers", {}),
    "sink 8": ("sink", {"strength": 8.0}),
    "sink 24": ("sink", {"strength": 24.0}),
    "ties 8": ("ties", {}),
    "4 ties 16": ("ties", {"count": 4, "strength": 16.0}),
    "one sign": ("one_sign", {}),
    "correlated": ("correlated", {}),
    "low rank": ("low_rank", {}),
    "near-constant keys": ("near_constant_keys", {}),
    "far below": ("far_below", {}),
    "massive channel": ("massive_channel", {}),
    "one-signed gradient": ("one_signed_gradient", {}),
    "near overflow": ("near_overflow", {}),
    "V = 1": ("ones", {}),
    "one key": ("one_key", {}),
    "uniform": ("uniform", {}),
    "one hot": ("one_hot", {}),
    "two hot": ("two_hot", {}),
}
SHAPES: Mapping[str, dict[str, Any]] = {
    "130": {"length": 130},
    "200 causal": {"length": 200, "causal": True},
    "65 causal, grouped": {"heads": 4, "length": 65, "dim": 32, "causal": True},
    "96 x 260": {"length": 96, "keys": 260, "dim": 128},
    "100 causal, 8 sequences": {"batch": 8, "length": 100, "causal": True},
}
FORMATS = ("bfloat16", "float16", "float32")
DOSED = ("normal", "logits x 16", "sink 8", "ties 8", "one sign", "correlated")
"""Regimes of the dose curves."""
CAPABILITIES = ("default", "avx2", "avx512")
METRICS = (
    "expected_ratio",
    "baseline_ratio",
    "worst_row",
    "noise_ratio",
    "lse_error",
    "bias_size",
)
TYPICAL = "typical head"
TWICE = PlanRecord(kernels=(), formats=(), calls=(), repeats=2)  # kernels run twice
"""The rule that takes many heads."""
Unit = dict[str, Any]


def drawn(regime: str, shape: str, seed: int) -> AttentionCase:
    """The case in fp32, before it is rounded to a format."""
    name, options = REGIMES[regime]
    s = {
        "batch": 2,
        "heads": 2,
        "dim": 64,
        "keys": SHAPES[shape]["length"],
        **SHAPES[shape],
    }
    sizes = Shapes(
        batch=s["batch"],
        heads=s["heads"],
        kv_heads=2,
        q_len=s["length"],
        kv_len=s["keys"],
        head_dim=s["dim"],
        v_dim=s["dim"],
    )
    x = draw(
        name, sizes, seed=seed, options=options, label=f"{regime}/{shape}", gradients=True
    )
    return AttentionCase(
        ref=CaseRef(case=f"{regime}/{shape}", seed=seed),
        q=x.q,
        k=x.k,
        v=x.v,
        scale=s["dim"] ** -0.5,
        is_causal=s.get("causal", False),
        grad_out=x.grad_out,
    )


SOUND = (
    "sdpa-math",
    "sdpa-flash",
    "sound",
    "flashattention-2-tiles-of-16-declared",
    "flashattention-2-tiles-of-96-last-first-declared",
    "fa2-consistent-tiles-of-32-declared",
)


# --- one unit -------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where units are measured."""

    bench: Bench
    case: AttentionCase
    """In the format."""
    format: str
    system: System
    pooled: dict[Any, list[DeviationRow]]
    few: slice = field(default_factory=lambda: slice(None))
    """Which kernels and faults."""

    def keep(self, kind: str, name: str, rows: Sequence[DeviationRow]) -> None:
        """For the rule that looks at all heads of a report; sound kernels have one a
        shape."""
        shape = (self.bench.case.ref.case or "").split("/")[1] if kind == "sound" else ""
        chosen = [r for r in rows if r.tensor != "lse" and r.status == "ok"]
        if self.format != "float32":
            self.pooled.setdefault((kind, name, self.format, shape), []).extend(chosen)


def measured(
    kernel: Kernel, on: Place, options: Mapping[str, Any] | None = None
) -> list[DeviationRow]:
    """A kernel's rows; with options it is a control, which is run once."""
    task = Task(
        case=on.bench.case.ref,
        role="control" if options else "kernel",
        kernel=kernel.name,
        options=options or {},
        format=on.format,
        gradients=True,
        repeats=2,
    )
    return measure_task(task, kernel, on.bench, on.system).rows


def judged(rows: Sequence[DeviationRow]) -> Unit | None:
    """What the rules say of a unit, and flash-attention's; None where the kernel did not
    run."""
    if any(r.status != "ok" for r in rows):
        return None
    why = [
        [v.rule, v.tensor, v.metric, v.observed, v.bound]
        for v in threshold_tests(rows, TWICE, default_rules())
        if v.standing == "exceeded"
    ]
    fa = [r for r in rows if r.fa_rule is not None]
    largest: dict[str, float] = {}
    for row in rows:
        for metric in METRICS:
            value = value_of(row, metric)[0]
            if isinstance(value, float):
                name = f"{row.tensor} {metric}"
                largest[name] = max(largest.get(name, 0.0), abs(value))
    return {
        "why": why,
        "fa": sorted({r.tensor for r in fa if not r.fa_rule or r.nonfinite})
        if fa
        else None,
        "largest": largest,
    }


def growth(rows: Sequence[DeviationRow], sound: Sequence[DeviationRow]) -> float | None:
    """How many times larger a fault made the error of a head, where most; None where not
    a bit of any number changed."""
    before = {(r.tensor, r.head): r for r in sound}
    grown = None
    for row in rows:
        old = before[row.tensor, row.head]
        same = (row.rms, row.max_abs, row.nonfinite) == (
            old.rms,
            old.max_abs,
            old.nonfinite,
        )
        if same and not row.noise:
            continue
        ratio = (row.rms or 0.0) / old.rms if old.rms else float("inf")
        grown = max(grown or 0.0, ratio)
    return grown


def units(
    seeds: Sequence[int], only: str | None = None, *, small: bool = False
) -> Iterator[Unit]:
    """All units on this machine's instruction set. Every regime meets sound kernels in
    every format in three shapes, and faulty ones in one, which change from one regime to
    the next. At the end stand the same rows by kernel and format, as if all were one
    report. `small`: one kernel and fault in one case and format."""
    system = System.probe("cpu")
    pooled: dict[Any, list[DeviationRow]] = {}
    few = slice(1 if small else None)
    regimes = list(enumerate(REGIMES))[few]
    for seed, (number, regime) in itertools.product(seeds, regimes):
        for place in range(3)[few]:
            shape = list(SHAPES)[(number + seed + place) % len(SHAPES)]
            case = drawn(regime, shape, seed)
            for fmt in FORMATS[few]:
                bench = bench_of(case, fmt, gradients=True)
                where = {
                    "set": system.cpu_capability, "format": fmt,
                    "regime": regime, "shape": shape, "seed": seed,
                }  # fmt: skip
                rounded = case.rounded_to(format_named(fmt))
                on = Place(
                    bench=bench,
                    case=rounded,
                    format=fmt,
                    system=system,
                    pooled=pooled,
                    few=few,
                )
                units_of: list[Iterator[Unit]] = []
                if only != "faulty":
                    units_of.append(sound_units(on))
                if (
                    only != "sound"
                    and place == 0
                    and (fmt != "float32" or number % 3 == 0)
                ):
                    units_of.append(faulty_units(on))
                    if regime in DOSED and fmt != "float32":
                        units_of.append(doses(on))
                yield from ({**where, **unit} for unit in itertools.chain(*units_of))
    for (kind, name, fmt, place), rows in pooled.items():
        tests = list(threshold_tests(rows, TWICE, default_rules()))
        tests = [v for v in tests if v.rule == TYPICAL]
        why = [v.tensor for v in tests if v.standing == "exceeded"]
        medians = {v.tensor: v.observed for v in tests if v.judged}
        of = {
            "set": system.cpu_capability,
            "format": fmt,
            "regime": "all",
            "shape": place,
        }
        yield {"pooled": kind, "name": name, **of, "heads": len(rows), "why": why,
               "medians": medians}  # fmt: skip


def sound_units(on: Place) -> Iterator[Unit]:
    for name in SOUND[on.few]:
        kernel = CATALOGUE[name].kernel
        rows = measured(kernel, on)
        on.keep("sound", kernel.name, rows)
        yield {"kernel": kernel.name, **(judged(rows) or {"not_run": rows[0].reason})}


def faulty_units(on: Place) -> Iterator[Unit]:
    """Without the search for what is computed instead, which takes most of the time and
    could only add to what is caught."""
    sound = measured(CATALOGUE["sound"].kernel, on)
    for fault in FAULTS[on.few]:
        if fault.shows(on.case):
            with patch.object(bench_module, "suspect", return_value={}):
                rows = measured(fault.kernel, on)
            on.keep("faulty", fault.name, rows)
            unit = judged(rows) or {"not_run": rows[0].reason}
            grown = growth(rows, sound)
            yield {"fault": fault.name, "tensors": fault.tensors, "grown": grown, **unit}


def doses(on: Place) -> Iterator[Unit]:
    """As the gate has it: rows of a control are held to the rules as a kernel's."""
    for control in list(CONTROLS.values())[on.few]:
        for dose in control.doses[on.few]:
            rows = measured(control.kernel(), on, {"dose": dose})
            unit = judged([row.model_copy(update={"role": "kernel"}) for row in rows])
            if unit is not None:
                yield {"control": control.name, "dose": dose, **unit}


# --- every instruction set ------------------------------------------------------------


def run(options: argparse.Namespace) -> list[Unit]:
    """One process for each instruction set."""
    lines: list[Unit] = []
    for number, capability in enumerate(options.every.split(",")):
        file = Path(f"{options.to}.{capability}")
        command = [sys.executable, __file__, "--one", str(number), "--to", str(file),
                   "--seeds", str(options.seeds), "--first", str(options.first)]  # fmt: skip
        command += ["--only", options.only] if options.only else []
        command += ["--small"] if options.small else []
        subprocess.run(
            command, check=True, env={**os.environ, "ATEN_CPU_CAPABILITY": capability}
        )
        lines += [json.loads(line) for line in file.read_text().splitlines()]
        file.unlink()
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description="What do the default rules catch?")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument(
        "--every", default=",".join(CAPABILITIES), help="instruction sets"
    )
    parser.add_argument("--only", choices=("sound", "faulty"))
    parser.add_argument("--to", type=Path, default=Path("power.jsonl"))
    parser.add_argument(
        "--from", dest="measured", type=Path, help="tables of units measured before"
    )
    parser.add_argument("--small", action="store_true", help="one unit of a kind")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is not None:
        torch.set_num_threads(1)
        first = options.first + options.one * options.seeds
        seeds = range(first, first + options.seeds)
        start = time.time()
        with options.to.open("w") as file:
            for unit in units(seeds, options.only, small=options.small):
                file.write(json.dumps(unit) + "\n")
        print(
            f"instruction set {options.one}: {time.time() - start:.0f} s", file=sys.stderr
        )
        return
    if options.measured:
        lines = [json.loads(line) for line in options.measured.read_text().splitlines()]
    else:
        lines = run(options)
        options.to.write_text("".join(json.dumps(unit) + "\n" for unit in lines))
    print(tables(lines))


if __name__ == "__main__":
    main()
