"""The contenders of ``benchmarks.engine``: Baton's kernels, vLLM, llama.cpp, torch and
transformers."""

import argparse
import contextlib
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from baton.checkpoints.checkpoint import ModelConfig, load_model_config, model_digest
from baton.engine.attention.base import pack_batch
from baton.engine.bench.bench_case import BenchCase
from baton.engine.bench.bench_runner import BenchRunner
from baton.engine.bench.stopwatch import Action, ElapsedTime, time_mean
from baton.engine.kv_pool import KvPool
from baton.engine.loader import CheckpointWeights
from baton.engine.model import DecoderModel
from baton.engine.plan import Row
from baton.engine.runner import ModelRunner, make_model

CHUNK = 512
BLOCK_TOKENS = 16
CPU = torch.device("cpu")
PEERS = Path(__file__).parent / "peers"


class EngineContender(Protocol):
    """An implementation of the model. ``shares_pool`` says whether its KV is in the pool that all
    variants of Baton's engine share."""

    shares_pool: bool

    def prepare(self, work: BenchCase) -> str:
        """Prepare a case. Afterwards, :meth:`run_steps` can be called any number of times. Return
        the name of the method of computation, or an empty string if the contender has only one
        method."""
        ...

    def run_steps(self, count: int) -> ElapsedTime:
        """Run ``count`` steps; return the mean time per step."""
        ...

    def free(self) -> None:
        """Free what ``prepare`` allocated."""
        ...

    def logits(self, tokens: list[int]) -> torch.Tensor:
        """Return the logits [vocabulary] of the last token."""
        ...


class BatonEngine:
    """Baton's engine. ``quantization`` is the format of the weights, with the same values as
    Baton's setting ``quantization``."""

    shares_pool = True

    def __init__(
        self, path: Path, pool: KvPool, seed: int, *, native: bool, quantization: str = "none"
    ) -> None:
        config = load_model_config(path)
        stored = CheckpointWeights(path, config)
        weights = stored if native else stored.to_torch(CPU, pool.tensor.dtype)
        self._model: DecoderModel = make_model(config, weights, pool, quantization)
        self._pool = pool
        runner = ModelRunner(config, model_digest(path), self._model, pool)
        self._stage = BenchRunner(runner, CHUNK, seed)
        self._step: Action = list

    def prepare(self, work: BenchCase) -> str:
        self._step = self._stage.make_action(work)
        self._step()
        return ""

    def run_steps(self, count: int) -> ElapsedTime:
        return time_mean(self._step, count)

    def free(self) -> None:
        pass

    @torch.inference_mode()
    def logits(self, tokens: list[int]) -> torch.Tensor:
        row: Row = self._stage.prompt_row(tokens)
        batch = pack_batch([row], self._pool.block_tokens, CPU)
        hidden = self._model.hidden(torch.tensor(tokens), batch)
        return self._model.logits(hidden, torch.tensor([len(tokens) - 1]))[0]


class TransformersEngine:
    shares_pool = False

    def __init__(self, path: Path, dtype: torch.dtype) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
        self._dtype = dtype
        self._step: Action = list

    def prepare(self, work: BenchCase) -> str:
        self._step = self._prefill(work) if work.kind == "prefill" else self._decode(work)
        self._step()
        return ""

    def run_steps(self, count: int) -> ElapsedTime:
        return time_mean(self._step, count)

    def free(self) -> None:
        self._step = list

    def logits(self, tokens: list[int]) -> torch.Tensor:
        return self._call(torch.tensor([tokens]), DynamicCache())[0]

    def _prefill(self, work: BenchCase) -> Action:
        tokens = torch.arange(1, work.context + 1).remainder(1000).unsqueeze(0)
        return lambda: self._call(tokens, DynamicCache()).argmax(dim=-1)

    def _decode(self, work: BenchCase) -> Action:
        cache, tokens = self._noise(work), torch.ones(work.batch, 1, dtype=torch.int64)

        def decode() -> None:
            self._call(tokens, cache).argmax(dim=-1)
            cache.crop(-1)

        return decode

    @torch.inference_mode()
    def _call(self, tokens: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
        output = self._model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
        logits: torch.Tensor = output.logits[:, -1]
        return logits

    def _noise(self, work: BenchCase) -> DynamicCache:
        config, cache = self._model.config, DynamicCache()
        shape = (work.batch, config.num_key_value_heads, work.context - 1, config.head_dim)
        for layer in range(config.num_hidden_layers):
            noise = [torch.empty(shape, dtype=self._dtype).normal_() for _ in range(2)]
            cache.update(*noise, layer)
        return cache


class PeerEngine:
    """Runs another engine with the Python interpreter of its environment
    (benchmarks/peers/llama.py, vllm_steps.py). That process measures its own times."""

    shares_pool = False

    def __init__(self, python: Path, peer: str, path: Path, *arguments: str) -> None:
        self._name = peer
        self._process = subprocess.Popen(
            [str(python), str(PEERS / peer), str(path), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.description = self._read()

    def prepare(self, work: BenchCase) -> str:
        request = {"kind": work.kind, "batch": work.batch, "context": work.context}
        return str(self.ask(prepare=request))

    def run_steps(self, count: int) -> ElapsedTime:
        return ElapsedTime(**self.ask(step=count))

    def free(self) -> None:
        self.ask(drop=True)

    def logits(self, tokens: list[int]) -> torch.Tensor:
        return torch.tensor(self.ask(logits=tokens))

    def close(self) -> None:
        """Close the process's standard input. The process then removes its files and exits."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()

    def ask(self, **request: Any) -> Any:
        assert self._process.stdin is not None
        print(json.dumps(request), file=self._process.stdin, flush=True)
        return self._read()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self._name} exited with code {self._process.wait()}")
        return json.loads(line)


@contextlib.contextmanager
def contenders(
    path: Path, options: argparse.Namespace, num_blocks: int
) -> Iterator[dict[str, EngineContender]]:
    """Yield the contenders by name, Baton's kernels first. All variants of Baton's engine share one
    pool of ``num_blocks`` blocks."""
    dtype = getattr(torch, options.dtype)
    pool = _pool(load_model_config(path), dtype, num_blocks)
    found: dict[str, EngineContender] = {
        "kernels": BatonEngine(path, pool, options.seed, native=True)
    }
    for name in options.quantized:
        found[name] = BatonEngine(path, pool, options.seed, native=True, quantization=name)
    with contextlib.ExitStack() as stack:
        threads = ("--threads", str(options.threads))
        if options.vllm is not None:
            eager = ["--eager"] if options.vllm_eager else []
            vllm = PeerEngine(
                options.vllm, "vllm_steps.py", path, *threads, "--dtype", options.dtype, *eager
            )
            stack.callback(vllm.close)
            print(f"vLLM {vllm.description['version']}: {vllm.description['features']}")
            found["vllm"] = vllm
        if options.llama is not None:
            llama = PeerEngine(options.llama, "llama.py", path, *threads)
            stack.callback(llama.close)
            print(
                f"llama-cpp-python {llama.description['version']}: {llama.description['features']}"
            )
            found["llama.cpp"] = llama
        if "torch" not in options.without:
            found["torch"] = BatonEngine(path, pool, options.seed, native=False)
        if "transformers" not in options.without:
            found["transformers"] = TransformersEngine(path, dtype)
        yield found


def _pool(config: ModelConfig, dtype: torch.dtype, num_blocks: int) -> KvPool:
    return KvPool(config, num_blocks=num_blocks, block_tokens=BLOCK_TOKENS, dtype=dtype, device=CPU)
