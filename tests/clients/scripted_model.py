"""A model whose answers are written in advance, so that tests of clients can expect exact texts.

It is a Qwen3 model that the production loader reads. Attention and MLP add nothing to the residual
stream, and embeddings are unit vectors, so the next token depends only on the current one. The chat
template ends the prompt with a special token that selects one of :data:`ANSWERS`, and each token of
the answer makes the next one practically certain, also at temperature 1.

Any other token is followed by :data:`STORY`, so a completion of any prompt is the story, which
starts again after its end if EOS is ignored.
"""

import json
from collections.abc import Iterable, Mapping, Set
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer

from tests.clients.chat_template import ANSWER_OF_TOOL, ANSWER_WITHOUT, CHAT_TEMPLATE

BASE_TOKENIZER = Path(__file__).parents[2] / "baton" / "models" / "demo" / "tokenizer.json"
EOS = "<|im_end|>"
CONTEXT_TOKENS = 131_072
HEAD_SIZE = 32

TEXT = "Hello! I am a scripted model, and each word of mine was written in advance."
STORY = "One day a small robot counted: two, three, four, five, six, seven, eight, nine. The end."
BRIEF_TEXT = "A scripted model is here."
WEATHER = "It is 21 degrees in Paris."
BRIEF_WEATHER = "21 degrees, sunny."
SECOND = "In Rome it is warmer."
BRIEF_SECOND = "Warmer."
COMMAND_DONE = "The command has printed hello."
REASONING = "The user wants to know what is sunny."
REASONED = "Paris is the sunny place."
EDITED = "Good morning from a scripted model.\n"
EDIT = f"greeting.txt\n```\n{EDITED}```"
"""A whole file, in the form in which aider asks for it."""
DATA = {"city": "Paris", "degrees": 21}

CALLS: Mapping[str, Mapping[str, Any]] = {
    "get_weather": {"city": "Paris"},
    "exec_command": {"cmd": "echo hello"},
    "Bash": {"command": "echo hello", "description": "Say hello"},
    "Report": DATA,
    "PartialReport": DATA,
    "final_result": DATA,
}
"""The arguments with which the model calls each tool that it knows."""

PARTS = ("instructions", "question", "call", "result", "answer")
"""Parts of a conversation. If one is missing, the answer says so."""


def _call(name: str) -> str:
    call = json.dumps({"name": name, "arguments": CALLS[name]})
    return f"<tool_call>\n{call}\n</tool_call>"


ANSWERS: Mapping[str, str] = {
    "text": TEXT,
    "brief-text": BRIEF_TEXT,
    "weather": WEATHER,
    "brief-weather": BRIEF_WEATHER,
    "second": SECOND,
    "brief-second": BRIEF_SECOND,
    "command-done": COMMAND_DONE,
    "reasoned": f"<think>\n{REASONING}\n</think>\n\n{REASONED}",
    **{ANSWER_OF_TOOL.format(name=name): _call(name) for name in CALLS},
    **{ANSWER_WITHOUT.format(part=part): f"The conversation has no {part}." for part in PARTS},
    "edit": EDIT,
}
"""The answers by the names that the chat template uses."""

DATA_TEXT = json.dumps(DATA)
"""The answer to a request with a JSON schema: a grammar forbids all other answers."""

SHORTEST_PIECE = 5
"""Minimum number of characters of an answer that become one token."""

CHOICES = (60.0, 40.0, 20.0)
"""Logits of a token's successors; those of all other tokens are 0. A successor that a grammar or a
parameter of the request rules out is replaced by the next choice."""


