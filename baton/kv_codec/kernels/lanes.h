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

// Add 1 to those counts whose value is greater than a threshold.
inline Ints plus_one_where_greater(Ints counts, Floats values, float threshold) {
#ifdef __AVX512BW__
    const __mmask16 is_greater =
        _mm512_cmp_ps_mask((__m512)values, _mm512_set1_ps(threshold), _CMP_GT_OQ);
    const __m512i before = (__m512i)counts;
    return (Ints)_mm512_mask_add_epi32(before, is_greater, before, _mm512_set1_epi32(1));
#else
    return counts - (Ints)(values > threshold);
#endif
}
