"""Tests that KV which may have passed a lossy codec is kept apart from exact KV: block keys,
requests, tenants, and what clients are told. Workers with different codecs: test_variants.py."""

from typing import Any

import httpx
import orjson
import pytest

from baton.config import Settings, load_settings
from baton.core.block_key import KeyRoot, block_keys
from baton.core.ids import Epoch, Incarnation, RequestId, TenantId, TokenId, WorkerId
from baton.core.kv_codec import CodecSpeed, KvCodecName, KvCodecs
from baton.core.kv_transfer import WorkerRef
from baton.core.member import Member
from baton.core.placement import Placement, ScoredCodec
from baton.core.request import RequestSpec, SamplingParams
from baton.core.states import Role, WorkerState
from baton.engine.key_chain import BlockKeyChainFactory
from baton.errors import Invalid
from baton.registry.member_codec import member_from_json, member_to_json
from baton.rpc.convert.placement import placement_from_proto, placement_to_proto
from baton.rpc.v1 import conductor_pb2 as pb
from baton.text.tokenizer import Tokenizer
from baton.worker.model_loading import configured_codecs
from router.tenants.tenants_file import parse_tenants_file
from tests import router_harness
from tests.router_harness import (
    CHAT,
    COMPLETE,
    RESPOND,
    RouterHarness,
    chat,
    member,
    open_harness,
    wrong_error,
)
from tests.unit.router.tenants.test_router_tenants import of, open_router, tenant

tokenizer = router_harness.tokenizer
NONE, LOSSLESS, FP8, INT4, INT2 = KvCodecName
MESSAGES = "/v1/messages"
HEADER = "x-baton-kv-codec"
PROMPT = tuple(TokenId(token) for token in range(1, 10))


@pytest.mark.parametrize(
    ("codecs", "strongest", "lossy"),
    [
        (KvCodecs(), NONE, ""),
        (KvCodecs(wire=LOSSLESS), LOSSLESS, ""),
        (KvCodecs(FP8, LOSSLESS, NONE), FP8, "fp8"),
        (KvCodecs(FP8, INT4, NONE), INT4, "int4"),
        (KvCodecs(INT4, NONE, INT2), INT2, "int2"),
    ],
)
def test_lossiest_configured_codec_counts(
    codecs: KvCodecs, strongest: KvCodecName, lossy: str
) -> None:
    assert (codecs.strongest, codecs.lossy) == (strongest, lossy)


def test_every_codec_setting_decides_about_the_block_keys() -> None:
    """A codec that the block keys don't know of would put lossy KV under keys of exact KV."""
    names = [n for n, f in Settings.model_fields.items() if isinstance(f.default, KvCodecName)]
    assert {"kv_codec_wire", "kv_codec_disk"} <= set(names)
    for name in names:
        assert configured_codecs(load_settings(**{name: "int4"})).lossy == "int4", name


# -- block keys ---------------------------------------------------------------------------------


def spec(*, exact_kv: bool = False) -> RequestSpec:
    return RequestSpec(
        RequestId("r"),
        Epoch(1),
        PROMPT,
        len(PROMPT),
        SamplingParams(1),
        exact_kv=exact_kv,
    )


def test_only_keys_of_exact_requests_are_those_without_a_codec() -> None:
    plain = BlockKeyChainFactory(b"model", "float32", 4)
    lossy = BlockKeyChainFactory(b"model", "float32", 4, lossy_codec="int4")
    root = KeyRoot(b"model", "float32", 4)
    exact = block_keys(root.key(), PROMPT, 4)
    assert plain.make_chain(spec()).keys == exact
    assert plain.make_chain(spec(exact_kv=True)).keys == exact
    assert lossy.make_chain(spec(exact_kv=True)).keys == exact
    other = block_keys(KeyRoot(b"model", "float32", 4, lossy_codec="int4").key(), PROMPT, 4)
    assert lossy.make_chain(spec()).keys == other
    assert not set(exact) & set(other)


