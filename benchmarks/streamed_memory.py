"""Does the memory of a streamed audit grow with the model?

    python benchmarks/streamed_memory.py DIRECTORY [--layers 1 4 8 17 36] [--svg FILE] [--weights]

Llamas of one shape (width 4096, 32 query heads, 8 kv heads, MLP 14336, a vocabulary of 32,000) with
random weights in bfloat16 and more and more layers: 1 to 16 GB. They share their files: one shard a
layer, written once to DIRECTORY (as much as the largest takes), and a directory of links for each
depth. Each is audited with `--stream`, and while it is small also without, in a process of its own:
one sequence of 64 tokens, 16 rows of each head. Recorded are

- the largest resident memory (VmHWM), in which pages of mapped files count that the system could
  take back at any time,
- the largest anonymous memory (RssAnon, looked at every 10 ms), which it could not,
- the time, and how much of it went into running the model, casting its stored weights for the
  report, and the checkpoint's checksum with the rest.

With `--weights` the largest is also compared, by `numdev weights`, with a copy in which one layer
has changed (0.2 microseconds of processor time a weight). Prints Markdown; `--svg` draws memory
against size.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import jinja2
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from numdev import render
from numdev.config import AuditRequest, Choice
from numdev.report import Axis, Curve, Figure, Point, Tick
from numdev.report.renderers.chart import charts
from numdev.system import System

SHAPE = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
}
SMALL = 4.5e9
"""Bytes. A larger model is not loaded whole here."""
OUTSIDE = "outside"
"""The shard of what is in no layer."""


def config(layers: int) -> LlamaConfig:
    return LlamaConfig(**SHAPE, num_hidden_layers=layers, dtype=torch.bfloat16)


def written(directory: Path, layers: int) -> None:
    """The shards of the deepest model, each drawn with a seed, as far as they are not there."""
    with torch.device("meta"):
        weights = LlamaForCausalLM(config(1)).state_dict()
    for layer in (None, *range(layers)):
        path = shard(directory, layer)
        if path.exists():
            continue
        generator = torch.Generator().manual_seed(0 if layer is None else layer + 1)
        save_file(
            {
                name.replace(".0.", f".{layer}."): values(name, x, generator)
                for name, x in weights.items()
                if ("layers" in name) == (layer is not None)
            },
            path,
        )


def shard(directory: Path, layer: int | None) -> Path:
    return directory / f"{OUTSIDE if layer is None else f'layer-{layer:03d}'}.safetensors"


def values(name: str, like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    if "norm" in name:
        return torch.ones(like.shape, dtype=torch.bfloat16)
    return torch.empty(like.shape, dtype=torch.bfloat16).normal_(0, 0.02, generator=generator)


def linked(directory: Path, layers: int, name: str, changed: Path | None = None) -> Path:
    """A checkpoint of so many layers, made of links; with `changed` in place of its last shard."""
    place = directory / name
    place.mkdir(exist_ok=True)
    (place / "config.json").write_text(
        json.dumps({**config(layers).to_dict(), "architectures": ["LlamaForCausalLM"]})
    )
    with torch.device("meta"):
        names = LlamaForCausalLM(config(layers)).state_dict()
    held = {}
    for tensor in names:
        layer = int(tensor.split(".")[2]) if "layers" in tensor else None
        path = shard(directory, layer)
        held[tensor] = path.name
        link = place / path.name
        link.unlink(missing_ok=True)
        link.symlink_to(changed if changed and layer == layers - 1 else path.resolve())
    (place / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": held})
    )
    return place


def bytes_of(checkpoint: Path) -> int:
    return sum(path.stat().st_size for path in checkpoint.glob("*.safetensors"))


class Watched:
    """The process's memory while it runs, in bytes."""

    def __init__(self) -> None:
        self.anonymous, self.over = 0, threading.Event()
        self.thread = threading.Thread(target=self._look, daemon=True)

    def _look(self) -> None:
        while not self.over.wait(0.01):
            self.anonymous = max(self.anonymous, status("RssAnon"))

    def __enter__(self) -> Watched:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self.thread.join()


def status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(x.split()[1]) << 10 for x in lines if x.startswith(f"{field}:"))


def audited(checkpoint: Path, *, stream: bool) -> dict[str, Any]:
    """In this process: one audit, its memory and its time."""
    from numdev.audit.study import audit

    request = AuditRequest(
        target=checkpoint.name,
        checkpoint=str(checkpoint),
        stream=stream,
        kernels=(Choice(name="sdpa-flash"),),
        sampled_rows=16,
        device="cpu",
        model_dtype="bfloat16",
        repeats=1,
        length=64,
        sequences=1,
    )
    with Watched() as seen, tempfile.TemporaryDirectory() as results:
        begin = time.perf_counter()
        found = audit(request, Path(results))
        seconds = time.perf_counter() - begin
    measured = [row for row in found.rows if row.role == "kernel" and row.tensor == "out"]
    return {
        "resident": status("VmHWM"),
        "anonymous": seen.anonymous,
        "seconds": seconds,
        "rows": len(measured),
        "timings": dict(found.timings),
    }


