"""Runs an engine without a thread, so that its steps take virtual time."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import xxhash

from baton.core.ids import BlockId
from baton.engine.config import EngineConfig
from baton.engine.engine import Engine, StepResult
from baton.engine.kv_window import NO_BLOCK
from baton.engine.plan import Plan, StepOutput
from baton.worker.limits import MAX_COMMANDS
from baton.worker.staging_area import align
from testkit.fakes.runner import SLOT_BYTES, FakeRunner
from tests.sim.whole.loop import SimLoop
from tests.sim.whole.seeded_random import SeededRandom
from tests.sim.whole.transport import SimMemory

T = TypeVar("T")

BLOCK_TOKENS = 4
STEP_SECONDS = 0.004
TOKEN_SECONDS = 0.0005


class StepClock:
    """The loop's time plus ``lag``, the duration of the step that the engine is running."""

    def __init__(self, loop: SimLoop) -> None:
        self._loop = loop
        self.lag = 0.0

    def monotonic(self) -> float:
        return self._loop.time() + self.lag

    def wall_nanoseconds(self) -> int:
        return 1_000_000_000 + int(self.monotonic() * 1e9)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class SimRunner(FakeRunner):
    """A fake model runner with memory that other processes can read. It simulates the duration of
    each step."""

    def __init__(
        self,
        num_blocks: int,
        config: EngineConfig,
        clock: StepClock,
        slowness: float,
        staging_bytes: int = 0,
        weights: bytes = b"",
    ) -> None:
        groups = config.num_full_groups, config.num_windowed_groups
        super().__init__(
            num_blocks * config.num_groups,
            BLOCK_TOKENS,
            window=config.window_tokens,
            groups=groups,
            weights=weights,
        )
        self.staging_offset = align(len(self.memory))
        self.shared = SimMemory(self.staging_offset + staging_bytes)
        self.memory = self.shared.view  # type: ignore[assignment]
        self._clock = clock
        self._slowness = slowness

    def run(self, plan: Plan) -> StepOutput:
        num_tokens = sum(len(row.token_ids) for row in plan.rows)
        self._clock.lag = (STEP_SECONDS + TOKEN_SECONDS * num_tokens) * self._slowness
        return super().run(plan)

    def _read(self, block_ids: Sequence[BlockId], num_tokens: int, group: int) -> bytes:
        """Return the slots of the first ``num_tokens`` tokens in the blocks. This method is faster
        than the one that it overrides, because a simulation spends half of its time here."""
        used = block_ids[: -(-num_tokens // BLOCK_TOKENS)]
        if self._windows != [None] or NO_BLOCK in used:
            return super()._read(block_ids, num_tokens, group)
        size, view = self.block_size_bytes, self.memory
        blocks = b"".join([view[block_id * size : (block_id + 1) * size] for block_id in used])
        return blocks[: num_tokens * SLOT_BYTES]

    def checksums(self, block_ids: list[BlockId]) -> list[int]:
        return [xxhash.xxh3_64_intdigest(self.export_block(block_id)) for block_id in block_ids]

    def range_checksums(self, ranges: Sequence[tuple[int, int]]) -> list[int]:
        view = self.shared.view
        return [xxhash.xxh3_64_intdigest(view[at : at + size]) for at, size in ranges]


class SimEngineHandle:
    """Implements :class:`baton.worker.engine_thread.EngineHandle`. Commands run between two steps,
    and the result of a step is delivered once the step's duration has passed."""

    def __init__(
        self,
        loop: SimLoop,
        engine: Engine,
        clock: StepClock,
        on_step: Callable[[StepResult], None],
        chance: SeededRandom,
    ) -> None:
        self._loop = loop
        self._engine = engine
        self._clock = clock
        self._on_step = on_step
        self._chance = chance
        self._commands: list[tuple[Callable[[Engine], Any], asyncio.Future[Any] | None]] = []
        self._busy = False

    def hang(self) -> None:
        """Run no command and deliver no step any more."""
        self._busy = True
        self._turn = self._finish = lambda *_: None  # type: ignore[method-assign, assignment]

    async def call(self, command: Callable[[Engine], T]) -> T:
        result: asyncio.Future[T] = self._loop.create_future()
        self._enqueue(command, result)
        return await result

    def send(self, command: Callable[[Engine], object]) -> None:
        self._enqueue(command, None)

    def _enqueue(
        self, command: Callable[[Engine], Any], result: "asyncio.Future[Any] | None"
    ) -> None:
        self._commands.append((command, result))
        assert len(self._commands) <= MAX_COMMANDS, "the engine's command queue exceeds its bound"
        if not self._busy:
            self._busy = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        commands, self._commands = self._commands, []
        for command, future in commands:
            self._run(command, future)
        if self._engine.has_work():
            result = self._engine.step()
            seconds = self._clock.lag or STEP_SECONDS
            seconds *= 0.8 + 0.4 * self._chance.number()
            self._loop.call_later(seconds, self._finish, result)
        elif self._commands:
            self._loop.call_soon(self._turn)
        else:
            self._busy = False

    def _finish(self, result: StepResult) -> None:
        self._clock.lag = 0.0
        self._on_step(result)
        self._turn()

    def _run(self, command: Callable[[Engine], Any], result: "asyncio.Future[Any] | None") -> None:
        if result is None:
            command(self._engine)
            return
        try:
            value = command(self._engine)
        except Exception as error:
            if not result.done():
                result.set_exception(error)
        else:
            if not result.done():
                result.set_result(value)
