"""Tests a cluster with a lossy KV codec: which codec answers name, and that requests that want
exact KV share no cached prefix with the others."""

from collections.abc import Iterator

import pytest

from testkit.local_cluster import LocalCluster, local_cluster

FIELDS = {"max_tokens": 4, "temperature": 0, "ignore_eos": True}
PROMPT = "def parse(text):\n    return text.split()\n" * 20


@pytest.fixture(scope="module")
def lossy_cluster() -> Iterator[LocalCluster]:
    settings: dict[str, object] = {"kv_codec_wire": "int4", "transports": "grpc"}
    with local_cluster(prefill=1, decode=1, settings=settings) as running:
        yield running


def test_exact_requests_share_no_prefix_with_others(lossy_cluster: LocalCluster) -> None:
    def ask(*, exact_kv: bool) -> tuple[str, int]:
        """Return the codec that the answer names, and the number of cached tokens."""
        body = {"prompt": PROMPT, "exact_kv": exact_kv, **FIELDS}
        answer, headers = lossy_cluster.post_with_headers("/v1/completions", body)
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        return headers["x-baton-kv-codec"], cached

    assert ask(exact_kv=False) == ("int4", 0)
    codec, cached = ask(exact_kv=False)
    assert codec == "int4" and cached > 0
    codec, cached = ask(exact_kv=True)
    assert codec in ("none", "lossless") and cached == 0
    assert ask(exact_kv=True)[1] > 0


def test_explanation_has_the_codecs_that_were_considered(lossy_cluster: LocalCluster) -> None:
    considered = {}
    for exact_kv in (False, True):
        body = {"prompt": f"{exact_kv} {PROMPT}", "exact_kv": exact_kv, **FIELDS}
        _, headers = lossy_cluster.post_with_headers("/v1/completions", body)
        explained = lossy_cluster.get(f"/admin/requests/{headers['x-baton-request-id']}")
        codecs = explained["kv_codec"]
        seconds = codecs["decode_start_seconds"]
        assert codecs["chosen"] == min(seconds, key=seconds.get)
        considered[exact_kv] = set(seconds)
    assert considered == {False: {"none", "lossless", "int4"}, True: {"none", "lossless"}}
    [model] = lossy_cluster.get("/v1/models")["data"]
    assert model["kv_codec"] == "int4"
