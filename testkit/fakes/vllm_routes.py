"""The routes of a fake ``vllm serve`` besides completions, in vLLM's wire forms."""

import json
from dataclasses import dataclass
from typing import Any

EMBEDDING_SIZE = 4
CHAT_WORDS = 8
"""Words of an answer to a chat, which are also its tokens."""


@dataclass(frozen=True)
class RouteRequest:
    """A request as the server has received it. ``headers`` have names in lower case."""

    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> dict[str, Any]:
        value: dict[str, Any] = json.loads(self.body)
        return value


def embedding(text: Any) -> list[float]:
    """Return a vector that depends on a text, or on a list of token ids."""
    data = json.dumps(text).encode()
    return [sum(data[place::EMBEDDING_SIZE]) / 1024 for place in range(EMBEDDING_SIZE)]


def num_tokens(text: Any) -> int:
    return len(text)


def route_answer(request: RouteRequest) -> dict[str, Any]:
    """Return the whole answer to a request, whatever its route."""
    if request.path.startswith("/v1/audio/"):
        return {"text": f"{len(request.body)} bytes", "usage": {"type": "duration", "seconds": 1}}
    body = request.json
    if request.path == "/v1/chat/completions":
        return _chat_answer(body)
    texts = body.get("input") or body.get("texts") or body.get("documents") or body.get("text_2")
    given = texts if isinstance(texts, list) and not isinstance(texts[0], int) else [texts]
    count = sum(map(num_tokens, given))
    data = [{"index": i, "embedding": embedding(each)} for i, each in enumerate(given)]
    usage = {"prompt_tokens": count, "total_tokens": count, "completion_tokens": 0}
    return {"id": "embd-1", "object": "list", "model": body["model"], "data": data, "usage": usage}


def chat_usage(body: dict[str, Any]) -> dict[str, Any]:
    count = len(json.dumps(body["messages"]))
    details = {"prompt_tokens_details": {"cached_tokens": 2}}
    tokens = {"prompt_tokens": count, "completion_tokens": CHAT_WORDS}
    return {**tokens, "total_tokens": count + CHAT_WORDS, **details}


def chat_words() -> list[str]:
    return [f"word{number} " for number in range(CHAT_WORDS)]


def _chat_answer(body: dict[str, Any]) -> dict[str, Any]:
    message = {"role": "assistant", "content": "".join(chat_words())}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    return {
        "id": "chatcmpl-1", "object": "chat.completion", "model": body["model"],
        "choices": [choice], "usage": chat_usage(body), "kv_transfer_params": None,
    }  # fmt: skip


def chat_events(body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the events of a streamed answer to a chat."""
    common = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "model": body["model"]}
    events = [
        common | {"choices": [{"index": 0, "delta": {"content": word}, "finish_reason": None}]}
        for word in chat_words()
    ]
    if (body.get("stream_options") or {}).get("include_usage"):
        events.append(common | {"choices": [], "usage": chat_usage(body)})
    return events
