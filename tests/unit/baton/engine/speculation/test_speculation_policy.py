"""Tests when tokens are drafted, and how many."""

from collections.abc import Sequence as Seq
from pathlib import Path

import pytest

from baton.clock import ManualClock
from baton.config import DEMO_MODEL, Settings
from baton.core.ids import Epoch, RequestId, TokenId
from baton.core.request import RequestSpec, SamplingParams
from baton.core.task import Task
from baton.engine.config import EngineConfig
from baton.engine.engine import Engine
from baton.engine.executor import SyncExecutor
from baton.engine.runner import ModelRunner
from baton.engine.sequence import Sequence
from baton.engine.speculation.draft_source import DraftRequest
from baton.engine.speculation.draft_state import MAX_FRUITLESS, MAX_PERIOD, DraftState
from baton.engine.speculation.ngram_source import INITIAL_RATES, NgramState
from baton.engine.speculation.speculator import NO_DRAFTS, choose_draft_lengths
from baton.engine.speculation.verify_costs import MAX_AGE_STEPS, MAX_BASE_AGE_STEPS, VerifyCosts
from baton.errors import Invalid
from baton.worker.speculation_setup import check_speculation, uses_speculation
from testkit.fakes.runner import FakeRunner
from testkit.model_zoo import make_model


def flat(num_answers: int, max_drafts: int) -> list[float]:
    return [1.0] * (max_drafts + 1)


def linear(num_answers: int, max_drafts: int) -> list[float]:
    """A step takes as long as its tokens."""
    return [float(num_answers + drafts) for drafts in range(max_drafts + 1)]


def test_all_drafts_are_verified_if_that_costs_nothing() -> None:
    decision = choose_draft_lengths([[0.5, 0.25], [], [0.9]], flat, max_drafts=16)
    assert decision.lengths == (2, 0, 1)
    assert decision.gain == pytest.approx((3 + 0.5 + 0.25 + 0.9) / 3)


def test_nothing_is_drafted_if_a_draft_costs_as_much_as_a_token() -> None:
    assert choose_draft_lengths([[0.98, 0.96]], linear, max_drafts=16) == NO_DRAFTS


def test_the_likeliest_drafts_come_first() -> None:
    chances = [[0.9, 0.8, 0.1], [0.85, 0.2]]
    assert choose_draft_lengths(chances, flat, max_drafts=3).lengths == (2, 1)


def test_drafts_are_as_long_as_they_pay() -> None:
    """Up to four tokens a step takes 1 s, beyond it 1 s more for each."""

    def predict(num_answers: int, max_drafts: int) -> list[float]:
        return [max(1.0, num_answers + drafts - 3.0) for drafts in range(max_drafts + 1)]

    chances = [[0.9**depth for depth in range(1, 9)]]
    assert choose_draft_lengths(chances, predict, max_drafts=16).lengths == (3,)


def test_a_small_gain_is_not_taken() -> None:
    chances = [[0.06]]
    assert choose_draft_lengths(chances, flat, max_drafts=1).lengths == (1,)
    assert choose_draft_lengths([[0.04]], flat, max_drafts=1) == NO_DRAFTS
    assert choose_draft_lengths(chances, flat, max_drafts=1, min_gain=1.25) == NO_DRAFTS


def test_costs_are_interpolated_between_measured_sizes() -> None:
    costs = VerifyCosts()
    assert not costs.has_base(1)
    costs.record(1, 1.0)
    costs.record(4, 4.0)
    assert costs.has_base(1) and not costs.has_base(2)
    assert costs.predict(1, 3)[:4] == pytest.approx([1.0, 2.0, 3.0, 4.0])
    costs.record(8, 2.0)  # less than a smaller step: not exact
    assert costs.predict(1, 7)[7] == pytest.approx(4.0)


def test_one_slow_step_does_not_change_a_cost() -> None:
    costs = VerifyCosts()
    for seconds in (1.0, 1.0, 1.0, 50.0, 1.0, 1.0):
        costs.record(1, seconds)
    assert costs.predict(1, 0)[0] == 1.0


def test_old_costs_are_forgotten() -> None:
    costs = VerifyCosts()
    costs.record(1, 1.0)
    costs.record(4, 40.0)
    for _ in range(MAX_BASE_AGE_STEPS):
        costs.record(8, 2.0)
    assert not costs.has_base(1)  # a step without drafts must be measured again
    for _ in range(MAX_AGE_STEPS):
        costs.record(1, 1.0)
    assert costs.predict(1, 3)[3] < 4.0  # presumed, after what was measured is forgotten


def test_predictions_are_tested_by_every_token_of_the_answer() -> None:
    state = NgramState(list(INITIAL_RATES))
    prompt = tuple(map(TokenId, [1, 2, 3, 4, 5, 9, 9, 1, 2, 3]))
    state.observe(prompt, len(prompt))
    assert state.chances(1) == [pytest.approx(INITIAL_RATES[0])]
    assert state.index.continuation(3) == (4, 5, 9)
    state.observe((*prompt, TokenId(4)), len(prompt))
    assert state.rates[0] > INITIAL_RATES[0]
    state.observe((*prompt, TokenId(4), TokenId(7)), len(prompt))
    assert state.rates[1] < INITIAL_RATES[1]
    assert state.chances(4) == []  # nothing was ever after 3, 4, 7


def test_drafts_grow_while_they_are_right_and_shrink_when_they_are_wrong() -> None:
    state = NgramState(list(INITIAL_RATES))
    text = tuple(map(TokenId, [1, 2, 3, 4] * 10))
    state.observe(text, len(text))
    assert len(state.chances(64)) == 4
    state.record(4, 4)
    assert len(state.chances(64)) == 8
    state.record(8, 3)
    state.record(4, 0)
    assert len(state.chances(64)) == 2


