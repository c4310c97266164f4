"""Every attack in short succession against one cluster: the neighbour's answers stay exact, and no
program ends. ``make neighbour`` measures time and memory, too."""

from tools.attacks.collection import find_attacks
from tools.neighbour import attacked, neighbourhood, summary

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
    assert {n: o for n, o in outcomes.items() if OUR_FAULT & o.keys()} == {}
