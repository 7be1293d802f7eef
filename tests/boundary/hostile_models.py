"""Folders of Hugging Face that others have made: a good one, and what is wrong with each other."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import safe_open
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


def good_folder(folder: Path) -> Path:
    """Write a model of transformers with a tokenizer of bytes."""
    config = LlamaConfig(
        vocab_size=257,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate([*alphabet, "</s>"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")
    fast.save_pretrained(folder)
    return folder


class _Touches:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.path}",)


def _pickled(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(_Touches(folder.parent / "RAN")))


def _code(folder: Path) -> None:
    (folder / "evil.py").write_text(f"open({str(folder.parent / 'RAN')!r}, 'w')\n")


def config(**values: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))
        _code(folder)

    return edit


def file(name: str, content: bytes | str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        _code(folder)

    return write


def fifo(name: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return make


def link(name: str, target: str = "") -> Callable[[Path], None]:
    """Make a file a link; without a target to a copy of it that lies outside of the folder."""

    def make(folder: Path) -> None:
        outside = folder.parent / f"outside-{name}"
        shutil.move(folder / name, outside)
        (folder / name).symlink_to(target or outside)

    return make


def index(name: str, *, metadata: bool = True) -> Callable[[Path], None]:
    """Name a file of good weights in an index."""

    def make(folder: Path) -> None:
        target = Path(os.path.join(folder, name.format(folder=folder)))
        shutil.move(folder / WEIGHTS, target)
        with safe_open(target, "pt") as opened:
            weights = {key: name.format(folder=folder) for key in opened.keys()}
        content = {"metadata": {"total_size": 1}} if metadata else {}
        (folder / INDEX).write_text(json.dumps(content | {"weight_map": weights}))

    return make


def header(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        content = (folder / WEIGHTS).read_bytes()
        end = 8 + struct.unpack("<Q", content[:8])[0]
        table = json.loads(content[8:end])
        change(table)
        text = json.dumps(table).encode()
        (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(text)) + text + content[end:])

    return make


def _sparse(folder: Path) -> None:
    with open(folder / WEIGHTS, "r+b") as opened:
        opened.truncate(100 << 30)


LONG = b'{"a":"' + b"x" * 90_000_000 + b'"}'
NORM = "model.norm.weight"
REMOTE = {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"}
SMALL = {"num_hidden_layers": 1, "hidden_size": 64}

MODELS: dict[str, tuple[Callable[[Path], None], str]] = {
    "weights are a pickle": (_pickled, ""),
    "the index leads out": (index("../outside.safetensors"), "names '../outside.safetensors'"),
    "the index is absolute": (index("{folder}/../outside.safetensors"), "no file of this folder"),
    "the index names no metadata": (index("a.safetensors", metadata=False), "no objects metadata"),
    "the index is deep": (file(INDEX, '{"a":' * 100_000), "nested too deeply"),
    "weights are a FIFO": (fifo(WEIGHTS), "it is a FIFO"),
    "weights are a device": (link(WEIGHTS, "/dev/zero"), "leads out of the folder"),
    "weights are outside": (link(WEIGHTS), "leads out of the folder"),
    "weights named outside": (config(transformers_weights="../x.safetensors"), ""),
    "config.json is a FIFO": (fifo("config.json"), ""),
    "config.json is a device": (link("config.json", "/dev/zero"), ""),
    "config.json is outside": (link("config.json"), "leads out of the folder"),
    "config.json is deep": (file("config.json", '{"a":' * 100_000), "nested too deeply"),
    "config.json is a list": (file("config.json", "[]"), "is not a JSON object"),
    "the tokenizer is outside": (link("tokenizer.json"), "leads out of the folder"),
    "a template is outside": (
        lambda folder: (folder / "chat_template.jinja").symlink_to("/etc/hostname"),
        "leads out of the folder",
    ),
    "the header has 2^60 bytes": (file(WEIGHTS, struct.pack("<Q", 2**60) + b"{}"), ""),
    "the header has 90 MB": (
        file(WEIGHTS, struct.pack("<Q", len(LONG)) + LONG),
        "its header has 90,000,008 bytes",
    ),
    "tensors overlap": (header(lambda t: t[NORM].update(data_offsets=[0, 10**15])), ""),
    "a shape is negative": (header(lambda t: t[NORM].update(shape=[-1, -32])), ""),
    "weights have 100 GiB": (_sparse, ""),
    "a class of its own": (config(auto_map=REMOTE, model_type="evil"), ""),
    "a known class of its own": (config(auto_map=REMOTE), ""),
    "a tokenizer of its own": (
        file(
            "tokenizer_config.json",
            json.dumps(
                {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.T", None]}}
            ),
        ),
        "",
    ),
    "the tokenizer is deep": (file("tokenizer.json", "[" * 2_000_000), ""),
    "10^9 layers": (config(num_hidden_layers=10**9), "no model has more than 1024"),
    "10^5 layers": (config(num_hidden_layers=10**5), "no model has more than 1024"),
    "10^9 tokens": (config(vocab_size=10**9), "no model has more than 16777216"),
    "10^9 labels": (config(num_labels=10**9), "no model has more than"),
    "2^31 wide": (config(hidden_size=2**31), "no model has more than 1048576"),
    "2^31 wide inside": (config(intermediate_size=2**31), "no model has more than 1048576"),
    "2^31 wide heads": (config(head_dim=2**31), "no model has more than 1048576"),
    "2^20 wide": (config(hidden_size=2**20), ""),
    "a negative vocabulary": (config(vocab_size=-5), "vocab_size = -5 must be at least 1"),
    "no layers": (config(num_hidden_layers=-1), "num_hidden_layers = -1 must be at least 1"),
    "no width inside": (config(intermediate_size=0), "intermediate_size = 0 must be at least 1"),
    "outputs without names": (config(return_dict=False), "return_dict = False"),
    "no heads": (config(num_attention_heads=0), ""),
    "10^15 positions": (config(max_position_embeddings=10**15), ""),
    "strange positions": (
        config(rope_parameters={"rope_type": "\x1b[31mevil", "rope_theta": "x"}),
        "",
    ),
    "escape sequences": (config(model_type="\x1b]0;x\x07llama", architectures=["\x1b[31mX"]), ""),
    "code as dtype": (config(dtype="__import__('os').system('touch RAN')"), ""),
    "downloaded attention": (
        config(_attn_implementation="evil/kernel", attn_implementation="kernels-community/evil"),
        "attn_implementation = ",
    ),
    "attention of parts": (
        config(attn_implementation={"": "evil/kernel"}),
        "attn_implementation =",
    ),
    "attention of a package": (
        config(attn_implementation="flash_attention_2"),
        "flash_attention_2",
    ),
    "quantized": (config(quantization_config={"quant_method": "evil"}), "is quantized (evil)"),
    "a generation of its own": (
        file(
            "generation_config.json",
            json.dumps({"max_new_tokens": 10**12, "custom_generate": "evil/x"}),
        ),
        "",
    ),
    "an adapter": (
        file("adapter_config.json", json.dumps({"base_model_name_or_path": "../../x"})),
        "",
    ),
    "another shape": (config(**SMALL), ""),
}
"""What is wrong → what makes it so, and the words of the refusal that all commands print; "": some
commands do not meet it, or refuse it in other words."""
