"""What lies where a Hugging Face model is to be loaded from: what cannot be is refused first."""

from __future__ import annotations

import os
from pathlib import Path

from offloadtrain.engine import ModelError


def check_files(name: str, subfolder: str = "") -> None:
    """Look at a folder; of a name on the Hub nothing is known here.

    Raises:
        ModelError: it is not there, or holds no model that can be streamed.
    """
    folder = Path(name) / subfolder
    if not Path(name).is_dir():
        # A name on the Hub is NAME or OWNER/NAME.
        is_path = os.path.isabs(name) or name.startswith((".", "~")) or name.count("/") > 1
        if is_path:
            raise ModelError(
                f"'{name}': there is no such folder, and no name on the Hub is like it"
            )
        return
    if (folder / "adapter_config.json").exists():
        raise ModelError(
            f"'{folder}' holds PEFT adapters: load their base model with transformers, then "
            "PeftModel.from_pretrained(base, folder, is_trainable=True), and ot.offload the result"
        )
    if not (folder / "config.json").exists():
        raise ModelError(f"'{folder}' has no config.json{_below(folder)}")
    _check_weights(folder)


def _below(folder: Path) -> str:
    """Name the folders in it that have one: a repository may hold several models."""
    folders = sorted(path.parent.name for path in folder.glob("*/config.json"))
    if not folders:
        return ": it is no folder of a model of transformers"
    return f"; these folders in it have: {', '.join(folders)}"


def _check_weights(folder: Path) -> None:
    if any(folder.glob("*.safetensors")) or any(folder.glob("*.safetensors.index*.json")):
        return
    if pickled := sorted(path.name for path in folder.glob("*.bin")):
        raise ModelError(
            f"'{folder}' has its weights in pickles ({pickled[0]}), which can run code when read, "
            "and must be read whole. Write safetensors once: "
            "transformers.AutoModel.from_pretrained(folder).save_pretrained(new_folder), with the "
            "model's own class instead of AutoModel"
        )
    quantized = any(folder.glob("*.gguf"))
    raise ModelError(
        f"'{folder}' has no *.safetensors"
        + (
            ", only GGUF: load it with transformers (gguf_file=…), which widens it, then ot.offload"
            if quantized
            else ": its weights were not downloaded"
        )
    )
