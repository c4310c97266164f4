"""Tests a worker's record of the chains of block keys that it has computed."""

from baton.core.ids import BlockKey
from baton.engine.result import SealedRun
from prefill_worker.computed_chains import ComputedChains


def run(text: str, first: int = 0) -> SealedRun:
    """Return a chain with a block for each letter of ``text``. Chains with a common prefix share
    its keys."""
    keys = tuple(BlockKey(text[: end + 1].encode()) for end in range(len(text)))
    return SealedRun(keys, first, b"t")


def listed(chains: ComputedChains) -> list[tuple[str, int]]:
    return [(chain.keys[-1].decode(), chain.first_new_block) for chain in chains.newest_first()]


def test_each_chain_is_kept_once_at_its_longest() -> None:
    chains = ComputedChains()
    chains.add(run("ab"))
    chains.add(run("xy"))
    chains.add(run("abcd", first=2))
    chains.add(run("xy"))
    assert listed(chains) == [("xy", 0), ("abcd", 0)]


def test_branch_is_a_separate_chain() -> None:
    chains = ComputedChains()
    chains.add(run("abcd"))
    chains.add(run("abef", first=2))
    assert listed(chains) == [("abef", 0), ("abcd", 0)]


def test_oldest_chains_are_forgotten() -> None:
    chains = ComputedChains(max_keys=6)
    for text in ("ab", "cde", "f", "gh"):
        chains.add(run(text))
    assert listed(chains) == [("gh", 0), ("f", 0), ("cde", 0)]
    chains.add(run("abcdefgh"))
    assert listed(chains) == []


def test_empty_run_adds_no_chain() -> None:
    chains = ComputedChains()
    chains.add(run(""))
    assert len(chains) == 0
