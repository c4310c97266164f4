"""Sends streamed requests to a cluster that a tool disturbs. Records the tokens of each answer,
their times, and whether the answer is right."""

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np

from testkit.machine import SYSTEM_CLOCK

REQUEST_SECONDS = 120.0


@dataclass(frozen=True)
class CompletionCase:
    """The ``body`` of a completion request, and the tokens of its answer when nothing disturbs the
    cluster."""

    body: dict[str, Any]
    tokens: tuple[int, ...] = ()


@dataclass
class StreamedAnswer:
    """A streamed answer. ``token_times`` are the arrival times of its tokens, in seconds.
    ``is_refused`` means that the router did not accept the request."""

    case: CompletionCase
    started_at: float
    tokens: list[int] = field(default_factory=list)
    token_times: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    error: str = ""
    is_refused: bool = False

    @property
    def is_right(self) -> bool:
        return not self.error and tuple(self.tokens) == self.case.tokens

    @property
    def max_inter_token_seconds(self) -> float:
        """The longest inter-token latency, in seconds."""
        pairs = zip(self.token_times, self.token_times[1:], strict=False)
        return max((later - earlier for earlier, later in pairs), default=0.0)


def make_request_bodies(
    count: int, seed: int, min_tokens: int, max_tokens: int
) -> list[dict[str, Any]]:
    """Make request bodies. Half are greedy and half are sampled with a seed; some share a
    prefix."""
    random = np.random.default_rng(seed)
    shared = random.integers(3, 4000, size=96).tolist()
    bodies = []
    for number in range(count):
        own = random.integers(3, 4000, size=int(random.integers(8, 300))).tolist()
        sampled = {"temperature": 0.8, "top_p": 0.95, "seed": number} if number % 2 else {}
        bodies.append(
            {
                "prompt": (shared if number % 3 == 0 else []) + own,
                "max_tokens": int(random.integers(min_tokens, max_tokens)),
                "temperature": 0,
                "ignore_eos": True,
                "return_token_ids": True,
                "stream": True,
                **sampled,
            }
        )
    return bodies


def record_answers(
    url: str, bodies: Sequence[dict[str, Any]], num_streams: int, key: str = ""
) -> list[CompletionCase]:
    """Return each body with its answer from the undisturbed cluster. Raises RuntimeError if a
    request fails."""
    with ThreadPoolExecutor(num_streams) as pool:
        answers = list(
            pool.map(lambda body: stream_completion(url, CompletionCase(body), key), bodies)
        )
    failed = [answer.error for answer in answers if answer.error]
    if failed:
        raise RuntimeError(f"a request failed although nothing disturbed the cluster: {failed[0]}")
    return [CompletionCase(answer.case.body, tuple(answer.tokens)) for answer in answers]


def stream_completion(
    url: str,
    question: CompletionCase,
    key: str = "",
    on_token: Callable[[int], None] = lambda number: None,
) -> StreamedAnswer:
    """Send one request, with the API key if given, and read its answer to the end. ``on_token`` is
    called with the number of tokens so far whenever that has grown."""
    answer = StreamedAnswer(question, SYSTEM_CLOCK())
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        # Without verify=False, loading certificates would take longer than a short answer.
        with (
            httpx.Client(timeout=REQUEST_SECONDS, headers=headers, verify=False) as client,
            client.stream("POST", url + "/v1/completions", json=question.body) as response,
        ):
            if response.status_code != 200:
                answer.is_refused = True
                answer.error = f"{response.status_code}: {response.read().decode()}"
                return answer
            for line in response.iter_lines():
                before = len(answer.tokens)
                _process_line(answer, line)
                if len(answer.tokens) > before:
                    on_token(len(answer.tokens))
    except httpx.HTTPError as error:
        answer.error = repr(error)
    if answer.finish_reason is None and not answer.error:
        answer.error = "the stream ended without a finish_reason"
    return answer


def _process_line(answer: StreamedAnswer, line: str) -> None:
    if not line.startswith("data: {"):
        return
    event = json.loads(line[6:])
    if "error" in event:
        answer.error = json.dumps(event["error"])
        return
    for choice in event["choices"]:
        tokens = choice.get("token_ids") or []
        answer.tokens.extend(tokens)
        answer.token_times.extend([SYSTEM_CLOCK()] * len(tokens))
        answer.finish_reason = choice["finish_reason"] or answer.finish_reason


@contextmanager
def traffic(
    url: str, cases: Sequence[CompletionCase], num_streams: int, key: str = ""
) -> Iterator[list[StreamedAnswer]]:
    """During the ``with`` block, keep ``num_streams`` requests running, each in its own thread.
    Then wait for the last answers. Yields the list to which answers are added."""
    answers: list[StreamedAnswer] = []
    stop = threading.Event()

    def loop(stream: int) -> None:
        number = stream
        while not stop.is_set():
            answers.append(stream_completion(url, cases[number % len(cases)], key))
            number += num_streams

    with ThreadPoolExecutor(num_streams) as pool:
        streams: list[Future[None]] = [pool.submit(loop, stream) for stream in range(num_streams)]
        try:
            yield answers
        finally:
            stop.set()
    for each in streams:
        each.result()
