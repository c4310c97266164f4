"""The compiled codecs must give the bytes of those in NumPy, and refuse what these refuse."""

from pathlib import Path

import numpy as np
import pytest

from baton.errors import Unavailable
from baton.kv_codec import build, registry
from baton.kv_codec.base import BlockCodec
from baton.kv_codec.block_format import BlockFormat
from baton.kv_codec.native_codec import NativeCodec, open_native_codecs
from baton.kv_codec.portable_codec import PortableCodec
from baton.kv_codec.registry import open_codecs, open_portable_codecs
from baton.system import portability
from tests.kv_blocks import CONTENTS, FORMATS
from tests.unit.baton.kv_codec.test_kv_codec_lossless import decode, encode

SEED = 20261127
SUPPORTED = build.supported_instruction_sets()
CHANGES = 40


@pytest.mark.parametrize("instruction_set", SUPPORTED)
@pytest.mark.parametrize("block_format", FORMATS, ids=str)
@pytest.mark.parametrize("content", CONTENTS)
def test_bytes_are_those_of_numpy(
    content: str, block_format: BlockFormat, instruction_set: str
) -> None:
    data = CONTENTS[content](block_format, np.random.default_rng(SEED))
    portable = open_portable_codecs(block_format)
    native = open_native_codecs(block_format, instruction_set)
    assert set(native) == set(portable)
    for name, codec in portable.items():
        assert native[name].max_encoded_bytes == codec.max_encoded_bytes
        encoded = encode(codec, data)
        assert encode(native[name], data) == encoded
        _decode_alike(native[name], codec, encoded, len(data))


@pytest.mark.parametrize("instruction_set", SUPPORTED)
@pytest.mark.parametrize("block_format", FORMATS, ids=str)
def test_broken_encodings_are_decoded_or_refused_alike(
    block_format: BlockFormat, instruction_set: str
) -> None:
    chance = np.random.default_rng(SEED)
    data = CONTENTS["widening"](block_format, chance)
    portable = open_portable_codecs(block_format)
    for name, codec in open_native_codecs(block_format, instruction_set).items():
        encoded = encode(codec, data)
        for _ in range(CHANGES):
            broken = np.frombuffer(encoded, np.uint8).copy()
            region = len(broken) if chance.random() < 0.5 else 64
            places = chance.integers(0, region, chance.integers(1, 4))
            broken[places] = chance.integers(0, 256, len(places), np.uint8)
            _decode_alike(codec, portable[name], broken.tobytes(), len(data))


def _decode_alike(first: BlockCodec, second: BlockCodec, encoded: bytes, size_bytes: int) -> None:
    one, other = decode(first, encoded, size_bytes), decode(second, encoded, size_bytes)
    assert (one is None) == (other is None)
    if one is not None and other is not None:
        assert np.array_equal(one, other)


def test_compiled_codecs_are_used_where_they_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = {type(codec) for codec in open_codecs(FORMATS[0]).values()}
    assert kinds == ({NativeCodec} if SUPPORTED else kinds)
    monkeypatch.setattr(registry, "open_native_codecs", _no_compiler)
    assert all(isinstance(each, PortableCodec) for each in open_codecs(FORMATS[0]).values())


def test_portable_processes_use_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(portability, "_is_portable", True)
    assert all(isinstance(each, PortableCodec) for each in open_codecs(FORMATS[0]).values())


def _no_compiler(block_format: BlockFormat, instruction_set: str) -> dict[str, BlockCodec]:
    raise Unavailable("no compiler")


@pytest.mark.parametrize("given", [[], ["--all"]], ids=str)
def test_libraries_can_be_built_ahead_of_time(
    given: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted: list[str] = []
    monkeypatch.setattr(build, "build_library", lambda name: wanted.append(name) or Path(name))
    assert build.main(given) == 0
    assert wanted == (list(build.INSTRUCTION_SETS) if given else SUPPORTED[:1])
    assert capsys.readouterr().out.count("kernels of KV codecs: ") == len(wanted)
