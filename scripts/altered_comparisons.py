"""Sound reports beside altered ones, so that none may be called unchanged.

    python scripts/altered_comparisons.py [--count 2500] [--seed 0] [--only effects]

Measures four small reports on this machine: an audit, a sweep, effects of four sequences,
and invariance. Each compared with itself, and with a second run, must be no change (exit
code 0). Every input is one of them beside itself with one alteration of a class below,
drawn by its number and sealed again as numdev seals; a few classes alter both. `numdev
compare` must end in exit code 1 (changed), 2 (not the same request) or 3 (not judged), in
one line or in a verdict. Prints how each class ended, and each input that passed or
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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import fuzz

Data = dict[str, Any]
Alteration = Callable[[Data, Data, random.Random], None]
KERNELS = ("--kernel", "sdpa-flash", "--kernel", "sdpa-math")
DEMO = {
    "audit": ("--length", "32", "--layers", "0", "--format", "bfloat16", "--format", "float16",
              "--backward"),
    "effects": ("--length", "32", "--sequences", "4"),
    "invariance": ("--length", "48", "--layers", "0", "--axis", "batch", "--axis", "decode",
                   "--axis", "repeat"),
}  # fmt: skip
REPORTS = {
    "audit": ("audit", "demo", *KERNELS, *DEMO["audit"]),
    "sweep": ("sweep", "sweep.yaml"),
    "effects": ("effects", "demo", "--kernel", "sdpa-flash", *DEMO["effects"]),
    "invariance": ("invariance", "demo", *KERNELS, *DEMO["invariance"]),
}
SWEEP = """
cases: [{name: normal, heads: 2, seq_len: [32, 48], head_dim: 16}]
kernels: [sdpa-flash, sdpa-math]
formats: [bfloat16]
seeds: 2
backward: true
repeats: 2
"""
REASONS = ("", "0/0", "not measured", "no prediction")
WHY = ("needs CUDA", "out of memory", "")

# --- what every kind of report has -----------------------------------------------------


def rows_of(report: Data) -> list[Data]:
    """Measured rows: of an audit those of kernels under audit, which are what is
    judged."""
    audited = [row for row in report["rows"] if row.get("role", "kernel") == "kernel"]
    return [row for row in audited if row["status"] == "ok"]


def some_of(report: Data, rng: random.Random, tensors: Sequence[str] = ()) -> list[Data]:
    """One row, or those that agree with it in a few fields, or all."""
    rows = [row for row in rows_of(report) if not tensors or row["tensor"] in tensors]
    one = rng.choice(rows)
    fields = (
        "kernel",
        "format",
        "tensor",
        "axis",
        "kind",
        "site",
        "head",
        "sequence",
        "case",
    )
    same = rng.sample(
        [name for name in fields if name in one], rng.choice((0, 1, 1, 2, 3))
    )
    return (
        [one]
        if rng.random() < 0.3
        else [r for r in rows if all(r[n] == one[n] for n in same)]
    )


def a_number(report: Data, rng: random.Random, but: Sequence[str] = ()) -> str:
    """The name of a number that some measured row has."""
    names = [name for name in NUMBERS[report["kind"]] if name not in but]
    return rng.choice(
        [n for n in names if any(row[n] is not None for row in rows_of(report))]
    )


def drop(report: Data, rows: Sequence[Data]) -> None:
    report["rows"] = [
        row for row in report["rows"] if not any(row is each for each in rows)
    ]


def gone(_: Data, b: Data, rng: random.Random) -> None:
    """Rows are not there; in half of the inputs nor are they in the plan and the
    request."""
    if rng.random() < 0.5:
        drop(b, some_of(b, rng))
        return
    one, plan, request = rng.choice(rows_of(b)), b["plan"], b["request"]
    part = rng.choice(("kernel", *PARTS[b["kind"]]))
    if part == "kernel":
        beside = plan.get("against")
        kernel = rng.choice([k for k in request["kernels"] if k["name"] != beside])
        request["kernels"].remove(kernel)
        for table in (
            b["rows"],
            b.get("models", []),
            plan["kernels"],
            plan.get("runs", []),
        ):
            table[:] = [each for each in table if each["kernel"] != kernel["name"]]
    elif part == "format":
        plan["formats"].remove(one["format"])
        drop(b, [row for row in b["rows"] if row["format"] == one["format"]])
    elif part == "call":
        plan["calls"].remove([one["case"], one["seed"]])
        drop(
            b,
            [
                r
                for r in b["rows"]
                if (r["case"], r["seed"]) == (one["case"], one["seed"])
            ],
        )
    elif part == "sequence":
        first_ones(b, rng.randint(1, plan["sequences"] - 1))
    elif part == "run":
        run = rng.choice([run for run in plan["runs"] if run["kind"] == "site"])
        plan["runs"].remove(run)
        drop(b, [row for row in b["rows"] if all(row[name] == run[name] for name in run)])
    elif part == "way":
        way = rng.choice(plan["ways"])
        plan["ways"].remove(way)
        same = ("format", "case", "axis", "variant")
        drop(
            b, [row for row in b["rows"] if all(row[name] == way[name] for name in same)]
        )
    else:
        axis = rng.choice(plan["models"] if rng.random() < 0.5 else plan["axes"])
        if axis in plan["models"]:
            plan["models"].remove(axis)
        b["models"] = [row for row in b["models"] if row["axis"] != axis]
        if rng.random() < 0.5 or axis not in [row["axis"] for row in b["models"]]:
            plan["axes"].remove(axis)
            request["axes"].remove(axis)
            plan["ways"] = [way for way in plan["ways"] if way["axis"] != axis]
            drop(b, [row for row in b["rows"] if row["axis"] == axis])


def first_ones(report: Data, count: int) -> None:
    """As if the report were of so many sequences."""
    report["plan"]["sequences"] = report["request"]["sequences"] = count
    source = report["provenance"]["source"]
    source["sequences_asked"] = source["sequences_read"] = count
    report["rows"] = [row for row in report["rows"] if row["sequence"] < count]


def planned_otherwise(_: Data, b: Data, rng: random.Random) -> None:
    """The plan lacks something, has it twice, or says another number, and the rows do
    not."""
    plan = b["plan"]
    numbers = ("sequences", "rows", "repeats", "backward", "logits")
    name = rng.choice(
        [n for n, x in plan.items() if n in numbers or (x and isinstance(x, list))]
    )
    if isinstance(plan[name], list):
        one = rng.choice(plan[name])
        if rng.random() < 0.5:
            plan[name].remove(one)
        else:
            plan[name].append(copy.deepcopy(one))
    elif isinstance(plan[name], bool):
        plan[name] = not plan[name]
    else:
        plan[name] = (plan[name] or 0) + rng.choice((1, 100))


def twice(_: Data, b: Data, rng: random.Random) -> None:
    """Rows are there twice, as they are or with other numbers."""
    extra = copy.deepcopy(some_of(b, rng))
    for row in extra:
        for name in NUMBERS[b["kind"]]:
            if isinstance(row[name], float) and rng.random() < 0.3:
                row[name] *= rng.choice((1, 100))
    b["rows"] += extra


def unmeasured(_: Data, b: Data, rng: random.Random) -> None:
    """Rows become skipped, or failed: of an audit a call's forward or backward pass at
    once."""
    one = rng.choice(rows_of(b))
    same = ["kernel", "format", "case", "seed", "axis", "variant", "kind", "site"]
    same = [n for n in same if n in one] + rng.choice(
        ([], ["sequence"] * ("sequence" in one))
    )
    rows = [r for r in rows_of(b) if all(r[n] == one[n] for n in same)]
    bare(b, rows, rng.choice(("skipped", "failed")), rng.choice(WHY))


def bare(report: Data, rows: Sequence[Data], status: str, why: str) -> None:
    """Rows in place of these, as numdev writes them: one for each call, without
    numbers."""
    fields = ("tensor", "sequence", "variant", "axis", "case", "seed", "kernel", "format", "kind",
              "site", "layer")  # fmt: skip
    calls = {}
    for row in rows:
        what = {**row, **EMPTY[report["kind"]], "status": status, "reason": why}
        if "tensor" in row:
            what["tensor"] = "out"
        if "excuse" in row and status == "skipped":
            what["excuse"] = "kernel"
        calls[str([what.get(name) for name in fields])] = what
    drop(report, rows)
    report["rows"] += calls.values()


def numbers_of_nothing(_: Data, b: Data, rng: random.Random) -> None:
    """A row is skipped, or failed, and has its numbers."""
    for row in some_of(b, rng):
        row["status"], row["reason"] = rng.choice(("skipped", "failed")), rng.choice(WHY)


def lacking(_: Data, b: Data, rng: random.Random) -> None:
    """A number that A has is null, whatever reason there is; often with those that are
    null together."""
    name = a_number(b, rng)
    rows = [row for row in rows_of(b) if row[name] is not None]
    one = rng.choice(rows)
    rows = rng.choice(([one], [r for r in rows if r["format"] == one["format"]], rows))
    several = next((names for names in TOGETHER if name in names), (name,))
    for row in rows:
        row.update(dict.fromkeys(several if rng.random() < 0.8 else (name,)))
        if "nulls" in row:
            row["nulls"] = {**row["nulls"], name: rng.choice(REASONS)}


def impossible(_: Data, b: Data, rng: random.Random) -> None:
    """A number is below 0, or beyond any that could be."""
    signed = (
        "bias",
        "bias_sign",
        "bias_feature",
        "bias_t",
        "bias_size",
        "log_perplexity",
    )
    name = a_number(b, rng, (*signed, *WORDS))
    for row in [row for row in rows_of(b) if row[name] is not None][
        : rng.choice((1, 3, 1000))
    ]:
        huge = rng.choice((1e301, 1.7e308))
        row[name] = -1 - abs(row[name]) if rng.random() < 0.6 else type(row[name])(huge)


def renamed(_: Data, b: Data, rng: random.Random) -> None:
    """Rows go by another kernel, format, call or option; or a kernel does everywhere."""
    if rng.random() < 0.2:
        name = rng.choice(b["request"]["kernels"])["name"]
        for each in (*b["plan"]["kernels"], *b["plan"].get("runs", ()), *b["rows"],
                     *b.get("models", ())):  # fmt: skip
            each["kernel"] = "other" if each["kernel"] == name else each["kernel"]
        for kernel in b["request"]["kernels"]:
            kernel["name"] = "other" if kernel["name"] == name else kernel["name"]
        return
    rows = some_of(b, rng)
    name, value = rng.choice((
        ("kernel", "other"), ("format", "float32"), ("case", "elsewhere"), ("options", {"a": 1}),
        ("tensor", "dv"), ("variant", "another"), ("sequence", 99), ("kind", "site"),
        ("site", "nowhere"),
    ))  # fmt: skip
    while name not in rows[0]:
        name, value = rng.choice((("kernel", "other"), ("format", "float32")))
    for row in [row for row in rows if row[name] != value] or rows[:1]:
        row[name] = value if row[name] != value else "other"


def asked_otherwise(_: Data, b: Data, rng: random.Random) -> None:
    """Something else was measured: other files, another request, another call."""
    request, source = b["request"], b["provenance"]["source"]
    choices: list[tuple[Data, str, Any]] = [
        (request, key, 7)
        for key in (
            "seed",
            "length",
            "sequences",
            "generate",
            "model_dtype",
            "layers",
            "against",
        )
        if key in request
        and not ("prompt_sha256" in source and key in ("length", "sequences"))
    ]
    choices += [
        (source, key, "0" * 64) for key in ("sha256", "prompt_sha256") if key in source
    ]
    if b["kind"] == "effects":
        choices.append((b, "output", "states"))
        choices.append((b["plan"], "against", "sdpa-flash"))
    if "cases" in b:
        choices.append(
            (rng.choice(b["cases"]), rng.choice(("scale", "q_len", "batch")), 3)
        )
        choices.append((request, rng.choice(("heads", "rows")), [1]))
    where, key, value = rng.choice(choices)
    where[key] = value


def damaged(_: Data, b: Data, rng: random.Random) -> None:
    """Another schema, another kind, or a number of another type."""
    name = rng.choice(NUMBERS[b["kind"]])
    match rng.randrange(3):
        case 0:
            b["schema_version"] = rng.choice((1, 2, 4, "3", None))
        case 1:
            b["kind"] = rng.choice([kind for kind in REPORTS if kind != b["kind"]])
        case _:
            rng.choice(rows_of(b))[name] = rng.choice(
                ([], {}, {} if name in WORDS else "many")
            )


def nothing(a: Data, b: Data, rng: random.Random) -> None:
    """No kernel under audit was measured in A, nor in B."""
    status, why = rng.choice(("skipped", "skipped", "failed")), rng.choice(WHY)
    for report in (a, b):
        bare(report, rows_of(report), status, why)
        if rng.random() < 0.3:
            report["rows"] = []
        for row in report.get("models", ()):
            row.update(NO_OUTPUT)


# --- audits and sweeps ----------------------------------------------------------------

SIZES = ("rms", "mean_abs", "max_abs")
RATIOS = ("expected_ratio", "worst_row", "floor_ratio", "row_rel")


def worse(_: Data, b: Data, rng: random.Random) -> None:
    """Errors are larger, or smaller, in one head or in many."""
    factor = 10 ** (rng.choice((1, -1)) * rng.uniform(1, 6))
    for row in some_of(b, rng, ("out", "dq", "dk", "dv")):
        for name in (*SIZES, *RATIOS):
            row[name] = row[name] and row[name] * factor
        row["interval"] = {
            n: [x * factor for x in ends] for n, ends in row["interval"].items()
        }


def facts(_: Data, b: Data, rng: random.Random) -> None:
    """NaN where there was none, a named mistake, another operator, runs that differ."""
    rows = some_of(b, rng)
    named = [
        name for name in ("ran", "noise") if all(row[name] is not None for row in rows)
    ]
    kind = rng.choice(("nonfinite", "suspicion", *named))
    if kind == "noise":
        one = rng.choice(rows)
        same = ("kernel", "format", "tensor")
        rows = [r for r in rows_of(b) if all(r[n] == one[n] for n in same)]
    values = {"suspicion": "the scale is twice what it is", "ran": "another operator"}
    values |= {"nonfinite": rng.choice((1, 7, 10**6)), "noise": rng.uniform(1e-4, 1)}
    for row in rows:
        row[kind] = values[kind]


def contradicts(_: Data, b: Data, rng: random.Random) -> None:
    """Numbers of a row that cannot be together."""
    for row in some_of(b, rng, ("out", "dq")):
        if not row["rms"]:
            row["rms"], row["max_abs"] = 1.0, 0.5
            continue
        match rng.randrange(5):
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
            case _:
                row["module"] = "elsewhere"


def floor_lacks(_: Data, b: Data, rng: random.Random) -> None:
    """A row beside the kernels' lacks a number, or is not there."""
    row = rng.choice([row for row in b["rows"] if row["role"] != "kernel"])
    named = [
        n for n in (*SIZES, "rel", "bits", "elements", "nonfinite") if row[n] is not None
    ]
    if rng.random() < 0.3:
        drop(b, [row])
    else:
        row[rng.choice(named)] = None


