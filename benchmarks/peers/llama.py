"""Runs llama.cpp in its own process, to compare it with Baton's engine on the same weights and
work.

    python benchmarks/peers/llama.py MODEL_DIR_OR_GGUF --threads N [--type q4_0|q8_0]

Runs in its own environment and needs nothing of Baton's:

    python3 -m venv peer
    CMAKE_ARGS=-DGGML_NATIVE=ON peer/bin/pip install llama-cpp-python gguf numpy

Requests are lines of JSON on stdin, responses lines of JSON on stdout; the first line on stdout
describes llama.cpp. With ``--type``, a GGUF file is quantized to that type first, by llama.cpp.
Requests: ``{"logits": [token, …]}`` returns the logits of the last token; ``{"loss": [token, …]}``
the mean loss of all tokens but the first, in nats;
``{"prepare": {"kind", "batch", "context"}}`` prepares a case, runs it once with each of llama.cpp's
methods, and keeps the fastest; ``{"step": N}`` runs the case N times and returns the wall-clock and
CPU seconds per run; ``{"drop": true}`` frees the case.

Before a decode, the KV of one prompt is computed once and copied to every sequence; each copy has
its own memory. A step decodes one token of each sequence; the KV that it wrote is removed outside
of the measured time.
"""

import argparse
import ctypes
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import gguf_file
import llama_cpp
import numpy as np

PADDING = 256
"""llama.cpp's context sizes are multiples of this."""

VOCABULARY = 1000
"""The range of the token ids that are computed; their values do not affect the time."""


@dataclass(frozen=True)
class AttentionConfig:
    """Options of llama.cpp that affect its speed: flash attention, the number of tokens that it
    computes at once (``ubatch``), and the format of the KV."""

    flash: bool
    ubatch: int
    kv: str

    def __str__(self) -> str:
        return f"{'flash' if self.flash else 'plain'} attention, ubatch {self.ubatch}, KV {self.kv}"


FILL = AttentionConfig(flash=True, ubatch=512, kv="f16")
"""The method by which a decode's KV is filled: all methods use the same KV format afterwards."""

BF16 = 30
"""The number of the BF16 format in ggml, for which its Python binding has no name."""

KV_TYPES = {"f16": llama_cpp.GGML_TYPE_F16, "bf16": BF16}


FILE_TYPES = {
    "q4_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0,
    "q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0,
}


