"""Gives every option of every command through the command line, as a user types it.

A command runs up to the functions that do its work. They are replaced, and must get what the
options mean. Quick commands run to their end.
"""

import json
import os
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import typer

from baton.config import Settings
from baton.traces.files import write_trace
from baton.traces.synthetic import TRACE_GENERATORS
from command_line.main import app, run_command_line
from tests.certificates import AUTHORITY
from tests.unit.command_line.test_cli_simulate import measured_costs

MACHINES = (
    "--gpus-per-worker 1 --link-gbytes 40 --host-gbytes 30 --device-tokens 100000 "
    "--node-tokens 200000 --order fcfs --ttft-slo 3 --tbt-slo 0.1 --seed 3 --json "
)
MODEL = (
    "--model llama-3.1-8b --gpu H200 --prefill-tp 1 --decode-tp 1 --mixed-tp 1 --prefill-ep 1 "
    "--decode-ep 1 --mixed-ep 1 "
)
SYNTHETIC = "--kind rag --requests 20 --burstiness 2 "
TRACE = "--trace trace.jsonl --jitter-seconds 0.5 "


@dataclass(frozen=True)
class Case:
    """A command ``line``, and the arguments, as :func:`plain`, that the functions which do its work
    must get. A command without any runs to its end."""

    line: str
    calls: dict[str, list[Any]] = field(default_factory=dict)


