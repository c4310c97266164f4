"""Writes a tiny, randomly initialised model that takes images: BLIP-2, since vLLM needs no
torchvision for it."""

import json
import struct
import zlib
from pathlib import Path
from typing import Any

import torch
from transformers import Blip2Config, Blip2ForConditionalGeneration

from testkit.model_zoo import write_tokenizer

IMAGE_SIZE = 28
NUM_QUERY_TOKENS = 4
IMAGE_TOKEN = "<image>"
IMAGE_TOKEN_ID = 259
VOCABULARY = 512

_SHAPE: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 2}
_TEXT = {
    "model_type": "opt", "hidden_size": 64, "word_embed_proj_dim": 64, "ffn_dim": 96, **_SHAPE,
    "vocab_size": VOCABULARY, "max_position_embeddings": 2048, "init_std": 0.2,
    "eos_token_id": 1, "bos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
_VISION = {
    "model_type": "blip_2_vision_model", "hidden_size": 32, "intermediate_size": 48, **_SHAPE,
    "image_size": IMAGE_SIZE, "patch_size": 14, "initializer_range": 0.2,
}  # fmt: skip
_QUERIES = {
    "model_type": "blip_2_qformer", "hidden_size": 32, "intermediate_size": 48, **_SHAPE,
    "encoder_hidden_size": 32, "vocab_size": VOCABULARY, "initializer_range": 0.2,
}  # fmt: skip
_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{{ p.text if p.type == 'text' else '<image>' }}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_vision_model(path: Path, seed: int = 3) -> Path:
    """Write a directory with weights, configs, a byte-level tokenizer and a processor of images;
    return ``path``."""
    torch.manual_seed(seed)
    config = Blip2Config(
        vision_config=_VISION, text_config=_TEXT, qformer_config=_QUERIES,
        image_token_index=IMAGE_TOKEN_ID, num_query_tokens=NUM_QUERY_TOKENS,
    )  # fmt: skip
    model = Blip2ForConditionalGeneration(config).to(torch.float32).eval()
    model.query_tokens.data.normal_()
    model.save_pretrained(path)
    write_tokenizer(path)
    _add_image_token(path / "tokenizer.json")
    special = {"eos_token": "<|im_end|>", "bos_token": "<|im_start|>", "pad_token": "<|endoftext|>"}
    fields = {"tokenizer_class": "PreTrainedTokenizerFast", **special}
    _write(path / "tokenizer_config.json", {"chat_template": _TEMPLATE, **fields})
    processor = {"processor_class": "Blip2Processor"}
    size = {"height": IMAGE_SIZE, "width": IMAGE_SIZE}
    resizing = {"do_resize": True, "size": size, "do_rescale": True, "do_normalize": True}
    images = {"image_processor_type": "BlipImageProcessor", "do_convert_rgb": True, **resizing}
    _write(path / "preprocessor_config.json", {**processor, **images})
    _write(path / "processor_config.json", {**processor, "num_query_tokens": NUM_QUERY_TOKENS})
    return path


def _add_image_token(file: Path) -> None:
    tokenizer = json.loads(file.read_text())
    added = {**tokenizer["added_tokens"][-1], "id": IMAGE_TOKEN_ID, "content": IMAGE_TOKEN}
    tokenizer["added_tokens"].append(added)
    tokenizer["model"]["vocab"][IMAGE_TOKEN] = IMAGE_TOKEN_ID
    _write(file, tokenizer)


def _write(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value))


def png(red: int, green: int, blue: int) -> bytes:
    """Return an image of one colour, 8 by 8 pixels."""
    row = b"\0" + bytes((red, green, blue)) * 8
    head = struct.pack(">IIBBBBB", 8, 8, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", head), (b"IDAT", zlib.compress(row * 8)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )
