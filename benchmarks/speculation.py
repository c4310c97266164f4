"""Compare decoding with and without speculation.

    python -m benchmarks.speculation [--model DIR | --shape 50m|0.6b] [--dtype float32|bfloat16]
                                     [--threads N] [--batches N …] [--texts NAME …]
                                     [--tokens N] [--rounds N]

In each round, an engine with ``speculation`` and one without generate the same answers, one after
the other; their prompts are cached. Reports the tokens per second of the answers, from the end of
the prompts on, as medians over the rounds, and the median ratio of the two, by wall clock and by
the process's CPU time, which other load on the machine distorts less. It fails unless all tokens
are equal. The texts:

- ``edit``: the prompt is code (of Python's standard library), and the answer is the same code with
  a name changed and lines added. ``new``: the answer is other code than the prompt's. For both, the
  model computes everything, but the tokens that it samples are replaced by those of the text: so
  they cost what they would cost with a model that knows how to edit.
- ``greedy`` and ``sampled`` (temperature 0.8): the model's own answers. The demo model's greedy
  answers often repeat themselves.

Prints a table, and JSON as the last line.
"""

import argparse
import json
import statistics
import sys
import sysconfig
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import torch

from baton.clock import SystemClock
from baton.config import DEMO_MODEL
from baton.core.ids import Epoch, RequestId, TokenId
from baton.core.request import RequestSpec, SamplingParams
from baton.core.task import Task
from baton.engine.config import EngineConfig
from baton.engine.engine import Engine
from baton.engine.executor import ThreadedExecutor
from baton.engine.launched_step import SampledOnHost
from baton.engine.plan import Row, SampledToken
from baton.engine.runner import ModelRunner
from baton.engine.runner_options import RunnerOptions
from baton.text.tokenizer import load_tokenizer
from benchmarks.engine import SHAPES, write_model
from testkit.machine import describe

MODULES = [
    *("textwrap", "argparse", "heapq", "bisect", "csv", "shlex", "fnmatch", "glob", "queue"),
    *("sched", "calendar", "cmd", "code", "codeop", "configparser", "contextlib", "copy"),
]
PROMPT_TOKENS = 512
MIN_NAME_LENGTH = 4
TEXTS = ("edit", "new", "greedy", "sampled")
GREEDY = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
SAMPLED = replace(GREEDY, temperature=0.8)


@dataclass(frozen=True)
class Conversation:
    """A prompt, and the tokens of its answer if the text prescribes them."""

    prompt: tuple[TokenId, ...]
    answer: tuple[TokenId, ...] = ()


class ScriptedSampler:
    """Samples as the runner does, and then replaces the tokens of requests that have a script."""

    def __init__(self, runner: ModelRunner) -> None:
        self.scripts: dict[RequestId, Conversation] = {}
        self._sample = runner._sample
        runner._sample = self

    def __call__(self, logits: torch.Tensor, rows: Sequence[Row]) -> SampledOnHost:
        sampled = self._sample(logits, rows).wait()
        return SampledOnHost(
            [self._scripted(row, token) for row, token in zip(rows, sampled, strict=True)]
        )

    def _scripted(self, row: Row, token: SampledToken | None) -> SampledToken | None:
        script = self.scripts.get(row.request_id)
        if script is None or not script.answer:
            return token
        return SampledToken(script.answer[row.context_tokens - len(script.prompt)])


@dataclass
class Generated:
    """The answers of one turn, and what they took after the first token of each, by wall clock and
    by the process's CPU time."""

    tokens: dict[RequestId, list[TokenId]]
    tokens_per_second: float
    tokens_per_cpu_second: float
    num_steps: int


class Side:
    """An engine with or without speculation, which keeps its prefix cache between the turns."""

    def __init__(self, runner: ModelRunner, sampler: ScriptedSampler, speculates: bool) -> None:
        self._sampler = sampler
        self._num_turns = 0
        is_threaded = runner.leaves_core_free(torch.get_num_threads() + 1)
        self._engine = Engine(
            runner,
            EngineConfig(block_tokens=16, max_model_tokens=4096, speculation=speculates),
            model_digest=runner.model_digest,
            kv_dtype=runner.kv_dtype,
            eos_token_ids=frozenset(),
            clock=SystemClock(),
            executor=ThreadedExecutor(runner) if is_threaded else None,
        )

    def generate(
        self, conversations: Sequence[Conversation], sampling: SamplingParams
    ) -> Generated:
        self._num_turns += 1
        tokens: dict[RequestId, list[TokenId]] = {}
        for index, each in enumerate(conversations):
            name = RequestId(f"{index}")
            spec = RequestSpec(
                name, Epoch(1), each.prompt, len(each.prompt), replace(sampling, seed=index)
            )
            self._sampler.scripts[name] = each
            tokens[name] = []
            self._engine.add(spec, Task.PREFILL_AND_DECODE)
        while not all(tokens.values()):
            self._step(tokens)
        num_first, num_steps = sum(map(len, tokens.values())), 0
        began, cpu_began = perf_counter(), process_time()
        while self._engine.has_work():
            self._step(tokens)
            num_steps += 1
        seconds, cpu_seconds = perf_counter() - began, process_time() - cpu_began
        num_tokens = sum(map(len, tokens.values())) - num_first
        return Generated(tokens, num_tokens / seconds, num_tokens / cpu_seconds, num_steps)

    def acceptance(self) -> tuple[int, int]:
        """Return the numbers of drafted and of accepted tokens so far."""
        stats = self._engine.stats()
        return stats.num_drafted_tokens, stats.num_accepted_tokens

    def close(self) -> None:
        self._engine.close()

    def _step(self, tokens: dict[RequestId, list[TokenId]]) -> None:
        for output in self._engine.step().outputs:
            tokens[output.request_id] += output.token_ids


