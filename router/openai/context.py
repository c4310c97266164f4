"""The router's request logic without HTTP: builds and runs the answers of a request, and records
their outcome."""

import asyncio
import hashlib
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import structlog

from baton.clock import Clock
from baton.core.attention_window import AttentionWindow
from baton.core.ids import Epoch, RequestId, TenantId
from baton.core.request import RequestSpec
from baton.core.variant import Variant
from baton.errors import BatonError, Invalid, Overloaded, Unavailable
from baton.text.tokenizer import Tokenizer
from router.generation.block_key_hasher import BlockKeyHasher, block_key_hasher
from router.generation.cluster import Cluster
from router.generation.generation import Generation
from router.generation.record import GenerationRecord
from router.http.ignored_fields import IgnoredFields
from router.http.raw_body import BodyBudget, RawBody
from router.openai.choice_stream import (
    ChoiceStream,
    DeltaHandler,
    InlineSink,
    PromptLogprobsBuilder,
)
from router.openai.logprobs_budget import KeptLogprobs
from router.openai.model_text import ModelText
from router.openai.parsers.output_parser import OutputParser
from router.openai.preprocessor import Preprocessor, Prompt
from router.openai.prompt_logprobs import build_prompt_token_entries
from router.openai.request_resources import RequestResources
from router.openai.schema import ChatBody, CompletionBody
from router.openai.served_model import ModelDirectory, ServedModel
from router.openai.stored_bytes import StoredBytesShare
from router.telemetry.router_telemetry import RouterTelemetry
from router.tenants.authentication import Authenticator
from router.tenants.quota_store import QuotaStore
from router.tenants.tenant import TenantAttributes
from router.tenants.tenant_services import TenantServices
from router.tenants.usage_store import UsageStore

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """The router's settings. ``control_socket`` is the path of the supervisor's socket, or None if
    there is no supervisor."""

    max_body_bytes: int = 8 * 1024 * 1024
    max_inflight_body_bytes: int = 128 * 1024 * 1024
    max_concurrent_requests: int = 1024
    body_timeout_seconds: float = 60.0
    tenant_secret: str | None = None
    slo_ttft_seconds: float = 0.0
    control_socket: str | None = None
    request_timeout_seconds: float = 3600.0
    cors_origins: tuple[str, ...] = ()
    known_hosts: tuple[str, ...] | None = None
    """The host names that requests without a key may use for this router; None allows any."""
    access_log: bool = False
    refuses_special_tokens: bool = False
    strict_fields: bool = False


@dataclass(frozen=True, slots=True)
class RequestContext:
    """The model and the tenant of a request, and the tenant's attributes as of the request's
    arrival. ``variant`` is the variant of the model that is tried first, for which the block keys
    of the request's prompts are computed; it is None while the model has no workers. ``session`` is
    the id of the client's session, or empty if the client named none."""

    model: ServedModel
    tenant: TenantId
    attributes: TenantAttributes
    variant: Variant | None
    session: str = ""
    attention_window: AttentionWindow | None = None

    @property
    def hasher(self) -> BlockKeyHasher | None:
        """Computes the block keys of the request's prompts; None without a variant."""
        if self.variant is None:
            return None
        adapter, attributes = self.model.adapter, self.attributes
        return block_key_hasher(
            self.variant,
            attributes.salt,
            b"" if adapter is None else adapter.digest,
            self.attention_window,
            exact_kv=attributes.exact_kv,
        )


def make_session_id(tenant: TenantId, cache_key: str | None) -> str:
    """Return a short id for the session of all of the tenant's requests with this
    ``prompt_cache_key``, or an empty string if there is no key."""
    if not cache_key:
        return ""
    salted_key = f"{tenant}/{cache_key}".encode(errors="replace")
    return hashlib.blake2b(salted_key, digest_size=12).hexdigest()


def _random_id() -> str:
    return secrets.token_hex(16)