# --- effects --------------------------------------------------------------------------

SPREADS = (
    "cost",
    "cost_p999",
    "cost_max",
    "log_prob",
    "log_prob_p999",
    "log_prob_max",
    "error",
)


def runs(report: Data, rng: random.Random) -> list[Data]:
    """All sequences of one run, of one kernel's runs, or of all, where they cost
    anything."""
    rows = [row for row in rows_of(report) if row["cost"]]
    one = rng.choice(rows)
    same = rng.choice((("kind", "kernel", "site"), ("kernel",), ()))
    return [row for row in rows if all(row[name] == one[name] for name in same)]


def dearer(_: Data, b: Data, rng: random.Random) -> None:
    """Runs cost more, or less, in all sequences and about alike."""
    factor = 10 ** (rng.choice((1, -1)) * rng.uniform(0.2, 6))
    for row in runs(b, rng):
        scaled = factor * rng.uniform(0.995, 1.005)
        for name in SPREADS:
            row[name] = row[name] and row[name] * scaled


def of_few(a: Data, b: Data, rng: random.Random) -> None:
    """Two sequences, or one, and another cost: too few to tell of chance."""
    count = rng.choice((1, 2))
    for report in (a, b):
        first_ones(report, count)
    factor = 10 ** (rng.choice((1, -1)) * rng.uniform(0.01, 4))
    for row in runs(b, rng):
        for name in SPREADS:
            row[name] = row[name] and row[name] * factor * rng.uniform(0.9, 1.1)
        for name in ("cost", "log_prob"):
            row[f"{name}_max"] = max(row[name], row[f"{name}_p999"], row[f"{name}_max"])


