"""Rounding at a site, and the arithmetic around it: what both passes of `emulated`
share."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from numdev.cases import AttentionCase
from numdev.errors import Refused
from numdev.formats import Format, RoundingMode, format_of, round_to
from numdev.kernels.emulation.recipe import SITES, Recipe

Step = Callable[[Tensor], Tensor]


class Rounder:
    """`r(site, x)` returns x rounded to the format that the recipe gives the site on this
    case; x itself where nothing is rounded. Raises KeyError for a name that is no site.
    What is random is drawn from `generator`; None: from a new one with the recipe's seed.
    Making it raises Refused where the recipe's arithmetic does not hold the case's format
    or a site's, or where a site must hold -inf and its format cannot."""

    def __init__(
        self,
        recipe: Recipe,
        case: AttentionCase,
        generator: torch.Generator | None = None,
    ) -> None:
        self.recipe, self.case = recipe, case
        self.dtype = torch.float64 if recipe.compute == "float64" else torch.float32
        self.tile = recipe.tile(case.q.shape[-1], case.kv_len)
        compute = format_of(self.dtype)
        if not compute.contains(case.format):
            raise Refused(
                f"computing in {compute.name} would round inputs in {case.format.name}"
            )
        # None can be seeded while a CUDA graph is recorded: only what needs one has it.
        if generator is None and recipe.draws:
            generator = torch.Generator(case.q.device).manual_seed(recipe.seed)
        self.generator = generator
        self.steps: dict[str, Step | None] = {}
        for name, site in SITES.items():
            fmt = recipe.format_at(name, case.format)
            if fmt is not None and not compute.contains(fmt):
                raise Refused(
                    f"computing in {compute.name} cannot round {name} to {fmt.name}"
                )
            if fmt is not None and site.may_hide and not fmt.has_infinity:
                raise Refused(f"{name} must hold -inf, which {fmt.name} does not have")
            self.steps[name] = rounding(fmt, self.dtype, recipe.rounding, generator)

    def __call__(self, site: str, x: Tensor) -> Tensor:
        step = self.steps[site]
        return x if step is None else step(x)

    def stored(self, site: str, x: Tensor, preferred: torch.dtype) -> Tensor:
        """Returns x in a dtype that holds the values of the site's format: the preferred
        one if it does, else float32 if that does, else as it is. As it is too where the
        site is `exact`."""
        fmt = self.recipe.format_at(site, self.case.format)
        for dtype in (preferred, torch.float32):
            if fmt is not None and format_of(dtype).contains(fmt):
                return x.to(dtype)
        return x

    def signs(self, like: Tensor) -> Tensor:
        """Returns 1 or -1, drawn with equal odds, for every element of `like`, in its
        shape and dtype."""
        drawn = torch.randint(2, like.shape, generator=self.generator, device=like.device)
        return (2 * drawn - 1).to(like.dtype)

    def rounds(self, *sites: str) -> bool:
        """Whether at least one of these sites rounds; False for none. `sites`: names of
        sites."""
        return any(self.steps[site] is not None for site in sites)


def rounding(
    fmt: Format | None,
    dtype: torch.dtype,
    mode: RoundingMode,
    generator: torch.Generator | None,
) -> Step | None:
    """Returns a function that rounds tensors of `dtype` to `fmt`; None where there is
    nothing to round, since `fmt` is None or holds all of `dtype`. `generator` is for
    stochastic rounding, where the function raises UsageError without one on the tensor's
    device. Torch's cast is `round_to` at a tenth of the cost where it rounds once: not
    from float64 to a half."""
    if fmt is None or fmt.contains(format_of(dtype)):
        return None
    direct = (
        (torch.float32,) if dtype == torch.float64 else (torch.bfloat16, torch.float16)
    )
    if mode == "nearest":
        for narrow in direct:
            if format_of(narrow).contains(fmt) and fmt.contains(format_of(narrow)):
                return lambda x: x.to(narrow).to(x.dtype)
    return functools.partial(round_to, format=fmt, mode=mode, generator=generator)


@contextlib.contextmanager
def plain_arithmetic(device: torch.device) -> Iterator[None]:
    """Enters a context in which fp32 products are computed in fp32: without TF32, bf16
    passes, or autocast on this device. Restored at the end."""
    onednn = torch.backends.mkldnn
    backends = (torch.backends.cuda.matmul, onednn.matmul)  # type: ignore[attr-defined]
    before = [backend.fp32_precision for backend in backends]
    try:
        for backend in backends:
            backend.fp32_precision = "ieee"
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        for backend, precision in zip(backends, before, strict=True):
            backend.fp32_precision = precision
