"""Small sound reports of every kind that is judged, and random rules for them."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import models
import torch
import yaml
from torch import Tensor
from verdict_runs import measured

from numdev.cases import AttentionCase
from numdev.kernels import find
from numdev.metrics.metrics_by_name import BESIDE_REFERENCE, METRICS
from numdev.report import Report, read, write
from numdev.request_models import AXES
from numdev.testing import check

DEMO = ("demo", "--layers", "0", "--length", "32", "--kernel", "sdpa-math")
SWEEP = """
cases: [{name: normal, heads: 1, seq_len: [24, 32], head_dim: 16}]
kernels: [sdpa-math]
backward: true
repeats: 2
"""
COMMANDS: Mapping[str, tuple[object, ...]] = {
    "audit": ("audit", *DEMO, "--kernel", "sdpa-flash", "--control"),
    "sampled": ("audit", *DEMO, "--rows", "32", "--length", "96", "--backward"),
    "sweep": ("sweep", "sweep.yaml"),
    "effects": ("effects", "llama", "--length", "16", "--sequences", "3", "--kernel", "sdpa-math"),
    "invariance": ("invariance", "llama", "--layers", "0", "--length", "24", "--backward",
                   "--kernel", "sdpa-math", "--kernel", "small_reports:nudged"),
}  # fmt: skip
AXES_OF_IT = ("repeat", "batch", "neighbours", "decode", "beyond", "hidden")
KINDS = (*COMMANDS, "check")


def reports_of_commands(folder: Path) -> dict[str, Report]:
    """One report of each, which passes by the rules it was made by."""
    (folder / "sweep.yaml").write_text(SWEEP)
    models.saved("llama", folder)
    places = {"sweep.yaml": folder / "sweep.yaml", "llama": folder / "llama"}
    reports: dict[str, Report] = {}
    for name, command in COMMANDS.items():
        words = [places.get(str(word), word) for word in command]
        if name == "invariance":
            words += [word for axis in AXES_OF_IT for word in ("--axis", axis)]
        ran = measured(folder / name, *words, "-q", "--gate")
        assert ran.code == 0, ran.words
        reports[name] = ran.report
    result = check(_attention, cases=("causal", "grouped"), formats="bfloat16")
    assert result.passed, result
    (folder / "check").mkdir()
    write(result.report, folder / "check")
    reports["check"] = read(folder / "check")
    return reports


def _attention(
    q: Any, k: Any, v: Any, is_causal: bool = False, scale: float | None = None
) -> Any:
    from torch.nn.functional import scaled_dot_product_attention

    return scaled_dot_product_attention(
        q, k, v, is_causal=is_causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )


def nudged(case: AttentionCase) -> Tensor:
    """Sound, and of other bits in a batch of 8: an ulp larger in every fourth feature."""
    out = find("sdpa-math").attend(case).out
    factor = torch.where(torch.arange(out.shape[-1]) % 4 == 0, 1 + 2.0**-8, 1.0)
    return (out.float() * factor).to(out.dtype) if case.q.shape[0] == 8 else out


def drawn_rules(kind: str, rng: random.Random) -> dict[str, Any]:
    """The content of a rules file: some keys of it, with any values that are allowed."""
    content: dict[str, Any] = {"name": "drawn"}
    if kind not in ("effects", "invariance") and rng.random() < 0.7:
        content["thresholds"] = [_threshold(i, rng) for i in range(rng.randint(1, 4))]
    if kind == "effects" and rng.random() < 0.7:
        names = ("kernel_over_predicted", "model_over_sites", "unexplained_flips")
        content["effects"] = {
            name: _limit(rng, -1, 1) for name in rng.sample(names, rng.randint(1, 3))
        }
    if kind == "invariance" and rng.random() < 0.7:
        content["invariance"] = _invariance(rng)
    if rng.random() < 0.4:
        content["skipped"] = rng.choice(("allow", "refused-only", "never"))
    if rng.random() < 0.2:
        content["required"] = rng.choice(
            (["sdpa-*"], ["*"], ["absent"], ["sdpa-math", "absent"])
        )
    if rng.random() < 0.2:
        content["catches"] = {
            rng.choice(("scale", "p-bits", "absent")): _limit(rng, -3, 3) or 1.0
        }
    if rng.random() < 0.15:
        content["holds_for"] = {
            rng.choice(("cpu_capability", "gpu")): rng.choice(("*", "none"))
        }
    return content


def _limit(rng: random.Random, low: float, high: float) -> float:
    return 0.0 if rng.random() < 0.1 else 10 ** rng.uniform(low, high)


def _threshold(number: int, rng: random.Random) -> dict[str, Any]:
    metric = rng.choice(
        (
            *sorted(METRICS - BESIDE_REFERENCE),
            "expected_ratio",
            "rms",
            "nonfinite",
            "suspicion",
        )
    )
    rule: dict[str, Any] = {"name": f"rule {number}", "metric": metric}
    rule |= {"absent": True} if metric == "suspicion" else {"at_most": _limit(rng, -5, 4)}
    rule["may_lack"] = rng.choice(("nothing", "rows", "numbers", "numbers"))
    where = {
        "tensor": rng.choice(("out", ["out", "dq"], "!lse")), "kernel": "!emulated",
        "role": rng.choice(("kernel", "baseline")), "format": rng.choice(("bfloat16", "float32")),
    }  # fmt: skip
    rule["where"] = {
        name: where[name] for name in rng.sample(sorted(where), rng.randint(0, 2))
    }
    if metric != "suspicion" and rng.random() < 0.3:
        rule |= rng.choice(({"heads": 2}, {"scatter": 4}, {"by_case": True, "heads": 4}))
    return rule


def _invariance(rng: random.Random) -> dict[str, Any]:
    axes = sorted(AXES)
    keys = {
        "bitwise": rng.sample(axes, rng.randint(0, 3)),
        "bitwise_tensors": rng.choice((["out"], ["out", "lse", "dq"])),
        "within_floor": rng.sample(axes, rng.randint(0, 2)),
        "beyond_roundings": _limit(rng, -2, 2),
        "model_beyond_roundings": _limit(rng, -2, 2),
        "may_turn_nan": rng.sample(axes, rng.randint(0, 2)),
    }
    return {name: keys[name] for name in rng.sample(sorted(keys), rng.randint(1, 4))}


def written_rules(folder: Path, content: Mapping[str, Any]) -> Path:
    file = folder / "rules.yaml"
    file.write_text(yaml.safe_dump(dict(content)))
    return file