def flipped(_: Data, b: Data, rng: random.Random) -> None:
    """Flips that are no near ties, many more flips, more or fewer positions."""
    kind = rng.choice(("unexplained", "flips", "positions"))
    more = rng.choice((1, 100))
    for row in rows_of(b) if kind == "positions" and rng.random() < 0.8 else runs(b, rng):
        if kind == "unexplained":
            row["flips"] = max(row["flips"], 1)
            row["unexplained"] = rng.randint(1, row["flips"])
        elif kind == "flips":
            row["flips"] = row["positions"]
        else:
            row["positions"] += more
        if row["flips"] and row["first_flip"] is None:
            row["first_flip"] = 0


def checked(_: Data, b: Data, rng: random.Random) -> None:
    """A check fails, could not be tried, is not there, is there twice, or contradicts
    itself."""
    check = rng.choice([check for check in b["checks"] if check["holds"] is not None])
    match rng.randrange(6):
        case 0:
            check.update(holds=False, difference=0.1, reason="other function")
        case 1:
            check.update(holds=None, difference=None, limit=None, reason="takes no mask")
        case 2:
            b["checks"].remove(check)
            if rng.random() < 0.7:
                planned = b["plan"]["checks"]
                planned[:] = [p for p in planned if p["name"] != check["name"]]
        case 3:
            b["checks"].append(dict(check))
        case 4:
            check["difference"] = rng.choice((None, 1.0, -1.0))
        case _:
            check["holds"] = False


