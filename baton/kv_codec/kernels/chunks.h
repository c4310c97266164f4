// Chunks of 64 values as bytes: exponents, and the rests (mantissa << 1) | sign of their upper 16
// bits. With AVX-512 a chunk of bytes is one register, with AVX2 two.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

constexpr int64_t CHUNK = 64, HEADER_BYTES = 16;

constexpr int64_t value_bytes(bool is_float32) { return is_float32 ? 4 : 2; }

#ifdef __AVX512BW__
#include "chunks512.h"
#else
#include "chunks256.h"
#endif

struct Split {
    Bytes64 exponents, rests;
};

// Split the upper 16 bits of the values at `from`. The lower 16 bits of float32 values are stored
// at `low_halves` unless it is null.
template <bool FLOAT32>
inline Split split(const uint8_t* from, uint8_t* low_halves) {
    const Words64 words = load_upper<FLOAT32>(from, low_halves).rotated_left();
    return {words.high_bytes(), words.low_bytes()};
}

// Store the values of a chunk; the reverse of split().
template <bool FLOAT32>
inline void join(const Split& parts, const uint8_t* low_halves, uint8_t* to) {
    store_upper<FLOAT32>(Words64::of(parts.exponents, parts.rests).rotated_right(), low_halves, to);
}
