"""A running ``vllm serve``, driven over its HTTP API."""

import asyncio
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import structlog

from attached_worker.cached_blocks import CachedBlocks
from attached_worker.http_exchange import HttpExchange, RelayedExchange, ServerAddress, fetch
from attached_worker.server import (
    AnswerReceiver,
    ComputedPrompt,
    RunningAnswer,
    Seeds,
    ServerFacts,
    ServerLoad,
)
from attached_worker.vllm_event_source import EventSource, find_events
from attached_worker.vllm_event_stream import EventStream
from attached_worker.vllm_kv_events import KvEventReader
from attached_worker.vllm_protocol import (
    FINISH_REASONS,
    GRAMMAR_FLAG,
    PROBE,
    PROBE_GRAMMAR,
    PROBE_TOKEN_ID,
    EventReader,
    encode_least,
    encode_prefill,
    encode_request,
    has_one_group,
    is_streamed,
    prompt_logprobs,
    seed_fields,
    token_logprobs,
    transfer_parameters,
)
from baton.clock import Clock
from baton.core.adapter import (
    ADAPTER_DIGEST_BYTES,
    MAX_ADAPTERS,
    WorkerAdapter,
    is_adapter_name,
)
from baton.core.kv_transfer import ServerKv
from baton.core.request import RequestSpec, TokenLogprob
from baton.core.server_api import COMPLETIONS, KNOWN_PATHS, ForwardRequest, hashed_salt
from baton.errors import BatonError, Invalid, Unavailable

ASK_SECONDS = 5.0
PROBE_SECONDS = 15.0
HALF_SAMPLE = 4
SAMPLE_TEMPERATURE = 2.0
"""So high that equal tokens show equal noise, not a model that is certain."""

PLUGIN_FOLDER = Path(__file__).parent / "vllm_plugin"
PLUGIN = "seed_by_position:SeedByPosition"
RETRY_SECONDS = 10.0
"""How long to wait until a server whose KV events were lost is asked for them again."""

Release = tuple[int, int]

OLDEST_USABLE: Release = (0, 12)
"""The first version with ``structured_outputs``. Unknown fields are ignored, not refused."""

OLDEST_TESTED: Release = (0, 28)

log = structlog.get_logger(__name__)


