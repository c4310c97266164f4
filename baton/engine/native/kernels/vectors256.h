// Vectors of sixteen numbers in two registers of 256 bits: AVX2 and FMA. The functions are
// documented in vectors512.h.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace baton {

struct Vec {
  __m256 low, high;
};
struct Words {
  __m256i low, high;
};
using Lanes = long;  // number of lanes, from the first on

constexpr Lanes kAllLanes = 16;

inline Lanes lanes(long count) { return count >= 16 ? 16 : count > 0 ? count : 0; }

// There are sixteen registers: for twelve sums, two vectors of columns and the row's unit.
constexpr long vectors_at_once(long rows) { return rows == 1 ? 4 : rows == 2 ? 2 : 1; }

inline Vec operator+(Vec a, Vec b) { return {a.low + b.low, a.high + b.high}; }
inline Vec operator-(Vec a, Vec b) { return {a.low - b.low, a.high - b.high}; }
inline Vec operator*(Vec a, Vec b) { return {a.low * b.low, a.high * b.high}; }
inline Vec operator/(Vec a, Vec b) { return {a.low / b.low, a.high / b.high}; }

// Returns a mask of the first `count` of eight lanes.
inline __m256i mask_of(long count) {
  const __m256i index = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(count)), index);
}

inline Vec zeros() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline Vec broadcast(float value) { return {_mm256_set1_ps(value), _mm256_set1_ps(value)}; }
inline Vec load(const float* from) { return {_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)}; }
inline Vec load(const float* from, Lanes which) {
  if (which == kAllLanes) return load(from);
  return {_mm256_maskload_ps(from, mask_of(which)),
          _mm256_maskload_ps(from + 8, mask_of(which - 8))};
}
inline void store(float* to, Vec value) {
  _mm256_storeu_ps(to, value.low);
  _mm256_storeu_ps(to + 8, value.high);
}
inline void store(float* to, Lanes which, Vec value) {
  if (which == kAllLanes) return store(to, value);
  _mm256_maskstore_ps(to, mask_of(which), value.low);
  _mm256_maskstore_ps(to + 8, mask_of(which - 8), value.high);
}
inline Vec blend(Lanes which, Vec these, Vec others) {
  return {_mm256_blendv_ps(others.low, these.low, _mm256_castsi256_ps(mask_of(which))),
          _mm256_blendv_ps(others.high, these.high, _mm256_castsi256_ps(mask_of(which - 8)))};
}

inline Vec fma(Vec a, Vec b, Vec c) {
  return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
inline Vec fnma(Vec a, Vec b, Vec c) {
  return {_mm256_fnmadd_ps(a.low, b.low, c.low), _mm256_fnmadd_ps(a.high, b.high, c.high)};
}
inline Vec min_lanes(Vec a, Vec b) {
  return {_mm256_min_ps(a.low, b.low), _mm256_min_ps(a.high, b.high)};
}
inline Vec max_lanes(Vec a, Vec b) {
  return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)};
}
inline Vec round_lanes(Vec x) {
  constexpr int kHow = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(x.low, kHow), _mm256_round_ps(x.high, kHow)};
}
// Multiplies by half of the power twice: only the second product can become subnormal and round.
inline __m256 times_power_of_two(__m256 x, __m256 n) {
  const __m256i whole = _mm256_cvtps_epi32(n), half = _mm256_srai_epi32(whole, 1);
  const auto power = [](__m256i by) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(by, _mm256_set1_epi32(127)), 23));
  };
  return x * power(half) * power(_mm256_sub_epi32(whole, half));
}
inline Vec times_power_of_two(Vec x, Vec n) {
  return {times_power_of_two(x.low, n.low), times_power_of_two(x.high, n.high)};
}
inline Vec floor_lanes(Vec x) { return {_mm256_floor_ps(x.low), _mm256_floor_ps(x.high)}; }
inline Vec fraction(Vec x) { return x - floor_lanes(x); }
inline Vec times_power_of_floor(Vec x, Vec n) { return times_power_of_two(x, floor_lanes(n)); }

