"""Sound reports, altered so that none may pass the gate any more.

    python scripts/altered_reports.py [--count 5000] [--seed 0] [--kind audit]

Measures small reports on this machine: audits (two formats, gradients, sampled rows of
both), a sweep, effects and invariance. Each must pass the default rules. Every input is
one of them with one alteration of a class below, drawn by its number, and must end in
exit code 1 (exceeded) or 3 (not measured), in one line or in a verdict. Most are
concluded again by numdev's own code before they are sealed, so that what they say follows
from their altered rows. Prints how each class ended, and each input that passed or
broke."""

from __future__ import annotations

import argparse
import copy
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fuzz
from fuzz import concluded_again

Data = dict[str, Any]
KERNELS = ("--kernel", "sdpa-flash", "--kernel", "sdpa-math")
FORMATS = ("--format", "bfloat16", "--format", "float16")
AUDIT = ("audit", "demo", "--length", "64", "--layers", "0,1", *KERNELS, *FORMATS)
REPORTS = {
    "audit": AUDIT,
    "gradients": (*AUDIT, "--backward"),
    "sampled": (*AUDIT, "--rows", "32", "--length", "128"),
    "sampled gradients": (*AUDIT, "--rows", "32", "--length", "128", "--backward"),
    "sweep": ("sweep", "sweep.yaml"),
    "effects": (
        "effects",
        "demo",
        "--length",
        "32",
        "--sequences",
        "3",
        *KERNELS,
        *FORMATS,
        "--by-layer",
        "--generate",
        "4",
    ),
    "invariance": ("invariance", "demo", "--layers", "0", "--length", "48", *KERNELS),
}
TRIES = 9  # of an alteration, until it changes something
SWEEP = """
cases: [{name: normal, heads: 2, seq_len: [64, 96], head_dim: 32}]
kernels: [sdpa-flash, sdpa-math]
formats: [bfloat16, float16]
seeds: 2
backward: true
repeats: 2
"""
NEEDED = ("elements", "rms", "mean_abs", "max_abs", "nonfinite", "sequences", "expected_ratio",
          "rms_ratio", "worst_row", "noise")  # fmt: skip
SIZES = ("rms", "mean_abs", "max_abs")
REASONS = ("", "0/0", "not measured", "needs at least two sequences", "no prediction",
           "the kernel does not say how it rounds", "sampled rows")  # fmt: skip


def judged(report: Data) -> list[Data]:
    """Measured rows of kernels under audit."""
    return [r for r in report["rows"] if r["role"] == "kernel" and r["status"] == "ok"]


def some_of(rows: list[Data], rng: random.Random, *by: str) -> list[Data]:
    """The rows that share with one of them what is named."""
    one = rng.choice(rows)
    return [row for row in rows if all(row[name] == one[name] for name in by)]


def scope(report: Data, rng: random.Random, tensors: tuple[str, ...] = ()) -> list[Data]:
    """Rows of kernels: one, those of a call, of a tensor of a kernel, of a kernel, of a
    format, of a head, all gradients, or all."""
    rows = [row for row in judged(report) if not tensors or row["tensor"] in tensors]
    match rng.randrange(8):
        case 0:
            return [rng.choice(rows)]
        case 1:
            return some_of(rows, rng, "case", "seed", "kernel", "format")
        case 2:
            return some_of(rows, rng, "kernel", "tensor", "format")
        case 3:
            return some_of(rows, rng, "kernel")
        case 4:
            return some_of(rows, rng, "format")
        case 5:
            return some_of(rows, rng, "case", "head", "tensor")
        case 6:
            return [row for row in rows if row["tensor"] in ("dq", "dk", "dv")] or rows
        case _:
            return rows


def gone(report: Data, rng: random.Random) -> None:
    """Rows that were planned are not there; of the kernels, or of what stands beside
    them."""
    rows = scope(report, rng, ("out", "dq", "dk", "dv"))
    if rng.random() < 0.2:
        rows = [rng.choice([r for r in report["rows"] if r["role"] != "kernel"])]
    report["rows"] = [
        row for row in report["rows"] if not any(row is each for each in rows)
    ]


def twice(report: Data, rng: random.Random) -> None:
    """Rows are there twice, or are those of another call."""
    extra = copy.deepcopy(scope(report, rng))
    for row in extra:
        if rng.random() < 0.3:
            row["head"] = (row["head"] or 0) + 64
    report["rows"] += extra