def _random_seed() -> int:
    return secrets.randbits(63)


@dataclass(frozen=True, slots=True)
class RouterIds:
    """Generates request ids and seeds. ``instance_id`` is unique to this router, and a part of its
    request ids."""

    new_id: Callable[[], str] = _random_id
    new_seed: Callable[[], int] = _random_seed
    instance_id: str = field(default_factory=lambda: _random_id()[:8])


@dataclass(slots=True)
class RouterContext:
    """The router's components, wired together. Randomness and time are passed in."""

    config: RouterConfig
    clock: Clock
    cluster: Cluster
    models: ModelDirectory
    tenants: TenantServices
    resources: RequestResources
    telemetry: RouterTelemetry
    ids: RouterIds
    draining: bool = False
    refuses_when_draining: bool = True
    """False if new connections reach other routers, through a shared port or a load balancer. Then
    clients that are still connected to this router are served while it drains."""

    @classmethod
    def build(
        cls,
        config: RouterConfig,
        clock: Clock,
        cluster: Cluster,
        models: Sequence[ServedModel],
        authenticator: Authenticator,
        *,
        telemetry: RouterTelemetry | None = None,
        ids: RouterIds | None = None,
        usage_store: UsageStore | None = None,
        quota_store: QuotaStore | None = None,
        refuses_when_draining: bool = True,
    ) -> "RouterContext":
        """Wire the components of a router together. Defaults: telemetry and usage are kept in
        memory, and ids are random; without ``quota_store``, quotas are not shared between
        routers."""
        telemetry, ids = telemetry or RouterTelemetry(), ids or RouterIds()
        tenants = TenantServices(
            authenticator,
            config.max_concurrent_requests,
            telemetry.metrics.tenants,
            clock,
            router_id=ids.instance_id,
            num_routers=lambda: cluster.num_routers,
            usage_store=usage_store,
            quota_store=quota_store,
        )
        return cls(
            config,
            clock,
            cluster,
            ModelDirectory(models, config.max_concurrent_requests),
            tenants,
            RequestResources(BodyBudget(config.max_inflight_body_bytes)),
            telemetry,
            ids,
            refuses_when_draining=refuses_when_draining,
        )

    def check_not_draining(self) -> None:
        """Raise Unavailable while this router drains, unless new clients reach other routers
        through a shared port or a load balancer."""
        if self.draining and self.refuses_when_draining:
            raise Unavailable("this router is draining")

    def ignored_fields(self, tenant_id: TenantId) -> IgnoredFields:
        """Return an object that will collect the ignored fields of one of the tenant's requests.
        Its ``is_strict`` is True if unknown fields in the tenant's requests are refused."""
        of_tenant = self.tenants.authenticator.directory.tenant(tenant_id).strict_fields
        return IgnoredFields(
            is_strict=self.config.strict_fields if of_tenant is None else of_tenant
        )

    def raw_body(self, tenant_id: TenantId) -> RawBody:
        """Return an empty body, to be filled with the bytes that this tenant sends."""
        weight = self.tenants.authenticator.directory.tenant(tenant_id).weight
        return self.resources.body_budget.new_body(
            tenant_id, weight, shared=self.tenants.admission.is_shared
        )

    def stored_bytes(self, tenant_id: TenantId) -> StoredBytesShare:
        """Return an object that will count the stored responses that one of the tenant's requests
        has in memory."""
        weight = self.tenants.authenticator.directory.tenant(tenant_id).weight
        return self.resources.stored_bytes.new_share(
            tenant_id, weight, shared=self.tenants.admission.is_shared
        )

    def kept_logprobs(self, tenant_id: TenantId, body: ChatBody | CompletionBody) -> KeptLogprobs:
        """Return an object that will count the logprobs that are kept for one of the tenant's
        requests."""
        weight = self.tenants.authenticator.directory.tenant(tenant_id).weight
        param = "top_logprobs" if isinstance(body, ChatBody) else "logprobs"
        return self.resources.logprobs_budget.new_request(
            tenant_id, weight, param, shared=self.tenants.admission.is_shared
        )

    def request_context(
        self,
        model: ServedModel,
        tenant: TenantId,
        body: ChatBody | CompletionBody,
        request_id: str,
    ) -> RequestContext:
        """Return the context of a request. It keeps the tenant's attributes and the variant as they
        are now, since the tenants file and the workers may change later."""
        standing = self.tenants.authenticator.directory.tenant(tenant).attributes(
            self.config.tenant_secret,
            body.cache_salt,
            body.priority or 0,
            exact_kv=bool(body.exact_kv),
        )
        session = (
            make_session_id(tenant, body.prompt_cache_key) if isinstance(body, ChatBody) else ""
        )
        field = body.attention_window
        window = None if field is None else field.window
        variant = next(iter(model.workers.rank_variants(session or request_id)), None)
        return RequestContext(model, tenant, standing, variant, session, window)

    def preprocessor(self, request_context: RequestContext) -> Preprocessor:
        model = request_context.model
        return Preprocessor(
            model.text.tokenizer,
            model.text.output_format,
            model.limits,
            request_context.hasher,
            self.ids.new_seed(),
        )

    def create_choice_streams(
        self,
        request_id: str,
        request_context: RequestContext,
        body: ChatBody | CompletionBody,
        prompts: Sequence[Prompt],
        arrived_at: float,
    ) -> list[ChoiceStream]:
        """Create a stream for each answer to each prompt, in the order of the answers' indexes."""
        model, tenant = request_context.model, request_context.tenant
        attributes, variant = request_context.attributes, request_context.variant
        total = len(prompts) * body.num_candidates
        choices: list[ChoiceStream] = []
        create_parser = _parser_factory(model.text, body)
        for prompt in prompts:
            for number in range(body.num_candidates):
                name = request_id if total == 1 else f"{request_id}-{len(choices)}"
                size = len(prompt.token_ids)
                record = GenerationRecord(
                    RequestId(name),
                    arrived_at,
                    size,
                    tenant,
                    attributes.has_slo,
                    model=model.name,
                    variant=variant,
                    exact_kv=attributes.exact_kv,
                )
                if prompt.prefix_pins and number == 0 and model.prefix_pinner is not None:
                    model.prefix_pinner.pin_when_stored(record, prompt.prefix_pins)
                spec = _request_spec(prompt, name, number, attributes, self.config.slo_ttft_seconds)
                window = request_context.attention_window
                if model.adapter is not None or window is not None:
                    spec = replace(spec, adapter=model.adapter, attention_window=window)
                generation = Generation(
                    model.generation_context,
                    spec,
                    tenant,
                    model.name,
                    variant,
                    prompt.block_keys,
                    record,
                    request_context.session,
                )
                choices.append(
                    _create_choice_stream(
                        model.text, len(choices), generation, body, prompt, create_parser(prompt)
                    )
                )
        self.telemetry.history.add_records(request_id, [choice.record for choice in choices])
        return choices

    async def run_choices(
        self, choices: Sequence[ChoiceStream], emit: DeltaHandler, sink: InlineSink | None = None
    ) -> None:
        """Run all streams to their ends. The first failure cancels the others, and is raised."""
        if len(choices) == 1:
            await self._run_choice(choices[0], emit, sink)
            return
        failure: BatonError | None = None
        try:
            async with asyncio.TaskGroup() as tasks:
                for choice in choices:
                    tasks.create_task(self._run_choice(choice, emit, sink))
        except* BatonError as group:
            failure = _first_leaf_error(group)
        if failure is not None:
            raise failure

    async def _run_choice(
        self, choice: ChoiceStream, emit: DeltaHandler, sink: InlineSink | None
    ) -> None:
        """Run one stream, and record exactly one terminal state: complete, error or cancelled."""
        record = choice.record
        self.telemetry.metrics.running.inc()
        self.telemetry.history.begin(record)
        try:
            record.record_end(await choice.run(emit, sink), self.clock.monotonic())
        except BatonError as error:
            record.record_end("error", self.clock.monotonic(), str(error))
            _log_failure(record, error)
            raise
        except asyncio.CancelledError:
            record.record_end("cancelled", self.clock.monotonic())
            raise
        finally:
            record.record_end("error", self.clock.monotonic(), "internal error")
            self.telemetry.metrics.running.dec()
            self.telemetry.history.end(record)
            self.telemetry.metrics.record_answer(record)


