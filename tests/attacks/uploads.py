"""Functions that upload files and start batches, for attacks that need them."""

import json
from collections.abc import Sequence
from typing import Any

import httpx

from tests.attacks.target import AttackTarget

CHAT = "/v1/chat/completions"
BOUNDARY = "0123456789abcdef"


async def upload(target: AttackTarget, client: httpx.AsyncClient, data: bytes) -> str | None:
    """Upload a file; return its id, or None when it was refused."""
    headers = {"content-type": f"multipart/form-data; boundary={BOUNDARY}"}
    answer = await target.post(client, "/v1/files", content=form(data), headers=headers)
    return answer.json()["id"] if answer is not None and answer.status_code == 200 else None


def form(data: bytes) -> bytes:
    """Return the multipart body that uploads ``data`` as a batch file."""
    begin = f"--{BOUNDARY}\r\nContent-Disposition: form-data; name="
    purpose = f'{begin}"purpose"\r\n\r\nbatch\r\n'
    file = f'{begin}"file"; filename="lines.jsonl"\r\n\r\n'
    return (purpose + file).encode() + data + f"\r\n--{BOUNDARY}--\r\n".encode()


async def batch(target: AttackTarget, client: httpx.AsyncClient, data: bytes) -> str | None:
    """Upload a file and start a batch of it. Return the batch's id, or None if the upload or the
    batch was refused."""
    file_id = await upload(target, client, data)
    if file_id is None:
        return None
    body = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h"}
    answer = await target.post(client, "/v1/batches", body)
    return answer.json()["id"] if answer is not None and answer.status_code == 200 else None


def lines(bodies: Sequence[Any]) -> bytes:
    """Return a batch file with one chat request per line."""
    return b"".join(line(str(number), json.dumps(body)) for number, body in enumerate(bodies))


def line(custom_id: str, body: str) -> bytes:
    """Return one line of a batch file. ``body`` is inserted as it is, so it may be invalid JSON."""
    head = f'{{"custom_id": "{custom_id}", "method": "POST", "url": "{CHAT}", "body": '
    return (head + body + "}\n").encode()
