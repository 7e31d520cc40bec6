"""What a diagnosis was asked: as validated data, which the report keeps whole."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from numdev.config import AuditConfig, AuditRequest, Choice, Positive
from numdev.diagnose.series import YAML, Stage
from numdev.errors import UsageError
from numdev.kernels import find
from numdev.kernels.emulation.recipe import SITES, Recipe, recipe
from numdev.yamlfile import Scalar, Strict, read_yaml

KERNELS = ("sdpa-flash", "baseline")
"""Real kernels that are set beside the emulation where none is named."""


class DiagnoseRequest(Strict):
    """A resolved diagnosis, with every default filled in."""

    target: str
    """What it is called."""
    targets: tuple[str, ...]
    attention: dict[str, Scalar]
    """The options of `emulated` that are diagnosed."""
    format: str = "bfloat16"
    kernels: tuple[Choice, ...] | None = None
    """Real kernels on the same inputs; None: those of KERNELS that run here."""
    cures: bool = True
    every_checkpoint: bool = False
    """Whether cures and real kernels are for every checkpoint of a series, not the last alone."""
    model: str | None = None
    model_dtype: str = "float32"
    text: tuple[str, ...] = ()
    tokenizer: str | None = None
    inputs: str | None = None
    length: Positive = 256
    sequences: Positive = 8
    layers: tuple[int, ...] | None = None
    device: str = "auto"
    seed: int = 0

    def recipe(self) -> Recipe:
        """What `attention` describes; raises UsageError for what it cannot."""
        find("emulated").with_options(self.attention)  # names the closest of an unknown option
        given: dict[str, Any] = dict(self.attention)
        preset = str(given.pop("preset", "fa2"))
        sites = {name: str(value) for name, value in given.items() if name in SITES}
        fields = {name: value for name, value in given.items() if name not in SITES}
        return recipe(preset, sites=sites, **fields)

    def source(self, stage: Stage) -> AuditRequest:
        """What `numdev.sources` opens for one stage."""
        path = Path(stage.target)
        cases = _cases(path) if path.suffix in YAML else {"checkpoint": stage.target}
        reading = ("model", "model_dtype", "text", "tokenizer", "inputs", "length", "sequences")
        same = (*reading, "layers", "device", "seed")
        return AuditRequest(
            target=stage.name,
            kernels=(),
            formats=(self.format,),
            gradients=True,
            # Gradients of its loss need the model whole, however large it is.
            stream=False if "checkpoint" in cases else None,
            **cases,
            **{name: getattr(self, name) for name in same},
        )


def attention_options(preset: str | None, given: Sequence[str]) -> dict[str, Scalar]:
    """`--preset` and `--attention NAME=VALUE` as options of `emulated`. Raises UsageError for what
    has no `=`, and for two different values of one name."""
    options: dict[str, Scalar] = {} if preset is None else {"preset": preset}
    for item in given:
        name, equals, value = item.partition("=")
        if not equals:
            raise UsageError(
                f"--attention {item!r}: is no NAME=VALUE", hint="write --attention block_kv=64"
            )
        name, chosen = name.strip(), _scalar(item, value)
        if options.get(name, chosen) != chosen:
            raise UsageError(
                f"--attention {item!r}: {name} is {options[name]} already", hint="say it once"
            )
        options[name] = chosen
    return {"preset": "fa2", **options}


def _scalar(item: str, text: str) -> Scalar:
    """As YAML reads it: a number, true, or a word."""
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        value = [text]
    if value is not None and not isinstance(value, bool | int | float | str):
        raise UsageError(f"--attention {item!r}: its value is no number and no word")
    return value


def _cases(path: Path) -> dict[str, Any]:
    """The cases that a YAML file draws. Raises UsageError for a file that says anything else: it
    would be ignored."""
    config = read_yaml(path, AuditConfig)
    other = next((n for n, x in config if n != "cases" and x is not None), None)
    if other is not None:
        raise UsageError(
            f"{path}: diagnose takes nothing but `cases` of a configuration, and it has {other!r}",
            hint="leave it out, or give the checkpoint itself",
        )
    return {"cases": config.cases}