def compared(first: Path, second: Path) -> dict[str, Any]:
    """In this process: `numdev weights` of two checkpoints."""
    from numdev.cli.main import main

    with Watched() as seen, tempfile.TemporaryDirectory() as results:
        begin = time.perf_counter()
        main(["weights", str(first), str(second), "--device", "cpu", "-q", "-o", results + "/out"])
        seconds = time.perf_counter() - begin
        report = json.loads(Path(results, "out", "report.json").read_text())
    return {
        "resident": status("VmHWM"),
        "anonymous": seen.anonymous,
        "seconds": seconds,
        "answer": report["summary"]["answer"],
    }


def elsewhere(*arguments: str) -> dict[str, Any]:
    """What this script prints when a process of its own runs it."""
    command = [sys.executable, __file__, *arguments]
    answer = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    found: dict[str, Any] = json.loads(answer.splitlines()[-1])
    return found


def row(*cells: object) -> None:
    print("| " + " | ".join(map(str, cells)) + " |", flush=True)


def gb(count: float) -> str:
    return f"{count / 1e9:.2f}"


def drawn(lines: dict[str, list[tuple[float, float]]]) -> str:
    """The curves as one SVG that needs no page around it."""
    places = sorted({x for line in lines.values() for x, _ in line})
    axis = Axis(
        name="size",
        title="size of the checkpoint, GB",
        scale="linear",
        ticks=tuple(Tick(x=x, label=f"{x:.0f}") for x in places),
    )
    curves = tuple(
        Curve(
            label=label,
            role="kernel",
            kernel=label,
            points=tuple(
                Point(x=x, label=f"{x:.1f} GB", mean=y, low=None, high=None, seeds=1)
                for x, y in line
            ),
        )
        for label, line in lines.items()
    )
    figure = Figure(
        title="Peak memory of an audit against the size of the model",
        metric="memory",
        relative=False,
        y_title="peak memory, GB",
        y_scale="linear",
        curves=curves,
    )
    loader = jinja2.FileSystemLoader(Path(render.__file__).parent / "templates")
    pages = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True)
    (chart,) = charts([figure], axis, "")
    text: str = pages.get_template("chart.svg.j2").module.draw(chart)  # type: ignore[attr-defined]
    style = (Path(render.__file__).parent / "templates" / "style.css").read_text()
    head, _, rest = str(text).strip().partition(">")
    head = head.replace("<svg", '<svg xmlns="http://www.w3.org/2000/svg" font-family="sans-serif"')
    # Dotted, what leads to a name is not taken for more of the line.
    style += ".leader { stroke-width: 1; stroke-dasharray: 1 5; }"
    return f"{head}><style>{style}</style>{rest}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--layers", type=int, nargs="+", default=[1, 4, 8, 17, 36])
    parser.add_argument("--svg", type=Path)
    parser.add_argument("--weights", action="store_true", help="compare the largest with a copy")
    parser.add_argument("--one", choices=["stream", "whole", "weights"], help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one == "weights":
        print(json.dumps(compared(given.directory, given.directory.with_name("changed"))))
    elif given.one:
        print(json.dumps(audited(given.directory, stream=given.one == "stream")))
    else:
        everything(given.directory, given.layers, given.svg, given.weights)


def everything(directory: Path, depths: list[int], svg: Path | None, weights: bool) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    written(directory, max(depths))
    here = System.here("cpu")
    print(f"{here.cpu}, {here.threads} threads, torch {here.packages['torch']}; bfloat16\n")
    row("layers", "GB", "by", "anonymous, GB", "resident, GB", "s", "model", "weights", "checksum")
    row(*["---"] * 9)
    lines: dict[str, list[tuple[float, float]]] = {}
    for depth in depths:
        place = linked(directory, depth, f"llama-{depth}")
        size = bytes_of(place)
        for way in ("stream", "whole"):
            if way == "whole" and size > SMALL:
                continue
            found = elsewhere(str(place), "--one", way)
            assert found["rows"] == depth * SHAPE["num_attention_heads"]
            for kind in ("anonymous", "resident"):
                label = f"{'streamed' if way == 'stream' else 'whole'}, {kind}"
                lines.setdefault(label, []).append((size / 1e9, found[kind] / 1e9))
            times = found["timings"]
            memory = (gb(found["anonymous"]), gb(found["resident"]))
            sections = (found["seconds"], *(times[x] for x in ("capture", "weights", "other")))
            row(depth, gb(size), way, *memory, *(f"{x:.0f}" for x in sections))
    if svg:
        svg.write_text(drawn(lines))
    if weights:
        against_changed(directory, max(depths))


def against_changed(directory: Path, depth: int) -> None:
    """The largest beside a copy whose last layer is the one before it."""
    changed = directory / "changed.safetensors"
    with safe_open(shard(directory, depth - 2), framework="pt") as file:
        save_file(
            {
                name.replace(f".{depth - 2}.", f".{depth - 1}."): file.get_tensor(name)
                for name in file.keys()  # noqa: SIM118 (it is no dictionary)
            },
            changed,
        )
    linked(directory, depth, "changed", changed.resolve())
    found = elsewhere(str(directory / f"llama-{depth}"), "--one", "weights")
    print("\n`numdev weights` of the largest and a copy whose last layer is the one before it:")
    print(f"{gb(found['anonymous'])} GB anonymous, {gb(found['resident'])} GB resident,", end=" ")
    print(f"{found['seconds']:.0f} s.\n")
    for sentence in found["answer"]:
        print(f"> {sentence}")


if __name__ == "__main__":
    main()