def make_scripted_model(folder: Path, chat_template: str = CHAT_TEMPLATE) -> Path:
    """Write the model's directory; return ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    chains = _chains()
    tokenizer = _make_tokenizer(chains)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"chat_template": chat_template, "eos_token": EOS}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    weights = _make_weights(tokenizer, chains)
    num_tokens, hidden_size = weights["lm_head.weight"].shape
    config = _config(num_tokens, hidden_size, tokenizer.token_to_id(EOS))
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _selector(name: str) -> str:
    """Return the special token that ends a prompt and selects the answer ``name``."""
    return f"<|answer:{name}|>"


def _chains() -> dict[str, list[str]]:
    """Split each answer into a chain of pieces, each of which becomes one token. Return the chains
    by the answers' names. No piece occurs twice, neither in one answer nor in two, so each piece
    determines the next one."""
    used: set[str] = set()
    texts = {"story": STORY, "data": DATA_TEXT, **ANSWERS}
    return {name: _split(text, used) for name, text in texts.items()}


def _split(text: str, used: set[str]) -> list[str]:
    """Split a text into new pieces, and add them to ``used``."""
    for shortest in range(SHORTEST_PIECE, len(text)):
        pieces = _split_in_pieces(text, shortest, used)
        if len(set(pieces)) == len(pieces) and used.isdisjoint(pieces):
            used.update(pieces)
            return pieces
    raise AssertionError(f"each end of this answer is another answer's piece: {text!r}")


def _split_in_pieces(text: str, shortest: int, used: Set[str]) -> list[str]:
    """Split a text into pieces of at least ``shortest`` characters. All of them are new, except
    perhaps the last."""
    pieces: list[str] = []
    while text:
        size = shortest
        while text[:size] in {*used, *pieces} or 0 < len(text) - size < shortest:
            size += 1
            if size >= len(text):
                break
        pieces.append(text[:size])
        text = text[size:]
    return pieces


def _make_tokenizer(chains: Mapping[str, Iterable[str]]) -> Tokenizer:
    """Return the demo model's tokenizer with a token added for each piece of an answer, and a
    special token that selects each answer."""
    tokenizer = Tokenizer.from_file(str(BASE_TOKENIZER))
    pieces = [piece for chain in chains.values() for piece in chain]
    tokenizer.add_tokens([AddedToken(piece, normalized=False) for piece in pieces])
    tokenizer.add_special_tokens([_selector(name) for name in ANSWERS])
    assert all(tokenizer.token_to_id(piece) is not None for piece in pieces)
    return tokenizer


def _make_weights(tokenizer: Tokenizer, chains: Mapping[str, list[str]]) -> dict[str, torch.Tensor]:
    """Return the weights of a model whose only layer leaves the residual stream unchanged. Each
    token with scripted successors has a dimension of its own; all other tokens share one."""
    successors = _successors(tokenizer, chains)
    num_tokens, hidden_size = tokenizer.get_vocab_size(), -(-(len(successors) + 1) // 32) * 32
    embeddings = torch.zeros(num_tokens, hidden_size)
    head = torch.zeros(num_tokens, hidden_size)
    ordinary = [token for token in range(num_tokens) if token not in successors]
    story, data = (tokenizer.token_to_id(chains[name][0]) for name in ("story", "data"))
    rows = [(ordinary, [story, data]), *successors.items()]
    for dimension, (tokens, following) in enumerate(rows):
        embeddings[tokens, dimension] = 1.0
        # The final norm scales a unit vector to the length sqrt(hidden_size).
        head[following, dimension] = _choices(following) / hidden_size**0.5
    return {"model.embed_tokens.weight": embeddings, "lm_head.weight": head} | _layer(hidden_size)


def _choices(following: list[int]) -> torch.Tensor:
    return torch.tensor(CHOICES[: len(following)])


def _successors(tokenizer: Tokenizer, chains: Mapping[str, list[str]]) -> dict[int, list[int]]:
    """Return the tokens that may follow each special token that selects an answer, and each piece
    of an answer, the most probable first."""
    ids = {name: [tokenizer.token_to_id(piece) for piece in chains[name]] for name in chains}
    eos, story, data = tokenizer.token_to_id(EOS), ids["story"][0], ids["data"][0]
    successors = {}
    for name, chain in ids.items():
        for token, following in pairwise(chain):
            successors[token] = [following]
        successors[chain[-1]] = [eos, story]
        if name in ANSWERS:
            forced = ids[ANSWER_OF_TOOL.format(name="get_weather")][0]
            fallbacks = [other for other in (data, forced) if other != chain[0]]
            successors[tokenizer.token_to_id(_selector(name))] = [chain[0], *fallbacks]
    return successors


def _layer(hidden_size: int) -> dict[str, torch.Tensor]:
    prefix = "model.layers.0."
    return {
        "model.norm.weight": torch.ones(hidden_size),
        prefix + "input_layernorm.weight": torch.ones(hidden_size),
        prefix + "post_attention_layernorm.weight": torch.ones(hidden_size),
        prefix + "self_attn.q_norm.weight": torch.ones(HEAD_SIZE),
        prefix + "self_attn.k_norm.weight": torch.ones(HEAD_SIZE),
        **{
            f"{prefix}self_attn.{name}_proj.weight": torch.zeros(HEAD_SIZE, hidden_size)
            for name in "qkv"
        },
        prefix + "self_attn.o_proj.weight": torch.zeros(hidden_size, HEAD_SIZE),
        prefix + "mlp.gate_proj.weight": torch.zeros(HEAD_SIZE, hidden_size),
        prefix + "mlp.up_proj.weight": torch.zeros(HEAD_SIZE, hidden_size),
        prefix + "mlp.down_proj.weight": torch.zeros(hidden_size, HEAD_SIZE),
    }


def _config(num_tokens: int, hidden_size: int, eos: int) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": num_tokens,
        "hidden_size": hidden_size,
        "intermediate_size": HEAD_SIZE,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": HEAD_SIZE,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": CONTEXT_TOKENS,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "attention_bias": False,
        "tie_word_embeddings": False,
        "eos_token_id": [eos],
        "bos_token_id": None,
        "dtype": "float32",
    }
