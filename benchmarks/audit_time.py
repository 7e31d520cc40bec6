"""Where does an audit's time go, with every row measured and with a sample of them?

    python benchmarks/audit_time.py [--length 1024 --heads 8 --kv-heads 8 --head-dim 64 --layers 2]
        [--rows 256] [--backward] [--kernel sdpa-flash] [--format bfloat16] [--device cuda]

An audit of so many drawn causal calls of one shape, as `numdev audit` runs it: each
kernel twice, worst rows and findings included, nothing written but the journal. One of a
single call goes before, for what the first use of a shape alone costs: to build kernels
takes seconds. Printed are the report's own `timings` in seconds; the part of the total
that is metrics and other (what is spent beside computing anything's truth); and all that
measuring costs, reference, predictions and metrics, over the kernels it is about.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from numdev.request_models import AuditRequest, CaseConfig, Choice
from numdev.studies.audit.run import audit
from numdev.studies.audit.section_timing import SECTIONS, TOTAL
from numdev.system import System

WARM_UP = {"layers": 1}


def request(asked_for: Mapping[str, Any], **changes: Any) -> AuditRequest:
    """The audit; `rows` is passed on where it is given."""
    asked = {**asked_for, **changes}
    cases = tuple(
        CaseConfig(
            name=f"layer {layer}",
            batch=asked["batch"],
            heads=asked["heads"],
            kv_heads=asked["kv_heads"],
            seq_len=asked["length"],
            head_dim=asked["head_dim"],
            causal=True,
        )
        for layer in range(asked["layers"])
    )
    sampled = {"rows": asked["rows"]} if asked["rows"] is not None else {}
    return AuditRequest(
        target="audit_time",
        cases=cases,
        kernels=tuple(Choice(name=name) for name in asked["kernel"] or ["sdpa-flash"]),
        formats=(asked["format"],),
        backward=asked["backward"],
        device=asked["device"],
        reproducers=0,
        **sampled,
    )


def timed(asked: AuditRequest) -> dict[str, float]:
    """An audit's times. Raises SystemExit where no kernel ran: there is nothing to
    compare with."""
    with tempfile.TemporaryDirectory() as directory:
        report = audit(asked, Path(directory))
    if not report.measured:
        raise SystemExit(f"not measured: {report.rows[-1].reason}")
    return report.timings


def line(name: str, times: Mapping[str, float]) -> str:
    beside = (times["metrics"] + times["other"]) / times[TOTAL]
    cost = (times["reference"] + times["metrics"] + times["predictions"]) / times[
        "kernels"
    ]
    cells = "".join(f"{times[section]:12.3f}" for section in (*SECTIONS, TOTAL))
    return f"{name:14}{cells}{100 * beside:17.1f} %{cost:17.1f} x"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("batch", 1), ("length", 1024), ("heads", 8), ("head-dim", 64)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--kv-heads", type=int, help="as many as --heads, if not given")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument(
        "--rows", type=int, help="also an audit of so many sampled rows a head"
    )
    parser.add_argument("--backward", action="store_true")
    parser.add_argument("--kernel", action="append", help="repeatable; sdpa-flash")
    parser.add_argument("--format", default="bfloat16")
    parser.add_argument("--device", default="auto")
    options = vars(parser.parse_args())
    options["kv_heads"] = options["kv_heads"] or options["heads"]
    system = System.probe(options["device"])
    shape = (options["batch"], options["heads"], options["length"], options["head_dim"])
    print(
        f"{system.gpu or f'{system.cpu} ({system.cpu_capability}, {system.threads} threads)'}, "
        f"torch {system.packages.get('torch')}; {options['layers']} causal calls, q "
        f"{list(shape)}, "
        f"{options['kv_heads']} kv heads, "
        f"{options['format']}{', backward' * options['backward']}"
    )
    titles = "".join(f"{section:>12}" for section in (*SECTIONS, TOTAL))
    print(f"{'seconds':14}{titles}{'metrics + other':>19}{'cost of kernels':>19}")
    for rows in dict.fromkeys((None, options["rows"])):
        timed(request(options, rows=rows, **WARM_UP))
        times = timed(request(options, rows=rows))
        print(line("all rows" if rows is None else f"{rows} rows", times), flush=True)


if __name__ == "__main__":
    main()
