"""Does auditing a large model cost more than running it?

    python benchmarks/large_model.py DIRECTORY [--layers 32 --length 4096 --rows 256]
        [--width 4096] [--kernel sdpa-flash ...]

A decoder of Llama-3-8B's shape (32 query heads, 8 kv heads, head_dim 128, hidden 4096,
MLP 14336; a smaller vocabulary) with random weights in bfloat16 is written to DIRECTORY,
once, and audited there as any checkpoint, on token ids drawn with a seed. Printed are the
report's own `timings`, the model's forward pass alone, and reference, predictions and
metrics over the kernels under audit plus that pass: what an audit adds to what it audits.
The audit runs twice, and the second run counts: the first also compiles.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from numdev.request_models import BACKENDS, AuditRequest, Choice
from numdev.studies.audit.run import audit
from numdev.studies.audit.section_timing import SECTIONS, TOTAL

VOCABULARY = 32000
HEAD_DIM, WIDTH = 128, 4096  # of Llama-3-8B
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def written(directory: Path, layers: int, length: int, width: int) -> Path:
    """The checkpoint, made if it is not there; narrower ones have fewer heads of the same
    size."""
    if not (directory / "config.json").exists():
        config = LlamaConfig(
            hidden_size=width,
            intermediate_size=width * 7 // 2,
            num_hidden_layers=layers,
            num_attention_heads=width // HEAD_DIM,
            num_key_value_heads=max(1, width // HEAD_DIM // 4),
            max_position_embeddings=length,
            rope_theta=500000.0,
            vocab_size=VOCABULARY,
            dtype=torch.bfloat16,
        )
        torch.manual_seed(0)
        with torch.device(DEVICE):
            torch.set_default_dtype(torch.bfloat16)
            try:
                LlamaForCausalLM(config).save_pretrained(directory)
            finally:
                torch.set_default_dtype(torch.float32)
    return directory


def forward_pass(directory: Path, length: int) -> float:
    """Seconds of the model's own forward pass, the median of three."""
    model = (
        AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
        .to(DEVICE)
        .eval()
    )
    ids = torch.randint(VOCABULARY, (1, length), device=DEVICE)
    times = []
    with torch.no_grad():
        for _ in range(4):
            settle()
            begin = time.perf_counter()
            model.model(ids)
            settle()
            times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])


def settle() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--width", type=int, default=WIDTH, help="a multiple of 128")
    parser.add_argument(
        "--kernel", action="append", help="repeatable; the default kernels"
    )
    options = parser.parse_args()
    written(options.directory, options.layers, options.length, options.width)
    model = forward_pass(options.directory, options.length)
    request = AuditRequest(
        target=str(options.directory),
        checkpoint=str(options.directory),
        kernels=tuple(Choice(name=name) for name in options.kernel or BACKENDS),
        formats=("bfloat16",),
        rows=options.rows,
        device=DEVICE,
        model_dtype="bfloat16",
        reproducers=0,
        length=options.length,
        sequences=1,
    )
    for _ in range(2):
        with tempfile.TemporaryDirectory() as directory:
            report = audit(request, Path(directory))
        times = report.timings
        print(", ".join(f"{name} {times[name]:.2f}" for name in (*SECTIONS, TOTAL)), "s")
    measuring = times["reference"] + times["metrics"]
    beside = times["kernels"] + model
    print(f"the model's forward pass: {model:.3f} s")
    print(f"reference and metrics: {measuring / beside:.2f} of kernels and forward pass")
    print(f"with predictions: {(measuring + times['predictions']) / beside:.2f}")
    if DEVICE == "cuda":
        print(f"at most {torch.cuda.max_memory_allocated() / 1e9:.1f} GB")


if __name__ == "__main__":
    main()
