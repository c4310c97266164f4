// The codecs INT4 and INT2; their format is in baton/kv_codec/rotated_layout.py. Each addition and
// rounding is in the same order as in baton/kv_codec/portable_rotated.py.
#pragma once

#include <cmath>
#include <type_traits>
#include <vector>

#include "chunks.h"
#include "lanes.h"

// The layout of an encoded block; the same as RotatedFields in baton/kv_codec/native_library.py.
struct RotatedLayout {
    int64_t bits, is_float32, num_planes, block_tokens, row, group;
    // Offsets in bytes, and the size of an encoded block.
    int64_t scales, codes, encoded_bytes;
    float min_scale, max_scale, max_value, mean_factor;
    uint32_t sign_words[4];
    float magnitudes4[8], magnitudes2[8];
    uint8_t header[HEADER_BYTES];
};

constexpr int MEAN_BITS = 4;
constexpr uint32_t SIGN_BIT = 0x80000000u;

inline Floats flip_signs(Floats values, Bits signs) { return (Floats)(bits_of(values) ^ signs); }

// Codes groups of GROUP values.
template <int GROUP>
struct GroupCoder {
    static constexpr int N = GROUP / LANES;

    explicit GroupCoder(const RotatedLayout& layout) : layout(layout) {
        for (int i = 0; i < GROUP; ++i)
            signs[i / LANES][i % LANES] = (layout.sign_words[i / 32] >> (i % 32) & 1) * SIGN_BIT;
        float thresholds[7];
        for (int i = 0; i < 7; ++i)
            thresholds[i] = (layout.magnitudes4[i + 1] + layout.magnitudes4[i]) * 0.5f;
        counter = ThresholdCounter(thresholds);
        threshold2 = (layout.magnitudes2[1] + layout.magnitudes2[0]) * 0.5f;
        for (int lane = 0; lane < LANES; ++lane) {
            const bool is_negative = lane >= 8;
            table4[lane] = (is_negative ? -1 : 1) * layout.magnitudes4[lane % 8];
            table2[lane] = (lane & 2 ? -1 : 1) * layout.magnitudes2[lane % 2];
        }
    }

    // Encode a group. Return the bits of its scale.
    template <int BITS>
    uint16_t encode(Floats* values, uint8_t* to) const {
        const uint16_t scale_bits = scale_of(values);
        const float scale = as_float(scale_bits);
        const float factor = scale > 0 ? 1 / scale : 0;
        for (int i = 0; i < N; ++i) values[i] = flip_signs(values[i], signs[i]);
        transform(values);
        constexpr int PARTS = 8 / BITS, STEP = N / PARTS;
        for (int i = 0; i < STEP; ++i) {
            Ints packed = code<BITS>(values[i] * factor);
            for (int part = 1; part < PARTS; ++part)
                packed |= code<BITS>(values[i + part * STEP] * factor) << (part * BITS);
            store_bytes(packed, to + i * LANES);
        }
        return scale_bits;
    }

    template <int BITS>
    void decode(uint16_t scale_bits, const uint8_t* from, Floats* values) const {
        const float factor = as_float(scale_bits) * (1.0f / GROUP);
        constexpr int PARTS = 8 / BITS, STEP = N / PARTS;
        for (int i = 0; i < STEP; ++i) {
            const Ints packed = load_bytes(from + i * LANES);
            for (int part = 0; part < PARTS; ++part)
                values[i + part * STEP] = value_of<BITS>(packed >> (part * BITS));
        }
        transform(values);
        for (int i = 0; i < N; ++i) values[i] = flip_signs(values[i] * factor, signs[i]);
    }

    static float as_float(uint16_t bits) {
        const uint32_t wide = uint32_t(bits) << 16;
        float value;
        memcpy(&value, &wide, 4);
        return value;
    }

private:
    const RotatedLayout& layout;
    Bits signs[N];
    Floats table4, table2;
    ThresholdCounter counter;
    float threshold2;

    // Return the group's norm in BF16, 0 if it is below the least scale.
    uint16_t scale_of(const Floats* values) const {
        Floats squares[N];
        for (int i = 0; i < N; ++i) squares[i] = values[i] * values[i];
        for (int half = N / 2; half; half /= 2)
            for (int i = 0; i < half; ++i) squares[i] += squares[i + half];
        if (LANES == 16) squares[0] += exchanged<LANES == 16 ? 8 : 4>(squares[0]);
        squares[0] += exchanged<4>(squares[0]);
        squares[0] += exchanged<2>(squares[0]);
        squares[0] += exchanged<1>(squares[0]);
        const float norm = sqrtf(squares[0][0]);
        uint32_t bits;
        memcpy(&bits, &norm, 4);
        const uint16_t rounded = uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
        return as_float(rounded) < layout.min_scale ? 0 : rounded;
    }

