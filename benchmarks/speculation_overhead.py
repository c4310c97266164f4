"""Measure the CPU time that speculation adds to a step, and which drafts it decides on.

    python -m benchmarks.speculation_overhead [--texts NAME …] [--batches N …] [--tokens N]
                                              [--rounds N] [--costs demo|50m]

Runs engines with and without speculation (n-grams) over a runner without a model: answers are the
texts ``edit`` and ``new`` of :mod:`benchmarks.speculation`, and a step takes, on a clock that is
moved by hand, what a step of the demo model or of the 50M shape takes. So all decisions are the
same in every run, and the CPU time is that of the engine alone. Steps are planned ahead where the
engine can (async scheduling).

Reports for each text and batch the CPU microseconds of a step with and without speculation, as
medians over the rounds, in which the two take turns; and of the simulated time the ratio of the
tokens per second. Prints a table, and JSON as the last line.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from time import process_time
from typing import Any

import numpy as np

from baton.clock import ManualClock
from baton.core.ids import Epoch, RequestId, TokenId
from baton.core.request import RequestSpec
from baton.core.task import Task
from baton.engine.config import EngineConfig
from baton.engine.engine import Engine
from baton.engine.executor import SyncExecutor
from baton.engine.plan import Plan, Row, SampledToken, StepOutput
from benchmarks.machine import describe
from benchmarks.speculation import GREEDY, Conversation, conversations

BLOCK_TOKENS = 16
NUM_BLOCKS = 1600
UNPLANNED_SECONDS = 150e-6
"""What a step takes longer if it was not planned ahead."""

COSTS = {
    "demo": {
        1: ((1, 0.44), (2, 0.58), (4, 0.65), (9, 0.95), (16, 1.45)),
        4: ((4, 1.0), (8, 1.35), (16, 2.0), (32, 3.6), (64, 6.8)),
        16: ((16, 4.5), (32, 5.6), (64, 8.7), (128, 14.0), (256, 24.5)),
    },
    "50m": {
        1: ((1, 4.6), (8, 5.0), (9, 5.4), (12, 6.8), (16, 8.6)),
        4: ((4, 7.1), (8, 7.1), (16, 9.9), (32, 17.1), (64, 34.6)),
        16: ((16, 18.2), (32, 25.7), (64, 38.2), (128, 68.6), (256, 119.0)),
    },
}
"""Milliseconds of a step by its number of tokens, for a number of answers; from
docs/results/speculation.md."""


class ScriptedRunner:
    """Implements :class:`baton.engine.plan.Runner`: each request gets the answer of its
    conversation. A step moves the clock by its cost."""

    num_blocks = NUM_BLOCKS
    block_tokens = BLOCK_TOKENS
    num_groups = 1

    def __init__(self, clock: ManualClock, costs: Sequence[tuple[int, float]]) -> None:
        self.scripts: dict[RequestId, Sequence[TokenId]] = {}
        self._clock = clock
        counts = np.arange(1024)
        sizes, milliseconds = zip(*costs, strict=True)
        self._seconds = (np.interp(counts, sizes, milliseconds) / 1e3).tolist()

    def run(self, plan: Plan) -> StepOutput:
        self._clock.advance(self._seconds[min(plan.num_tokens, 1023)])
        sampled: list[SampledToken | None] = []
        following: dict[int, tuple[SampledToken, ...]] = {}
        for index, row in enumerate(plan.rows):
            tokens = self._tokens(row) if row.sample else [None]
            sampled.append(tokens[0])
            if len(tokens) > 1:
                following[index] = tuple(each for each in tokens[1:] if each is not None)
        return StepOutput(tuple(sampled), (), following)

    def _tokens(self, row: Row) -> list[SampledToken | None]:
        """Return the next token, and one more for each draft that is right."""
        script, position = self.scripts[row.request_id], row.context_tokens - row.num_drafts
        tokens: list[SampledToken | None] = [SampledToken(script[position])]
        for draft in row.token_ids[1:] if row.num_drafts else ():
            if draft != script[position]:
                break
            position += 1
            tokens.append(SampledToken(script[position]))
        return tokens


class DelayedExecutor(SyncExecutor):
    """An executor for which a step that was not planned ahead takes longer."""

    def __init__(self, runner: ScriptedRunner, clock: ManualClock) -> None:
        super().__init__(runner)
        self._clock = clock

    def submit(self, plan: Plan) -> None:
        if not self._plans:
            self._clock.advance(UNPLANNED_SECONDS)
        super().submit(plan)


@dataclass
class Turn:
    """What decoding took: steps, CPU seconds and simulated seconds."""

    num_steps: int
    cpu_seconds: float
    seconds: float


class Side:
    """An engine with or without speculation."""

    def __init__(self, costs: Sequence[tuple[int, float]], speculates: bool) -> None:
        self._clock = ManualClock()
        self._runner = ScriptedRunner(self._clock, costs)
        self.engine = Engine(
            self._runner,
            EngineConfig(block_tokens=BLOCK_TOKENS, max_model_tokens=8192, speculation=speculates),
            model_digest=b"scripted",
            kv_dtype="float32",
            eos_token_ids=frozenset(),
            clock=self._clock,
            executor=DelayedExecutor(self._runner, self._clock),
        )

    def generate(self, plan: Sequence[Conversation]) -> Turn:
        unstarted = set()
        for index, each in enumerate(plan):
            name = RequestId(str(index))
            length = len(each.answer)
            sampling = replace(GREEDY, max_tokens=length, seed=index)
            self._runner.scripts[name] = (*each.prompt, *each.answer)
            spec = RequestSpec(name, Epoch(1), each.prompt, len(each.prompt), sampling)
            unstarted.add(name)
            self.engine.add(spec, Task.PREFILL_AND_DECODE)
        while unstarted:
            unstarted -= {output.request_id for output in self.engine.step().outputs}
        began, cpu_began, num_steps = self._clock.monotonic(), process_time(), 0
        while self.engine.has_work():
            self.engine.step()
            num_steps += 1
        cpu_seconds = process_time() - cpu_began
        return Turn(num_steps, cpu_seconds, self._clock.monotonic() - began)


def measure(text: str, batch: int, options: argparse.Namespace) -> dict[str, Any]:
    costs = COSTS[options.costs]
    sides = [Side(costs[batch], speculates) for speculates in (False, True)]
    plan = conversations(text, batch, options.tokens)
    turns = [[side.generate(plan) for side in sides] for _ in range(options.rounds)]
    without, speculating = zip(*turns[1:], strict=True)
    stats = sides[1].engine.stats()

    def microseconds(side: Sequence[Turn]) -> float:
        return 1e6 * statistics.median(turn.cpu_seconds / turn.num_steps for turn in side)

    return {
        "text": text,
        "batch": batch,
        "off_us": microseconds(without),
        "on_us": microseconds(speculating),
        "ratio": statistics.median(
            off.seconds / on.seconds for off, on in zip(without, speculating, strict=True)
        ),
        "steps": speculating[-1].num_steps,
        "drafted": stats.num_drafted_tokens,
        "accepted": stats.num_accepted_tokens,
    }


def run(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for text in options.texts:
        for batch in options.batches:
            yield measure(text, batch, options)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--texts", nargs="+", choices=["edit", "new"], default=["edit", "new"])
    parser.add_argument("--batches", type=int, nargs="+", choices=[1, 4, 16], default=[1, 4, 16])
    parser.add_argument("--costs", choices=COSTS, default="demo")
    parser.add_argument("--tokens", type=int, default=512, help="of each answer")
    parser.add_argument("--rounds", type=int, default=6)
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    report = {**describe(), **vars(options)}
    print(report)
    lines = []
    for line in run(options):
        lines.append(line)
        print(
            f"{line['text']:5} batch {line['batch']:2}  {line['off_us']:6.1f} {line['on_us']:6.1f} "
            f"µs a step ({line['on_us'] - line['off_us']:+6.1f})  simulated × {line['ratio']:.3f}  "
            f"{line['steps']} steps, {line['accepted']} of {line['drafted']} drafts right",
            flush=True,
        )
    print(json.dumps({**report, "lines": lines}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