def unmeasured(report: Data, rng: random.Random) -> None:
    """Rows become skipped or failed, with their numbers or without. All of a call's
    output or all of its gradients at once may be skipped, where the kernel ran in other
    calls."""
    # A kernel named in the request may refuse single calls: so it is all calls of one, or
    # one row.
    rows = judged(report)
    chosen = (
        [rng.choice(rows)]
        if rng.random() < 0.5
        else some_of(rows, rng, "kernel", "format")
    )
    status, bare = rng.choice(("skipped", "failed")), rng.random() < 0.7
    for row in chosen:
        row["status"], row["reason"] = (
            status,
            rng.choice(("takes no mask", "not installed", "")),
        )
        if bare:
            row.update(dict.fromkeys((*NEEDED, "bias_p", "bias_size"), None), interval={})
    if len(chosen) > 1:  # as numdev writes a kernel that ran in no call: a row for each
        first = {
            json.dumps([r["case"], r["seed"], r["kernel"], r["format"]]): r
            for r in chosen
        }
        for row in first.values():
            row.update(head=None, tensor="out")
        drop = [r for r in chosen if not any(r is k for k in first.values())]
        report["rows"] = [r for r in report["rows"] if not any(r is d for d in drop)]


def lacking(report: Data, rng: random.Random) -> None:
    """A number that a rule needs is null or not there, whatever reason is given."""
    name = rng.choice(NEEDED)
    # Over rows without a key nothing is measured; log-sum-exps have no prediction, dk and
    # dv of sampled rows neither; gradients no sequences.
    tensors = {"sequences": ("out",), "expected_ratio": ("out", "dq"), "worst_row": ("out", "dq"),
               "rms_ratio": ("out", "dq"), "noise": ("out", "dq")}  # fmt: skip
    for row in scope(report, rng, tensors.get(name, ("out", "dq", "dk", "dv"))):
        if rng.random() < 0.2:
            row.pop(name, None)
        else:
            row[name] = None
        if why := rng.choice(REASONS):
            row["nulls"] = {**row["nulls"], name: why}
        else:
            row["nulls"].pop(name, None)


def no_bias(report: Data, rng: random.Random) -> None:
    """The bias's numbers lack in rows of as many sequences as it takes."""
    rows = [r for r in scope(report, rng, ("out",)) if (r["sequences"] or 0) >= 8]
    if not rows:
        gone(report, rng)
    for row in rows:
        for name in rng.sample(("bias_p", "bias_size"), rng.choice((1, 2))):
            row[name] = None
            row["nulls"].pop(name, None)


def of_another_type(report: Data, rng: random.Random) -> None:
    """`true`, `"0"`, `1.0` and the like in place of numbers, or of the schema's
    version."""
    if rng.random() < 0.1:
        report["schema_version"] = rng.choice((1, 2.0, True, "2", None, 3))
        return
    name = rng.choice((*NEEDED, "head", "layer", "call"))
    for row in scope(report, rng, ("out", "dq")):
        row[name] = rng.choice((True, False, "0", "1e-3", "", [], {}, [0], "NaN"))


def contradicts(report: Data, rng: random.Random) -> None:
    """Numbers of a row that cannot be together, or are not the floor's."""
    for row in scope(report, rng, ("out", "dq")):
        if not row["rms"]:
            row["rms"], row["max_abs"] = 1.0, 0.5
            continue
        match rng.randrange(6):
            case 0:
                row["rms"] = row["mean_abs"] * rng.uniform(0, 0.99)
            case 1:
                row["max_abs"] = row["rms"] * rng.uniform(0, 0.99)
            case 2:
                row["mean_abs"] = row["rms"] * rng.uniform(1.01, 1e6)
            case 3:
                row["interval"] = {
                    **row["interval"],
                    "rms": [row["rms"] * 1.1, row["rms"] * 1.2],
                }
            case 4 if row["format"] != "float16":
                row["elements"] = rng.choice(
                    (1, row["elements"] * 2, row["elements"] - 1)
                )
            case 4:
                row["elements"] = 0
            case _:
                at = rng.choice(("module", "layer", "call"))
                row[at] = "elsewhere" if at == "module" else 77


