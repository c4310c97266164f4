"""Compare how Baton and transformers batch requests of mixed lengths.

    python -m benchmarks.batching [--shape 50m|0.6b] [--layers N] [--dtype bfloat16|float32]
                                  [--threads N] [--requests N] [--without one|padded|…]

All contenders have the same random weights and number of threads, and answer the same requests
greedily. All get the requests at once, except ``one``, which is Baton with one request at a time;
``at once`` is Baton with a batch. ``continuous`` is transformers' continuous batching with paged
attention by SDPA, its only method for a CPU. That attention is dense: each token of a step is
compared with the cached tokens of all requests in the step, and a mask excludes those of other
requests. To limit this cost, ``--rows`` limits the number of requests per step. ``padded`` is
transformers' ``generate`` on batches of ``--rows`` prompts of similar length; each batch runs until
its longest answer has ended.

The requested tokens are divided by the wall time and by the CPU seconds, including the prefill.
Answers are compared with Baton's: in FP32 they should be equal. Prints a table, and JSON as the
last line.
"""

import argparse
import json
import logging
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from baton.clock import SystemClock
from baton.core.ids import Epoch, RequestId, TokenId
from baton.core.request import RequestSpec, SamplingParams
from baton.core.task import Task
from baton.engine.config import EngineConfig
from baton.engine.engine import Engine
from baton.engine.runner import ModelRunner
from baton.engine.runner_options import RunnerOptions
from benchmarks.engine import SHAPES, shape_of, write_model
from testkit.machine import SYSTEM_CLOCK, describe

PROMPTS, ANSWERS = (16, 2048), (16, 256)
"""The ranges of lengths in tokens: log-uniform for prompts, uniform for answers."""

KV_TOKENS = 2**16
"""The capacity of each contender's KV cache: more than all requests need in total."""
PAGE_TOKENS = 256
STEP_TOKENS = 512

Answers = list[list[int]]


@dataclass(frozen=True)
class WorkloadRequest:
    prompt: list[int]
    num_tokens: int


@dataclass(frozen=True)
class ContenderRun:
    """The result of one contender over all requests."""

    wall_seconds: float
    cpu_seconds: float
    answers: Answers


class BatonBatching:
    def __init__(self, path: Path, options: argparse.Namespace) -> None:
        self._runner = ModelRunner.load(
            path, RunnerOptions(device="cpu", dtype=options.dtype, num_blocks=KV_TOKENS // 16)
        )

    def at_once(self, requests: Sequence[WorkloadRequest]) -> Answers:
        engine = self._engine()
        for index, each in enumerate(requests):
            engine.add(_spec(index, each), Task.PREFILL_AND_DECODE)
        answers: Answers = [[] for _ in requests]
        while engine.has_work():
            for output in engine.step().outputs:
                answers[int(output.request_id)] += output.token_ids
        return answers

    def one_at_a_time(self, requests: Sequence[WorkloadRequest]) -> Answers:
        return [self.at_once([each])[0] for each in requests]

    def _engine(self) -> Engine:
        """Return an engine with an empty cache."""
        config = EngineConfig(
            block_tokens=16, max_model_tokens=4096, max_batched_tokens=STEP_TOKENS, max_waiting=4096
        )
        runner = self._runner
        return Engine(
            runner,
            config,
            model_digest=runner.model_digest,
            kv_dtype=runner.kv_dtype,
            eos_token_ids=frozenset(),
            clock=SystemClock(),
        )


def _spec(index: int, request: WorkloadRequest) -> RequestSpec:
    return RequestSpec(
        RequestId(str(index)),
        Epoch(1),
        tuple(map(TokenId, request.prompt)),
        len(request.prompt),
        SamplingParams(max_tokens=request.num_tokens, temperature=0.0),
    )


class TransformersBatching:
    def __init__(self, path: Path, options: argparse.Namespace) -> None:
        dtype = getattr(torch, options.dtype)
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="sdpa")
        self._model = model.eval()
        self._model.generation_config = GenerationConfig(do_sample=False, pad_token_id=0)
        self._rows = options.rows

    def continuous(self, requests: Sequence[WorkloadRequest]) -> Answers:
        """Generate with transformers' continuous batching. The prefix cache is off, since no
        prefixes are shared."""
        config = ContinuousBatchingConfig(
            page_size=PAGE_TOKENS,
            num_blocks=KV_TOKENS // PAGE_TOKENS,
            max_batch_tokens=STEP_TOKENS,
            max_requests_per_batch=self._rows,
            allow_block_sharing=False,
            auto_switch_to_flash=False,
        )
        answers: dict[str, list[int]] = {}
        with self._model.continuous_batching_context_manager(
            continuous_batching_config=config
        ) as manager:
            names = [
                manager.add_request(each.prompt, max_new_tokens=each.num_tokens, eos_token_id=-1)
                for each in requests
            ]
            while len(answers) < len(requests):
                result = manager.get_result(timeout=1)
                if result is not None and result.is_finished():
                    if result.error is not None:
                        raise RuntimeError(f"continuous batching failed: {result.error}")
                    answers[result.request_id] = list(result.generated_tokens)
                elif result is None and not manager.is_running():
                    raise RuntimeError(
                        "continuous batching ended before all requests were answered"
                    )
        return [answers[name] for name in names]

    def padded(self, requests: Sequence[WorkloadRequest]) -> Answers:
        answers: Answers = [[] for _ in requests]
        order = sorted(range(len(requests)), key=lambda index: len(requests[index].prompt))
        for first in range(0, len(order), self._rows):
            batch = order[first : first + self._rows]
            for index, answer in zip(batch, self._batch([requests[i] for i in batch]), strict=True):
                answers[index] = answer
        return answers

    @torch.inference_mode()
    def _batch(self, requests: Sequence[WorkloadRequest]) -> Answers:
        width = max(len(each.prompt) for each in requests)
        tokens = torch.zeros(len(requests), width, dtype=torch.int64)
        mask = torch.zeros_like(tokens)
        for row, each in enumerate(requests):
            tokens[row, width - len(each.prompt) :] = torch.tensor(each.prompt)
            mask[row, width - len(each.prompt) :] = 1
        longest = max(each.num_tokens for each in requests)
        given = self._model.generate(tokens, attention_mask=mask, max_new_tokens=longest)
        lines: Answers = given[:, width:].tolist()
        return [line[: each.num_tokens] for line, each in zip(lines, requests, strict=True)]


