"""Tests that a GGUF file is read as the model that it was made of."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import huggingface_hub.constants
import pytest
import torch
from gguf.quants import dequantize, quantize
from tokenizers import Tokenizer as ReferenceTokenizer

from baton.checkpoints.checkpoint import (
    DEMO_MODEL,
    load_model_config,
    load_model_limits,
    model_digest,
)
from baton.checkpoints.hub import resolve_model, short_name
from baton.config import Settings
from baton.engine.loader import CheckpointWeights
from baton.engine.native.backend_choice import choose_quantization, unavailable_reason
from baton.engine.native.processor import limit_instruction_set
from baton.engine.runner import pick_dtype
from baton.errors import Invalid, Unavailable
from baton.text.tokenizer import Tokenizer
from orchestrator.backends import check_models
from testkit.gguf_files import write_gguf
from testkit.model_zoo import make_model

CPU = torch.device("cpu")
QUANTIZED = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "BF16", "F16")
SCRIPTS = (
    "It's 12345.67 on 2026-11-29;\n\n\n  two  spaces\tand tabs\r\n def f(x): return {x: 1}  # no",
    "Straßenbahnübergang größer. L'été à Noël, cœur; São Paulo, mañana ñandú.",
    "Съешь же ещё этих мягких французских булок. Η γρήγορη αλεπού.",
    "漢字かな交じり文、テスト。简体中文测试，一二三。한국어 텍스트입니다.",
    "مرحبا بالعالم. שלום עולם. नमस्ते दुनिया. สวัสดีชาวโลก. ქართული, հայերեն, ខ្មែរ, தமிழ்",
    "👩‍👩‍👧‍👦 🇩🇪 👍🏽 \u200b ﬁ Å Å é é <|im_start|>user<|im_end|> ▁ Ġ",
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(folder))
    return folder


@pytest.fixture(scope="module")
def demo_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(DEMO_MODEL, tmp_path_factory.mktemp("demo") / "Demo-6M.Q8_0.gguf", "Q8_0")


def all_weights(folder: Path) -> list[torch.Tensor]:
    weights = CheckpointWeights(folder, load_model_config(folder)).to_torch(CPU, torch.float32)
    layers = [getattr(layer, name) for layer in weights.layers for name in layer.__slots__]
    every = (weights.embedding, weights.norm, weights.head, *layers)
    return [weight for weight in every if weight is not None]


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("llama", {}),
        ("llama-biased", {}),
        ("qwen2", {}),
        ("qwen3", {}),
        ("qwen3-odd", {}),
        ("qwen3-moe", {"mlp_only_layers": []}),
        ("mistral", {}),
        ("mistral-window", {"hidden_act": "silu"}),
        ("gemma3", {"query_pre_attn_scalar": 32}),
    ],
)
def test_weights_and_config_are_the_models(
    name: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    model = make_model(tmp_path / "model", name, seed=3, **changes)
    folder = resolve_model(write_gguf(model, tmp_path / "model.gguf"))
    config, original = load_model_config(folder), load_model_config(model)
    architecture = "llama" if name == "mistral" else original.architecture  # without a window
    assert config == replace(original, architecture=architecture, gguf_type="F32")
    for own, reference in zip(all_weights(folder), all_weights(model), strict=True):
        # In Gemma's norms, adding 1 and subtracting it again loses bits that its own weights lack.
        is_changed = name == "gemma3" and reference.dim() == 1
        assert torch.equal(own, reference + 1 - 1 if is_changed else reference)


@pytest.mark.parametrize("kind", QUANTIZED)
def test_quantized_weights_are_decoded_as_the_format_says(kind: str, tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "llama", seed=3)
    folder = resolve_model(write_gguf(model, tmp_path / "model.gguf", kind))
    of_type = gguf.GGMLQuantizationType[kind]
    for own, reference in zip(all_weights(folder), all_weights(model), strict=True):
        is_matrix = reference.dim() > 1
        # q and k are quantized in llama.cpp's order of rows, and each row by itself.
        expected = (
            torch.from_numpy(dequantize(quantize(reference.numpy(), of_type), of_type))
            if is_matrix
            else reference
        )
        assert torch.equal(own, expected)


def test_types_of_one_matrix_may_differ(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "llama", seed=3)
    folders = {
        kind: resolve_model(write_gguf(model, tmp_path / f"{kind}.gguf", kind))
        for kind in ("Q8_0", "F16")
    }
    index = {
        kind: json.loads((folder / "model.gguf.json").read_text())
        for kind, folder in folders.items()
    }
    assert {each["type"] for each in index["Q8_0"].values()} == {"Q8_0", "F32"}
    assert load_model_config(folders["Q8_0"]).dtype == "bfloat16"
    assert load_model_config(folders["F16"]).dtype == "float16"
    chosen = [pick_dtype("auto", CPU, load_model_config(folder)) for folder in folders.values()]
    assert chosen == [torch.bfloat16, torch.float32]
    assert pick_dtype("auto", CPU, load_model_config(model)) is torch.float32


def test_folder_is_made_once_and_follows_the_file(demo_gguf: Path, cache: Path) -> None:
    first = resolve_model(demo_gguf)
    assert sorted(each.name for each in first.iterdir()) == [
        "config.json", "generation_config.json", "model.gguf", "model.gguf.json", "tokenizer.json",
        "tokenizer_config.json",
    ]  # fmt: skip
    made, digest = first.stat().st_mtime_ns, model_digest(first)
    moved = demo_gguf.with_name("Moved.gguf")
    moved.write_bytes(demo_gguf.read_bytes())
    second = resolve_model(moved)
    again = resolve_model(demo_gguf)
    assert again == first and second.name.startswith("Moved-")
    assert (first / "model.gguf").resolve() == demo_gguf
    assert model_digest(second) == digest and first.stat().st_mtime_ns >= made
    assert [each.name for each in first.parent.iterdir() if each.name.startswith(".new")] == []
    assert short_name(str(demo_gguf)) == "Demo-6M.Q8_0"


def test_tokenizer_and_template_are_the_models(demo_gguf: Path) -> None:
    own, reference = Tokenizer.load(resolve_model(demo_gguf)), Tokenizer.load(DEMO_MODEL)
    for text in SCRIPTS:
        assert own.encode(text) == reference.encode(text)
        assert own.decode(own.encode(text)) == reference.decode(reference.encode(text))
    assert own.chat_template_source == reference.chat_template_source
    limits = load_model_limits(resolve_model(demo_gguf))
    assert sorted(limits.eos_token_ids) == [0, 2]


def test_sampling_defaults_come_from_the_file(tmp_path: Path) -> None:
    keys = {
        "general.sampling.temp": 0.6,
        "general.sampling.top_k": 20,
        "general.sampling.top_p": 0.9,
    }
    folder = resolve_model(write_gguf(DEMO_MODEL, tmp_path / "m.gguf", extra=keys))
    assert json.loads((folder / "generation_config.json").read_text()) == {
        "eos_token_id": [0, 2], "temperature": 0.6, "top_k": 20, "top_p": 0.9, "do_sample": True,
    }  # fmt: skip


PRE_TOKENIZED = {
    "gpt-2": ["It", "'s", " 1234"],
    "smollm": ["It", "'s", " ", "1", "2", "3", "4"],
    "llama-bpe": ["It", "'s", " ", "123", "4"],
    "qwen2": ["It", "'s", " ", "1", "2", "3", "4"],
    "tekken": ["It", "'s", " ", "1", "2", "3", "4"],
}


@pytest.mark.parametrize("pre", PRE_TOKENIZED)
def test_pre_tokenizers_split_words(pre: str, tmp_path: Path) -> None:
    keys = {"tokenizer.ggml.pre": pre}
    folder = resolve_model(write_gguf(DEMO_MODEL, tmp_path / "m.gguf", extra=keys))
    splitter = ReferenceTokenizer.from_file(str(folder / "tokenizer.json")).pre_tokenizer
    words = [word.replace("Ġ", " ") for word, _ in splitter.pre_tokenize_str("It's 1234")]
    assert words == PRE_TOKENIZED[pre]


def sentence_piece(**extra: Any) -> dict[str, Any]:
    """Return the keys of a small vocabulary of SentencePiece's kind, in which a better piece has a
    higher score."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    types = [2, 3, 3, *[6] * 256]
    words = ["▁", "a", "b", "c", "ab", "bc", "▁a", "▁ab", "abc", "  ", "[x]"]
    scores = [-9.0, -9.0, -9.0, -9.0, -2.0, -1.0, -3.0, -4.0, -5.0, -1000.0, -1000.0]
    scores = [*[0.0] * len(pieces), *scores]
    return {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [*pieces, *words], "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": [*types, *[1] * 9, 4, 4], "tokenizer.ggml.merges": None,
        "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0, "tokenizer.ggml.eot_token_id": None,
        "tokenizer.chat_template": None, **extra,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("abc", ["<s>", "▁a", "bc"]),  # bc is the best pair, then ▁a
        ("ab ab", ["<s>", "▁ab", "▁ab"]),
        ("c  b", ["<s>", "▁", "c", "▁▁", "b"]),
        ("a[x]é", ["<s>", "▁a", "[x]", "<0xC3>", "<0xA9>"]),
    ],
)
def test_sentence_pieces_are_merged_by_score(text: str, pieces: list[str], tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "llama", seed=3)
    folder = resolve_model(write_gguf(model, tmp_path / "m.gguf", extra=sentence_piece()))
    tokenizer = Tokenizer.load(folder)
    ids = tokenizer.encode(text)
    assert [tokenizer.token(token) for token in ids] == pieces
    assert tokenizer.decode(ids[1:]) == text


