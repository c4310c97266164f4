"""Streams against a cluster, for tools that disturb it: what came, when, and if it is right."""

import json
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np

from benchmarks.machine import SYSTEM_CLOCK

REQUEST_SECONDS = 120.0


@dataclass(frozen=True)
class CompletionCase:
    """``body`` of a completion, and the tokens of its undisturbed answer."""

    body: dict[str, Any]
    tokens: tuple[int, ...] = ()


@dataclass
class StreamedAnswer:
    """``moments`` are seconds at which tokens came. ``refused`` before it was accepted."""

    question: CompletionCase
    began: float
    tokens: list[int] = field(default_factory=list)
    moments: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    error: str = ""
    refused: bool = False

    @property
    def right(self) -> bool:
        return not self.error and tuple(self.tokens) == self.question.tokens

    @property
    def longest_gap(self) -> float:
        """Between two tokens, in seconds."""
        pairs = zip(self.moments, self.moments[1:], strict=False)
        return max((later - earlier for earlier, later in pairs), default=0.0)


def make_questions(count: int, seed: int, shortest: int, longest: int) -> list[dict[str, Any]]:
    """Bodies, half of them greedy, half sampled with a seed; some share a prefix."""
    chance = np.random.default_rng(seed)
    shared = chance.integers(3, 4000, size=96).tolist()
    bodies = []
    for number in range(count):
        own = chance.integers(3, 4000, size=int(chance.integers(8, 300))).tolist()
        sampled = {"temperature": 0.8, "top_p": 0.95, "seed": number} if number % 2 else {}
        bodies.append(
            {
                "prompt": (shared if number % 3 == 0 else []) + own,
                "max_tokens": int(chance.integers(shortest, longest)),
                "temperature": 0,
                "ignore_eos": True,
                "return_token_ids": True,
                "stream": True,
                **sampled,
            }
        )
    return bodies


def record_answers(
    url: str, bodies: Sequence[dict[str, Any]], at_once: int, key: str = ""
) -> list[CompletionCase]:
    """Each body with its answer as of now. Raises RuntimeError when one fails."""
    with ThreadPoolExecutor(at_once) as pool:
        answers = list(pool.map(lambda body: ask(url, CompletionCase(body), key), bodies))
    failed = [answer.error for answer in answers if answer.error]
    if failed:
        raise RuntimeError(f"an undisturbed answer failed: {failed[0]}")
    return [CompletionCase(answer.question.body, tuple(answer.tokens)) for answer in answers]


def ask(url: str, question: CompletionCase, key: str = "") -> StreamedAnswer:
    """One request, to its end; with an API key, if there is one."""
    answer = StreamedAnswer(question, SYSTEM_CLOCK())
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        with (
            httpx.Client(timeout=REQUEST_SECONDS, headers=headers) as client,
            client.stream("POST", url + "/v1/completions", json=question.body) as response,
        ):
            if response.status_code != 200:
                answer.refused = True
                answer.error = f"{response.status_code}: {response.read().decode()}"
                return answer
            for line in response.iter_lines():
                _take(answer, line)
    except httpx.HTTPError as error:
        answer.error = repr(error)
    if answer.finish_reason is None and not answer.error:
        answer.error = "the stream ended without a reason"
    return answer


def _take(answer: StreamedAnswer, line: str) -> None:
    if not line.startswith("data: {"):
        return
    event = json.loads(line[6:])
    if "error" in event:
        answer.error = json.dumps(event["error"])
        return
    for choice in event["choices"]:
        tokens = choice.get("token_ids") or []
        answer.tokens.extend(tokens)
        answer.moments.extend([SYSTEM_CLOCK()] * len(tokens))
        answer.finish_reason = choice["finish_reason"] or answer.finish_reason


@contextmanager
def traffic(
    url: str, questions: Sequence[CompletionCase], at_once: int, key: str = ""
) -> Iterator[list[StreamedAnswer]]:
    """So many streams at once, each a question after the other, until the block ends; then those
    that run are let end. Yields the list that answers are added to."""
    answers: list[StreamedAnswer] = []
    over = threading.Event()

    def loop(lane: int) -> None:
        number = lane
        while not over.is_set():
            answers.append(ask(url, questions[number % len(questions)], key))
            number += at_once

    with ThreadPoolExecutor(at_once) as pool:
        lanes: list[Future[None]] = [pool.submit(loop, lane) for lane in range(at_once)]
        try:
            yield answers
        finally:
            over.set()
    for each in lanes:
        each.result()
