"""Distances between the weights of checkpoints, by role, as rows like those of a training run.

Two checkpoints are read side by side, one tensor at a time; what a group of parameters comes to is
added up in fp64. W1 of a group is the mean of its tensors' by their sizes, which is at least the W1
of all their values thrown together. Stored tensors that are no floating-point numbers are left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from numdev.errors import MeasurementError, UsageError
from numdev.metrics.paired import Paired, paired
from numdev.sources import files as storage
from numdev.sources.checkpoint import open_checkpoint
from numdev.sources.dcp import NESTED, SplitTensor
from numdev.sources.statedict import INDEX, PREFIXES, SUFFIXES
from numdev.training.bounds.roles import WHOLE
from numdev.training.report import DistanceRow, VariantRecord, VariantRole
from numdev.training.weights.pairs import unfit

STEP = 1
"""Of all rows: which step checkpoints are of, nobody says."""
METRICS = ("max_abs", "mean_abs", "rel", "cosine", "w1", "spread", "equal")
KINDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("norm", ("norm", "ln_", ".ln", "layernorm")),
    ("attention", ("attn", "attention", "q_proj", "k_proj", "v_proj", "o_proj", "qkv")),
    ("mlp", ("mlp", "ffn", "feed_forward", "fc1", "fc2", "intermediate", "c_fc", "experts")),
    ("head", ("lm_head", "classifier", "score.", "cls.", "unembed")),
    ("embedding", ("emb", "wte", "wpe", "tok", "pos")),
)
"""Kinds of parameters and what their names contain; the first that fits."""

Getter = Callable[[], Tensor]


@dataclass(frozen=True, kw_only=True)
class Weights:
    """The stored tensors of one checkpoint, each read when it is asked for."""

    path: Path
    files: tuple[Path, ...]
    tensors: Mapping[str, Getter]


def open_weights(path: Path) -> Weights:
    """A Hugging Face directory, a `.safetensors` file or the index of several, or what torch.save
    or torch.distributed.checkpoint wrote. No model is built. Raises UsageError where there are no
    weights, MeasurementError where they are damaged."""
    split: Mapping[str, SplitTensor] = {}
    if path.is_dir():
        opened = open_checkpoint(path)
        files, split = opened.weights, opened.split
    elif path.name.endswith(INDEX):
        files = storage.shards(path)
    elif path.suffix in SUFFIXES and path.is_file():
        files = (path,)
    else:
        problem = "is no file of weights" if path.exists() else "does not exist"
        raise UsageError(f"{path}: {problem}", hint="give a checkpoint directory or a weight file")
    tensors: dict[str, Callable[[], Tensor]] = {name: x.read for name, x in split.items()}
    tensors |= {name: get for file in files if not split for name, get in _getters(file)}
    if not tensors:
        raise MeasurementError(f"{path}: holds no tensor", hint="save model.state_dict()")
    prefix = _prefix(tensors)
    return Weights(
        path=path,
        files=files,
        tensors={name.removeprefix(prefix): get for name, get in tensors.items()},
    )


def paired_up(
    golden: Sequence[Path], by_role: Mapping[VariantRole, Sequence[Path]]
) -> tuple[list[VariantRecord], list[DistanceRow], dict[str, str]]:
    """Every checkpoint against its golden one: the variants, the rows (a seed is the number of the
    golden checkpoint), and the identity of each by its path."""
    variants, rows = [_variant("golden", "golden")], []
    opened = {path: open_weights(path) for paths in (golden, *by_role.values()) for path in paths}
    for role, paths in by_role.items():
        if paths and len(paths) % len(golden):
            raise UsageError(
                f"{len(paths)} checkpoints of {role.replace('_', ' ')} for {len(golden)} golden",
                hint="give one for each golden checkpoint, in their order",
            )
        for i, path in enumerate(paths):
            name = role if i < len(golden) else f"{role}-{i // len(golden) + 1}"
            if i % len(golden) == 0:
                variants.append(_variant(name, role))
            seed = i % len(golden)
            rows += distances(opened[path], opened[golden[seed]], seed, name)
    return variants, rows, {str(p): storage.identity(w.files) for p, w in opened.items()}


def distances(a: Weights, b: Weights, seed: int, variant: str) -> list[DistanceRow]:
    """a against b: all weights, and by kind."""
    sums: dict[str, Sums] = {}
    for name, x, y in _side_by_side(a, b):
        for group in (WHOLE, kind(name)):
            sums.setdefault(group, Sums()).add(x, y)
    if not sums:
        raise MeasurementError(f"{a.path}: has no floating-point weights to compare")
    return [
        DistanceRow(seed=seed, variant=variant, step=STEP, of="weights", group=group, **s.row())
        for group, s in sums.items()
    ]


def kind(name: str) -> str:
    """What kind of parameter a name belongs to: by KINDS, else `other`."""
    lower = name.lower()
    return next((k for k, words in KINDS if any(w in lower for w in words)), "other")


@dataclass(kw_only=True)
class Sums:
    """What the distances of tensors add up to."""

    elements: int = 0
    nonfinite: int = 0
    """Of them, in one of the two. Then there is no distance, as in a training run."""
    largest: float = 0.0
    totals: dict[str, float] = field(default_factory=dict)

    def add(self, x: Tensor, y: Tensor) -> None:
        """One pair of tensors; empty ones add nothing."""
        p = paired(x, y)
        self.elements += p.elements
        self.nonfinite += p.nonfinite
        if p.elements and not p.nonfinite:
            self.largest = max(self.largest, _known(p.max_abs))
            for name, value in _parts(p, x, y).items():
                self.totals[name] = self.totals.get(name, 0.0) + value

    def row(self) -> dict[str, Any]:
        """As the fields of a DistanceRow; what is not finite is None, with the reason."""
        n, t = self.elements, self.totals
        counts = {"elements": n, "nonfinite": self.nonfinite}
        if self.nonfinite or not n:
            why = "not finite" if n else "no elements"
            return {**counts, **dict.fromkeys(METRICS), "nulls": dict.fromkeys(METRICS, why)}
        norms = math.sqrt(t["x"] * t["y"])
        numbers = {
            "max_abs": self.largest,
            "mean_abs": t["absolute"] / n,
            "rel": math.sqrt(t["apart"] / t["y"]) if t["y"] else math.inf,
            "cosine": t["dot"] / norms if norms else math.nan,
            "w1": t["w1"] / n,
            "spread": t["spread"] / n,
            "equal": t["equal"] / n,
        }
        nulls = {k: "not finite" for k, v in numbers.items() if not math.isfinite(v)}
        return {**counts, **numbers, **dict.fromkeys(nulls), "nulls": nulls}


def _parts(p: Paired, x: Tensor, y: Tensor) -> dict[str, float]:
    """Sums over the elements of one pair."""
    u, v, n = x.double(), y.double(), p.elements
    return {
        "absolute": _known(p.mean_abs) * n,
        "w1": _known(p.w1) * n,
        "spread": _known(p.spread) * n,
        "equal": _known(p.equal) * n,
        "apart": float((u - v).square().sum()),
        "x": float(u.square().sum()),
        "y": float(v.square().sum()),
        "dot": float((u * v).sum()),
    }


def _known(value: float | None) -> float:
    """Where there are finite elements, a number is None only if it is beyond float64."""
    return math.inf if value is None else value


def _side_by_side(a: Weights, b: Weights) -> Iterator[tuple[str, Tensor, Tensor]]:
    """The tensors of both by name. Raises UsageError where one lacks a tensor of the other, or has
    it in another shape."""
    only = sorted(a.tensors.keys() ^ b.tensors.keys())
    if only:
        where = a.path if only[0] in a.tensors else b.path
        raise UsageError(
            f"{a.path} and {b.path} are not of one model: only {where} has {storage.some(only)}",
            hint="give checkpoints of the same architecture",
        )
    for name, get in b.tensors.items():
        x, y = a.tensors[name](), get()
        if unfit(x) or unfit(y):
            continue
        if x.shape != y.shape:
            raise UsageError(
                f"{a.path} and {b.path} are not of one model: {name} is {list(x.shape)} and "
                f"{list(y.shape)}",
                hint="give checkpoints of the same architecture",
            )
        yield name, x, y


def _getters(file: Path) -> Iterator[tuple[str, Getter]]:
    """The names in a file, and how to read each tensor."""
    if file.suffix in storage.PICKLES:
        content = storage.read_pickle(file)
        nested = (s for key in NESTED if isinstance(s := content.get(key), dict))
        held = (s for s in nested if any(isinstance(x, Tensor) for x in s.values()))
        state = next(held, content)
        pairs = ((str(n), x) for n, x in state.items() if isinstance(x, Tensor))
        yield from ((n, _held(x)) for n, x in storage.distinct(file, pairs))
        return
    opened = storage.open_safetensors(file)
    yield from ((str(n), _stored(opened, str(n))) for n in opened.keys())  # noqa: SIM118


def _held(x: Tensor) -> Getter:
    return lambda: x


def _stored(opened: Any, name: str) -> Getter:
    return lambda: opened.get_tensor(name)


def _prefix(names: Mapping[str, Getter]) -> str:
    """What torch.compile or DistributedDataParallel put before all names."""
    taken = ""
    while found := next((p for p in PREFIXES if all(n.startswith(taken + p) for n in names)), None):
        taken += found
    return taken


def _variant(name: str, role: VariantRole) -> VariantRecord:
    return VariantRecord(name=name, role=role, kernel="", format="", attention_format="")