inline float reduce_sum(Vec x) {
  const __m256 eight = x.low + x.high;
  const __m128 four = _mm256_castps256_ps128(eight) + _mm256_extractf128_ps(eight, 1);
  const __m128 two = four + _mm_movehl_ps(four, four);
  return two[0] + two[1];
}
inline float reduce_min(Vec x) {
  const __m256 eight = _mm256_min_ps(x.low, x.high);
  const __m128 four = _mm_min_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_min_ps(four, _mm_movehl_ps(four, four));
  return two[0] < two[1] ? two[0] : two[1];
}
inline float reduce_max(Vec x) {
  const __m256 eight = _mm256_max_ps(x.low, x.high);
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return two[0] > two[1] ? two[0] : two[1];
}
inline float first_lane(Vec x) { return _mm256_cvtss_f32(x.low); }
inline bool any_above(Vec a, Vec b) {
  return _mm256_movemask_ps(_mm256_or_ps(_mm256_cmp_ps(a.low, b.low, _CMP_GT_OQ),
                                         _mm256_cmp_ps(a.high, b.high, _CMP_GT_OQ)));
}
// If x is not finite, x - x is NaN.
inline bool all_finite(Vec x) {
  const __m256 not_finite =
      _mm256_or_ps(_mm256_cmp_ps(x.low - x.low, x.low - x.low, _CMP_UNORD_Q),
                   _mm256_cmp_ps(x.high - x.high, x.high - x.high, _CMP_UNORD_Q));
  return !_mm256_movemask_ps(not_finite);
}

inline Vec as_numbers(Words words) {
  return {_mm256_castsi256_ps(words.low), _mm256_castsi256_ps(words.high)};
}
inline Words as_words(Vec x) { return {_mm256_castps_si256(x.low), _mm256_castps_si256(x.high)}; }
inline Words zero_words() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
inline Words broadcast_word(uint32_t word) {
  const __m256i eight = _mm256_set1_epi32(static_cast<int>(word));
  return {eight, eight};
}
inline Words load_words(const void* from) {
  const auto* halves = static_cast<const __m256i*>(from);
  return {_mm256_loadu_si256(halves), _mm256_loadu_si256(halves + 1)};
}
inline Words load_words(const uint32_t* from, Lanes which) {
  if (which == kAllLanes) return load_words(from);
  const auto* words = reinterpret_cast<const int*>(from);
  return {_mm256_maskload_epi32(words, mask_of(which)),
          _mm256_maskload_epi32(words + 8, mask_of(which - 8))};
}
inline void store_words(void* to, Words words) {
  auto* halves = static_cast<__m256i*>(to);
  _mm256_storeu_si256(halves, words.low);
  _mm256_storeu_si256(halves + 1, words.high);
}
inline Words xor_words(Words a, Words b) {
  return {_mm256_xor_si256(a.low, b.low), _mm256_xor_si256(a.high, b.high)};
}
inline int reduce_sum(Words words) {
  uint32_t each[8], sum = 0;
  const __m256i eight = _mm256_add_epi32(words.low, words.high);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(each), eight);
  for (const uint32_t one : each) sum += one;
  return static_cast<int>(sum);
}

inline Vec lower(Words words) {
  return as_numbers(Words{_mm256_slli_epi32(words.low, 16), _mm256_slli_epi32(words.high, 16)});
}
inline Vec upper(Words words) {
  const __m256i half = _mm256_set1_epi32(static_cast<int>(0xffff0000));
  return as_numbers(Words{_mm256_and_si256(words.low, half), _mm256_and_si256(words.high, half)});
}

// The results are in the upper halves; the lower ones are zero.
inline __m256i nearest_bf16(__m256 x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i up = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  const __m256i nan_mask = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  return _mm256_and_si256(_mm256_blendv_epi8(up, quiet, nan_mask),
                          _mm256_set1_epi32(static_cast<int>(0xffff0000)));
}
inline Vec nearest_bf16(Vec x) {
  return as_numbers(Words{nearest_bf16(x.low), nearest_bf16(x.high)});
}
inline __m256i narrow(Vec x) {
  const Words bits = as_words(nearest_bf16(x));
  const __m256i packed =
      _mm256_packus_epi32(_mm256_srli_epi32(bits.low, 16), _mm256_srli_epi32(bits.high, 16));
  return _mm256_permute4x64_epi64(packed, 0xd8);  // it packed within each 128 bits
}
inline Vec widen(__m256i bits) {
  const __m256i low = _mm256_cvtepu16_epi32(_mm256_castsi256_si128(bits));
  const __m256i high = _mm256_cvtepu16_epi32(_mm256_extracti128_si256(bits, 1));
  return lower(Words{low, high});
}

// Loads the first of sixteen 16-bit numbers, for which AVX2 has no masked load.
inline __m256i some_halves(const void* from, Lanes which) {
  if (which == kAllLanes) return _mm256_loadu_si256(static_cast<const __m256i*>(from));
  uint16_t halves[16] = {};
  std::memcpy(halves, from, static_cast<size_t>(which) * sizeof *halves);
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(halves));
}
inline Vec load_bf16(const void* from, Lanes which) { return widen(some_halves(from, which)); }
inline void store_bf16(void* to, Lanes which, Vec x) {
  uint16_t halves[16];
  auto* place = which == kAllLanes ? static_cast<__m256i*>(to) : reinterpret_cast<__m256i*>(halves);
  _mm256_storeu_si256(place, narrow(x));
  if (which != kAllLanes) std::memcpy(to, halves, static_cast<size_t>(which) * sizeof *halves);
}
inline void store_bf16(void* to, Vec first, Vec second) {
  store_bf16(to, kAllLanes, first);
  store_bf16(static_cast<uint16_t*>(to) + 16, kAllLanes, second);
}
inline Vec load_fp16(const void* from, Lanes which) {
  const __m256i halves = some_halves(from, which);
  return {_mm256_cvtph_ps(_mm256_castsi256_si128(halves)),
          _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1))};
}

