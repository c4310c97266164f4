"""Tests that new weights are rolled out under one model name, worker by worker, without a failed or
mixed answer: prefill workers first and decode workers first."""

import json
import shutil
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
import safetensors.torch

from baton.checkpoints.checkpoint import DEMO_MODEL
from testkit.local_cluster import LocalCluster, local_cluster

pytestmark = pytest.mark.timeout(300)
PROMPTS = [list(range(first, first + 60)) for first in (10, 300, 600)]
LENGTHS = (250, 60, 60)
"""Tokens of the answers: of one that outlasts a drain's grace period, and of two short ones."""

BODY = {"temperature": 0, "ignore_eos": True, "stream": True, "return_token_ids": True}
WEIGHTS = "model.safetensors"

Answer = tuple[str, tuple[int, ...]]
"""The ``system_fingerprint`` of an answer, and its tokens."""


def ask(cluster: LocalCluster, number: int) -> Answer:
    """Stream a completion of the prompt with this number. All its chunks must name the same
    fingerprint."""
    body = {"prompt": PROMPTS[number], "max_tokens": LENGTHS[number], **BODY}
    tokens: list[int] = []
    fingerprints: set[str] = set()
    url = cluster.url + "/v1/completions"
    with httpx.Client(timeout=120) as client, client.stream("POST", url, json=body) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                assert "error" not in event, event
                fingerprints.add(event["system_fingerprint"])
                tokens += event["choices"][0].get("token_ids") or []
    [fingerprint] = fingerprints
    return fingerprint, tuple(tokens)


@dataclass
class Traffic:
    """Clients that ask for one prompt each, again and again."""

    cluster: LocalCluster
    answers: list[list[Answer]] = field(default_factory=lambda: [[] for _ in PROMPTS])
    errors: list[BaseException] = field(default_factory=list)
    stopped: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def running(self) -> Iterator[None]:
        clients = [threading.Thread(target=self._run, args=(n,)) for n in range(len(PROMPTS))]
        for client in clients:
            client.start()
        try:
            yield
        finally:
            self.stopped.set()
            for client in clients:
                client.join()

    def _run(self, number: int) -> None:
        try:
            while not self.stopped.is_set():
                self.answers[number].append(ask(self.cluster, number))
        except BaseException as error:
            self.errors.append(error)


def write_weights(folder: Path, change: float) -> None:
    """Replace the weights, as a download does. Running workers keep the file that they opened."""
    tensors = safetensors.torch.load_file(DEMO_MODEL / WEIGHTS)
    changed = {name: tensor * (1 + change) for name, tensor in tensors.items()}
    safetensors.torch.save_file(changed, folder / "new")
    (folder / "new").replace(folder / WEIGHTS)


def roll_out(cluster: LocalCluster, roles: Sequence[str]) -> None:
    """Start a worker of each role, and then drain the older one."""
    for role in roles:
        [old] = cluster.processes(role)
        cluster.baton("scale", f"{role}=2")
        cluster.baton("drain", old["id"])


def test_weights_are_rolled_out_in_either_order_without_a_failure(tmp_path: Path) -> None:
    model = tmp_path / "demo"
    shutil.copytree(DEMO_MODEL, model)
    with local_cluster(model=model) as cluster:
        numbers = range(len(PROMPTS))
        expected = [dict([ask(cluster, number)]) for number in numbers]
        for change, order in enumerate((("prefill", "decode"), ("decode", "prefill")), 1):
            before = {each for references in expected for each in references}
            write_weights(model, change / 10)
            traffic = Traffic(cluster)
            with traffic.running():
                roll_out(cluster, order)
            assert traffic.errors == []
            for number, references in enumerate(expected):
                fingerprint, tokens = ask(cluster, number)
                assert fingerprint not in before
                assert tokens not in references.values()
                references[fingerprint] = tokens
                for name, given in traffic.answers[number]:
                    assert given == references[name]
            used = {name for answers in traffic.answers for name, _ in answers}
            assert len(used) == 2
