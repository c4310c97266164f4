"""Measures a cluster whose prefill and decode workers share one GPU, and one worker that does both.

    python -m benchmarks.gpu.cluster [--small]

The model has Qwen3-8B's layers with random weights, and the demo model's vocabulary and tokenizer;
its checkpoint is written to a temporary folder. ``--small`` measures the demo model on the CPU, to
try this program.
"""

import json
import os
import shutil
import signal
import statistics
import sys
import tempfile
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from baton.checkpoints.checkpoint import DEMO_MODEL
from benchmarks.gpu.timing import GpuTableRow
from testkit.local_cluster import LocalCluster, local_cluster

SEED = 20261126
ROUNDS = 5
SHARD_LAYERS = 9
START_SECONDS = 170.0


HISTOGRAMS = {
    "baton_time_to_first_token_seconds": "TTFT in the router",
    "baton_placement_seconds": "placement",
    "baton_worker_queue_seconds": "wait for the first step",
    "baton_worker_step_seconds": "step",
    "baton_worker_kv_export_seconds": "KV export",
    "baton_worker_kv_transfer_exposed_seconds": "exposed KV transfer",
}
"""The histograms whose means are shown for each load, and their names in the table."""

Means = dict[tuple[str, str], tuple[float, float]]
"""Count and sum of each histogram, by its name and its label ``kind``."""


@dataclass(frozen=True)
class ClusterLoad:
    """What is measured: ``prompts`` are the lengths of prompts that are sent one at a time, and
    ``rates`` the requests per second of loads with ``input_tokens`` and ``output_tokens``, each of
    which lasts ``seconds``. A request is good if its TTFT and its mean inter-token latency are
    within the SLOs."""

    settings: dict[str, object]
    prompts: Sequence[int]
    rates: Sequence[float]
    input_tokens: int = 1024
    output_tokens: int = 128
    seconds: float = 10.0
    ttft_slo_seconds: float = 0.5
    latency_slo_seconds: float = 0.03


GPU_LOAD = ClusterLoad(
    {
        "device": "cuda", "dtype": "bfloat16", "pool_bytes": "13GiB", "max_batched_tokens": 2048,
        "max_model_tokens": 40_000, "ops_port": 0,
    },
    prompts=(512, 4096, 32_000),
    rates=(12, 16),
)  # fmt: skip
SMALL_LOAD = ClusterLoad(
    {"ops_port": 0}, prompts=(60, 300), rates=(2,), input_tokens=100, seconds=5
)


def cluster_speed(load: ClusterLoad = GPU_LOAD) -> Iterator[GpuTableRow]:
    chance = np.random.default_rng(SEED)
    with tempfile.TemporaryDirectory() as folder:
        model = None
        if load is GPU_LOAD:
            model = Path(folder) / "model"
            write_checkpoint(model)
        with local_cluster(model, settings=load.settings, timeout_seconds=START_SECONDS) as running:
            yield from _measure(running, load, "1 + 1 on one GPU", chance)
            with _without_prefill_worker(running):
                yield from _measure(running, load, "one worker that does both", chance)


