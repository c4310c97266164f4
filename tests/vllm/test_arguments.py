"""Tests the setting ``engine_args``: arguments of vLLM are passed on to it, except those that Baton
doesn't support, which are refused with an error that names the argument."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs

from baton.engine.runner_options import RunnerOptions
from baton.errors import Invalid
from baton.vllm_engine.arguments import (
    CHANGES_KV,
    KEEPS_KV,
    OWN_SETTINGS,
    UNSUPPORTED,
    _check_model_runner,
    read_arguments,
)
from testkit.model_zoo import make_model

OWN_VALUES = {
    "model": "other/model",
    "max_model_len": "100",
    "max_num_seqs": "7",
    "max_num_batched_tokens": "99",
    "block_size": "64",
    "dtype": "bfloat16",
    "kv_cache_memory_bytes": "1000000",
    "num_gpu_blocks_override": "8",
    "served_model_name": "name",
    "log_level": "DEBUG",
}
"""A value of each of vLLM's arguments that has a setting of Baton's own."""

UNSUPPORTED_VALUES = {
    "kv_transfer_config": """'{"kv_connector": "NixlConnector", "kv_role": "kv_both"}'""",
    "speculative_config": """'{"method": "ngram", "num_speculative_tokens": 2}'""",
    "pipeline_parallel_size": "2",
    "data_parallel_size": "2",
    "enable_lora": "",
    "decode_context_parallel_size": "2",
    "spec_method": "ngram",
    "runner": "pooling",
    "enable_prefix_caching": "",
    "async_scheduling": "",
    "scheduler_cls": "a.Scheduler",
    "worker_cls": "a.Worker",
}
"""A value of each argument that is refused."""


ARGUMENT = "has no effect with engine vllm: set vLLM's argument"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), "qwen3")


def options(**changes: object) -> RunnerOptions:
    given = {"block_tokens": 32, "dtype": "float32", "max_model_tokens": 512, **changes}
    return RunnerOptions(**given)  # type: ignore[arg-type]


def vllm_config(path: Path, given: RunnerOptions, arguments: str) -> VllmConfig:
    return read_arguments(path, given, arguments).config


def refusal(path: Path, arguments: str, **changes: object) -> Invalid:
    with pytest.raises(Invalid) as refused:
        vllm_config(path, options(**changes), arguments)
    return refused.value


def flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def test_every_refused_argument_is_tested() -> None:
    assert OWN_VALUES.keys() == OWN_SETTINGS.keys()
    assert UNSUPPORTED_VALUES.keys() == UNSUPPORTED.keys()


@pytest.mark.parametrize("name", OWN_VALUES)
def test_arguments_with_a_setting_of_batons_own_name_it(name: str, model: Path) -> None:
    error = refusal(model, f"{flag(name)} {OWN_VALUES[name]}")
    assert str(error) == (
        f"engine_args: {flag(name)} is not allowed: use Baton's setting {OWN_SETTINGS[name]}"
    )
    assert error.param == "engine_args"


@pytest.mark.parametrize("name", UNSUPPORTED_VALUES)
def test_unsupported_arguments_say_why(name: str, model: Path) -> None:
    error = refusal(model, f"{flag(name)} {UNSUPPORTED_VALUES[name]}")
    assert str(error) == f"engine_args: {flag(name)} is not allowed: {UNSUPPORTED[name]}"
    assert error.param == "engine_args"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--no-such-flag", "unrecognized arguments: --no-such-flag"),
        ("word", "unrecognized arguments: word"),
        ("--tensor-parallel-size many", "invalid"),
        ('--hf-overrides \'{"a": 1}', "No closing quotation"),
    ],
)
def test_wrong_arguments_are_reported(arguments: str, message: str, model: Path) -> None:
    error = refusal(model, arguments)
    assert str(error).startswith("engine_args: ") and message in str(error)
    assert error.param == "engine_args"


def test_quoted_arguments_are_one_word(model: Path) -> None:
    config = vllm_config(model, options(), """--additional-config '{"two words": "in one"}'""")
    assert config.additional_config == {"two words": "in one"}


def test_batons_settings_are_passed_to_vllm(model: Path) -> None:
    given = options(max_sequences=5, max_batched_tokens=300, num_blocks=40, block_tokens=64)
    config = vllm_config(model, given, "--enforce-eager")
    assert config.model_config.enforce_eager
    assert str(config.model_config.dtype) == "torch.float32"
    assert config.model_config.max_model_len == 512
    assert config.scheduler_config.max_num_seqs == 5
    assert config.scheduler_config.max_num_batched_tokens == 300
    assert config.cache_config.block_size == 64
    assert config.cache_config.num_gpu_blocks_override == 40
    assert not config.cache_config.enable_prefix_caching


def test_the_v2_model_runner_is_refused() -> None:
    # This is a fake, because vLLM's V2 model runner needs Triton.
    config: Any = SimpleNamespace(use_v2_model_runner=True)
    with pytest.raises(Invalid, match="set VLLM_USE_V2_MODEL_RUNNER=0") as refused:
        _check_model_runner(config)
    assert refused.value.param == "engine_args"


def test_a_limit_above_that_of_the_model_has_no_effect(model: Path) -> None:
    unlimited = vllm_config(model, options(max_model_tokens=None), "")
    config = vllm_config(model, options(max_model_tokens=10**6), "")
    assert config.model_config.max_model_len == unlimited.model_config.max_model_len == 4096


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("deterministic", True, "deterministic is not supported by engine vllm"),
        ("quantization", "int8", f"quantization {ARGUMENT} --quantization in engine_args instead"),
        ("kv_dtype", "fp8", f"kv_dtype {ARGUMENT} --kv-cache-dtype in engine_args instead"),
        ("cpu_kernels", "on", "cpu_kernels has no effect with engine vllm"),
        ("device", "cuda", "device is cuda, but vLLM is built for cpu: set auto or cpu"),
    ],
)  # fmt: skip
def test_settings_of_batons_own_engine_are_refused(
    setting: str, value: object, message: str, model: Path
) -> None:
    error = refusal(model, "", **{setting: value})
    assert (str(error), error.param) == (message, setting)


@pytest.mark.parametrize("name", sorted(CHANGES_KV | KEEPS_KV))
def test_arguments_that_are_passed_on_exist(name: str) -> None:
    assert name in EngineArgs.__dataclass_fields__
    assert name not in OWN_SETTINGS and name not in UNSUPPORTED


@pytest.mark.parametrize(
    "flags", ["--kv-sharing-fast-prefill", "--nnodes 2", "--enable-sleep-mode"]
)
def test_all_other_arguments_are_refused(flags: str, model: Path) -> None:
    error = refusal(model, flags)
    assert str(error) == (
        f"engine_args: {flags.split()[0]} can't be used with Baton: leave it out (it concerns a "
        "part of vLLM that Baton replaces, or is not supported yet)"
    )


def test_arguments_that_change_the_kv_change_its_identity(model: Path) -> None:
    def identity(arguments: str, **changes: object) -> str:
        return read_arguments(model, options(**changes), arguments).kv_identity

    plain = identity("")
    assert identity("--enforce-eager --gpu-memory-utilization 0.5") == plain
    assert identity("", max_sequences=3, pool_bytes=10_000_000) == plain
    changes = ["--load-format dummy", "--seed 3", "--hf-overrides '{\"rms_norm_eps\": 0.5}'"]
    others = {identity(each) for each in changes} | {identity("", dtype="bfloat16")}
    assert len(others) == 4 and plain not in others


def test_the_pool_is_divided_among_the_ranks(model: Path) -> None:
    config = vllm_config(model, options(pool_bytes=64_000_000), "--tensor-parallel-size 2")
    assert config.cache_config.kv_cache_memory_bytes == 32_000_000


def test_more_sequences_than_tokens_of_a_step_are_fine(model: Path) -> None:
    config = vllm_config(model, options(max_sequences=64, max_batched_tokens=32), "")
    assert config.scheduler_config.max_num_seqs == 32


def test_without_graphs_vllm_is_eager(model: Path) -> None:
    assert vllm_config(model, options(cuda_graphs=False), "").model_config.enforce_eager


@pytest.mark.parametrize("block_tokens", [16, 48])
def test_blocks_that_vllms_attention_does_not_support_are_refused(
    block_tokens: int, model: Path
) -> None:
    error = refusal(model, "", block_tokens=block_tokens)
    assert str(error) == (
        f"block_tokens is {block_tokens}; vLLM's attention on CPUs needs a multiple of 32"
    )
    assert error.param == "block_tokens"


def test_what_vllm_itself_refuses_is_one_line(model: Path) -> None:
    message = str(refusal(model, "--tensor-parallel-size 3"))
    assert message.startswith("vLLM refuses its configuration: ")
    assert "must be divisible by tensor parallel size" in message
    assert "\n" not in message and len(message) < 600