class Session:
    """One context of llama.cpp, large enough for a case."""

    def __init__(
        self,
        model: Any,
        threads: int,
        attention: AttentionConfig,
        batch: int,
        context: int,
        tokens: int,
    ) -> None:
        parameters = llama_cpp.llama_context_default_params()
        parameters.n_ctx = batch * (-(-context // PADDING) * PADDING)
        parameters.n_seq_max = batch
        parameters.n_batch = max(tokens, attention.ubatch)
        parameters.n_ubatch = attention.ubatch
        parameters.n_threads = parameters.n_threads_batch = threads
        parameters.type_k = parameters.type_v = KV_TYPES[attention.kv]
        parameters.no_perf = True
        _set_flash(parameters, attention.flash)
        if hasattr(parameters, "kv_unified"):
            parameters.kv_unified = batch == 1
        self._context = llama_cpp.llama_init_from_model(model, parameters)
        if not self._context:
            raise MemoryError(f"llama.cpp can't allocate a context of {batch} × {context} tokens")
        self._vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        self._memory = llama_cpp.llama_get_memory(self._context)

    def close(self) -> None:
        llama_cpp.llama_free(self._context)

    def decode(
        self, tokens: list[int], sequences: list[int], positions: list[int], every: bool = False
    ) -> None:
        """Compute the tokens, and the logits of the last token of each sequence, or of every
        token."""
        batch = llama_cpp.llama_batch_init(len(tokens), 0, 1)
        last = {sequence: index for index, sequence in enumerate(sequences)}
        for index, token in enumerate(tokens):
            batch.token[index] = token
            batch.pos[index] = positions[index]
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = sequences[index]
            batch.logits[index] = every or last[sequences[index]] == index
        batch.n_tokens = len(tokens)
        status = llama_cpp.llama_decode(self._context, batch)
        llama_cpp.llama_batch_free(batch)
        if status:
            raise RuntimeError(f"llama_decode returned {status}; 0 means success")

    def logits(self, rows: int) -> Any:
        """Return the logits [rows, vocabulary], in the order of the tokens."""
        address = llama_cpp.llama_get_logits(self._context)
        return np.ctypeslib.as_array(address, shape=(rows * self._vocabulary,)).reshape(rows, -1)

    def forget(self, first: int = 0) -> None:
        """Remove the KV of all sequences from the position ``first`` on."""
        llama_cpp.llama_memory_seq_rm(self._memory, -1, first, -1)

    def copy(self, to: int) -> None:
        """Copy the KV of sequence 0 to sequence ``to``."""
        llama_cpp.llama_memory_seq_cp(self._memory, 0, to, -1, -1)


class LlamaCppEngine:
    def __init__(self, path: Path, threads: int) -> None:
        parameters = llama_cpp.llama_model_default_params()
        parameters.n_gpu_layers = 0
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), parameters)
        if not self._model:
            raise RuntimeError("llama.cpp can't load the GGUF file")
        self._threads = threads
        self._session: Session | None = None
        self._step: Callable[[], None] = lambda: None
        self._kept = 0
        self._tried: dict[tuple[Any, ...], float] = {}

    def logits(self, tokens: list[int]) -> list[float]:
        session = self._open(FILL, 1, len(tokens), len(tokens))
        session.decode(tokens, [0] * len(tokens), list(range(len(tokens))))
        found: list[float] = session.logits(1)[0].tolist()
        self.drop()
        return found

    def loss(self, tokens: list[int]) -> float:
        count = len(tokens) - 1
        session = self._open(FILL, 1, count, count)
        session.decode(tokens[:-1], [0] * count, list(range(count)), every=True)
        logits = session.logits(count).astype(np.float64)
        logits -= logits.max(axis=1, keepdims=True)
        chosen = logits[np.arange(count), tokens[1:]]
        found = float((np.log(np.exp(logits).sum(axis=1)) - chosen).mean())
        self.drop()
        return found

    def prepare(self, work: dict[str, Any]) -> str:
        """Prepare a case: try the settings of attention and batch size that llama.cpp has, and
        return the fastest, with which ``step`` runs the case."""
        best = min(_attention_configs(512), key=lambda attention: self._try(work, attention))
        if work["kind"] == "prefill" and work["context"] > 512:
            large = replace(best, ubatch=min(2048, work["context"]))
            best = min((best, large), key=lambda attention: self._try(work, attention))
        self._ready(work, best)
        self.step()
        return str(best)

    def step(self, count: int = 1) -> dict[str, float]:
        assert self._session is not None
        wall = cpu = 0.0
        for _ in range(count):
            began, spent = time.perf_counter(), time.process_time()
            self._step()
            wall += time.perf_counter() - began
            cpu += time.process_time() - spent
            self._session.forget(self._kept)
        return {"wall": wall / count, "cpu": cpu / count}

    def drop(self) -> None:
        if self._session is not None:
            self._session.close()
        self._session = None

    def _try(self, work: dict[str, Any], attention: AttentionConfig) -> float:
        """Return the CPU seconds of a case with the options ``attention``. Each combination is
        measured only once per run."""
        key = (work["kind"], work["batch"], work["context"], attention)
        if key not in self._tried:
            self._ready(work, attention)
            self._tried[key] = self.step()["cpu"]
        return self._tried[key]

    def _ready(self, work: dict[str, Any], attention: AttentionConfig) -> None:
        batch, context = work["batch"], work["context"]
        if work["kind"] == "prefill":
            session = self._open(attention, 1, context, context)
            self._step, self._kept = _prefill(session, context), 0
        else:
            session = self._open(attention, batch, context, max(batch, FILL.ubatch))
            _fill(session, batch, context - 1)
            self._step = _decode(session, batch, context - 1)
            self._kept = context - 1

    def _open(self, attention: AttentionConfig, batch: int, context: int, tokens: int) -> Session:
        self.drop()
        self._session = Session(self._model, self._threads, attention, batch, context, tokens)
        return self._session


