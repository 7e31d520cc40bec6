"""The header of a captured-tensor file: what tensors cannot say about an attention call.

It is JSON in the metadata of a safetensors file, under the key `numdev`. Everything but its version
has a default, and what is not known here is an error: a misspelt soft cap would be another
function. docs/inputs.md has it for those who write such files; `numdev.sources.tensorfile` reads
them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from numdev.errors import MeasurementError, UsageError, closest
from numdev.sources.files import one_line

KEY = "numdev"
"""Of the safetensors metadata, under which the header stands."""
VERSION = 1
AXES = "bhsd"
"""Batch, heads, sequence, dimension: how a case has them; a layout is another order of these."""
MASK_AXES = "bhqk"


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def _is_layout(layout: str) -> str:
    if sorted(layout) != sorted(AXES):
        raise ValueError(f"{layout!r} is no order of the axes {AXES!r}; for example 'bshd'")
    return layout


def _are_layouts(layouts: dict[str, str]) -> dict[str, str]:
    for name, layout in layouts.items():
        if name not in ("q", "k", "v", "grad_out", "mask"):
            raise ValueError(f"no layout can be given for {name!r}")
        expected = MASK_AXES[-len(layout) :] if name == "mask" else AXES
        if sorted(layout) != sorted(expected):
            raise ValueError(f"{layout!r} is no order of the axes {expected!r} of {name}")
    return layouts


Layout = Annotated[str, AfterValidator(_is_layout)]
Layouts = Annotated[dict[str, str], AfterValidator(_are_layouts)]
Side = Annotated[int, Field(ge=0, strict=True)] | None


class Call(_Strict):
    """What a header says of one call. None: see the default beside it."""

    case: str | None = None
    """Unique name. `MODULE#CALL` where there is a module, else `FILE#INDEX`."""
    module: str | None = None
    """The case's name."""
    layer: Annotated[int, Field(ge=0, strict=True)] | None = None
    call: Annotated[int, Field(ge=0, strict=True)] = 0
    seed: int | None = None
    source: str | None = None
    """The header's."""
    phase: Literal["prefill", "decode"] | None = None
    """Of a generation: what reads the prompt, or writes one token."""
    step: Annotated[int, Field(ge=0, strict=True)] | None = None
    """Of a diffusion pipeline: the denoising step."""
    attends: Literal["self", "cross", "joint"] | None = None
    """Of a diffusion pipeline: to the image itself, the text, or both as one."""
    mask: Literal["none", "bool", "additive"] | None = None
    """By the tensor's dtype. A mask of bytes is read as bool where this says so."""
    scale: float | None = None
    """1 / sqrt(head_dim)."""
    is_causal: Annotated[bool, Field(strict=True)] = False
    causal_offset: Annotated[int, Field(strict=True)] | None = None
    """0; to be given where a causal or windowed call has q_len other than kv_len."""
    window: tuple[Side, Side] | None = None
    softcap: Annotated[float, Field(gt=0)] | None = None
    grad_out: str | None = None
    """Where the tensor grad_out comes from, in words."""
    layout: Layout | Layouts | None = None
    """The header's; for all tensors but the mask, or by tensor."""
    axes: dict[str, bool | int | float | str | None] = Field(default_factory=dict)
    """For a cell of a grid: its place on every axis."""


class Header(_Strict):
    """What the metadata of a captured-tensor file says."""

    version: Literal[1]
    source: str | None = None
    """The checkpoint or program the calls come from. The file's name."""
    versions: dict[str, str] = Field(default_factory=dict)
    """Of the programs the calls were made with."""
    layout: Layout = AXES
    calls: tuple[Call, ...] | None = None
    """Call i describes the tensors `i.*`. Without it all calls have the defaults."""


def parse(path: Path, text: str | None) -> Header:
    """The header of the file at `path` as its metadata has it.

    Raises UsageError for what is wrong in it, MeasurementError for another version.
    """
    where = f"{path}: header"
    if text is None:
        raise UsageError(
            f"{path}: has no header of captured tensors",
            hint=f"give save_file the metadata {{{KEY!r}: '{{\"version\": {VERSION}}}'}}",
        )
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(
            f"{where}: is not valid JSON: {one_line(error)}",
            hint="write it with json.dumps",
        ) from error
    if not isinstance(raw, dict) or "version" not in raw:
        raise UsageError(f"{where}: gives no version", hint=f'add "version": {VERSION}')
    if raw["version"] != VERSION:
        raise MeasurementError(
            f"{where}: has version {raw['version']!r}",
            hint=f"this numdev reads version {VERSION}",
        )
    try:
        return Header.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        # pydantic adds the names of a union's members to the place.
        place = [p for p in first["loc"] if isinstance(p, int) or p.isidentifier()]
        key = ".".join(map(str, place))
        if first["type"] == "extra_forbidden":
            known = Call.model_fields if place[0] == "calls" else Header.model_fields
            hint = closest(str(place[-1]), known)
            raise UsageError(f"{where}: unknown key {key!r}", hint=hint) from error
        message = first["msg"].removeprefix("Value error, ")
        raise UsageError(
            f"{where}: {key}: {message[:1].lower()}{message[1:]}, not {first['input']!r}",
            hint="see docs/inputs.md",
        ) from error