    // Apply the Hadamard transform, not normalised.
    static void transform(Floats* values) {
        for (int stride = N / 2; stride; stride /= 2)
            for (int first = 0; first < N; first += 2 * stride)
                for (int i = first; i < first + stride; ++i) {
                    const Floats sum = values[i] + values[i + stride];
                    values[i + stride] = values[i] - values[i + stride];
                    values[i] = sum;
                }
        for (int i = 0; i < N; ++i) {
            if (LANES == 16) values[i] = butterfly<LANES == 16 ? 8 : 4>(values[i]);
            values[i] = butterfly<1>(butterfly<2>(butterfly<4>(values[i])));
        }
    }

    // Replace lanes i and i + STRIDE by their sum and their difference.
    template <int STRIDE>
    static Floats butterfly(Floats values) {
        Floats factors;
        for (int lane = 0; lane < LANES; ++lane) factors[lane] = lane & STRIDE ? -1.0f : 1.0f;
        // The products are exact, so a fused addition rounds as a separate one.
        return multiply_add(values, factors, exchanged<STRIDE>(values));
    }

    template <int BITS>
    Ints code(Floats values) const {
        const Floats sizes = (Floats)(bits_of(values) & ~SIGN_BIT);
        const Ints sign = (Ints)(bits_of(values) >> 31 << (BITS - 1));
        if (BITS == 2) return plus_one_where_greater(sign, sizes, Floats{} + threshold2);
        return sign | counter.count(sizes);
    }

    // Return the values for the codes in the low bits.
    template <int BITS>
    Floats value_of(Ints codes) const {
        if (BITS == 2) return look_up(table2, codes & 3);
        if (LANES == 16) return look_up(table4, codes & 15);
        return flip_signs(look_up(table4, codes & 7), ((Bits)codes & 8) << 28);
    }
};

// Return whether a value is NaN or beyond `limit`, which has no bits in its lower half.
template <typename Word>
inline bool exceeds(const uint8_t* from, int64_t count, float limit) {
    uint32_t limit_bits;
    memcpy(&limit_bits, &limit, 4);
    const Word most = Word(limit_bits >> (32 - 8 * sizeof(Word))), magnitude = Word(~Word{}) >> 1;
    Word largest = 0;
    for (int64_t i = 0; i < count; ++i) {
        const Word bits = load_as<Word>(from + i * sizeof(Word)) & magnitude;
        largest = bits > largest ? bits : largest;
    }
    return largest > most;
}

// Load values; if LIMITED, NaN as 0 and others as at most `limit`.
template <bool FLOAT32, bool LIMITED>
inline Floats load_bounded(const uint8_t* from, float limit) {
    Floats values = load_values<FLOAT32>(from);
    if (!LIMITED) return values;
    values = values == values ? values : Floats{};
    values = values > limit ? Floats{} + limit : values;
    return values < -limit ? Floats{} - limit : values;
}

// Encodes or decodes blocks, plane after plane.
template <bool FLOAT32, int GROUP, int BITS>
class RotatedBlocks {
public:
    explicit RotatedBlocks(const RotatedLayout& layout)
        : layout(layout), coder(layout), means(size_t(layout.row)) {}

    int64_t encode(const uint8_t* block, uint8_t* to) {
        memcpy(to, layout.header, HEADER_BYTES);
        memset(to + layout.scales, 0, size_t(layout.codes - layout.scales));
        uint8_t *scales = to + layout.scales, *codes = to + layout.codes;
        for (int64_t plane = 0; plane < layout.num_planes; ++plane) {
            const uint8_t* from = block + plane * layout.block_tokens * row_size();
            const int64_t count = layout.block_tokens * layout.row;
            if (exceeds<Word>(from, count, layout.max_value))
                encode_plane<true>(from, scales, codes);
            else
                encode_plane<false>(from, scales, codes);
        }
        return layout.encoded_bytes;
    }

