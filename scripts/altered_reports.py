"""Sound reports, altered so that none may pass the gate any more.

    python scripts/altered_reports.py [--count 5000] [--seed 0]

Measures five small reports on this machine: two formats, gradients, a sweep, and sampled rows of
both. Each must pass the default rules. Every input is one of them with one alteration of a class
below, drawn by its number and sealed again as numdev seals (but for the last class), and must end
in exit code 1 (exceeded) or 3 (not measured), in one line or in a verdict. Prints how each class
ended, and each input that passed or broke."""

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
}
SWEEP = """
cases: [{name: normal, heads: 2, seq_len: [64, 96], head_dim: 32}]
kernels: [sdpa-flash, sdpa-math]
formats: [bfloat16, float16]
seeds: 2
backward: true
repeats: 2
"""
NEEDED = ("elements", "rms", "mean_abs", "max_abs", "nonfinite", "sequences", "expected_ratio",
          "worst_row", "noise")  # fmt: skip
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
    """Rows of kernels: one, those of a call, of a tensor of a kernel, of a kernel, of a format, of
    a head, all gradients, or all."""
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
    """Rows that were planned are not there; of the kernels, or of what stands beside them."""
    rows = scope(report, rng, ("out", "dq", "dk", "dv"))
    if rng.random() < 0.2:
        rows = [rng.choice([r for r in report["rows"] if r["role"] != "kernel"])]
    report["rows"] = [row for row in report["rows"] if not any(row is each for each in rows)]


def twice(report: Data, rng: random.Random) -> None:
    """Rows are there twice, or are those of another call."""
    extra = copy.deepcopy(scope(report, rng))
    for row in extra:
        if rng.random() < 0.3:
            row["head"] = (row["head"] or 0) + 64
    report["rows"] += extra


def unmeasured(report: Data, rng: random.Random) -> None:
    """Rows become skipped or failed, with their numbers or without. All of a call's output or all
    of its gradients at once may be skipped, where the kernel ran in other calls."""
    # A kernel named in the request may refuse single calls: so it is all calls of one, or one row.
    rows = judged(report)
    chosen = [rng.choice(rows)] if rng.random() < 0.5 else some_of(rows, rng, "kernel", "format")
    status, bare = rng.choice(("skipped", "failed")), rng.random() < 0.7
    for row in chosen:
        row["status"], row["reason"] = status, rng.choice(("takes no mask", "not installed", ""))
        if bare:
            row.update(dict.fromkeys((*NEEDED, "bias_p", "bias_size"), None), interval={})
    if len(chosen) > 1:  # as numdev writes a kernel that ran in no call: a row for each
        kept = {json.dumps([r["case"], r["seed"], r["kernel"], r["format"]]): r for r in chosen}
        for row in kept.values():
            row.update(head=None, tensor="out")
        drop = [r for r in chosen if not any(r is k for k in kept.values())]
        report["rows"] = [r for r in report["rows"] if not any(r is d for d in drop)]


def lacking(report: Data, rng: random.Random) -> None:
    """A number that a rule needs is null or not there, whatever reason is given."""
    name = rng.choice(NEEDED)
    # Over rows without a key nothing is measured; log-sum-exps have no prediction, dk and dv of
    # sampled rows neither; gradients no sequences.
    tensors = {"sequences": ("out",), "expected_ratio": ("out", "dq"), "worst_row": ("out", "dq"),
               "noise": ("out", "dq")}  # fmt: skip
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
    """`true`, `"0"`, `1.0` and the like in place of numbers, or of the schema's version."""
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
                row["interval"] = {**row["interval"], "rms": [row["rms"] * 1.1, row["rms"] * 1.2]}
            case 4 if row["format"] != "float16":
                row["elements"] = rng.choice((1, row["elements"] * 2, row["elements"] - 1))
            case 4:
                row["elements"] = 0
            case _:
                at = rng.choice(("module", "layer", "call"))
                row[at] = "elsewhere" if at == "module" else 77


def renamed(report: Data, rng: random.Random) -> None:
    """Rows go by another kernel, role, format, tensor, case, seed or option, and err a lot."""
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
    """Errors beyond their limits, some beside fewer elements, another claim, or other excuses."""
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


CLASSES: dict[str, Callable[[Data, random.Random], None]] = {
    each.__name__: each
    for each in (gone, twice, unmeasured, lacking, no_bias, of_another_type, contradicts, renamed,
                 worse, replanned)
}  # fmt: skip


def damaged(raw: bytes, rng: random.Random) -> bytes:
    """Cut off, merged, or with a byte or a number changed by hand, and not sealed again."""
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
            rng.choice(judged(report))["rms"] = 0.0
            return json.dumps(report).encode()


def measure(folder: Path) -> dict[str, bytes]:
    """The sound reports; each passes."""
    (folder / "sweep.yaml").write_text(SWEEP)
    made = {}
    for name, command in REPORTS.items():
        out = folder / name.replace(" ", "-")
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(fuzz.ROOT)}
        if not out.exists():
            command = (sys.executable, "-m", "numdev", *command, "-q", "-o", str(out))
            subprocess.run(command, check=True, cwd=folder, env=environment)
        if code := fuzz.call("gate", str(out)).code:
            sys.exit(f"the sound report {name} does not pass: exit code {code}")
        made[name] = (out / "report.json").read_bytes()
    return made


def altered(raw: bytes, number: int) -> tuple[str, bytes]:
    """The input of a number: its class, and what is judged."""
    rng = random.Random(number)
    name = rng.choice((*CLASSES, "damaged"))
    if name == "damaged":
        return name, damaged(raw, rng)
    report = json.loads(raw)
    report.pop("digest")
    CLASSES[name](report, rng)
    return name, fuzz.sealed(json.dumps(report, allow_nan=False).encode())


def main() -> int:
    parser = argparse.ArgumentParser(description="Does an altered report pass?")
    parser.add_argument("--count", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0, help="the first number")
    parser.add_argument("--reports", type=Path, help="keep the sound reports there")
    asked = parser.parse_args()
    counts, wrong, began = Counter[tuple[str, int]](), [], time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        sound = measure(asked.reports or Path(folder))
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
    print("| class | exceeded (1) | not measured (3) | passed (0) |\n|---|---:|---:|---:|")
    for name in (*CLASSES, "damaged"):
        print(f"| {name} |", " | ".join(str(counts[name, code]) for code in (1, 3, 0)), "|")
    seconds = time.monotonic() - began
    print(
        f"\n{asked.count} inputs in {seconds:.0f} s; {len(wrong)} passed or broke.",
        *wrong,
        sep="\n",
    )
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
