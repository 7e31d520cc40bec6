"""The networks that are trained: they are transformers' models, and open as theirs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from numdev.formats import format_of, ulp
from numdev.studies.training import hugging_face_writing
from numdev.studies.training.config import DataConfig, ModelConfig, TrainConfig
from numdev.studies.training.networks import build_network, sdpa_attention
from numdev.studies.training.token_batches import load_tokens
from numdev.studies.training.variant_training import (
    move_weights,
    reround_at_random,
    ulps_and_share,
)
from numdev.yamlfile import read_yaml

LLAMA = ModelConfig(kind="llama", layers=2, width=32, heads=4, kv_heads=2, context=16)
GPT2 = ModelConfig(kind="gpt2", layers=2, width=32, heads=4, context=16)
CPU = torch.device("cpu")


def data_of(model: ModelConfig, tmp_path: Path, **changes: Any) -> Any:
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 20)
    return load_tokens(
        DataConfig(source="text", files=(str(text),), **changes), model, 4, CPU
    )


def trained(model: ModelConfig, tmp_path: Path, **changes: Any) -> tuple[Any, Any]:
    """A network whose every parameter differs from its initial value, and its data."""
    data = data_of(model, tmp_path, **changes)
    network = build_network(model, data.vocabulary, 0)
    created = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=created)
    return network, data


def furthest(network: Any, theirs: Any) -> float:
    """The largest difference of logits, relative to the largest logit."""
    ids = torch.randint(256, (2, 16), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        ours, other = network(ids), theirs(input_ids=ids).logits
    return float((ours - other).abs().max() / other.abs().max())


@pytest.mark.parametrize("model", [LLAMA, GPT2], ids=lambda m: m.kind)
def test_transformers_gives_a_saved_decoders_logits(
    model: ModelConfig, tmp_path: Path
) -> None:
    """In fp32, by transformers' own eager code; and with one weight off they are not the
    same."""
    network, data = trained(model, tmp_path)
    hugging_face_writing.write_checkpoint(
        network, model, data, path := tmp_path / "saved", {}
    )
    theirs = AutoModelForCausalLM.from_pretrained(
        path, attn_implementation="eager"
    ).eval()
    assert furthest(network, theirs) < 1e-5
    with torch.no_grad():
        next(iter(network.query_weights()))[0, 0, 0] += 0.1
    assert furthest(network, theirs) > 1e-5


@pytest.mark.parametrize("model", [LLAMA, GPT2], ids=lambda m: m.kind)
def test_weights_follow_from_the_seed_alone(model: ModelConfig) -> None:
    """Also those of the same seed after torch's own generator was used."""
    first = build_network(model, 64, 3).state_dict()
    torch.rand(5)
    again, other = (
        build_network(model, 64, 3).state_dict(),
        build_network(model, 64, 4).state_dict(),
    )
    assert all(torch.equal(x, again[name]) for name, x in first.items())
    matrices = [name for name, x in first.items() if x.ndim == 2]
    assert not any(torch.equal(first[name], other[name]) for name in matrices)


@pytest.mark.parametrize("model", [LLAMA, GPT2], ids=lambda m: m.kind)
def test_query_weights_are_what_makes_the_queries(
    model: ModelConfig, tmp_path: Path
) -> None:
    """Head by head: with those of one head zero, that head's queries are zero, and no
    other's."""
    data, queries = data_of(model, tmp_path), []

    def watched(q: Any, k: Any, v: Any) -> torch.Tensor:
        queries.append(q)
        return sdpa_attention(q, k, v)

    network = build_network(model, data.vocabulary, 0, watched)
    weights = list(network.query_weights())
    assert [list(w.shape) for w in weights] == [[4, 8, 32]] * 2
    with torch.no_grad():
        weights[1][2].zero_()
    network.loss(data.batch(0, 1))
    zero = [[bool((q[:, head] == 0).all()) for head in range(4)] for q in queries]
    assert zero == [[False] * 4, [False, False, True, False]]


def test_a_trained_tokenizer_goes_with_its_checkpoint(tmp_path: Path) -> None:
    """AutoTokenizer opens it, text survives it, and windows begin with its first
    token."""
    from transformers import AutoTokenizer

    network, data = trained(LLAMA, tmp_path, tokenizer="bpe", vocabulary=300)
    hugging_face_writing.write_checkpoint(network, LLAMA, data, tmp_path / "saved", {})
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "saved")
    ids = tokenizer("lazy fox")["input_ids"]
    assert ids[0] == 0
    assert tokenizer.decode(ids[1:]) == "lazy fox"
    batch = data.batch(0, 1)
    assert batch["inputs"][:, 0].tolist() == [0] * 4
    assert torch.equal(batch["inputs"][:, 1:], batch["targets"][:, :-1])
    assert data.vocabulary == len(tokenizer) <= 300


def test_batches_follow_from_seed_and_step_alone(tmp_path: Path) -> None:
    """In any order; targets are inputs one place on; another seed or step is another
    batch."""
    data = data_of(LLAMA, tmp_path)
    later, first = data.batch(0, 7), data.batch(0, 1)
    assert torch.equal(data.batch(0, 7)["inputs"], later["inputs"])
    assert torch.equal(first["inputs"][:, 1:], first["targets"][:, :-1])
    assert not torch.equal(first["inputs"], later["inputs"])
    assert not torch.equal(first["inputs"], data.batch(1, 1)["inputs"])


