"""What clients ask, and what they get."""

import asyncio
from contextlib import aclosing
from dataclasses import dataclass, field

from baton.core.ids import Epoch, RequestId, TokenId
from baton.core.request import FinishReason, RequestOutput, RequestSpec, SamplingParams
from baton.errors import BatonError
from router.journey import Journey
from tests.sim.whole.chance import Chance
from tests.sim.whole.router import RouterLife

NUM_FAMILIES = 3
"""Prompts of a family begin alike."""


@dataclass(frozen=True, slots=True)
class Ask:
    """``leaves_after`` seconds the client is gone, if the answer has not ended."""

    spec: RequestSpec
    at_seconds: float
    leaves_after: float | None = None


class WrongHistory(AssertionError):
    """A client saw what none may see."""


@dataclass(eq=False)
class Answer:
    """What one client saw. ``end`` is complete, error, cancelled, or lost with its
    router; there is exactly one."""

    ask: Ask
    journey: Journey | None = None
    tokens: list[TokenId] = field(default_factory=list)
    end: str = ""
    reason: FinishReason | None = None
    error: str = ""

    def take(self, output: RequestOutput) -> None:
        assert self.journey is not None
        name, epoch = self.ask.spec.request_id, self.journey.record.placements[-1].epoch
        if self.end:
            raise WrongHistory(f"{name}: a token after the end")
        if output.epoch != epoch:
            raise WrongHistory(f"{name}: a token of epoch {output.epoch} in epoch {epoch}")
        if output.first_index != len(self.tokens):
            raise WrongHistory(f"{name}: token {output.first_index} after {len(self.tokens)}")
        self.tokens += output.token_ids
        if output.finish_reason is not None:
            self.reason = output.finish_reason
            self.finish("complete")

    def finish(self, end: str, error: str = "") -> None:
        if self.end:
            raise WrongHistory(f"{self.ask.spec.request_id}: {end} after {self.end}")
        self.end, self.error = end, error


async def follow(router: RouterLife, answer: Answer) -> None:
    """One client, in the router's process."""
    try:
        answer.journey = journey = await router.journey(answer.ask.spec)
        async with aclosing(journey.outputs()) as outputs:
            async for output in outputs:
                answer.take(output)
    except BatonError as error:
        answer.finish("error", f"{type(error).__name__}: {error}")
    except asyncio.CancelledError:
        if not answer.end:
            answer.finish("cancelled" if router.process.alive else "lost")
        raise


def draw_asks(chance: Chance) -> list[Ask]:
    return [draw_ask(chance, number) for number in range(chance.between(3, 8))]


def draw_ask(chance: Chance, number: int) -> Ask:
    family, shared = chance.below(NUM_FAMILIES), 4 * chance.below(8)
    own = chance.between(1, 12)
    prompt = [*_tokens(family, shared), *_tokens(50 + number, own)]
    spec = RequestSpec(
        RequestId(f"r{number}"),
        Epoch(1),
        tuple(prompt),
        len(prompt),
        _draw_sampling(chance),
        tenant_salt=b"salt" if chance.happens(0.1) else b"",
    )
    leaves = chance.number() ** 2 if chance.happens(0.15) else None
    return Ask(spec, 0.05 + chance.number(), leaves)


def _draw_sampling(chance: Chance) -> SamplingParams:
    seeded = chance.happens(0.4)
    return SamplingParams(
        max_tokens=chance.between(1, 30),
        temperature=1.0 if seeded else 0.0,
        seed=chance.below(1000) if seeded else 0,
        presence_penalty=0.5 if chance.happens(0.1) else 0.0,
        stop_token_ids=tuple(TokenId(chance.below(256)) for _ in range(chance.below(4))),
    )


def _tokens(first: int, count: int) -> list[TokenId]:
    return [TokenId((first + 7 * position) % 251) for position in range(count)]
