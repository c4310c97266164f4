"""Train the demo model that ships with Baton on the text of Python's standard library.

    python -m tools.train_demo_model --work DIR [--minutes 45] [--out baton/models/demo]

Trains a Qwen3 decoder (grouped-query attention, q/k norm, tied embeddings) with about 6 million
parameters and a byte-level BPE tokenizer on the sources and docstrings of the running interpreter's
standard library (PSF licence). Master weights are FP32, and matrix products BF16. The exported
weights are rounded to BF16, and the held-out loss is measured on them. An interrupted run continues
from its last checkpoint in ``--work``.
"""

import argparse
import ast
import json
import math
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import Qwen3Config, Qwen3ForCausalLM

from testkit.standard_library import HELD_OUT_PERCENT, texts

END, START_TURN, END_TURN = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
VOCABULARY = 4096
CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
CARD = """---
license: psf-2.0
language: [en, code]
---
# Baton's demo model

A small language model for trying Baton and for its tests: real enough that its completions look
like Python, small enough to ship in a source repository. It is no assistant.

| | |
|---|---|
{table}

Greedy completions:

{shown}
"""
PROBES = [
    "def read_file(path):\n",
    "import os\n",
    "class Stack:\n",
    f"{START_TURN}user\nWhat does read_file do?{END_TURN}\n{START_TURN}assistant\n",
]


@dataclass(frozen=True)
class Corpus:
    """Training texts and held-out texts. A hash of a file's path decides to which of them the whole
    file belongs."""

    train: list[str]
    held_out: list[str]


@dataclass
class TrainingReport:
    """The figures that the model card shows."""

    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    parameters: int = 0
    train_tokens: int = 0
    held_out_loss: float = 0.0
    bits_per_byte: float = 0.0
    samples: list[tuple[str, str]] | None = None


def read_corpus() -> Corpus:
    corpus = Corpus([], [])
    for held_out, text in texts():
        (corpus.held_out if held_out else corpus.train).append(text)
        if not held_out:
            corpus.train.extend(chats_of(text))
    return corpus


