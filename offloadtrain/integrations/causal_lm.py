"""Causal language models of transformers: loading, loss, generation."""

from __future__ import annotations

import ast
import inspect
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from offloadtrain.config.errors import ConfigError, InputError
from offloadtrain.integrations.adapters import base_model
from offloadtrain.integrations.pretrained import deferred_model
from offloadtrain.model.documents import attend_documents, document_bounds
from offloadtrain.model.language_model import Sampling, uncompiled
from offloadtrain.model.loss import cross_entropy


class CausalLmError(InputError):
    """A transformers model or tokenizer cannot be used here."""


def freeze_other_modalities(model: Any) -> Any:
    """Freeze the parts of a multimodal model that text does not use, such as an image encoder and
    its projection. Return the model."""
    base = base_model(model)
    if base.config.get_text_config() is not base.config:
        used = (base.get_decoder(), base.get_input_embeddings(), base.get_output_embeddings())
        of_text = {param for module in filter(None, used) for param in module.parameters()}
        for param in base.parameters():
            if param not in of_text:
                param.requires_grad_(False)
    return model


@dataclass(frozen=True, slots=True)
class CausalLm:
    """A transformers model, possibly wrapped by PEFT, as a `LanguageModel`.

    Attributes:
        chunked: in training the model computes its loss itself, without full logits: by
            `chunk_loss`, or by Liger.

    Raises:
        CausalLmError: from `of`, if the model's loss is not that of the next token, or it
            has an encoder and a decoder. A multimodal model, such as Gemma 3, is used as a
            text model.
    """

    module: Any
    chunked: bool = False

    @classmethod
    def of(cls, module: Any, *, chunked: bool = False) -> CausalLm:
        from transformers.loss.loss_utils import LOSS_MAPPING

        base = base_model(module)
        # Compared by function: multimodal checkpoints have another name for the same loss.
        next_token = LOSS_MAPPING["ForCausalLM"]
        has_other_loss = LOSS_MAPPING.get(base.loss_type, next_token) is not next_token
        if has_other_loss or base.config.is_encoder_decoder:
            of_encoder = " over the output of an encoder" if base.config.is_encoder_decoder else ""
            raise CausalLmError(
                f"{type(base).__name__} is trained with a loss of kind {base.loss_type}"
                f"{of_encoder}, not with that of the next token"
            )
        return cls(module, chunked)

    @property
    def vocab_size(self) -> int:
        return int(self.module.config.get_text_config().vocab_size)

    @property
    def max_seq_len(self) -> int:
        """Longest sequence in tokens; 2^40 for models without a limit (recurrent layers)."""
        text = self.module.config.get_text_config()
        return int(getattr(text, "max_position_embeddings", None) or 1 << 40)

    def check_isolates(self) -> None:
        """Raise CausalLmError if the model does not separate documents within a sequence where
        positions restart. Models do if transformers' own function makes their masks from positions
        and they have no layers with a state (recurrent or convolutional)."""
        base = base_model(self.module)
        source = inspect.getsource(inspect.getmodule(type(base)))  # type: ignore[arg-type]
        has_state = re.search("recurrent_state|ssm_state|conv_state|slope_rate", source)
        if has_state or not _masks_by_position(source):
            raise CausalLmError(
                f"{type(base).__name__} lets attention, or its recurrence, cross the "
                'ends of documents: data.packing must be "stream" or "padded"'
            )

    def loss(
        self,
        tokens_BT: Tensor,
        targets_BT: Tensor,
        *,
        positions_BT: Tensor | None = None,
        divisor: float | None = None,
    ) -> Tensor:
        """Return the model's loss with these labels: cross-entropy in fp32, a few rows at a time,
        plus the load balance of its experts if its configuration asks for it."""
        inputs: dict[str, Any] = {"input_ids": tokens_BT, "use_cache": False}
        if positions_BT is not None:
            inputs["position_ids"] = positions_BT
            text = base_model(self.module).config.get_text_config()
            if text._attn_implementation == VARLEN_ATTENTION:
                # transformers' argument names for flash attention, which its models pass on.
                bounds, longest = document_bounds(positions_BT), positions_BT.shape[1]
                inputs |= {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
                inputs |= {"max_length_q": longest, "max_length_k": longest}
        if self.chunked and torch.is_grad_enabled():
            inputs |= {"labels": targets_BT, "shift_labels": targets_BT}
            inputs["num_items_in_batch"] = targets_BT.numel() if divisor is None else divisor
            return cast(Tensor, self.module(**inputs).loss)
        out = self.module(**inputs)
        loss = cross_entropy(out.logits.flatten(0, 1), targets_BT.flatten(), divisor)
        balance = getattr(out, "aux_loss", None)
        if balance is not None and self.module.training:
            loss = loss + self.module.config.router_aux_loss_coef * balance
        return loss

    def generate(self, tokens_BT: Tensor, num_tokens: int, sampling: Sampling) -> Tensor:
        """Generate with transformers' `generate`, up to the model's end-of-text token or its
        longest sequence.

        Raises:
            CausalLmError: the prompt already has that length, or a probability is not finite.
        """
        room = self.max_seq_len - tokens_BT.shape[1]
        if room < 1:
            raise CausalLmError(
                f"the prompt has {tokens_BT.shape[1]} tokens, and the model's longest sequence has "
                f"{self.max_seq_len}: shorten it"
            )
        chosen: dict[str, Any] = {"do_sample": False, "temperature": None}
        chosen |= {"top_k": None, "top_p": None}
        if sampling.temperature > 0.0:
            chosen = {"do_sample": True, "temperature": sampling.temperature}
            chosen |= {"top_k": sampling.top_k, "top_p": sampling.top_p}
        was_training = self.module.training
        self.module.eval()
        base = base_model(self.module)
        implementation = base.config.get_text_config()._attn_implementation
        if implementation == VARLEN_ATTENTION:  # it is for packed rows only
            base.set_attn_implementation("sdpa")
        try:
            # transformers' `generate` draws from torch's global generators.
            is_cuda = tokens_BT.device.type == "cuda"
            with uncompiled(), torch.random.fork_rng([tokens_BT.device] if is_cuda else []):
                torch.manual_seed(sampling.seed)
                generated = self.module.generate(
                    input_ids=tokens_BT,
                    attention_mask=torch.ones_like(tokens_BT),
                    max_new_tokens=min(num_tokens, room),
                    pad_token_id=0,  # unused: a single prompt is not padded
                    **chosen,
                )
        except RuntimeError as error:
            if "probability tensor contains" not in str(error):
                raise
            raise CausalLmError("the model's probabilities are not finite") from error
        finally:
            self.module.train(was_training)
            if implementation == VARLEN_ATTENTION:
                base.set_attn_implementation(implementation)
        return cast(Tensor, generated)


def _masks_by_position(source: str) -> bool:
    """Return True if a module of transformers passes `position_ids` in all calls of
    `create_causal_mask`: by name, in a dictionary, or under another name for the function."""
    nodes = [*ast.walk(ast.parse(source))]
    values = [
        (target.id, node.value)
        for node in nodes
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    ]
    functions = {"create_causal_mask"}
    # mask_function = create_causal_mask if ... else ...
    functions |= {
        name
        for name, value in values
        if isinstance(value, ast.IfExp) and "create_causal_mask" in ast.unparse(value)
    }
    tables = {
        name
        for name, value in values
        if isinstance(value, ast.Dict) and "'position_ids'" in ast.unparse(value)
    }
    calls = [
        node.keywords
        for node in nodes
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in functions
    ]
    return bool(calls) and all(
        any(
            keyword.arg == "position_ids"
            or (keyword.arg is None and ast.unparse(keyword.value) in tables)
            for keyword in keywords
        )
        for keywords in calls
    )


VARLEN_ATTENTION = "offloadtrain_varlen"
"""Name under which `_attended` is registered in transformers."""


def attend_within_documents(model: Any) -> None:
    """Make a transformers model compute attention within documents, with `attend_documents`.

    Raises:
        CausalLmError: the model has its own attention code, which cannot be replaced.
    """
    from transformers import AttentionInterface

    # No mask function is registered under this name, so transformers makes no mask.
    AttentionInterface.register(VARLEN_ATTENTION, _attended)
    base = base_model(model)
    base.set_attn_implementation(VARLEN_ATTENTION)
    # transformers only warns about a model without this interface.
    if base.config.get_text_config()._attn_implementation != VARLEN_ATTENTION:
        raise CausalLmError(
            f"{type(base).__name__} computes attention by code of its own: leave "
            "data.varlen_attention out"
        )


def _attended(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    cu_seq_lens_q: Tensor | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """An attention function for transformers: queries (B, N, T, H), keys and values (B, K, T, H) →
    (B, T, N, H).

    Raises:
        CausalLmError: variable-length attention does not support a feature of the model's
            attention.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    window = more.get("sliding_window")
    refused = {
        f"dropout of {dropout}": dropout,
        f"a window of {window} tokens": window is not None and window < query.shape[2],
        "capped scores": more.get("softcap") is not None,
        "attention sinks": more.get("s_aux") is not None,
        "layers that do not get the bounds of documents": module.training and cu_seq_lens_q is None,
        # transformers makes no mask here, so this one is the model's.
        "a mask or a bias of its own": cu_seq_lens_q is not None and attention_mask is not None,
    }
    if wrong := [what for what, present in refused.items() if present]:
        raise CausalLmError(
            f"its attention has {wrong[0]}, which variable-length attention does not compute: "
            "leave data.varlen_attention out"
        )
    if cu_seq_lens_q is None:  # evaluation of rows that are not packed
        output: Tensor = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **more
        )[0]
        return output, None
    return attend_documents(query, key, value, cu_seq_lens_q, scale=scaling).transpose(1, 2), None


def check_varlen(empty: Any, seq_len: int) -> None:
    """Run a forward of a model on the meta device, in which `_attended` refuses unsupported
    features.

    Raises:
        CausalLmError: a feature is not supported; the message names it.
    """
    attend_within_documents(empty)
    tokens_BT = torch.zeros((1, seq_len), dtype=torch.long, device="meta")
    kind = type(base_model(empty)).__name__
    try:
        # 16 bits, since torch's grouped products of experts support no other dtypes there.
        trained = CausalLm.of(empty.to(torch.bfloat16).train())
        trained.loss(tokens_BT, tokens_BT, positions_BT=tokens_BT)
    except CausalLmError as error:
        raise CausalLmError(f"{kind}: {error}") from None
    except RuntimeError as error:
        raise CausalLmError(
            f"{kind} cannot be tried without weights ({error}), so that data.varlen_attention "
            "cannot be checked: leave it out"
        ) from error


def transformers_package(what: str) -> Any:
    """Import transformers and disable its progress bars.

    Raises:
        ConfigError: transformers is not installed; the message says that `what` needs it.
    """
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(
            f"{what} needs transformers ({error}): pip install 'offloadtrain[hf]'"
        ) from None
    transformers.logging.disable_progress_bar()
    return transformers


def load(folder: Path, device: torch.device) -> CausalLm:
    """Load a folder of transformers in its saved dtype, in eval mode.

    Raises:
        CausalLmError, ModelError: it is not such a folder, or needs remote code.
    """
    transformers_package("a folder of transformers")
    model, weights = deferred_model(folder, "AutoModelForCausalLM")
    if weights is not None:
        weights.fill_all()
    return CausalLm.of(model.to(device).eval())