def test_no_space_is_put_before_a_text_if_the_file_says_so(tmp_path: Path) -> None:
    keys = sentence_piece(**{
        "tokenizer.ggml.add_space_prefix": False, "tokenizer.ggml.add_bos_token": False,
    })  # fmt: skip
    model = make_model(tmp_path / "model", "llama", seed=3)
    tokenizer = Tokenizer.load(resolve_model(write_gguf(model, tmp_path / "m.gguf", extra=keys)))
    ids = tokenizer.encode("ab ab")
    assert [tokenizer.token(token) for token in ids] == ["ab", "▁ab"]
    assert tokenizer.decode(ids) == "ab ab"


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"general.architecture": "mamba"}, "general.architecture is 'mamba'; GGUF files are"),
        ({"split.count": 3}, "is one of 3 files of a model; join them first"),
        ({"qwen3.block_count": None}, "the key qwen3.block_count is missing; it must be a int"),
        ({"tokenizer.ggml.model": "bert"}, "tokenizer.ggml.model is 'bert'; supported kinds: gpt2"),
        ({"tokenizer.ggml.pre": "other"}, "tokenizer.ggml.pre is 'other'; supported"),
        ({"tokenizer.ggml.token_type": [1, 1]}, "the file contradicts itself: ValueError"),
        ({"qwen3.rope.scaling.type": "longrope"}, "rope.scaling.type is 'longrope'; linear and"),
    ],
)
def test_file_that_is_not_supported_is_refused_by_name(
    extra: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = write_gguf(DEMO_MODEL, tmp_path / "m.gguf", extra=extra)
    with pytest.raises(Invalid, match=message):
        resolve_model(path)


def test_cache_that_cannot_be_written_is_named(demo_gguf: Path, cache: Path) -> None:
    cache.write_text("not a folder")
    with pytest.raises(Unavailable, match=r"can't be written: .* set HF_HUB_CACHE to a folder"):
        resolve_model(demo_gguf)


def test_damaged_file_is_refused(demo_gguf: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(demo_gguf.read_bytes()[:10_000])
    with pytest.raises(Invalid, match=r"damaged.gguf is not a GGUF file, or is damaged"):
        resolve_model(damaged)
    folder = resolve_model(demo_gguf)
    truncated = tmp_path / "truncated.gguf"
    truncated.write_bytes(demo_gguf.read_bytes()[:-1000])
    (folder / "model.gguf").unlink()
    (folder / "model.gguf").symlink_to(truncated)
    with pytest.raises(Invalid, match=r"truncated.gguf: the file is truncated: it should have"):
        CheckpointWeights(folder, load_model_config(folder))


def test_weights_that_the_engine_would_leave_out_are_refused(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "llama-biased", seed=3)
    folder = resolve_model(write_gguf(model, tmp_path / "m.gguf"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"mlp_bias": False}))
    with pytest.raises(Invalid, match=r"support models with model.layers.0.mlp.down_proj.bias"):
        CheckpointWeights(folder, load_model_config(folder))


def test_vllm_refuses_the_format(demo_gguf: Path) -> None:
    with pytest.raises(Invalid, match=r"engine is vllm, which can't load GGUF files"):
        check_models(Settings(model=str(demo_gguf), engine="vllm"))
    check_models(Settings(model=str(demo_gguf)))


def test_names_of_models_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match="it must be a directory, a GGUF file, or a hub id"):
        resolve_model(tmp_path / "missing.gguf")


