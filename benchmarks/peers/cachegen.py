"""Passes KV through LMCache's CacheGen in its own process, for ``benchmarks.cachegen``.

    python benchmarks/peers/cachegen.py INPUT OUTPUT

Runs in its own environment and needs nothing of Baton's:

    python3 -m venv peer
    peer/bin/pip install torch==2.13.0 numba transformers msgspec pyyaml psutil cachetools requests
    peer/bin/pip install sortedcontainers nvtx
    peer/bin/pip install --no-deps lmcache==0.5.6

INPUT is an .npy file of BF16 bits, uint16 [prompts, layers, 2, tokens, kv_heads, head_dim]. OUTPUT
gets the decoded KV in the same form. The last line of the output is JSON: the encoded bytes as
LMCache serializes them, those of bytestreams, distributions and scales alone, and the seconds of
encoding and of decoding, without the first prompt, which compiles the coder.
"""

import json
import sys
import time

import numpy as np
import torch
from lmcache.storage_backend.serde import cachegen_decoder, cachegen_encoder

CHUNK_TOKENS = 256
FIRST_LAYERS, FIRST_KEY_LAYERS, FIRST_VALUE_LAYERS = 10, 10, 2
FINE_BINS, COARSE_BINS = 32, 16


def make_bins(num_layers: int, num_fine: int) -> torch.Tensor:
    """Return the bins of each layer, as LMCache chooses them for a model that it does not know."""
    fine = num_layers if num_layers < FIRST_LAYERS else num_fine
    return torch.tensor([FINE_BINS] * fine + [COARSE_BINS] * (num_layers - fine)).float()


def encode(kv: torch.Tensor, bins: tuple[torch.Tensor, torch.Tensor]) -> bytes:
    """Encode ``kv`` [layers, 2, tokens, kv_heads, head_dim]."""
    data: bytes = cachegen_encoder.encode_function(kv, None, *bins, kv.shape[2]).to_bytes()
    return data


def decode(data: bytes, bins: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Return the decoded KV in the same form."""
    output = cachegen_encoder.CacheGenGPUEncoderOutput.from_bytes(data)
    layers, tokens, _ = output.max_tensors_key.shape
    channels = output.num_heads * output.head_size
    buffer = torch.zeros((tokens, 2 * layers * channels), dtype=torch.uint8)
    both = cachegen_decoder.decode_function_gpu(
        output.cdf, output.data_chunks, layers, tokens, buffer
    )
    maxima = output.max_tensors_key, output.max_tensors_value
    planes = [
        cachegen_decoder.do_dequantize(plane, plane_bins, scale)
        for plane, plane_bins, scale in zip(both, bins, maxima, strict=True)
    ]
    return torch.stack(planes, dim=1).reshape(layers, 2, tokens, output.num_heads, output.head_size)


def needed_bytes(data: bytes) -> int:
    """Return the bytes that any serialization would need, without those of pickle and padding."""
    output = cachegen_encoder.CacheGenGPUEncoderOutput.from_bytes(data)
    tensors = [output.cdf, output.max_tensors_key, output.max_tensors_value]
    for chunk in output.data_chunks:
        tensors += [chunk.bytestream, chunk.bytestream_lengths.to(torch.int16)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def main() -> None:
    prompts = np.load(sys.argv[1])
    bins = (
        make_bins(prompts.shape[1], FIRST_KEY_LAYERS),
        make_bins(prompts.shape[1], FIRST_VALUE_LAYERS),
    )
    decoded = np.zeros_like(prompts)
    encoded_bytes = needed = 0
    times: list[tuple[float, float]] = []
    for number, prompt in enumerate(prompts):
        encode_seconds = decode_seconds = 0.0
        for first in range(0, prompts.shape[3], CHUNK_TOKENS):
            raw = np.ascontiguousarray(prompt[:, :, first : first + CHUNK_TOKENS])
            kv = torch.from_numpy(raw.view(np.int16)).view(torch.bfloat16)
            start = time.perf_counter()
            data = encode(kv, bins)
            middle = time.perf_counter()
            result = decode(data, bins).to(torch.bfloat16)
            decode_seconds += time.perf_counter() - middle
            encode_seconds += middle - start
            encoded_bytes += len(data)
            needed += needed_bytes(data)
            bits = result.contiguous().view(torch.int16).numpy().view(np.uint16)
            decoded[number, :, :, first : first + CHUNK_TOKENS] = bits
        times.append((encode_seconds, decode_seconds))
    np.save(sys.argv[2], decoded)
    measured = times[1:] or times
    print(
        json.dumps(
            {
                "encoded_bytes": encoded_bytes,
                "needed_bytes": needed,
                "encode_seconds": sum(each for each, _ in measured),
                "decode_seconds": sum(each for _, each in measured),
                "timed_prompts": len(measured),
            }
        )
    )


if __name__ == "__main__":
    main()