def chats_of(source: str) -> list[str]:
    """Return small conversations about the file's functions and classes."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return []
    chats = []
    for node in ast.walk(tree):
        if not isinstance(node, (ast.FunctionDef, ast.ClassDef)) or node.name.startswith("__"):
            continue
        document = ast.get_docstring(node)
        if document and len(document) < 1200:
            chats.append(chat(f"What does {node.name} do?", document))
        code = ast.get_source_segment(source, node)
        if code and len(code) < 900:
            kind = "class" if isinstance(node, ast.ClassDef) else "function"
            chats.append(chat(f"Write a {kind} named {node.name}.", code))
    return chats


def chat(question: str, answer: str) -> str:
    user = f"{START_TURN}user\n{question}{END_TURN}\n"
    return f"{user}{START_TURN}assistant\n{answer}{END_TURN}\n"


def train_tokenizer(texts: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END, START_TURN, END_TURN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode_all(tokenizer: Tokenizer, texts: list[str], seed: int) -> np.ndarray:
    """Return one long row of token ids: the texts in shuffled order, each followed by END."""
    order = np.random.default_rng(seed).permutation(len(texts))
    end = tokenizer.token_to_id(END)
    encoded = tokenizer.encode_batch([texts[index] for index in order])
    return np.concatenate([np.array([*row.ids, end], dtype=np.int64) for row in encoded])


def model_config(tokenizer: Tokenizer) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=[tokenizer.token_to_id(END_TURN), tokenizer.token_to_id(END)],
        dtype="bfloat16",
    )


def batch(tokens: np.ndarray, length: int, rows: int, random: np.random.Generator) -> torch.Tensor:
    """Return token ids [rows, length + 1] from random positions."""
    starts = random.integers(0, len(tokens) - length - 1, rows)
    return torch.from_numpy(np.stack([tokens[s : s + length + 1] for s in starts]))


def loss_of(model: Qwen3ForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())


def learning_rate(progress: float, peak: float) -> float:
    """Return the learning rate: a warm-up over the first 2 % of the training, then a cosine down to
    5 % of ``peak``."""
    if progress < 0.02:
        return peak * progress / 0.02
    return peak * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * (progress - 0.02) / 0.98)))


def make_optimizers(model: Qwen3ForCausalLM) -> list[torch.optim.Optimizer]:
    """Return Muon (Jordan et al. 2024) for the matrices in the layers, and AdamW for the other
    parameters."""
    inner = [p for name, p in model.named_parameters() if "layers." in name and p.dim() == 2]
    rest = [p for name, p in model.named_parameters() if "layers." not in name or p.dim() != 2]
    return [
        torch.optim.Muon(inner, lr=0.0, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=0.0, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def train(
    model: Qwen3ForCausalLM,
    optimizers: list[torch.optim.Optimizer],
    tokens: np.ndarray,
    report: TrainingReport,
    options: argparse.Namespace,
) -> None:
    """Train for ``options.minutes``, the last tenth of that time on longer rows."""
    random = np.random.default_rng(options.seed + report.steps)
    budget = options.minutes * 60
    began, before = time.monotonic(), report.seconds
    while report.seconds < budget:
        progress = report.seconds / budget
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group["lr"] = learning_rate(progress, options.learning_rate)
        long_rows = progress > 0.9
        length, rows = (2048, 2) if long_rows else (512, 8)
        loss = loss_of(model, batch(tokens, length, rows, random))
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad(set_to_none=True)
        report.steps += 1
        report.tokens += length * rows
        report.seconds = before + time.monotonic() - began
        if report.steps % 20 == 0:
            rate = report.tokens / report.seconds
            left = (budget - report.seconds) / 60
            print(
                f"step {report.steps} loss {loss.item():.3f} {rate:.0f} tok/s, {left:.1f} min left"
            )
            sys.stdout.flush()
        if report.steps % 200 == 0:
            save_checkpoint(model, optimizers, report, options.work)


def save_checkpoint(
    model: Qwen3ForCausalLM,
    optimizers: list[torch.optim.Optimizer],
    report: TrainingReport,
    work: Path,
) -> None:
    """Write the weights, the optimizer states and (in the file's header) the report into a
    temporary file, and rename it, so that the checkpoint is replaced atomically."""
    tensors = {}
    for name, p in model.named_parameters():
        tensors[f"model/{name}"] = p.detach()
        for key, value in state_of(optimizers, p).items():
            tensors[f"{key}/{name}"] = value
    save_file(tensors, work / "checkpoint.new", metadata={"report": json.dumps(asdict(report))})
    (work / "checkpoint.new").rename(work / "checkpoint.safetensors")


def load_checkpoint(
    model: Qwen3ForCausalLM, optimizers: list[torch.optim.Optimizer], work: Path
) -> TrainingReport:
    """Restore model and optimizers from the checkpoint; return its report. Without a checkpoint,
    return a new report."""
    path = work / "checkpoint.safetensors"
    if not path.exists():
        return TrainingReport()
    parameters = dict(model.named_parameters())
    with safe_open(path, "pt") as checkpoint, torch.no_grad():
        for label in checkpoint.keys():  # noqa: SIM118 (a handle, not a dict)
            kind, name = label.split("/")
            p, value = parameters[name], checkpoint.get_tensor(label)
            if kind == "model":
                p.copy_(value)
            else:
                state_of(optimizers, p)[kind] = value
        return TrainingReport(**json.loads(checkpoint.metadata()["report"]))


def state_of(optimizers: list[torch.optim.Optimizer], p: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the state of the parameter ``p`` in the optimizer that updates it."""
    for optimizer in optimizers:
        if any(p is owned for group in optimizer.param_groups for owned in group["params"]):
            state: dict[str, torch.Tensor] = optimizer.state[p]
            return state
    raise KeyError(f"no optimizer owns the parameter of shape {[*p.shape]}")


@torch.inference_mode()
def held_out_loss(model: Qwen3ForCausalLM, tokens: np.ndarray) -> float:
    """Return the mean loss over the held-out text in nats per token, in FP32 and rows of 512."""
    rows = torch.from_numpy(tokens[: len(tokens) // 513 * 513].reshape(-1, 513))
    losses = []
    for part in torch.split(rows, 16):
        logits = model(input_ids=part[:, :-1], use_cache=False).logits
        losses.append(
            torch.nn.functional.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten()).item()
        )
    return float(np.mean(losses))


def export(model: Qwen3ForCausalLM, tokenizer: Tokenizer, out: Path) -> None:
    """Write the Hugging Face directory, with weights rounded to BF16."""
    out.mkdir(parents=True, exist_ok=True)
    tied = "lm_head.weight"
    weights = {
        name: p.detach().to(torch.bfloat16).contiguous()
        for name, p in model.state_dict().items()
        if name != tied
    }
    save_file(weights, out / "model.safetensors.new", metadata={"format": "pt"})
    (out / "model.safetensors.new").chmod(0o644)  # save_file lets only the owner read it
    (out / "model.safetensors.new").rename(out / "model.safetensors")
    model.config.architectures = ["Qwen3ForCausalLM"]
    model.config.save_pretrained(out)
    ends = [tokenizer.token_to_id(END_TURN), tokenizer.token_to_id(END)]
    write_json(out / "generation_config.json", {"eos_token_id": ends, "pad_token_id": ends[1]})
    tokenizer.save(str(out / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 8192,
        "eos_token": END_TURN,
        "pad_token": END,
        "additional_special_tokens": [START_TURN],
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    write_json(out / "tokenizer_config.json", settings)


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


@torch.inference_mode()
def complete(model: Qwen3ForCausalLM, tokenizer: Tokenizer, prompt: str) -> str:
    ids = torch.tensor([tokenizer.encode(prompt).ids])
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=48, do_sample=False, pad_token_id=0
    )
    return tokenizer.decode(output[0, ids.shape[1] :].tolist())


def write_card(report: TrainingReport, config: Qwen3Config, out: Path) -> None:
    shown = "\n".join(
        f"```python\n{prompt}# --- the model goes on:\n{text}\n```"
        for prompt, text in report.samples or []
    )
    rows = {
        "architecture": f"Qwen3, {report.parameters / 1e6:.1f} M parameters, "
        f"{config.num_hidden_layers} layers, {config.num_attention_heads} query and "
        f"{config.num_key_value_heads} KV heads, tied embeddings",
        "data": f"sources and docstrings of CPython {sys.version.split()[0]}'s standard library "
        f"(PSF licence), {report.train_tokens:,} tokens with the small chats made from its "
        f"docstrings; {HELD_OUT_PERCENT} % of the files held out",
        "training": f"{report.steps:,} steps, {report.tokens:,} tokens, "
        f"{report.seconds / 60:.0f} minutes on a {os.cpu_count()}-core x86-64 CPU "
        "(Muon and AdamW, BF16 products, FP32 master weights; rows of 512 tokens, the last tenth "
        "of 2,048)",
        "held-out loss": f"{report.held_out_loss:.3f} nats per token, {report.bits_per_byte:.3f} "
        "bits per byte, measured in FP32 on these BF16 weights",
        "made by": "`tools/train_demo_model.py`",
    }
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    out.joinpath("README.md").write_text(CARD.format(table=table, shown=shown))


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--work", type=Path, required=True, help="folder for checkpoints")
    parser.add_argument("--out", type=Path, default=Path("baton/models/demo"))
    parser.add_argument("--minutes", type=float, default=45.0, help="of training")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> None:
    options = parse(arguments)
    options.work.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    corpus = read_corpus()
    tokenizer = train_tokenizer(corpus.train)
    tokens = encode_all(tokenizer, corpus.train, options.seed)
    held_out = encode_all(tokenizer, corpus.held_out, options.seed)
    model = Qwen3ForCausalLM(model_config(tokenizer)).float()
    optimizers = make_optimizers(model)
    report = load_checkpoint(model, optimizers, options.work)
    report.parameters = sum(p.numel() for p in model.parameters())
    report.train_tokens = len(tokens)
    print(f"{report.parameters:,} parameters, {len(tokens):,} tokens, {len(held_out):,} held out")
    train(model, optimizers, tokens, report, options)
    save_checkpoint(model, optimizers, report, options.work)
    export(model, tokenizer, options.out)
    rounded = Qwen3ForCausalLM.from_pretrained(options.out, dtype=torch.float32)
    report.held_out_loss = held_out_loss(rounded, held_out)
    num_bytes = sum(len(text.encode()) for text in corpus.held_out)
    report.bits_per_byte = report.held_out_loss / math.log(2) * len(held_out) / num_bytes
    report.samples = [(prompt, complete(rounded, tokenizer, prompt)) for prompt in PROBES]
    write_card(report, model.config, options.out)
    print(f"held-out loss {report.held_out_loss:.4f}, {report.bits_per_byte:.4f} bits per byte")


if __name__ == "__main__":
    main(sys.argv[1:])
