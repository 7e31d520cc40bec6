"""Train the demo checkpoint that ships in ``numdev/data/demo``.

A Llama-architecture language model of about one million parameters, trained on the source of the
Python standard library that runs this script. It exists so that ``numdev audit demo`` measures
attention kernels on the queries, keys and values of a model that has learned something, with
nothing to download. It is not meant to write good Python.

What happens, in order: collect the library's files, hold out about 2 % of them, train a byte-level
BPE tokenizer on the rest, save it, encode everything through the *saved* tokenizer (so the model
sees exactly the ids a user of the checkpoint will get), train, and write

    config.json, generation_config.json, model.safetensors    the model, float32
    tokenizer.json, tokenizer_config.json                     the tokenizer
    training.json                                             how the training went

The prompt beside them (prompt.txt) is written by hand: source code of numdev's own, which the model
has never seen.

Every training window begins with the BOS token, as every prompt will. The random numbers come from
--seed; on one CPU two runs of the same number of steps agree, on a GPU they agree approximately.
When --steps would take longer than --max-seconds, the number of steps is cut before the learning
rate has left its warm-up, so that the schedule always ends properly.

The committed checkpoint was made with (Python 3.12, torch 2.11, transformers 5.17, one H200)

    python scripts/train_demo.py --output numdev/data/demo

and a quick one, a minute on two CPU cores, comes from

    python scripts/train_demo.py --output /tmp/demo --batch 8 --seq-len 128 --max-seconds 60
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import random
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path

import tokenizers
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor
from torch.nn import functional as F
from transformers import (
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

# Third-party code, tests, programs bundled with Python, and tables written by other programs.
EXCLUDED_FOLDERS = {
    *("site-packages", "dist-packages", "test", "tests", "idle_test"),
    *("idlelib", "lib2to3", "turtledemo", "encodings", "pydoc_data"),
}
VOCABULARY = 2048
CONTEXT = 512
# Spelled so that no source file contains them by chance, as "<s>" might be.
BOS, EOS = "<|bos|>", "<|eos|>"
BOS_ID, EOS_ID = 0, 1
WARM_UP_STEPS = 100
TIMED_STEPS = range(20, 50)  # the first steps pay for allocation and library start-up
REPORTS = 20  # printed and recorded during a run
VALIDATION_WINDOWS, VALIDATION_BATCH = 128, 32


@dataclass(frozen=True)
class Source:
    """One file of the standard library: its path below the library's root, and its text."""

    name: str
    text: str


def collect_sources() -> list[Source]:
    """The library's own .py files in UTF-8, sorted by path."""
    root = Path(sysconfig.get_path("stdlib"))
    sources = []
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        # _sysconfigdata_*.py records the machine that built this Python.
        if EXCLUDED_FOLDERS.intersection(name.parts) or name.name.startswith("_sysconfigdata"):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if text.strip():
            sources.append(Source(name.as_posix(), text))
    return sources


def split(sources: list[Source], seed: int) -> tuple[list[Source], list[Source]]:
    """Whole files for training and for validation, about 49 to 1."""
    held_out = set(random.Random(seed).sample(range(len(sources)), max(1, len(sources) // 50)))
    training = [s for i, s in enumerate(sources) if i not in held_out]
    return training, [s for i, s in enumerate(sources) if i in held_out]


def train_tokenizer(sources: list[Source]) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer: every string has ids, and decoding gives the string back."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, BOS_ID)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator((s.text for s in sources), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=BOS,
        eos_token=EOS,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )


def save_and_load(
    trained: PreTrainedTokenizerFast, output: Path, text: str
) -> PreTrainedTokenizerBase:
    """The tokenizer as users will load it, proved on text to be the one that was trained.

    AutoTokenizer chooses a class by the files it finds, and for a Llama configuration some choices
    rebuild the tokenizer with SentencePiece's rules: plausible ids, but of another text.
    """
    trained.save_pretrained(output)
    loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(output, local_files_only=True)
    ids = loaded(text, verbose=False)["input_ids"]
    same = ids == trained(text, verbose=False)["input_ids"]
    if len(loaded) != VOCABULARY or ids[0] != BOS_ID or not same or loaded.decode(ids[1:]) != text:
        raise SystemExit("the saved tokenizer does not load as it was trained")
    return loaded


def encode(tokenizer: PreTrainedTokenizerBase, sources: list[Source]) -> Tensor:
    """All files as one row of ids, each closed by EOS; int64, on the CPU."""
    texts = [s.text for s in sources]
    # verbose=False: files longer than the context are meant here, not a slip worth a warning.
    rows = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    return torch.tensor([token for row in rows for token in (*row, EOS_ID)])


def make_model() -> LlamaForCausalLM:
    """The untrained model, its weights drawn from torch's global generator."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config)


def loss_of(model: LlamaForCausalLM, targets: Tensor) -> Tensor:
    """Mean nats per token of predicting targets (batch, seq), each row from BOS onwards."""
    bos = torch.full_like(targets[:, :1], BOS_ID)
    inputs = torch.cat([bos, targets[:, :-1]], dim=1)
    with torch.autocast("cuda", torch.bfloat16, enabled=targets.is_cuda):
        logits = model(input_ids=inputs, use_cache=False).logits
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


@torch.no_grad()
def validation_loss(model: LlamaForCausalLM, tokens: Tensor, seq_len: int) -> float:
    """Mean nats per token over at most VALIDATION_WINDOWS windows, spread over the held-out tokens.

    At a seq_len of 512 those are all the windows there are.
    """
    windows = tokens[: len(tokens) // seq_len * seq_len].view(-1, seq_len)
    windows = windows[:: math.ceil(len(windows) / VALIDATION_WINDOWS)]
    batches = torch.split(windows, VALIDATION_BATCH)
    return sum(loss_of(model, batch).item() * len(batch) for batch in batches) / len(windows)


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Linear warm-up, then half a cosine down to a hundredth of the peak at the last step."""
    if step < WARM_UP_STEPS:
        return peak * (step + 1) / WARM_UP_STEPS
    done = (step - WARM_UP_STEPS) / max(1, steps - 1 - WARM_UP_STEPS)
    return peak * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * done)))


