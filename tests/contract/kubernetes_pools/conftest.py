"""Provides clusters with two and with three worker pools."""

from collections.abc import AsyncIterator, Iterator

import pytest

from baton.core.states import Role
from testkit.fakes.kubernetes import FakeKubernetes, fake_kubernetes
from tests.contract.kubernetes_pools.rig import Rig

PREFILL, DECODE = Role.PREFILL, Role.DECODE


@pytest.fixture
def fake() -> Iterator[FakeKubernetes]:
    with fake_kubernetes() as server:
        server.add_pool("prefill", 3)
        server.add_pool("decode", 2)
        yield server


@pytest.fixture
async def rig(fake: FakeKubernetes) -> AsyncIterator[Rig]:
    yield Rig(fake)


@pytest.fixture
def several(fake: FakeKubernetes) -> Rig:
    """A rig with three pools: ``prefill`` has three workers, ``decode`` two and ``decode-big``
    four."""
    fake.add_pool("decode", 4, name="decode-big")
    return Rig(fake)