class VllmServer:
    """Implements :class:`attached_worker.server.ModelServer`."""

    def __init__(self, address: ServerAddress, events: EventSource | None = None) -> None:
        """``events``: where its KV events are; None if the server is to be asked."""
        self._address = address
        self._events = events
        self._cached: CachedBlocks | None = None
        self._facts: ServerFacts | None = None

    async def describe(self) -> ServerFacts:
        version = orjson.loads(await self._get("/version"))["version"]
        if _release(version) < OLDEST_USABLE:
            raise Invalid(
                f"{self._address.url} is vLLM {version}, which would ignore grammars: use "
                f"{_join(OLDEST_USABLE)} or newer"
            )
        models = orjson.loads(await self._get("/v1/models"))["data"]
        base = next(model for model in models if not model.get("parent"))
        metrics = (await self._get("/metrics")).decode()
        labels = self._labels(metrics, "vllm:cache_config_info")
        max_model_tokens, block_tokens = base["max_model_len"], _number(labels, "block_size") or 16
        facts = ServerFacts(
            software="vllm",
            version=version,
            model=base["id"],
            weights=base["root"],
            max_model_tokens=max_model_tokens,
            block_tokens=block_tokens,
            # A model without KV has none, and computes a request in a step.
            num_blocks=_number(labels, "num_gpu_blocks") or -(-max_model_tokens // block_tokens),
            cache_dtype=labels["cache_dtype"],
            lends_kv="vllm:nixl_" in metrics,
            paths=await self._find_paths(),
        )
        if not facts.api.generates:
            self._facts = facts
            return facts
        seeds = await self._find_seeds(facts)
        self._facts = replace(facts, seeds=seeds, has_lark=await self._has_lark(facts))
        return self._facts

    async def _find_paths(self) -> tuple[str, ...]:
        """Return those of the known paths that the server offers: vLLM has the routes of what its
        model can do. A server that does not list them is taken to generate tokens."""
        try:
            listed = orjson.loads(await self._get("/openapi.json"))["paths"]
        except Invalid:
            return (COMPLETIONS,)
        return tuple(path for path in KNOWN_PATHS if path in listed)

    async def _find_seeds(self, facts: ServerFacts) -> Seeds:
        """Have the server generate seeded tokens, and once more those behind the first half. A
        server that computes in BF16 rounds differently then, and may seldom choose another one, so
        there are two tries, at the same time."""
        tries = [(seeds, seed) for seeds in (Seeds.PROCESSOR, Seeds.NATIVE) for seed in range(2)]
        fields = [seed_fields(seed, seeds) for seeds, seed in tries]
        wholes = await asyncio.gather(*[self._sample(facts, [], each) for each in fields])
        firsts = [whole[:HALF_SAMPLE] for whole in wholes]
        rests = await asyncio.gather(
            *[self._sample(facts, *each) for each in zip(firsts, fields, strict=True)]
        )
        found = [
            seeds
            for (seeds, _), whole, rest in zip(tries, wholes, rests, strict=True)
            if whole[HALF_SAMPLE:] == rest
        ]
        return found[0] if found else Seeds.IGNORED

    async def _sample(
        self, facts: ServerFacts, tokens: list[int], fields: Mapping[str, object]
    ) -> list[int]:
        answer = await self._complete(
            facts,
            PROBE_SECONDS,
            prompt=[PROBE_TOKEN_ID, *tokens],
            max_tokens=2 * HALF_SAMPLE - len(tokens),
            temperature=SAMPLE_TEMPERATURE,
            ignore_eos=True,
            return_token_ids=True,
            **fields,
        )
        (choice,) = answer["choices"]
        _check_finished(choice)
        return list(choice["token_ids"])

    async def _has_lark(self, facts: ServerFacts) -> bool:
        grammar = {"grammar": PROBE_GRAMMAR}
        try:
            await self._complete(facts, PROBE_SECONDS, structured_outputs=grammar)
        except (Invalid, Unavailable) as error:
            if "status" not in str(error):
                raise
            return False
        return True

    async def advise(self, facts: ServerFacts) -> Sequence[str]:
        found = []
        if _release(facts.version) < OLDEST_TESTED:
            found.append(f"vLLM {facts.version} is not tested: use {_join(OLDEST_TESTED)} or newer")
        if not facts.api.generates:
            return found
        if facts.paths == (COMPLETIONS,):
            found.append("its other routes are not listed: remove --disable-fastapi-docs")
        answer = await self._complete(facts, PROBE_SECONDS)
        if not answer["usage"].get("prompt_tokens_details"):
            found.append("cached tokens are not counted: add --enable-prompt-tokens-details")
        metrics = (await self._get("/metrics")).decode()
        labels = self._labels(metrics, "vllm:cache_config_info")
        if labels.get("enable_prefix_caching") == "False":
            found.append("prefixes are computed anew each time: add --enable-prefix-caching")
        if facts.seeds is Seeds.IGNORED:
            found.append(
                "seeds are ignored, and sampled answers that continue elsewhere change: start it "
                f"with PYTHONPATH={PLUGIN_FOLDER} and --logits-processors {PLUGIN}"
            )
        if not facts.has_lark:
            found.append(f"strict and required tool calls are refused: add {GRAMMAR_FLAG}")
        return found

    async def adapters(self) -> tuple[WorkerAdapter, ...]:
        models = orjson.loads(await self._get("/v1/models"))["data"]
        roots = {each["id"]: each["root"] for each in models if each.get("parent")}
        names = sorted(filter(is_adapter_name, roots))[:MAX_ADAPTERS]
        return tuple(
            WorkerAdapter(name, adapter_digest(roots[name]), in_settings=True) for name in names
        )

    async def load(self) -> ServerLoad:
        values = {"num_requests_running": 0.0, "num_requests_waiting": 0.0}
        values["kv_cache_usage_perc"] = 0.0
        for line in (await self._get("/metrics")).decode().splitlines():
            name, _, rest = line.removeprefix("vllm:").partition("{")
            if name in values and line.startswith("vllm:"):
                values[name] += float(rest.rpartition("} ")[2])
        running, waiting, usage = values.values()
        return ServerLoad(int(running), int(waiting), min(usage, 1.0))

    def start(
        self, spec: RequestSpec, receiver: AnswerReceiver, kv: ServerKv | None = None
    ) -> RunningAnswer:
        self._learn_salt(spec)
        cached = None if kv is None else kv.cached_tokens
        try:
            body = encode_request(spec, self._known_facts, kv)
        except Invalid as error:
            asyncio.get_running_loop().call_soon(receiver.fail, error)
            return _NoAnswer()
        return _Answer(self._address, body, spec, receiver, cached)

    async def prefill(self, spec: RequestSpec, *, samples: bool) -> ComputedPrompt:
        self._learn_salt(spec)
        body = encode_prefill(spec, self._known_facts, samples=samples)
        response = orjson.loads(await fetch(self._address, "POST", COMPLETIONS, body))
        (choice,) = response["choices"]
        _check_finished(choice)
        return ComputedPrompt(
            token_ids=tuple(choice["token_ids"]),
            logprobs=token_logprobs(choice),
            prompt_logprobs=_of_prompt(spec, choice),
            finish_reason=FINISH_REASONS[choice["finish_reason"]],
            cached_tokens=_cached_tokens(response),
            parameters=transfer_parameters(response, len(spec.token_ids)),
            can_follow=has_one_group(response),
        )

    def _learn_salt(self, spec: RequestSpec) -> None:
        if spec.tenant_salt and self._cached is not None:
            self._cached.learn_salt(hashed_salt(spec.tenant_salt), spec.tenant_salt)

    def relay(self, request: ForwardRequest) -> RelayedExchange:
        data = self._address.encode("POST", request.path, request.body, request.content_type)
        return RelayedExchange(self._address, data)

    async def probe(self, seconds: float) -> None:
        facts = self._known_facts
        try:
            if facts.api.generates:
                _check_finished((await self._complete(facts, seconds))["choices"][0])
            else:
                await self._compute_least(facts, seconds)
        except Invalid as error:
            raise Unavailable(str(error)) from error

    async def _compute_least(self, facts: ServerFacts, seconds: float) -> None:
        """Have a server that generates no tokens compute one, or half a second of silence."""
        path, body, kind = encode_least(facts)
        await fetch(self._address, "POST", path, body, seconds=seconds, content_type=kind)

    async def _complete(
        self, facts: ServerFacts, seconds: float, **fields: object
    ) -> dict[str, Any]:
        """Return the response to a request for one token, or for what ``fields`` say."""
        body = {"model": facts.model, "prompt": [PROBE_TOKEN_ID], "max_tokens": 1, "user": PROBE}
        data = orjson.dumps(body | fields)
        response = await fetch(self._address, "POST", COMPLETIONS, data, seconds=seconds)
        answer: dict[str, Any] = orjson.loads(response)
        return answer

    @property
    def _known_facts(self) -> ServerFacts:
        assert self._facts is not None, "describe the server first"
        return self._facts

    async def follow_cache(self, cached: CachedBlocks, clock: Clock) -> None:
        self._cached = cached
        failure = ""
        while True:
            try:
                source = self._events or await find_events(self._address)
                if source is None:
                    return
                reader = KvEventReader(cached, cached.block_tokens)
                await EventStream(source, clock, cached, reader.apply).run()
            except BatonError as error:
                if failure != str(error):
                    log.warning("kv_events_lost", error=str(error))
                failure = str(error)
            await clock.sleep(RETRY_SECONDS)

    async def _get(self, path: str) -> bytes:
        try:
            return await fetch(self._address, "GET", path, seconds=ASK_SECONDS)
        except Invalid as error:
            if "status 401" not in str(error):
                raise
            raise Invalid(f"{error}: the server must be started without --api-key") from error

    def _labels(self, metrics: str, name: str) -> Mapping[str, str]:
        for line in metrics.splitlines():
            if line.startswith(f"{name}{{"):
                return dict(re.findall(r'(\w+)="([^"]*)"', line))
        raise Invalid(
            f"{self._address.url}/metrics has no {name}: the server must be started without "
            "--disable-log-stats"
        )


def adapter_digest(root: str) -> bytes:
    """Return the digest of an adapter, which the server has loaded from ``root``: a folder, or a
    hub id. Servers that have loaded the same root have the same adapter."""
    return hashlib.blake2b(root.encode(), digest_size=ADAPTER_DIGEST_BYTES).digest()


def _number(labels: Mapping[str, str], name: str) -> int:
    """Return a label's number; 0 if it is none."""
    value = labels.get(name, "")
    return int(value) if value.isdecimal() else 0


def _release(version: str) -> Release:
    """Return major and minor number. A build from source without them counts as the newest."""
    found = re.match(r"(\d+)\.(\d+)\.(?!dev)", version)
    return (int(found[1]), int(found[2])) if found else (2**31, 0)


def _join(release: Release) -> str:
    return ".".join(map(str, release))


class _NoAnswer:
    def abort(self) -> None:
        pass


class _Answer:
    """One request at the server. An answer that is not streamed comes as one object.
    ``cached_tokens`` is reported instead of the server's own count."""

    def __init__(
        self,
        address: ServerAddress,
        body: bytes,
        spec: RequestSpec,
        receiver: AnswerReceiver,
        cached_tokens: int | None,
    ) -> None:
        self._spec = spec
        self._receiver = receiver
        self._reason: str | None = None
        self._known_cached_tokens = cached_tokens
        self._cached_tokens = cached_tokens or 0
        self._events = EventReader()
        self._body = bytearray()
        self._is_streamed = is_streamed(spec)
        self._error: BatonError | None = None
        request = address.encode("POST", COMPLETIONS, body)
        self._exchange = HttpExchange(request, self._receive, self._end)
        self._opening = asyncio.get_running_loop().create_task(self._open(address))

    def abort(self) -> None:
        self._opening.cancel()
        self._exchange.abort()

    async def _open(self, address: ServerAddress) -> None:
        try:
            await self._exchange.open(address)
        except Unavailable as error:
            self._receiver.fail(error)

    def _receive(self, data: bytes) -> None:
        if not self._is_streamed:
            self._body += data
            return
        for event in self._events.feed(data):
            self._read(event)

    def _read(self, event: Mapping[str, Any]) -> None:
        if "error" in event:
            self._error = Unavailable(f"the server failed: {str(event['error'])[:500]}")
            return
        if event.get("usage") and self._known_cached_tokens is None:
            self._cached_tokens = _cached_tokens(event)
        for choice in event["choices"]:
            self._reason = choice["finish_reason"] or self._reason
            tokens = choice["token_ids"]
            if tokens:
                self._receiver.receive(
                    tokens,
                    token_logprobs(choice),
                    _of_prompt(self._spec, choice),
                    is_last=choice["finish_reason"] is not None,
                )

    def _end(self, reason: str) -> None:
        if not reason and not self._is_streamed:
            try:
                self._read(orjson.loads(bytes(self._body)))
            except (ValueError, KeyError, TypeError) as error:
                reason = f"its response can't be read: {error!r}"
        finish = FINISH_REASONS.get(self._reason or "")
        if self._error is not None:
            self._receiver.fail(self._error)
        elif reason and 400 <= self._exchange.status < 500:
            self._receiver.fail(Invalid(f"the server refuses the request: {reason}"))
        elif reason or finish is None:
            self._receiver.fail(
                Unavailable(f"the server ended the answer: {reason or self._reason or 'no reason'}")
            )
        else:
            self._receiver.finish(finish, self._cached_tokens)


def _check_finished(choice: Mapping[str, Any]) -> None:
    """Raise Unavailable if the server has ended an answer early, with status 200: it does so with
    new requests while it shuts down."""
    if choice["finish_reason"] not in FINISH_REASONS:
        raise Unavailable(f"the server ended a request with {choice['finish_reason']}")


def _cached_tokens(response: Mapping[str, Any]) -> int:
    details = response["usage"].get("prompt_tokens_details") or {}
    return int(details.get("cached_tokens") or 0)


def _of_prompt(spec: RequestSpec, choice: Mapping[str, Any]) -> tuple[TokenLogprob, ...]:
    num_top = spec.sampling.prompt_logprobs
    if not spec.wants_prompt_logprobs or num_top is None:
        return ()
    return prompt_logprobs(choice, spec.token_ids, num_top)
