"""What does the truth of a large model's log-probabilities cost on one GPU, beside the
products of matrices in fp64 that it cannot do without?

    PYTHONPATH=benchmarks:. python benchmarks/logprobs_large.py DIRECTORY
        [--layers 32 --width 4096 --sequences 4 --length 1024 --stream]

A decoder of Llama-3-8B's shape with random weights (`large_model.py`) is run by
transformers in bfloat16 on random tokens, and what it gives is judged as `numdev
logprobs` judges it. Printed are seconds of each part, tokens a second of exact and of
rounded runs (the first sequence by itself, since what is compiled is compiled there), the
largest memory of the GPU, and how many tokens a second the model's own products of
matrices would take at the speed of one large product in fp64, measured here."""

from __future__ import annotations

import argparse
import gc
import resource
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from large_model import DEVICE, VOCABULARY, settle, written
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import numdev
from numdev.request_models import logprobs_request
from numdev.studies.logprobs.readers import read_sides
from numdev.studies.logprobs.study import logprobs
from numdev.studies.logprobs.truth import ExactModel

SIDE = 8192  # of the product that is timed


class Timed(ExactModel):
    """An exact model that notes the seconds of its runs."""

    seconds: ClassVar[dict[str, list[float]]] = defaultdict(list)

    def timed(self, name: str, run: Callable[[], Tensor]) -> Tensor:
        """What a run returns, its seconds noted."""
        settle()
        begun = time.perf_counter()
        logits = run()
        settle()
        self.seconds[name].append(time.perf_counter() - begun)
        return logits

    def exact_logits(self, *args: Any, **named: Any) -> Tensor:
        return self.timed("exact", partial(super().exact_logits, *args, **named))

    def rounded_logits(self, *args: Any, **named: Any) -> Tensor:
        return self.timed("rounded", partial(super().rounded_logits, *args, **named))


class Clock:
    """Prints how long each part took."""

    def __init__(self) -> None:
        self.last = time.perf_counter()

    def lap(self, name: str, more: str = "") -> None:
        """Prints the seconds since the part before ended."""
        settle()
        now = time.perf_counter()
        print(f"{name}: {now - self.last:.1f} s{more}", flush=True)
        self.last = now


def recorded(path: Path, file: Path, sequences: int, length: int) -> int:
    """Writes what transformers gives in bfloat16 of random tokens; how many weights a
    token is multiplied with."""
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    model = model.to(DEVICE).eval()
    generator = torch.Generator().manual_seed(0)
    file.unlink(missing_ok=True)
    for i in range(sequences):
        ids = torch.randint(3, VOCABULARY, (1, length), generator=generator).to(DEVICE)
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
        values = logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
        numdev.dump_logprobs(
            file, ids[0].tolist(), [None, *values.tolist()], uid=str(i), dtype="bfloat16"
        )
    linear = (m for m in model.modules() if isinstance(m, nn.Linear))
    return sum(m.weight.numel() for m in linear)


def product_rate() -> float:
    """Multiplications and additions a second of one product of matrices in fp64, the best
    of five."""
    side = SIDE if DEVICE == "cuda" else 1024
    a, b = (torch.randn(side, side, dtype=torch.float64, device=DEVICE) for _ in "ab")
    best = 0.0
    for _ in range(5):
        settle()
        begun = time.perf_counter()
        a @ b
        settle()
        best = max(best, 2 * side**3 / (time.perf_counter() - begun))
    return best


def main() -> None:
    """Writes the model, records one side, judges it, and prints what that took."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--width", type=int, default=4096, help="a multiple of 128")
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--stream", action="store_true")
    asked = parser.parse_args()
    clock = Clock()
    rate = product_rate()
    clock.lap("a product in fp64", f": {rate / 1e12:.1f} TFLOP/s")
    path = written(asked.directory / "model", asked.layers, 4096, asked.width)
    clock.lap("model written")
    file = asked.directory / "rollout.jsonl"
    weights = recorded(path, file, asked.sequences, asked.length)
    gc.collect()
    if DEVICE == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    clock.lap("recorded in bfloat16", f", {weights / 1e9:.2f} G weights in products")
    request = logprobs_request([str(file)], {"model": str(path), "stream": asked.stream})
    opened = partial(Timed, device="auto", stream=asked.stream)
    report = logprobs(request, read_sides(file), open_model=opened)
    clock.lap("judged", ": " + " ".join(report.summary.answer))
    limit = rate / (2 * weights)
    print(f"limit of products in fp64: {limit:,.0f} tokens/s")
    for name, seconds in Timed.seconds.items():
        later = seconds[1:] or seconds
        speed = asked.length * len(later) / sum(later)
        print(f"{name} runs: first {seconds[0]:.2f} s, then {sum(later):.2f} s for "
              f"{len(later)}: {speed:,.0f} tokens/s, {speed / limit:.2f} of the limit")  # fmt: skip
    everything = report.timings["total"]
    tokens = asked.sequences * asked.length
    print(f"in all {everything:.1f} s: {tokens / everything:,.0f} tokens/s")
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    gpu = torch.cuda.max_memory_allocated() / 2**30 if DEVICE == "cuda" else 0.0
    print(f"largest memory: GPU {gpu:.1f} GiB, host {host:.1f} GiB")


if __name__ == "__main__":
    main()
