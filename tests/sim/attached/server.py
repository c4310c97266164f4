"""A simulated ``vllm serve`` with NixlConnector, behind its HTTP interface: what it does when it
and its peers work, freeze, die, shut down, lend KV and read it late."""

import asyncio
import math
from typing import Any

import orjson

from attached_worker.server import Seeds
from baton.core.request import SamplingParams
from baton.core.server_api import COMPLETIONS, hashed_salt
from testkit.fakes.runner import SLOT_BYTES, compute_slots, fake_sample
from testkit.fakes.vllm_server import MODEL, _write, _write_end, _write_event
from tests.sim.attached.kv_pool import BLOCK_TOKENS, KvPool
from tests.sim.whole.process import Process
from tests.sim.whole.worker import MAX_MODEL_TOKENS, SimEnvironment

PORT = 8000
LEASE_SECONDS = 30.0
POLL_SECONDS = 0.1
TENANT_SALTS = ("", hashed_salt(b"salt"))
"""The salts of all requests but those that read KV of another server."""

Body = dict[str, Any]


def server_seed(seeds: Seeds, seed: int, num_prompt_tokens: int) -> int:
    """Return the seed of :func:`testkit.fakes.runner.fake_sample` for a request to a server. If
    seeds are ignored, its generator begins anew with each request."""
    return seed if seeds is Seeds.NATIVE else num_prompt_tokens