def test_every_bundled_configuration_is_valid() -> None:
    """configs/train/*.yaml validate, and the main experiment has ten million
    parameters."""
    folder = Path(__file__).parent.parent / "configs" / "train"
    result = {
        path.name: read_yaml(path, TrainConfig) for path in sorted(folder.glob("*.yaml"))
    }
    assert len(result) == 10
    with torch.device("meta"):
        network = build_network(result["bounds-gpt.yaml"].model, 256, None)
    assert sum(p.numel() for p in network.parameters()) >= 10_000_000


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_rerounding_errs_as_much_as_a_rounding(dtype: torch.dtype) -> None:
    """On 2^20 values in [1, 2), whose ulp is one: the mean square is ulp²/12 and the mean
    0, each within 5 standard deviations (a value moves with probability 1/12, and then by
    one ulp)."""
    n = 1 << 20
    created = torch.Generator().manual_seed(0)
    # No power of two, below which the neighbour is nearer.
    x = (1.25 + 0.5 * torch.rand(n, generator=created)).to(dtype)
    error = reround_at_random(x, created).double() - x.double()
    error /= ulp(x[:1], format_of(dtype)).double()
    assert set(error.unique().tolist()) == {-1.0, 0.0, 1.0}
    share = 1 / 12
    assert abs(error.square().mean() - share) < 5 * math.sqrt(share * (1 - share) / n)
    assert abs(error.mean()) < 5 * math.sqrt(share / n)


@pytest.mark.parametrize(
    "times", [1 / 64, 1 / 16, 1 / 4, 1 / 2, 2.0, 3.4, 4.0, 16.0, 64.0]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_dose_is_of_the_rms_it_claims(dtype: torch.dtype, times: float) -> None:
    """On 2^20 values of all magnitudes and signs, powers of two among them, in ulps of
    each: the mean square is times² ulp²/12, the mean along the value's sign 0 but for
    rounding across a power of two. A share p moves by k ulps, so within 5 standard
    deviations of means of n draws."""
    n, created = 1 << 20, torch.Generator().manual_seed(0)
    x = (torch.randn(n, generator=created) * torch.rand(n, generator=created).exp2()).to(
        dtype
    )
    x[:8] = torch.tensor([1.0, -2.0, 0.5, 4.0, 0.0, math.inf, -math.inf, math.nan])
    moved = reround_at_random(x, created, times)
    assert moved[4:7].tolist() == [0.0, math.inf, -math.inf]
    assert bool(moved[7].isnan())
    fine = x.isfinite() & (x != 0)
    error = (moved[fine].double() - x[fine].double()) * x[fine].sign()
    error /= ulp(x[fine], format_of(dtype)).double()
    k, p = ulps_and_share(times)
    assert k == math.ceil(times / math.sqrt(12))
    assert k * k * p == pytest.approx(times**2 / 12)
    mean_square = float(error.square().mean())
    # Rounding the k ulps across a power of two to twice the spacing moves an odd k by
    # one, either way: of the mean square at most (2 k + 1) in k / 128 of the values of
    # bfloat16.
    slack = p * (2 * k + 1) * k / 128 if dtype == torch.bfloat16 and k > 1 else 0.0
    spread = k * k * math.sqrt(p * (1 - p) / n)
    assert abs(mean_square - times**2 / 12) < 5 * spread + 0.05 * slack
    assert abs(float(error.mean())) < 5 * k * math.sqrt(p / n) + 0.01 * k


@pytest.mark.parametrize("times", [1.0, 4.0])
def test_a_rerounding_lets_gradients_pass(times: float) -> None:
    x = torch.linspace(1, 2, 9).requires_grad_()
    passed = torch.linspace(-1, 1, 9)
    reround_at_random(x, torch.Generator().manual_seed(0), times).backward(passed)
    assert torch.equal(x.grad, passed)


def test_what_would_overflow_stays() -> None:
    """A re-rounding makes no infinity, nor moves what is the largest."""
    x = torch.full((1000,), torch.finfo(torch.bfloat16).max, dtype=torch.bfloat16)
    moved = reround_at_random(x, torch.Generator().manual_seed(0), 64.0)
    assert bool(moved.isfinite().all())


def test_every_weight_moves_by_an_ulp() -> None:
    """To torch.nextafter's neighbour, some up and some down; zeros stay."""
    layer = torch.nn.Linear(40, 30)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(generator=torch.Generator().manual_seed(1))
        layer.bias[:7] = 0.0
    before = [p.detach().clone() for p in layer.parameters()]
    move_weights(layer, torch.Generator().manual_seed(0))
    for old, new in zip(before, layer.parameters(), strict=True):
        up = torch.nextafter(old, torch.full_like(old, math.inf))
        down = torch.nextafter(old, torch.full_like(old, -math.inf))
        zero = old == 0
        assert bool(((new == up) | (new == down) | zero).all())
        assert bool((new[zero] == 0).all())
        assert 0.2 < float((new == up)[~zero].float().mean()) < 0.8
