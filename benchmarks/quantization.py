"""Measure the loss of quality, the size and the loading time of quantized weights.

    python -m benchmarks.quantization [--model DIR] [--dtype bfloat16|float32] [--rows N]

Quality is the mean loss (nats per token) over text that the demo model was not trained on: held-out
files of Python's standard library, in rows of 512 tokens; other models get the same text. Also
measures how often the likeliest token is the same as with the original weights, and the
Kullback-Leibler divergence from the original weights' distribution. All formats see the same rows.
For speed, see ``python -m benchmarks.engine --quantized int8 int4``. Prints a table, and JSON as
the last line.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch.nn import functional

from baton.config import DEMO_MODEL
from baton.core.ids import BlockId, RequestId, TokenId
from baton.core.request import SamplingParams
from baton.engine.attention.base import pack_batch
from baton.engine.native.decoder import NativeModel
from baton.engine.native.library import QUANTIZATION_CODES
from baton.engine.plan import Row
from baton.engine.runner import ModelRunner
from baton.engine.runner_options import RunnerOptions
from baton.text.tokenizer import Tokenizer
from testkit.machine import describe
from testkit.standard_library import texts

ROW_TOKENS = 512
BLOCK_TOKENS = 16
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Quality:
    """``loss`` and ``divergence`` (from the original weights) are in nats per token."""

    name: str
    loss: float
    agreement: float
    divergence: float
    weight_bytes: int
    load_seconds: float


class LogprobReader:
    """A model that returns the log-probabilities of whole rows."""

    def __init__(self, options: argparse.Namespace, name: str) -> None:
        began = time.perf_counter()
        self._runner = ModelRunner.load(
            options.model,
            RunnerOptions(
                device="cpu",
                dtype=options.dtype,
                num_blocks=ROW_TOKENS // BLOCK_TOKENS,
                block_tokens=BLOCK_TOKENS,
                cpu_kernels="on",
                quantization=name,
            ),
        )
        self.load_seconds = time.perf_counter() - began
        model = self._runner._model
        assert isinstance(model, NativeModel)
        self._model = model

    @property
    def weight_bytes(self) -> int:
        return self._model.weight_bytes

    @torch.inference_mode()
    def logprobs(self, tokens: list[int]) -> torch.Tensor:
        """Return the log-probabilities [len(tokens), vocabulary]."""
        blocks = tuple(BlockId(n) for n in range(self._runner.num_blocks))
        ids = tuple(TokenId(token) for token in tokens)
        row = Row(RequestId("row"), ids, 0, blocks, sample=False, sampling=SamplingParams(1))
        hidden = self._model.hidden(torch.tensor(tokens), pack_batch([row], BLOCK_TOKENS, CPU))
        return self._model.logits(hidden, torch.arange(len(tokens))).log_softmax(dim=-1)


def held_out(model: Path, most: int) -> list[list[int]]:
    """Return at most ``most`` rows of the held-out files. A row has ROW_TOKENS + 1 tokens: the
    model computes all but the last one, which is only predicted."""
    tokenizer = Tokenizer.load(model, uses_fast_encoder=False)
    tokens: list[int] = []
    for is_held_out, text in texts():
        if is_held_out and len(tokens) < most * (ROW_TOKENS + 1):
            tokens += tokenizer.encode(text)
    starts = range(0, len(tokens) - ROW_TOKENS, ROW_TOKENS + 1)
    return [tokens[start : start + ROW_TOKENS + 1] for start in starts][:most]


def compare(options: argparse.Namespace) -> Iterator[Quality]:
    rows = held_out(options.model, options.rows)
    plain = LogprobReader(options, "none")
    for name in QUANTIZATION_CODES:
        reader = plain if name == "none" else LogprobReader(options, name)
        losses, agreements, divergences = [], [], []
        for row in rows:
            got, wanted = reader.logprobs(row[:-1]), plain.logprobs(row[:-1])
            losses.append(functional.nll_loss(got, torch.tensor(row[1:])).item())
            agreements.append((got.argmax(-1) == wanted.argmax(-1)).double().mean().item())
            divergences.append((wanted.exp() * (wanted - got)).sum(-1).mean().item())
        yield Quality(
            name,
            loss=statistics.fmean(losses),
            agreement=statistics.fmean(agreements),
            divergence=statistics.fmean(divergences),
            weight_bytes=reader.weight_bytes,
            load_seconds=reader.load_seconds,
        )


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", type=Path, default=DEMO_MODEL)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--rows", type=int, default=100)
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    torch.set_num_threads(options.threads)
    report = {**describe(), **vars(options), "model": options.model.name}
    print(report)
    found = []
    for each in compare(options):
        found.append(asdict(each))
        print(
            f"{each.name:5} loss {each.loss:.4f} ({each.loss - found[0]['loss']:+.4f})  "
            f"same token {each.agreement:7.2%}  divergence {each.divergence:.5f}  "
            f"{each.weight_bytes / 2**20:8.1f} MiB "
            f"({found[0]['weight_bytes'] / each.weight_bytes:.2f} × fewer)  "
            f"loaded in {each.load_seconds:.2f} s",
            flush=True,
        )
    print(json.dumps({**report, "lines": found}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
