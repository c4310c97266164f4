// The lossless codec; its format is in baton/kv_codec/lossless_layout.py.
#pragma once

#include "chunks.h"

// The layout of an encoded block; the same as LosslessFields in baton/kv_codec/native_library.py.
struct LosslessLayout {
    int64_t num_planes, num_chunks, is_float32, sample_stride, max_escapes;
    // Offsets in bytes, and the size of the block itself.
    int64_t ends, firsts, codes, rests, low_halves, escapes, size_bytes;
    uint8_t header[HEADER_BYTES];
};

constexpr int WINDOW = 7, MAX_FIRST = 256 - WINDOW, CODE_BITS = 3;

// Counts exponents, in four tables so that equal neighbours do not wait for one another.
struct Histogram {
    uint32_t counts[4][256];

    void add(const uint8_t* exponents) {
        for (int i = 0; i < CHUNK; i += 4)
            for (int j = 0; j < 4; ++j) ++counts[j][exponents[i + j]];
    }

    // Return the first exponent of the lowest window that contains most.
    int first_of_window() const {
        uint32_t total[256];
        for (int i = 0; i < 256; ++i)
            total[i] = counts[0][i] + counts[1][i] + counts[2][i] + counts[3][i];
        // Windows beyond the least and the largest exponent contain nothing.
        int least = 0, largest = 255;
        while (least < 255 && !total[least]) ++least;
        while (largest > 0 && !total[largest]) --largest;
        const int begin = least < WINDOW ? 0 : least - WINDOW + 1;
        const int end = largest < MAX_FIRST ? largest : MAX_FIRST;
        uint32_t inside = 0, most = 0;
        for (int i = begin; i < begin + WINDOW && i < 256; ++i) inside += total[i];
        most = inside;
        int best = begin;
        for (int first = begin + 1; first <= end; ++first) {
            inside += total[first + WINDOW - 1] - total[first - 1];
            if (inside > most) most = inside, best = first;
        }
        return best;
    }
};

template <bool FLOAT32>
int choose_window(const LosslessLayout& layout, const uint8_t* plane) {
    Histogram histogram = {};
    alignas(64) uint8_t exponents[CHUNK];
    for (int64_t chunk = 0; chunk < layout.num_chunks; chunk += layout.sample_stride) {
        split<FLOAT32>(plane + chunk * CHUNK * value_bytes(FLOAT32), nullptr).exponents.store(
            exponents);
        histogram.add(exponents);
    }
    return histogram.first_of_window();
}

// Encode a block. Return the encoded size; 0 if it would not be smaller.
template <bool FLOAT32>
int64_t encode_lossless(const LosslessLayout& layout, const uint8_t* block, uint8_t* to) {
    if (layout.max_escapes < 0) return 0;
    const int64_t plane_values = layout.num_chunks * CHUNK;
    int64_t escapes = 0;
    memcpy(to, layout.header, HEADER_BYTES);
    memset(to + layout.firsts, 0, size_t(layout.codes - layout.firsts));
    for (int64_t plane = 0; plane < layout.num_planes; ++plane) {
        const uint8_t* from = block + plane * plane_values * value_bytes(FLOAT32);
        const int first = choose_window<FLOAT32>(layout, from);
        uint8_t* codes = to + layout.codes + plane * layout.num_chunks * CODE_BITS * 8;
        uint8_t* rests = to + layout.rests + plane * plane_values;
        uint8_t* low_halves = to + layout.low_halves + plane * plane_values * 2;
        for (int64_t chunk = 0; chunk < layout.num_chunks; ++chunk) {
            const Split parts = split<FLOAT32>(from + chunk * CHUNK * value_bytes(FLOAT32),
                                               low_halves + chunk * CHUNK * 2);
            uint64_t words[CODE_BITS];
            parts.exponents.code(uint8_t(first), words);
            memcpy(codes + chunk * CODE_BITS * 8, words, sizeof words);
            parts.rests.store(rests + chunk * CHUNK);
            const uint64_t is_escape = words[0] & words[1] & words[2];
            const int64_t count = __builtin_popcountll(is_escape);
            if (escapes + count > layout.max_escapes) return 0;
            parts.exponents.compress(is_escape, to + layout.escapes + escapes);
            escapes += count;
        }
        const uint32_t end = uint32_t(escapes);
        memcpy(to + layout.ends + plane * 4, &end, 4);
        to[layout.firsts + plane] = uint8_t(first);
    }
    return layout.escapes + escapes;
}

// Decode `size` bytes into a block. Return whether they are a valid encoding.
template <bool FLOAT32>
bool decode_lossless(const LosslessLayout& layout, const uint8_t* from, int64_t size,
                     uint8_t* block) {
    if (size < layout.escapes || size > layout.size_bytes) return false;
    if (memcmp(from, layout.header, HEADER_BYTES)) return false;
    const int64_t plane_values = layout.num_chunks * CHUNK, escapes = size - layout.escapes;
    int64_t used = 0;
    for (int64_t plane = 0; plane < layout.num_planes; ++plane) {
        const uint8_t first = from[layout.firsts + plane];
        if (first > MAX_FIRST) return false;
        const uint8_t* codes = from + layout.codes + plane * layout.num_chunks * CODE_BITS * 8;
        const uint8_t* rests = from + layout.rests + plane * plane_values;
        const uint8_t* low_halves = from + layout.low_halves + plane * plane_values * 2;
        uint8_t* to = block + plane * plane_values * value_bytes(FLOAT32);
        for (int64_t chunk = 0; chunk < layout.num_chunks; ++chunk) {
            uint64_t words[CODE_BITS];
            memcpy(words, codes + chunk * CODE_BITS * 8, sizeof words);
            const uint64_t is_escape = words[0] & words[1] & words[2];
            const int64_t count = __builtin_popcountll(is_escape);
            if (used + count > escapes) return false;
            Split parts = {Bytes64::decoded(words, first), Bytes64::load(rests + chunk * CHUNK)};
            parts.exponents.expand(is_escape, from + layout.escapes + used);
            join<FLOAT32>(parts, low_halves + chunk * CHUNK * 2,
                          to + chunk * CHUNK * value_bytes(FLOAT32));
            used += count;
        }
        uint32_t end;
        memcpy(&end, from + layout.ends + plane * 4, 4);
        if (int64_t(end) != used) return false;
    }
    return used == escapes;
}