def renamed(report: Data, rng: random.Random) -> None:
    """Rows go by another kernel, role, format, tensor, case, seed or option, and err a
    lot."""
    name, value = rng.choice((
        ("kernel", "emulated"), ("kernel", "reference"), ("role", "baseline"), ("role", "floor"),
        ("role", "control"), ("role", "precision"), ("format", "float64"), ("format", "float32"),
        ("tensor", "lse"), ("tensor", "dq"), ("case", "elsewhere"), ("seed", 99),
        ("options", {"a": 1}), ("head", 63), ("out_format", "float64"),
    ))  # fmt: skip
    for row in scope(report, rng, ("out", "dv") if value == "dq" else ("out", "dq")):
        row[name] = value
        for size in (*SIZES, "expected_ratio", "worst_row"):
            row[size] = None if row[size] is None else row[size] * 100 + 1


def worse(report: Data, rng: random.Random) -> None:
    """Errors beyond their limits, some beside fewer elements, another claim, or other
    excuses."""
    kind = rng.choice(("error", "row", "nonfinite", "suspicion", "noise", "bias"))
    tensors = {"bias": ("out",), "noise": ("out",)}.get(kind, ("out", "dq"))
    rows = scope(report, rng, tensors)
    if kind == "bias":
        rows = [r for r in rows if (r["sequences"] or 0) >= 8 and r["bias_p"] is not None]
        kind = kind if rows else "nonfinite"
        rows = rows or judged(report)[:1]
    factor = 10 ** rng.uniform(1.5, 12)
    for row in rows:
        match kind:
            case "error":
                row["expected_ratio"] = (row["expected_ratio"] or 1) * factor
                for size in SIZES:
                    row[size] = (row[size] or 1e-3) * factor
                row["interval"] = {
                    n: [x * factor for x in ends]
                    for n, ends in row["interval"].items()
                    if n in ("expected_ratio", *SIZES)
                }
            case "row":
                row["worst_row"] = factor
            case "nonfinite":
                row["nonfinite"] = rng.choice((1, 7, 10**6))
            case "suspicion":
                row["suspicion"] = rng.choice(("the scale is twice what it is", "x"))
            case "noise":
                row["noise"] = rng.uniform(1e-4, 1)
            case _:
                row["bias_size"], row["bias_p"] = rng.uniform(0.06, 3), 1e-30
        excuses = {"claim": None, "nulls": {n: "0/0" for n in NEEDED}, "empty_rows": 99,
                         "fa_rule": True, "baseline_ratio": 0.1, "floor_ratio": 1.0,
                         "suspicion_cut": 1e-9, "rows_measured": 1}  # fmt: skip
        for name in rng.sample([n for n in excuses if n in row], rng.randrange(3)):
            row[name] = excuses[name]


def replanned(report: Data, rng: random.Random) -> None:
    """The plan or the calls say something else than was measured."""
    plan, case = report["plan"], rng.choice(report["cases"])
    match rng.randrange(6):
        case 0:
            plan["kernels"].pop(rng.randrange(len(plan["kernels"])))
        case 1:
            plan["formats"].remove(rng.choice(plan["formats"]))
        case 2:
            plan["calls"].pop(rng.randrange(len(plan["calls"])))
        case 3:
            plan["heads"] = [0] if plan["heads"] is None else None
        case 4:
            case["heads"], case["kv_heads"] = case["heads"] * 2, case["kv_heads"] * 2
        case _:
            report["cases"].remove(case)


def concluding(report: Data, rng: random.Random) -> None:
    """What the report says of itself is something else."""
    report["concluded"] = True
    match rng.randrange(6):
        case 0:
            report["outcome"] = rng.choice(("exceeded", "unmeasured", None))
        case 1:
            verdict = rng.choice(report["verdicts"])
            verdict[rng.choice(("observed", "limit"))] = rng.choice((0.5, 1e9, None))
            verdict["rule"] = "another"
        case 2:
            report["verdicts"].pop()
        case 3:
            report["tested"] = [*report["tested"], "All is well."]
        case 4:
            report["summary"]["answer"] = ["All is well."]
        case _:
            report["rules"] = rng.choice(
                (None, {"thresholds": []}, {"name": "mine"}, {"x": 1})
            )


