// Vectors of sixteen numbers in a register of 512 bits: AVX-512, with or without its BF16
// instructions.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace baton {

using Vec = __m512;       // in FP32
using Words = __m512i;    // 32 bits each, of any type
using Lanes = __mmask16;  // a mask of the first lanes

constexpr Lanes kAllLanes = 0xffff;

// Returns the first `count` lanes: none if it is below one, all if it is sixteen or more.
inline Lanes lanes(long count) {
  if (count >= 16) return kAllLanes;
  return count > 0 ? static_cast<Lanes>((1u << count) - 1) : 0;
}

// Returns how many vectors of columns can be computed at once with the sums in registers.
constexpr long vectors_at_once(long) { return 4; }

inline Vec zeros() { return _mm512_setzero_ps(); }
inline Vec broadcast(float value) { return _mm512_set1_ps(value); }
inline Vec load(const float* from) { return _mm512_loadu_ps(from); }
inline Vec load(const float* from, Lanes which) { return _mm512_maskz_loadu_ps(which, from); }
inline void store(float* to, Vec value) { _mm512_storeu_ps(to, value); }
inline void store(float* to, Lanes which, Vec value) { _mm512_mask_storeu_ps(to, which, value); }
inline Vec blend(Lanes which, Vec these, Vec others) {
  return _mm512_mask_blend_ps(which, others, these);
}

// Compute a * b + c and c - a * b, rounded once.
inline Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
inline Vec fnma(Vec a, Vec b, Vec c) { return _mm512_fnmadd_ps(a, b, c); }
// Return b where a or b is NaN.
inline Vec min_lanes(Vec a, Vec b) { return _mm512_min_ps(a, b); }
inline Vec max_lanes(Vec a, Vec b) { return _mm512_max_ps(a, b); }
inline Vec round_lanes(Vec x) {
  return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
// Computes x * 2^n for integer n, rounded once.
inline Vec times_power_of_two(Vec x, Vec n) { return _mm512_scalef_ps(x, n); }
// Computes x - floor(x), and x * 2^floor(n).
inline Vec fraction(Vec x) { return _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); }
inline Vec times_power_of_floor(Vec x, Vec n) { return _mm512_scalef_ps(x, n); }

// Reductions over all lanes. Sums are always added in the same order: first the lanes eight apart,
// then four apart, then two apart.
inline float reduce_sum(Vec x) {
  const __m256 upper = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(x), 1));
  const __m256 eight = _mm512_castps512_ps256(x) + upper;
  const __m128 four = _mm256_castps256_ps128(eight) + _mm256_extractf128_ps(eight, 1);
  const __m128 two = four + _mm_movehl_ps(four, four);
  return two[0] + two[1];
}
inline float reduce_min(Vec x) { return _mm512_reduce_min_ps(x); }
inline float reduce_max(Vec x) { return _mm512_reduce_max_ps(x); }
inline float first_lane(Vec x) { return _mm512_cvtss_f32(x); }
// Returns whether a lane of a is greater than that of b.
inline bool any_above(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ) != 0; }
inline bool all_finite(Vec x) {
  constexpr int kNotFinite = 0x01 | 0x80 | 0x08 | 0x10;  // both kinds of NaN, both infinities
  return !_mm512_fpclass_ps_mask(x, kNotFinite);
}

inline Vec as_numbers(Words words) { return _mm512_castsi512_ps(words); }
inline Words as_words(Vec x) { return _mm512_castps_si512(x); }
inline Words zero_words() { return _mm512_setzero_si512(); }
inline Words broadcast_word(uint32_t word) { return _mm512_set1_epi32(static_cast<int>(word)); }
inline Words load_words(const void* from) { return _mm512_loadu_si512(from); }
inline Words load_words(const uint32_t* from, Lanes which) {
  return _mm512_maskz_loadu_epi32(which, from);
}
inline void store_words(void* to, Words words) { _mm512_storeu_si512(to, words); }
inline Words xor_words(Words a, Words b) { return _mm512_xor_si512(a, b); }
inline int reduce_sum(Words words) { return _mm512_reduce_add_epi32(words); }

// Convert the lower and the upper halves, which are in BF16, to FP32.
inline Vec lower(Words words) { return as_numbers(_mm512_slli_epi32(words, 16)); }
inline Vec upper(Words words) {
  return as_numbers(_mm512_and_si512(words, _mm512_set1_epi32(static_cast<int>(0xffff0000))));
}

// Rounds to the nearest BF16, ties to even; returns 16 bits each.
inline __m256i narrow(Vec x) {
#ifdef __AVX512BF16__
  return reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x));
#else
  const Words bits = as_words(x);
  const Words odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const Words up = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __mmask16 nan_mask = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  const Words quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_mask_mov_epi32(up, nan_mask, quiet), 16));
