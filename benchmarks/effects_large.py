"""What does the exact forward pass of a large model take beside fp64 arithmetic's own
limit?

    python benchmarks/effects_large.py DIRECTORY [--layers 32 --length 2048 --width 4096]

The checkpoint of large_model.py (Llama-3-8B's shape, random weights in bfloat16) is
streamed, layer by layer, on one sequence. Printed: seconds of the exact pass, its second
one, over those that its products would take at the rate of one large fp64 matrix product;
and `numdev effects` with one kernel, in all."""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import torch
from large_model import DEVICE, WIDTH, settle, written

from numdev.request_models import effects_request
from numdev.studies.audit.isolation import attempt
from numdev.studies.effects.study import EffectsStudy, effects


def seconds(work: object) -> float:
    settle()
    begin = time.perf_counter()
    work()  # type: ignore[operator]
    settle()
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--width", type=int, default=WIDTH, help="a multiple of 128")
    asked = parser.parse_args()
    path = written(asked.directory, asked.layers, asked.length, asked.width)
    flags = {
        "kernels": ("sdpa-flash",),
        "length": asked.length,
        "sequences": 1,
        "sites": False,
    }
    request = effects_request(str(path), {**flags, "stream": True})
    study = EffectsStudy(request, attempt)
    subject, inputs = study.model_in(study.formats[0]), study.chunks[0]
    first, second = (seconds(lambda: subject.run_exactly(inputs)) for _ in range(2))
    n = 8192 if DEVICE == "cuda" else 1024
    a = torch.randn(n, n, dtype=torch.float64, device=DEVICE)
    rate = 2 * n**3 / min(seconds(lambda: a @ a) for _ in range(3))
    weights = sum(p.numel() for p in study.source.model.parameters())
    limit = 2 * weights * asked.length / rate
    what = f"{DEVICE}: {weights / 1e9:.2f} G weights, {asked.length} tokens"
    print(f"{what}, DGEMM {rate / 1e12:.2f} T/s")
    print(f"exact pass: {first:.1f} s, again {second:.1f} s; arithmetic " "alone " f"{limit:.1f} s: "
          f"{second / limit:.2f} times")  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        report = effects(request, Path(folder))
    print(
        f"numdev effects, sdpa-flash: {report.timings['total']:.0f} s; {report.outcome}"
    )
    print(*report.summary.answer, sep="\n")
    if DEVICE == "cuda":
        print(f"peak memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")


if __name__ == "__main__":
    main()
