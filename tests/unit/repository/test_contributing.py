"""Tests that the example in CONTRIBUTING.md works: a placement policy and its test."""

import re
import textwrap
from pathlib import Path

from conductor.policy import baselines
from tests.unit.conductor.policy import test_baseline_policies

PAGE = Path(__file__).parents[3] / "CONTRIBUTING.md"
PYTHON_BLOCK = re.compile(r"^( *)```python\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)


def test_example_policy_passes_its_own_test() -> None:
    policy, test = (textwrap.dedent(block) for _, block in PYTHON_BLOCK.findall(PAGE.read_text()))
    policies = dict(vars(baselines))
    exec(policy, policies)
    names = {**vars(test_baseline_policies), "baselines": _Namespace(policies)}
    exec(test, names)
    names["test_longest_prefix_takes_the_worker_with_most_blocks"]()


class _Namespace:
    """A copy of the module ``baselines`` with the example's policy added to it."""

    def __init__(self, names: dict[str, object]) -> None:
        self.__dict__.update(names)