def lse_gone(report: Data, rng: random.Random) -> None:
    """The rows of the log-sum-exps are gone: of a call, of a kernel, or all."""
    rows = [r for r in judged(report) if r["tensor"] == "lse"]
    by = rng.choice((("case", "seed", "kernel", "format"), ("kernel",), ("tensor",)))
    chosen = some_of(rows, rng, *by)
    report["rows"] = [r for r in report["rows"] if not any(r is each for each in chosen)]


def impossible(report: Data, rng: random.Random) -> None:
    """Numbers that cannot be: negative, of a format that is none, of a row that was not
    measured, sampled where all were to be measured."""
    rows = scope(report, rng, ("out",))
    match rng.randrange(4):
        case 0:
            name = rng.choice([n for n in (*SIZES, "expected_ratio", "noise", "floor_ratio")
                               if rows[0][n] is not None])  # fmt: skip
            for row in rows:
                row[name] = -rng.choice((1e-300, 1.0, 1e300))
        case 1:
            for row in rows:
                row["out_format"] = rng.choice(("bfloat", "", "float16 ", "x" * 99))
        case 2:
            for row in some_of(rows, rng, "kernel", "format"):
                row.update(status="skipped", reason="takes no mask")
        case _:
            for row in rows:
                row["sampled"] = not row["sampled"]


def rerequested(report: Data, rng: random.Random) -> None:
    """The request asked for more than was planned, or for something else."""
    request = report["request"]
    match rng.randrange(3):
        case 0:
            request["formats"] = [*request["formats"], "float32"]
        case 1:
            request["kernels"] = [
                *request["kernels"],
                {"name": "inductor", "options": {}},
            ]
        case _:
            request["backward"] = not request.get("backward")
            request["sites"], request["sequences"] = not request.get("sites"), 64


def effects_rows(report: Data, rng: random.Random) -> list[Data]:
    """Measured rows of effects that are judged: one, a run, a kind, a kernel, a sequence,
    all."""
    rows = [
        r
        for r in report["rows"]
        if r["kind"] in ("whole", "attention") and r["layer"] is None
    ]
    by = rng.choice(((), ("kind", "kernel", "format", "sequence"), ("kind", "kernel", "format"),
                     ("kernel",), ("sequence",), ("format",), ("kind",)))  # fmt: skip
    return some_of(rows, rng, *by) if by else [rng.choice(rows)]


def effects_gone(report: Data, rng: random.Random) -> None:
    """Rows, or checks, that were planned are not there, or there twice."""
    if rng.random() < 0.3:
        report["checks"].remove(rng.choice(report["checks"]))
        return
    rows = (
        effects_rows(report, rng) if rng.random() < 0.7 else [rng.choice(report["rows"])]
    )
    if rng.random() < 0.3:
        report["rows"] += copy.deepcopy(rows)
        return
    report["rows"] = [
        row for row in report["rows"] if not any(row is each for each in rows)
    ]


def effects_renamed(report: Data, rng: random.Random) -> None:
    """Rows go by another kind, kernel, format, site, output, sequence or layer."""
    name, value = rng.choice((
        ("kind", "site"), ("kind", "repeat"), ("kernel", "reference"), ("kernel", ""),
        ("format", "float32"), ("site", "elsewhere"), ("at", "image"), ("sequence", 99),
        ("layer", 77), ("options", {"a": 1}),
    ))  # fmt: skip
    for row in effects_rows(report, rng):
        row[name] = value


def effects_lacking(report: Data, rng: random.Random) -> None:
    """A number that a rule needs is null, or a check has no result."""
    if rng.random() < 0.3:
        check = rng.choice([c for c in report["checks"] if c["holds"]])
        check.update(holds=None, difference=None, limit=None, reason="could not be tried")
        check["applies"] = rng.random() < 0.5
        return
    name = rng.choice(
        ("cost", "error", "flips", "unexplained", "positions", "growth", "cost_max")
    )
    empty = {"positions": 0, "growth": []}.get(name)
    for row in effects_rows(report, rng):
        if row["kind"] == "attention" and name == "unexplained":
            continue  # flips of the whole model alone are judged
        row[name] = empty


