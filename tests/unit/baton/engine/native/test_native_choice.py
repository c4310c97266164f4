"""Tests where the native kernels are loaded from, and what happens on machines without them."""

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from baton.checkpoints.checkpoint import ModelConfig, load_model_config
from baton.config import load_settings
from baton.engine.model import Model
from baton.engine.native import backend_choice, build, processor
from baton.engine.native.backend_choice import (
    TORCH_BACKEND,
    choose_backend,
    unavailable_reason,
    unsupported_reason,
)
from baton.engine.runner import ModelRunner
from baton.engine.runner_options import RunnerOptions
from baton.errors import Invalid, Unavailable
from testkit.model_zoo import make_model
from tests.unit.baton.engine.native_helpers import needs_kernels

CPU = torch.device("cpu")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(tmp_path / "model", "qwen3")


@pytest.fixture
def config(model: Path) -> ModelConfig:
    return load_model_config(model)


@pytest.fixture
def forgetful() -> Iterator[None]:
    """Clear the cache of ``_not_loaded`` before and after the test, which fakes another machine."""
    backend_choice._not_loaded.cache_clear()
    yield
    backend_choice._not_loaded.cache_clear()


@pytest.fixture
def old_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor, "features", lambda: frozenset({"avx2", "sse4_2"}))


@needs_kernels
def test_kernels_are_the_default(config: ModelConfig) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for mode in ("auto", "on"):
            assert choose_backend(mode, config, CPU, dtype).is_native


def test_kernels_off_chooses_torch(config: ModelConfig) -> None:
    assert choose_backend("off", config, CPU, torch.float32) == TORCH_BACKEND


def test_unknown_mode_is_rejected(config: ModelConfig) -> None:
    with pytest.raises(Invalid, match="'maybe', and must be one of auto, on, off"):
        choose_backend("maybe", config, CPU, torch.float32)


def test_old_processor_falls_back_to_torch(model: Path, old_processor: None) -> None:
    """The engine runs and says which instructions are missing; only ``cpu_kernels: on`` is
    refused."""
    runner = ModelRunner.load(model, RunnerOptions(device="cpu", num_blocks=8))
    assert isinstance(runner._model, Model)
    reason = "the processor lacks fma, f16c"
    assert runner.backend.description == f"torch: {reason}" and runner.backend.is_fallback
    with pytest.raises(Invalid, match=f"cpu_kernels is on, but {reason}"):
        ModelRunner.load(model, RunnerOptions(device="cpu", num_blocks=8, cpu_kernels="on"))