def _parser_factory(
    text: ModelText, body: ChatBody | CompletionBody
) -> Callable[[Prompt], OutputParser | None]:
    """Return a function that creates a parser for an answer to a prompt. What the parsers of all
    the request's answers share is computed here, once."""
    if not isinstance(body, ChatBody):
        return lambda prompt: None
    tools, forced, max_calls = body.offered_tools, body.forces_tool_call, body.max_tool_calls
    return lambda prompt: text.output_format.create_parser(
        tools, forced=forced, in_reasoning=prompt.starts_in_reasoning, max_calls=max_calls
    )


def _create_choice_stream(
    text: ModelText,
    index: int,
    generation: Generation,
    body: ChatBody | CompletionBody,
    prompt: Prompt,
    parser: OutputParser | None,
) -> ChoiceStream:
    shown_special_ids = (
        text.output_format.visible_special_ids if parser is not None else frozenset[int]()
    )
    if body.skip_special_tokens is False:
        shown_special_ids = text.tokenizer.special_ids
    return ChoiceStream(
        index,
        generation,
        text.tokenizer.make_detokenizer(shown_special_ids),
        body.stop,
        emit_every_step=bool(body.return_token_ids) or body.num_logprobs is not None,
        parser=parser,
        include_stop=bool(body.include_stop_str_in_output),
        build_prompt_logprobs=_prompt_logprobs_builder(prompt, text.tokenizer),
        offset=len(prompt.echo_text),
        prompt_only=prompt.prompt_only,
        shows_logprobs=body.num_logprobs is not None,
    )