class SimVllm:
    """One incarnation of a server. ``engines`` has all servers of the cluster, by engine id. There
    are no heartbeats between servers, as if all were lost: they make leases longer. A server
    misreads the KV of another version, which real ones refuse unless only the block size
    differs."""

    def __init__(
        self,
        environment: SimEnvironment,
        engines: "dict[str, SimVllm]",
        name: str,
        version: str,
        number: int,
        seeds: Seeds,
    ) -> None:
        chance = environment.chance
        self.name = name
        self.version = version
        self.seeds = seeds
        self.process = Process(f"{name}.server", environment.network)
        self.pool = KvPool(chance.between(40, 80))
        self.lent: dict[str, list[int]] = {}
        self.num_running = 0
        self.step = asyncio.Event()
        """Cleared: the engine is frozen, and the HTTP server still responds."""

        self.step.set()
        self.is_stopping = False
        """Whether new requests end at once with status 200 and reason ``abort``."""

        self.lends_oddly = False
        """Whether it sometimes lends the KV of another prompt."""

        self._chance = chance
        self._engines = engines
        self._engine_id = f"engine-{number}"
        self._step_seconds = 0.01 + 0.25 * chance.number() ** 2
        self._recomputes = chance.happens(0.7)
        """``kv_load_failure_policy``."""

        self._num_lent = 0
        self._broken = asyncio.Event()
        self._has_room = asyncio.Event()
        engines[self._engine_id] = self
        environment.network.serve(self.process, lambda: _Connection(self), f"{name}:{PORT}")

    @property
    def is_at_rest(self) -> bool:
        is_used = self.num_running or self.lent or self.pool.num_used
        return self.process.alive and not is_used

    def describe(self) -> str:
        return f"{self.process.name}: {self.num_running} running, {len(self.lent)} lent"

    # -- faults ------------------------------------------------------------------------------

    async def crowd_out(self, seconds: float) -> None:
        """Let requests of others have all free blocks for a while."""
        blocks = self.pool.take_free()
        await asyncio.sleep(seconds)
        self._release(blocks)

    def freeze_engine(self, seconds: float) -> None:
        self.step.clear()
        if seconds < math.inf:
            process = self.process
            process.loop.call_later(seconds, self.step.set, context=process.context)

    def end_as(self, version: str) -> None:
        """Die, and come back as another version."""
        self.version = version
        self.process.kill()

    async def shut_down(self, seconds: float, *, generates: bool) -> None:
        """Behave as after SIGTERM, with or without ``--shutdown-timeout``, then die."""
        self.is_stopping = True
        if not generates:
            self.step.clear()
        await asyncio.sleep(seconds)
        self.process.kill()

    async def crash(self) -> None:
        """Let the engine die: all streams end with an error, and soon the process, too."""
        self._broken.set()
        await asyncio.sleep(0.3)
        self.process.kill()

    # -- requests ----------------------------------------------------------------------------

    async def respond(self, path: str, body: bytes, transport: Any) -> None:
        if path == "/v1/completions":
            self.num_running += 1
            try:
                await self._complete(orjson.loads(body), transport)
            finally:
                self.num_running -= 1
        else:
            _write(transport, self._document(path))

    def _document(self, path: str) -> str:
        if path == "/version":
            return orjson.dumps({"version": self.version}).decode()
        if path == "/openapi.json":
            return orjson.dumps({"paths": {COMPLETIONS: {}}}).decode()
        if path == "/v1/models":
            model = {"id": MODEL, "root": "weights", "max_model_len": MAX_MODEL_TOKENS}
            return orjson.dumps({"data": [model]}).decode()
        return (
            f'vllm:cache_config_info{{block_size="{BLOCK_TOKENS}",cache_dtype="auto",'
            'num_gpu_blocks="80"} 1.0\n'
            f'vllm:num_requests_running{{engine="0"}} {self.num_running}.0\n'
            "vllm:nixl_bytes_transferred_sum 0.0\n"
        )

    async def _complete(self, body: Body, transport: Any) -> None:
        is_streamed = bool(body.get("stream"))
        if is_streamed:
            transport.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        sequence = _Sequence(self, body)
        whole: list[int] = []
        response: Body = {}
        try:
            reason = None
            while reason is None:
                tokens, reason = await sequence.next_tokens()
                whole += tokens
                if is_streamed:
                    _write_event(transport, {"choices": [_choice(tokens, reason)]})
            if sequence.lends and reason != "abort":
                response["kv_transfer_params"] = self._lend(sequence)
        except _EngineFailed as error:
            failure = {"error": {"message": str(error), "code": 500}}
            if is_streamed:
                _write_event(transport, failure)
                _write_end(transport)
            else:
                _write(transport, orjson.dumps(failure).decode(), status=500)
            return
        finally:
            sequence.end()
        usage = {"prompt_tokens_details": {"cached_tokens": sequence.num_cached}}
        if is_streamed:
            _write_event(transport, {"choices": [], "usage": usage})
            _write_end(transport)
            return
        response |= {"choices": [_choice(whole, reason)], "usage": usage}
        _write(transport, orjson.dumps(response).decode())

    async def run_step(self, num_tokens: int = 1) -> None:
        await asyncio.sleep(
            self._step_seconds * (0.7 + num_tokens / 16 + 0.3 * self._chance.number())
        )
        await self.step.wait()
        if self._broken.is_set():
            raise _EngineFailed("EngineCore died")

    # -- blocks ------------------------------------------------------------------------------

    async def allocate(
        self, prompt: tuple[int, ...], salt: str, num_tokens: int
    ) -> tuple[list[int], int]:
        """Wait until there are enough free blocks."""
        while (found := self.pool.allocate(prompt, salt, num_tokens)) is None:
            self._has_room.clear()
            await self._has_room.wait()
        return found

    def _release(self, blocks: list[int]) -> None:
        self.pool.release(blocks)
        self._has_room.set()

    # -- KV transfer -------------------------------------------------------------------------

    def _lend(self, sequence: "_Sequence") -> Body:
        self._num_lent += 1
        name, num_tokens = f"{self._engine_id}/{self._num_lent}", len(sequence.prompt)
        blocks = self.lent[name] = sequence.blocks
        sequence.blocks = []
        self.process.start_task(self._expire(name))
        if self.lends_oddly and self._chance.happens(0.6):
            blocks, num_tokens = [*blocks, blocks[0]], num_tokens + BLOCK_TOKENS
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [blocks],
            "remote_engine_id": self._engine_id,
            "remote_request_id": name,
            "remote_num_tokens": num_tokens,
        }

    async def _expire(self, name: str) -> None:
        """Once a lease has expired, let others write to its blocks."""
        await asyncio.sleep(LEASE_SECONDS)
        await self.step.wait()
        if name in self.lent:
            self.give_back(name)
            self._release(self.pool.take_free())

    def give_back(self, name: str) -> None:
        self._release(self.lent.pop(name, []))

    async def read_from(self, parameters: Body, blocks: list[int]) -> bool:
        """Read KV of another server into ``blocks``, however late; return whether it was there to
        be read."""
        lender = self._engines[parameters["remote_engine_id"]]
        network, name = self.process.network, parameters["remote_request_id"]
        while True:
            seconds = network.arrival_time(lender.process, self.process) - network.loop.time()
            await asyncio.sleep(seconds + POLL_SECONDS * self._chance.number())
            if not lender.process.alive:
                return False
            if self.step.is_set() and lender.step.is_set() and not lender.process.frozen:
                break
        theirs = parameters["remote_block_ids"][0]
        assert len(theirs) >= len(blocks), (
            "the engine dies: there are fewer remote blocks than local"
        )
        self.pool.copy(blocks, lender.pool, theirs[len(theirs) - len(blocks) :])
        if lender.version != self.version:
            self.pool.spoil(blocks)
        lender.give_back(name)
        return True

    def leave_unread(self, parameters: Body) -> None:
        """Tell the lender that its KV will not be read."""
        lender = self._engines[parameters["remote_engine_id"]]
        if lender.process.alive and not lender.process.frozen:
            lender.give_back(parameters["remote_request_id"])


