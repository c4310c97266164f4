"""Calls the cluster through litellm's proxy. Its model ``small`` falls back to ``large``, which is
the same model with prompts cut to 1,000 tokens."""

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from cases import MESSAGES, MODEL, QUESTION, URL, run

KEY = "sk-proxy"
CUT = {"extra_body": {"truncate_prompt_tokens": 1000}}
OPENAI = {"model": f"hosted_vllm/{MODEL}", "api_base": f"{URL}/v1", "api_key": "none"}
ANTHROPIC = {"model": f"anthropic/{MODEL}", "api_base": URL, "api_key": "none"}
CONFIG = {
    "model_list": [
        {"model_name": "small", "litellm_params": OPENAI},
        {"model_name": "large", "litellm_params": {**OPENAI, **CUT}},
        {"model_name": "claude", "litellm_params": ANTHROPIC},
    ],
    "litellm_settings": {"context_window_fallbacks": [{"small": ["large"]}, {"claude": ["large"]}]},
    "router_settings": {"num_retries": 0},
}
OVERLONG = [{"role": "user", "content": "word " * 140_000 + QUESTION}]


@contextmanager
def proxy() -> Iterator[httpx.Client]:
    """Start the proxy on a free port; yield a client of it."""
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "log").open("w") as log:
        config = Path(folder) / "config.yaml"
        config.write_text(json.dumps(CONFIG))
        port = free_port()
        process = subprocess.Popen(
            [
                str(Path(sys.executable).with_name("litellm")),
                *("--config", str(config), "--host", "127.0.0.1", "--port", str(port)),
            ],
            env={**os.environ, "LITELLM_MASTER_KEY": KEY},
            stdout=log,
            stderr=log,
        )
        headers = {"authorization": f"Bearer {KEY}"}
        try:
            with httpx.Client(
                base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=60, trust_env=False
            ) as client:
                wait_until_ready(client, process, Path(log.name))
                yield client
        finally:
            process.terminate()
            process.wait()


def wait_until_ready(client: httpx.Client, process: "subprocess.Popen[bytes]", log: Path) -> None:
    """Return when the proxy serves. The limit of a program's time bounds the wait."""
    while process.poll() is None:
        try:
            if client.get("/health/liveliness").status_code == 200:
                return
        except httpx.TransportError:
            pass
    raise RuntimeError(f"the proxy does not start: {log.read_text()[-4000:]}")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


with proxy() as client:

    def ask(model: str, messages: Any = MESSAGES) -> httpx.Response:
        body = {"model": model, "messages": messages}
        return client.post("/v1/chat/completions", json=body)

    def text_of(response: httpx.Response) -> str:
        assert response.status_code == 200, response.text
        return str(response.json()["choices"][0]["message"]["content"])

    def falls_back() -> Any:
        response = ask("small", OVERLONG)
        return [text_of(response), response.headers["x-litellm-attempted-fallbacks"]]

    def overflow() -> Any:
        """Ask a model that has no fallback. Its prompts are cut, so ``max_tokens`` is too much."""
        body = {"model": "large", "messages": MESSAGES, "max_tokens": 140_000}
        response = client.post("/v1/chat/completions", json=body)
        message = response.json()["error"]["message"]
        return [response.status_code, message.partition(":")[0]]

    def anthropic_overflow() -> Any:
        body = {"model": "claude", "messages": OVERLONG, "max_tokens": 100}
        response = client.post("/v1/messages", json=body)
        message = response.json()
        return [message["content"][0]["text"], response.headers["x-litellm-attempted-fallbacks"]]

    def embeddings_then_a_chat() -> Any:
        response = client.post("/v1/embeddings", json={"model": "small", "input": "x"})
        return [response.status_code, text_of(ask("small"))]

    run(
        {
            "create": lambda: text_of(ask("small")),
            "fallback on overflow": falls_back,
            "overflow without fallback": overflow,
            "fallback on overflow of Messages": anthropic_overflow,
            "embeddings, then a chat": embeddings_then_a_chat,
        }
    )