def _attention_configs(ubatch: int) -> list[AttentionConfig]:
    """Return two configurations of llama.cpp: with and without flash attention."""
    return [AttentionConfig(flash, ubatch, "f16") for flash in (True, False)]


def _prefill(session: Session, context: int) -> Callable[[], None]:
    tokens = [1 + position % VOCABULARY for position in range(context)]
    places = list(range(context))

    def step() -> None:
        session.decode(tokens, [0] * context, places)
        session.logits(1).argmax(axis=1)

    return step


def _decode(session: Session, batch: int, position: int) -> Callable[[], None]:
    def step() -> None:
        session.decode([1] * batch, list(range(batch)), [position] * batch)
        session.logits(batch).argmax(axis=1)

    return step


def _fill(session: Session, batch: int, context: int) -> None:
    """Fill every sequence with ``context`` tokens."""
    for first in range(0, context, FILL.ubatch):
        places = list(range(first, min(context, first + FILL.ubatch)))
        tokens = [1 + position % VOCABULARY for position in places]
        session.decode(tokens, [0] * len(places), places)
    for sequence in range(1, batch):
        session.copy(sequence)


def _set_flash(parameters: Any, wanted: bool) -> None:
    """Enable or disable flash attention; the field's name differs between versions."""
    if hasattr(parameters, "flash_attn_type"):
        parameters.flash_attn_type = int(wanted)
    else:
        parameters.flash_attn = wanted


def _file(model: Path, new: Path, kind: str | None, threads: int) -> Path:
    """Return the GGUF file to load: the model itself, or one that is written to ``new``."""
    if model.is_dir():
        gguf_file.write(model, new)
        return new
    if kind is None:
        return model
    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype, parameters.nthread = FILE_TYPES[kind], threads
    parameters.allow_requantize = True
    paths = (str(model).encode(), str(new).encode())
    if llama_cpp.llama_model_quantize(*paths, ctypes.byref(parameters)):
        raise RuntimeError(f"llama.cpp can't quantize the file to {kind}")
    return new


def _answer(peer: LlamaCppEngine, request: dict[str, Any]) -> Any:
    if "logits" in request:
        return peer.logits(request["logits"])
    if "loss" in request:
        return peer.loss(request["loss"])
    if "prepare" in request:
        return peer.prepare(request["prepare"])
    if "step" in request:
        return peer.step(request["step"])
    return peer.drop()


def _quiet(level: int, text: bytes, data: ctypes.c_void_p) -> None:
    """Log only warnings and errors, and not to stdout, where the responses go."""
    if level in (3, 4):
        sys.stderr.write(text.decode(errors="replace"))


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--type", choices=FILE_TYPES)
    options = parser.parse_args()
    quiet = llama_cpp.llama_log_callback(_quiet)  # must live as long as llama.cpp may call it
    llama_cpp.llama_log_set(quiet, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    with tempfile.TemporaryDirectory() as folder:
        path = _file(options.model, Path(folder) / "model.gguf", options.type, options.threads)
        peer = LlamaCppEngine(path, options.threads)
        features = llama_cpp.llama_print_system_info().decode()
        print(
            json.dumps({"version": version("llama-cpp-python"), "features": features}), flush=True
        )
        for line in sys.stdin:
            print(json.dumps(_answer(peer, json.loads(line))), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
