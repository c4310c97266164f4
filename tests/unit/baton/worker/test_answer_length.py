"""Tests predictions of answer lengths: without data, from past answers, and of answers that are
already longer than predicted."""

import math

import numpy as np
import pytest

from baton.core.answer_length_predictor import (
    MAX_TENANTS,
    NUM_STANDARD_DEVIATIONS,
    AnswerLengthPredictor,
    revised_prediction,
)

A, B = b"a", b"b"


def predictor_after(*lengths: int, cut: bool = False) -> AnswerLengthPredictor:
    estimator = AnswerLengthPredictor()
    for length in lengths:
        estimator.record_length(A, length, was_truncated=cut)
    return estimator


def test_without_data_the_prediction_is_the_limit_or_the_configured_default() -> None:
    assert AnswerLengthPredictor().predict_tokens(A, 1000) == 1000
    assert AnswerLengthPredictor(default_tokens=256).predict_tokens(A, 1000) == 256
    assert AnswerLengthPredictor(default_tokens=256).predict_tokens(A, 100) == 100
    assert predictor_after(5, 5, 5).predict_tokens(A, 1000) == 1000


def test_equal_lengths_predict_that_length() -> None:
    assert predictor_after(20, 20, 20, 20).predict_tokens(A, 1000) == 20
    assert predictor_after(20, 20, 20, 20).predict_tokens(A, 8) == 8


def test_tenant_without_data_gets_the_prediction_over_all_tenants() -> None:
    estimator = predictor_after(20, 20, 20, 20)
    assert estimator.predict_tokens(B, 1000) == 20
    for _ in range(4):
        estimator.record_length(B, 300, was_truncated=False)
    assert estimator.predict_tokens(B, 1000) == 300
    assert estimator.predict_tokens(A, 1000) == 20


def test_four_of_five_log_normal_answers_are_shorter_than_predicted() -> None:
    lengths = np.exp(np.random.default_rng(1).normal(5.0, 0.7, 4000)).astype(int)
    estimator, shorter = AnswerLengthPredictor(), 0
    for length in lengths:
        shorter += int(length) <= estimator.predict_tokens(A, 10**6)
        estimator.record_length(A, int(length), was_truncated=False)
    assert 0.75 <= shorter / len(lengths) <= 0.83
    assert estimator.predict_tokens(A, 10**6) == pytest.approx(
        math.exp(5.0 + NUM_STANDARD_DEVIATIONS * 0.7), rel=0.4
    )


def test_truncated_answer_counts_only_as_a_lower_bound() -> None:
    estimator = predictor_after(100, 100, 100, 100)
    for _ in range(50):
        estimator.record_length(A, 5, was_truncated=True)
    assert estimator.predict_tokens(A, 1000) == 100
    estimator.record_length(A, 900, was_truncated=True)
    assert estimator.predict_tokens(A, 1000) > 100


def test_prediction_follows_the_latest_answers() -> None:
    predictor = predictor_after(*[10] * 100, *[500] * 200)
    assert predictor.predict_tokens(A, 1000) == pytest.approx(500, rel=0.02)


def test_number_of_tracked_tenants_is_bounded() -> None:
    estimator = AnswerLengthPredictor()
    for number in range(MAX_TENANTS + 10):
        estimator.record_length(str(number).encode(), 10, was_truncated=False)
    assert len(estimator._tenants) == MAX_TENANTS


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
def test_answer_longer_than_predicted_gets_a_larger_prediction(
    expected: int, num_tokens: int, max_tokens: int, corrects_to: int
) -> None:
    assert revised_prediction(expected, num_tokens, max_tokens) == corrects_to