def disagrees(_: Data, b: Data, rng: random.Random) -> None:
    """A mean above the largest, or more flips than positions."""
    for row in runs(b, rng):
        match rng.randrange(4):
            case 0:
                row["cost"] = row["cost_max"] * rng.uniform(1.01, 1e3)
            case 1:
                row["log_prob"] = row["log_prob_max"] * rng.uniform(1.01, 1e3) + 1e-9
            case 2:
                row["flips"] = row["positions"] + 1
            case _:
                row["unexplained"] = row["flips"] + 1


# --- invariance -----------------------------------------------------------------------


def other_bits(_: Data, b: Data, rng: random.Random) -> None:
    """Rows differ that had the same bits, or the reverse."""
    for row in some_of(b, rng):
        if row["differ"]:
            row.update(dict.fromkeys(("first", "keys", "cause", "repeats")))
            row.update(differ=0, nonfinite=0, ulps=0.0)
            row.update(dict.fromkeys(("difference", "floor_ratio", "excess"), 0.0))
            row["excess_of_a_row"] = 0.0
        else:
            size = 10 ** rng.uniform(-6, 6)
            row.update(differ=rng.randint(1, row["elements"]), difference=size, floor_ratio=size,
                       excess=size, excess_of_a_row=size, ulps=1.0, first=[0, 0, 0, 0],
                       repeats=True)  # fmt: skip


