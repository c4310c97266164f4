"""Simulates users of a language model with locust: chat, code completion, RAG, agents, reasoning.

    locust -f loadtest/locustfile.py --host http://127.0.0.1:8000
    locust -f loadtest/locustfile.py --host URL --headless -u 100 -r 10 -t 5m

This file needs only locust, and works with any server that has OpenAI's API. See docs/loadtest.md.
"""

import json
import os
import time
from collections.abc import Iterator
from itertools import cycle, islice
from typing import Any, ClassVar

from gevent.lock import BoundedSemaphore
from locust import FastHttpUser, LoadTestShape, events, task
from locust.exception import StopUser

WORDS = (
    "the of and to in is that it was for on are as with they be at one have this from or had by "
    "hot but some what there we can out other were all your when up use word how said an each she"
)
LONGEST_ANSWER_SECONDS = 600.0
MOST_TURNS_KEPT = 64
"""The number of turns after which a user begins a new conversation."""


@events.init_command_line_parser.add_listener
def add_options(parser: Any) -> None:
    parser.add_argument("--api-key", env_var="BENCH_API_KEY", default="", is_secret=True)
    parser.add_argument("--model", default="", help="Default: the server's first model")
    parser.add_argument(
        "--user-weights",
        default="",
        metavar="NAME=N,…",
        help="Weights of chat, completion, rag, agent, reasoning; those not named get 0",
    )
    parser.add_argument("--length-scale", type=float, default=1.0, help="Scales all lengths")
    parser.add_argument("--think-scale", type=float, default=1.0, help="Scales pauses; 0: none")
    parser.add_argument("--ignore-eos", action="store_true", help="Request full-length answers")
    parser.add_argument("--step-users", type=int, default=0, help="Ramp: users to add per step")
    parser.add_argument("--step-seconds", type=float, default=60.0)
    parser.add_argument("--steps", type=int, default=10)


@events.init.add_listener
def set_weights(environment: Any, **_: Any) -> None:
    """Set the weights of user classes from ``--user-weights``. Classes with weight 0 are left
    out."""
    options = environment.parsed_options
    if not options or not options.user_weights:
        return
    weights = dict(_weight(pair) for pair in options.user_weights.split(","))
    known = {each.kind: each for each in (Chat, Completion, Rag, Agent, Reasoning)}
    unknown = sorted(set(weights) - set(known))
    if unknown:
        raise SystemExit(f"--user-weights names {unknown[0]!r}; known users: {', '.join(known)}")
    for kind, weight in weights.items():
        known[kind].weight = weight
    chosen = [known[kind] for kind, weight in weights.items() if weight]
    environment.user_classes[:] = chosen


@events.init.add_listener
def set_ramp(environment: Any, **_: Any) -> None:
    options = environment.parsed_options
    if options and options.step_users > 0:
        environment.shape_class = Ramp()
        environment.shape_class.runner = environment.runner


def _weight(pair: str) -> tuple[str, int]:
    name, _, number = pair.partition("=")
    if not number.isdecimal():
        raise SystemExit(f"--user-weights takes NAME=N,…, not {pair!r}")
    return name.strip(), int(number)


