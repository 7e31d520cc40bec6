"""The exact log-probabilities of tokens, beside forward passes that are written out here
in fp64 without a cast; and the noise that a format's roundings predict."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from numdev.errors import UsageError
from numdev.exact.rounded_results import round_values
from numdev.exact.wide_tensors import Wide
from numdev.formats import format_named
from numdev.request_models import demo_checkpoint
from numdev.studies.effects.rounding_sites import RoundedWeights
from numdev.studies.logprobs.records import RecordedSequence
from numdev.studies.logprobs.truth import (
    ExactModel,
    ProgramRecipe,
    Support,
    _widen_rotary_tables,
    exact_values,
    kept_tokens,
    predicted_errors,
    segments_of,
    token_logprobs,
)
from tests.support import models

Weights = dict[str, Tensor]
TOKENS = 40


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


def rotated(x: Tensor, theta: float = 10000.0) -> Tensor:
    """x [heads, n, dim], halves rotated by position."""
    n, dim = x.shape[-2:]
    steps = torch.arange(0, dim, 2, dtype=torch.float64) / dim
    angles = torch.arange(n, dtype=torch.float64)[:, None] * theta**-steps
    cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
    half = torch.cat((-x[..., dim // 2 :], x[..., : dim // 2]), -1)
    return x * cos + half * sin


def attended(q: Tensor, k: Tensor, v: Tensor, scale: float, cap: float | None = None,
             window: int | None = None) -> Tensor:  # fmt: skip
    """Causal attention of [heads, n, dim], as [n, heads * dim]."""
    k, v = (x.repeat_interleave(len(q) // len(x), 0) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * scale
    if cap is not None:
        scores = cap * (scores / cap).tanh()
    n = scores.shape[-1]
    distance = torch.arange(n)[:, None] - torch.arange(n)
    hidden = (distance < 0) | (distance >= (window or n))
    p = scores.masked_fill(hidden, -math.inf).softmax(-1)
    return (p @ v).transpose(0, 1).reshape(n, -1)


def heads_of(x: Tensor, count: int) -> Tensor:
    return x.unflatten(-1, (count, -1)).transpose(0, 1)


def llama(w: Weights, c: dict, ids: Tensor) -> Tensor:
    x = w["model.embed_tokens.weight"][ids]
    for i in range(c["num_hidden_layers"]):
        a = f"model.layers.{i}."
        h = rms_norm(x, w[a + "input_layernorm.weight"], c["rms_norm_eps"])
        q, k, v = (h @ w[f"{a}self_attn.{name}_proj.weight"].T for name in "qkv")
        q, k, v = (heads_of(q, c["num_attention_heads"]),
                   *(heads_of(y, c["num_key_value_heads"]) for y in (k, v)))  # fmt: skip
        out = attended(rotated(q), rotated(k), v, q.shape[-1] ** -0.5)
        x = x + out @ w[a + "self_attn.o_proj.weight"].T
        h = rms_norm(x, w[a + "post_attention_layernorm.weight"], c["rms_norm_eps"])
        gate, up = (h @ w[f"{a}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        x = x + (F.silu(gate) * up) @ w[a + "mlp.down_proj.weight"].T
    x = rms_norm(x, w["model.norm.weight"], c["rms_norm_eps"])
    return x @ w["model.embed_tokens.weight"].T


def gpt2(w: Weights, c: dict, ids: Tensor) -> Tensor:
    w = {name.removeprefix("transformer."): x for name, x in w.items()}

    def norm(x: Tensor, name: str) -> Tensor:
        scale, shift = w[name + ".weight"], w[name + ".bias"]
        return F.layer_norm(x, x.shape[-1:], scale, shift, c["layer_norm_epsilon"])

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ w[name + ".weight"] + w[name + ".bias"]

    x = w["wte.weight"][ids] + w["wpe.weight"][: len(ids)]
    for i in range(c["n_layer"]):
        q, k, v = linear(norm(x, f"h.{i}.ln_1"), f"h.{i}.attn.c_attn").chunk(3, -1)
        q, k, v = (heads_of(y, c["n_head"]) for y in (q, k, v))
        x = x + linear(attended(q, k, v, q.shape[-1] ** -0.5), f"h.{i}.attn.c_proj")
        h = F.gelu(linear(norm(x, f"h.{i}.ln_2"), f"h.{i}.mlp.c_fc"), approximate="tanh")
        x = x + linear(h, f"h.{i}.mlp.c_proj")
    return norm(x, "ln_f") @ w["wte.weight"].T


def gemma2(w: Weights, c: dict, ids: Tensor) -> Tensor:
    def norm(x: Tensor, name: str) -> Tensor:
        return rms_norm(x, 1 + w[f"model.{name}.weight"], c["rms_norm_eps"])

    x = w["model.embed_tokens.weight"][ids] * c["hidden_size"] ** 0.5
    scale, cap = c["query_pre_attn_scalar"] ** -0.5, c["attn_logit_softcapping"]
    for i in range(c["num_hidden_layers"]):
        a = f"layers.{i}."
        h = norm(x, a + "input_layernorm")
        q, k, v = (h @ w[f"model.{a}self_attn.{name}_proj.weight"].T for name in "qkv")
        q, k, v = (heads_of(q, c["num_attention_heads"]),
                   *(heads_of(y, c["num_key_value_heads"]) for y in (k, v)))  # fmt: skip
        window = None if i % 2 else c["sliding_window"]
        out = attended(rotated(q), rotated(k), v, scale, cap, window)
        out = out @ w[f"model.{a}self_attn.o_proj.weight"].T
        x = x + norm(out, a + "post_attention_layernorm")
        h = norm(x, a + "pre_feedforward_layernorm")
        gate, up = (h @ w[f"model.{a}mlp.{n}_proj.weight"].T for n in ("gate", "up"))
        h = (F.gelu(gate, approximate="tanh") * up) @ w[
            f"model.{a}mlp.down_proj.weight"
        ].T
        x = x + norm(h, a + "post_feedforward_layernorm")
    cap = c["final_logit_softcapping"]
    return cap * (norm(x, "norm") @ w["model.embed_tokens.weight"].T / cap).tanh()


FORWARDS: dict[str, Callable[[Weights, dict, Tensor], Tensor]] = {
    "demo": llama, "gpt2": gpt2, "gemma2": gemma2,
}  # fmt: skip


def record(ids: np.ndarray, **fields: object) -> RecordedSequence:
    n = len(ids)
    return RecordedSequence(
        token_ids=ids, logprobs=np.full(n, -1.0), mask=np.ones(n, dtype=bool), **fields
    )  # fmt: skip


def tokens(vocabulary: int, n: int = TOKENS) -> np.ndarray:
    return np.random.default_rng(0).integers(3, vocabulary, n)


def path_of(name: str, tmp_path: Path) -> Path:
    return demo_checkpoint() if name == "demo" else models.saved(name, tmp_path)


@pytest.mark.parametrize("name", FORWARDS)
def test_the_truth_is_a_forward_pass_without_a_cast(name: str, tmp_path: Path) -> None:
    """To 1e-12: sums of some thousand fp64 products in another order."""
    path = path_of(name, tmp_path)
    config = json.loads((path / "config.json").read_text())
    weights = {n: x.double() for n, x in load_file(path / "model.safetensors").items()}
    ids = tokens(config["vocab_size"])
    logits = FORWARDS[name](weights, config, torch.from_numpy(ids))
    expected = logits[:-1].log_softmax(-1)[torch.arange(TOKENS - 1), ids[1:]]
    exact = exact_values(ExactModel(str(path), device="cpu"), record(ids), Support())
    assert math.isnan(exact.logprobs[0])
    assert np.abs(exact.logprobs[1:] - expected.numpy()).max() < 1e-12
    entropy = torch.distributions.Categorical(logits=logits[:-1]).entropy()
    assert np.abs(exact.entropy[1:] - entropy.numpy()).max() < 1e-12
    for temperature in (0.3, 0.7, 1.0, 3.0):
        scaled = (logits[:-1] / temperature).log_softmax(-1)
        wanted = scaled[torch.arange(TOKENS - 1), ids[1:]].numpy()
        assert np.abs(exact.at_temperature(temperature)[1:] - wanted).max() < 3e-6


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", FORWARDS)
def test_the_noise_of_bfloat16_is_predicted(
    name: str, attention: str, tmp_path: Path
) -> None:
    """Transformers in bfloat16 errs as much as predicted, by the attention it runs with:
    within a factor of 1.35 for 160 tokens, whose rms has a standard error of some 8 %."""
    if name == "gemma2" and attention == "sdpa":
        pytest.skip("transformers has no cap of scores in SDPA")
    model = ExactModel(str(path_of(name, tmp_path)), device="cpu")
    vocabulary = 2048 if name == "demo" else 96
    ids = [np.roll(tokens(vocabulary), i) for i in range(4)]
    used = model.source.load(torch.bfloat16)
    used.set_attn_implementation(attention)
    recipe = ProgramRecipe("bfloat16", attention)
    errors, real = [], []
    for each in map(record, ids):
        exact = exact_values(model, each, Support()).logprobs
        errors += [predicted_errors(model, each, exact, Support(), recipe)]
        with torch.no_grad():
            logits = used(input_ids=torch.from_numpy(each.token_ids)[None]).logits[0]
        real += [token_logprobs(logits.double(), each.token_ids, Support()) - exact]
    ratio = math.sqrt(np.nanmean(np.square(real)) / np.nanmean(np.square(errors)))
    assert 1 / 1.35 < ratio < 1.35


def test_a_pack_is_as_many_sequences() -> None:
    """The values of a pack are those of its sequences, however its record says where they
    begin; their first tokens have none."""
    model, ids = ExactModel("demo", device="cpu"), tokens(2048, 20)
    parts = [
        exact_values(model, record(x), Support()).logprobs for x in (ids[:8], ids[8:])
    ]
    expected = np.concatenate(parts)
    by_length = record(ids, sequence_lengths=np.array([8, 12]))
    by_position = record(ids, position_ids=np.r_[0:8, 0:12])
    for packed in (by_length, by_position):
        assert segments_of(packed) == [slice(0, 8), slice(8, 20)]
        values = exact_values(model, packed, Support()).logprobs
        assert np.isnan(values[[0, 8]]).all()
        assert np.nanmax(np.abs(values - expected)) < 1e-12
    whole = exact_values(model, record(ids), Support()).logprobs
    assert np.nanmax(np.abs(whole - expected)) > 1e-3


def test_filters_keep_what_samplers_keep() -> None:
    """A table that a person can check: probabilities 0.5, 0.3, 0.15, 0.05."""
    logprobs = torch.tensor([[0.15, 0.5, 0.05, 0.3]], dtype=torch.float64).log()
    table = [
        (Support(), [1, 1, 1, 1]),
        (Support(top_p=0.5), [0, 1, 0, 0]),
        (Support(top_p=0.7), [0, 1, 0, 1]),
        (Support(top_p=0.81), [1, 1, 0, 1]),
        (Support(top_k=1), [0, 1, 0, 0]),
        (Support(top_k=3, top_p=0.8), [0, 1, 0, 1]),  # of 0.95: 0.526, 0.316, 0.158
        (Support(min_p=0.2), [1, 1, 0, 1]),
        (Support(min_p=1.0), [0, 1, 0, 0]),
    ]
    for support, expected in table:
        assert kept_tokens(logprobs, support)[0].int().tolist() == expected, support


def test_a_support_is_renormalised() -> None:
    """Under top_p 0.7 of 0.5, 0.3, 0.15, 0.05 two tokens are left, 0.625 and 0.375; a
    token outside has minus infinity, and the first of a sequence nothing."""
    logits = torch.tensor([0.15, 0.5, 0.05, 0.3], dtype=torch.float64).log().expand(4, 4)
    values = token_logprobs(logits, np.array([0, 1, 3, 2]), Support(top_p=0.7))
    assert math.isnan(values[0])
    assert values[1:3] == pytest.approx(np.log([0.625, 0.375]), abs=1e-15)
    assert values[3] == -math.inf


def test_masses_are_those_of_the_supports_tried() -> None:
    """Of each support tried, and of the kept tokens that were recorded; a temperature
    that is not interpolated is refused."""
    model, ids = ExactModel("demo", device="cpu"), tokens(2048, 6)
    kept_ids = np.concatenate([[], *([i, 7] for i in ids[1:])]).astype(np.int64)
    tried = Support(top_k=5)
    sequence = record(
        ids, kept_ids=kept_ids, kept_offsets=np.array([0, 0, 2, 4, 6, 8, 10])
    )
    values = exact_values(model, sequence, Support(), (tried,))
    logprobs = model.exact_logits(ids)[:-1].log_softmax(-1)
    top = logprobs.topk(5).values.logsumexp(-1).numpy()
    assert values.log_mass[tried][1:] == pytest.approx(top, abs=1e-12)
    pairs = [logprobs[i, [int(ids[i + 1]), 7]].logsumexp(0).item() for i in range(5)]
    assert values.recorded_mass is not None
    assert values.recorded_mass[1:] == pytest.approx(pairs, abs=1e-12)
    for other in (0.1, 0.0):
        with pytest.raises(UsageError, match=r"expected 0\.25 to 4"):
            values.at_temperature(other)


def test_a_large_model_is_in_memory_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exact runs load nothing beside the source's model; rounded ones load one model in
    their format, whose weights are the source's."""
    model, loaded = ExactModel("demo", device="cpu"), []
    load = model.source.load
    monkeypatch.setattr(
        model.source, "load", lambda dtype: loaded.append(dtype) or load(dtype)
    )
    ids = tokens(model.vocabulary, 8)
    model.exact_logits(ids)
    assert loaded == []
    model.rounded_logits(ids, ProgramRecipe("bfloat16"))
    assert loaded == [torch.bfloat16]
    stored = {x.data_ptr() for x in model.source.model.parameters()}
    for subject in model._subjects.values():
        assert {x.exact.data_ptr() for x in subject.wide.parameters()} == stored


