"""What does an audit cost? A model of it (docs/scale.md), fitted and held against larger audits.

    python benchmarks/audit_cost.py [--device cuda]

Small audits of drawn causal calls are timed by section (a report's own `timings`), after one that
does not count; the faster of two counts. On the CPU the time is one thread's processor time, so
that other work on the machine does not. From these audits come the constants of the model: for
every section a time for each call and one for each unit of its work, both at least 0, by least
squares of relative errors. Then larger audits are run, in length, heads and rows beyond all that
was fitted, and predicted beside measured is printed; last, what the model says of 80 calls of 64
heads and 131,072 tokens, with these constants. Prints Markdown.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from audit_time import request, timed
from scipy.optimize import nnls

from numdev.audit.timing import Stopwatch
from numdev.system import System

RUNS = 2
"""Of each kernel: an audit measures its noise."""


@dataclass(frozen=True, kw_only=True)
class Calls:
    """Some calls of one shape: causal, head_dim 128, bfloat16."""

    layers: int = 1
    heads: int
    length: int
    rows: int | None = None
    kernels: tuple[str, ...] = ("sdpa-flash",)
    head_dim: int = 128

    @property
    def measured(self) -> int:
        """Query rows of each head."""
        return min(self.rows or self.length, self.length)

    @property
    def scores(self) -> float:
        """Of all query rows, in all calls: half of them are under the causal mask."""
        return self.layers * self.heads * self.length**2 / 2

    @property
    def measured_scores(self) -> float:
        return self.layers * self.heads * self.measured * self.length / 2

    @property
    def outputs(self) -> float:
        """Elements of the output that one kernel is measured in."""
        return self.layers * self.heads * self.measured * self.head_dim

    @property
    def returned(self) -> float:
        """Elements that one run of a kernel returns, which are looked through for what is not
        finite and for noise."""
        return self.layers * self.heads * self.length * self.head_dim

    def request(self, device: str) -> Any:
        given = {"batch": 1, "kv_heads": self.heads, "backward": False, "format": "bfloat16"}
        shape = {"heads": self.heads, "length": self.length, "head_dim": self.head_dim}
        return request(
            {
                **given,
                **shape,
                "layers": self.layers,
                "rows": self.rows,
                "kernel": list(self.kernels),
                "device": device,
            }
        )


# A section's work, by terms that each have a constant. 4 d flops a score: two products.
TERMS: Mapping[str, Mapping[str, Callable[[Calls], float]]] = {
    "kernels": {
        "call": lambda c: c.layers * len(c.kernels) * RUNS,
        "flop": lambda c: 4 * c.head_dim * c.scores * len(c.kernels) * RUNS,
    },
    "reference": {
        "call": lambda c: c.layers,
        "flop": lambda c: 4 * c.head_dim * c.measured_scores,
    },
    "predictions": {
        "call": lambda c: c.layers,
        "flop": lambda c: 4 * c.head_dim * c.measured_scores,
    },
    "baseline": {
        "call": lambda c: c.layers,
        "flop": lambda c: 4 * c.head_dim * c.measured_scores,
    },
    "metrics": {
        "call": lambda c: c.layers * (3 + len(c.kernels)),
        "measured element": lambda c: c.outputs * (3 + len(c.kernels)),
        "returned element": lambda c: c.returned * len(c.kernels) * RUNS,
    },
    "other": {
        "call": lambda c: c.layers * (3 + len(c.kernels)),
        "returned element": lambda c: c.returned,
    },
}
FITTED = {
    "cpu": [
        Calls(heads=2, length=256, layers=2),
        Calls(heads=4, length=512),
        Calls(heads=2, length=1024),
        Calls(heads=4, length=1024, rows=64),
        Calls(heads=2, length=2048, rows=64),
        Calls(heads=2, length=2048, rows=256),
        Calls(heads=8, length=512, rows=16),
    ],
    "cuda": [
        Calls(heads=8, length=1024, layers=2),
        Calls(heads=8, length=4096),
        Calls(heads=8, length=8192),
        Calls(heads=16, length=4096, rows=256),
        Calls(heads=8, length=8192, rows=256),
        Calls(heads=8, length=16384, rows=256),
        Calls(heads=8, length=16384, rows=1024),
    ],
}
HELD_OUT = {
    "cpu": [
        Calls(heads=4, length=2048),
        Calls(heads=8, length=2048, rows=256),
        Calls(heads=4, length=4096, rows=64),
    ],
    "cuda": [
        Calls(heads=8, length=16384),
        Calls(heads=32, length=16384, rows=256),
        Calls(heads=8, length=65536, rows=256),
    ],
}
LLAMA_70B = Calls(layers=80, heads=64, length=131072, rows=256)


def fitted(shapes: Sequence[Calls], times: Sequence[Mapping[str, float]], section: str) -> Any:
    """Seconds for a unit of each term. Each audit counts alike, whatever it took."""
    work = np.array([[term(c) for term in TERMS[section].values()] for c in shapes])
    took = np.array([max(t[section], 1e-4) for t in times])
    scale = work.max(axis=0)
    return nnls(work / took[:, None] / scale, np.ones(len(shapes)))[0] / scale


def predicted(constants: Mapping[str, Any], calls: Calls, section: str) -> float:
    work = [term(calls) for term in TERMS[section].values()]
    return float(np.dot(constants[section], work))


def named(calls: Calls) -> str:
    rows = "all rows" if calls.rows is None else f"{calls.rows} rows"
    return f"{calls.layers} x [{calls.heads}, {calls.length}, {calls.head_dim}], {rows}"


def row(*cells: object) -> None:
    print("| " + " | ".join(map(str, cells)) + " |", flush=True)


def table(*titles: str) -> None:
    print()
    row(*titles)
    row(*["---"] * len(titles))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="auto")
    system = System.here(parser.parse_args().device)
    device = system.device
    print(f"{system.gpu or f'{system.cpu}, one thread'}", end=", ")
    print(f"torch {system.packages['torch']}; causal, head_dim 128, bfloat16, sdpa-flash twice")

    if device == "cpu":
        torch.set_num_threads(1)
    counted = patch("numdev.audit.study.stopwatch", lambda _: Stopwatch(clock=time.process_time))

    def measured(calls: Calls) -> Mapping[str, float]:
        with counted if device == "cpu" else nullcontext():
            first, *others = [timed(calls.request(device)) for _ in range(3)]
        return {section: min(each[section] for each in others) for section in first}

    shapes = FITTED[device]
    times = [measured(c) for c in shapes]
    constants = {section: fitted(shapes, times, section) for section in TERMS}
    table("section", "constants")
    for section, found in constants.items():
        row(section, "; ".join(map(said, TERMS[section], found)))
    table("audit", "", *TERMS, "sum")
    for where, each in (("fitted", shapes), ("held out", HELD_OUT[device])):
        for calls in each:
            took = times[shapes.index(calls)] if where == "fitted" else measured(calls)
            model = {s: predicted(constants, calls, s) for s in TERMS}
            row(named(calls), f"{where}, model", *seconds(model))
            row("", "measured", *seconds({s: took[s] for s in TERMS}))
    big = {s: predicted(constants, LLAMA_70B, s) for s in TERMS}
    table("extrapolated", *TERMS, "sum")
    row(named(LLAMA_70B), *seconds(big))


def said(unit: str, constant: float) -> str:
    if unit == "flop":
        return f"{1e-12 / constant:.3g} TFLOP/s" if constant else "0 a flop"
    scale, name = (1e3, "ms") if unit == "call" else (1e9, "ns")
    return f"{constant * scale:.3g} {name} a {unit}"


def seconds(times: Mapping[str, float]) -> list[str]:
    return [f"{x:.3g}" for x in (*times.values(), sum(times.values()))]


if __name__ == "__main__":
    main()
