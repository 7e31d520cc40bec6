"""How near real kernels are to the emulation they claim to be: expected_ratio, worst_row, residual.

    python benchmarks/expected_ratio.py [--device cuda] [--explain]

Every SDPA backend and the baseline over regimes, shapes and both 16-bit formats; per head. A line
for each kernel and regime, and one for each kernel with all of them. Under another
ATEN_CPU_CAPABILITY the CPU's kernel is another kernel.
"""

from __future__ import annotations

import argparse
from collections import defaultdict

from numdev.audit.bench import Bench
from numdev.audit.explain_rows import explain
from numdev.audit.journal import Task
from numdev.audit.task import run_task
from numdev.cases import AttentionCase, CaseRef
from numdev.kernels import find
from numdev.sources.synthetic import Shapes, draw
from numdev.system import System

REGIMES = {
    "normal": ("normal", {}),
    "logits x 4": ("normal", {"logits": 4.0}),
    "logits x 16": ("normal", {"logits": 16.0}),
    "outliers": ("outliers", {}),
    "sink": ("sink", {}),
    "strong sink": ("sink", {"strength": 24.0}),
    "ties": ("ties", {}),
    "strong ties": ("ties", {"strength": 24.0}),
    "four ties": ("ties", {"count": 4}),
}
SHAPES = {
    "cuda": ((2048, 64, True), (1500, 128, False), (2048, 128, True), (1000, 80, False)),
    "cpu": ((1024, 64, True), (700, 128, False)),
}
KERNELS = ("sdpa-flash", "sdpa-efficient", "sdpa-cudnn", "sdpa-math", "baseline")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="auto")
    parser.add_argument("--explain", action="store_true")
    chosen = parser.parse_args()
    system = System.here(chosen.device)
    torch_version = system.packages.get("torch")
    print(f"{system.gpu or system.cpu_capability}, torch {torch_version}; per head:")
    print(f"{'':32} expected_ratio   worst_row   residual (largest)   explained   heads")
    ratios: dict[tuple[str, str], list[float]] = defaultdict(list)
    rows: dict[tuple[str, str], list[float]] = defaultdict(list)
    residuals: dict[tuple[str, str], list[tuple[float, bool]]] = defaultdict(list)
    for regime, (name, options) in REGIMES.items():
        for length, head_dim, causal in SHAPES[system.device]:
            shapes = Shapes(
                batch=2,
                heads=4,
                kv_heads=4,
                q_len=length,
                kv_len=length,
                head_dim=head_dim,
                v_dim=head_dim,
            )
            q, k, v = (x.to(system.device) for x in draw(name, shapes, seed=0, options=options))
            ref = CaseRef(case=f"{regime} {length} {head_dim}")
            case = AttentionCase(ref=ref, q=q, k=k, v=v, scale=head_dim**-0.5, is_causal=causal)
            bench = Bench(ref, lambda case=case: case)
            for fmt in ("bfloat16", "float16"):
                for kernel in map(find, KERNELS):
                    task = Task(case=ref, role="kernel", kernel=kernel.name, format=fmt)
                    for row in run_task(task, kernel, bench, system):
                        if row.expected_ratio is not None and row.worst_row is not None:
                            ratios[kernel.name, regime].append(row.expected_ratio)
                            rows[kernel.name, regime].append(row.worst_row)
                    if chosen.explain:
                        for found in explain(task, kernel, bench, system):
                            if found.residual is not None:
                                known = found.explained_by is not None
                                residuals[kernel.name, regime].append((found.residual, known))
    for kernel_name in KERNELS:
        keys = [key for key in ratios if key[0] == kernel_name]
        for key in keys:
            show(f"{key[0]}, {key[1]}", ratios[key], rows[key], residuals[key])
        if keys:
            show(
                f"{kernel_name}, ALL",
                [x for key in keys for x in ratios[key]],
                [x for key in keys for x in rows[key]],
                [x for key in keys for x in residuals[key]],
            )


def show(
    what: str, ratio: list[float], worst: list[float], residual: list[tuple[float, bool]]
) -> None:
    fit = ""
    if residual:
        share = f"{sum(known for _, known in residual)}/{len(residual)}"
        fit = f"{max(r for r, _ in residual):.2f}{share:>22}"
    print(
        f"{what:32} {min(ratio):.3f} .. {max(ratio):.3f}   {max(worst):9.2f}   {fit:>30}"
        f"   {len(ratio):5}"
    )


if __name__ == "__main__":
    main()
