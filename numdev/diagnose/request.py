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


class DiagnoseRequest(Strict):
    """A resolved diagnosis, with every default filled in."""

    target: str  # what it is called
    targets: tuple[str, ...]
    attention: dict[str, Scalar]  # the options of `emulated` that are diagnosed
    format: str = "bfloat16"
    kernels: tuple[Choice, ...] | None = None  # real ones beside it; None: those of study.KERNELS
    cures: bool = True
    every_checkpoint: bool = False  # cures and real kernels not for the last of a series alone
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
        options: dict[str, Any] = dict(self.attention)
        preset = str(options.pop("preset", "fa2"))
        sites = {name: str(options.pop(name)) for name in SITES if name in options}
        return recipe(preset, sites=sites, **options)

    def source(self, stage: Stage) -> AuditRequest:
        """What `numdev.sources` opens for one stage. Raises UsageError for a YAML file that says
        more than which cases to draw: it would be ignored."""
        path = Path(stage.target)
        same = ("model", "model_dtype", "text", "tokenizer", "inputs", "length", "sequences",
                "layers", "device", "seed")  # fmt: skip
        # Gradients of its loss need the model whole, however large it is.
        cases: dict[str, Any] = {"checkpoint": stage.target, "stream": False}
        if path.suffix in YAML:
            config = read_yaml(path, AuditConfig)
            cases = {"cases": config.cases}
            other = next((n for n in sorted(config.model_fields_set) if n != "cases"), None)
            if other is not None:
                raise UsageError(
                    f"{path}: diagnose takes nothing but `cases` of a configuration, and it has "
                    f"{other!r}",
                    hint="leave it out, or give the checkpoint itself",
                )
        return AuditRequest(
            target=stage.name, kernels=(), formats=(self.format,), gradients=True, **cases,
            **{name: getattr(self, name) for name in same},
        )  # fmt: skip


def attention_options(preset: str | None, given: Sequence[str]) -> dict[str, Scalar]:
    """`--preset` and `--attention NAME=VALUE` as options of `emulated`. Raises UsageError for what
    has no `=`, and for two different values of one name."""
    options: dict[str, Scalar] = {} if preset is None else {"preset": preset}
    for item in given:
        name, equals, value = map(str.strip, item.partition("="))
        what = f"--attention {item!r}"
        if not equals:
            raise UsageError(f"{what}: is no NAME=VALUE", hint="write --attention block_kv=64")
        try:
            chosen = yaml.safe_load(value)  # a number, true, or a word
        except yaml.YAMLError:
            chosen = [value]
        if chosen is not None and not isinstance(chosen, bool | int | float | str):
            raise UsageError(f"{what}: its value is no number and no word")
        if options.setdefault(name, chosen) != chosen:
            raise UsageError(f"{what}: {name} is {options[name]} already", hint="say it once")
    return {"preset": "fa2", **options}