def write_checkpoint(path: Path) -> None:
    """Write a checkpoint with Qwen3-8B's layers, random BF16 weights, and the demo model's
    vocabulary. The weights are made on the GPU, because a CPU takes minutes for that."""
    import torch
    from safetensors.torch import save_file

    path.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        if (DEMO_MODEL / name).exists():
            shutil.copy(DEMO_MODEL / name, path)
    demo = json.loads((DEMO_MODEL / "config.json").read_text())
    hidden, heads, kv, size, layers = 4096, 32 * 128, 8 * 128, 12_288, 36
    config = {
        **{key: demo[key] for key in ("vocab_size", "eos_token_id", "bos_token_id") if key in demo},
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_act": "silu",
        "hidden_size": hidden, "intermediate_size": size, "num_hidden_layers": layers,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "max_position_embeddings": 40_960, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
        "tie_word_embeddings": False, "attention_bias": False, "torch_dtype": "bfloat16",
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(config))

    def noise(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, device="cuda", dtype=torch.bfloat16) * 0.02).cpu()

    def ones(length: int) -> torch.Tensor:
        return torch.ones(length, dtype=torch.bfloat16)

    index: dict[str, str] = {}

    def save(name: str, tensors: dict[str, torch.Tensor]) -> None:
        save_file(tensors, path / name)
        index.update(dict.fromkeys(tensors, name))

    for first in range(0, layers, SHARD_LAYERS):
        tensors: dict[str, torch.Tensor] = {}
        for number in range(first, first + SHARD_LAYERS):
            layer = f"model.layers.{number}."
            shapes = {
                "self_attn.q_proj": (heads, hidden), "self_attn.k_proj": (kv, hidden),
                "self_attn.v_proj": (kv, hidden), "self_attn.o_proj": (hidden, heads),
                "mlp.gate_proj": (size, hidden), "mlp.up_proj": (size, hidden),
                "mlp.down_proj": (hidden, size),
            }  # fmt: skip
            norms = {
                "input_layernorm": hidden, "post_attention_layernorm": hidden,
                "self_attn.q_norm": 128, "self_attn.k_norm": 128,
            }  # fmt: skip
            tensors |= {f"{layer}{name}.weight": noise(*shape) for name, shape in shapes.items()}
            tensors |= {f"{layer}{name}.weight": ones(length) for name, length in norms.items()}
        save(f"model-{first // SHARD_LAYERS}.safetensors", tensors)
    vocabulary = config["vocab_size"]
    ends = {"model.embed_tokens.weight": noise(vocabulary, hidden)}
    ends |= {"lm_head.weight": noise(vocabulary, hidden), "model.norm.weight": ones(hidden)}
    save("model-ends.safetensors", ends)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


class _without_prefill_worker:
    """Within the block, the cluster has no prefill worker, so the decode worker does everything. It
    is killed, and whoever would start it again is stopped."""

    def __init__(self, running: LocalCluster) -> None:
        self._worker = int(running.processes("prefill")[0]["pid"])
        status = Path(f"/proc/{self._worker}/status").read_text()
        self._supervisor = int(status.partition("PPid:")[2].split()[0])

    def __enter__(self) -> None:
        os.kill(self._supervisor, signal.SIGSTOP)
        os.kill(self._worker, signal.SIGKILL)

    def __exit__(self, *_: object) -> None:
        os.kill(self._supervisor, signal.SIGCONT)


def _measure(
    running: LocalCluster, load: ClusterLoad, name: str, chance: np.random.Generator
) -> Iterator[GpuTableRow]:
    for length in load.prompts:
        answers = [_alone(running, chance, length) for _ in range(ROUNDS)][1:]  # one to warm up
        ttft, latency, exposed = (
            statistics.median(each[key] for each in answers)
            for key in ("ttft_seconds", "itl_seconds", "exposed_seconds")
        )
        over, size = answers[-1]["transport"] or "none", answers[-1]["size_bytes"]
        result = f"ITL {latency * 1e3:.2f} ms, KV {size / 1e6:.0f} MB over {over}"
        if over == "none":
            yield GpuTableRow(f"{name}: TTFT, {length} tokens alone", result, ttft)
        else:
            result += f", exposed {exposed * 1e3:.1f} ms"
            yield GpuTableRow(
                f"{name}: TTFT, {length} tokens alone", result, ttft, exposed / ttft, "TTFT exposed"
            )
    for rate in load.rates:
        before = _means(running)
        yield _loaded(running, load, rate, name)
        means = means_between(before, _means(running))
        yield GpuTableRow(f"{name}: means at {rate:g} requests/s", means)