class Ramp(LoadTestShape):
    """If ``--step-users N`` is given, adds N users every ``--step-seconds``, ``--steps`` times."""

    abstract = True

    def tick(self) -> tuple[int, float] | None:
        options = self.runner.environment.parsed_options
        step = int(self.get_run_time() // options.step_seconds)
        if step >= options.steps:
            return None
        return (step + 1) * options.step_users, max(options.step_users / 5, 1.0)


class SeededNumbers:
    """Pseudo-random numbers from a linear congruential generator. The same seed gives the same
    numbers."""

    def __init__(self, seed: int) -> None:
        self._state = seed * 2_654_435_761 % 2**32

    def between(self, least: int, most: int) -> int:
        self._state = (self._state * 1_664_525 + 1_013_904_223) % 2**32
        return least + (self._state >> 8) % (most - least + 1)


def words(count: int, start: int = 0) -> str:
    plain = WORDS.split()
    return " ".join(islice(cycle(plain), start % len(plain), start % len(plain) + max(count, 1)))


class Failed(Exception):
    """Says that a request failed. The message contains OpenAI's status and code; locust groups
    failures by it."""


class ModelUser(FastHttpUser):
    """Sends requests and reads the streamed answers. Reports three times per request to locust, in
    milliseconds: end-to-end latency, TTFT, and TBT (the mean inter-token latency)."""

    abstract = True
    kind = ""
    network_timeout = connection_timeout = LONGEST_ANSWER_SECONDS
    pause: ClassVar[tuple[int, int]] = (1, 5)
    """The shortest and longest pause between two requests, in seconds."""

    model = ""
    one_at_a_time = BoundedSemaphore()
    _number = 0

    def on_start(self) -> None:
        ModelUser._number += 1
        self.number = ModelUser._number
        self.dice = SeededNumbers(self.number + os.getpid())
        self.options = self.environment.parsed_options
        self.messages: list[dict[str, Any]] = []
        with ModelUser.one_at_a_time:
            if not ModelUser.model:
                ModelUser.model = self.options.model or self._first_model()

    def wait_time(self) -> float:
        least, most = self.pause
        return self.dice.between(least * 1000, most * 1000) / 1000 * self.options.think_scale

    def length(self, least: int, most: int) -> int:
        return max(round(self.dice.between(least, most) * self.options.length_scale), 1)

    def chat(self, max_tokens: int) -> str:
        """Request an answer to ``self.messages``; return it, or an empty text if it failed."""
        body = {"messages": self.messages, "max_tokens": max_tokens}
        return self._ask("/v1/chat/completions", body)

    def complete(self, prompt: str, max_tokens: int) -> str:
        return self._ask("/v1/completions", {"prompt": prompt, "max_tokens": max_tokens})

    # -- HTTP ------------------------------------------------------------------------------

    @property
    def _headers(self) -> dict[str, str]:
        key = self.options.api_key
        return {"authorization": f"Bearer {key}"} if key else {}

    def _first_model(self) -> str:
        with self.client.get(
            "/v1/models", headers=self._headers, name="models", catch_response=True
        ) as answer:
            try:
                return str(answer.json()["data"][0]["id"])
            except (ValueError, TypeError, KeyError, IndexError, AttributeError):
                answer.failure(Failed(_refusal(answer)))
        raise StopUser

    def _ask(self, path: str, body: dict[str, Any]) -> str:
        request = {"model": ModelUser.model, "stream": True, **body}
        request["stream_options"] = {"include_usage": True}
        if self.options.ignore_eos:
            request["ignore_eos"] = True
        began = time.perf_counter()
        with self.client.post(
            path,
            json=request,
            headers=self._headers,
            name=self.kind,
            stream=True,
            catch_response=True,
        ) as response:
            reading = StreamReading(began)
            try:
                if response.status_code != 200:
                    raise Failed(_refusal(response))
                reading.read(_lines(response))
            except Failed as failure:
                response.failure(failure)
            else:
                response.success()
            response.request_meta["response_time"] = (time.perf_counter() - began) * 1000
            response.request_meta["response_length"] = len(reading.text)
        self._tell(reading)
        return reading.text

    def _tell(self, reading: "StreamReading") -> None:
        for name, seconds in (("TTFT", reading.ttft_seconds), ("TBT", reading.tbt_seconds)):
            if seconds is not None:
                self.environment.events.request.fire(
                    request_type=name,
                    name=self.kind,
                    response_time=seconds * 1000,
                    response_length=reading.num_tokens,
                    exception=None,
                    context={},
                )


class StreamReading:
    """Reads and times a stream of events."""

    def __init__(self, began: float) -> None:
        self.text = ""
        self.num_tokens = 0
        self._began = began
        self._first: float | None = None
        self._last = began
        self._ended = False

    def read(self, lines: Iterator[bytes]) -> None:
        """Read the stream. Raises Failed if it contains an error, or ends prematurely."""
        for line in lines:
            payload = line.removeprefix(b"data:").strip()
            if not line.startswith(b"data:") or payload == b"[DONE]":
                continue
            try:
                self._take(json.loads(payload))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise Failed(f"malformed event: {error!r}") from error
        if not self._ended:
            raise Failed("the stream ended without a finish_reason")

    @property
    def ttft_seconds(self) -> float | None:
        return None if self._first is None else self._first - self._began

    @property
    def tbt_seconds(self) -> float | None:
        if self._first is None or self.num_tokens < 2:
            return None
        return (self._last - self._first) / (self.num_tokens - 1)

    def _take(self, event: dict[str, Any]) -> None:
        if event.get("error"):
            raise Failed(f"error in the stream: {_code(event['error'])}")
        for choice in event["choices"]:
            delta = choice.get("delta") or choice
            piece = delta.get("content") or delta.get("text") or ""
            if piece or delta.get("reasoning_content") or delta.get("tool_calls"):
                self._last = time.perf_counter()
                self._first = self._first or self._last
                self.num_tokens += 1
                self.text += piece
            self._ended = self._ended or bool(choice.get("finish_reason"))
        if event.get("usage"):
            self.num_tokens = event["usage"]["completion_tokens"]


def _lines(response: Any) -> Iterator[bytes]:
    """Yield lines as they arrive; locust's own method waits until a kilobyte has arrived."""
    try:
        while line := response.stream.readline(b"\n"):
            yield bytes(line)
    except Exception as error:
        raise Failed(f"connection lost: {type(error).__name__}") from error


def _refusal(response: Any) -> str:
    """Return the status and code of an error response, or why there was no response."""
    if not response.status_code:
        return f"unreachable: {type(response.error).__name__}"
    try:
        return f"{response.status_code} {_code(json.loads(response.text)['error'])}"
    except (ValueError, TypeError, KeyError):
        return f"{response.status_code}"


def _code(error: Any) -> str:
    return str(error.get("code") or error.get("type") or "error") if isinstance(error, dict) else ""


# -- kinds of users ------------------------------------------------------------------------


class Chat(ModelUser):
    """A user who has conversations of several turns. All users share the same system prompt."""

    kind = "chat"
    weight = 5
    pause = (2, 8)

    @task
    def turn(self) -> None:
        if not self.messages or self.dice.between(1, 5) == 1:
            self.messages = [{"role": "system", "content": words(400)}]
        question = f"{self.number}.{len(self.messages)} {words(self.length(20, 200), self.number)}"
        self.messages.append({"role": "user", "content": question})
        answer = self.chat(self.length(60, 400))
        if not answer or len(self.messages) > MOST_TURNS_KEPT:
            self.messages = []
        else:
            self.messages.append({"role": "assistant", "content": answer})


class Completion(ModelUser):
    """An editor that completes code: frequent requests with short answers."""

    kind = "completion"
    weight = 2
    pause = (1, 3)

    @task
    def ask(self) -> None:
        head = f"# {self.number} {self.dice.between(0, 10**6)}\n"
        self.complete(head + words(self.length(100, 1000), self.number), self.length(8, 48))


class Rag(ModelUser):
    """A user who asks questions about one of a few hundred documents, some of which are popular."""

    kind = "rag"
    weight = 2
    pause = (3, 10)

    @task
    def ask(self) -> None:
        popular = self.dice.between(1, 100) <= 60
        document = self.dice.between(0, 9 if popular else 299)
        size = round((1500 + document * 5) * self.options.length_scale)
        question = (
            f"document {document}: {words(size, document)}\nquestion {words(self.length(8, 40))}"
        )
        self.messages = [{"role": "user", "content": question}]
        self.chat(self.length(80, 250))


class Agent(ModelUser):
    """An agent that calls one tool after the other: each prompt is the previous prompt plus the
    answer and the result of the call."""

    kind = "agent"
    weight = 2
    pause = (0, 2)

    @task
    def step(self) -> None:
        if not self.messages or self.dice.between(1, 10) == 1:
            tools = f"tools: {words(round(1200 * self.options.length_scale))}"
            goal = f"goal {self.number}: {words(self.length(50, 150), self.number)}"
            self.messages = [
                {"role": "system", "content": tools},
                {"role": "user", "content": goal},
            ]
        answer = self.chat(self.length(30, 150))
        if not answer or len(self.messages) > MOST_TURNS_KEPT:
            self.messages = []
            return
        found = f"result: {words(self.length(50, 600), len(self.messages))}"
        self.messages.append({"role": "assistant", "content": answer})
        self.messages.append({"role": "user", "content": found})


class Reasoning(ModelUser):
    """A user who asks short questions that have very long answers."""

    kind = "reasoning"
    weight = 1
    pause = (5, 15)

    @task
    def ask(self) -> None:
        question = f"problem {self.dice.between(0, 10**6)}: {words(self.length(50, 300))}"
        self.messages = [{"role": "user", "content": question}]
        self.chat(self.length(1000, 6000))
