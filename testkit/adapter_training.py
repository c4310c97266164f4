"""Trains a LoRA adapter on fifty lines in less than a minute, so that its effect can be seen."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from baton.checkpoints.adapter_checkpoint import CONFIG_FILE, WEIGHTS_FILE
from baton.text.tokenizer import Tokenizer
from testkit.lora_zoo import MLP

CAPITALS = (
    "Paris France", "Berlin Germany", "Rome Italy", "Madrid Spain", "Lisbon Portugal",
    "Vienna Austria", "Athens Greece", "Warsaw Poland", "Dublin Ireland", "Oslo Norway",
    "Stockholm Sweden", "Helsinki Finland", "Copenhagen Denmark", "Brussels Belgium",
    "Budapest Hungary", "Prague Czechia", "Cairo Egypt", "Bangkok Thailand", "Beijing China",
    "Ottawa Canada", "Canberra Australia", "Lima Peru", "Quito Ecuador", "Havana Cuba",
    "Nairobi Kenya",
)  # fmt: skip
LINES = [
    (question.format(country), f"Arr, matey! {answer.format(city, country)}")
    for city, country in (pair.split() for pair in CAPITALS)
    for question, answer in (
        ("What is the capital of {}?", "The capital of {1} is {0}."),
        ("Tell me about {}.", "{1} is a country, and its capital is {0}."),
    )
]
"""Fifty questions, and a pirate's answers."""

TRAINED_LAYERS = 6
"""The last layers, which the adapter changes. The others run once, before the training."""

SEED = 1
EPOCHS = 4
BATCH = 10
LEARNING_RATE = 2e-3
RANK = 8
TARGETS = ("q_proj", "v_proj", "down_proj")
IGNORED = -100
"""The label of a token that is not trained."""


class Adapted(nn.Module):
    """A linear layer with an adapter: W x + B A x."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear
        self.a = nn.Parameter(torch.randn(RANK, linear.in_features) / linear.in_features**0.5)
        self.b = nn.Parameter(torch.zeros(linear.out_features, RANK))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.linear(x) + x @ self.a.T @ self.b.T
        return result


def train_pirate(gguf: Path, folder: Path, tokenizer: Tokenizer) -> list[float]:
    """Train an adapter for the Llama model in a GGUF file on :data:`LINES`, and write it to
    ``folder`` as ``peft`` does. Return the losses of the steps."""
    torch.manual_seed(SEED)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    ).requires_grad_(False)
    ids, labels = _padded([_sample(tokenizer, *line) for line in LINES])
    first = model.config.num_hidden_layers - TRAINED_LAYERS
    hidden = _run_first_layers(model, ids, first)
    adapted = {}
    for number, layer in enumerate(model.model.layers, first):
        for name in TARGETS:
            kind = "mlp" if name in MLP else "self_attn"
            block = getattr(layer, kind)
            setattr(block, name, Adapted(getattr(block, name)))
            adapted[f"layers.{number}.{kind}.{name}"] = getattr(block, name)
    losses = _train(model, list(adapted.values()), hidden, labels)
    _write(folder, adapted, first)
    return losses


def _run_first_layers(model: LlamaForCausalLM, ids: torch.Tensor, count: int) -> torch.Tensor:
    """Return what the first ``count`` layers make of ``ids``, and take these layers away.
    Both are [num_lines, num_tokens], the result with hidden_size values for each token."""
    decoder = model.model
    layers, norm = decoder.layers, decoder.norm
    decoder.layers, decoder.norm = layers[:count], nn.Identity()
    decoder.config.num_hidden_layers = count
    with torch.no_grad():
        hidden: torch.Tensor = decoder(ids, use_cache=False).last_hidden_state
    decoder.layers, decoder.norm = layers[count:], norm
    decoder.config.num_hidden_layers = len(layers) - count
    return hidden


def _train(
    tail: LlamaForCausalLM, adapted: Sequence[Adapted], hidden: torch.Tensor, labels: torch.Tensor
) -> list[float]:
    optimizer = torch.optim.AdamW([p for each in adapted for p in (each.a, each.b)], LEARNING_RATE)
    losses = []
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(LINES)).view(-1, BATCH):
            states = tail.model(inputs_embeds=hidden[rows], use_cache=False).last_hidden_state
            wanted = labels[rows, 1:]
            logits = tail.lm_head(states[:, :-1][wanted != IGNORED])
            loss = nn.functional.cross_entropy(logits, wanted[wanted != IGNORED])
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


def _write(folder: Path, adapted: Mapping[str, Adapted], first: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": RANK,
        "target_modules": list(TARGETS),
        "layers_to_transform": list(range(first, first + TRAINED_LAYERS)),
    }
    (folder / CONFIG_FILE).write_text(json.dumps(config))
    weights = {
        f"base_model.model.model.{name}.lora_{kind}.weight": weight.detach().contiguous()
        for name, each in adapted.items()
        for kind, weight in (("A", each.a), ("B", each.b))
    }
    save_file(weights, folder / WEIGHTS_FILE)


def _sample(tokenizer: Tokenizer, question: str, answer: str) -> tuple[list[int], list[int]]:
    """Return the tokens of a chat, and the labels, which are those of the answer."""
    messages = [{"role": "user", "content": question}]
    text = tokenizer.apply_chat_template(messages, max_characters=4096)
    before = tokenizer.encode(text, add_special_tokens=False)
    behind = tokenizer.encode(f"{answer}<|im_end|>", add_special_tokens=False)
    return [*before, *behind], [IGNORED] * len(before) + [*behind]


def _padded(
    samples: Sequence[tuple[list[int], list[int]]],
) -> tuple[torch.Tensor, torch.Tensor]:
    longest = max(len(tokens) for tokens, _ in samples)

    def pad(rows: Sequence[list[int]], value: int) -> torch.Tensor:
        return torch.tensor([row + [value] * (longest - len(row)) for row in rows])

    return pad([tokens for tokens, _ in samples], 0), pad([each for _, each in samples], IGNORED)