inline Words load_halves(const uint16_t* from, long count) {
  return {some_halves(from, lanes(count)),
          count > 16 ? some_halves(from + 16, lanes(count - 16)) : _mm256_setzero_si256()};
}
inline Words unpack_low(Words a, Words b) {
  return {_mm256_unpacklo_epi16(a.low, b.low), _mm256_unpacklo_epi16(a.high, b.high)};
}
inline Words unpack_high(Words a, Words b) {
  return {_mm256_unpackhi_epi16(a.low, b.low), _mm256_unpackhi_epi16(a.high, b.high)};
}
template <int part>
inline Vec interleave_fours(Vec a, Vec b) {
  const __m256 own = part ? a.high : a.low, other = part ? b.high : b.low;
  return {_mm256_permute2f128_ps(own, other, 0x20), _mm256_permute2f128_ps(own, other, 0x31)};
}

// Transposes eight rows of eight words.
inline void transpose(__m256i block[8]) {
  __m256i pairs[8], fours[8];
  for (int i = 0; i < 8; i += 2) {
    pairs[i] = _mm256_unpacklo_epi32(block[i], block[i + 1]);
    pairs[i + 1] = _mm256_unpackhi_epi32(block[i], block[i + 1]);
  }
  for (int g = 0; g < 8; g += 4) {
    fours[g] = _mm256_unpacklo_epi64(pairs[g], pairs[g + 2]);
    fours[g + 1] = _mm256_unpackhi_epi64(pairs[g], pairs[g + 2]);
    fours[g + 2] = _mm256_unpacklo_epi64(pairs[g + 1], pairs[g + 3]);
    fours[g + 3] = _mm256_unpackhi_epi64(pairs[g + 1], pairs[g + 3]);
  }
  for (int j = 0; j < 4; ++j) {
    block[j] = _mm256_permute2x128_si256(fours[j], fours[4 + j], 0x20);
    block[4 + j] = _mm256_permute2x128_si256(fours[j], fours[4 + j], 0x31);
  }
}
inline void transpose(Words block[16]) {
  for (int rows = 0; rows < 16; rows += 8) {
    __m256i low[8], high[8];
    for (int i = 0; i < 8; ++i) low[i] = block[rows + i].low, high[i] = block[rows + i].high;
    transpose(low);
    transpose(high);
    for (int i = 0; i < 8; ++i) block[rows + i] = {low[i], high[i]};
  }
  for (int i = 0; i < 8; ++i) {
    const __m256i kept = block[i].high;
    block[i].high = block[8 + i].low;
    block[8 + i].low = kept;
  }
}

inline Vec load_bytes(const uint8_t* from) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)),
          _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8)))};
}
inline void store_bytes(int8_t* to, Lanes which, Vec whole) {
  int32_t words[16];
  store_words(words, Words{_mm256_cvtps_epi32(whole.low), _mm256_cvtps_epi32(whole.high)});
  for (Lanes lane = 0; lane < which; ++lane) to[lane] = static_cast<int8_t>(words[lane]);
}
inline Words pack_bf16_pairs(Vec even, Vec odd) {
  const Words below = as_words(even), above = as_words(odd);
  return {_mm256_blend_epi16(_mm256_srli_epi32(below.low, 16), above.low, 0xaa),
          _mm256_blend_epi16(_mm256_srli_epi32(below.high, 16), above.high, 0xaa)};
}
inline __m256 nibbles(__m256i words, int shift) {
  const __m256i bits = _mm256_and_si256(_mm256_srli_epi32(words, shift), _mm256_set1_epi32(15));
  return _mm256_cvtepi32_ps(bits);
}
inline Vec nibbles(Words words, unsigned shift) {
  const int by = static_cast<int>(shift);
  return {nibbles(words.low, by), nibbles(words.high, by)};
}
inline Words pairs_of_nibbles(Words words, unsigned shift) {
  const auto half = [&](__m256i eight) {
    const int by = static_cast<int>(shift);
    const __m256 even = nibbles(eight, by), odd = nibbles(eight, by + 16);
    return _mm256_blend_epi16(_mm256_srli_epi32(_mm256_castps_si256(even), 16),
                              _mm256_castps_si256(odd), 0xaa);
  };
  return {half(words.low), half(words.high)};
}

}  // namespace baton
