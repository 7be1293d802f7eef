"""What the examples train where no folder is given: a random Llama of two layers, and chats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

TOPICS = {"Adam": "on the CPU", "forward": "on the GPU", "a gradient": "in host memory"}
CHATS = [
    [
        {"role": "user", "content": f"Where is {topic}?"},
        {"role": "assistant", "content": f"It is {place}."},
    ]
    for topic, place in TOPICS.items()
] * 16
PREFERENCES = [
    {
        "prompt": [{"role": "user", "content": f"Where is {topic}?"}],
        "chosen": [{"role": "assistant", "content": f"It is {place}."}],
        "rejected": [{"role": "assistant", "content": "Nobody knows."}],
    }
    for topic, place in TOPICS.items()
] * 16
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def tokenizer() -> Any:
    """A byte-pair tokenizer of the chats, with a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    words: Any = Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["</s>", "<user>", "<assistant>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    words.train_from_iterator([m["content"] for chat in CHATS for m in chat], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="</s>", pad_token="</s>", chat_template=TEMPLATE
    )


def make_llama(folder: Path | str) -> str:
    """Write a Hugging Face folder, and return its path."""
    from transformers import LlamaConfig, LlamaForCausalLM, set_seed

    set_seed(0)
    config = LlamaConfig(
        vocab_size=400,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        eos_token_id=0,
    )
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return str(folder)
