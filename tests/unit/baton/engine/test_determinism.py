"""Tests the setting ``deterministic``: which workers keep its guarantee, which ones fail at
startup, and which ones a cluster leaves out."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from baton.clock import ManualClock
from baton.config import load_settings
from baton.core.ids import Incarnation, WorkerId
from baton.core.member import Member
from baton.core.numerics import incompatible_peer, incompatible_workers
from baton.core.states import Role, WorkerState
from baton.engine import determinism
from baton.engine.determinism import numerics_fingerprint, require_deterministic
from baton.engine.native.backend_choice import TORCH_BACKEND, BackendChoice
from baton.engine.runner import ModelRunner
from baton.engine.runner_options import RunnerOptions
from baton.errors import Invalid
from baton.registry.member_codec import member_from_json, member_to_json
from baton.registry.membership import Membership
from baton.worker.numerics_check import check_same_numerics
from testkit.fakes.registry import MemoryRegistry
from testkit.model_zoo import make_model
from tests.determinism import BitsDiffer, RandomPlacement, cell_of, parse, requests_alone
from tests.unit.baton.engine.native_helpers import needs_kernels

SEED = 20261121


def load(path: Path, **given: object) -> ModelRunner:
    return ModelRunner.load(path, RunnerOptions(device="cpu", num_blocks=16, **given))  # type: ignore[arg-type]


# -- one worker --------------------------------------------------------------------------------


@needs_kernels
def test_equal_workers_have_equal_numerics_fingerprints(tmp_path: Path) -> None:
    """The number of threads and the block size do not matter. A worker without the setting
    ``deterministic`` has no fingerprint."""
    make_model(tmp_path / "one", "qwen3", seed=1)
    make_model(tmp_path / "two", "qwen3", seed=2)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = load(tmp_path / "one", deterministic=True)
        torch.set_num_threads(2)
        same = load(tmp_path / "one", deterministic=True, block_tokens=5)
    finally:
        torch.set_num_threads(threads)
    assert (
        one.numerics_fingerprint == same.numerics_fingerprint
        and one.model_digest == same.model_digest
    )
    others = [
        load(tmp_path / "one", deterministic=True, dtype="bfloat16"),
        load(tmp_path / "two", deterministic=True),
        load(tmp_path / "one"),
    ]
    assert len({each.numerics_fingerprint for each in (one, *others)}) == 4
    assert len({each.model_digest for each in (one, *others)}) == 4
    assert others[2].numerics_fingerprint == ""


@pytest.mark.parametrize(
    "choice",
    [TORCH_BACKEND, BackendChoice(False, "torch: the processor lacks avx512f", is_fallback=True)],
    ids=lambda choice: choice.description,
)
def test_torch_backend_cannot_be_deterministic(choice: BackendChoice) -> None:
    with pytest.raises(Invalid, match="would be computed by torch") as caught:
        require_deterministic(choice, torch.device("cpu"))
    assert choice.description in str(caught.value) and "`baton doctor`" in str(caught.value)


@pytest.mark.parametrize("given", [{"cpu_kernels": "off"}, {"dtype": "float16"}], ids=str)
def test_worker_that_cannot_be_deterministic_is_refused_before_it_loads(
    given: dict[str, str], tmp_path: Path
) -> None:
    make_model(tmp_path, "qwen3")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(Invalid, match="deterministic is on"):
        load(tmp_path, deterministic=True, **given)


@needs_kernels
def test_pool_too_small_for_the_determinism_probe_is_refused(tmp_path: Path) -> None:
    make_model(tmp_path, "qwen3")
    for num_blocks, block_tokens in ((3, 1), (3, 16), (4, 16)):
        sizes = {"num_blocks": num_blocks, "block_tokens": block_tokens}
        runner = ModelRunner.load(
            tmp_path, RunnerOptions(device="cpu", deterministic=True, **sizes)
        )
        assert len(runner.numerics_fingerprint) == 16
    with pytest.raises(Invalid, match="a pool of at least 3 blocks, not 2"):
        ModelRunner.load(tmp_path, RunnerOptions(device="cpu", deterministic=True, num_blocks=2))


class BatchDependentModel:
    """A model whose values change slightly when a batch has more than one row."""

    def __init__(self, runner: ModelRunner) -> None:
        self._model = runner._model

    def hidden(self, token_ids: torch.Tensor, batch: object) -> torch.Tensor:
        original = self._model.hidden(token_ids, batch)  # type: ignore[arg-type]
        return torch.nextafter(original, original + 1) if len(batch.starts) > 1 else original  # type: ignore[attr-defined]

    def logits(self, hidden: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return self._model.logits(hidden, wanted)


@needs_kernels
def test_batch_dependent_numerics_are_detected(tmp_path: Path) -> None:
    make_model(tmp_path, "qwen3")
    runner = load(tmp_path)
    vocabulary = runner.model_config.vocab_size
    assert numerics_fingerprint(runner._model, runner.pool, vocabulary)
    with pytest.raises(Invalid, match="depend on the batch and the chunks"):
        numerics_fingerprint(BatchDependentModel(runner), runner.pool, vocabulary)


def test_probe_exceeds_a_block_and_a_tile() -> None:
    assert determinism.PROBE_TOKENS > 16 and determinism.PROBE_TOKENS % 6
    assert sum(determinism.PROBE_CHUNKS) >= determinism.PROBE_TOKENS


@needs_kernels
def test_determinism_tool_finds_differences(tmp_path: Path) -> None:
    """The tool finds logits with one wrong bit, and finds that torch's results depend on the
    batch."""
    make_model(tmp_path, "qwen3", seed=SEED)
    threads, chance = torch.get_num_threads(), np.random.default_rng(SEED)
    try:
        requests = []
        for tokens, original in requests_alone(tmp_path, torch.bfloat16, chance, "on", "avx2"):
            wrong = original.clone()
            wrong[0, 0] = torch.nextafter(wrong[0, 0], wrong[0, 0] + 1)
            requests.append((tokens, wrong))
        with pytest.raises(BitsDiffer, match="tokens 0 to"):
            RandomPlacement(tmp_path, torch.bfloat16, chance, instructions=["avx2"]).run(requests)
        options = parse(["--kernels", "off", "--seed", str(SEED)])
        cell = cell_of("qwen3", torch.bfloat16, 3, options)
    finally:
        torch.set_num_threads(threads)
    assert (cell.placements, cell.differing) == (3, 3), cell


def test_deterministic_setting_is_a_boolean() -> None:
    assert load_settings().deterministic is False
    assert load_settings(deterministic="true").deterministic is True
    with pytest.raises(Invalid, match="deterministic"):
        load_settings(deterministic="mostly")


# -- a cluster ---------------------------------------------------------------------------------


def member(name: str, generation: int, fingerprint: str, role: Role = Role.PREFILL) -> Member:
    born, state = Incarnation(generation), WorkerState.READY
    return Member(
        WorkerId(name), role, "127.0.0.1:1", born, state, numerics_fingerprint=fingerprint
    )


ONE, OTHER = "a1" * 8, "b2" * 8


@pytest.mark.parametrize(
    ("members", "odd"),
    [
        ([], set()),
        ([member("a", 1, ""), member("b", 2, "")], set()),
        ([member("a", 1, ONE), member("b", 2, ONE)], set()),
        ([member("a", 2, ONE), member("b", 1, OTHER)], {"a"}),
        ([member("a", 1, ONE), member("b", 1, OTHER)], {"b"}),
        ([member("a", 1, ONE), member("b", 2, "")], {"b"}),
        ([member("a", 1, ""), member("b", 2, ONE), member("c", 3, "")], {"b"}),
        ([member("a", 1, "", Role.ROUTER), member("b", 2, ONE)], set()),
        ([replace(member("a", 1, OTHER), state=WorkerState.GONE), member("b", 2, ONE)], set()),
    ],
)
def test_workers_that_differ_from_the_oldest_are_incompatible(
    members: list[Member], odd: set[str]
) -> None:
    assert incompatible_workers(members) == odd
    assert incompatible_workers(reversed(members)) == odd


def test_incompatible_worker_does_not_join() -> None:
    """The error names the other worker, and what to change."""
    promising, plain = [member("a", 1, ONE)], [member("a", 1, "")]
    check_same_numerics([], WorkerId("b"), "", ONE)
    check_same_numerics(promising, WorkerId("b"), "", ONE)
    check_same_numerics(plain, WorkerId("b"), "", "")
    check_same_numerics(promising, WorkerId("a"), "", OTHER)  # the worker before its restart
    check_same_numerics(promising, WorkerId("b"), "another", OTHER)
    with pytest.raises(Invalid, match="b can't join: worker a of the same model is deterministic"):
        check_same_numerics(promising, WorkerId("b"), "", "")
    with pytest.raises(Invalid, match="Start a with deterministic=true first, or b in a cluster"):
        check_same_numerics(plain, WorkerId("b"), "", ONE)
    with pytest.raises(Invalid, match="a of the same model computes bitwise different results"):
        check_same_numerics(promising, WorkerId("b"), "", OTHER)
    oldest = incompatible_peer([*promising, member("c", 0, OTHER)], WorkerId("b"), "", ONE)
    assert oldest is not None and oldest.id == "c"


async def test_incompatible_worker_that_joined_concurrently_is_left_out() -> None:
    """Two incompatible workers did not see each other when they joined. All members then use only
    the older one."""
    clock = ManualClock()
    registry = MemoryRegistry(clock)
    mirror = Membership(registry, clock)
    first, second = member("b", 1, ONE, Role.DECODE), member("a", 2, OTHER, Role.DECODE)
    for each in (first, second):
        await registry.announce(each, 60.0)
    await mirror.refresh()
    assert mirror.ready(Role.DECODE) == [first] and mirror.current.incompatible_ids == {"a"}
    assert mirror.members == [second, first]
    await registry.withdraw(WorkerId("b"), Incarnation(1))
    clock.advance(60.0)
    await registry.announce(second, 60.0)
    await mirror.refresh()
    clock.advance(30.0)
    await mirror.refresh()
    assert mirror.ready(Role.DECODE) == [second] and mirror.current.incompatible_ids == set()


def test_fingerprint_is_part_of_the_member_record() -> None:
    original = member("a", 1, ONE)
    assert member_from_json(member_to_json(original)) == original
    fields = json.loads(member_to_json(original))
    del fields["numerics_fingerprint"]
    older = json.dumps(fields).encode()
    assert member_from_json(older) == replace(original, numerics_fingerprint="")
    with pytest.raises(Invalid):
        member_from_json(member_to_json(replace(original, numerics_fingerprint="not hex")))
