"""Every attack in short succession against one cluster: the neighbour's answers stay exact, and no
program ends. ``make neighbour`` measures time and memory, too."""

import pytest

from tools.attacks.collection import find_attacks
from tools.attacks.target import HARM
from tools.neighbour import attacked, neighbourhood, summary

pytestmark = pytest.mark.timeout(300)
SECONDS = 1.0
OUR_FAULT = {"500", "501", "502", "504"}


def test_every_attack_leaves_the_neighbour_alone() -> None:
    names = [attack.name for attack in find_attacks()]
    with neighbourhood() as place:
        before = place.programs()
        with place.reading() as answers:
            outcomes = attacked(names, place.target(SECONDS), SECONDS)
        assert place.programs().pids == before.pids
    told = summary(answers)
    assert told.is_exact, told.errors
    assert {name: told for name, told in outcomes.items() if any(map(is_wrong, told))} == {}


def is_wrong(outcome: str) -> bool:
    """Whether an answer says that the server is at fault, or an attack that it did harm."""
    return outcome in OUR_FAULT or outcome.startswith(HARM)