    bool decode(const uint8_t* from, int64_t size, uint8_t* block) {
        if (size != layout.encoded_bytes || memcmp(from, layout.header, HEADER_BYTES)) return false;
        const uint8_t *scales = from + layout.scales, *codes = from + layout.codes;
        if (!are_valid(scales)) return false;
        for (int64_t plane = 0; plane < layout.num_planes; ++plane) {
            for (int64_t place = 0; place < layout.row; place += GROUP) {
                Floats values[N];
                coder.template decode<MEAN_BITS>(next_scale(scales), codes, values);
                memcpy(&means[size_t(place)], values, sizeof values);
                codes += GROUP * MEAN_BITS / 8;
            }
            uint8_t* to = block + plane * layout.block_tokens * row_size();
            for (int64_t token = 0; token < layout.block_tokens; ++token)
                decode_token(scales, codes, to + token * row_size());
        }
        return true;
    }

private:
    static constexpr int N = GROUP / LANES;
    using Word = std::conditional_t<FLOAT32, uint32_t, uint16_t>;
    const RotatedLayout& layout;
    const GroupCoder<GROUP> coder;
    std::vector<float> means;

    int64_t row_size() const { return layout.row * value_bytes(FLOAT32); }

    static uint16_t next_scale(const uint8_t*& scales) {
        const uint16_t scale = load_as<uint16_t>(scales);
        scales += 2;
        return scale;
    }

    bool are_valid(const uint8_t* scales) const {
        const int64_t count =
            layout.num_planes * (1 + layout.block_tokens) * (layout.row / GROUP);
        uint16_t largest = 0, limit = uint16_t(bits_of(Floats{} + layout.max_scale)[0] >> 16);
        for (int64_t i = 0; i < count; ++i) {
            const uint16_t scale = load_as<uint16_t>(scales + 2 * i);
            largest = scale > largest ? scale : largest;
        }
        return largest <= limit;
    }

    template <bool LIMITED>
    void encode_plane(const uint8_t* from, uint8_t*& scales, uint8_t*& codes) {
        encode_mean<LIMITED>(from, scales, codes);
        for (int64_t token = 0; token < layout.block_tokens; ++token)
            encode_token<LIMITED>(from + token * row_size(), scales, codes);
    }

    // Encode the mean of the tokens, and keep the decoded one.
    template <bool LIMITED>
    void encode_mean(const uint8_t* from, uint8_t*& scales, uint8_t*& codes) {
        for (int64_t place = 0; place < layout.row; place += GROUP) {
            Floats values[N] = {};
            for (int64_t token = 0; token < layout.block_tokens; ++token)
                for (int i = 0; i < N; ++i) {
                    const Floats next = bounded<LIMITED>(from + token * row_size(), place + i * LANES);
                    values[i] = token ? values[i] + next : next;
                }
            for (int i = 0; i < N; ++i) values[i] *= layout.mean_factor;
            const uint16_t scale = coder.template encode<MEAN_BITS>(values, codes);
            coder.template decode<MEAN_BITS>(scale, codes, values);
            memcpy(&means[size_t(place)], values, sizeof values);
            memcpy(scales, &scale, 2);
            scales += 2;
            codes += GROUP * MEAN_BITS / 8;
        }
    }

    template <bool LIMITED>
    void encode_token(const uint8_t* from, uint8_t*& scales, uint8_t*& codes) {
        for (int64_t place = 0; place < layout.row; place += GROUP) {
            Floats values[N];
            for (int i = 0; i < N; ++i)
                values[i] = bounded<LIMITED>(from, place + i * LANES) -
                            load_as<Floats>(&means[size_t(place + i * LANES)]);
            const uint16_t scale = coder.template encode<BITS>(values, codes);
            memcpy(scales, &scale, 2);
            scales += 2;
            codes += GROUP * BITS / 8;
        }
    }

    void decode_token(const uint8_t*& scales, const uint8_t*& codes, uint8_t* to) {
        for (int64_t place = 0; place < layout.row; place += GROUP) {
            Floats values[N];
            coder.template decode<BITS>(next_scale(scales), codes, values);
            for (int i = 0; i < N; ++i)
                store_values<FLOAT32>(
                    values[i] + load_as<Floats>(&means[size_t(place + i * LANES)]),
                    to + (place + i * LANES) * value_bytes(FLOAT32));
            codes += GROUP * BITS / 8;
        }
    }

    template <bool LIMITED>
    Floats bounded(const uint8_t* row, int64_t place) const {
        return load_bounded<FLOAT32, LIMITED>(row + place * value_bytes(FLOAT32), layout.max_value);
    }
};