@pytest.mark.parametrize(
    ("added", "best"),
    [
        ((), None),
        (("avx2", "fma"), None),
        (("f16c",), "avx2"),
        (("avx512f", "avx512bw", "avx512dq"), "avx2"),
        (("avx512vl",), "avx512"),
        (("avx512_bf16",), "avx512_bf16"),
        (("amx_tile", "amx_int8"), "avx512_bf16"),
        (("amx_bf16",), "amx"),
    ],
    ids=str,
)
def test_best_instruction_set_of_a_processor(
    added: tuple[str, ...], best: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The processor of each case supports the instructions added in this case and in all cases
    before it."""
    sets = ["avx2 fma", "f16c", "avx512f avx512bw avx512dq", "avx512vl", "avx512_bf16"]
    sets += ["amx_tile amx_int8", "amx_bf16"]
    upto = sets[: sets.index(" ".join(added)) + 1] if added else []
    monkeypatch.setattr(processor, "tiles_permitted", lambda: True)
    monkeypatch.setattr(processor, "features", lambda: frozenset(" ".join(upto).split()))
    assert processor.best_instruction_set() == best


def test_instruction_set_can_be_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    can = frozenset(processor.INSTRUCTION_SETS["amx"])
    monkeypatch.setattr(processor, "features", lambda: can)
    monkeypatch.setattr(processor, "tiles_permitted", lambda: True)
    for most in (*processor.INSTRUCTION_SETS, processor.EMULATED_AMX):
        with processor.limit_instruction_set(most):
            assert processor.best_instruction_set() == most
    assert processor.best_instruction_set() == "amx"


def test_tiles_are_not_used_without_the_kernel_s_permission(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    can = frozenset(processor.INSTRUCTION_SETS["amx"])
    monkeypatch.setattr(processor, "features", lambda: can)
    monkeypatch.setattr(processor, "tiles_permitted", lambda: False)
    assert processor.supported_instruction_sets() == ["avx512_bf16", "avx512", "avx2"]
    assert processor.sets_with_bits_of("amx") == [processor.EMULATED_AMX]


def test_processor_features_are_read_from_cpuinfo(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(
        "processor\t: 0\nflags\t\t: fpu avx2 fma\n\nprocessor\t: 1\nflags\t\t: none\n"
    )
    assert processor.features(cpuinfo) == {"fpu", "avx2", "fma"}
    cpuinfo.write_text("processor\t: 0\nFeatures\t: asimd\n")
    processor.features.cache_clear()
    assert processor.features(cpuinfo) == frozenset()
    assert processor.features(tmp_path / "none") == frozenset()


@pytest.mark.parametrize(
    ("device", "dtype", "changes", "message"),
    [
        ("meta", torch.float32, {}, "the device is meta"),
        ("cpu", torch.float16, {}, "the kernels don't compute in float16"),
        ("cpu", torch.bfloat16, {"intermediate_size": 33}, "need even matrix sizes"),
        ("cpu", torch.float32, {"head_dim": 5}, "need even matrix sizes"),
    ],
    ids=lambda given: str(given),
)
def test_unsupported_devices_formats_and_sizes(
    config: ModelConfig, device: str, dtype: torch.dtype, changes: dict[str, int], message: str
) -> None:
    reason = unsupported_reason(replace(config, **changes), torch.device(device), dtype)
    assert reason is not None and message in reason


def test_missing_compiler_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forgetful: None
) -> None:
    monkeypatch.setattr(build, "COMPILERS", ("no-such-compiler",))
    monkeypatch.setattr(build, "library_folders", lambda: [tmp_path / "built"])
    monkeypatch.setattr(backend_choice.library, "load_for", build.build_library)
    monkeypatch.setattr(
        processor, "features", lambda: frozenset(processor.INSTRUCTION_SETS["avx2"])
    )
    assert (
        unavailable_reason()
        == "the CPU kernels need a C++ compiler, but none of no-such-compiler is installed"
    )


def test_compiler_error_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "library_folders", lambda: [tmp_path / "built"])
    monkeypatch.setattr(
        build, "find_compiler", lambda: str(_script(tmp_path, "error: it is Monday", 1))
    )
    with pytest.raises(Unavailable, match=r"could not be compiled by .*: error: it is Monday"):
        build.build_library("avx2")
    assert not list((tmp_path / "built").glob("*.so"))


def test_concurrent_processes_compile_the_library_once(tmp_path: Path) -> None:
    """Three processes request the library at the same time: one of them compiles it, all find it,
    and no temporary files remain."""
    compiler = _script(tmp_path, "", 0, "echo once >> " + str(tmp_path / "runs"))
    code = (
        "import sys; from pathlib import Path; from baton.engine.native import build;"
        f"build.find_compiler = lambda: {str(compiler)!r};"
        f"build.library_folders = lambda: [Path({str(tmp_path / 'built')!r})];"
        "print(build.build_library('avx2'))"
    )
    asking = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    libraries = {process.communicate(timeout=60)[0].strip() for process in asking}
    assert libraries == {str(tmp_path / "built" / f"kernels-avx2-{build.source_digest('avx2')}.so")}
    assert (tmp_path / "runs").read_text() == "once\n"
    assert {path.suffix for path in (tmp_path / "built").iterdir()} == {".so", ".lock"}


def test_library_in_a_world_writable_folder_is_not_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Anyone who can write to the folder could make the process execute their own library."""
    (tmp_path / "built").mkdir()
    (tmp_path / "built").chmod(0o777)
    (tmp_path / "built" / f"kernels-avx2-{build.source_digest('avx2')}.so").write_text("theirs")
    monkeypatch.setattr(build, "library_folders", lambda: [tmp_path / "built"])
    with pytest.raises(Unavailable, match="for this user and for no other user except root"):
        build.build_library("avx2")


def test_unreadable_library_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library may have been built by root, in a folder that other users can't read."""
    monkeypatch.setattr(build, "library_folders", lambda: [tmp_path / "closed", tmp_path / "open"])
    monkeypatch.setattr(build, "find_compiler", lambda: str(_script(tmp_path, "", 0)))
    access = os.access
    monkeypatch.setattr(
        os, "access", lambda path, mode: "closed" not in str(path) and access(path, mode)
    )
    assert build.build_library("avx2").parent == tmp_path / "open"
    assert (tmp_path / "open").stat().st_mode & 0o777 == 0o755


def test_library_name_depends_on_sources_and_flags(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = [build.source_digest(name) for name in processor.INSTRUCTION_SETS]
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-g"))
    flagged = build.source_digest("avx2")
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    (tmp_path / "library.cpp").write_text("int x;")
    assert len({*before, flagged, build.source_digest("avx2")}) == 6


@pytest.mark.parametrize("given", [[], ["--all"]], ids=str)
def test_libraries_can_be_built_ahead_of_time(
    given: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Libraries are built for this processor, or with ``--all`` for all processors."""
    monkeypatch.setattr(build, "library_folders", lambda: [tmp_path / "built"])
    monkeypatch.setattr(build, "find_compiler", lambda: str(_script(tmp_path, "", 0)))
    monkeypatch.setattr(
        processor, "features", lambda: frozenset(processor.INSTRUCTION_SETS["avx512"])
    )
    assert build.main(given) == 0
    names = list(processor.INSTRUCTION_SETS) if given else ["avx512"]
    built = {path.name.split("-")[1] for path in (tmp_path / "built").glob("*.so")}
    assert built == set(names)
    assert capsys.readouterr().out.count("cpu kernels: /") == len(names)


def test_cpu_kernels_setting_is_validated() -> None:
    assert load_settings().cpu_kernels == "auto"
    assert load_settings(cpu_kernels="off").cpu_kernels == "off"
    with pytest.raises(Invalid, match="cpu_kernels"):
        load_settings(cpu_kernels="perhaps")


@needs_kernels
def test_instruction_set_is_limited_by_a_setting(model: Path) -> None:
    best = processor.best_instruction_set()
    for name in ("avx2", processor.EMULATED_AMX):
        runner = ModelRunner.load(
            model, RunnerOptions(device="cpu", num_blocks=8, cpu_instruction_set=name)
        )
        assert f"({name})" in runner.backend.description
    assert processor.best_instruction_set() == best


def test_instruction_set_setting_has_the_names_of_all_instruction_sets() -> None:
    for name in ("auto", *processor.INSTRUCTION_SETS, processor.EMULATED_AMX):
        assert load_settings(cpu_instruction_set=name).cpu_instruction_set == name
    with pytest.raises(Invalid, match="cpu_instruction_set"):
        load_settings(cpu_instruction_set="avx")


def _script(folder: Path, stderr: str, code: int, more: str = ":") -> Path:
    """Write a fake compiler, which leaves an empty library if it succeeds."""
    path = folder / "compiler"
    path.write_text(
        f"#!/bin/sh\n{more}\necho '{stderr}' >&2\n"
        f'for last; do :; done\n[ {code} = 0 ] && : > "$last"\nexit {code}\n'
    )
    path.chmod(0o700)
    return path