class _EngineFailed(Exception):
    pass


class _Sequence:
    """One request in the engine."""

    def __init__(self, server: SimVllm, body: Body) -> None:
        self._server = server
        self.prompt = tuple(body["prompt"])
        self._salt = str(body.get("cache_salt", ""))
        self._max_tokens = int(body["max_tokens"])
        self._stops = body.get("stop_token_ids", ())
        self._sampling = SamplingParams(
            self._max_tokens,
            temperature=body.get("temperature", 0.0),
            seed=server_seed(
                server.seeds if "seed" in body else Seeds.IGNORED,
                body.get("seed", 0),
                len(self.prompt),
            ),
            presence_penalty=body.get("presence_penalty", 0.0),
        )
        parameters = body.get("kv_transfer_params") or {}
        self.lends = bool(parameters.get("do_remote_decode"))
        self._remote: Body = parameters if parameters.get("do_remote_prefill") else {}
        self.blocks: list[int] = []
        self.num_cached = 0
        self._reading: asyncio.Task[bool] | None = None
        self._kv = b""
        self._tokens = list(self.prompt)

    async def next_tokens(self) -> tuple[list[int], str | None]:
        """Return one token or a few, and the finish reason with the last."""
        server = self._server
        if not self._kv:
            if server.is_stopping:
                return [], "abort"
            await self._prefill()
        tokens: list[int] = []
        reason = None
        while reason is None and (not tokens or server._chance.happens(0.1)):
            tokens.append(self._sample())
            num_new = len(self._tokens) - len(self.prompt)
            if tokens[-1] in self._stops:
                reason = "stop"
            elif num_new == self._max_tokens:
                reason = "length"
            else:
                await server.run_step()
                self._compute()
        return tokens, reason

    async def _prefill(self) -> None:
        server, count = self._server, len(self.prompt)
        self.blocks, self.num_cached = await server.allocate(
            self.prompt, self._salt, count + self._max_tokens - 1
        )
        num_known = self.num_cached
        if self._remote:
            targets = self.blocks[num_known // BLOCK_TOKENS : -(-count // BLOCK_TOKENS)]
            reading = server.read_from(self._remote, targets)
            self._reading = server.process.start_task(reading)
            if await asyncio.shield(self._reading):
                num_known = count - 1
            elif not server._recomputes:
                raise _EngineFailed("KV load failure")
        await server.run_step(count - num_known)
        self._kv = server.pool.read(self.blocks, num_known)
        self._compute()

    def _compute(self) -> None:
        """Compute the KV of all tokens that have none yet, and cache the full blocks."""
        num_known = len(self._kv) // SLOT_BYTES
        rest = self._tokens[num_known:]
        self._kv += b"".join(compute_slots(self._kv, rest, num_known))
        self._server.pool.write(self.blocks, self._kv)
        self._server.pool.cache(self.blocks, tuple(self._tokens), self._salt)

    def _sample(self) -> int:
        history = self._tokens if self._sampling.needs_history else ()
        num_prompt_tokens = len(self.prompt) if self._sampling.needs_history else 0
        token = fake_sample(self._kv, self._sampling, history, num_prompt_tokens, 256).token_id
        self._tokens.append(token)
        return token

    def end(self) -> None:
        """Release the blocks. A read that goes on keeps them until it has ended, and caches what it
        has read."""
        reading = self._reading
        if self._remote and reading is None:
            self._server.leave_unread(self._remote)
        if reading is not None and not reading.done():
            reading.add_done_callback(self._end_late)
        else:
            self._server._release(self.blocks)

    def _end_late(self, reading: "asyncio.Task[bool]") -> None:
        if not reading.cancelled() and reading.result():
            self._server.pool.cache(self.blocks, self.prompt[:-1], self._salt)
        self._server._release(self.blocks)


def _choice(tokens: list[int], reason: str | None) -> Body:
    return {"index": 0, "text": "", "token_ids": tokens, "finish_reason": reason}


class _Connection(asyncio.Protocol):
    """Serves one request. When the client closes the connection, the request is aborted."""

    def __init__(self, server: SimVllm) -> None:
        self._server = server
        self._data = b""
        self._transport: Any = None
        self._task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._data += data
        head, end, body = self._data.partition(b"\r\n\r\n")
        if end and len(body) >= int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0]):
            path = head.split(b" ")[1].decode()
            self._task = self._server.process.start_task(self._respond(path, body))

    async def _respond(self, path: str, body: bytes) -> None:
        await self._server.respond(path, body, self._transport)
        self._transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        if self._task is not None:
            self._task.cancel()
