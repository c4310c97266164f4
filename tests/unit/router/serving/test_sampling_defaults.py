"""Tests that the sampling of a model's generation_config.json is that of requests without values of
their own, in every API, and that a setting turns this off."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import structlog

from baton.config import Settings, load_settings
from baton.core.request import FinishReason
from baton.core.states import Role
from baton.errors import Invalid
from baton.serve.lifecycle import Lifecycle
from baton.text.tokenizer import Tokenizer
from router.program import RouterProgram
from router.serving.sampling_defaults import SamplingDefaults
from testkit.fakes.registry import MemoryRegistry
from tests import router_harness
from tests.anthropic_harness import MESSAGES
from tests.router_harness import CHAT, COMPLETE, RESPOND, chat, open_harness
from tests.unit.router import test_router_program
from tests.unit.router.http.test_router_connections import framed_worker as worker
from tests.unit.router.http.test_router_connections import member, output
from tests.unit.router.test_router_program import wait_until_ready

tokenizer = router_harness.tokenizer
settings, registry = test_router_program.settings, test_router_program.registry

QWEN3 = {
    "bos_token_id": 151643, "do_sample": True, "eos_token_id": [151645, 151643],
    "pad_token_id": 151643, "temperature": 0.6, "top_k": 20, "top_p": 0.95,
    "transformers_version": "4.51.0",
}  # fmt: skip
"""The generation_config.json of Qwen3-8B."""

DEFAULTS = SamplingDefaults(0.6, 0.95, 20, 0.1, 1.05)


def write(folder: Path, **values: Any) -> Path:
    (folder / "generation_config.json").write_text(json.dumps(values))
    return folder


def test_values_are_read_from_the_models_folder(tmp_path: Path) -> None:
    assert SamplingDefaults.load(tmp_path) == SamplingDefaults(1.0, 1.0, 0, 0.0, 1.0)
    assert SamplingDefaults.load(write(tmp_path, **QWEN3)) == SamplingDefaults(0.6, 0.95, 20)
    greedy = {"do_sample": False, "temperature": 0.6, "top_p": None, "max_new_tokens": 7}
    assert SamplingDefaults.load(write(tmp_path, **greedy)) == SamplingDefaults(0.6)
    rest = {"min_p": 0.1, "repetition_penalty": 1.05, "top_k": -1}
    loaded = SamplingDefaults.load(write(tmp_path, **rest))
    assert loaded == SamplingDefaults(top_k=-1, min_p=0.1, repetition_penalty=1.05)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": 5}, "generation_config.json: temperature: Input should be less than"),
        ({"top_k": "20"}, "generation_config.json: top_k: Input should be a valid integer"),
        ({"repetition_penalty": 0}, "repetition_penalty: .*setting generation_defaults=none"),
    ],
)
def test_wrong_values_are_reported_with_file_and_key(
    tmp_path: Path, values: dict[str, Any], message: str
) -> None:
    with pytest.raises(Invalid, match=message):
        SamplingDefaults.load(write(tmp_path, **values))


BODIES: list[tuple[str, dict[str, Any]]] = [
    (CHAT, chat()),
    (COMPLETE, {"prompt": "x"}),
    (RESPOND, {"input": "x", "store": False}),
    (MESSAGES, chat(max_tokens=9)),
]


@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_values_that_a_request_lacks_are_the_models(
    tokenizer: Tokenizer, path: str, body: dict[str, Any]
) -> None:
    given = {"temperature": 0.25, "top_p": 0.5, "top_k": 0}
    async with open_harness(tokenizer, sampling_defaults=DEFAULTS) as (router, client):
        for fields in ({}, given, {"temperature": 0}, {"top_p": None}):
            answer = await client.post(path, json={**body, **fields})
            assert answer.status_code == 200, answer.text
    used = [
        (each.temperature, each.top_p, each.top_k, each.min_p, each.repetition_penalty)
        for each in (job.spec.sampling for job in router.prefill.submitted)
    ]
    assert used == [
        (0.6, 0.95, 20, 0.1, 1.05),
        (0.25, 0.5, 0, 0.1, 1.05),
        (0.0, 0.95, 20, 0.1, 1.05),
        (0.6, 0.95, 20, 0.1, 1.05),
    ]


async def test_models_and_responses_tell_the_values(tokenizer: Tokenizer) -> None:
    async with open_harness(tokenizer, sampling_defaults=DEFAULTS) as (_, client):
        [listed] = (await client.get("/v1/models")).json()["data"]
        one = (await client.get("/v1/models/demo")).json()
        response = (await client.post(RESPOND, json={"input": "x", "temperature": 0.5})).json()
    assert listed == one
    assert listed["generation_defaults"] == {
        "temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.05,
    }  # fmt: skip
    assert (response["temperature"], response["top_p"]) == (0.5, 0.95)


@pytest.mark.parametrize(
    ("setting", "expected", "events"),
    [("model", (0.6, 0.95, 20), 1), ("none", (1.0, 1.0, 0), 0)],
)
async def test_running_router_reads_the_file_unless_a_setting_says_no(
    settings: Settings,
    registry: MemoryRegistry,
    setting: str,
    expected: tuple[float, float, int],
    events: int,
) -> None:
    write(Path(settings.model), **QWEN3)
    program = RouterProgram(settings.model_copy(update={"generation_defaults": setting}))
    async with worker() as (core, ref, _), httpx.AsyncClient() as client:
        name = settings.model_name
        await registry.announce(
            member("w", Role.DECODE, framed_address=ref.framed_address, model=name), 60
        )
        lifecycle = Lifecycle(program, 5)
        with structlog.testing.capture_logs() as lines:
            living = asyncio.create_task(lifecycle.run())
            await wait_until_ready(registry)
        body = {"prompt": "hello", "max_tokens": 1}
        url = f"http://{program.address}{COMPLETE}"
        request = asyncio.create_task(client.post(url, json=body))
        await core.wait(lambda: core.submitted)
        [(spec, _, _)] = core.submitted
        end = replace(output(spec.request_id, 104), finish_reason=FinishReason.LENGTH)
        core.streams[0].put(end)
        assert (await request).status_code == 200
        lifecycle.request_stop()
        await living
    sampling = spec.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == expected
    assert [line["event"] for line in lines].count("generation_defaults") == events


def test_setting_has_two_values() -> None:
    assert load_settings().generation_defaults == "model"
    assert load_settings(generation_defaults="none").generation_defaults == "none"
    with pytest.raises(Invalid, match="generation_defaults"):
        load_settings(generation_defaults="vllm")