def test_several_new_tokens_test_predictions_up_to_the_first_wrong_one() -> None:
    state = NgramState(list(INITIAL_RATES))
    prompt = list(map(TokenId, [1, 2, 3, 4, 5, 9, 9, 1, 2, 3]))
    assert state.observe(prompt, len(prompt))
    assert state.observe([*prompt, *map(TokenId, [4, 7, 1, 2, 3])], len(prompt))
    assert state.rates == pytest.approx(
        [0.9 * INITIAL_RATES[0] + 0.1, 0.9 * INITIAL_RATES[1], *INITIAL_RATES[2:]]
    )
    assert (state.index.position, state.index.match_tokens) == (10, 3)


def test_drafts_after_a_coming_token_need_its_prediction() -> None:
    state = NgramState([0.5, 0.5, 0.5, 0.5])
    text = tuple(map(TokenId, [1, 2, 3, 4] * 3))
    state.observe(text, len(text))
    assert state.chances(2) == pytest.approx([0.5, 0.25])
    assert state.chances(2, num_coming=1) == pytest.approx([0.25, 0.125])


def test_fruitless_looks_become_rare_until_a_draft_is_right() -> None:
    state = DraftState()
    periods = []
    for _ in range(MAX_FRUITLESS + 4):
        state.count_fruitless()
        periods.append(state.period)
    assert periods == [1] * (MAX_FRUITLESS - 1) + [2, 4, MAX_PERIOD, MAX_PERIOD, MAX_PERIOD]
    state.look_again()
    assert state.period == 1
    state.count_fruitless()
    assert state.period == 2
    state.reset()
    state.count_fruitless()
    assert state.period == 1


class CountingSource:
    """Never has a draft; counts how often sequences are looked at."""

    def __init__(self) -> None:
        self.num_observed = 0

    def observe(self, sequence: Sequence) -> bool:
        sequence.draft_state = sequence.draft_state or DraftState()
        self.num_observed += 1
        return True

    def record(self, sequence: Sequence, num_drafted: int, num_accepted: int) -> None:
        raise AssertionError("nothing was drafted")

    def chances(self, sequence: Sequence, num_tokens: int, num_coming: int) -> Seq[float]:
        return ()

    def draft(self, requests: Seq[DraftRequest]) -> list[tuple[TokenId, ...]]:
        raise AssertionError("nothing can be drafted")


@pytest.mark.parametrize("plans_ahead", [False, True])
def test_text_without_repetitions_is_looked_at_every_few_steps(plans_ahead: bool) -> None:
    """Of the decisions, one for each step but the first, or but the last one with async scheduling,
    as many as MAX_FRUITLESS are looked at, then one more at number 26, one at 28 and those at 32,
    40, …, 96."""
    runner, source = FakeRunner(32, 16), CountingSource()
    engine = Engine(
        runner,
        EngineConfig(block_tokens=16, max_model_tokens=256, speculation=True),
        model_digest=b"fake",
        kv_dtype="float64",
        eos_token_ids=frozenset(),
        clock=ManualClock(),
        executor=SyncExecutor(runner) if plans_ahead else None,
        draft_source=source,
    )
    sampling = SamplingParams(max_tokens=101, temperature=0.0, ignore_eos=True)
    engine.add(
        RequestSpec(RequestId("r"), Epoch(1), (TokenId(1), TokenId(2)), 2, sampling),
        Task.PREFILL_AND_DECODE,
    )
    while engine.has_work():
        engine.step()
    assert source.num_observed == MAX_FRUITLESS + 2 + len(range(32, 100, MAX_PERIOD))


class AnyRunner:
    """A runner of which only this matters."""

    def __init__(self, supports_speculation: bool) -> None:
        self.supports_speculation = supports_speculation
        self.description = "torch: no compiler"


def settings(**values: object) -> Settings:
    return Settings(_env_file=None, **values)  # type: ignore[arg-type, call-arg]


@pytest.mark.parametrize(
    ("wanted", "supported", "expected"),
    [("auto", True, True), ("auto", False, False), ("ngram", True, True), ("off", True, False)],
)
def test_worker_speculates_where_that_changes_no_answer(
    wanted: str, supported: bool, expected: bool
) -> None:
    runner: ModelRunner = AnyRunner(supported)  # type: ignore[assignment]
    assert uses_speculation(settings(speculation=wanted), runner) is expected


def test_speculation_is_refused_where_it_would_change_answers() -> None:
    runner: ModelRunner = AnyRunner(False)  # type: ignore[assignment]
    with pytest.raises(
        Invalid, match=r"computes with torch: no compiler\. Speculation needs Baton"
    ):
        uses_speculation(settings(speculation="ngram"), runner)


@pytest.mark.parametrize(
    ("values", "error"),
    [
        ({"speculation": "draft"}, "draft_model must be set"),
        ({"speculation": "ngram", "draft_model": "x"}, "draft_model must not be set"),
    ],
)
def test_contradicting_settings_are_refused(values: dict[str, object], error: str) -> None:
    with pytest.raises(Invalid, match=error):
        check_speculation(settings(**values))


def test_a_draft_model_needs_the_same_tokenizer(tmp_path: Path) -> None:
    make_model(tmp_path, "qwen3", seed=1)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(Invalid, match="must have the tokenizer"):
        check_speculation(draft_settings(tmp_path))
    check_speculation(draft_settings(DEMO_MODEL))


def draft_settings(draft_model: Path) -> Settings:
    return settings(model=str(DEMO_MODEL), speculation="auto", draft_model=str(draft_model))