def _alone(running: LocalCluster, chance: np.random.Generator, length: int) -> dict[str, Any]:
    """Send one request and return what the cluster tells about it."""
    body = {
        "prompt": chance.integers(3, 4000, size=length).tolist(), "max_tokens": 32,
        "temperature": 0, "ignore_eos": True,
    }  # fmt: skip
    _, headers = running.post_with_headers("/v1/completions", body)
    told = json.loads(running.baton("explain", headers["x-baton-request-id"], "--json").stdout)
    details = told.get("details", {})
    return {
        "ttft_seconds": told["actual"]["ttft_seconds"],
        "itl_seconds": told["actual"]["itl_seconds"],
        "transport": told["transport"],
        "size_bytes": int(told["kv_transfer_bytes"]),
        "exposed_seconds": float(details.get("kv_transfer_exposed_seconds", 0)),
    }


def _loaded(running: LocalCluster, load: ClusterLoad, rate: float, name: str) -> GpuTableRow:
    """Send Poisson arrivals for some seconds, and return the row of their latencies."""
    done = running.baton(
        "bench", "--url", running.url, "--prompts", "tokens", "--ignore-eos", "--json",
        "--rate", str(rate), "--duration", str(load.seconds), "--seed", str(SEED),
        "--input-tokens", str(load.input_tokens), "--output-tokens", str(load.output_tokens),
        "--slo-ttft", str(load.ttft_slo_seconds), "--slo-tbt", str(load.latency_slo_seconds),
    )  # fmt: skip
    found = json.loads(done.stdout.strip().splitlines()[-1])
    what = f"{name}: {rate:g} requests/s of {load.input_tokens} + {load.output_tokens} tokens"
    return GpuTableRow(what, summary_of(found), ok=found["failed_ratio"] == 0)


def _means(running: LocalCluster) -> Means:
    """Return count and sum of the histograms in ``HISTOGRAMS``, of all processes together except
    the killed one, which its stopped supervisor still lists."""
    from prometheus_client.parser import text_string_to_metric_families

    means: Means = {}
    for process in running.status()["processes"]:
        if not process["ops"] or process["state"] != "serving":
            continue
        try:
            with urllib.request.urlopen(f"http://{process['ops']}/metrics", timeout=30) as answer:
                text = answer.read().decode()
        except OSError:
            continue
        for family in text_string_to_metric_families(text):
            if family.name in HISTOGRAMS:
                for sample in family.samples:
                    _add(means, sample.name, sample.labels.get("kind", ""), sample.value)
    return means


def _add(means: Means, name: str, kind: str, value: float) -> None:
    base, _, part = name.rpartition("_")
    if part in ("count", "sum"):
        count, total = means.get((base, kind), (0.0, 0.0))
        is_count = part == "count"
        means[base, kind] = (count + value * is_count, total + value * (not is_count))


def means_between(before: Means, after: Means) -> str:
    """Describe the mean of each histogram between two scrapes, in milliseconds."""
    parts = []
    for key, (count, total) in after.items():
        old_count, old_total = before.get(key, (0.0, 0.0))
        if number := count - old_count:
            name = " ".join(part for part in (HISTOGRAMS[key[0]], key[1]) if part)
            parts.append(f"{name} {(total - old_total) / number * 1e3:.1f} ms ({number:.0f})")
    return ", ".join(parts)


def summary_of(found: dict[str, Any]) -> str:
    """Return the figures of a result of ``baton bench`` that are compared, in milliseconds where
    they are times."""
    times = {
        name: "/".join(f"{found[key][part] * 1e3:.1f}" for part in ("p50", "p99"))
        for name, key in {"TTFT": "ttft_seconds", "ITL": "itl_seconds"}.items()
    }
    latencies = ", ".join(f"{name} p50/p99 {values} ms" for name, values in times.items())
    rate = f"{found['output_tokens_per_second']:.0f} tokens/s"
    good = f"good {found['goodput_rps']:.1f} of {found['throughput_rps']:.1f} requests/s"
    return f"{good}, {rate}, {latencies}"


def main() -> None:
    for row in cluster_speed(SMALL_LOAD if "--small" in sys.argv else GPU_LOAD):
        print(json.dumps(asdict(row)), flush=True)


if __name__ == "__main__":
    main()
