"""Tiny models with random weights and a real tokenizer, written to a folder in milliseconds."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import gguf
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

CONTEXT_LENGTH: Final = 96
SPECIAL_TOKENS: Final = ("<pad>", "<bos>", "<eos>")
EOS_ID: Final = 2
CHAT_TEMPLATE: Final = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}</{{ message['role'] }}>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
_CORPUS: Final = (
    "strangers share one car, and strangers' requests share one batch. they get in and out at every step: "
    "the first one leaves early, the last one rides on."
)
#: Wide enough that the two best logits are seldom close.
_SPREAD: Final = 0.3


def byte_level_tokenizer() -> Tokenizer:
    """A byte-level BPE as GPT-2's: every text has ids and comes back whole."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_CORPUS], trainer)
    return tokenizer


def save_tokenizer(folder: Path, tokenizer: Tokenizer | None = None, **options: Any) -> PreTrainedTokenizerFast:
    """Write tokenizer.json and its configuration; the byte-level tokenizer unless another is given."""
    fast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer or byte_level_tokenizer(),
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        **options,
    )
    fast.save_pretrained(folder)
    return fast


def _llama(vocab_size: int) -> PreTrainedModel:
    return LlamaForCausalLM(  # type: ignore[no-untyped-call]
        LlamaConfig(
            vocab_size=vocab_size,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=CONTEXT_LENGTH,
            initializer_range=_SPREAD,
            tie_word_embeddings=False,
            bos_token_id=1,
            eos_token_id=EOS_ID,
        )
    )


def _opt(vocab_size: int) -> PreTrainedModel:
    return OPTForCausalLM(  # type: ignore[no-untyped-call]
        OPTConfig(
            vocab_size=vocab_size,
            hidden_size=48,
            word_embed_proj_dim=48,
            ffn_dim=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=CONTEXT_LENGTH,
            init_std=_SPREAD,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=EOS_ID,
        )
    )


def _gpt2(vocab_size: int) -> PreTrainedModel:
    return GPT2LMHeadModel(  # type: ignore[no-untyped-call]
        GPT2Config(
            vocab_size=vocab_size,
            n_embd=48,
            n_layer=2,
            n_head=4,
            n_positions=CONTEXT_LENGTH,
            initializer_range=_SPREAD,
            bos_token_id=1,
            eos_token_id=EOS_ID,
        )
    )


ARCHITECTURES: Final[dict[str, Callable[[int], PreTrainedModel]]] = {"llama": _llama, "opt": _opt, "gpt2": _gpt2}


def save_tiny_model(folder: Path, architecture: str = "llama", *, chat_template: str | None = CHAT_TEMPLATE) -> Path:
    """Write a tiny model of `ARCHITECTURES` with its tokenizer; always the same weights."""
    tokenizer = save_tokenizer(folder, chat_template=chat_template)
    with torch.random.fork_rng():
        torch.manual_seed(20240)
        model = ARCHITECTURES[architecture](len(tokenizer))
        for name, parameter in model.named_parameters():
            # Biases start as zeros and would hide a mistake in how they are used.
            if name.endswith("bias"):
                torch.nn.init.normal_(parameter, std=_SPREAD)
    model.save_pretrained(folder)
    return folder


def save_model(folder: Path, model: PreTrainedModel) -> Path:
    """Write any model, with the byte-level tokenizer."""
    save_tokenizer(folder)
    model.save_pretrained(folder)
    return folder


def write_tiny_gguf(file: Path) -> Path:
    """A GGUF file of a Llama with float32 weights and the byte-level tokenizer."""
    tokenizer = byte_level_tokenizer()
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    merges = [" ".join(pair) for pair in _merges(tokenizer)]
    width, num_layers, num_heads = 32, 1, 4
    writer = gguf.GGUFWriter(str(file), "llama")
    writer.add_name("tiny")
    writer.add_context_length(CONTEXT_LENGTH)
    writer.add_embedding_length(width)
    writer.add_block_count(num_layers)
    writer.add_feed_forward_length(2 * width)
    writer.add_head_count(num_heads)
    writer.add_head_count_kv(num_heads)
    writer.add_rope_dimension_count(width // num_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(vocabulary))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([token for token, _ in vocabulary])
    writer.add_token_types(
        [gguf.TokenType.CONTROL if token in SPECIAL_TOKENS else gguf.TokenType.NORMAL for token, _ in vocabulary]
    )
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(EOS_ID)
    writer.add_pad_token_id(0)
    generator = torch.Generator().manual_seed(7)
    shapes = {"token_embd.weight": (len(vocabulary), width), "output_norm.weight": (width,)}
    for layer in range(num_layers):
        shapes |= {f"blk.{layer}.{name}.weight": (width,) for name in ("attn_norm", "ffn_norm")}
        shapes |= {f"blk.{layer}.attn_{name}.weight": (width, width) for name in ("q", "k", "v", "output")}
        shapes |= {f"blk.{layer}.ffn_{name}.weight": (2 * width, width) for name in ("gate", "up")}
        shapes[f"blk.{layer}.ffn_down.weight"] = (width, 2 * width)
    for name, shape in shapes.items():
        writer.add_tensor(name, (torch.randn(shape, generator=generator) * _SPREAD).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _merges(tokenizer: Tokenizer) -> list[tuple[str, str]]:
    import json

    return [tuple(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]]


class Reference:
    """A model as transformers runs it, one prompt at a time, in float32 and with its own attention."""

    def __init__(self, folder: Path) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.model.generation_config.eos_token_id = None

    def generate(self, prompt_ids: list[int], num_tokens: int) -> tuple[list[int], list[float]]:
        """Greedy tokens by `model.generate`, past any end of sequence, and the gap of the two best logits of each."""
        output = self.model.generate(
            torch.tensor([prompt_ids]),
            attention_mask=torch.ones(1, len(prompt_ids), dtype=torch.long),
            max_new_tokens=num_tokens,
            do_sample=False,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        gaps = [float(-step[0].topk(2).values.diff()) for step in output.logits]
        return output.sequences[0, len(prompt_ids) :].tolist(), gaps


def assert_same_tokens(found: list[int], expected: list[int], gaps: list[float]) -> None:
    """Equal token for token; where the reference's two best logits are within 1e-3, the comparison ends undecided."""
    assert len(found) == len(expected)
    for position, (one, other, gap) in enumerate(zip(found, expected, gaps, strict=True)):
        if one != other:
            assert gap <= 1e-3, f"token {position + 1} is {one}, the reference has {other}, ahead by {gap:.4f}"
            return


def write_safetensors(file: Path, header: Mapping[str, Any], data_bytes: int = 1024) -> None:
    """A file with this header, and a hole of so many bytes for the weights."""
    raw = json.dumps(header).encode()
    with file.open("wb") as content:
        content.write(len(raw).to_bytes(8, "little") + raw)
        content.truncate(8 + len(raw) + data_bytes)


def write_hole(file: Path) -> None:
    """A hundred gigabytes of weights that take no room on the disk."""
    shape = [26_000, 1_000_000]
    size = shape[0] * shape[1] * 4
    write_safetensors(file, {"w": {"dtype": "F32", "shape": shape, "data_offsets": [0, size]}}, size)