def effects_worse(report: Data, rng: random.Random) -> None:
    """Errors beyond their limits, flips that are no near ties, NaN, checks that fail."""
    if rng.random() < 0.25:
        check = rng.choice([c for c in report["checks"] if c["holds"] and c["limit"]])
        check["difference"] = check["limit"] * 10 ** rng.uniform(1, 9)
        check["holds"] = rng.random() < 0.5
        check["limit"] = check["limit"] if rng.random() < 0.7 else 1e300
        check["reason"] = rng.choice(("", "outputs differ"))
        return
    rows = [row for row in report["rows"] if row["kind"] in ("whole", "attention")]
    kind = rng.choice(("whole", "attention"))
    rows = some_of([r for r in rows if r["kind"] == kind and r["layer"] is None], rng,
                   "kernel", "format")  # fmt: skip
    match rng.randrange(3):
        case 0:
            factor = 10 ** rng.uniform(2, 9)
            for row in rows:
                for size in ("cost", "cost_p999", "cost_max", "error"):
                    row[size] *= factor
        case 1:
            for row in [r for r in rows if r["kind"] == "whole"] or rows:
                row.update(
                    flips=row["positions"], unexplained=row["positions"], first_flip=0
                )
                row["cost"] = row["cost"] if kind == "whole" else -row["cost"]
        case _:
            row = rng.choice(rows)
            row["nonfinite"] = row["positions"]
            row["status"] = rng.choice(("ok", "failed"))


def effects_impossible(report: Data, rng: random.Random) -> None:
    """Numbers that cannot be, or not together."""
    for row in effects_rows(report, rng):
        match rng.randrange(6):
            case 0:
                row["cost"] = -1e-9
            case 1:
                row["cost_max"] = row["cost"] / 2
            case 2:
                row["flips"] = row["positions"] + 1
            case 3:
                row.update(status="skipped", reason="takes no mask")
            case 4:
                row["positions"] += 1
            case _:
                row["first_flip"] = None if row["flips"] else 0


def effects_replanned(report: Data, rng: random.Random) -> None:
    """The plan says something else than was measured."""
    plan = report["plan"]
    match rng.randrange(8):
        case 0:
            plan["kernels"].pop(rng.randrange(len(plan["kernels"])))
        case 1:
            plan["formats"].pop()
        case 2:
            plan["runs"].remove(rng.choice(plan["runs"]))
        case 3:
            plan["checks"].pop(rng.randrange(len(plan["checks"])))
        case 4:
            plan["sequences"] += rng.choice((-1, 1))
        case 5:
            plan["logits"], report["output"] = False, rng.choice(("logits", "states"))
        case 6:
            plan["routes"] = True
        case _:
            plan["checks"][0]["applies"] = False


def ways(report: Data, rng: random.Random) -> list[Data]:
    """Measured rows of invariance: one, or those that share something."""
    rows = [row for row in report["rows"] if row["status"] == "ok"]
    by = rng.choice(((), ("kernel", "axis", "variant"), ("kernel", "axis"), ("axis",), ("tensor",),
                     ("kernel", "tensor"), ("axis", "tensor"), ("kernel",)))  # fmt: skip
    return some_of(rows, rng, *by) if by else [rng.choice(rows)]


def invariance_gone(report: Data, rng: random.Random) -> None:
    """Rows that were planned are not there, or there twice; of the model's own output
    too."""
    rows = ways(report, rng)
    if rng.random() < 0.2:
        report["models"].remove(rng.choice(report["models"]))
    elif rng.random() < 0.3:
        report["rows"] += copy.deepcopy(rows)
    else:
        report["rows"] = [
            row for row in report["rows"] if not any(row is each for each in rows)
        ]


def invariance_renamed(report: Data, rng: random.Random) -> None:
    """Rows go by another kernel, format, axis, variant, tensor or case."""
    name, value = rng.choice((
        ("kernel", "reference"), ("format", "float32"), ("axis", "hidden-nan"), ("axis", "order"),
        ("variant", "another"), ("tensor", "lse"), ("tensor", "dq"), ("case", "elsewhere"),
        ("options", {"a": 1}), ("tensors", ["out"]),
    ))  # fmt: skip
    rows = [r for r in ways(report, rng) if r[name] != value]
    for row in rows or [r for r in report["rows"] if r[name] != value][:1]:
        row[name] = value


