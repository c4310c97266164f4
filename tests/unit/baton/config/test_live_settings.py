"""Tests that each program uses new values of its live settings while it runs."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from baton.clock import ManualClock, SystemClock
from baton.config import Reader, Settings, live_settings
from baton.core.ids import Incarnation, WorkerId
from baton.core.member import Member
from baton.core.states import Role, WorkerState
from baton.serve.lifecycle import AppliesSettings, Lifecycle
from baton.worker.program import WorkerProgram
from conductor.program import ConductorProgram
from kvstore.program import KvStoreProgram
from router.program import RouterProgram
from router.telemetry.slo import SloTargets
from testkit.fakes.registry import MemoryRegistry
from tests.unit.baton.worker.test_engine_thread import new_engine
from tests.unit.router.test_router_program import (
    member,
    registry,
    settings,
    wait_until_ready,
    worker,
)

__all__ = ["registry", "settings"]  # fixtures

NEW_VALUES: dict[str, Any] = {
    "body_timeout_seconds": 1.5,
    "first_token_timeout_seconds": 2.5,
    "max_body_bytes": 1000,
    "max_concurrent_requests": 3,
    "max_inflight_body_bytes": 5000,
    "next_token_timeout_seconds": 3.5,
    "placement_timeout_seconds": 4.5,
    "request_timeout_seconds": 5.5,
    "slo_itl_seconds": 0.125,
    "slo_ttft_seconds": 0.25,
    "strict_fields": True,
    "tenant_concurrent_uploads": 1,
    "tenant_file_bytes": 6000,
    "tenant_files": 7,
    "tenant_uploads_per_minute": 8,
    "trace_endpoint": "http://127.0.0.1:9",
    "trace_sample": 0.5,
}
NEW_CONDUCTOR_VALUES: dict[str, Any] = {
    "admission": True,
    "kubernetes_initial_replicas": {"baton-decode": 2},
    "max_sequences": 9,
    "max_short_prompt_advantage": 0.5,
    "slo_itl_seconds": 0.125,
    "slo_ttft_seconds": 0.25,
    "trace_endpoint": "http://127.0.0.1:9",
}


def router_values(program: RouterProgram) -> dict[str, Any]:
    """Return the values of live settings in a router, read from the objects that requests use."""
    context, batches = program._context, program._batch_service
    failover, files = context.models.all[0].generation_context.config, batches._file_limits
    tracer, slo = context.telemetry.tracer, program._metrics._slo
    assert isinstance(slo, SloTargets)
    assert context.config.max_body_bytes == batches._runner.max_line_bytes
    assert program._listeners is not None
    assert context.config.max_body_bytes == program._listeners._server._limits.max_body_bytes
    assert context.config.slo_ttft_seconds == slo.ttft_seconds
    assert context.config.max_concurrent_requests == context.tenants.request_limiter._limit
    assert context.config.max_concurrent_requests == context.models.limiter._limit
    assert failover.timeouts.kv_transfer_timeout_seconds == (
        failover.timeouts.first_token_timeout_seconds
    )
    return {
        "body_timeout_seconds": context.config.body_timeout_seconds,
        "first_token_timeout_seconds": failover.timeouts.first_token_timeout_seconds,
        "max_body_bytes": context.config.max_body_bytes,
        "max_concurrent_requests": context.config.max_concurrent_requests,
        "max_inflight_body_bytes": context.resources.body_budget._limit,
        "next_token_timeout_seconds": failover.timeouts.next_token_timeout_seconds,
        "placement_timeout_seconds": failover.placement_timeout_seconds,
        "request_timeout_seconds": context.config.request_timeout_seconds,
        "slo_itl_seconds": slo.itl_seconds,
        "slo_ttft_seconds": slo.ttft_seconds,
        "strict_fields": context.config.strict_fields,
        "tenant_concurrent_uploads": files.concurrent_uploads,
        "tenant_file_bytes": files.file_bytes,
        "tenant_files": files.files,
        "tenant_uploads_per_minute": files.uploads_per_minute,
        "trace_endpoint": program._span_export._endpoint,
        "trace_sample": tracer._limit / 16**8 if tracer is not None else 1.0,
    }


@pytest.fixture
async def router(settings: Settings, registry: MemoryRegistry) -> AsyncIterator[RouterProgram]:
    """A router that serves, with one worker."""
    async with worker() as (_, ref, _):
        await registry.announce(member("w", Role.DECODE, ref.address), 60)
        program = RouterProgram(settings)
        lifecycle = Lifecycle(program, 5)
        living = asyncio.create_task(lifecycle.run())
        await wait_until_ready(registry)
        yield program
        lifecycle.request_stop()
        await living


async def test_a_router_uses_all_its_live_settings(
    settings: Settings, router: RouterProgram
) -> None:
    names = live_settings(Reader.ROUTER) - {"log_level"}
    assert NEW_VALUES.keys() == names
    assert router_values(router) == {name: getattr(settings, name) for name in names}
    await router.apply_settings(settings.model_copy(update=NEW_VALUES))
    assert router_values(router) == NEW_VALUES
    await router.apply_settings(settings)
    assert router_values(router) == {name: getattr(settings, name) for name in names}
    assert router._context.telemetry.tracer is None


async def test_a_router_refuses_by_its_new_limits(
    settings: Settings, router: RouterProgram
) -> None:
    body = {"model": Path(settings.model).name, "text": "hello" * 10}
    async with httpx.AsyncClient(base_url=f"http://{router.address}") as client:

        async def status() -> int:
            return (await client.post("/tokenize", json=body)).status_code

        statuses = [await status()]
        for size in (20, 20_000):
            await router.apply_settings(settings.model_copy(update={"max_body_bytes": size}))
            statuses.append(await status())
    assert statuses == [statuses[0], 413, statuses[0]] and statuses[0] != 413


async def test_a_conductor_uses_all_its_live_settings(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert NEW_CONDUCTOR_VALUES.keys() == live_settings(Reader.CONDUCTOR) - {"log_level"}
    fake = MemoryRegistry(SystemClock())
    monkeypatch.setattr("conductor.program.RedisRegistry", lambda *_: fake)
    program = ConductorProgram(settings)
    worker = Member(WorkerId("w"), Role.DECODE, "w:1", Incarnation(1), WorkerState.READY, model="m")
    await fake.announce(worker, 60)
    await program.start()
    try:
        conductor = program._conductor._add_model("m")
        new = settings.model_copy(
            update=NEW_CONDUCTOR_VALUES | {"placement_policy": "full_scan", "local_prefill": True}
        )
        await program.apply_settings(new)
        config, planner = conductor._config, conductor._planner.config
        assert program._conductor._config.admission is True  # that of models to come
        assert (config.admission, config.ttft_slo_seconds, config.itl_slo_seconds) == (
            True, 0.25, 0.125,
        )  # fmt: skip
        assert config.max_short_prompt_advantage == 0.5
        assert (planner.max_batch, planner.sizing.ttft_slo_seconds) == (9, 0.25)
        assert planner.sizing.itl_slo_seconds == 0.125
        assert (config.policy, config.local_prefill) == ("baton", None)  # not live
        assert program._telemetry._spans is program._span_export.sink is not None
        assert program._initial_replicas() == {"baton-decode": 2}
    finally:
        await program.stop()


def test_an_engine_plans_by_a_new_inter_token_latency() -> None:
    engine = new_engine()
    budget = engine._costs._prefill_budget
    assert budget.max_prefill_tokens(8, 8_000, 0, 512) == 512
    engine.set_target_inter_token_latency(0.05)
    assert budget.max_prefill_tokens(8, 8_000, 0, 512) == 32
    engine.set_target_inter_token_latency(None)
    assert budget.max_prefill_tokens(8, 8_000, 0, 512) == 512


async def test_a_worker_passes_a_new_latency_and_endpoint_on() -> None:
    """The engine's thread gets the new ITL SLO, and the telemetry gets the span sink for the new
    trace endpoint."""
    targets: list[float | None] = []

    class Thread:
        async def call(self, command: Callable[[Any], None]) -> None:
            command(self)

        def set_target_inter_token_latency(self, seconds: float | None) -> None:
            targets.append(seconds)

    class Telemetry:
        sinks: list[Any] = []  # noqa: RUF012

        def use_spans(self, sink: Any) -> None:
            self.sinks.append(sink)

    assert live_settings(Reader.WORKER) == {"log_level", "slo_itl_seconds", "trace_endpoint"}
    started = Settings(redis_url="redis://127.0.0.1:1/0")
    program = WorkerProgram(started, Role.DECODE, None, ManualClock())  # type: ignore[arg-type]
    program._thread, program._telemetry = Thread(), Telemetry()  # type: ignore[assignment]
    new = {"slo_itl_seconds": 0.125, "trace_endpoint": "http://127.0.0.1:9"}
    await program.apply_settings(started.model_copy(update=new))
    assert targets == [0.125]
    assert Telemetry.sinks == [None, program._span_export.sink]
    await program._span_export.close()
    await program._registry.close()


def test_which_programs_have_live_settings_besides_the_log_level() -> None:
    programs = (RouterProgram, ConductorProgram, WorkerProgram, KvStoreProgram)
    assert [issubclass(each, AppliesSettings) for each in programs] == [True, True, True, False]
    assert live_settings(Reader.KVSTORE) == live_settings(Reader.MOCK) == {"log_level"}
