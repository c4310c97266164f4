"""``deterministic``: who keeps the promise, who is refused, and who is left out."""

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
from baton.errors import Invalid
from baton.registry.member_codec import member_from_json, member_to_json
from baton.registry.membership import Membership
from baton.registry.memory import MemoryRegistry
from baton.worker.numerics_check import check_same_numerics
from tests.model_zoo import make_model
from tests.unit.native_house import needs_kernels
from tools.determinism import Differs, RandomPlacement, cell_of, parse, requests_alone

SEED = 20261121


def load(path: Path, **given: object) -> ModelRunner:
    return ModelRunner.load(path, device="cpu", num_blocks=16, **given)  # type: ignore[arg-type]


# -- a worker's own promise --------------------------------------------------------------------


@needs_kernels
def test_equal_workers_have_equal_arithmetic_and_others_another(tmp_path: Path) -> None:
    """Whatever their threads and blocks; and who promises nothing is a third kind."""
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
    assert one.arithmetic == same.arithmetic and one.model_digest == same.model_digest
    others = [
        load(tmp_path / "one", deterministic=True, dtype="bfloat16"),
        load(tmp_path / "two", deterministic=True),
        load(tmp_path / "one"),
    ]
    assert len({each.arithmetic for each in (one, *others)}) == 4
    assert len({each.model_digest for each in (one, *others)}) == 4
    assert others[2].arithmetic == ""


@pytest.mark.parametrize(
    "choice",
    [TORCH_BACKEND, BackendChoice(False, "torch: the processor lacks avx512f", is_fallback=True)],
    ids=lambda choice: choice.told,
)
def test_torch_promises_nothing(choice: BackendChoice) -> None:
    with pytest.raises(Invalid, match="would be computed by torch") as caught:
        require_deterministic(choice, torch.device("cpu"))
    assert choice.told in str(caught.value) and "`baton doctor`" in str(caught.value)


@pytest.mark.parametrize("given", [{"cpu_kernels": "off"}, {"dtype": "float16"}], ids=str)
def test_who_can_not_keep_it_is_refused_before_it_loads(
    given: dict[str, str], tmp_path: Path
) -> None:
    make_model(tmp_path, "qwen3")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(Invalid, match="deterministic is on"):
        load(tmp_path, deterministic=True, **given)


@needs_kernels
def test_a_pool_too_small_to_try_it(tmp_path: Path) -> None:
    make_model(tmp_path, "qwen3")
    for num_blocks, block_tokens in ((3, 1), (3, 16), (4, 16)):
        sizes = {"num_blocks": num_blocks, "block_tokens": block_tokens}
        runner = ModelRunner.load(tmp_path, device="cpu", deterministic=True, **sizes)
        assert len(runner.arithmetic) == 16
    with pytest.raises(Invalid, match="a pool of 3 blocks at least, not 2"):
        ModelRunner.load(tmp_path, device="cpu", deterministic=True, num_blocks=2)