def edited(source: str) -> str:
    """Return the code with its most frequent long name changed, and with a comment and a call after
    every twentieth line."""
    names = Counter(word for word in source.split() if word.isidentifier())
    name = next(word for word, _ in names.most_common() if len(word) >= MIN_NAME_LENGTH)
    lines = []
    for number, line in enumerate(source.replace(name, f"new_{name}").splitlines(), 1):
        lines.append(line)
        if number % 20 == 0:
            indent = line[: len(line) - len(line.lstrip())]
            lines.append(f"{indent}# checked in step {number}")
            lines.append(f"{indent}trace({number})")
    return "\n".join(lines)


def conversations(text: str, count: int, num_tokens: int) -> list[Conversation]:
    """Return ``count`` conversations, each about another module of the standard library."""
    tokenizer = load_tokenizer(DEMO_MODEL / "tokenizer.json")

    def encode(source: str, length: int) -> tuple[TokenId, ...]:
        return tuple(map(TokenId, tokenizer.encode(source).ids[:length]))

    root = Path(sysconfig.get_path("stdlib"))
    sources = [(root / f"{name}.py").read_text(encoding="utf-8") for name in MODULES]
    chosen = []
    for index in range(count):
        source, other = sources[index], sources[index - 1]
        answers = {"edit": edited(source), "new": other}
        answer = encode(answers[text], num_tokens) if text in answers else ()
        chosen.append(Conversation(encode(source, PROMPT_TOKENS), answer))
    return chosen


def measure(
    runner: ModelRunner, text: str, batch: int, options: argparse.Namespace
) -> dict[str, Any]:
    sampler = ScriptedSampler(runner)
    sides = [Side(runner, sampler, speculates) for speculates in (False, True)]
    plan = conversations(text, batch, options.tokens)
    sampling = replace(SAMPLED if text == "sampled" else GREEDY, max_tokens=options.tokens)
    samples = []
    for number in range(options.rounds + 1):
        without, speculating = (side.generate(plan, sampling) for side in sides)
        if without.tokens != speculating.tokens:
            raise SystemExit(f"{text}, batch {batch}: the tokens differ")
        if number:  # the first round fills the prefix cache
            samples.append((without, speculating))
    drafted, accepted = sides[1].acceptance()
    for side in sides:
        side.close()
    runner._sample = sampler._sample
    return {
        "text": text,
        "batch": batch,
        "off": statistics.median(off.tokens_per_second for off, _ in samples),
        "on": statistics.median(on.tokens_per_second for _, on in samples),
        "ratio": statistics.median(
            on.tokens_per_second / off.tokens_per_second for off, on in samples
        ),
        "cpu_ratio": statistics.median(
            on.tokens_per_cpu_second / off.tokens_per_cpu_second for off, on in samples
        ),
        "drafted": drafted,
        "accepted": accepted,
        "tokens_per_step": (options.tokens - 1) / speculating.num_steps,
    }


def run(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        path = options.model
        if options.shape:
            path = Path(folder)
            write_model(path, options)
        runner = ModelRunner.load(
            path, RunnerOptions(device="cpu", dtype=options.dtype, num_blocks=1600)
        )
        for text in options.texts:
            for batch in options.batches:
                yield measure(runner, text, batch, options)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", type=Path, default=DEMO_MODEL)
    parser.add_argument("--shape", choices=SHAPES, help="random weights instead of --model")
    parser.add_argument("--layers", type=int, default=0, help="layers of --shape; 0: all")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--texts", nargs="+", choices=TEXTS, default=list(TEXTS))
    parser.add_argument("--tokens", type=int, default=256, help="of each answer")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1, help="of random weights")
    options = parser.parse_args(arguments)
    if max(options.batches) > len(MODULES):
        parser.error(f"batches of at most {len(MODULES)}: each answer is about another module")
    return options


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    torch.set_num_threads(options.threads)
    report = {**describe(), **vars(options), "model": str(options.model)}
    print(report, "tokens/s without and with speculation", sep="\n")
    lines = []
    for line in run(options):
        lines.append(line)
        share = line["accepted"] / max(line["drafted"], 1)
        print(
            f"{line['text']:8} batch {line['batch']:2}  {line['off']:8.1f} {line['on']:8.1f}  "
            f"× {line['ratio']:.2f} (CPU {line['cpu_ratio']:.2f})  "
            f"{line['tokens_per_step']:5.2f} tokens a step, "
            f"{share:4.0%} of {line['drafted']} drafts right",
            flush=True,
        )
    print(json.dumps({**report, "lines": lines}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