def make_optimizer(model: LlamaForCausalLM) -> torch.optim.AdamW:
    """AdamW with weight decay on the matrices and none on the norms' gains."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)


@dataclass
class Run:
    """What the training loop hands back: the steps it took and the losses it printed."""

    steps: int
    history: list[dict[str, float]]


def seconds_now(device: torch.device) -> float:
    """The clock, read once the device has finished what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.monotonic()


def train(
    model: LlamaForCausalLM,
    train_tokens: Tensor,
    val_tokens: Tensor,
    val_tokens_per_byte: float,
    args: argparse.Namespace,
) -> Run:
    """Train in place on windows drawn at random from train_tokens."""
    device = train_tokens.device
    generator = torch.Generator(device).manual_seed(args.seed)
    offsets = torch.arange(args.seq_len, device=device)
    optimizer = make_optimizer(model)
    run = Run(steps=args.steps, history=[])
    began = timing_began = seconds_now(device)
    step = 0
    while step < run.steps:
        if step == TIMED_STEPS.start:
            timing_began = seconds_now(device)
        if step == TIMED_STEPS.stop:
            now = seconds_now(device)
            validation_loss(model, val_tokens, args.seq_len)
            reporting = REPORTS * (seconds_now(device) - now)
            left = args.max_seconds - (now - began) - reporting
            fit = step + int(left * len(TIMED_STEPS) / (now - timing_began))
            run.steps = min(run.steps, max(WARM_UP_STEPS + 1, fit))
            print(f"{len(TIMED_STEPS) / (now - timing_began):.1f} steps/s, {run.steps} steps")
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, run.steps, args.lr)
        shape = (args.batch, 1)
        high = len(train_tokens) - args.seq_len + 1
        starts = torch.randint(high, shape, generator=generator, device=device)
        loss = loss_of(model, train_tokens[starts + offsets])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        if step % max(1, run.steps // REPORTS) == 0 or step == run.steps:
            val = validation_loss(model, val_tokens, args.seq_len)
            bits = val * val_tokens_per_byte / math.log(2)
            row = {"step": step, "train": loss.item(), "val": val, "val_bits_per_byte": bits}
            run.history.append({k: round(v, 4) for k, v in row.items()})
            print(
                f"step {step:5d}  train {row['train']:.3f}  val {val:.3f} nats/token"
                f"  {bits:.3f} bits/byte  {seconds_now(device) - began:.0f} s",
                flush=True,
            )
    return run


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train numdev's demo checkpoint.")
    parser.add_argument("--output", type=Path, default=Path("numdev/data/demo"))
    parser.add_argument("--steps", type=int, default=1000, help="at most this many")
    parser.add_argument("--batch", type=int, default=128, help="windows per step")
    parser.add_argument("--seq-len", type=int, default=CONTEXT, help="tokens per window")
    parser.add_argument("--lr", type=float, default=3e-3, help="the peak")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--max-seconds", type=float, default=90.0, help="for the training loop")
    args = parser.parse_args()
    if not 1 <= args.seq_len <= CONTEXT:
        parser.error(f"--seq-len must be between 1 and {CONTEXT}")
    return args


def main() -> None:
    args = parse_arguments()
    device = torch.device(args.device)
    args.output.mkdir(parents=True, exist_ok=True)

    training, held_out = split(collect_sources(), args.seed)

    torch.manual_seed(args.seed)
    model = make_model()
    # The configuration too, because AutoTokenizer reads it when it picks the tokenizer's class.
    model.config.save_pretrained(args.output)
    tokenizer = save_and_load(train_tokenizer(training), args.output, held_out[0].text)
    train_tokens = encode(tokenizer, training).to(device)
    val_tokens = encode(tokenizer, held_out).to(device)
    train_bytes, val_bytes = (sum(len(s.text.encode()) for s in x) for x in (training, held_out))
    parameters = sum(p.numel() for p in model.parameters())
    print(
        f"{len(training)} files, {train_bytes} bytes, {len(train_tokens)} tokens for training; "
        f"{len(held_out)} files, {val_bytes} bytes, {len(val_tokens)} tokens held out; "
        f"{parameters} parameters"
    )

    model.to(device).train()
    run = train(model, train_tokens, val_tokens, len(val_tokens) / val_bytes, args)
    model.cpu().eval().save_pretrained(args.output)
    (args.output / "model.safetensors").chmod(0o644)  # written readable by its owner alone

    record = {
        "steps": run.steps,
        "batch": args.batch,
        "seq_len": args.seq_len,
        "peak_lr": args.lr,
        "seed": args.seed,
        "tokens_seen": run.steps * args.batch * args.seq_len,
        "parameters": parameters,
        "train_files": len(training),
        "train_bytes": train_bytes,
        "train_tokens": len(train_tokens),
        "held_out_files": [s.name for s in held_out],
        "held_out_bytes": val_bytes,
        "held_out_tokens": len(val_tokens),
        "losses_nats_per_token": run.history,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "arithmetic": "bfloat16 autocast" if device.type == "cuda" else "float32",
        "source": f"CPython {platform.python_version()} standard library (PSF licence)",
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "tokenizers": tokenizers.__version__,
        },
    }
    text = json.dumps(record, indent=2) + "\n"
    (args.output / "training.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