class Swayed:
    """A model that computes as another does, a little otherwise beside somebody."""

    def __init__(self, runner: ModelRunner) -> None:
        self._model = runner._model

    def hidden(self, token_ids: torch.Tensor, batch: object) -> torch.Tensor:
        told = self._model.hidden(token_ids, batch)  # type: ignore[arg-type]
        return torch.nextafter(told, told + 1) if len(batch.starts) > 1 else told  # type: ignore[attr-defined]

    def logits(self, hidden: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return self._model.logits(hidden, wanted)


@needs_kernels
def test_a_machine_that_does_not_keep_it_is_found_out(tmp_path: Path) -> None:
    make_model(tmp_path, "qwen3")
    runner = load(tmp_path)
    vocabulary = runner.model_config.vocab_size
    assert numerics_fingerprint(runner._model, runner.pool, vocabulary)
    with pytest.raises(Invalid, match="depend on how a step is put together"):
        numerics_fingerprint(Swayed(runner), runner.pool, vocabulary)


def test_the_probe_goes_beyond_a_block_and_a_tile() -> None:
    assert determinism.PROBE_TOKENS > 16 and determinism.PROBE_TOKENS % 6
    assert sum(determinism.CHUNKS) >= determinism.PROBE_TOKENS


@needs_kernels
def test_the_tool_finds_what_differs(tmp_path: Path) -> None:
    """Torch, which promises nothing; and kernels that are told of one wrong bit."""
    make_model(tmp_path, "qwen3", seed=SEED)
    threads, chance = torch.get_num_threads(), np.random.default_rng(SEED)
    try:
        requests = []
        for tokens, told in requests_alone(tmp_path, torch.bfloat16, chance, "on"):
            wrong = told.clone()
            wrong[0, 0] = torch.nextafter(wrong[0, 0], wrong[0, 0] + 1)
            requests.append((tokens, wrong))
        with pytest.raises(Differs, match="tokens 0 to"):
            RandomPlacement(tmp_path, torch.bfloat16, chance).run(requests)
        options = parse(["--kernels", "off", "--seed", str(SEED)])
        cell = cell_of("qwen3", torch.bfloat16, 3, options)
    finally:
        torch.set_num_threads(threads)
    assert (cell.placements, cell.differing) == (3, 3), cell


def test_the_setting() -> None:
    assert load_settings().deterministic is False
    assert load_settings(deterministic="true").deterministic is True
    with pytest.raises(Invalid, match="deterministic"):
        load_settings(deterministic="mostly")


# -- a cluster's -------------------------------------------------------------------------------


def member(name: str, generation: int, arithmetic: str, role: Role = Role.PREFILL) -> Member:
    born, state = Incarnation(generation), WorkerState.READY
    return Member(WorkerId(name), role, "127.0.0.1:1", born, state, arithmetic=arithmetic)


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
def test_the_oldest_worker_says_how_it_is_computed(members: list[Member], odd: set[str]) -> None:
    assert incompatible_workers(members) == odd
    assert incompatible_workers(reversed(members)) == odd


def test_who_comes_last_does_not_join() -> None:
    """What it is told names the other, and what would help."""
    promising, plain = [member("a", 1, ONE)], [member("a", 1, "")]
    check_same_numerics([], WorkerId("b"), ONE)
    check_same_numerics(promising, WorkerId("b"), ONE)
    check_same_numerics(plain, WorkerId("b"), "")
    check_same_numerics(promising, WorkerId("a"), OTHER)  # itself, in its last life
    with pytest.raises(Invalid, match="has worker a, which promises determinism"):
        check_same_numerics(promising, WorkerId("b"), "")
    with pytest.raises(Invalid, match="a, which doesn't promise determinism"):
        check_same_numerics(plain, WorkerId("b"), ONE)
    with pytest.raises(Invalid, match="a, which computes the same with other bits"):
        check_same_numerics(promising, WorkerId("b"), OTHER)
    oldest = incompatible_peer([*promising, member("c", 0, OTHER)], WorkerId("b"), ONE)
    assert oldest is not None and oldest.id == "c"


async def test_who_came_at_once_is_left_out() -> None:
    """Two that did not see each other: everybody uses the same one."""
    clock = ManualClock()
    registry = MemoryRegistry(clock)
    mirror = Membership(registry, clock)
    first, second = member("b", 1, ONE, Role.DECODE), member("a", 2, OTHER, Role.DECODE)
    for each in (first, second):
        await registry.announce(each, 60.0)
    await mirror.refresh()
    assert mirror.ready(Role.DECODE) == [first] and mirror.odd == {"a"}
    assert mirror.members == [second, first]
    await registry.withdraw(WorkerId("b"), Incarnation(1))
    clock.advance(60.0)
    await registry.announce(second, 60.0)
    await mirror.refresh()
    clock.advance(30.0)
    await mirror.refresh()
    assert mirror.ready(Role.DECODE) == [second] and mirror.odd == set()


def test_it_travels_with_the_member() -> None:
    told = member("a", 1, ONE)
    assert member_from_json(member_to_json(told)) == told
    older = member_to_json(told).replace(f',"arithmetic":"{ONE}"'.encode(), b"")
    assert member_from_json(older) == replace(told, arithmetic="")
    with pytest.raises(Invalid):
        member_from_json(member_to_json(replace(told, arithmetic="not hex")))