CASES = [
    Case(
        "up --model a=/models/a --model b=/models/b --adapter x=/lora --adapter y=b:/lora "
        "--engine baton --prefill 2 --decode 3 --mixed 1 --host localhost --port 8001 "
        "--redis redis://127.0.0.1:7/0 --device cpu --dtype bfloat16 --quantization int8 "
        "--transports shm,grpc --detach --name mine --config settings.yaml "
        "--set num-blocks=99 --set block_tokens=32",
        {
            "command_line.up:run_up": [
                {
                    "cluster": "mine",
                    "redis_url": "redis://127.0.0.1:7/0",
                    "host": "localhost",
                    "port": 8001,
                    "prefill": 2,
                    "decode": 3,
                    "mixed": 1,
                    "models": {"a": "/models/a", "b": "/models/b"},
                    "device": "cpu",
                    "dtype": "bfloat16",
                    "quantization": "int8",
                    "adapters": {
                        "x": "/lora",
                        "y": "b:/lora",
                    },
                    "block_tokens": 32,
                    "num_blocks": 99,
                    "max_waiting": 9,
                    "transports": ["shm", "grpc"],
                },
                True,
            ]
        },
    ),
    Case(
        "up --engine vllm --engine-python bin/python --engine-args '--tensor-parallel-size 2' "
        "--deterministic",
        {
            "command_line.up:run_up": [
                {
                    "engine": "vllm",
                    "engine_python": "bin/python",
                    "engine_args": "--tensor-parallel-size 2",
                    "deterministic": True,
                },
                False,
            ]
        },
    ),
    Case(
        "up --on ray --ray-address auto",
        {"command_line.up:run_up": [{"on": "ray", "ray_address": "auto"}, False]},
    ),
    Case(
        "up --attach mixed=http://127.0.0.1:8601",
        {
            "command_line.up:run_up": [
                {"attach": ["mixed=http://127.0.0.1:8601"], "mixed": 1, "prefill": 0},
                False,
            ]
        },
    ),
    Case("up --mock", {"command_line.up:run_up": [{"mock": True}, False]}),
    Case("down --name mine"),
    Case(
        "status --json --wait 0 --name mine",
        {"command_line.status:wait_until_ready": ["mine", 0.0]},
    ),
    Case(
        "status --json --on kubernetes --namespace models --name mine --config settings.yaml",
        {
            "command_line.kubernetes_status:status": [
                {"cluster": "mine", "kubernetes_namespace": "models", "max_waiting": 9},
                True,
            ]
        },
    ),
    Case("top --name mine", {"command_line.status:show_top": ["mine"]}),
    Case("logs prefill-0 --name mine", {"command_line.status:show_log": ["mine", "prefill-0"]}),
    Case(
        "scale prefill=2 decode=3 --name mine --no-wait",
        {"command_line.scale:run_scale": ["mine", ["prefill=2", "decode=3"], False]},
    ),
    Case(
        "scale decode=3 --on kubernetes --namespace models --name mine --config settings.yaml",
        {
            "command_line.kubernetes:scale": [
                {"cluster": "mine", "kubernetes_namespace": "models", "max_waiting": 9},
                ["decode=3"],
                True,
            ]
        },
    ),
    Case(
        "drain decode-1 --name mine --no-wait",
        {"command_line.scale:run_drain": ["mine", "decode-1", False]},
    ),
    Case(
        "drain decode-1 --on kubernetes --namespace models --config settings.yaml --no-wait",
        {
            "command_line.kubernetes:drain": [
                {"kubernetes_namespace": "models", "max_waiting": 9},
                "decode-1",
                False,
            ]
        },
    ),
    Case(
        "serve prefill --status-fd 7 --deterministic --config settings.yaml --set num_blocks=99",
        {
            "command_line.serve:run_role": [
                "prefill",
                7,
                "settings.yaml",
                {"num_blocks": "99", "deterministic": True},
            ]
        },
    ),
    Case(
        "generate --prompt one --prompt two --prompt-file prompt.txt --model /models/a "
        "--max-tokens 5 --temperature 0.5 --top-p 0.9 --top-k 3 --min-p 0.1 "
        "--repetition-penalty 1.1 --seed 7 --ignore-eos --regex [ab]+ --device cpu "
        "--dtype bfloat16 --quantization int8 --deterministic --json --config settings.yaml "
        "--set num_blocks=99",
        {
            "command_line.generate:run_generate": [
                {
                    "model": "/models/a",
                    "device": "cpu",
                    "dtype": "bfloat16",
                    "quantization": "int8",
                    "deterministic": True,
                    "num_blocks": 99,
                    "max_waiting": 9,
                },
                ["one", "two", "three\n"],
                {
                    "max_tokens": 5,
                    "temperature": 0.5,
                    "top_k": 3,
                    "top_p": 0.9,
                    "min_p": 0.1,
                    "repetition_penalty": 1.1,
                    "seed": 7,
                    "ignore_eos": True,
                    "grammar": {"kind": "regex", "text": "[ab]+"},
                },
                True,
            ]
        },
    ),
    Case(
        """generate --prompt one --json-schema '{"type": "integer"}'""",
        {
            "command_line.generate:run_generate": [
                {},
                ["one"],
                {
                    "max_tokens": 64,
                    "temperature": 0.0,
                    "grammar": {"kind": "json_schema", "text": '{"type": "integer"}'},
                },
                False,
            ]
        },
    ),
    Case(
        "explain request-1 --url http://127.0.0.1:8001 --json --name mine --config settings.yaml",
        {
            "command_line.status:show_explanation": [
                {"url": "http://127.0.0.1:8001", "admin_key": None},
                "request-1",
                True,
            ]
        },
    ),
    Case(
        "usage --since 7d --json --name mine",
        {"command_line.usage:run_usage": ["mine", "7d", True]},
    ),
    Case("check --json --name mine", {"command_line.check:show_check": ["mine", True]}),
    Case(
        "doctor --sockets --json --name mine", {"command_line.doctor:show_sockets": ["mine", True]}
    ),
    Case("key new acme --json"),
    Case("kv stats --json --name mine", {"command_line.kv:run_stats": ["mine", True]}),
    Case(
        "kv ls --tenant acme --model a --older-than 2h --limit 5 --json --name mine",
        {
            "command_line.kv:block_filter": ["mine", "acme", "a", "2h"],
            "command_line.kv:run_list": ["mine", None, 5, True],
        },
    ),
    Case(
        "kv find text --tenant acme --exact-kv --json --name mine",
        {"command_line.kv:run_find": ["mine", "text", "acme", True, True]},
    ),
    Case(
        "kv purge --tenant acme --model a --older-than 2h --all --json --name mine",
        {
            "command_line.kv:block_filter": ["mine", "acme", "a", "2h"],
            "command_line.kv:run_purge": ["mine", None, True],
        },
    ),
    Case(
        "kv warm --prompt one --prompt two --prompt-file prompt.txt --chat --api-key key "
        "--exact-kv --name mine",
        {
            "command_line.kv:run_warm": [
                "mine",
                ["one", "two", "three"],
                "key",
                True,
                {"exact_kv": True},
            ]
        },
    ),
    Case(
        "bench --url http://127.0.0.1:9/v1 --model a --endpoint completions --api-key key "
        "--timeout 9 --at-once 8 --rate 7 --kind plain --requests 6 --duration 5 --warm-up 4 "
        "--burstiness 3 --rate-factor 2 --think-seconds 0 --seed 11 "
        "--input-tokens 12 --output-tokens 13 --input-spread 0.1 --output-spread 0.2 "
        "--shared-tokens 3 --prompts tokens --ignore-eos --salt s --slo-ttft 0.3 --slo-tbt 0.4 "
        "--processes 2 --plots plots --output out.json --json "
        """--extra '{"top_k": 5}'""",
        {
            "load_generator.run:run_bench": [
                {
                    "target": {"host": "127.0.0.1", "port": 9, "api_key": "key"},
                    "model": "a",
                    "chat": False,
                    "as_tokens": True,
                    "salt": "s",
                    "extra": {"top_k": 5, "ignore_eos": True},
                    "load": {
                        "kind": "plain",
                        "lengths": {
                            "input_tokens": 12,
                            "output_tokens": 13,
                            "input_spread": 0.1,
                            "output_spread": 0.2,
                            "shared_tokens": 3,
                        },
                        "requests": 6,
                        "duration": 5.0,
                        "rate": 7.0,
                        "burstiness": 3.0,
                        "rate_factor": 2.0,
                        "think_seconds": 0.0,
                        "warm_up": 4.0,
                        "seed": 11,
                    },
                    "limits": {"timeout_seconds": 9.0, "max_inflight": 8},
                    "slo": {"ttft_seconds": 0.3, "mean_itl_seconds": 0.4},
                    "processes": 2,
                    "plots": "plots",
                    "output": "out.json",
                    "as_json": True,
                }
            ]
        },
    ),
    Case(
        "bench --url https://127.0.0.1:9 --insecure --concurrency 3 --requests 5",
        {"load_generator.run:run_bench": [{"load": {"requests": 5, "concurrency": 3}}]},
    ),
    Case(
        "bench --trace trace.jsonl --jitter-seconds 1",
        {
            "load_generator.run:run_bench": [
                {
                    "target": {"host": "127.0.0.1", "port": 8000},
                    "load": {"trace": "trace.jsonl", "jitter_seconds": 1.0},
                }
            ]
        },
    ),
    Case(
        "bench --url https://127.0.0.1:9 --ca ca.pem --rate 2",
        {"load_generator.run:run_bench": [{"load": {"rate": 2.0}}]},
    ),
    Case(
        "bench engine --model /models/a --device cpu --dtype bfloat16 --threads 2 --batches 1,8 "
        "--prefill-batches 1,2 --contexts 64,128 --rounds 3 --seconds 4 --seed 5 --json out.json "
        "--profile profile.json --plot plot.svg --config settings.yaml --set num_blocks=99",
        {
            "command_line.bench_engine.run:run_engine_bench": [
                {
                    "settings": {
                        "model": "/models/a",
                        "device": "cpu",
                        "dtype": "bfloat16",
                        "threads": 2,
                        "num_blocks": 99,
                        "max_waiting": 9,
                    },
                    "prefill_batches": [1, 2],
                    "decode_batches": [1, 8],
                    "contexts": [64, 128],
                    "rounds": 3,
                    "seconds": 4.0,
                    "seed": 5,
                    "json_file": "out.json",
                    "plot": "plot.svg",
                    "profile": "profile.json",
                }
            ]
        },
    ),
    Case(
        "bench kv-codec --model /models/a --dtype bfloat16 --text prompt.txt --prompt-tokens 32 "
        "--continuation-tokens 4 --prompts 2 --json - --config settings.yaml --set num_blocks=99",
        {
            "command_line.bench_kv_codec.run:run_kv_codec_bench": [
                {
                    "settings": {
                        "model": "/models/a",
                        "device": "cpu",
                        "dtype": "bfloat16",
                        "num_blocks": 99,
                        "max_waiting": 9,
                    },
                    "text": "prompt.txt",
                    "prompt_tokens": 32,
                    "continuation_tokens": 4,
                    "prompts": 2,
                    "json_file": "-",
                }
            ]
        },
    ),
    Case(
        "simulate "
        + MACHINES
        + MODEL
        + SYNTHETIC
        + "--prefill 1 --decode 2 --policy baton,round_robin --as-deployed "
        "--hosts 2 --max-short-prompt-advantage 0.1 --shared-speeds 1,0.6 --report-seconds 0.1 "
        "--conductors 2 --kill d0@1:2 --slow p0x2 --rate 3 --find-goodput --seeds 1"
    ),
    Case(
        "simulate --plots plots",
        {"command_line.simulate:run_simulate": [{}, {}, ["baton"], 1, False, "plots", False]},
    ),
    Case("simulate " + MACHINES + TRACE + "--costs costs.json --rate-factor 2 --mixed 1"),
    Case(
        "plan --rate 2 --gpus 2 "
        + MACHINES
        + MODEL
        + SYNTHETIC
        + "--hosts 1 --target 0.1 --processes 1"
    ),
    Case(
        "plan --rate 2 --gpus 2 --plots plots --pareto pareto --price H200=2",
        {
            "command_line.plan:run_plan": [
                {"rate": 2.0},
                {},
                2,
                0.9,
                "plots",
                False,
                "pareto",
                ["H200=2"],
                None,
            ]
        },
    ),
    Case("plan --rate 2 --gpus 2 " + MACHINES + TRACE + "--costs costs.json"),
]