def _prompt_logprobs_builder(prompt: Prompt, tokenizer: Tokenizer) -> PromptLogprobsBuilder | None:
    if prompt.sampling.prompt_logprobs is None:
        return None
    return partial(build_prompt_token_entries, prompt.token_ids, tokenizer)


def _request_spec(
    prompt: Prompt, name: str, number: int, attributes: TenantAttributes, ttft_slo_seconds: float
) -> RequestSpec:
    sampling = prompt.sampling
    if number:
        sampling = replace(sampling, seed=(sampling.seed + number) % 2**64)
    return RequestSpec(
        request_id=RequestId(name),
        epoch=Epoch(1),
        token_ids=prompt.token_ids,
        num_prompt_tokens=len(prompt.token_ids),
        sampling=sampling,
        tenant_salt=attributes.salt,
        ttft_slo_seconds=ttft_slo_seconds if attributes.has_slo else 0.0,
        tenant=attributes.tag,
        priority=attributes.priority,
        weight=attributes.weight,
        exact_kv=attributes.exact_kv,
    )


def _log_failure(record: GenerationRecord, error: BatonError) -> None:
    """Log a refusal at level info, since the client sent an invalid request or may retry; log any
    other error as a warning."""
    is_refusal = isinstance(error, Overloaded | Invalid)
    write, event = (log.info, "request_refused") if is_refusal else (log.warning, "request_failed")
    write(event, error=str(error), placements=len(record.placements), **record.log_fields)


def _first_leaf_error(group: BaseExceptionGroup[BatonError]) -> BatonError:
    first = group.exceptions[0]
    return _first_leaf_error(first) if isinstance(first, BaseExceptionGroup) else first