def make_requests(options: argparse.Namespace) -> list[WorkloadRequest]:
    chance = np.random.default_rng(options.seed)
    vocabulary = shape_of(options)[-1]
    low, high = PROMPTS
    lengths = np.exp(chance.uniform(np.log(low), np.log(high + 1), options.requests)).astype(int)
    answers = chance.integers(ANSWERS[0], ANSWERS[1] + 1, options.requests)
    return [
        WorkloadRequest(chance.integers(1, vocabulary, int(length)).tolist(), int(count))
        for length, count in zip(lengths, answers, strict=True)
    ]


def timed(
    contender: Callable[[Sequence[WorkloadRequest]], Answers], requests: Sequence[WorkloadRequest]
) -> ContenderRun:
    began, cpu = SYSTEM_CLOCK(), time.process_time()
    answers = contender(requests)
    run = ContenderRun(SYSTEM_CLOCK() - began, time.process_time() - cpu, answers)
    lengths = [len(answer) for answer in answers]
    assert lengths == [each.num_tokens for each in requests], lengths
    return run


def run(
    options: argparse.Namespace, requests: Sequence[WorkloadRequest]
) -> Iterator[dict[str, Any]]:
    """Run all contenders. ``equal`` is the number of answers that equal Baton's answers in a
    batch."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        write_model(path, options)
        ours, theirs = BatonBatching(path, options), TransformersBatching(path, options)
    contenders = {
        "at once": ours.at_once,
        "continuous": theirs.continuous,
        "padded": theirs.padded,
        "one": ours.one_at_a_time,
    }
    first: ContenderRun | None = None
    for name, contender in contenders.items():
        if name in options.without:
            continue
        timed(
            contender, [WorkloadRequest(each.prompt[:64], 2) for each in requests[:4]]
        )  # warms up
        each = timed(contender, requests)
        first = first or each
        num_tokens = sum(one.num_tokens for one in requests)
        yield {
            "contender": name,
            "tokens_per_second": num_tokens / each.wall_seconds,
            "tokens_per_cpu_second": num_tokens / each.cpu_seconds,
            "wall_seconds": each.wall_seconds,
            "cpu_seconds": each.cpu_seconds,
            "ours_is_faster": each.wall_seconds / first.wall_seconds,
            "equal": sum(a == b for a, b in zip(each.answers, first.answers, strict=True)),
        }


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="50m")
    parser.add_argument(
        "--layers", type=int, default=0, help="layers of the model; fewer take less time, 0: all"
    )
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--rows", type=int, default=16, help="size limit of transformers' batches")
    parser.add_argument("--without", nargs="+", default=[], choices=["continuous", "padded", "one"])
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    logging.disable(logging.WARNING)
    torch.set_num_threads(options.threads)
    requests = make_requests(options)
    num_tokens = sum(each.num_tokens for each in requests)
    report = {
        **describe(),
        **vars(options),
        "prompt_tokens": sum(len(each.prompt) for each in requests),
        "answer_tokens": num_tokens,
    }
    print(report, flush=True)
    lines = []
    print("              tokens/s   per CPU second   seconds   ours is faster   equal answers")
    for line in run(options, requests):
        lines.append(line)
        print(
            f"{line['contender']:12} {line['tokens_per_second']:9.1f} "
            f"{line['tokens_per_cpu_second']:16.1f} {line['wall_seconds']:9.1f} "
            f"{line['ours_is_faster']:15.2f}× {line['equal']:12} of {len(requests)}",
            flush=True,
        )
    print(json.dumps({**report, "lines": lines}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
