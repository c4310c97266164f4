"""Tests what is told about attached servers before anything is served."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from attached_worker.server import Seeds
from attached_worker.server_check import check_servers
from attached_worker.vllm_server import PLUGIN_FOLDER
from baton.config import Settings
from baton.errors import Invalid, Unavailable
from testkit.fakes.vllm_server import FakeVllmThread, vllm_servers
from testkit.model_zoo import make_model

HUB_MODEL = "hub/demo"
FLAG = "cached tokens are not counted: add --enable-prompt-tokens-details"


@pytest.fixture
def servers() -> Iterator[FakeVllmThread]:
    with vllm_servers() as thread:
        yield thread


def attach(*urls: str) -> Settings:
    return Settings(attach=tuple(f"mixed={url}" for url in urls), prefill=0, decode=0)


def test_servers_are_described(servers: FakeVllmThread) -> None:
    whole = servers.start(HUB_MODEL)
    lacking = servers.start(HUB_MODEL, counts_cached_tokens=False, has_prefix_caching=False)
    anew = servers.start(HUB_MODEL, seeds=Seeds.IGNORED, has_lark=False)
    old = servers.start(HUB_MODEL, version="0.24.0")
    reports = check_servers(attach(whole.url, lacking.url, old.url, anew.url))
    assert reports[0].describe() == (
        "vllm 0.32.0, served-model from hub/demo, 200 blocks of 16 tokens, 4096 tokens at most; "
        "it offers /v1/completions, /v1/chat/completions"
    )
    assert [report.url for report in reports] == [whole.url, lacking.url, old.url, anew.url]
    assert [report.advice for report in reports] == [
        (),
        (FLAG, "prefixes are computed anew each time: add --enable-prefix-caching"),
        ("vLLM 0.24.0 is not tested: use 0.28 or newer",),
        (
            "seeds are ignored, and sampled answers that continue elsewhere change: start it with "
            f"PYTHONPATH={PLUGIN_FOLDER} and --logits-processors seed_by_position:SeedByPosition",
            "strict and required tool calls are refused: add --structured-outputs-config "
            """'{"backend":"guidance"}'""",
        ),
    ]


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"version": "0.11.2"}, "is vLLM 0.11.2, which would ignore grammars: use 0.12 or newer"),
        ({"has_statistics": False}, "must be started without --disable-log-stats"),
        ({"api_key": "k"}, "must be started without --api-key"),
        ({"refusal": "The model does not support Completions API"}, "does not support Completions"),
    ],
)
def test_a_server_that_cannot_be_used_is_told_with_the_flag(
    servers: FakeVllmThread, fields: dict[str, object], problem: str
) -> None:
    fake = servers.start(HUB_MODEL, **fields)
    [report] = check_servers(attach(fake.url))
    with pytest.raises(Invalid, match=problem) as raised:
        report.describe()
    assert fake.url in str(raised.value)


def test_other_weights_are_told(servers: FakeVllmThread, tmp_path: Path) -> None:
    other = make_model(tmp_path / "other", "llama", seed=1)
    fake = servers.start(str(other))
    [report] = check_servers(attach(fake.url))
    with pytest.raises(Invalid, match=f"has loaded {other}, but the cluster's model is"):
        report.describe()


def test_weights_that_cannot_be_compared_are_told_if_their_names_differ(
    servers: FakeVllmThread,
) -> None:
    reports = check_servers(attach(*[servers.start(each).url for each in ("a/demo", "a/other")]))
    assert reports[0].advice == ()
    (advice,) = reports[1].advice
    assert advice.startswith("it has loaded a/other, which can't be compared with the cluster's")
    assert advice.endswith("name the server's as model (--model)")


def test_a_server_of_a_pair_needs_a_connector(servers: FakeVllmThread) -> None:
    pair = [servers.start(HUB_MODEL, lends_kv=lends) for lends in (True, False)]
    urls = (f"prefill={pair[0].url}", f"decode={pair[1].url}")
    whole, lacking = check_servers(Settings(attach=urls, prefill=1, decode=1))
    assert whole.error is None
    with pytest.raises(Invalid, match="--kv-transfer-config"):
        lacking.describe()


def test_a_build_from_source_counts_as_new(servers: FakeVllmThread) -> None:
    fake = servers.start(HUB_MODEL, version="0.1.dev9999+g0123abc")
    [report] = check_servers(attach(fake.url))
    assert report.error is None and report.advice == ()


def test_a_server_that_does_not_respond() -> None:
    [report] = check_servers(attach("http://127.0.0.1:1"))
    with pytest.raises(Unavailable, match=r"http://127\.0\.0\.1:1 can't be reached"):
        report.describe()


def test_nothing_is_checked_without_attached_servers() -> None:
    assert check_servers(Settings()) == []


def test_doctor_names_servers_and_what_they_lack(servers: FakeVllmThread) -> None:
    lacking = servers.start(HUB_MODEL, counts_cached_tokens=False)
    attached = f"mixed={lacking.url},mixed=http://127.0.0.1:1"
    done = subprocess.run(
        [sys.executable, "-m", "baton", "doctor"],
        env={**os.environ, "BATON_ATTACH": attached},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert f"ok       server {lacking.url}: vllm 0.32.0, served-model from hub/" in done.stdout
    assert f"warning  server {lacking.url}: {FLAG}" in done.stdout
    assert "MISSING  server http://127.0.0.1:1: http://127.0.0.1:1 can't be reached" in done.stdout
