"""Tests that the same stop strings are found as in a search of the whole text, however it is split
into pieces."""

import itertools

import pytest

from baton.text import stop_strings
from baton.text.stop_strings import StopStrings


def cut(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Find the first place in ``text`` where a stop string ends; if several end there, take the
    longest. Return the text before it, and the stop string; if no stop string occurs, return the
    whole text and None."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end - len(stop)], stop
    return text, None


def run(pieces: list[str], stops: list[str]) -> tuple[str, str | None]:
    stopper = StopStrings(stops)
    shown = "".join(stopper.push(piece) for piece in pieces)
    return shown + stopper.flush(), stopper.matched


def splits(text: str) -> list[list[str]]:
    """Return all ways to split a text into pieces."""
    splittings = []
    for marks in itertools.product([False, True], repeat=max(len(text) - 1, 0)):
        pieces, start = [], 0
        for position, mark in enumerate(marks, start=1):
            if mark:
                pieces.append(text[start:position])
                start = position
        splittings.append([*pieces, text[start:]])
    return splittings


@pytest.mark.parametrize(
    "stops",
    [["\n\n"], ["aab"], ["abab"], ["aa", "aab"], ["b", "ab", "aab"], ["bab", "ba"], ["é🎉"]],
)
def test_stop_strings_in_every_text_and_split(stops: list[str]) -> None:
    alphabet = sorted({character for stop in stops for character in stop} | {"x"})
    for length in range(7):
        for letters in itertools.product(alphabet[:3], repeat=length):
            text = "".join(letters)
            expected = cut(text, stops)
            for pieces in splits(text):
                assert run(pieces, stops) == expected, (pieces, stops)


def test_forgotten_steps_are_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop_strings, "MAX_CACHED_STEPS", 3)
    stops = ["abcab", "bcd", "cabd"]
    for letters in itertools.product("abcd", repeat=6):
        text = "".join(letters)
        assert run([*text], stops) == cut(text, stops), text


def test_only_a_possible_stop_string_prefix_is_held_back() -> None:
    stopper = StopStrings(["STOP", "TOAST"])
    assert stopper.push("goS") == "go"
    assert stopper.push("T") == ""
    assert stopper.push("OA") == "S"
    assert stopper.push("K") == "TOAK"
    assert stopper.push("ST") == ""
    assert stopper.flush() == "ST"


def test_no_text_follows_a_match() -> None:
    stopper = StopStrings(["."])
    assert stopper.push("one. two") == "one"
    assert stopper.push(" three.") == ""
    assert stopper.flush() == ""
    assert stopper.matched == "."


def test_without_stop_strings_everything_passes() -> None:
    assert StopStrings([]).push("any text") == "any text"
