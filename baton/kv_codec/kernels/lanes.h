// Vectors of float and of int32 as wide as a register, and values of blocks in them.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#ifdef __AVX512BW__
constexpr int LANES = 16;
#else
constexpr int LANES = 8;
#endif

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t Bits __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));
typedef uint8_t Bytes __attribute__((vector_size(LANES)));

template <typename Vector>
inline Vector load_as(const void* from) {
    Vector vector;
    memcpy(&vector, from, sizeof vector);
    return vector;
}

inline Bits bits_of(Floats values) { return (Bits)values; }

// Load values of a block's dtype.
template <bool FLOAT32>
inline Floats load_values(const uint8_t* from) {
    if (FLOAT32) return load_as<Floats>(from);
    return (Floats)(__builtin_convertvector(load_as<Halves>(from), Bits) << 16);
}

// Round values to the block's dtype and store them.
template <bool FLOAT32>
inline void store_values(Floats values, uint8_t* to) {
    if (FLOAT32) {
        memcpy(to, &values, sizeof values);
        return;
    }
    const Bits bits = bits_of(values);
    const Bits upper = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const Halves halves = __builtin_convertvector(upper, Halves);
    memcpy(to, &halves, sizeof halves);
}

// Store the low byte of each lane.
inline void store_bytes(Ints values, uint8_t* to) {
#ifdef __AVX512BW__
    const __m128i bytes = _mm512_cvtepi32_epi8((__m512i)values);
    _mm_storeu_si128((__m128i*)to, bytes);
#else
    const __m256i order = _mm256_setr_epi8(0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1,
                                           -1, 0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1,
                                           -1, -1);
    const __m256i bytes = _mm256_shuffle_epi8((__m256i)values, order);
    const int low = _mm_cvtsi128_si32(_mm256_castsi256_si128(bytes));
    const int high = _mm_cvtsi128_si32(_mm256_extracti128_si256(bytes, 1));
    memcpy(to, &low, 4);
    memcpy(to + 4, &high, 4);
#endif
}

// Load a byte into each lane.
inline Ints load_bytes(const uint8_t* from) {
#ifdef __AVX512BW__
    return (Ints)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)from));
#else
    return (Ints)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)from));
#endif
}

// Return the values with those lanes exchanged whose indices differ in the bit STRIDE.
template <int STRIDE>
inline Floats exchanged(Floats values) {
#ifdef __AVX512BW__
    const __m512 x = (__m512)values;
    if (STRIDE == 8) return (Floats)_mm512_shuffle_f32x4(x, x, 0x4e);
    if (STRIDE == 4) return (Floats)_mm512_shuffle_f32x4(x, x, 0xb1);
    return (Floats)_mm512_permute_ps(x, STRIDE == 2 ? 0x4e : 0xb1);
#else
    const __m256 x = (__m256)values;
    if (STRIDE == 4) return (Floats)_mm256_permute2f128_ps(x, x, 0x01);
    return (Floats)_mm256_permute_ps(x, STRIDE == 2 ? 0x4e : 0xb1);
#endif
}

// Return the entries of a table of LANES floats at `indices`, which are below LANES.
inline Floats look_up(Floats table, Ints indices) {
#ifdef __AVX512BW__
    return (Floats)_mm512_permutexvar_ps((__m512i)indices, (__m512)table);
#else
    return (Floats)_mm256_permutevar8x32_ps((__m256)table, (__m256i)indices);
#endif
}

// Return x * y + z, rounded once.
inline Floats multiply_add(Floats x, Floats y, Floats z) {
#ifdef __AVX512BW__
    return (Floats)_mm512_fmadd_ps((__m512)x, (__m512)y, (__m512)z);
#else
    return (Floats)_mm256_fmadd_ps((__m256)x, (__m256)y, (__m256)z);
#endif
}

// Add 1 to those counts whose value is greater than its threshold.
inline Ints plus_one_where_greater(Ints counts, Floats values, Floats thresholds) {
#ifdef __AVX512BW__
    const __mmask16 is_greater =
        _mm512_cmp_ps_mask((__m512)values, (__m512)thresholds, _CMP_GT_OQ);
    const __m512i before = (__m512i)counts;
    return (Ints)_mm512_mask_add_epi32(before, is_greater, before, _mm512_set1_epi32(1));
#else
    return counts - (Ints)(values > thresholds);
#endif
}

// Counts which of seven ascending thresholds are below values. They are below 4, and each more than
// 1/4 apart from the next.
class ThresholdCounter {
public:
    ThresholdCounter() = default;

    explicit ThresholdCounter(const float* thresholds) {
        for (int i = 0; i < 7; ++i) all[i] = thresholds[i];
#ifdef __AVX512BW__
        for (int cell = 0; cell < LANES; ++cell) {
            in_cell[cell] = __builtin_inff();
            before_cell[cell] = 0;
            for (int i = 0; i < 7; ++i) {
                const int found = int(thresholds[i] * CELLS_PER_UNIT);
                if (found < cell) ++before_cell[cell];
                if (found == cell) in_cell[cell] = thresholds[i];
            }
        }
#endif
    }

    // `values` are at least 0 and below 2^29.
    Ints count(Floats values) const {
#ifdef __AVX512BW__
        // A cell has at most one threshold, so one comparison decides.
        const __m512 cells = _mm512_mul_ps((__m512)values, _mm512_set1_ps(CELLS_PER_UNIT));
        const __m512i cell =
            _mm512_min_epu32(_mm512_cvttps_epi32(cells), _mm512_set1_epi32(LANES - 1));
        const __m512i before = _mm512_permutexvar_epi32(cell, (__m512i)before_cell);
        return plus_one_where_greater((Ints)before, values, look_up(in_cell, (Ints)cell));
#else
        Ints counts = {};
        for (float threshold : all)
            counts = plus_one_where_greater(counts, values, Floats{} + threshold);
        return counts;
#endif
    }

private:
    static constexpr float CELLS_PER_UNIT = 4;
    float all[7];
    Floats in_cell;
    Ints before_cell;
};
