"""Captured-tensor files (docs/inputs.md): attention calls on disk, by numdev or by
anybody else.

What is not known in a header is an error: a misspelt soft cap would be another function.
safetensors stores contiguous tensors alone, while kernels choose by strides: so the
header names the order of each tensor's stored axes (`layout`), and reading gives back a
view."""

from __future__ import annotations

import contextlib
import importlib.metadata
import itertools
import json
import math
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from dataclasses import fields as fields_of
from pathlib import Path
from typing import Annotated, Literal

import torch
from pydantic import AfterValidator, Field
from safetensors.torch import save_file
from torch import Tensor

import numdev
from numdev import temporary_files
from numdev.argument_checks import checked
from numdev.cases import AttentionCase, CaseRef, Phase, Window, expect_values, mask_kind
from numdev.errors import MeasurementError, NumdevError, UsageError, cannot_write
from numdev.sources import tensor_files as storage
from numdev.sources.tensor_files import FETCH
from numdev.sources.upstream_gradients import drawn_origin, with_drawn_gradient
from numdev.yamlfile import Strict, validated

KEY, VERSION = "numdev", 1
INDEX = "cases.json"  # In a directory of files: which ones belong to it
# How a case has its axes; a layout is another order of these
AXES, MASK_AXES = "bhsd", "bhqk"
REQUIRED, OPTIONAL = ("q", "k", "v"), ("mask", "sinks", "grad_out")
NUMBERED = re.compile(rf"(\d{{1,9}})\.({'|'.join((*REQUIRED, *OPTIONAL))})", re.ASCII)
OF_CASE = ("scale", "is_causal", "causal_offset", "window", "softcap")
DTYPES = {
    **{
        "F64": torch.float64,
        "F32": torch.float32,
        "BF16": torch.bfloat16,
        "F16": torch.float16,
    },
    **{"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2},
    **{"BOOL": torch.bool, "U8": torch.uint8},
}


def _checked_layouts(layouts: str | dict[str, str]) -> str | dict[str, str]:
    """Returns `layouts`, one for all tensors or one by tensor's name, unchanged. Raises
    ValueError for one that is no order of its tensor's axes, and for a name other than q,
    k, v, mask and grad_out."""
    for name, layout in (
        layouts.items() if isinstance(layouts, dict) else [("q", layouts)]
    ):
        axes = _axis_letters(name, len(layout))
        if name not in (*REQUIRED, "mask", "grad_out") or sorted(layout) != sorted(axes):
            raise ValueError(f"{layout!r} is not an order of the axes {axes!r} of {name}")
    return layouts


def _axis_letters(name: str, count: int) -> str:
    """Returns the letters of the axes that the tensor `name` has in a case: `bhsd`, or
    for a mask the last `count` of `bhqk`."""
    return MASK_AXES[-count:] if name == "mask" else AXES


Layouts = Annotated[str | dict[str, str], AfterValidator(_checked_layouts)]
Count = Annotated[int, Field(ge=0, strict=True)]


class CallHeader(Strict):
    """The header of one call. Defaults: docs/inputs.md."""

    case: str | None = None  # `MODULE#CALL` where there is a module, else `FILE#INDEX`
    module: str | None = None  # the case's name
    layer: Count | None = None
    call: Count = 0
    seed: int | None = None
    source: str | None = None  # the header's
    phase: Literal["prefill", "decode"] | None = None
    step: Count | None = None
    attends: Literal["self", "cross", "joint"] | None = None
    # A mask of bytes is bool if it says so
    mask: Literal["none", "bool", "additive"] | None = None
    scale: float | None = None  # 1 / sqrt(head_dim)
    is_causal: Annotated[bool, Field(strict=True)] = False
    causal_offset: Annotated[int, Field(strict=True)] | None = None
    window: tuple[Count | None, Count | None] | None = None
    softcap: Annotated[float, Field(gt=0)] | None = None
    grad_out: str | None = None  # where the tensor grad_out comes from, in words
    layout: Layouts | None = None  # the header's; for all but the mask, or by tensor
    # Of a grid
    axes: dict[str, bool | int | float | str | None] = Field(default_factory=dict)


class Header(Strict):
    """The metadata of a captured-tensor file."""

    version: Literal[1]
    source: str | None = None  # the file's name
    # Of the programs that made the calls
    versions: dict[str, str] = Field(default_factory=dict)
    layout: Layouts = AXES
    # Of tensors `i.*`; without it all have the defaults
    calls: tuple[CallHeader, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class StoredCase:
    """A case in a file. It is plain data until it is loaded, so that any worker process
    can load it."""

    path: Path
    index: int
    call: CallHeader  # with the file's defaults filled in
    tensors: tuple[str, ...]
    many_heads: bool = False  # more than keys
    device: str = "cpu"
    # The seed of a grad_out where none is stored; None: not wanted
    upstream: int | None = None

    @property
    def ref(self) -> CaseRef:
        """Returns what identifies the case. Its name is what its header says, else
        `MODULE#CALL`, else `FILE#INDEX`."""
        call, fields = (
            self.call,
            {f.name: getattr(self.call, f.name) for f in fields_of(CaseRef)},
        )
        named = (
            f"{call.module}#{call.call}"
            if call.module
            else f"{self.path.stem}#{self.index}"
        )
        fields["case"] = call.case or named
        fields["module"] = call.module or fields["case"]
        fields["source"] = call.source or self.path.name
        return CaseRef(**fields)

    @property
    def axes(self) -> dict[str, object]:
        """Returns the case's place on a grid, as its header has it; empty without one."""
        return dict(self.call.axes)

    @property
    def upstream_from(self) -> str:
        """Returns where the case's grad_out comes from, in words: what its header says,
        else `stored in the file`, or for a drawn one its seed. Empty where it has
        none."""
        if "grad_out" in self.tensors:
            return self.call.grad_out or "stored in the file"
        return "" if self.upstream is None else drawn_origin(self.upstream)

    def load(self) -> AttentionCase:
        """Reads the tensors and returns the case, on `device`. With `upstream`, a case
        without a stored grad_out gets a drawn one. Raises MeasurementError where the file
        can no longer be read, or lacks a tensor that it had when it was opened; other
        changes are not noticed. Raises UsageError, which names file and call, where q, k
        or v is missing, where the tensors do not fit together, or do not fit the header,
        and for a causal mask or window over other lengths of q and k without a
        causal_offset."""
        changed = storage.naming(
            self.path, "cannot be read", "was it changed during the audit?"
        )
        with changed, storage.open_safetensors(self.path) as file:
            stored = {n: file.get_tensor(f"{self.index}.{n}") for n in self.tensors}
        if missing := [f"{self.index}.{name}" for name in REQUIRED if name not in stored]:
            raise self._call_error(
                f"has no tensor {', '.join(missing)}", "q, k and v are needed"
            )
        x = {n: self._with_case_axes(n, t.to(self.device)) for n, t in stored.items()}
        call, mask = self.call, x.pop("mask", None)
        if mask is not None and mask.dtype == torch.uint8 and call.mask == "bool":
            mask = mask != 0
        q = x["q"]
        usual = max((1, *q.shape[-1:])) ** -0.5
        try:
            case = AttentionCase(
                ref=self.ref,
                q=q,
                k=x["k"],
                v=x["v"],
                sinks=x.get("sinks"),
                grad_out=x.get("grad_out"),
                mask=mask,
                scale=usual if call.scale is None else call.scale,
                is_causal=call.is_causal,
                causal_offset=call.causal_offset or 0,
                window=call.window,
                softcap=call.softcap,
                grad_out_from=call.grad_out,
            )
        except UsageError as error:
            raise self._call_error(
                error.message, "check the tensors, and `layout`"
            ) from error
        if call.mask not in (None, mask_kind(mask)):
            what = f"mask: expected {call.mask} by its header, got {mask_kind(mask)}"
            raise self._call_error(what, "make them agree")
        if (
            case.restricts_positions
            and case.q_len != case.kv_len
            and call.causal_offset is None
        ):
            what = (
                f"{case.q_len} queries, {case.kv_len} keys, a causal mask or "
                "window, and no"
            )
            hint = f"{case.kv_len - case.q_len} (bottom-right, as flash-attention does)"
            hint = f"give 0 (top-left, as PyTorch aligns) or {hint}"
            raise self._call_error(f"has {what} causal_offset", hint)
        return with_drawn_gradient(case, self.upstream)

    def _with_case_axes(self, name: str, tensor: Tensor) -> Tensor:
        """Returns a view of a stored tensor with its axes in the order that a case has. A
        tensor without a layout is returned unchanged. So is one whose number of axes is
        not that of its layout: making the case raises for it."""
        layout, all_but = self.call.layout, ("mask", "sinks")
        by_name = (
            layout
            if isinstance(layout, dict)
            else {}
            if name in all_but
            else {name: layout}
        )
        order = by_name.get(name)
        # Of a wrong number of axes the case says so
        if not order or tensor.ndim != len(order):
            return tensor
        return tensor.permute(
            [order.index(axis) for axis in _axis_letters(name, len(order))]
        )

    def _call_error(self, what: str, hint: str) -> UsageError:
        """Returns (does not raise) the error `FILE: call INDEX: what`, with a hint."""
        return UsageError(f"{self.path}: call {self.index}: {what}", hint=hint)


@dataclass(frozen=True, kw_only=True)
class CaseFile:
    """An opened captured-tensor file, or directory of such files; all headers are read,
    no tensor is kept."""

    path: Path
    files: tuple[Path, ...]
    cases: tuple[StoredCase, ...]
    versions: Mapping[str, str]  # as the first file has them

    def identity(self) -> str:
        """Returns 64 hex digits: of a file the SHA-256 of its content; of a directory a
        SHA-256 over the names and contents of its files of tensors (not of `cases.json`).
        Reads all of them. Raises OSError for a file that cannot be read."""
        return (
            storage.sha256(self.path)
            if self.path.is_file()
            else storage.identity(self.files)
        )


def holds_cases(path: Path) -> bool:
    """Whether a path is a captured-tensor file, by the key `numdev` in its header; or a
    directory with `cases.json` or such a file, but without config.json. False for a path
    that does not exist. Raises MeasurementError for a safetensors file that is damaged or
    cannot be read; of a directory it opens them until one is a captured-tensor file, and
    none where `cases.json` or config.json is there."""
    if path.is_dir():
        if (path / "config.json").exists():
            return False
        return (path / INDEX).is_file() or any(
            map(holds_cases, path.glob("*.safetensors"))
        )
    if path.suffix != ".safetensors" or not path.is_file():
        return False
    with storage.open_safetensors(path) as file:
        return KEY in (file.metadata() or {})


def headerless_hint(path: Path) -> str:
    """Returns a hint on how to write the header of a safetensors file that has none, and
    whose tensors are named as those of calls are (`q`, `0.k`). Of a directory its first
    safetensors file is looked at. Empty for any other path, for a file with a header, and
    for a damaged file."""
    for file in sorted(path.glob("*.safetensors"))[:1] if path.is_dir() else (path,):
        with contextlib.suppress(NumdevError, OSError):
            if file.suffix != ".safetensors":
                return ""
            with storage.open_safetensors(file) as opened:
                names = {name.rpartition(".")[2] for name in list(opened.keys())}
                lacks_header = KEY not in (opened.metadata() or {})
            if lacks_header and names.issuperset(REQUIRED):
                return (
                    f"captured tensors are named 0.q, 0.k, 0.v and need a header: give "
                    f"save_file the metadata {{{KEY!r}: '{{\"version\": {VERSION}}}'}}"
                )
    return ""


def open_cases(
    path: Path, *, device: str = "cpu", upstream: int | None = None
) -> CaseFile:
    """Opens a captured-tensor file or a directory of them, one that `holds_cases`, and
    checks every call; keeps no tensor. Calls are later loaded onto `device`. `upstream`:
    the seed of a drawn grad_out for calls without a stored one; None: they get none.
    Raises UsageError, which names file and call, for what is not as docs/inputs.md has
    it, for two calls of one name, and for a directory with neither `cases.json` nor a
    safetensors file; MeasurementError for a damaged or missing file."""
    files: tuple[Path, ...] = (path,)
    if path.is_dir() and not (path / INDEX).is_file():
        files = tuple(sorted(path.glob("*.safetensors")))
    elif path.is_dir():
        listed = storage.read_json(path / INDEX).get("files")
        names = [str(x) for x in listed] if isinstance(listed, list) else []
        for name in names or [""]:
            if Path(name).name != name or not (path / name).is_file():
                raise MeasurementError(
                    f"{path}: its file {name!r} is missing", hint=FETCH
                )
        files = tuple(path / name for name in names)
    if not files:
        raise UsageError(f"{path}: expected captured tensors, got no .safetensors file")
    opened = [_open_file(file, device=device, upstream=upstream) for file in files]
    cases = tuple(case for _, stored in opened for case in stored)
    name, count = Counter(case.ref.case for case in cases).most_common(1)[0]
    if count > 1:
        raise UsageError(
            f"{path}: {count} calls are named {name!r}", hint="name each differently"
        )
    return CaseFile(path=path, files=files, cases=cases, versions=opened[0][0].versions)


def _open_file(
    path: Path, *, device: str, upstream: int | None
) -> tuple[Header, list[StoredCase]]:
    """Returns the header and the calls of one file, each call built once to check that
    its tensors fit; they are later loaded onto `device`, with a grad_out of the seed
    `upstream` where none is stored. Raises UsageError for what is not as docs/inputs.md
    has it, MeasurementError for a damaged or missing file."""
    with storage.open_safetensors(path) as file:
        raw = None
        with contextlib.suppress(ValueError, RecursionError):
            raw = json.loads((file.metadata() or {}).get(KEY, ""))
        if not isinstance(raw, dict):
            hint = (
                f"give save_file the metadata {{{KEY!r}: '{{\"version\": {VERSION}}}'}}"
            )
            raise UsageError(f"{path}: header: expected a JSON object", hint=hint)
        header = validated(raw, Header, f"{path}: header")
        by_call: dict[int, list[str]] = {}
        for name in file.keys():  # noqa: SIM118  # no mapping
            if not (numbered := NUMBERED.fullmatch(name)):
                expected = f"INDEX.NAME, NAME of {', '.join(REQUIRED + OPTIONAL)}"
                what = f"{path}: expected tensors {expected}, got {name!r}"
                raise UsageError(what, hint="see docs/inputs.md")
            by_call.setdefault(int(numbered[1]), []).append(numbered[2])
    calls = (CallHeader(),) * len(by_call) if header.calls is None else header.calls
    if not calls or max(by_call, default=0) >= len(calls):
        what = (
            f"{path}: holds tensors of call {max(by_call, default=0)}, got "
            f"{len(calls)} calls"
        )
        raise UsageError(
            what, hint="number the calls from 0, each with an entry in `calls`"
        )
    cases = []
    for index, call in enumerate(calls):
        layout = header.layout if call.layout is None else call.layout
        call = call.model_copy(
            update={"source": call.source or header.source, "layout": layout}
        )
        case = StoredCase(
            path=path, index=index, call=call, tensors=tuple(by_call.get(index, ()))
        )
        # Mapped and not read, it is built, which finds what does not fit
        loaded = case.load()
        case = replace(
            case,
            many_heads=loaded.kv_heads > loaded.kv_len,
            device=device,
            upstream=upstream,
        )
        cases.append(case)
    return header, cases


def write_cases(
    path: Path,
    cases: Sequence[AttentionCase],
    axes: Sequence[Mapping[str, object]] | None = None,
) -> None:
    """Writes cases to one captured-tensor file, whole or not at all: unrounded, each
    tensor with its axes in the order they have in memory. A file there is replaced.
    `axes`: the place of each case on a grid, as many as cases; None: no grid. Raises
    UsageError, which names the case, for one that no file can hold (`_refuse_unstorable`)
    and for one that no header can hold, as one of layer -1 or with a window limit below
    0; MeasurementError or OSError where the file cannot be written."""
    tensors, calls = {}, []
    for index, case in enumerate(cases):
        named = f"saving attention case {case.ref.case!r}"
        _refuse_unstorable(case, named)
        layout: dict[str, str] = {}
        for name in (*REQUIRED, *OPTIONAL):
            if (tensor := getattr(case, name)) is not None:
                order = storage_order(tensor)
                if name != "sinks":
                    layout[name] = "".join(
                        _axis_letters(name, tensor.ndim)[axis] for axis in order
                    )
                x = tensor.detach().permute(order).cpu()
                tensors[f"{index}.{name}"] = x.clone(
                    memory_format=torch.contiguous_format
                )
        call = {**vars(case.ref), **{name: getattr(case, name) for name in OF_CASE}}
        call |= {
            "mask": mask_kind(case.mask),
            "grad_out": case.grad_out_from,
            "layout": layout,
        }
        call["axes"] = dict(axes[index]) if axes else {}
        calls.append(validated(call, CallHeader, named))
    versions = {"numdev": numdev.__version__, "torch": torch.__version__}
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        versions["transformers"] = importlib.metadata.version("transformers")
    header = Header.model_validate(
        {"version": VERSION, "versions": versions, "calls": calls}
    )
    with (
        storage.naming(path, "cannot be written", "is there room?", passing=OSError),
        temporary_files.unfinished_file(path) as partial,
    ):
        save_file(tensors, partial, metadata={KEY: header.model_dump_json()})


def _refuse_unstorable(case: AttentionCase, named: str) -> None:
    """Raises UsageError for a case that would come back from a file as another: one with
    some rows of a call by whose positions keys are hidden, one in a format that torch has
    no dtype for, and one of tensors without values. `named`: the case in the message."""
    if case.positions is not None and case.restricts_positions:
        raise UsageError(f"{named}: expected a whole call, got {case.q_len} rows of one")
    if case.working is not None:
        got = case.working.name
        raise UsageError(f"{named}: expected a format that torch has, got {got}")
    expect_values(case, named)


@checked
def save_cases(path: str | Path, cases: Sequence[AttentionCase]) -> None:
    """Writes cases to one captured-tensor file, a TARGET of `numdev audit`: unrounded,
    whole or not at all. A file there is replaced. Raises UsageError for a name that does
    not end in `.safetensors`, for a folder that does not exist or cannot be written to,
    for no case, for two of one name, and for a case that no file can hold: one with some
    rows of a causal or windowed call, one in a format that torch has no dtype for, one on
    the meta device, one of layer -1 or with a window limit below 0. Raises
    MeasurementError where the file cannot be written, as on a full disk."""
    path, names = Path(path), {case.ref.case for case in cases}
    if path.suffix != ".safetensors":
        raise UsageError(f"{path}: expected a name that ends in .safetensors")
    if not cases or len(names) < len(cases):
        raise UsageError(f"{path}: {len(cases)} cases have {len(names)} names")
    try:
        write_cases(path, cases)
    except OSError as error:
        raise cannot_write(path, error) from error


Add = Callable[[AttentionCase, Mapping[str, object]], None]


@contextlib.contextmanager
def writing_cases(directory: Path, *, overwrite: bool = False) -> Iterator[Add]:
    """Enters a context that yields a function of (case, its place on a grid), which
    writes one more case. The directory appears at the end, whole; after an exception, or
    without a case, nothing changes. Missing folders above it are made at once.
    `overwrite`: saved cases that are there are replaced. Raises UsageError where the
    directory exists (with `overwrite`: where it is no directory of saved cases), and
    where its parent cannot be written to. The function raises as `write_cases`; the end
    of the context raises OSError where writing fails."""
    if directory.exists() and not (overwrite and (directory / INDEX).is_file()):
        raise UsageError(f"{directory}: exists", hint="choose another --save-cases")
    names = list[str]()

    def add(case: AttentionCase, axes: Mapping[str, object]) -> None:
        """Writes one more case, with its place on a grid, `axes` (empty: none)."""
        names.append(f"{len(names):05d}.safetensors")
        write_cases(partial / names[-1], [case], [axes])

    with contextlib.ExitStack() as stack:
        try:
            directory.parent.mkdir(parents=True, exist_ok=True)
            beside = temporary_files.temporary_folder(
                directory.parent, f".{directory.name}."
            )
            partial = stack.enter_context(beside)
        except OSError as error:
            raise UsageError(
                f"{directory}: cannot write there ({error.strerror})"
            ) from error
        yield add
        if names:
            index = json.dumps({"version": VERSION, "files": names}, indent=1)
            (partial / INDEX).write_text(index + "\n", encoding="utf-8")
            partial.chmod(0o755)
            shutil.rmtree(directory, ignore_errors=True)
            partial.replace(directory)


def storage_order(tensor: Tensor) -> list[int]:
    """Returns the numbers of the axes from slowest to fastest, as a dense copy has them,
    by PyTorch's rule. Axes of one stride are in their own order."""
    strides = torch.empty_like(tensor, device="meta").stride()
    return sorted(range(tensor.ndim), key=lambda axis: (-strides[axis], axis))


# --- a serving engine's call: packed queries, packed or paged keys and values ---------
#
# The arguments are those of flash-attention's `flash_attn_varlen_func` and
# `flash_attn_with_kvcache`, which vLLM and SGLang call (docs/inputs.md).


@checked
def varlen_cases(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    module: str = "attention",
    layer: int | None = None,
    call: int = 0,
    source: str = "",
) -> list[AttentionCase]:
    """Returns a case for each sequence of a packed call that has queries, copied to the
    CPU.

    q is [tokens, heads, head_dim], packed by `cu_seqlens_q`; k and v likewise by
    `cu_seqlens_k`, or paged ([pages, page_size, kv_heads, dim]): then `block_table`
    [sequences, pages] names the pages of each. `seqused_k` [sequences]: how many keys of
    each count; None: all. Scale None is 1 / sqrt(head_dim). Causality and `window_size`
    (left, right; below 0: no limit) align at the last key; `softcap` 0 is none. Cases are
    `MODULE#CALL/seqI`, in phase decode for one query before several keys, else prefill.
    Raises UsageError for what does not fit together, and for queries without keys."""
    places = {
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_k": cu_seqlens_k,
        "seqused_k": seqused_k,
        "block_table": block_table,
    }
    _refuse_unfit_tensors(q, k, v, places, sinks)
    packing = _Packing.of(q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k, block_table)
    window = _flash_attn_window(window_size, causal=causal)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else float(softmax_scale)
    cases = []
    for i, queries, keys, values in packing.sequences(q, k, v):
        name, count = f"{module}#{call}/seq{i}", len(keys)
        phase: Phase = "decode" if len(queries) == 1 and count > 1 else "prefill"
        ref = CaseRef(
            case=name, source=source, module=module, layer=layer, call=call, phase=phase
        )
        case = AttentionCase(
            ref=ref,
            q=_as_case_tensor(queries),
            k=_as_case_tensor(keys),
            v=_as_case_tensor(values),
            scale=scale,
            is_causal=causal,
            causal_offset=count - len(queries),
            window=window,
            softcap=softcap or None,
            sinks=None if sinks is None else sinks.detach().to("cpu", copy=True),
        )
        cases.append(case)
    return cases


@dataclass(frozen=True)
class _Packing:
    """The places of the sequences of a packed call: in q their rows begin at `rows`, in k
    and v their keys at `starts`, or in the pages of `block_table`."""

    rows: Sequence[int]
    starts: Sequence[int]
    counts: Sequence[int]  # keys that count, of each
    block_table: Tensor | None

    @classmethod
    def of(
        cls,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor | None,
        seqused_k: Tensor | None,
        block_table: Tensor | None,
    ) -> _Packing:
        """Returns the places of a call's sequences, from flash-attention's arguments;
        None stands for one that the call does not have. Raises UsageError for shapes and
        numbers that do not fit together."""
        paged = block_table is not None
        rows, starts = _sequence_starts(cu_seqlens_q, "cu_seqlens_q", len(q)), [0]
        if cu_seqlens_k is not None:
            starts = _sequence_starts(
                cu_seqlens_k, "cu_seqlens_k", math.inf if paged else len(k)
            )
        lengths = [end - start for start, end in itertools.pairwise(starts)]
        counts = [int(count) for count in (lengths if seqused_k is None else seqused_k)]
        n = len(rows) - 1
        lists = len(starts) == n + 1
        if block_table is not None:
            lists = block_table.ndim == 2 and len(block_table) >= n
        fits = q.ndim == 3 and k.ndim == v.ndim == (4 if paged else 3)
        if not fits or not lists or len(counts) < n:
            tensors = (q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k, block_table)
            shapes = ", ".join(
                "none" if x is None else str(list(x.shape)) for x in tensors
            )
            names = "q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k, block_table"
            raise UsageError(
                f"{names}: got {shapes}", hint="docs/inputs.md has their shapes"
            )
        return cls(rows, starts, counts, block_table)

    def sequences(
        self, q: Tensor, k: Tensor, v: Tensor
    ) -> Iterator[tuple[int, Tensor, Tensor, Tensor]]:
        """Yields (number, queries, keys, values) of each sequence that has queries,
        [length, heads, dim]. Raises UsageError where there are fewer keys or values than
        `counts` says, and for a page that is not in the cache."""
        for i, (start, end) in enumerate(itertools.pairwise(self.rows)):
            if start == end:
                continue
            keys, values = (self._keys_of_sequence(x, i) for x in (k, v))
            count = self.counts[i]
            if len(keys) != count or len(values) != count:
                raise UsageError(f"sequence {i}: expected {count} keys, got {len(keys)}")
            yield i, q[start:end], keys, values

    def _keys_of_sequence(self, x: Tensor, i: int) -> Tensor:
        """Returns the keys or values of sequence i, [keys, kv_heads, dim]: as many as
        `counts` says, or fewer where there are fewer. Raises UsageError for a page that
        is not in the cache."""
        if self.block_table is not None:
            return _gather_pages(x, self.block_table[i], self.counts[i])
        return x[self.starts[i] : self.starts[i + 1]][: self.counts[i]]


def _refuse_unfit_tensors(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    places: Mapping[str, Tensor | None],
    sinks: Tensor | None,
) -> None:
    """Raises UsageError for q, k or v that is not dense, has another number of axes, or
    has an axis of length 0 behind the first; and for `sinks` that are not dense. Raises
    it too for `places` that are not dense, hold no integers or have another number of
    axes: `cu_seqlens_q`, `cu_seqlens_k`, `seqused_k` and `block_table`, each a tensor or
    None."""
    paged = places["block_table"] is not None
    for name, x, axes in (("q", q, 3), ("k", k, 3 + paged), ("v", v, 3 + paged)):
        dense = x.layout is torch.strided and not x.is_meta
        if x.ndim != axes or not dense or 0 in x.shape[1:]:
            what = f"{name}: expected a dense tensor of {axes} axes, got {list(x.shape)}"
            raise UsageError(what, hint="docs/inputs.md has their shapes")
    for name, numbers in places.items():
        if numbers is not None:
            _refuse_no_integers(name, numbers, 2 if name == "block_table" else 1)
    if sinks is not None and (sinks.is_meta or sinks.layout is not torch.strided):
        raise UsageError(f"sinks: expected a dense tensor of values, got {sinks.device}")


def _flash_attn_window(
    window_size: Sequence[int] | None, *, causal: bool
) -> Window | None:
    """Returns a case's window from flash-attention's `window_size` (left, right), where a
    negative side is no limit; None without any limit. A `causal` call with a limit has 0
    on the right. Raises UsageError for another number of sides, if one of them is a
    limit."""
    if window_size is None or not any(side >= 0 for side in window_size):
        return None
    if len(window_size) != 2:
        raise UsageError(f"window_size: expected (left, right), got {list(window_size)}")
    left, right = (None if side < 0 else int(side) for side in window_size)
    return left, 0 if causal else right


def _refuse_no_integers(name: str, x: Tensor, axes: int) -> None:
    """Raises UsageError for a tensor that is not dense, that holds no integers, or that
    has another number of axes. `name` is for the message."""
    integers = not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)
    if not integers or x.ndim != axes or x.layout is not torch.strided or x.is_meta:
        expected = (
            f"a dense tensor of integers with {axes} {'axes' if axes > 1 else 'axis'}"
        )
        raise UsageError(f"{name}: expected {expected}, got {x.dtype} {list(x.shape)}")


def _sequence_starts(places: Tensor, name: str, tokens: float) -> list[int]:
    """Returns the numbers of `places` as ints: where each sequence begins, and last where
    the last one ends. Raises UsageError unless they begin with 0, ascend (equal ones may
    follow each other) and end at `tokens` at most. `name` is for the message."""
    numbers = [int(x) for x in places]
    ascends = numbers == sorted(numbers) and numbers[:1] == [0] and numbers[-1] <= tokens
    if not ascends:
        raise UsageError(
            f"{name}: expected 0 and on up to {tokens} at most, got {numbers[:6]}"
        )
    return numbers


def _gather_pages(cache: Tensor, pages: Tensor, count: int) -> Tensor:
    """Returns the first `count` keys or values of a sequence, [count, kv_heads, dim], as
    a copy; fewer where it has too few pages. `cache` [pages, page_size, kv_heads, dim];
    `pages`: the numbers of the sequence's pages, in order. Raises UsageError for a page
    that is not in the cache."""
    size = cache.shape[1]
    needed = pages[: -(-count // size)].long().to(cache.device)
    if bool(((needed < 0) | (needed >= len(cache))).any()):
        raise UsageError(
            f"block_table: expected pages below {len(cache)}, got {needed.tolist()}"
        )
    return cache[needed].flatten(0, 1)[:count]


def _as_case_tensor(x: Tensor) -> Tensor:
    """Returns a copy on the CPU of [length, heads, dim] as a case has it, [1, heads,
    length, dim]; in memory it is [length, heads, dim]."""
    copy = x.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
    return copy.transpose(0, 1).unsqueeze(0)