# -- workers ------------------------------------------------------------------------------------


def test_member_record_has_the_codecs_and_their_speeds() -> None:
    speed = CodecSpeed(INT4, 0.28, 4e9, 5e9)
    original = Member(
        WorkerId("a"), Role.PREFILL, "a:1", Incarnation(1), WorkerState.READY,
        kv_codecs=KvCodecs(INT4, LOSSLESS, INT2), codec_speeds=(speed,),
    )  # fmt: skip
    assert member_from_json(member_to_json(original)) == original
    fields = orjson.loads(member_to_json(original))
    older = {k: v for k, v in fields.items() if k not in ("kv_codecs", "codec_speeds")}
    from_older = member_from_json(orjson.dumps(older))
    assert (from_older.kv_codecs, from_older.codec_speeds) == (KvCodecs(), ())
    lossy = (original.variant.lossy_codec, from_older.variant.lossy_codec)
    assert lossy == ("int2", "")
    for wrong in (
        {"kv_codecs": {"wire": "mp3"}},
        {"kv_codecs": 7},
        {"codec_speeds": [fields["codec_speeds"][0]] * 6},
        {"codec_speeds": [fields["codec_speeds"][0] | {"decode_bytes_per_second": 0}]},
    ):
        with pytest.raises(Invalid, match="not a valid member"):
            member_from_json(orjson.dumps(fields | wrong))


def test_placement_keeps_its_codecs_on_the_wire_and_drops_unknown_ones() -> None:
    reference = WorkerRef(WorkerId("d"), "d:1", Incarnation(1))
    placed = Placement(
        None, reference, "", kv_codec=INT4,
        codec_alternatives=(ScoredCodec(INT4, 0.5), ScoredCodec(NONE, 1.5)),
    )  # fmt: skip
    assert placement_from_proto(placement_to_proto(placed)) == placed
    newer = placement_to_proto(placed)
    newer.kv_codec = "fp2"
    newer.codec_alternatives.append(pb.CodecAlternative(codec="fp2", decode_start_seconds=0.1))
    read = placement_from_proto(newer)
    assert (read.kv_codec, read.codec_alternatives) == (NONE, placed.codec_alternatives)


# -- the API ------------------------------------------------------------------------------------


def use_codecs(router: RouterHarness, codecs: KvCodecs) -> None:
    router.members.list = [
        member(name, role, kv_codecs=codecs)
        for name, role in (("p0", Role.PREFILL), ("d0", Role.DECODE))
    ]


REQUESTS: dict[str, dict[str, Any]] = {
    CHAT: chat(max_tokens=2),
    COMPLETE: {"prompt": "abcdefgh", "max_tokens": 2},
    RESPOND: {"input": "Hi", "max_output_tokens": 2},
    MESSAGES: {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2},
}