def farther(_: Data, b: Data, rng: random.Random) -> None:
    """A number of a row that differs is several times what it was; or it has NaN; or a
    cause."""
    row = rng.choice([row for row in rows_of(b) if row["differ"]])
    name = rng.choice(
        ("floor_ratio", "excess", "excess_of_a_row", "nonfinite", "differ", "cause")
    )
    factor = 10 ** (rng.choice((1, -1)) * rng.uniform(0.5, 12))
    if name == "nonfinite":
        row["nonfinite"] = rng.randint(1, row["differ"])
    elif name == "cause":
        row["cause"] = {
            "base": {"operator": "a"},
            "variant": {"operator": "b"},
            "residual": None,
        }
    elif name == "differ":
        grown = max(10 * row["differ"], 30)
        row["differ"] = grown if grown <= row["elements"] else row["elements"] + 1
    else:
        row[name] *= factor


def in_error(_: Data, b: Data, rng: random.Random) -> None:
    """A form of a call errs more than it did."""
    for row in some_of(b, rng, ("out",)):
        row[rng.choice(("error_base", "error_variant"))] *= 10 ** rng.uniform(0.5, 6)


def outputs(_: Data, b: Data, rng: random.Random) -> None:
    """The model's own output moves, is gone, or lacks a number."""
    row = rng.choice(b["models"])
    match rng.randrange(6):
        case 0:
            b["models"].remove(row)
        case 1:
            b["models"] = []
            b["plan"]["models"] = rng.choice((b["plan"]["models"], []))
        case 2:
            row.update(NO_OUTPUT)
        case 3 if row["differ"]:
            row.update(differ=0, difference=0.0, other_difference=0.0, share=None)
        case 3 | 4:
            size = (row["difference"] or 1e-6) * 10 ** rng.uniform(0.5, 6)
            row.update(
                differ=row["elements"], difference=size, other_difference=0.0, share=1.0
            )
        case _:
            row[
                rng.choice(
                    [
                        n
                        for n in ("difference", "other_difference", "share")
                        if row[n] is not None
                    ]
                )
            ] = None


