"""A byte-level BPE tokenizer, trained on the run's own text.

Text is encoded by the tokenizer as it was saved and loaded again, so that the network sees exactly
the ids that a user of its checkpoint will get.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from numdev.errors import MeasurementError

# Spelled so that no text contains them by chance, as "<s>" might be.
BOS, EOS = "<|bos|>", "<|eos|>"
BOS_ID, EOS_ID = 0, 1
AS_LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}


@dataclass(frozen=True, kw_only=True, eq=False)
class Tokenizer:
    made: Any
    """As it was trained, and is saved."""
    loaded: Any
    """As it is opened again; both transformers' own."""
    size: int

    @classmethod
    def trained(cls, texts: list[str], vocabulary: int, context: int) -> Tokenizer:
        """Trained on the texts, saved and loaded. Raises MeasurementError where what was loaded is
        another tokenizer than was trained."""
        from transformers import AutoTokenizer

        made = _train(texts, vocabulary, context)
        with tempfile.TemporaryDirectory() as folder:
            # AutoTokenizer chooses a class by the files it finds; for a Llama configuration some
            # choices rebuild the tokenizer with SentencePiece's rules: ids, but of another text.
            (Path(folder) / "config.json").write_text(json.dumps(AS_LLAMA))
            made.save_pretrained(folder)
            loaded = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        text = texts[0]
        ids = loaded(text, verbose=False)["input_ids"]
        same = ids == made(text, verbose=False)["input_ids"]
        if ids[:1] != [BOS_ID] or not same or loaded.decode(ids[1:]) != text:
            raise MeasurementError("the saved tokenizer does not load as it was trained")
        return cls(made=made, loaded=loaded, size=len(loaded))

    def encode(self, texts: list[str]) -> Tensor:
        """All texts as one row of ids, each closed by EOS; int32."""
        # verbose=False: texts longer than the context are meant here, not a slip worth a warning.
        rows = self.loaded(texts, add_special_tokens=False, verbose=False)["input_ids"]
        ids = [token for row in rows for token in (*row, EOS_ID)]
        return torch.tensor(ids, dtype=torch.int32)

    def save(self, directory: Path) -> None:
        self.made.save_pretrained(directory)


def _train(texts: list[str], vocabulary: int, context: int) -> Any:
    from tokenizers import Tokenizer as Trained
    from tokenizers import decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Trained(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, BOS_ID)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=bpe,
        bos_token=BOS,
        eos_token=EOS,
        model_max_length=context,
        clean_up_tokenization_spaces=False,
    )
