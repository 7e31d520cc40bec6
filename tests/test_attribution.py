"""Which roundings explain a kernel's errors, and when nothing does."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from on_bench import THIS_CPU, invoked, prepare, task_of
from recipes import drawn as drawn_case
from torch import Tensor

from numdev.cases import AttentionCase
from numdev.formats import format_named
from numdev.kernels import Kernel, find
from numdev.kernels.emulation.kernel import emulated_step, emulation
from numdev.kernels.emulation.kernel import gradients as emulated_gradients
from numdev.kernels.emulation.recipe import SITES
from numdev.kernels.reference import attend, gradients
from numdev.operations.attention.explain.attribution import (
    PRESETS,
    attribute,
    rounding_sites,
)
from numdev.operations.attention.explain.rounding_explanations import explanations
from numdev.report import AttributionRow, SiteShare, read
from numdev.studies.audit.case_measurement import measure_task
from numdev.studies.audit.explanations import explain, whole_groups


def drawn(regime: str = "normal", *, length: int = 300, **options: Any) -> AttentionCase:
    return drawn_case(length, regime, head_dim=32, scale=0.3, **options)


def training(
    length: int = 260, *, heads: int = 2, kv: int = 1, **options: Any
) -> AttentionCase:
    # In one draw of four the errors of dq's sites cancel in part, and their shares do not
    # add up.
    shape: dict[str, Any] = {"heads": heads, "kv_heads": kv, "head_dim": 32, "scale": 0.2}
    return drawn_case(
        length, is_causal=True, **shape, **{"logits": 3.0, "seed": 2, **options}
    )


def explained(output: Tensor, case: AttentionCase) -> Any:
    exact, emulate = attend(case), lambda tried: emulation(case, tried)
    scale = exact.term_scale.norm(dim=-1)
    return attribute(output, exact.out, scale, case.format, None, emulate)


@pytest.mark.parametrize(("change", "regime"), [
    ({"rounding": "toward_zero"}, {"regime": "normal"}),
    ({"exponential": "fexp_u20"}, {"regime": "ties", "strength": 24.0}),
])  # fmt: skip
def test_other_exps_and_modes_are_tried(
    change: dict[str, str], regime: dict[str, Any]
) -> None:
    """A truncating kernel, and one with PyTorch's fast exp, are told apart from fa2."""
    case = drawn(**regime)
    result = explained(find("emulated").attend(case, **change).out, case)
    assert result.best.claim.items() >= change.items()
    assert result.best.residual < 0.1


@pytest.mark.parametrize("spoil", [
    lambda o: o * 1.01,
    lambda o: o + 0.02 * torch.randn(o.shape, generator=torch.Generator().manual_seed(0)),
    lambda o: o.roll(1, dims=2), torch.zeros_like,
], ids=["scaled", "noise", "shifted", "zeros"])  # fmt: skip
def test_what_is_no_rounding_is_unknown(spoil: Callable[[Tensor], Tensor]) -> None:
    """Whatever its size, an error that no rounding makes is explained by none."""
    case = drawn()
    output = spoil(find("emulated").attend(case).out.float()).bfloat16()
    result = explained(output, case)
    assert result.why_not == "no known way of rounding makes these errors"
    assert result.sites == ()


@pytest.mark.parametrize(("next_residual", "is_named"), [(0.33, False), (0.4, True)])
def test_an_explanation_is_clearly_better_than_the_next(
    next_residual: float, is_named: bool
) -> None:
    """Of two that leave 0.3 and 0.33 of the errors neither is known; 0.3 beside 0.4
    is."""
    errors = torch.randn(1, 1, 8, 4, generator=torch.Generator().manual_seed(0)).double()

    def emulate(claim: Mapping[str, Any]) -> Tensor:
        return errors * (1 - (0.3 if claim["preset"] == "eager" else next_residual))

    result = attribute(errors, torch.zeros_like(errors), torch.ones(1, 1, 8),
                      format_named("bfloat16"), None, emulate)  # fmt: skip
    assert result.best.preset == "eager"
    assert (result.why_not is None) == is_named


def test_the_scores_roundings_are_one_site() -> None:
    """At a scale of a power of two S and scale * S round alike: neither alone explains
    anything."""
    case = drawn("normal", logits=4.0)
    result = explained(find("baseline").attend(case).out, case)
    assert result.best.preset == "eager"
    share = {s.site: s.share for s in result.sites}
    assert set(share) == {"scores", "p", "out"}
    assert share["scores"] > 0.5
    assert sum(share.values()) == pytest.approx(1.0, abs=0.1)


def rows_of(kernel: Kernel, case: AttentionCase) -> dict[str, AttributionRow]:
    bench = prepare(case, "bfloat16", gradients=True)
    task = task_of(bench, kernel)
    rows = explain(
        task, kernel, measure_task(task, kernel, bench, THIS_CPU), bench, THIS_CPU
    )
    return {row.tensor: row for row in rows}