def output_disagrees(_: Data, b: Data, rng: random.Random) -> None:
    """The model's output, or a row, has counts and shares that cannot be together."""
    row = rng.choice(b["models"] if rng.random() < 0.5 else rows_of(b))
    row.update(rng.choice((
        {"differ": row["elements"] + rng.choice((1, 10**6))},
        {"differ": 0, "difference": 0.5},
        {"differ": row["elements"], "difference": 1.0, "other_difference": 0.5, "share": 0.1}
        if "share" in row
        else {"differ": 1, "nonfinite": 2},
    )))  # fmt: skip


def unsteady(_: Data, b: Data, rng: random.Random) -> None:
    """The kernel gives other bits when it runs once more along another axis."""
    outputs = [
        row for row in rows_of(b) if row["tensor"] == "out" and row["axis"] != "repeat"
    ]
    first = rng.choice(outputs)
    row = copy.deepcopy(first)
    row.update(axis="repeat", variant=f"again, {row['axis']} {row['variant']}", cause=None,
               tensors=["out"], differ=row["elements"], difference=1e-3, floor_ratio=0.5,
               excess=0.4, excess_of_a_row=0.6, ulps=1.0, first=[0, 0, 0, 0],
               repeats=None)  # fmt: skip
    b["rows"].append(row)
    if rng.random() < 0.8:
        first["repeats"] = False


# -------------------------------------------------------------------------------------------------

WORDS = ("bits", "ran")
PARTS = {  # of a plan, that rows can be gone with
    "audit": ("format", "call"), "sweep": ("format", "call"), "effects": ("sequence", "run"),
    "invariance": ("way", "axis"),
}  # fmt: skip
TOGETHER = (  # numbers that are null together
    ("log_prob", "log_prob_p999", "log_prob_max"), ("floor_ratio", "error_base", "error_variant"),
)  # fmt: skip
NO_OUTPUT: Data = {
    "reason": "has no cache", "differ": 0, "elements": 0,
    **dict.fromkeys(("difference", "explained", "other_difference", "share")),
}  # fmt: skip
NUMBERS = {
    "audit": (*SIZES, "expected_ratio", "worst_row", "floor_ratio", "noise", "bits", "nonfinite",
              "elements", "bias_p", "baseline_ratio", "ran"),
    "effects": (*SPREADS, "flips", "unexplained", "log_perplexity"),
    "invariance": ("difference", "floor_ratio", "error_base", "error_variant", "excess",
                   "excess_of_a_row", "ulps"),
}  # fmt: skip
NUMBERS["sweep"] = tuple(name for name in NUMBERS["audit"] if name != "bias_p")
EMPTY: dict[str, Data] = {
    "effects": {**dict.fromkeys((*NUMBERS["effects"], "angle", "from_against", "first_flip")),
                "growth": [], "positions": 0},
    "invariance": {**dict.fromkeys((*NUMBERS["invariance"], "first", "keys", "cause", "closest",
                                    "tried", "repeats")), "tensors": [], "elements": 0,
                   "differ": 0, "nonfinite": 0},
}  # fmt: skip
IDENTITY = ("case", "source", "module", "layer", "call", "seed", "phase", "step", "attends", "role",
            "kernel", "options", "format", "tensor", "sampled")  # fmt: skip
COMMON: tuple[Alteration, ...] = (gone, planned_otherwise, twice, unmeasured,
                                  numbers_of_nothing, lacking, impossible, renamed,
                                  asked_otherwise, damaged, nothing)  # fmt: skip
