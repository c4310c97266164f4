"""Tests that models of the Hugging Face hub come from the cache first, whatever the hub does."""

import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from queue import SimpleQueue

import huggingface_hub.constants
import pytest
import structlog

from baton.checkpoints import hub
from baton.checkpoints.checkpoint import DEMO_MODEL, load_model_config
from baton.checkpoints.hub import HubModel, pin_model, resolve_model, short_name
from baton.config import Settings
from baton.config.pinned_models import pin_models
from baton.errors import Invalid, Unavailable
from baton.network.free_port import free_port
from testkit.fakes.hub import MODEL_ID, Behaviour, FakeHub, fake_hub
from testkit.gguf_files import write_gguf

PATIENCE_SECONDS = 1.0


def write_model(folder: Path, text: str) -> Path:
    """Write a model that can be downloaded but not loaded."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"text": text}))
    (folder / "model.safetensors").write_text(text)
    (folder / "pytorch_model.bin").write_text("not wanted")
    return folder


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A hub with one commit of the model, and an empty cache."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    with fake_hub() as running:
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        running.push(write_model(tmp_path / "first", "first"))
        yield running


@pytest.fixture
def behave(server: FakeHub, monkeypatch: pytest.MonkeyPatch) -> Callable[[Behaviour], None]:
    """Make the hub behave from now on. A hub that sends nothing is given up after
    ``PATIENCE_SECONDS``."""

    def begin(behaviour: Behaviour) -> None:
        server.behaviour = behaviour
        patience = PATIENCE_SECONDS if behaviour in ("is silent", "is slow") else 60.0
        monkeypatch.setattr(hub, "PATIENCE_SECONDS", patience)
        monkeypatch.setattr(hub, "DOWNLOAD_PATIENCE_SECONDS", patience)

    return begin


def contents(folder: Path) -> dict[str, str]:
    return {each.name: each.read_text() for each in folder.iterdir()}


def test_model_is_downloaded_without_the_files_that_nothing_reads(server: FakeHub) -> None:
    folder = resolve_model(MODEL_ID)
    assert folder.name == server.main
    assert contents(folder) == {"config.json": '{"text": "first"}', "model.safetensors": "first"}


GPT_OSS = {
    "config.json": True, "generation_config.json": True, "chat_template.jinja": True,
    "tokenizer.json": True, "model.safetensors.index.json": True,
    "model-00000-of-00002.safetensors": True, "model-00001-of-00002.safetensors": True,
    "model.fp16.safetensors": False, "README.md": False,
    "original/model.safetensors": False, "original/config.json": False,
    "metal/model.bin": False, "onnx/config.json": False,
}  # fmt: skip
"""Files of a repository, and whether each is needed: like openai/gpt-oss-20b, with a variant."""

LLAMA = {
    "config.json": True, "tokenizer.json": True, "model.safetensors": True,
    "consolidated.safetensors": False, "consolidated.00.pth": False, "params.json": True,
    "pytorch_model.bin": False, "fp16/model.safetensors": False,
    "original/consolidated.00.safetensors": False,
    "unet/diffusion_pytorch_model.safetensors": False,
}  # fmt: skip

CONSOLIDATED = {
    "params.json": True, "tekken.json": True, "consolidated.safetensors": True,
    "fp16/consolidated.safetensors": False,
}  # fmt: skip
"""Without weights under the usual name, all that are there are needed."""


def write_files(folder: Path, names: Iterable[str]) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}")
    shards = [name for name in names if name.startswith("model-")]
    if shards:
        weight_map = {f"layer{number}": name for number, name in enumerate(shards)}
        index = folder / "model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": weight_map}))
    return folder


@pytest.mark.parametrize("files", [GPT_OSS, LLAMA, CONSOLIDATED])
def test_only_what_is_loaded_is_downloaded_of_a_repository(
    server: FakeHub, tmp_path: Path, files: dict[str, bool]
) -> None:
    server.push(write_files(tmp_path / "repository", files))
    folder = resolve_model(MODEL_ID)
    found = {each.relative_to(folder).as_posix() for each in folder.rglob("*") if each.is_file()}
    assert found == {name for name, is_needed in files.items() if is_needed}
    fetched = {each.partition("/resolve/")[2] for each in server.requests}
    assert {each.partition("/")[2] for each in fetched if each} == found
    server.requests.clear()
    assert resolve_model(f"{MODEL_ID}@{folder.name}") == folder
    assert server.requests == []


def test_gguf_file_of_a_repository_is_downloaded_alone(server: FakeHub, tmp_path: Path) -> None:
    repository = write_files(tmp_path / "repository", ["config.json", "model.safetensors"])
    for name in ("Demo.Q8_0.gguf", "deep/Demo.F16.gguf"):
        (repository / name).parent.mkdir(exist_ok=True)
        write_gguf(DEMO_MODEL, repository / name, name.split(".")[1])
    commit = server.push(repository)
    model = f"{MODEL_ID}/deep/Demo.F16.gguf"
    assert pin_model(model) == f"{MODEL_ID}@{commit}/deep/Demo.F16.gguf"
    folder = resolve_model(pin_model(model))
    assert (folder / "model.gguf").read_bytes()[:4] == b"GGUF"
    assert load_model_config(folder).dtype == "float16"
    fetched = {each.partition("/resolve/")[2].partition("/")[2] for each in server.requests}
    assert fetched - {""} == {"deep/Demo.F16.gguf"}
    with pytest.raises(Unavailable, match=r"the repository has no Demo.Q4_0.gguf"):
        resolve_model(f"{MODEL_ID}/Demo.Q4_0.gguf")


def test_branch_follows_the_hub_and_a_commit_does_not(server: FakeHub, tmp_path: Path) -> None:
    first = server.main
    assert pin_model(MODEL_ID) == f"{MODEL_ID}@{first}"
    second = server.push(write_model(tmp_path / "second", "second"))
    num_requests = len(server.requests)
    assert contents(resolve_model(f"{MODEL_ID}@{first}"))["model.safetensors"] == "first"
    assert len(server.requests) == num_requests
    assert pin_model(f"{MODEL_ID}@main") == f"{MODEL_ID}@{second}"


def test_unchanged_branch_costs_one_request_to_the_repository(server: FakeHub) -> None:
    resolve_model(MODEL_ID)
    server.requests.clear()
    resolve_model(MODEL_ID)
    assert [each for each in server.requests if MODEL_ID in each] == [
        f"/api/models/{MODEL_ID}/revision/main"
    ]


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [
        ("is silent", f"it has sent nothing for {PATIENCE_SECONDS:g} s"),
        ("is slow", f"it has sent nothing for {PATIENCE_SECONDS:g} s"),
        ("fails", "503 Service Unavailable"),
    ],
)
def test_cached_commit_is_used_and_logged_once_if_the_hub(
    behaviour: Behaviour, reason: str, behave: Callable[[Behaviour], None]
) -> None:
    cached = resolve_model(MODEL_ID)
    behave(behaviour)
    expect_cached(cached, reason)


def test_cached_commit_is_used_and_logged_once_if_the_hub_refuses(
    server: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached = resolve_model(MODEL_ID)
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    expect_cached(cached, "Connection refused")


def expect_cached(cached: Path, reason: str) -> None:
    with structlog.testing.capture_logs() as lines:
        assert resolve_model(MODEL_ID) == cached
    (line,) = lines
    assert reason in line.pop("reason")
    assert line == {
        "event": "cached_model_used",
        "log_level": "warning",
        "model": MODEL_ID,
        "commit": cached.name,
    }


@pytest.mark.parametrize("behaviour", ["is silent", "is slow", "fails"])
def test_start_without_cached_model_ends_with_the_reason_if_the_hub(
    behaviour: Behaviour, behave: Callable[[Behaviour], None]
) -> None:
    behave(behaviour)
    with pytest.raises(Unavailable, match=f"can't fetch model '{MODEL_ID}' from the hub: "):
        resolve_model(MODEL_ID)


def test_unknown_model_and_revision_are_reported(server: FakeHub) -> None:
    for unknown in ("someone/else", f"{MODEL_ID}@nowhere"):
        with pytest.raises(Unavailable, match=r"from the hub: .*404 Not Found"):
            resolve_model(unknown)


def test_incomplete_download_of_a_newer_commit_leaves_the_cached_one(
    server: FakeHub, behave: Callable[[Behaviour], None], tmp_path: Path
) -> None:
    cached = resolve_model(MODEL_ID)
    newer = write_model(tmp_path / "second", "second")
    commit = server.push(newer)
    shutil.copytree(cached, cached.parent / commit)
    (cached.parent / commit / "model.safetensors").unlink()
    behave("is silent")
    assert resolve_model(MODEL_ID) == cached
    with pytest.raises(Unavailable):
        resolve_model(f"{MODEL_ID}@{commit}")
    behave("answers")
    assert contents(resolve_model(MODEL_ID))["model.safetensors"] == "second"


def test_processes_with_pinned_settings_have_the_same_commit(
    server: FakeHub, tmp_path: Path
) -> None:
    """The branch moves between the starts of two workers."""
    first = server.main
    settings = Settings(model=MODEL_ID, draft_model=f"{MODEL_ID}@main")
    cluster = pin_models(settings)
    assert (cluster.model, cluster.draft_model) == (f"{MODEL_ID}@{first}",) * 2
    assert cluster.served_models == {"tiny": f"{MODEL_ID}@{first}"}
    server.push(write_model(tmp_path / "second", "second"))
    server.behaviour = "is silent"
    assert pin_models(cluster) == pin_models(cluster) == cluster


def test_each_of_several_models_is_pinned(server: FakeHub) -> None:
    cluster = pin_models(Settings(models={"a": "demo", "b": MODEL_ID, "c": str(DEMO_MODEL)}))
    assert cluster.served_models == {
        "a": "demo",
        "b": f"{MODEL_ID}@{server.main}",
        "c": str(DEMO_MODEL),
    }


def test_hub_model_is_named_without_its_revision() -> None:
    assert HubModel.parse("a/b.c-d@refs/pr/1") == HubModel("a/b.c-d", "refs/pr/1")
    assert HubModel.parse("a/b") == HubModel("a/b", "main")
    assert HubModel.parse("a/b@v1.0/c/d.gguf") == HubModel("a/b", "v1.0", "c/d.gguf")
    names = ["a/b@v1.0", "a/b", "/models/x@y", "./x@y", "demo", "a/b@v1/c/d.Q8_0.gguf", "./e.gguf"]
    assert [short_name(each) for each in names] == ["b", "b", "x@y", "x@y", "demo", "d.Q8_0", "e"]


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all", "one", "a/b/c", "a/b@", "a/b@-"])
def test_name_that_is_neither_directory_nor_hub_id_is_rejected(name: str) -> None:
    with pytest.raises(Invalid, match="must be a directory, a GGUF file, or a hub id of the form"):
        resolve_model(name)


def test_id_that_the_hub_does_not_allow_is_rejected() -> None:
    with pytest.raises(Invalid, match=r"^model is 'a\.\.b/c': "):
        resolve_model("a..b/c")


class CountingClock:
    """A clock that advances by a second whenever it is read."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        self.now += 1.0
        return self.now

    def wall_nanoseconds(self) -> int:
        raise NotImplementedError

    async def sleep(self, seconds: float) -> None:
        raise NotImplementedError


def test_download_is_given_up_only_once_it_has_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "POLL_SECONDS", 0.001)
    sizes, clock = iter([0, 1, 2, 3, 4, 5]), CountingClock()
    result = hub._await_result(SimpleQueue(), lambda: next(sizes, 5), 3.0, clock)
    assert result == {"error": "it has sent nothing for 3 s"}
    assert next(sizes, None) is None
    assert clock.now == 14.0