def plain(value: Any) -> Any:
    """Return ``value`` as JSON has it: of settings and other dataclasses, what differs from the
    defaults."""
    if isinstance(value, Settings):
        default = Settings()
        given = {name: getattr(value, name) for name in Settings.model_fields}
        return {name: plain(each) for name, each in given.items() if each != getattr(default, name)}
    if is_dataclass(value) and not isinstance(value, type):
        given = {each.name: getattr(value, each.name) for each in fields(value)}
        defaults = {each.name: each.default for each in fields(value)}
        return {name: plain(each) for name, each in given.items() if each != defaults[name]}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    return value if isinstance(value, bool | int | float | None) else str(value)


def contains(found: Any, expected: Any) -> bool:
    """Whether ``found`` is ``expected``, apart from further fields of objects within it."""
    if isinstance(expected, dict):
        return found.keys() >= expected.keys() and all(
            contains(found[name], each) for name, each in expected.items()
        )
    if isinstance(expected, list):
        return len(found) == len(expected) and all(map(contains, found, expected))
    return bool(found == expected)


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The files that the commands read, in the current folder; no settings but the commands'."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompt.txt").write_text("three\n")
    (tmp_path / "settings.yaml").write_text("max_waiting: 9\n")
    (tmp_path / "costs.json").write_text(json.dumps(measured_costs()))
    (tmp_path / "ca.pem").write_text(AUTHORITY)
    write_trace(TRACE_GENERATORS["chat"](20, 2.0, 1), tmp_path / "trace.jsonl")
    kept = {name: text for name, text in os.environ.items() if not name.startswith("BATON_")}
    with patch.dict(os.environ, {**kept, "BATON_HOME": str(tmp_path)}, clear=True):
        yield


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.line)
def test_options_mean_what_they_say(
    case: Case, monkeypatch: pytest.MonkeyPatch, environment: None
) -> None:
    calls: dict[str, list[Any]] = {}

    def record(function: str, *arguments: Any, **named: Any) -> None:
        calls[function] = plain([*arguments, *named.values()])

    for function in case.calls:
        module, _, name = function.partition(":")
        monkeypatch.setattr(import_module(module), name, partial(record, function))
    monkeypatch.setattr(sys, "argv", ["baton", *shlex.split(case.line)])
    with pytest.raises(SystemExit) as ended:
        run_command_line()
    assert ended.value.code == 0
    assert contains(calls, case.calls), calls


def test_no_option_is_forgotten() -> None:
    """Each option of each command is in one of the lines above."""
    lines = [shlex.split(case.line) for case in CASES]
    forgotten = []
    for words, command in _commands(typer.main.get_command(app), []):
        given = {word for line in lines if line[: len(words)] == words for word in line}
        options = [param for param in command.params if param.param_type_name == "option"]
        forgotten += [(*words, *each.opts) for each in options if not given & {*each.opts}]
    assert forgotten == []


def _commands(command: Any, words: list[str]) -> Iterator[tuple[list[str], Any]]:
    """Yield a command and its subcommands, each with its words on the command line."""
    yield words, command
    for name, subcommand in getattr(command, "commands", {}).items():
        yield from _commands(subcommand, [*words, name])