def emulating(**recipe: Any) -> Kernel:
    """A kernel of these roundings, computed in fp64, that claims nothing but fa2."""
    return Kernel(
        name="mine",
        function=lambda case: find("emulated").attend(case, **recipe),
        backward=lambda case: emulated_gradients(case, **recipe),
    )


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.one_in(3)
def test_gradients_of_known_roundings_are_recognised(preset: str) -> None:
    """All four tensors of all presets, with the tensor's own sites and shares that add
    up."""
    rows = rows_of(emulating(**PRESETS[preset]), training())
    assert list(rows) == ["out", "dq", "dk", "dv"]
    assert [row.heads for row in rows.values()] == [(0, 1), (0, 1), (0,), (0,)]
    for row in rows.values():
        assert row.explained_by == preset, row.reason
        assert row.residual < 0.15
        assert row.size == pytest.approx(1.0, abs=0.02)
        if preset in ("fa2", "fa2-consistent", "eager", "one cast"):
            assert sum(s.share for s in row.sites) == pytest.approx(1.0, abs=0.15)


@pytest.mark.parametrize(
    ("recipe", "tensors", "words"),
    [
        ({"dq": "working", "dk": "working", "dv": "working", "block_q": 32, "block_kv": 64},
         ("dq", "dk", "dv"), "summed in the working format"),
        ({"dk": "working", "dv": "working", "group_sum": "running", "block_q": 64},
         ("dk", "dv"), "accumulated across a group"),
        ({"dk_partial": "exact", "dv_partial": "exact"}, ("dk", "dv"),
         "summed over the group before rounding"),
        ({"delta_from": "dP*P"}, ("dq", "dk"), "with delta computed as rowsum(dP ∘ P)"),
        ({"delta_o": "exact"}, ("dq", "dk"), "with delta computed from the unrounded O"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)  # fmt: skip
@pytest.mark.one_in(5)
def test_other_sums_and_deltas_are_found(
    recipe: dict[str, Any], tensors: Any, words: str
) -> None:
    """What kernels do otherwise than fa2 is found without being claimed, and said."""
    rows = rows_of(emulating(**recipe), training())
    for tensor in tensors:
        row = rows[tensor]
        assert row.explained_by == "fa2", row.reason
        assert row.residual < 0.1
        assert words in (explanations([row])[0].nearest or "")
    assert words not in (explanations([rows["out"]])[0].nearest or "")


def test_a_wrong_gradient_is_unknown_and_a_right_one_is_not() -> None:
    """One tensor's fault is its own; a kernel without a backward is not asked for
    more."""

    def spoilt(case: AttentionCase) -> Any:
        step = find("sdpa-flash").gradients(case)
        return dataclasses.replace(step, dk=step.dk * 1.01)  # type: ignore[operator]

    kernel = Kernel(name="spoilt", function=find("sdpa-flash").attend, backward=spoilt)
    rows = rows_of(kernel, training())
    assert rows["dk"].reason == "no known way of rounding makes these errors"
    assert {t for t, row in rows.items() if row.explained_by} == {"out", "dq", "dv"}
    half = Kernel(name="half", function=find("emulated").attend)
    assert list(rows_of(half, training(60))) == ["out"]


@pytest.mark.slow
def test_delta_from_the_cast_output_explains_dq_on_wide_logits() -> None:
    """Of real kernels: nearly all of flash attention's dQ error, where math's is one
    cast."""
    case = training(600, heads=1, logits=30.0)
    flash, math = (
        rows_of(find(f"sdpa-{name}"), case)["dq"] for name in ("flash", "math")
    )
    assert {s.site: s.share for s in flash.sites}["delta_o"] > 0.9
    assert (math.explained_by, math.sites[0].site) == ("one cast", "dq_out")


def test_rows_that_underflow_are_left_out() -> None:
    """A key nobody looks at: its dV underflows, off by all of it. (Else 5 to 25 % are
    left.)"""
    case = training(100, heads=4, kv=4, logits=30.0, seed=1)
    rows = rows_of(find("sdpa-flash"), case)
    terms = gradients(case).dv_terms.norm(dim=-1)
    assert 0 < float(terms.min()) < 2.0**-126
    for tensor in ("dk", "dv"):
        assert rows[tensor].residual < 0.5  # type: ignore[operator]


def test_heads_come_in_whole_groups() -> None:
    """dK and dV are sums over a group, so all its query heads are compared, and no
    half."""
    assert whole_groups((0, 1, 2, 3), 1) == ((0, 1, 2, 3), (0, 1, 2, 3))
    assert whole_groups(tuple(range(12)), 1) == ((0, 3, 6, 9), (0, 3, 6, 9))
    assert whole_groups(tuple(range(12)), 2) == ((0, 1, 6, 7), (0, 3))
    assert whole_groups((5,), 4) == ((4, 5, 6, 7), (1,))
    assert whole_groups(tuple(range(16)), 8) == (tuple(range(8)), (0,))


@pytest.mark.parametrize("tensor", ["out", "dq", "dk", "dv"])
@pytest.mark.parametrize("preset", ["fa2", "fa2-consistent", "eager", "golden2024"])
@pytest.mark.one_in(3)
def test_the_sites_of_a_tensor_are_those_that_change_it(preset: str, tensor: str) -> None:
    """By brute force, with every site rounding: a coarser one changes tensor or
    answer."""
    mask, sinks = (
        torch.linspace(-1, 1, 20).bfloat16(),
        torch.tensor([0.3, 0.7]).bfloat16(),
    )
    more: dict[str, Any] = {"scale": 0.4, "softcap": 3.0, "mask": mask, "sinks": sinks}
    case = drawn_case(20, kv_heads=1, head_dim=8, **more)
    tiles = {} if preset == "eager" else {"block_kv": 8}
    claim = {**dict.fromkeys(SITES, "working"), "preset": preset, **tiles}
    if preset == "fa2":
        claim |= {"scale_in": "q", "loop_order": "kv", "splits": 2, "ds_scale": "before"}
    base = emulated_step(case, claim)[tensor]
    result = rounding_sites(claim, case.format, tensor, group=2)
    listed = {site for together in result.values() for site in together}
    # Made exact with others of their kind, whether the recipe has them or not.
    unused = {"fa2": {"scaled"}, "eager": set()}.get(preset, {"ds_scaled"})
    for site in SITES:
        changed = emulated_step(case, {**claim, site: "e8m3"})[tensor]
        assert torch.equal(changed, base) == (site not in listed - unused), site


def test_audit_explains(tmp_path: Path) -> None:
    """`--explain`: a row for each kernel and call, sentences, and the same from the
    journal."""
    config = tmp_path / "c.yaml"
    config.write_text(
        "cases: [{name: one, heads: 2, seq_len: 130, head_dim: 32, causal: true}]"
    )
    command = [
        "audit",
        str(config),
        "--explain",
        "--format",
        "bfloat16",
        "--format",
        "float32",
    ]
    command += ["--kernel", "sdpa-flash", "--output", str(tmp_path / "out"), "--json"]
    texts = []
    for _ in range(2):
        done = invoked(*command)
        assert done.exit_code == 0, done.output
        texts.append(json.loads(done.stdout)["attributions"])
    assert texts[0] == texts[1]
    result = read(tmp_path / "out")
    by = {(a.kernel, a.format): a for a in result.attributions}  # type: ignore[union-attr]
    assert set(by) == {
        (k, f) for k in ("baseline", "sdpa-flash") for f in ("bfloat16", "float32")
    }
    assert by["sdpa-flash", "bfloat16"].explained_by == "fa2"
    assert by["sdpa-flash", "bfloat16"].recipe["block_kv"] == 512
    assert by["baseline", "bfloat16"].explained_by == "eager"
    assert by["sdpa-flash", "float32"].explained_by is None
    assert "arithmetic" in (by["sdpa-flash", "float32"].reason or "")
    assert len(result.summary.explanations) == 4  # type: ignore[union-attr]
    part = ["--heads", "1", "--rows", "40", "--overwrite", "--format", "bfloat16"]
    assert invoked(*command[:3], *part, *command[7:]).exit_code == 0
    some = read(tmp_path / "out").attributions  # type: ignore[union-attr]
    assert [(a.heads, a.explained_by) for a in some] == [((1,), "eager"), ((1,), "fa2")]


def errors_of(
    shares: Mapping[str, float],
) -> tuple[Tensor, Callable[[Mapping[str, Any]], Tensor]]:
    """Errors of size 1, and emulations that leave these shares of them; 0.9 where none is
    given."""
    errors = torch.randn(1, 1, 8, 4, generator=torch.Generator().manual_seed(0)).double()

    def emulate(claim: Mapping[str, Any]) -> Tensor:
        return errors * (1 - shares.get(str(claim["preset"]), 0.9))

    return errors, emulate


def test_residuals_and_sizes_are_of_what_they_say() -> None:
    """The best first; the kernel's error over the emulation's, which is 1 / (1 - 0.2) =
    1.25."""
    fmt, scale = format_named("bfloat16"), torch.ones(1, 1, 8)
    errors, emulate = errors_of({"eager": 0.2, "qiu2025": 0.23})
    result = attribute(errors, torch.zeros_like(errors), scale, fmt, None, emulate)
    assert (result.best.preset, result.next.preset) == ("eager", "qiu2025")
    assert (result.best.residual, result.next.residual) == pytest.approx((0.2, 0.23))
    assert result.best.ratio == pytest.approx(1.25)
    assert result.why_not == (
        "`eager` and `qiu2025` fit these data equally well (residuals 0.20 and 0.23)"
    )


def test_a_sites_share_is_what_its_roundings_add() -> None:
    """Without P's roundings a quarter of the squared error is left, without the output's
    three quarters: shares of 75 and 25 %, the largest first."""
    errors, _ = errors_of({})

    def emulate(claim: Mapping[str, Any]) -> Tensor:
        if claim["preset"] != "fa2":
            return torch.zeros_like(errors)
        left = 0.5 if claim.get("p") == "exact" else 1.0
        return errors * (0.75**0.5 if claim.get("out") == "exact" else left)

    result = attribute(errors, torch.zeros_like(errors), torch.ones(1, 1, 8),
                      format_named("bfloat16"), None, emulate)  # fmt: skip
    assert result.best.preset == "fa2"
    shares = {s.site: s.share for s in result.sites if s.share > 0.01}
    assert list(shares.items()) == [
        ("p", pytest.approx(0.75)),
        ("out", pytest.approx(0.25)),
    ]


@pytest.mark.parametrize(("size", "counts"), [(2.0**-127, False), (2.0**-126, True)])
def test_a_row_below_the_smallest_normal_number_is_not_compared(
    size: float, counts: bool
) -> None:
    """An error as large as such a row, which no emulation makes, outweighs those of no
    other."""
    errors, emulate = errors_of({"eager": 0.2})
    scale, output = torch.ones(1, 1, 8, dtype=torch.float64), errors.clone()
    scale[..., 0], output[..., 0, :] = size, size
    others = (torch.arange(8) > 0)[:, None]
    result = attribute(output, torch.zeros_like(errors), scale, format_named("bfloat16"), None,
                      lambda claim: emulate(claim) * others)  # fmt: skip
    assert result.best.residual == pytest.approx(0.2) or counts
    assert result.best.residual > 0.21 or not counts


def attributed(**changes: Any) -> AttributionRow:
    usual: dict[str, Any] = {
        "case": "c", "source": "s", "module": "m", "layer": 0, "call": 0, "seed": 0,
        "role": "kernel", "kernel": "k", "format": "bfloat16", "heads": (0,), "nearest": "fa2",
        "residual": 0.1, "next_preset": "eager", "next_residual": 0.7, "explained_by": "fa2",
    }  # fmt: skip
    return AttributionRow(**{**usual, **changes})


def test_pytorchs_own_choice_is_not_explained_twice_in_any_order() -> None:
    kernels = ("sdpa-default", "sdpa-flash", "sdpa-math")
    residuals = {"sdpa-default": 0.1, "sdpa-flash": 0.1, "sdpa-math": 0.2}
    for order in itertools.permutations(kernels):
        rows = [attributed(kernel=name, residual=residuals[name]) for name in order]
        names = [one.kernel for one in explanations(rows)]
        assert names == [name for name in order if name != "sdpa-default"]
    other = [attributed(kernel="sdpa-default"), attributed(kernel="a", residual=0.2)]
    assert [one.kernel for one in explanations(other)] == ["sdpa-default", "a"]


def test_calls_together_are_their_majority_and_their_medians() -> None:
    """Half of the calls are enough; those that were not compared do not count; the
    commonest variant, its median residual and shares, those under half a per cent left
    out."""

    def site(name: str, share: float) -> SiteShare:
        return SiteShare(site=name, rounds="x", share=share, residual=0.5)

    unknown = {"explained_by": None, "reason": "no", "residual": 0.9}
    bare = {"explained_by": None, "reason": "no error", "residual": None, "nearest": None}
    (one,) = explanations([attributed(), attributed(**unknown), attributed(**bare)])
    assert (one.is_identified, one.explained, one.calls) == (True, 1, 2)
    (one,) = explanations([attributed(), attributed(**unknown), attributed(**unknown)])
    assert (one.is_identified, one.explained, one.calls, one.residual) == (
        False,
        1,
        3,
        0.9,
    )
    calls = [attributed(residual=r, sites=(site("p", p), site("out", 1 - p), site("q", 0.004)))
             for r, p in ((0.1, 0.2), (0.2, 0.3), (0.4, 0.9))]  # fmt: skip
    calls += [attributed(nearest="eager", explained_by="eager", residual=0.3)]
    (one,) = explanations(calls)
    assert (one.nearest, one.residual, one.explained) == ("`fa2`", 0.2, 4)
    assert [(s.site, s.share) for s in one.sites] == [
        ("out", pytest.approx(0.7)),
        ("p", 0.3),
    ]