#endif
}
inline Vec widen(__m256i bits) {
  return as_numbers(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}
inline Vec nearest_bf16(Vec x) { return widen(narrow(x)); }
inline Vec load_bf16(const void* from, Lanes which) {
  return widen(_mm256_maskz_loadu_epi16(which, from));
}
inline void store_bf16(void* to, Lanes which, Vec x) {
  _mm256_mask_storeu_epi16(to, which, narrow(x));
}
// Stores all lanes of both.
inline void store_bf16(void* to, Vec first, Vec second) {
#ifdef __AVX512BF16__
  _mm512_storeu_si512(to, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(second, first)));
#else
  store_bf16(to, kAllLanes, first);
  store_bf16(static_cast<uint16_t*>(to) + 16, kAllLanes, second);
#endif
}
inline Vec load_fp16(const void* from, Lanes which) {
  return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(which, from));
}

// Loads up to 32 numbers in BF16; the rest is zero.
inline Words load_halves(const uint16_t* from, long count) {
  return _mm512_maskz_loadu_epi16(lanes(count) | uint32_t(lanes(count - 16)) << 16, from);
}
// Interleave 16-bit halves of a and b within each 128 bits: the first four of the eight, or the
// last four.
inline Words unpack_low(Words a, Words b) { return _mm512_unpacklo_epi16(a, b); }
inline Words unpack_high(Words a, Words b) { return _mm512_unpackhi_epi16(a, b); }
// Interleaves groups of four lanes, `part` and `part + 1`, of a and b. This undoes the interleaving
// above for numbers that were widened to 32 bits.
template <int part>
inline Vec interleave_fours(Vec a, Vec b) {
  const Vec apart = _mm512_shuffle_f32x4(a, b, part | (part + 1) << 2 | part << 4 | (part + 1) << 6);
  return _mm512_shuffle_f32x4(apart, apart, 0 | 2 << 2 | 1 << 4 | 3 << 6);
}

// Transposes sixteen rows of sixteen words, in three rounds: pairs, fours and eights.
inline void transpose(Words block[16]) {
  Words pairs[16], fours[16];
  for (int i = 0; i < 16; i += 2) {
    pairs[i] = _mm512_unpacklo_epi32(block[i], block[i + 1]);
    pairs[i + 1] = _mm512_unpackhi_epi32(block[i], block[i + 1]);
  }
  // fours[4 g + j], lane group q: word 4 q + j of rows 4 g to 4 g + 3.
  for (int g = 0; g < 16; g += 4) {
    fours[g] = _mm512_unpacklo_epi64(pairs[g], pairs[g + 2]);
    fours[g + 1] = _mm512_unpackhi_epi64(pairs[g], pairs[g + 2]);
    fours[g + 2] = _mm512_unpacklo_epi64(pairs[g + 1], pairs[g + 3]);
    fours[g + 3] = _mm512_unpackhi_epi64(pairs[g + 1], pairs[g + 3]);
  }
  for (int j = 0; j < 4; ++j) {
    const Words low = _mm512_shuffle_i32x4(fours[j], fours[4 + j], 0x44);
    const Words high = _mm512_shuffle_i32x4(fours[j], fours[4 + j], 0xee);
    const Words low2 = _mm512_shuffle_i32x4(fours[8 + j], fours[12 + j], 0x44);
    const Words high2 = _mm512_shuffle_i32x4(fours[8 + j], fours[12 + j], 0xee);
    block[j] = _mm512_shuffle_i32x4(low, low2, 0x88);
    block[4 + j] = _mm512_shuffle_i32x4(low, low2, 0xdd);
    block[8 + j] = _mm512_shuffle_i32x4(high, high2, 0x88);
    block[12 + j] = _mm512_shuffle_i32x4(high, high2, 0xdd);
  }
}

// Conversions for quantized weights.

inline Vec load_bytes(const uint8_t* from) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
}
inline void store_bytes(int8_t* to, Lanes which, Vec whole) {
  _mm_mask_storeu_epi8(to, which, _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(whole)));
}
// Packs both to BF16, even in the lower and odd in the upper half; BF16 must hold them exactly.
inline Words pack_bf16_pairs(Vec even, Vec odd) {
  // Bytes 2 and 3 of the even ones go below those of the odd ones: the upper half of a number in
  // FP32 is that number in BF16, where its lower half is zero.
  const Words upper_half = _mm512_set4_epi32(0x0f0e0f0e, 0x0b0a0b0a, 0x07060706, 0x03020302);
  return _mm512_mask_shuffle_epi8(as_words(odd), 0x3333333333333333, as_words(even), upper_half);
}
// Decode the four bits from `shift` on in each word (nibbles), or in both halves of each word, to
// BF16 (pairs_of_nibbles). They are looked up in a table by their lowest four or five bits; where a
// fifth bit counts, the table contains everything twice.
inline Vec nibble_table() {
  return _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
}
inline Vec nibbles(Words words, unsigned shift) {
  return _mm512_permutexvar_ps(_mm512_srli_epi32(words, shift), nibble_table());
}
inline Words pairs_of_nibbles(Words words, unsigned shift) {
  const __m512i bits = _mm512_srli_epi32(as_words(nibble_table()), 16);
  const __m512i once = _mm512_castsi256_si512(_mm512_cvtepi32_epi16(bits));
  const __m512i table = _mm512_shuffle_i64x2(once, once, 0x44);
  return _mm512_permutexvar_epi16(_mm512_srli_epi16(words, shift), table);
}

}  // namespace baton
