// The codec FP8; its format is in baton/kv_codec/fp8_layout.py.
#pragma once

#include "chunks.h"
#include "lanes.h"

// The layout of an encoded block; the same as Fp8Fields in baton/kv_codec/native_library.py.
struct Fp8Layout {
    int64_t is_float32, num_planes, block_tokens, kv_heads, head_dim, min_scale, max_scale;
    // Offsets in bytes, and the size of an encoded block.
    int64_t scales, codes, encoded_bytes;
    uint8_t header[HEADER_BYTES];
};

inline float power_of_two(int exponent) {
    const uint32_t bits = uint32_t(exponent) << 23;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

// Return the codes of values times `factor`.
inline Ints to_e4m3(Floats values, float factor) {
    const Bits bits = bits_of(values), magnitude = bits & 0x7fffffff;
    const Floats sizes = (Floats)magnitude * factor;
    const Floats rounder = Floats{} + 16384.0f;
    const Bits small = bits_of(sizes + rounder) - bits_of(rounder);
    const Bits size_bits = bits_of(sizes);
    Bits normal = ((size_bits + 0x7ffff + ((size_bits >> 20) & 1)) >> 20) - (120 << 3);
    normal = normal > 0x7e ? Bits{} + 0x7e : normal;
    Bits codes = sizes < 0.015625f ? small : normal;
    codes = magnitude > 0x7f800000 ? Bits{} + 0x7f : codes;
    return (Ints)(codes | (bits >> 31 << 7));
}

// Return the numbers that E4M3 codes stand for, times `factor`.
inline Floats from_e4m3(Ints codes, float factor) {
    const Bits sizes = (Bits)codes & 0x7f;
    const Floats normal = (Floats)((sizes << 20) + (120u << 23));
    const Floats small = __builtin_convertvector((Ints)sizes, Floats) * 0.001953125f;
    Floats values = sizes < 8 ? small : normal;
    values = sizes == 0x7f ? (Floats)(Bits{} + 0x7fc00000) : values;
    return (Floats)(bits_of(values) | (((Bits)codes & 0x80) << 24)) * factor;
}

// A head's values of one token: whole vectors, and a last one that is filled up with zeros.
template <bool FLOAT32>
inline Floats load_part(const uint8_t* from, int64_t count) {
    if (count >= LANES) return load_values<FLOAT32>(from);
    uint8_t buffer[4 * LANES] = {};
    memcpy(buffer, from, size_t(count * value_bytes(FLOAT32)));
    return load_values<FLOAT32>(buffer);
}

template <bool FLOAT32>
int scale_of_head(const Fp8Layout& layout, const uint8_t* head) {
    const int64_t stride = layout.kv_heads * layout.head_dim * value_bytes(FLOAT32);
    Bits largest = {};
    for (int64_t token = 0; token < layout.block_tokens; ++token)
        for (int64_t i = 0; i < layout.head_dim; i += LANES) {
            const uint8_t* from = head + token * stride + i * value_bytes(FLOAT32);
            Bits bits = bits_of(load_part<FLOAT32>(from, layout.head_dim - i)) & 0x7fffffff;
            bits = bits < 0x7f800000 ? bits : Bits{};
            largest = bits > largest ? bits : largest;
        }
    uint32_t most = 0;
    for (int lane = 0; lane < LANES; ++lane) most = largest[lane] > most ? largest[lane] : most;
    const int64_t scale = int64_t(most >> 23) - 8 + ((most & 0x7fffff) > 0x600000);
    return int(scale < layout.min_scale   ? layout.min_scale
               : scale > layout.max_scale ? layout.max_scale
                                          : scale);
}

template <bool FLOAT32>
int64_t encode_fp8(const Fp8Layout& layout, const uint8_t* block, uint8_t* to) {
    memcpy(to, layout.header, HEADER_BYTES);
    memset(to + layout.scales, 0, size_t(layout.codes - layout.scales));
    const int64_t dim = layout.head_dim, row = layout.kv_heads * dim;
    for (int64_t plane = 0; plane < layout.num_planes; ++plane)
        for (int64_t head = 0; head < layout.kv_heads; ++head) {
            const int64_t first = plane * layout.block_tokens * row + head * dim;
            const uint8_t* from = block + first * value_bytes(FLOAT32);
            const int scale = scale_of_head<FLOAT32>(layout, from);
            to[layout.scales + plane * layout.kv_heads + head] = uint8_t(scale);
            const float factor = power_of_two(254 - scale);
            uint8_t* codes = to + layout.codes + first;
            for (int64_t token = 0; token < layout.block_tokens; ++token)
                for (int64_t i = 0; i < dim; i += LANES) {
                    const int64_t place = token * row + i;
                    const uint8_t* part = from + place * value_bytes(FLOAT32);
                    const Ints coded = to_e4m3(load_part<FLOAT32>(part, dim - i), factor);
                    if (dim - i >= LANES) {
                        store_bytes(coded, codes + place);
                    } else {
                        uint8_t buffer[LANES];
                        store_bytes(coded, buffer);
                        memcpy(codes + place, buffer, size_t(dim - i));
                    }
                }
        }
    return layout.encoded_bytes;
}

template <bool FLOAT32>
void decode_fp8_part(const uint8_t* codes, int64_t count, float factor, uint8_t* to) {
    if (count >= LANES) {
        store_values<FLOAT32>(from_e4m3(load_bytes(codes), factor), to);
        return;
    }
    uint8_t from[LANES] = {}, buffer[4 * LANES];
    memcpy(from, codes, size_t(count));
    store_values<FLOAT32>(from_e4m3(load_bytes(from), factor), buffer);
    memcpy(to, buffer, size_t(count * value_bytes(FLOAT32)));
}

template <bool FLOAT32>
bool decode_fp8(const Fp8Layout& layout, const uint8_t* from, int64_t size, uint8_t* block) {
    if (size != layout.encoded_bytes || memcmp(from, layout.header, HEADER_BYTES)) return false;
    const uint8_t* scales = from + layout.scales;
    for (int64_t i = 0; i < layout.num_planes * layout.kv_heads; ++i)
        if (scales[i] < layout.min_scale || scales[i] > layout.max_scale) return false;
    int64_t place = 0;
    for (int64_t plane = 0; plane < layout.num_planes; ++plane)
        for (int64_t token = 0; token < layout.block_tokens; ++token)
            for (int64_t head = 0; head < layout.kv_heads; ++head, place += layout.head_dim) {
                const float factor = power_of_two(scales[plane * layout.kv_heads + head]);
                for (int64_t i = 0; i < layout.head_dim; i += LANES)
                    decode_fp8_part<FLOAT32>(from + layout.codes + place + i, layout.head_dim - i,
                                             factor, block + (place + i) * value_bytes(FLOAT32));
            }
    return true;
}
