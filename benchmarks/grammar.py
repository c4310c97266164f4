"""Measure what grammars cost: computing a mask, and a decode step of a batch with a grammar.

    python -m benchmarks.grammar [--model DIR] [--vocabulary DIR] [--batch N] [--steps N]

Masks cover the model's vocabulary, or that of the tokenizer.json in the directory ``--vocabulary``.
Steps of the model with and without a grammar alternate, so that both run under the same conditions.
Answers are sampled at temperature 1 with a fixed seed. Prints a table, and JSON as the last line.
"""

import argparse
import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter

import numpy as np

from baton.checkpoints.checkpoint import load_model_config
from baton.clock import SystemClock
from baton.config import DEMO_MODEL
from baton.core.grammar import Grammar, GrammarKind
from baton.core.ids import Epoch, RequestId, TokenId
from baton.core.request import RequestSpec, SamplingParams
from baton.core.task import Task
from baton.engine.config import EngineConfig
from baton.engine.engine import Engine
from baton.engine.runner import ModelRunner
from baton.engine.runner_options import RunnerOptions
from baton.text.grammar.matcher import GrammarCompiler
from baton.text.tokenizer import Tokenizer
from testkit.machine import describe

SEED = 1
PROMPT = "def main():\n    "
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 4000},
        "colours": {"type": "array", "items": {"enum": ["red", "green", "blue"]}},
        "zip": {"type": "string", "pattern": "^[0-9]{5}$"},
    },
    "required": ["name", "colours", "zip"],
    "additionalProperties": False,
}
GRAMMARS = {
    "json_object": Grammar(GrammarKind.JSON_OBJECT),
    "json_schema": Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA)),
    "regex": Grammar(GrammarKind.REGEX, "[A-Za-z ,]{4000,}"),
}

LONG = ("json_schema", "regex")
"""Grammars whose answers can't end early, so that the batch size stays the same."""


def mask_microseconds(grammars: GrammarCompiler, grammar: Grammar, num_tokens: int) -> list[float]:
    """Return the time of each mask computation, in µs, for a few answers of random allowed tokens.
    The first answer starts with a cold grammar cache."""
    chance, shared = np.random.default_rng(SEED), grammars.compile(grammar)
    taken = []
    for _ in range(5):
        matcher = shared.deep_copy()
        for _ in range(num_tokens):
            began = perf_counter()
            bits = matcher.compute_bitmask()
            taken.append((perf_counter() - began) * 1e6)
            allowed = np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little").nonzero()[0]
            token_id = int(chance.choice(allowed))
            if token_id == 0:
                break
            matcher.consume_token(token_id)
    return taken


class GrammarBatch:
    """A batch of requests with the same prompt and different seeds, none of which ends before the
    last measured step."""

    def __init__(self, runner: ModelRunner, grammars: GrammarCompiler, prompt: list[int]) -> None:
        self._runner = runner
        self._grammars = grammars
        self._prompt = tuple(map(TokenId, prompt))

    def steps(self, size: int, num_steps: int, grammar: Grammar | None) -> Iterator[float]:
        """Yield the milliseconds of each decode step."""
        engine = self._engine(size, num_steps)
        for number in range(size):
            sampling = SamplingParams(num_steps + 8, seed=number, grammar=grammar, ignore_eos=True)
            spec = RequestSpec(
                RequestId(str(number)), Epoch(1), self._prompt, len(self._prompt), sampling
            )
            constraint = self._grammars.create(grammar) if grammar else None
            engine.add(spec, Task.PREFILL_AND_DECODE, constraint)
        for _ in range(4):
            engine.step()
        for _ in range(num_steps):
            began = perf_counter()
            engine.step()
            yield (perf_counter() - began) * 1e3

    def _engine(self, size: int, num_steps: int) -> Engine:
        config = EngineConfig(
            block_tokens=16,
            max_model_tokens=512 + num_steps,
            max_batched_tokens=512,
            max_sequences=size,
        )
        return Engine(
            self._runner,
            config,
            model_digest=self._runner.model_digest,
            kv_dtype=self._runner.kv_dtype,
            eos_token_ids=frozenset({TokenId(0)}),
            clock=SystemClock(),
        )


def step_milliseconds(batch: GrammarBatch, size: int, num_steps: int) -> dict[str, float]:
    """Return the median milliseconds of steps with and without a grammar, run alternately."""
    runs = {"none": batch.steps(size, num_steps, None)}
    runs |= {name: batch.steps(size, num_steps, GRAMMARS[name]) for name in LONG}
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(num_steps):
        for name, run in runs.items():
            taken[name].append(next(run))
    return {name: statistics.median(each) for name, each in taken.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=DEMO_MODEL)
    parser.add_argument("--vocabulary", type=Path)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=100)
    given = parser.parse_args()
    print(describe())
    folder = given.vocabulary or given.model
    vocab_size = Tokenizer.load(folder).vocab_size
    began = perf_counter()
    grammars = GrammarCompiler.load(folder, vocab_size, [TokenId(0)])
    print(f"vocabulary of {vocab_size}, read in {perf_counter() - began:.2f} s")
    result: dict[str, object] = {"vocab_size": vocab_size}
    for name, grammar in GRAMMARS.items():
        taken = sorted(mask_microseconds(grammars, grammar, 100))
        p50, p99 = statistics.median(taken), taken[int(len(taken) * 0.99)]
        print(f"mask of {name:12} p50 {p50:7.0f} µs   p99 {p99:7.0f} µs")
        result[f"mask_{name}_microseconds"] = {"p50": p50, "p99": p99}
    if given.vocabulary is None:
        config = load_model_config(given.model)
        runner = ModelRunner.load(given.model, RunnerOptions(num_blocks=64 * given.batch * 4))
        grammars = GrammarCompiler.load(given.model, config.vocab_size, [TokenId(0)])
        batch = GrammarBatch(runner, grammars, Tokenizer.load(given.model).encode(PROMPT))
        steps = step_milliseconds(batch, given.batch, given.steps)
        for name, taken_ms in steps.items():
            share = taken_ms / steps["none"] - 1
            print(f"step of {given.batch}, grammar {name:12} {taken_ms:7.2f} ms  {share:+.1%}")
        result["step_milliseconds"] = steps
    print(json.dumps(result))


if __name__ == "__main__":
    main()