async def _post(
    client: httpx.AsyncClient, path: str, fields: dict[str, Any], tenant_name: str = ""
) -> httpx.Response:
    headers = of(tenant_name) if tenant_name else {}
    answer = await client.post(path, json={**REQUESTS[path], **fields}, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer


@pytest.mark.parametrize("path", REQUESTS)
async def test_answer_names_the_lossy_codec_unless_the_request_wants_exact_kv(
    tokenizer: Tokenizer, path: str
) -> None:
    router = RouterHarness(tokenizer, "Hi", True)
    use_codecs(router, KvCodecs(wire=INT4))
    async with await router.client() as client:
        for exact_kv, codec in ((None, "int4"), (False, "int4"), (True, "none")):
            fields = {} if exact_kv is None else {"exact_kv": exact_kv}
            for stream in (False, True):
                answer = await _post(client, path, {"stream": stream, **fields})
                assert answer.headers[HEADER] == codec
                assert "x-baton-ignored-fields" not in answer.headers
            submitted = router.decode.submitted[-1].spec
            assert submitted.exact_kv is bool(exact_kv)
            query = router.placer.queries[-1]
            assert query.exact_kv is bool(exact_kv)
            root = KeyRoot(
                b"\xab", "f32", 4, tenant_salt=submitted.tenant_salt,
                lossy_codec="" if exact_kv else "int4",
            )  # fmt: skip
            assert list(query.block_keys) == block_keys(root.key(), submitted.token_ids, 4)


async def test_codec_of_the_placement_reaches_both_workers_and_the_explanation(
    tokenizer: Tokenizer,
) -> None:
    router = RouterHarness(tokenizer, "Hi", True)
    use_codecs(router, KvCodecs(wire=INT4))
    router.placer.codecs = (ScoredCodec(LOSSLESS, 0.5), ScoredCodec(NONE, 1.5))
    async with await router.client() as client:
        answer = await _post(client, COMPLETE, {"exact_kv": True})
        assert answer.headers[HEADER] == "lossless"
        codecs = {each.submitted[-1].spec.kv_codec for each in (router.prefill, router.decode)}
        assert codecs == {LOSSLESS}
        name = answer.headers["x-baton-request-id"]
        explained = router.service.telemetry.history.explain(name)
        assert explained is not None
        assert explained["kv_codec"] == {
            "chosen": "lossless",
            "decode_start_seconds": {"lossless": 0.5, "none": 1.5},
        }


@pytest.mark.parametrize("codecs", [KvCodecs(), KvCodecs(LOSSLESS, LOSSLESS, LOSSLESS)])
async def test_answers_are_unchanged_without_a_lossy_codec(
    tokenizer: Tokenizer, codecs: KvCodecs
) -> None:
    router = RouterHarness(tokenizer, "Hi", True)
    use_codecs(router, codecs)
    async with await router.client() as client:
        for path in REQUESTS:
            answer = await _post(client, path, {"exact_kv": True})
            assert HEADER not in answer.headers
        assert "kv_codec" not in (await client.get("/v1/models/demo")).json()


async def test_models_name_their_codec(tokenizer: Tokenizer) -> None:
    router = RouterHarness(tokenizer, "Hi", True)
    use_codecs(router, KvCodecs(store=FP8, disk=INT2))
    async with await router.client() as client:
        [listed] = (await client.get("/v1/models")).json()["data"]
        assert listed["kv_codec"] == "int2"


async def test_exact_kv_must_be_true_or_false(tokenizer: Tokenizer) -> None:
    async with open_harness(tokenizer) as (_, client):
        for path in (CHAT, COMPLETE, RESPOND):
            answer = await client.post(path, json={**REQUESTS[path], "exact_kv": "yes"})
            error = wrong_error(answer)
            assert error["param"] == "exact_kv" and "boolean" in error["message"]
        answer = await client.post(MESSAGES, json={**REQUESTS[MESSAGES], "exact_kv": "yes"})
        assert answer.status_code == 400
        assert "exact_kv" in answer.json()["error"]["message"]


async def test_tenant_with_exact_kv_wins_over_its_requests(tokenizer: Tokenizer) -> None:
    careful, other = tenant("careful", exact_kv=True), tenant("other")
    async with open_router(tokenizer, careful, other) as (router, client):
        for name, given, exact in (
            ("careful", {}, True),
            ("careful", {"exact_kv": False}, True),
            ("other", {}, False),
            ("other", {"exact_kv": True}, True),
        ):
            await _post(client, COMPLETE, given, name)
            assert router.decode.submitted[-1].spec.exact_kv is exact


def test_exact_kv_in_the_tenants_file() -> None:
    file = b"{defaults: {exact_kv: true}, tenants: {a: {exact_kv: false}, default: {}}}"
    directory = parse_tenants_file(file)
    assert not directory.tenant(TenantId("a")).exact_kv
    assert directory.tenant(TenantId("default")).exact_kv
    with pytest.raises(Invalid, match=r"tenant 'a': exact_kv is 'always': .*boolean"):
        parse_tenants_file(b"{tenants: {a: {exact_kv: always}}}")