WEIGHTS = torch.tensor([[1 + 2.0**-8 + 2.0**-40, 1.0, -0.0], [math.inf, math.nan, 1e39]])


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float32", "float64"])
def test_weights_rounded_once_are_as_those_rounded_each_time(name: str) -> None:
    """With their signs of 0, for weights on the format's grid and off it; a weight that
    was written to is rounded again, and a view of one is no other weight."""
    fmt, weights = format_named(name), RoundedWeights()
    for values in (WEIGHTS.double() / 3, round_values(WEIGHTS.double(), fmt)):
        for factor in (1.0, 1.0, 1.7):
            values.mul_(factor)
            for x in (values, values, values.T):
                got, expected = (
                    y.numpy() for y in (weights.rounded(x, fmt), round_values(x, fmt))
                )
                np.testing.assert_array_equal(got, expected)
                assert (np.signbit(got) == np.signbit(expected)).all()


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_neox"])
def test_rotary_tables_move_to_the_models_device(name: str) -> None:
    """As plain fp64 numbers under the dtype that the model has them in, also to a device
    that they are not computed on."""
    model = models.build(name).to("meta")
    _widen_rotary_tables(model)
    tables = [x for n, x in model.named_buffers() if n.endswith("inv_freq")]
    assert tables
    for x in tables:
        assert isinstance(x, Wide)
        assert type(x.exact) is Tensor
        assert (x.exact.dtype, x.exact.device.type) == (torch.float64, "meta")
        assert (x.dtype, x.device.type) == (torch.float32, "meta")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["demo", "gpt2", "gemma2", "mixtral"])
def test_a_gpu_has_the_same_truth(name: str, tmp_path: Path) -> None:
    """But for the order of sums in fp64; its predicted noise is as large. Tables and
    weights that are computed on the CPU are moved as they are."""
    path = str(path_of(name, tmp_path))
    on = {device: ExactModel(path, device=device) for device in ("cpu", "cuda")}
    ids = tokens(on["cpu"].vocabulary)
    exact = {device: model.exact_logits(ids).cpu() for device, model in on.items()}
    torch.testing.assert_close(exact["cuda"], exact["cpu"], rtol=1e-10, atol=1e-10)
    recipe, s = ProgramRecipe("bfloat16"), record(ids)
    noise = {
        device: predicted_errors(
            model, s, exact_values(model, s, Support()).logprobs, Support(), recipe
        )
        for device, model in on.items()
    }
    rms = {device: float(np.sqrt(np.nanmean(e**2))) for device, e in noise.items()}
    assert 0.8 < rms["cuda"] / rms["cpu"] < 1.25
