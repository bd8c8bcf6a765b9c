#!/usr/bin/env python
"""Make a small random model for the scheduler's tests: ``PYTHON models.py FOLDER [--layers 4] [--dtype bfloat16]``.

Run it with the Python that ``environment.py`` printed. The model has the shape of SmolLM2-135M and fewer layers; the
same seed gives the same weights. Nothing is downloaded: its tokenizer has one token a byte, or is SmolLM2's own where
``--gguf`` names a file of that model.

Make it with the Python of the version that serves it: the two write their files differently, and transformers 4 would
read the rotary base of transformers 5's as another number. To compare outputs use float32: in bfloat16 the most likely
token of a random model now and then depends on the order of the sums.
"""

from __future__ import annotations

import argparse
from importlib import import_module
from pathlib import Path
from typing import Any

# Installed in SGLang's environment only, where no type checker looks.
tokenizers: Any = import_module("tokenizers")
torch: Any = import_module("torch")
transformers: Any = import_module("transformers")

START, END, TEXT_END = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONTEXT = 8192


def main() -> None:
    """Make the model and its tokenizer."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--gguf", type=Path, metavar="FILE", help="take the tokenizer of this model file")
    options = parser.parse_args()
    text = tokenizer(options.gguf)
    text.save_pretrained(options.folder)
    random_model(len(text), text, options.layers, options.dtype, options.seed).save_pretrained(options.folder)
    print(options.folder)


def tokenizer(gguf: Path | None) -> Any:
    """One token a byte with ChatML around messages, or the one in a GGUF file with the file's template."""
    backend, template = bytewise(), CHAT_TEMPLATE
    if gguf is not None:
        own = transformers.AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
        backend, template = own.backend_tokenizer, own.chat_template or CHAT_TEMPLATE
    # Wrapped anew: what is converted from GGUF names another end token, and saves the whole file beside it.
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=START,
        eos_token=END,
        pad_token=END,
        unk_token=TEXT_END,
        chat_template=template,
        model_max_length=CONTEXT,
    )


def bytewise() -> Any:
    """A tokenizer without merges: every byte is a token, after SmolLM2's first three."""
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([TEXT_END, START, END, *letters])}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens([TEXT_END, START, END])
    return backend


def random_model(vocabulary: int, text: Any, layers: int, dtype: str, seed: int) -> Any:
    """A Llama of SmolLM2-135M's shape with that many layers and random weights."""
    config = transformers.LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=CONTEXT,
        rms_norm_eps=1e-5,
        rope_theta=100_000.0,
        # Not tied as SmolLM2's are: with random weights the most likely token would ever be the last one.
        tie_word_embeddings=False,
        # Wider than SmolLM2's 0.02, with which most answers would be one token repeated.
        initializer_range=0.04,
        bos_token_id=text.bos_token_id,
        eos_token_id=text.eos_token_id,
        pad_token_id=text.pad_token_id,
    )
    torch.manual_seed(seed)
    return transformers.LlamaForCausalLM(config).to(getattr(torch, dtype))


if __name__ == "__main__":
    main()