def invariance_lacking(report: Data, rng: random.Random) -> None:
    """A number that a rule needs is null, or rows are skipped, with whatever excuse."""
    rows = ways(report, rng)
    if rng.random() < 0.4:
        excuse = rng.choice(
            ("", "call", "option", "mask", "kernel", "memory", "way", "repeat")
        )
        for row in rows:
            row.update(
                status=rng.choice(("skipped", "failed")), excuse=excuse, reason="no"
            )
            # A kernel that says that it declines is believed, and told of.
            if excuse not in ("kernel", "memory") and rng.random() < 0.7:
                row.update(
                    dict.fromkeys(EMPTY), elements=0, differ=0, nonfinite=0, tensors=[]
                )
                row["tensor"] = "out"
        return
    name = rng.choice(("excess", "excess_of_a_row", "difference", "ulps", "elements"))
    for row in rows:
        row[name] = 0 if name == "elements" else None


EMPTY = ("difference", "floor_ratio", "error_base", "error_variant", "excess", "excess_of_a_row",
         "ulps", "first", "keys", "cause", "closest", "tried")  # fmt: skip


def invariance_worse(report: Data, rng: random.Random) -> None:
    """Differences beyond their limits, bits that must be kept, NaN; the model's own
    output."""
    if rng.random() < 0.2:
        rng.choice(report["models"])["difference"] = 10 ** rng.uniform(0, 9)
        return
    must = [r for r in report["rows"] if r["status"] == "ok" and r["tensor"] in ("out", "lse")
            and r["axis"] in ("repeat", "neighbours", "beyond", "hidden")]  # fmt: skip
    row = rng.choice(must)
    match rng.randrange(3):
        case 0:
            row.update(differ=1, first=[0, 0, 0, 0], difference=1e-9, excess=1e-3,
                       excess_of_a_row=1e-2, ulps=1.0)  # fmt: skip
        case 1:
            row.update(
                differ=row["elements"], first=[0, 0, 0, 0], nonfinite=row["elements"]
            )
        case _:
            row.update(differ=rng.choice((0, 5)), difference=1.0, excess=100.0, ulps=1e5,
                       excess_of_a_row=rng.choice((None, 1e3)), first=[0, 0, 0, 0])  # fmt: skip


def invariance_impossible(report: Data, rng: random.Random) -> None:
    """Numbers that cannot be, or not together."""
    for row in ways(report, rng):
        match rng.randrange(5):
            case 0:
                row["differ"] = row["elements"] + 1
            case 1:
                row["excess"] = -1.0
            case 2:
                row["nonfinite"] = row["differ"] + 1
            case 3:
                row.update(differ=0, difference=1.0)
            case _:
                row["difference"], row["differ"] = -1.0, 3


def invariance_replanned(report: Data, rng: random.Random) -> None:
    """The plan says something else than was compared."""
    plan = report["plan"]
    match rng.randrange(6):
        case 0:
            plan["kernels"].pop(rng.randrange(len(plan["kernels"])))
        case 1:
            plan["axes"].pop(rng.randrange(len(plan["axes"])))
        case 2:
            plan["ways"].remove(rng.choice(plan["ways"]))
        case 3:
            way = rng.choice([w for w in plan["ways"] if not w["reason"]])
            way["reason"] = "no such call can be made"
        case 4:
            plan["models"].pop()
        case _:
            plan["backward"] = True


Alteration = Callable[[Data, random.Random], None]
OF_ALL: tuple[Alteration, ...] = (concluding, rerequested)
OF_ROWS: tuple[Alteration, ...] = (
    gone, twice, unmeasured, lacking, no_bias, of_another_type, contradicts, renamed, worse,
    replanned, impossible,
)  # fmt: skip
OF_EFFECTS = (effects_gone, effects_renamed, effects_lacking, effects_worse, effects_impossible,
              effects_replanned)  # fmt: skip
OF_INVARIANCE = (invariance_gone, invariance_renamed, invariance_lacking, invariance_worse,
                 invariance_impossible, invariance_replanned)  # fmt: skip
CLASSES: dict[str, Alteration] = {
    each.__name__: each
    for each in (*OF_ROWS, lse_gone, *OF_ALL, *OF_EFFECTS, *OF_INVARIANCE)
}  # fmt: skip


