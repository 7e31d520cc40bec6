"""Does `numdev weights` need memory for its largest tensor only, and how long does it take?

    python benchmarks/weights_memory.py [--tensors 16] [--elements 4194304] [--shards 1]

Two sharded checkpoints of so many fp32 tensors with so many elements each are written,
compared by the command in a process of its own, and removed. Printed: the seconds and the peak
resident memory of that process, which is flat where only the number of tensors grows.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

MEASURED = """
import resource, sys, time
from numdev.cli import main
start = time.perf_counter()
main(["weights", *sys.argv[1:]])
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
print(f"{time.perf_counter() - start:.0f} s, peak {peak:.2f} GiB resident")
"""


def write(directory: Path, tensors: int, elements: int, shards: int, *, moved: bool) -> None:
    """A sharded checkpoint of N(0, 0.02) weights; `moved` by N(0, 1e-4) from the other one."""
    directory.mkdir()
    where = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = {}
        for i in range(shard * tensors // shards, (shard + 1) * tensors // shards):
            generator = torch.Generator().manual_seed(i)
            x = 0.02 * torch.randn(elements, generator=generator)
            x += 1e-4 * moved * torch.randn(elements, generator=generator)
            part[f"model.layers.{i}.mlp.up_proj.weight"] = x
        save_file(part, directory / file)
        where |= dict.fromkeys(part, file)
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": where}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tensors", type=int, default=16)
    parser.add_argument("--elements", type=int, default=1 << 22)
    parser.add_argument("--shards", type=int, default=1)
    parser.add_argument("--directory", type=Path)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=asked.directory) as name:
        root = Path(name)
        for side in ("a", "b"):
            write(root / side, asked.tensors, asked.elements, asked.shards, moved=side == "b")
        size = 4 * asked.tensors * asked.elements / 2**30
        print(f"{asked.tensors} tensors of {asked.elements} elements, {size:.2f} GiB a checkpoint")
        paths = [str(root / "a"), str(root / "b"), "--quiet", "--output", str(root / "out")]
        subprocess.run([sys.executable, "-c", MEASURED, *paths], check=True)


if __name__ == "__main__":
    main()
