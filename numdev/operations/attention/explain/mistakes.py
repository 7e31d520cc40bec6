"""Named mistakes that are another case: the same call with one thing changed.

Each family takes an `AttentionCase` and yields a cause in words with the fields it
changes, where the mistake is possible and would change what is computed. The answer is
the fp64 reference's of the changed case. Mistakes that are no case are in
`numdev.operations.attention.explain.alternative_outputs`."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from numdev.cases import AttentionCase, CaseChanges, Window
from numdev.operations.attention.explain.call_sample import all_scores, rescored

# Causes, with the fields of the case they change
Changes = Iterator[tuple[str, CaseChanges]]

MOST_SCORES = 1 << 22  # of a call of which a mistake takes a mask or a bias of all scores
WINDOW_TILES = (16, 32, 64, 128)
# Of keys, in kernels in use
TILES = (16, 32, 48, 64, 80, 96, 112, 128, 160, 176, 192, 256)
PADDED = (16, 32, 64, 128)
LOGARITHMS = {
    "lacks log2(e) before an exponential to base 2": math.log(2),
    "is multiplied by log2(e), although the exponential has base e": 1 / math.log(2),
}


def variants(case: AttentionCase) -> Iterator[tuple[str, AttentionCase]]:
    """Yields every mistake that is another case, and possible in this call: the cause in
    words, and the changed case."""
    families = (
        *(
            scales,
            _causal_mistakes,
            _window_mistakes,
            _mask_mistakes,
            _kv_head_mistakes,
            _output_order_mistakes,
            _batch_mistakes,
        ),
        *(
            _key_end_mistakes,
            _tensor_order_mistakes,
            _head_dim_mistakes,
            _softcap_mistakes,
            _sink_mistakes,
        ),
    )
    for family in families:
        for cause, changes in family(case):
            yield cause, dataclasses.replace(case, **changes)


def instances(case: AttentionCase) -> dict[str, tuple[str, ...]]:
    """Returns, for causes of this call that name a number of keys, the mechanisms in
    words that hold in calls of other lengths: a tile of keys decides how many are
    dropped, or padded. `the last 3 keys are dropped` has `keys beyond the last full tile
    of 64 are dropped`, once for each tile that fits. Causes without such a mechanism are
    missing."""
    of: dict[str, tuple[str, ...]] = {}
    n = case.kv_len
    for tile in TILES:
        lost = n % tile
        if 0 < lost < n:
            words = f"keys beyond the last full tile of {tile} are dropped"
            of[dropped(lost)] = (*of.get(dropped(lost), ()), words)
        if tile in PADDED and lost:
            to = padded(n - lost + tile)
            of[to] = (*of.get(to, ()), filled(tile))
    return of


def dropped(lost: int) -> str:
    """Returns the cause `the last 3 keys are dropped`, or `the last key is dropped`, for
    `lost` keys."""
    return "the last key is dropped" if lost == 1 else f"the last {lost} keys are dropped"


def padded(to: int) -> str:
    """Returns the cause `the keys are padded with zeros to 128, and the padding takes
    part`, for a length `to`."""
    return f"the keys are padded with zeros to {to}, and the padding takes part"


def filled(tile: int) -> str:
    """Returns the cause `the keys are padded with zeros to a multiple of 64, which take
    part`, for a tile of keys."""
    return f"the keys are padded with zeros to a multiple of {tile}, which take part"


def scales(case: AttentionCase) -> Changes:
    """Yields mistakes of the scale, each with the changed field `scale`; a scale that
    equals the requested one or an earlier one is left out."""
    d, v_dim, asked = case.q.shape[-1], case.v.shape[-1], case.scale
    in_base_2, in_base_e = asked * math.log(2), asked / math.log(2)
    wrong = {
        "the scores are not scaled": 1.0,
        "the scale is 1/sqrt(head_dim) instead of the requested one": d**-0.5,
        "the scale is applied twice": asked * asked,
        "the scale is 1/head_dim": 1 / d,
        "the scale is 1/sqrt of V's head_dim": v_dim**-0.5,
        "the scale is 1/sqrt(heads * head_dim)": (case.heads * d) ** -0.5,
        "the scale is sqrt(head_dim), not its reciprocal": d**0.5,
        "the exponential is to base 2 (the scale lacks log2(e))": in_base_2,
        "the scale has log2(e) in it, and the exponential is to base e": in_base_e,
        "the sign of the scores is wrong": -asked,
        "all scores are equal (a plain mean of V)": 0.0,
    }
    seen = {asked}
    for cause, scale in wrong.items():
        if not any(math.isclose(scale, other, rel_tol=1e-9) for other in seen):
            seen.add(scale)
            yield cause, {"scale": scale}


def _causal_mistakes(case: AttentionCase) -> Changes:
    """Yields mistakes of the causal mask and of the position from which it and a window
    are counted, each with the changed fields. For a call without a causal mask, and with
    more than one query, the mistake is that one is applied."""
    # The offset with which the last query sees the last key
    right = case.kv_len - case.q_len
    if case.restricts_positions:
        what = "causal mask" if case.is_causal else "window"
        for offset, where in ((0, "top-left"), (right, "bottom-right")):
            if offset != case.causal_offset:
                yield f"the {what} is aligned {where}", {"causal_offset": offset}
    if case.is_causal:
        yield "the causal mask is ignored", {"is_causal": False}
        for step, words in ((1, "one key too many"), (-1, "one key too few")):
            offset = case.causal_offset + step
            if case.q_len == 1 or offset not in (0, right):
                cause = f"the causal mask is off by one: each query sees {words}"
                yield (
                    cause,
                    {"causal_offset": offset, "window": _window_at_offset(case, -step)},
                )
        if case.window is None:
            cause = "the causal mask is upside down: queries see what follows them"
            yield cause, {"is_causal": False, "window": (0, None)}
    elif case.q_len > 1:
        cause = "a causal mask is applied that was not requested"
        yield cause, {"is_causal": True}
        if right != case.causal_offset:
            yield (
                f"{cause} (aligned bottom-right)",
                {"is_causal": True, "causal_offset": right},
            )


def _window_mistakes(case: AttentionCase) -> Changes:
    """Yields mistakes of the window, each with the changed fields: ignored, off by one
    key on a side, ignored on a side, or counted in whole tiles (in calls of at most
    MOST_SCORES scores to a head); nothing without a window."""
    if case.window is None:
        return
    yield "the window is ignored", {"window": None}
    left, right = case.window
    for step, words in ((1, "one key too wide"), (-1, "one key too narrow")):
        if left is not None:
            yield f"the window is {words} on the left", {"window": (left + step, right)}
        if right is not None and not (case.is_causal and right >= 0 and step > 0):
            yield f"the window is {words} on the right", {"window": (left, right + step)}
    if left is not None and right is not None and not case.is_causal:
        for side, window in {"left": (None, right), "right": (left, None)}.items():
            yield f"the window is ignored on the {side}", {"window": window}
    if case.q_len * case.kv_len <= MOST_SCORES:
        low = math.inf if left is None else left
        high = math.inf if right is None or case.is_causal else right
        seen: list[Tensor] = []
        i, j = (torch.arange(n, device=case.q.device) for n in (case.q_len, case.kv_len))
        for rows, keys in itertools.product((1, *WINDOW_TILES), WINDOW_TILES):
            distance = j // keys * keys - i[:, None] // rows * rows - case.causal_offset
            shown = (distance + keys > -low) & (distance < rows + high)
            if any(shown.equal(other) for other in seen):
                continue
            seen.append(shown)
            which = f"of {keys} keys and {rows} rows".replace(" and 1 rows", "")
            which = "that cover the call" if bool(shown.all()) else which
            cause = f"the window is counted in tiles {which}"
            yield cause, {"window": None, **hiding(case, shown)}


def _window_at_offset(case: AttentionCase, step: int) -> Window | None:
    """Returns the window as it must be for the same keys to stay visible when the causal
    offset moves by -step: left - step and right + step; None where there is no window. A
    right limit of at least 0 is dropped, since causality hides more."""
    if case.window is None:
        return None
    left, right = case.window
    if right is not None and right >= 0:  # causality is the tighter limit
        right = None
    return (
        None if left is None else left - step,
        None if right is None else right + step,
    )


def _mask_mistakes(case: AttentionCase) -> Changes:
    """Yields mistakes of the mask, each with the changed fields, as that it is ignored
    (also with the causal mask), inverted, subtracted, scaled, transposed, or that of
    another head or batch entry; nothing without a mask."""
    mask = case.mask
    if mask is None:
        return
    yield "the mask is ignored", {"mask": None}
    if mask.dtype == torch.bool:
        yield "the mask is inverted", {"mask": ~mask}
        added = mask.to(case.q.dtype)
        yield "the bool mask is added to the scores as 0 and 1", {"mask": added}
    else:
        yield "the additive mask is subtracted", {"mask": -mask}
        factors = {**LOGARITHMS, "is scaled like the scores": case.scale}
        for words, factor in factors.items():
            yield f"the additive mask {words}", {"mask": mask.double() * factor}
    if mask.ndim >= 2 and mask.shape[-1] == mask.shape[-2] > 1:
        yield "the mask is transposed", {"mask": mask.transpose(-1, -2)}
    if mask.ndim >= 3 and mask.shape[-3] > 1:
        yield "every head gets head 0's mask", {"mask": mask[..., :1, :, :]}
        for words, by in {"next": -1, "previous": 1}.items():
            yield (
                f"query heads get the mask of the {words} one",
                {"mask": mask.roll(by, -3)},
            )
        yield "query heads get the masks in reverse order", {"mask": mask.flip(-3)}
    if mask.ndim == 4 and mask.shape[0] > 1:
        yield "every batch entry gets entry 0's mask", {"mask": mask[:1]}
        for words, by in {"next": -1, "previous": 1}.items():
            yield (
                f"batch entries get the mask of the {words} one",
                {"mask": mask.roll(by, 0)},
            )
    if case.is_causal and case.q_len > 1:
        yield (
            "the mask and the causal mask are both ignored",
            {"mask": None, "is_causal": False},
        )


def _kv_head_mistakes(case: AttentionCase) -> Changes:
    """Yields mistakes in which kv head a query head reads, in words, each with k and v
    gathered for every query head. A mapping that equals the right one or an earlier one
    is left out; with a single kv head nothing is yielded."""
    kv, group = case.kv_heads, case.group
    if kv == 1:
        return
    every = range(case.heads)
    right = [h // group for h in every]
    mappings = {
        "query head h reads kv head h % kv_heads instead of h // group": [
            h % kv for h in every
        ],
        "query heads read kv head 0 instead of their own": [0 for h in every],
        "query heads read the next kv head": [(read + 1) % kv for read in right],
        "query heads read the previous kv head": [(read - 1) % kv for read in right],
        "kv heads are read in reverse order": [kv - 1 - read for read in right],
    }
    seen = [right]
    for cause, mapping in mappings.items():
        if mapping not in seen:
            seen.append(mapping)
            yield cause, {"k": case.k[:, mapping], "v": case.v[:, mapping]}


def _output_order_mistakes(case: AttentionCase) -> Changes:
    """Yields mistakes where outputs come out in the place of another query head, with q,
    k, v, mask and sinks reordered. An order that equals the right one or an earlier one
    is left out."""
    every = list(range(case.heads))
    orders = {
        "the outputs of heads 2i and 2i + 1 are exchanged": [
            min(h ^ 1, every[-1]) for h in every
        ],
        "query heads return the output of the next one": [*every[1:], 0],
        "query heads return the output of the previous one": [every[-1], *every[:-1]],
        "the outputs of the heads come in reverse order": every[::-1],
        "every query head returns head 0's output": [0 for _ in every],
    }
    mask, seen = case.mask, [every]
    for cause, heads in orders.items():
        if heads in seen:
            continue
        seen.append(heads)
        kv = [h // case.group for h in heads]
        changed: CaseChanges = {
            "q": case.q[:, heads], "k": case.k[:, kv], "v": case.v[:, kv],
        }  # fmt: skip
        if mask is not None and mask.ndim >= 3 and mask.shape[-3] > 1:
            changed["mask"] = mask[..., heads, :, :]
        if case.sinks is not None:
            changed["sinks"] = case.sinks[heads]
        yield cause, changed


def _batch_mistakes(case: AttentionCase) -> Changes:
    """Yields mistakes where batch entries read the tensors of another one, with the
    changed tensors; nothing for a single entry."""
    if case.q.shape[0] == 1:
        return
    for words, by in {"next": -1, "previous": 1}.items():
        cause = f"batch entries read the k and v of the {words} one"
        yield cause, {"k": case.k.roll(by, 0), "v": case.v.roll(by, 0)}
    first = [0] * case.q.shape[0]
    yield (
        "every batch entry reads entry 0's k and v",
        {"k": case.k[first], "v": case.v[first]},
    )
    yield (
        "every batch entry reads entry 0's q, k and v",
        {"q": case.q[first], "k": case.k[first], "v": case.v[first]},
    )


def _key_end_mistakes(case: AttentionCase) -> Changes:
    """Yields mistakes at the ends of the keys, with k, v and mask changed: the last keys
    are dropped, by several counts, or the first one, or keys of zeros are padded that
    count. At least one key stays."""
    n = case.kv_len
    tails = {1, 2, 4, 8, 16, 32, 64, 128, *(n % tile for tile in TILES)}
    for lost in sorted(tails):
        if 0 < lost < n:
            mask = case.mask
            if mask is not None and mask.shape[-1] > 1:
                mask = mask[..., : n - lost]
            k, v = (x[:, :, : n - lost] for x in (case.k, case.v))
            yield dropped(lost), {"k": k, "v": v, "mask": mask}
    if n > 1:
        yield "the first key is dropped", without(case, 0)
    for to in sorted({-(-n // tile) * tile for tile in PADDED} - {n}):
        yield padded(to), _pad_keys(case, to - n)


def without(case: AttentionCase, key: int) -> CaseChanges:
    """Returns the case's mask with one key hidden from all queries, as the field `mask`
    to change; an index that is no key hides nothing."""
    return hiding(case, torch.arange(case.kv_len, device=case.q.device)[None] != key)


def hiding(case: AttentionCase, shown: Tensor) -> CaseChanges:
    """Returns the case's mask with everything hidden that is not `shown`, bool [q_len or
    1, kv_len], as the field `mask` to change. The mask keeps its kind: an additive one
    hides by -inf. A case without a mask gets a bool one."""
    mask = True if case.mask is None else case.mask
    added = isinstance(mask, Tensor) and mask.dtype != torch.bool
    return {"mask": torch.where(shown, mask, -math.inf if added else False)}


def _pad_keys(case: AttentionCase, more: int) -> CaseChanges:
    """Returns k, v and mask with `more` keys of zeros at the end, as fields to change. A
    mask with an axis of keys shows them to every query; one that broadcasts over keys
    stays."""
    k, v = (torch.nn.functional.pad(x, (0, 0, 0, more)) for x in (case.k, case.v))
    mask = case.mask
    if mask is not None and mask.shape[-1] > 1:
        shown = (
            torch.ones_like(mask[..., :1])
            if mask.dtype == torch.bool
            else mask[..., :1] * 0
        )
        mask = torch.cat(
            [mask, shown.nan_to_num(0.0).expand(*mask.shape[:-1], more)], dim=-1
        )
    return {"k": k, "v": v, "mask": mask}


def _tensor_order_mistakes(case: AttentionCase) -> Changes:
    """Yields mistakes where K, V or Q is read in another order or in another's place,
    with the changed tensors. Only those that the shapes allow."""
    if case.kv_len > 1:
        yield "V is read in reverse order", {"v": case.v.flip(2)}
        yield "V is shifted by one row", {"v": case.v.roll(1, 2)}
        yield "V is shifted by one row, the other way", {"v": case.v.roll(-1, 2)}
        yield "K is shifted by one row", {"k": case.k.roll(1, 2)}
    if case.k.shape == case.v.shape:
        yield "K is used in place of V", {"v": case.k}
        yield "V is used in place of K", {"k": case.v}
        yield "K and V are swapped", {"k": case.v, "v": case.k}
    if case.q.shape == case.k.shape and case.q_len > 1:
        cause = "Q and K are swapped (the softmax is over the wrong axis)"
        yield cause, {"q": case.k, "k": case.q}


def _head_dim_mistakes(case: AttentionCase) -> Changes:
    """Yields the mistake that only the first 16, 32, 64 or 128 features of q and k are
    read, with q and k shortened. It is possible where head_dim is larger than that and at
    most twice as large. The scale stays."""
    d = case.q.shape[-1]
    for used in (16, 32, 64, 128):
        if used < d <= 2 * used:
            cause = f"only the first {used} of {d} features enter the scores"
            yield cause, {"q": case.q[..., :used], "k": case.k[..., :used]}


def _softcap_mistakes(case: AttentionCase) -> Changes:
    """Yields mistakes of the soft cap, each with the changed fields; those that need a
    bias of all scores only in calls of at most MOST_SCORES scores; nothing without a soft
    cap."""
    cap = case.softcap
    if cap is None:
        return
    yield "the soft cap is ignored", {"softcap": None}
    before = cap * abs(case.scale)
    if 0 < before != cap:
        yield "the soft cap is applied before the scale", {"softcap": before}
    if not before or math.prod((*case.q.shape[:3], case.kv_len)) > MOST_SCORES:
        return
    mask = case.mask
    if mask is not None and mask.dtype != torch.bool:
        S = all_scores(dataclasses.replace(case, softcap=None))
        capped = torch.where(S.isfinite(), (S / cap).tanh() * cap, S)
        yield "the soft cap is applied after the additive mask", rescored(case, capped)
    bare = dataclasses.replace(
        case, mask=None, softcap=None, window=None, is_causal=False
    )
    S, capped = all_scores(bare), all_scores(case)
    masked = capped - (S / cap).tanh() * cap  # 0, the additive mask, or -inf
    wrong = {
        "the soft cap multiplies a score by the tanh of it over the cap": S
        * (S / cap).tanh(),
        "the soft cap multiplies a score by its tanh": S * S.tanh(),
        "a score is not divided by the soft cap before the tanh": cap * S.tanh(),
        "the tanh is not multiplied by the soft cap": (S / cap).tanh(),
        "scores are clamped at the soft cap": S.clamp(-cap, cap),
    }
    for cause, other in wrong.items():
        yield cause, rescored(case, other + masked)


SINK_TILES = (16, 32, 64, 128)


def _sink_mistakes(case: AttentionCase) -> Changes:
    """Yields mistakes of the attention sinks in words, each with the changed `sinks`;
    nothing without sinks. That all heads get one head's sink is tried for the first
    MOST_SINKS heads."""
    if case.sinks is None:
        return
    yield "the attention sinks are ignored", {"sinks": None}
    yield (
        "the attention sinks are counted twice",
        {"sinks": case.sinks.double() + math.log(2)},
    )
    for words, factor in {**LOGARITHMS, "is scaled like the scores": case.scale}.items():
        yield f"the attention sink {words}", {"sinks": case.sinks.double() * factor}
    for words, by in {"next": -1, "previous": 1}.items():
        yield (
            f"query heads get the sink of the {words} one",
            {"sinks": case.sinks.roll(by)},
        )
    if case.heads > 2:
        yield "query heads get the sinks in reverse order", {"sinks": case.sinks.flip(0)}
    for head in range(min(case.heads, MOST_SINKS)):
        cause = f"every head gets head {head}'s sink"
        yield cause, {"sinks": case.sinks[[head]].expand(case.heads)}
    for tile in SINK_TILES:
        if (tiles := -(-case.kv_len // tile)) > 2:
            cause = f"the attention sink is counted in every tile of {tile} keys"
            yield cause, {"sinks": case.sinks.double() + math.log(tiles)}


MOST_SINKS = 8  # heads whose sink may be all heads'