CLASSES: dict[str, tuple[Alteration, ...]] = {
    "audit": (*COMMON, worse, facts, contradicts, floor_lacks),
    "sweep": (*COMMON, worse, facts, contradicts, floor_lacks),
    "effects": (*COMMON, dearer, of_few, flipped, checked, disagrees),
    "invariance": (
        *COMMON,
        other_bits,
        farther,
        in_error,
        outputs,
        output_disagrees,
        unsteady,
    ),
}


def altered(sound: Data, number: int) -> tuple[str, bytes, bytes]:
    """The input of a number: its class, and both reports."""
    rng, kind = random.Random(number), sound["kind"]
    if kind in ("audit", "sweep"):
        names = sound["rows"][0].keys() - set(IDENTITY)
        EMPTY[kind] = {**dict.fromkeys(names), "interval": {}, "nulls": {}, "tensors": []}
    a, b = copy.deepcopy(sound), copy.deepcopy(sound)
    alteration = rng.choice(CLASSES[kind])
    alteration(a, b, rng)
    return alteration.__name__, *(sealed(report) for report in (a, b))


def sealed(report: Data) -> bytes:
    return fuzz.with_digest(json.dumps(report, allow_nan=False).encode())


def compared(folder: Path, a: bytes, b: bytes) -> int:
    """The exit code of comparing two reports. Raises Broken for a traceback, or for many
    lines."""
    for name, raw in (("a.json", a), ("b.json", b)):
        (folder / name).write_bytes(raw)
    sides, out = (
        [str(folder / name) for name in ("a.json", "b.json")],
        str(folder / "out"),
    )
    return fuzz.call("compare", *sides, "--quiet", "--overwrite", "-o", out).code


def measure(folder: Path, kinds: Sequence[str], aside: Path) -> dict[str, Data]:
    """The sound reports, measured in a folder; each, and a run of the same request once
    more, is no change, as is shown in another."""
    (folder / "sweep.yaml").write_text(SWEEP)
    sound = {}
    for kind in kinds:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(fuzz.ROOT)}
        raws = []
        for name in (kind, f"{kind}-again"):
            if not (folder / name).exists():
                command = (
                    sys.executable,
                    "-m",
                    "numdev",
                    *REPORTS[kind],
                    "-q",
                    "-o",
                    name,
                )
                subprocess.run(command, check=True, cwd=folder, env=environment)
            raws.append((folder / name / "report.json").read_bytes())
        for other in raws:
            if code := compared(aside, raws[0], other):
                sys.exit(f"the sound report of {kind} beside itself: exit code {code}")
        sound[kind] = json.loads(raws[0])
        del sound[kind]["digest"]
    return sound


def main() -> int:
    parser = argparse.ArgumentParser(description="Is an altered report called unchanged?")
    parser.add_argument("--count", type=int, default=2500, help="inputs of each kind")
    parser.add_argument("--seed", type=int, default=0, help="the first number")
    parser.add_argument("--only", choices=list(REPORTS), help="inputs of this kind alone")
    parser.add_argument("--reports", type=Path, help="keep the sound reports there")
    asked = parser.parse_args()
    counts, wrong, began = Counter[tuple[str, str, int]](), [], time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        kinds = [asked.only] if asked.only else list(REPORTS)
        sound = measure(asked.reports or folder, kinds, folder)
        for number in range(asked.seed, asked.seed + asked.count):
            for kind, report in sound.items():
                name, a, b = altered(report, number)
                try:
                    code = compared(folder, a, b)
                    counts[kind, name, code] += 1
                    if code == 0:
                        wrong.append(f"- {number} ({kind}, {name}): exit code 0")
                except fuzz.Broken as error:
                    wrong.append(f"- {number} ({kind}, {name}): {error}")
    print(
        "| report | class | changed (1) | another request (2) | not judged (3) | no "
        "change (0) |"
    )
    print("|---|---|---:|---:|---:|---:|")
    for kind in sound:
        for alteration in CLASSES[kind]:
            name = alteration.__name__
            cells = (str(counts[kind, name, code]) for code in (1, 2, 3, 0))
            print(f"| {kind} | {name} |", " | ".join(cells), "|")
    seconds, total = time.monotonic() - began, asked.count * len(sound)
    print(
        f"\n{total} inputs in {seconds:.0f} s; {len(wrong)} passed or broke.",
        *wrong,
        sep="\n",
    )
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
