"""A batch of known requests, run through the API, whose answers are compared."""

import json
from collections.abc import Sequence
from typing import Any

import httpx

from testkit.machine import SYSTEM_CLOCK, pause
from testkit.streams import CompletionCase

BATCH_SECONDS = 180.0
ENDED = ("completed", "failed", "cancelled", "expired")


def run_batch(url: str, key: str, cases: Sequence[CompletionCase]) -> list[str]:
    """Run a batch, and return what is wrong with its answers. Raises RuntimeError if it does not
    complete in time."""
    lines = [
        {
            "custom_id": str(number),
            "method": "POST",
            "url": "/v1/completions",
            "body": {k: v for k, v in case.body.items() if not k.startswith("stream")},
        }
        for number, case in enumerate(cases)
    ]
    data = "\n".join(map(json.dumps, lines)).encode()
    headers = {"authorization": f"Bearer {key}"}
    with httpx.Client(base_url=url, headers=headers, timeout=60) as client:
        upload = client.post(
            "/v1/files", files={"file": ("soak.jsonl", data)}, data={"purpose": "batch"}
        )
        file_id = upload.raise_for_status().json()["id"]
        batch = _finish_batch(client, file_id)
        problems = []
        output_id = batch["output_file_id"]
        if output_id is not None:
            output = client.get(f"/v1/files/{output_id}/content").raise_for_status().text
            problems = _wrong_lines(output, cases)
        else:
            problems = [f"the batch has no output: {batch['status']}"]
        for each in {file_id, output_id, batch.get("error_file_id")} - {None}:
            client.delete(f"/v1/files/{each}").raise_for_status()
    return problems


def _finish_batch(client: httpx.Client, file_id: str) -> dict[str, Any]:
    body = {
        "input_file_id": file_id,
        "endpoint": "/v1/completions",
        "completion_window": "24h",
    }
    created = client.post("/v1/batches", json=body).raise_for_status()
    batch: dict[str, Any] = created.json()
    deadline = SYSTEM_CLOCK() + BATCH_SECONDS
    while batch["status"] not in ENDED:
        if SYSTEM_CLOCK() > deadline:
            raise RuntimeError(f"the batch is {batch['status']} after {BATCH_SECONDS:g} s")
        pause(0.5)
        batch = client.get(f"/v1/batches/{batch['id']}").raise_for_status().json()
    return batch


def _wrong_lines(output: str, cases: Sequence[CompletionCase]) -> list[str]:
    answers = {int(line["custom_id"]): line for line in map(json.loads, output.splitlines())}
    wrong = []
    for number, case in enumerate(cases):
        response = answers.get(number, {}).get("response") or {}
        choices = (response.get("body") or {}).get("choices") or [{}]
        if tuple(choices[0].get("token_ids") or ()) != case.tokens:
            wrong.append(f"line {number} of a batch: {json.dumps(response)[:200]}")
    return wrong
