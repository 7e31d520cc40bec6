"""Files that numdev does not read, told by name: whoever has one learns what it is, and
what to give in its place."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from numdev.errors import MeasurementError, UsageError

POINTER = b"version https://git-lfs.github.com/spec/"
LONGEST_POINTER = 1024  # bytes, by the specification of git-lfs
RESAVE = "save the model with transformers' save_pretrained"
# By the pattern of a file that only such a directory has: what it is, and what to do.
DIRECTORIES: Mapping[str, tuple[str, str]] = {
    "adapter_config.json": (
        "a LoRA adapter (PEFT), which is no model by itself",
        "merge it into its base model (merge_and_unload) and save that",
    ),
    "open_clip_config.json": (
        "an open_clip model",
        ("convert it to transformers' CLIPModel"),
    ),
    "params.json": ("a model in Meta's own format", "convert it to transformers' format"),
    "consolidated*.pth": (
        "a model in Meta's own format",
        ("convert it to transformers' format"),
    ),
    "consolidated*.safetensors": (
        "a model in Mistral's own format",
        "convert it to transformers' format",
    ),
    "*.gguf": ("a GGUF model", "audit the checkpoint it was made from"),
    "*.onnx": ("an ONNX model", "audit the checkpoint it was made from"),
    "saved_model.pb": ("a TensorFlow model", RESAVE),
    "tf_model.h5": ("a TensorFlow model", RESAVE),
    "flax_model.msgpack": ("a Flax model", RESAVE),
}
FILES: Mapping[str, str] = {
    ".gguf": "a GGUF file",
    ".onnx": "an ONNX model",
    ".h5": "a TensorFlow or Keras file",
    ".msgpack": "a Flax file",
    ".npz": "a NumPy archive",
    ".ckpt": ("a Lightning or TensorFlow file"),
    ".pkl": "a Python pickle",
    ".tar": "an archive",
    ".zip": "an archive",
    ".gz": "an archive",
}


def refuse_directory(path: Path) -> None:
    """Raises UsageError for a directory of a known format that numdev does not read, and
    says what to do; returns for all others."""
    for pattern, (what, hint) in DIRECTORIES.items():
        if any(path.glob(pattern)):
            raise UsageError(
                f"{path}: expected a Hugging Face model, got {what}", hint=hint
            )


def refuse_config(path: Path, config: Mapping[str, object]) -> None:
    """Raises MeasurementError for a config.json without transformers' model_type, and
    says whose it may be. `config`: its content."""
    if config.get("model_type"):
        return
    if "pretrained_cfg" in config or "num_features" in config:
        what, hint = (
            "a timm model's",
            "audit it as a state dict: --model package.module:factory",
        )
    elif "model_cfg" in config:
        what, hint = (
            DIRECTORIES["open_clip_config.json"][0] + "'s",
            "convert it to CLIPModel",
        )
    else:
        what, hint = "one without model_type", 'name the model\'s type in "model_type"'
    raise MeasurementError(
        f"{path}: expected a config of transformers, got {what}", hint=hint
    )


def refuse_pointer(path: Path) -> None:
    """Raises MeasurementError for the small text file that git-lfs leaves where the file
    itself was not fetched. Returns for any other file, where there is no file, and where
    it cannot be opened: whoever reads it says so."""
    start = b""
    with suppress(OSError):
        if path.is_file() and path.stat().st_size <= LONGEST_POINTER:
            with path.open("rb") as file:
                start = file.read(len(POINTER))
    if start == POINTER:
        what = f"{path}: is a pointer of git-lfs, not the file it stands for"
        raise MeasurementError(what, hint="fetch it with `git lfs pull`")


def file_format(path: Path) -> str:
    """Returns in words what a file of this name is, by its suffix in any case: `a GGUF
    file`, or for an unknown one `a file *.xyz`. Empty for a name without a suffix."""
    return FILES.get(path.suffix.lower(), f"a file *{path.suffix}" if path.suffix else "")
