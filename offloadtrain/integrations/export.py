"""Writes a Hugging Face folder from a model's weights, one shard at a time.

Names and shapes are planned on the meta device first: transformers' `revert_weight_conversion`
gives the names of the checkpoint's tensors, and the model's tensors that each one needs.
"""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from offloadtrain.engine import ModelError
from offloadtrain.hardware.atomic_io import rename_folder, sync_folder
from offloadtrain.integrations.deferred import fixed_dtypes

_log = logging.getLogger(__name__)

Named = Iterator[tuple[str, Tensor]]

_TOKENIZER_FILES = (
    "*token*.json",
    "vocab*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "*chat_template*",
    "*processor*.json",
    "*.spm",
)
"""Patterns of files from which tokenizers, image and feature processors are loaded."""


CHECKSUMS = "SHA256SUMS"
"""Name of the checksum file, in the format of `sha256sum -c`."""


def require_new(folder: Path) -> None:
    """Raise FileExistsError if `folder` exists and is not empty."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(
            f"'{folder}' exists and is not empty: name a new folder, or remove it"
        )


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder in the same parent, which is renamed to `folder` at the end, with
    the checksums of its files.

    Raises:
        FileExistsError: `folder` exists and is not empty; it stays unchanged.
    """
    require_new(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        yield temporary
        # Same permissions as the user's other files, and durable.
        mask = os.umask(0)
        os.umask(mask)
        temporary.chmod(0o777 & ~mask)
        write_checksums(temporary)
        for path in temporary.rglob("*"):
            if path.is_file():
                with path.open("rb+") as file:
                    os.fsync(file.fileno())
        sync_folder(temporary)
        rename_folder(temporary, folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def write_checksums(folder: Path) -> None:
    """Write the checksum file for `sha256sum -c`, with a line for each other file of the folder."""
    lines = [
        f"{sha256(path)}  {path.relative_to(folder)}\n"
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    ]
    (folder / CHECKSUMS).write_text("".join(lines))


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def model_weights(
    model: Any, weights: Named, buffers: Mapping[str, Tensor], dtype: torch.dtype
) -> Named:
    """Yield the tensors of a checkpoint by the model's names: parameters in `dtype`, except
    integers and those that the model stores in fp32; tied ones once; persistent buffers unchanged.

    Args:
        weights: parameters in any dtype, by their first names.
        buffers: all buffers of the model, by name.
    """
    names = _saved_names(model)
    dtypes = fixed_dtypes(names.values(), model._get_dtype_plan(dtype))
    for first, value in weights:
        if (name := names.get(first)) is not None:
            yield name, value.to(dtypes.get(name, dtype)) if value.is_floating_point() else value
    for name, _ in model.named_buffers():
        path, _, key = name.rpartition(".")
        transient = key in model.get_submodule(path)._non_persistent_buffers_set
        if not transient and name not in _ignored(model):
            yield name, buffers[name].detach()


def _saved_names(model: Any) -> dict[str, str]:
    """Return first name of a parameter → name under which it is saved, for all saved ones."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(param, []).append(name)
    tied = getattr(model, "all_tied_weights_keys", {})
    chosen = {of[0]: next((n for n in of if n not in tied), of[0]) for of in names.values()}
    return {first: name for first, name in chosen.items() if name not in _ignored(model)}


def _ignored(model: Any) -> set[str]:
    return set(getattr(model, "_keys_to_ignore_on_save", None) or ())


@dataclass(frozen=True, slots=True)
class _Reversion:
    """Converts the model's tensors to those of a published checkpoint.

    Attributes:
        renamed: name in the model → name in the checkpoint, for tensors that are only renamed.
        together: name in the model → names of all tensors converted together with it.
    """

    model: Any
    renamed: dict[str, str]
    together: dict[str, tuple[str, ...]]

    @classmethod
    def of(cls, model: Any, shapes: Mapping[str, Tensor]) -> _Reversion:
        """Plan the conversion; `shapes`: name in the model → meta tensor."""
        expected = _revert(model, shapes)
        name_of = {id(x): name for name, x in shapes.items()}
        renamed = {name_of[id(x)]: name for name, x in expected.items() if id(x) in name_of}
        rest = [name for name in shapes if name not in renamed]
        groups = _groups(model, rest)
        made = [_revert(model, {name: shapes[name] for name in group}) for group in groups]
        reverted = {name: x.shape for tensors in made for name, x in tensors.items()}
        if reverted != {n: x.shape for n, x in expected.items() if id(x) not in name_of}:
            groups = [tuple(rest)]  # a conversion needs tensors that it does not name
        together = {name: group for group in groups for name in group}
        return cls(model, renamed, together)

    def __call__(self, weights: Named) -> Named:
        """Yield the checkpoint's tensors; buffers tensors until their group is complete."""
        waiting: dict[tuple[str, ...], dict[str, Tensor]] = {}
        for name, value in weights:
            if name in self.renamed:
                yield self.renamed[name], value
                continue
            group = self.together[name]
            members = waiting.setdefault(group, {})
            members[name] = value
            if len(members) == len(group):
                yield from _revert(self.model, waiting.pop(group)).items()


def _revert(model: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    from transformers.core_model_loading import revert_weight_conversion

    reverted: dict[str, Tensor] = revert_weight_conversion(model, dict(tensors))
    return reverted


def _groups(model: Any, names: Iterable[str]) -> list[tuple[str, ...]]:
    """Return groups of names; one conversion takes all names of a group."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, apply_converters

    conversions = getattr(model, "_weight_conversions", None)
    if conversions is None:
        conversions = get_model_conversion_mapping(model, add_legacy=False)
    converters = [
        conversion for conversion in conversions[::-1] if isinstance(conversion, WeightConverter)
    ]
    reverse = [converter.reverse_transform() for converter in converters]
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(apply_converters(name, reverse)[0], []).append(name)
    return [tuple(group) for group in groups.values()]


def write_weights(
    model: Any,
    folder: Path,
    weights: Named,
    buffers: Mapping[str, Tensor],
    dtype: torch.dtype,
    max_shard_size: int | str,
) -> None:
    """Write all shards and their index. Uses host memory for one shard.

    `model`: only names and shapes are used, so it may be on the meta device.
    """
    from huggingface_hub import split_torch_state_dict_into_shards

    on_meta = (_on_meta(model.named_parameters()), dict(_on_meta(buffers.items())))
    shapes = dict(model_weights(model, *on_meta, dtype))
    revert = _Reversion.of(model, shapes)
    split = split_torch_state_dict_into_shards(
        dict(revert(iter(shapes.items()))),
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_shard_size,
    )
    waiting: dict[str, dict[str, Tensor]] = {file: {} for file in split.filename_to_tensors}
    for name, value in revert(model_weights(model, weights, buffers, dtype)):
        file = split.tensor_to_filename[name]
        waiting[file][name] = value.cpu().contiguous()
        if len(waiting[file]) == len(split.filename_to_tensors[file]):
            _save_shard(waiting.pop(file), folder / file)
    if waiting:
        raise ModelError(f"{len(waiting)} shards lack weights that the model has")
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (folder / "model.safetensors.index.json").write_text(text)


def _save_shard(tensors: dict[str, Tensor], path: Path) -> None:
    """Save a shard; raise OSError for disk errors, for which safetensors has its own class."""
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:
        if (match := re.search(r"os error (\d+)", str(error))) is None:
            raise
        code = int(match[1])
        raise OSError(code, os.strerror(code), str(path)) from error


def _on_meta(tensors: Iterable[tuple[str, Tensor]]) -> Named:
    return ((name, torch.empty_like(x, device="meta")) for name, x in tensors)


def write_configuration(model: Any, folder: Path, dtype: torch.dtype) -> None:
    """Write config.json, the generation configuration, and the model's remote code, if any."""
    from transformers.dynamic_module_utils import custom_object_save

    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    for section in (config, *(getattr(config, key) for key in config.sub_configs)):
        if section is not None:
            section.dtype = dtype
    if model.is_remote_code():
        custom_object_save(model, folder, config=config)
    config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)


def write_tokenizer(source: Path | None, folder: Path, tokenizer: Any) -> None:
    """Save the tokenizer or processor `tokenizer`, or copy the tokenizer files in `source`."""
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
        return
    paths = [path for x in _TOKENIZER_FILES for path in (source.glob(x) if source else ())]
    for path in paths:
        shutil.copyfile(path, folder / path.name)
    if not paths:
        _log.warning("no tokenizer is written: none came with the model; pass tokenizer=…")
