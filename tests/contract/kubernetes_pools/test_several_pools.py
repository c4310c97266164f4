"""Tests several pools of a role, and pools that come from the configuration instead of a list
call."""

import pytest

pytest.importorskip("kubernetes")

from baton.core.states import Role
from baton.errors import Invalid, NotFound
from testkit.fakes.kubernetes import FakePool
from tests.contract.kubernetes_pools.rig import Rig

PREFILL, DECODE = Role.PREFILL, Role.DECODE


async def test_sizes_add_up_the_pools_of_a_role(several: Rig) -> None:
    assert await several.pools.sizes() == {PREFILL: 3, DECODE: 6}
    pools = await several.pools.pools()
    assert {name: (pool.name, pool.role, pool.replicas) for name, pool in pools.items()} == {
        "prefill": ("baton-prefill", PREFILL, 3),
        "decode": ("baton-decode", DECODE, 2),
        "decode-big": ("baton-decode-big", DECODE, 4),
    }


async def test_a_pool_is_resized_by_its_name(several: Rig) -> None:
    await several.pools.resize({"decode-big": 3, "decode": 5})
    assert {pool.pool or pool.role: pool.replicas for pool in several.fake.pools.values()} == {
        "prefill": 3, "decode": 5, "decode-big": 3,
    }  # fmt: skip
    assert several.reach.drained == ["baton-decode-big-8"]
    assert several.fake.names("decode", leaving=True) == ["baton-decode-big-8"]


async def test_a_role_selects_its_only_pool_or_the_pool_of_the_same_name(several: Rig) -> None:
    """No pool is named ``prefill``, so the name selects the only pool with the role prefill. Two
    pools have the role decode, so ``decode`` selects the pool of that name."""
    several.fake.pools["baton-prefill"].pool = "other-name"
    await several.pools.resize({"prefill": 4, "decode": 3})
    assert several.fake.pools["baton-prefill"].replicas == 4
    assert several.fake.pools["baton-decode"].replicas == 3


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("decode", "there are 2 decode pools; name one of decode-big, writers"),
        (
            "decode-bog",
            "there is no pool 'decode-bog'; the pools are: decode-big, prefill, writers",
        ),
    ],
)
async def test_an_ambiguous_or_unknown_pool_name_is_refused(
    several: Rig, name: str, message: str
) -> None:
    several.fake.pools["baton-decode"].pool = "writers"
    with pytest.raises(Invalid, match=message):
        await several.pools.resize({name: 3})
    assert several.changes() == []


async def test_two_pools_with_one_name_are_refused(rig: Rig) -> None:
    rig.fake.add_pool("prefill", 3, kind="StatefulSet").name = "twin"
    rig.fake.pools["twin"] = rig.fake.pools.pop("baton-prefill")
    rig.fake.pools["baton-prefill"] = FakePool("Deployment", "baton-prefill", "prefill", 3)
    with pytest.raises(Invalid, match=r"two pools are called 'prefill' .*: baton-prefill and twin"):
        await rig.pools.sizes()


async def test_scaling_a_role_resizes_its_chosen_pool_and_counts_the_others(several: Rig) -> None:
    """The autoscaler uses ``scale``, since it knows only roles. A size counts all pools of the
    role, but only the chosen pool is resized."""
    pools = several.open(chosen={DECODE: "decode-big"})
    await pools.scale({DECODE: 7})
    assert several.fake.pools["baton-decode-big"].replicas == 5
    assert several.fake.pools["baton-decode"].replicas == 2
    with pytest.raises(Invalid, match="decode=2: it must be at least 3, since decode-big needs"):
        await pools.scale({DECODE: 2})
    with pytest.raises(Invalid, match="the pool 'prefill' is not a decode pool"):
        await several.open(chosen={DECODE: "prefill"}).scale({DECODE: 7})


async def test_configured_pools_are_not_listed(several: Rig) -> None:
    places = {"prefill": "prefill/baton-prefill", "decode-big": "decode/baton-decode-big"}
    pools = several.open(places)
    assert await pools.sizes() == {PREFILL: 3, DECODE: 4}
    await pools.scale({DECODE: 3})
    assert set(several.fake.calls) == {
        ("get", "deployments/scale"), ("dry-run update", "deployments/scale"),
        ("update", "deployments/scale"), ("list", "pods"), ("patch", "pods"),
    }  # fmt: skip
    with pytest.raises(NotFound, match=r'"baton-x" not found'):
        await several.open({"x": "decode/baton-x"}).sizes()


async def test_shrinking_pools_are_written_before_growing_ones(rig: Rig) -> None:
    """The growing pool may wait for a node that the shrinking pool frees."""
    await rig.pools.scale({DECODE: 3, PREFILL: 2})
    assert rig.fake.writes == [("baton-prefill", 2), ("baton-decode", 3)]
