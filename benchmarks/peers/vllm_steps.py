"""Runs vLLM's engine in its own process, to compare its steps with Baton's on the same weights.

    python benchmarks/peers/vllm_steps.py MODEL_DIR --threads N --dtype bfloat16 [--eager]

Runs in an environment of its own that has vLLM for CPUs (docs/vllm.md), and needs nothing of
Baton's. The protocol is that of llama.py. A prefill step is a request from its submission to its
first token, with prefix caching off. Before a decode, the prompts are computed; then a step is a
call of the engine, which adds a token to each answer, so the context grows during a measurement.
Without ``--eager``, vLLM compiles the model at its start, which takes minutes.
"""

import argparse
import json
import os
import sys
import time
from typing import Any

MAX_MODEL_TOKENS = 8192
MAX_SEQUENCES = 64
ANSWER_TOKENS = 256
"""Number of decode steps before the prompts are computed again."""

VOCABULARY = 1000


class VllmEngine:
    def __init__(self, options: argparse.Namespace) -> None:
        from vllm import LLM

        llm = LLM(
            model=options.model,
            dtype=options.dtype,
            skip_tokenizer_init=True,
            max_model_len=MAX_MODEL_TOKENS,
            max_num_seqs=MAX_SEQUENCES,
            max_num_batched_tokens=MAX_MODEL_TOKENS,
            enable_prefix_caching=False,
            enforce_eager=options.eager,
            logprobs_mode="raw_logits",
            max_logprobs=-1,
        )
        self._engine = llm.llm_engine
        self._number = 0
        self._work: dict[str, Any] = {}
        self._left = 0

    def logits(self, tokens: list[int]) -> list[float]:
        found = self._finish(self._submit(tokens, 1, logprobs=-1))
        first = found.outputs[0].logprobs[0]
        return [float(first[token].logprob) for token in range(len(first))]

    def prepare(self, work: dict[str, Any]) -> str:
        self.drop()
        self._work = work
        self.step()
        return ""

    def step(self, count: int = 1) -> dict[str, float]:
        if self._work["kind"] == "decode" and self._left < count:
            self._start_answers(count)
        began, spent = time.perf_counter(), time.process_time()
        for _ in range(count):
            if self._work["kind"] == "decode":
                self._engine.step()
            else:
                self._finish(self._submit(_prompt(0, self._work["context"]), 1))
        self._left -= count
        wall, cpu = time.perf_counter() - began, time.process_time() - spent
        return {"wall": wall / count, "cpu": cpu / count}

    def drop(self) -> None:
        while self._engine.has_unfinished_requests():
            self._engine.step()
        self._left = 0

    def _start_answers(self, count: int) -> None:
        """Compute the prompts, so that the next ``count`` steps at least are decodes of all."""
        self.drop()
        answer = max(ANSWER_TOKENS, count) + 1
        prompts = [_prompt(n, self._work["context"] - 1) for n in range(self._work["batch"])]
        waiting = {self._submit(prompt, answer + len(prompts)) for prompt in prompts}
        while waiting:
            waiting -= {each.request_id for each in self._engine.step() if each.outputs}
        self._left = answer - 1

    def _submit(self, tokens: list[int], answer: int, logprobs: int | None = None) -> str:
        from vllm import SamplingParams

        self._number += 1
        sampling = SamplingParams(
            temperature=0.0, max_tokens=answer, ignore_eos=True, detokenize=False, logprobs=logprobs
        )
        self._engine.add_request(str(self._number), {"prompt_token_ids": tokens}, sampling)
        return str(self._number)

    def _finish(self, wanted: str) -> Any:
        while True:
            for each in self._engine.step():
                if each.request_id == wanted and each.finished:
                    return each


def _prompt(number: int, length: int) -> list[int]:
    return [1 + (37 * n + number) % VOCABULARY for n in range(length)]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--eager", action="store_true")
    options = parser.parse_args(arguments)
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # vLLM prints to stdout
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "4"
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{options.threads - 1}"
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    import torch
    import vllm

    engine = VllmEngine(options)
    features = f"torch {torch.__version__}, {torch.get_num_threads()} threads"
    print(json.dumps({"version": vllm.__version__, "features": features}), file=answers)
    for line in sys.stdin:
        ((verb, argument),) = json.loads(line).items()
        if verb == "drop":
            engine.drop()
            result: object = None
        else:
            result = getattr(engine, verb)(argument)
        print(json.dumps(result), file=answers)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