@pytest.mark.parametrize(
    ("kind", "setting", "mode", "chosen"),
    [
        ("Q4_1", "auto", "auto", "int4"),
        ("Q4_0", "auto", "on", "int4"),
        ("Q4_1", "auto", "off", "none"),
        ("Q8_0", "auto", "auto", "none"),
        ("Q4_1", "none", "auto", "none"),
        ("Q8_0", "int4", "auto", "int4"),
    ],
)
def test_weights_of_four_bits_stay_where_the_kernels_multiply_them(
    kind: str, setting: str, mode: str, chosen: str, tmp_path: Path
) -> None:
    if unavailable_reason() is not None:
        pytest.skip("the CPU kernels can't be used here")
    model = make_model(tmp_path / "model", "llama", seed=3, vocab_size=512, intermediate_size=128)
    config = load_model_config(resolve_model(write_gguf(model, tmp_path / "m.gguf", kind)))
    with limit_instruction_set("avx2"):
        found = choose_quantization(setting, mode, config, CPU, torch.bfloat16, torch.bfloat16)
    assert found == chosen


def test_weights_of_four_bits_are_the_files(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "llama", seed=3, vocab_size=512, intermediate_size=128)
    folder = resolve_model(write_gguf(model, tmp_path / "m.gguf", "Q4_1"))
    stored = CheckpointWeights(folder, load_model_config(folder))
    for layer in stored.layers:
        for name in ("qkv", "output", "gate_up", "down"):
            weight = getattr(layer, name)
            kept = torch.cat([part.decode() for part in weight.int4_parts])
            assert torch.equal(kept, torch.cat(list(weight.parts)))
