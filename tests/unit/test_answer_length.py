"""Predicted lengths of answers: what is said without data, what is learnt, what is corrected."""

import math

import numpy as np
import pytest

from baton.core.answer_length_predictor import (
    DEVIATIONS,
    MAX_TENANTS,
    AnswerLengthPredictor,
    revised_prediction,
)

A, B = b"a", b"b"


def learnt(*lengths: int, cut: bool = False) -> AnswerLengthPredictor:
    made = AnswerLengthPredictor()
    for length in lengths:
        made.learn(A, length, cut=cut)
    return made


def test_nothing_is_known_at_first() -> None:
    assert AnswerLengthPredictor().expect(A, 1000) == 1000
    assert AnswerLengthPredictor(unknown_tokens=256).expect(A, 1000) == 256
    assert AnswerLengthPredictor(unknown_tokens=256).expect(A, 100) == 100
    assert learnt(5, 5, 5).expect(A, 1000) == 1000


def test_equal_answers_are_expected_to_go_on_so() -> None:
    assert learnt(20, 20, 20, 20).expect(A, 1000) == 20
    assert learnt(20, 20, 20, 20).expect(A, 8) == 8


def test_a_tenant_without_data_is_taken_for_one_like_all() -> None:
    made = learnt(20, 20, 20, 20)
    assert made.expect(B, 1000) == 20
    for _ in range(4):
        made.learn(B, 300, cut=False)
    assert made.expect(B, 1000) == 300
    assert made.expect(A, 1000) == 20


def test_four_of_five_log_normal_answers_are_shorter() -> None:
    lengths = np.exp(np.random.default_rng(1).normal(5.0, 0.7, 4000)).astype(int)
    made, shorter = AnswerLengthPredictor(), 0
    for length in lengths:
        shorter += int(length) <= made.expect(A, 10**6)
        made.learn(A, int(length), cut=False)
    assert 0.75 <= shorter / len(lengths) <= 0.83
    assert made.expect(A, 10**6) == pytest.approx(math.exp(5.0 + DEVIATIONS * 0.7), rel=0.4)


def test_an_answer_that_was_cut_says_only_that_it_would_be_longer() -> None:
    made = learnt(100, 100, 100, 100)
    for _ in range(50):
        made.learn(A, 5, cut=True)
    assert made.expect(A, 1000) == 100
    made.learn(A, 900, cut=True)
    assert made.expect(A, 1000) > 100


def test_the_latest_answers_count() -> None:
    assert learnt(*[10] * 100, *[500] * 200).expect(A, 1000) == pytest.approx(500, rel=0.02)


def test_tenants_are_bounded() -> None:
    made = AnswerLengthPredictor()
    for number in range(MAX_TENANTS + 10):
        made.learn(str(number).encode(), 10, cut=False)
    assert len(made._tenants) == MAX_TENANTS


@pytest.mark.parametrize(
    ("expected", "num_tokens", "max_tokens", "corrects_to"),
    [
        (100, 99, 1000, 100),
        (100, 100, 1000, 150),
        (100, 150, 1000, 225),
        (100, 999, 1000, 1000),
        (1, 1, 1000, 2),
        (100, 1000, 1000, 1000),
        (2000, 5, 1000, 1000),
    ],
)
def test_who_outgrows_its_prediction_is_taken_to_grow_on(
    expected: int, num_tokens: int, max_tokens: int, corrects_to: int
) -> None:
    assert revised_prediction(expected, num_tokens, max_tokens) == corrects_to
