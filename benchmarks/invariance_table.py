"""Which kernels keep their bits along which axes, by how much they do not, and what it
costs.

    python benchmarks/invariance_table.py                          the CPU's kernels, in minutes
    python benchmarks/invariance_table.py --device cuda --full     the lengths of the docs
    python benchmarks/invariance_table.py --kernel flex --case decode-1024

Prefill of 1,024 and 4,096 tokens, decode over 1,024 and 8,192 keys, an extension by 16,
in batches of 1 (and 2, 8 and 64 as the axis `batch` makes them). One short line for each
kernel, case and axis that differs; one for all axes that do not; then milliseconds a call
by batch. docs/invariance.md shows what it printed. It writes nothing but a journal in a
temporary directory."""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from numdev.grouping import grouped
from numdev.kernels import find
from numdev.report.number_text import label
from numdev.request_models import InvarianceRequest
from numdev.sources.case_sources import Drawn
from numdev.studies.audit.isolation import Failure, attempt
from numdev.studies.invariance.axes import SIZES, select_sequences
from numdev.studies.invariance.report import InvarianceReport
from numdev.studies.invariance.study import invariance
from numdev.system import System

HEADS = {"heads": 8, "kv_heads": 2, "head_dim": 128}
CASES = {
    "prefill-1024": {"seq_len": 1024, "causal": True},
    "prefill-4096": {"seq_len": 4096, "causal": True},
    "extend-16": {"seq_len": 16, "kv_len": 1040, "causal": True, "causal_offset": 1024},
    "decode-1024": {"seq_len": 1, "kv_len": 1024},
    "decode-8192": {"seq_len": 1, "kv_len": 8192},
}
SHORT = {  # on a CPU, unless --full
    "prefill-256": {"seq_len": 256, "causal": True},
    "extend-16": {"seq_len": 16, "kv_len": 272, "causal": True, "causal_offset": 256},
    "decode-1024": {"seq_len": 1, "kv_len": 1024},
}
KERNELS = {
    "cpu": ("sdpa-math", "sdpa-flash", "sdpa-default"),
    "cuda": ("sdpa-math", "sdpa-flash", "sdpa-efficient", "sdpa-cudnn", "sdpa-default",
             "triton-flash", "varlen-attn"),
}  # fmt: skip
AXES = ("repeat", "batch", "order", "neighbours", "lengths", "padding", "heads", "rows", "longer",
        "chunks", "decode", "paged", "mask", "strides", "graph", "beyond", "hidden",
        "unwritten")  # fmt: skip
COMPILED = ("flex", "inductor")  # seconds a shape
FEW = ("repeat", "batch", "decode", "chunks")  # axes of those, unless some are asked for


def lines(report: InvarianceReport) -> Iterator[str]:
    """What differs, kernel by kernel and case by case, the largest difference of each
    axis."""
    for (kernel, case), of_case in grouped(
        report.rows, lambda r: (label(r), r.case)
    ).items():
        ran = [r for r in of_case if r.status == "ok"]
        by_axis = grouped(ran, lambda r: r.axis)
        same = [axis for axis, rows in by_axis.items() if all(r.same for r in rows)]
        yield f"{kernel} {case}: same along {', '.join(same) or 'none'}"
        for axis, rows in by_axis.items():
            for tensor, of in grouped(
                (r for r in rows if r.differ), lambda r: r.tensor
            ).items():
                r = max(of, key=lambda r: (r.nonfinite, r.floor_ratio or 0.0))
                why = next((str(x.cause) for x in of if x.cause is not None), "")
                variants = len({x.variant for x in of})
                share = 100 * r.differ / r.elements
                size = "NaN" if r.nonfinite else f"{r.floor_ratio or 0.0:.3g} floor"
                print_at = f"first {r.first}" if r.first else ""
                yield (
                    f"  {axis} {tensor}: {size}, {share:.2g} %, {r.ulps:.3g} ulp, "
                    f"{variants} variants, most at {r.variant}, {print_at}; {why}"
                )
        for reason, rows in grouped(
            (r for r in of_case if r.status != "ok"), lambda r: r.reason
        ).items():
            axes = ", ".join(dict.fromkeys(r.axis for r in rows))
            yield f"  {rows[0].status} along {axes}: {str(reason)[:110]}"


def times(
    kernels: list[str], cases: list[str], device: str, fmt: torch.dtype
) -> Iterator[str]:
    """Milliseconds a call, the median of 20, by batch: what a choice costs."""
    every = {**SHORT, **CASES}
    for name in cases:
        config = configs({name: every[name]})[0]
        drawn = Drawn(config=config, seed=0, source="", device=device).load()
        for kernel in kernels:
            shown = []
            for size in SIZES:
                case = select_sequences(drawn.rounded_to(_format(fmt)), range(size))
                if case.k.numel() > 1 << 30 or isinstance(
                    attempt(find(kernel), case, {}), Failure
                ):
                    shown.append("-")
                    continue
                took = []
                for _ in range(20 if device == "cuda" else 3):
                    _wait(device)
                    start = time.perf_counter()
                    find(kernel).attend(case)
                    _wait(device)
                    took.append(time.perf_counter() - start)
                shown.append(f"{1e3 * sorted(took)[len(took) // 2]:.3g}")
            yield (
                f"{kernel} {name} ms at batch {'/'.join(map(str, SIZES))}: "
                f"{' / '.join(shown)}"
            )


def _format(dtype: torch.dtype) -> object:
    from numdev.formats import format_of

    return format_of(dtype)


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def configs(cases: dict[str, dict[str, object]]) -> list:
    from numdev.request_models import CaseConfig

    return [CaseConfig(name=name, **HEADS, **fields) for name, fields in cases.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--full", action="store_true", help="the long cases on a CPU too")
    parser.add_argument(
        "--kernel", action="append", help="repeatable; default: the device's"
    )
    parser.add_argument("--case", action="append", help="repeatable; default: all")
    parser.add_argument(
        "--axis", action="append", help="repeatable; default: all but few"
    )
    parser.add_argument("--format", default="bfloat16")
    parser.add_argument("--backward", action="store_true")
    parser.add_argument("--isolate", action="store_true")
    parser.add_argument(
        "--no-times", action="store_true", help="without milliseconds a call"
    )
    options = parser.parse_args()
    device = System.probe(options.device).device
    cases = CASES if options.full or device == "cuda" else SHORT
    cases = {n: x for n, x in cases.items() if options.case is None or n in options.case}
    kernels = list(options.kernel or KERNELS[device])
    print(
        f"torch {torch.__version__} on "
        f"{System.probe(device).gpu or System.probe(device).cpu}"
    )
    for group in (
        [k for k in kernels if k not in COMPILED],
        [k for k in kernels if k in COMPILED],
    ):
        if not group:
            continue
        axes = options.axis or (FEW if group[0] in COMPILED else AXES)
        request = InvarianceRequest(
            target="table", cases=tuple(configs(cases)), kernels=group, formats=(options.format,),
            axes=tuple(axes), backward=options.backward, isolate=options.isolate, device=device,
            logits=False,
        )  # fmt: skip
        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            report = invariance(request, Path(folder))
        for line in lines(report):
            print(line, flush=True)
        for finding in report.findings:
            print(f"FINDING {finding.sentence}", flush=True)
        print(
            f"{len(report.rows)} rows in {time.perf_counter() - start:.0f} s", flush=True
        )
    dtype, plain = (
        getattr(torch, options.format),
        [k for k in kernels if k not in COMPILED],
    )
    for line in () if options.no_times else times(plain, list(cases), device, dtype):
        print(line, flush=True)


if __name__ == "__main__":
    main()