def classes_for(report: Data) -> list[str]:
    """The classes that fit a report, by its kind and by whether it has log-sum-exps."""
    kinds: dict[str, tuple[Alteration, ...]] = {
        "effects": OF_EFFECTS, "invariance": OF_INVARIANCE,
    }  # fmt: skip
    fitting = [*kinds.get(report["kind"], OF_ROWS), *OF_ALL]
    if any(row["tensor"] == "lse" for row in report["rows"] if "tensor" in row):
        fitting += [lse_gone] * (report["kind"] in ("audit", "sweep"))
    return [each.__name__ for each in fitting]


def damaged(raw: bytes, rng: random.Random) -> bytes:
    """Cut off, merged, or with a byte or a number changed by hand, and not sealed
    again."""
    at = rng.randrange(1, len(raw) - 1)
    match rng.randrange(4):
        case 0:
            return raw[:at]
        case 1:
            return raw[:at] + bytes([raw[at] ^ 1 << rng.randrange(7)]) + raw[at + 1 :]
        case 2:
            return raw[: raw.rindex(b"}")] + b',"rows":[]}'
        case _:
            report = json.loads(raw)
            rng.choice(report["rows"])["format"] = "float32"
            return json.dumps(report).encode()


def measure(folder: Path, kind: str = "") -> dict[str, bytes]:
    """The sound reports, or those of one kind; each passes."""
    (folder / "sweep.yaml").write_text(SWEEP)
    written = {}
    for name, command in REPORTS.items():
        if kind not in ("", command[0]):
            continue
        out = folder / name.replace(" ", "-")
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(fuzz.ROOT)}
        if not out.exists():
            command = (sys.executable, "-m", "numdev", *command, "-q", "-o", str(out))
            subprocess.run(command, check=True, cwd=folder, env=environment)
        if code := fuzz.call("gate", str(out)).code:
            sys.exit(f"the sound report {name} does not pass: exit code {code}")
        written[name] = (out / "report.json").read_bytes()
    return written


def altered(raw: bytes, number: int) -> tuple[str, bytes]:
    """The input of a number: its class, and what is judged."""
    rng = random.Random(number)
    report = json.loads(raw)
    name = rng.choice((*classes_for(report), "damaged"))
    if name == "damaged":
        return name, damaged(raw, rng)
    report.pop("digest")
    before = json.loads(raw)
    before.pop("digest")
    for _ in range(TRIES):
        CLASSES[name](report, rng)
        if {**report, "concluded": None} != {**before, "concluded": None}:
            break  # what has no such number is not altered
    if not report.pop("concluded", False) and rng.random() < 0.8:
        report = concluded_again(report)
    return name, fuzz.with_digest(json.dumps(report, allow_nan=False).encode())


def main() -> int:
    parser = argparse.ArgumentParser(description="Does an altered report pass?")
    parser.add_argument("--count", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0, help="the first number")
    kinds = sorted({command[0] for command in REPORTS.values()})
    parser.add_argument(
        "--kind", choices=kinds, default="", help="reports of one kind alone"
    )
    parser.add_argument("--reports", type=Path, help="keep the sound reports there")
    asked = parser.parse_args()
    counts, wrong, began = Counter[tuple[str, int]](), [], time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        sound = measure(asked.reports or Path(folder), asked.kind)
        file = Path(folder) / "report.json"
        for number in range(asked.seed, asked.seed + asked.count):
            of = list(sound)[number % len(sound)]
            name, raw = altered(sound[of], number)
            file.write_bytes(raw)
            try:
                done = fuzz.call("gate", str(file))
                counts[name, done.code] += 1
                if done.code not in (1, 3):
                    wrong.append(f"- {number} ({of}, {name}): exit code {done.code}")
            except fuzz.Broken as error:
                wrong.append(f"- {number} ({of}, {name}): {error}")
    print(
        "| class | exceeded (1) | not measured (3) | passed (0) |\n|---|---:|---:|---:|"
    )
    for name in (*CLASSES, "damaged"):
        print(
            f"| {name} |", " | ".join(str(counts[name, code]) for code in (1, 3, 0)), "|"
        )
    seconds = time.monotonic() - began
    print(
        f"\n{asked.count} inputs in {seconds:.0f} s; {len(wrong)} passed or broke.",
        *wrong,
        sep="\n",
    )
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
