"""Mock workers in virtual time, for their tests."""

from collections.abc import Coroutine, Sequence
from typing import Any

from baton.core.cost import PrefillCost
from baton.core.ids import Epoch, Incarnation, RequestId, TokenId, WorkerId
from baton.core.kv_transfer import WorkerRef
from baton.core.request import RequestOutput, RequestSpec, SamplingParams
from baton.core.states import Role
from baton.rpc.convert.common import output_from_proto
from baton.rpc.v1 import worker_pb2 as pb
from baton.worker.mock.kv_transfers import MockKvTransfers
from baton.worker.mock.model import MockModel
from baton.worker.mock.output_stream import MockStream
from baton.worker.mock.worker import MockConfig, MockSharedState, MockWorker
from tests.sim.virtual_time import LoopClock, simulate

LEXICON = MockModel([TokenId(token) for token in range(100, 164)])
SPEED = PrefillCost(0.0, 0.01, 0.0)
STEP = 0.5


def shared_state(step_seconds: float = STEP, cache_tokens: int = 64) -> MockSharedState:
    config = MockConfig(SPEED, step_seconds, 4, 4096, cache_tokens)
    return MockSharedState(config, LEXICON, LoopClock(), MockKvTransfers(), {})


def worker(place: MockSharedState, name: str = "m0", role: Role = Role.DECODE) -> MockWorker:
    made = MockWorker(WorkerId(name), Incarnation(1), role, place)
    made.mark_ready()
    return made


def ref(of: MockWorker, generation: int = 1) -> WorkerRef:
    return WorkerRef(of.id, "127.0.0.1:1", Incarnation(generation))


def spec(
    name: str = "r", length: int = 20, max_tokens: int = 5, epoch: int = 1, **sampling: Any
) -> RequestSpec:
    prompt = tuple(TokenId(number) for number in range(length))
    params = SamplingParams(max_tokens, **{"temperature": 0.0, **sampling})
    return RequestSpec(RequestId(name), Epoch(epoch), prompt, length, params)


def read(message: bytes) -> list[RequestOutput]:
    return [output_from_proto(each) for each in pb.WorkerMessage.FromString(message).outputs]


async def collect(stream: MockStream, count: int = 1) -> list[RequestOutput]:
    """Collect outputs until ``count`` answers have ended."""
    outputs: list[RequestOutput] = []
    while sum(output.finish_reason is not None for output in outputs) < count:
        outputs += read(await stream.next_message())
    return outputs


def tokens(outputs: Sequence[RequestOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def in_virtual_time(main: Coroutine[Any, Any, None]) -> None:
    simulate(main)
