"""From what was typed to the request of an audit or a sweep.

A flag beats the YAML, and the YAML beats the default.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from numdev.errors import UsageError

if TYPE_CHECKING:
    from numdev.config import AuditConfig, AuditRequest, SweepRequest

DEFAULT_KERNELS = ("sdpa-math", "sdpa-flash", "sdpa-efficient", "sdpa-cudnn", "sdpa-default")


def audit_request(target: str | None, flags: dict[str, Any]) -> AuditRequest:
    """Target, YAML and flags resolved: a flag beats the YAML, the YAML beats the default."""
    from numdev.config import AuditRequest, Choice

    config, name = _target(target)
    given: dict[str, Any] = {
        "kernels": tuple(Choice(name=k) for k in flags.pop("kernels")) or None,
        "formats": flags.pop("formats") or None,
        "text": flags.pop("text") or None,
        "layers": numbers(flags.pop("layers"), "--layers"),
        "heads": numbers(flags.pop("heads"), "--heads"),
        "steps": numbers(flags.pop("steps", None), "--steps"),
        **flags,
    }
    merged = {k: v for k, v in config.items() if v is not None}
    merged |= {k: v for k, v in given.items() if v is not None}
    merged.setdefault("kernels", tuple(Choice(name=k) for k in DEFAULT_KERNELS))
    return AuditRequest(target=name, **merged)


def sweep_request(path: Path, flags: dict[str, Any]) -> SweepRequest:
    """A sweep's YAML and flags resolved, as for an audit."""
    from numdev.config import Choice, SweepConfig, SweepRequest
    from numdev.yamlfile import read_yaml

    given: dict[str, Any] = {k: v for k, v in read_yaml(path, SweepConfig) if v is not None}
    given.setdefault("kernels", tuple(Choice(name=k) for k in DEFAULT_KERNELS))
    if flags["kernels"]:
        given["kernels"] = tuple(Choice(name=k) for k in flags["kernels"])
    if flags["formats"]:
        given["formats"] = flags["formats"]
    same = ("device", "gradients", "repeats", "isolate", "time_limit", "reproducers")
    for name in (*same, "sampled_rows"):
        if flags[name] is not None:
            given[name] = flags[name]
    request = SweepRequest(target=path.name, **given)
    if flags["seed"] is None:
        return request
    seeds = range(flags["seed"], flags["seed"] + len(request.seeds))
    return request.model_copy(update={"seeds": tuple(seeds)})


def _target(target: str | None) -> tuple[dict[str, Any], str]:
    """What the argument names, as configuration values, and what to call it."""
    from numdev.config import AuditConfig
    from numdev.yamlfile import bundled, read_yaml

    path = bundled("audit/default.yaml") if target is None else Path(target)
    if target == "demo":
        return {"checkpoint": "demo"}, "demo"
    if path.suffix in (".yaml", ".yml"):
        config: AuditConfig = read_yaml(path, AuditConfig)
        return dict(config), path.name
    if not path.exists():
        raise UsageError(
            f"{target}: no such file or directory",
            hint="give a checkpoint, a file of captured tensors, a YAML file, or `demo`",
        )
    return {"checkpoint": str(path)}, path.resolve().name


def numbers(text: str | None, option: str) -> tuple[int, ...] | None:
    """`0,3-5` as (0, 3, 4, 5)."""
    if text is None:
        return None
    chosen: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"\s*(\d{1,6})(?:-(\d{1,6}))?\s*", part, re.ASCII)
        numbers = range(int(found[1]), int(found[2] or found[1]) + 1) if found else ()
        if not numbers:
            raise UsageError(f"{option} {text!r}: cannot read {part!r}", hint="write 0,3-5")
        chosen += numbers
    return tuple(dict.fromkeys(chosen))
