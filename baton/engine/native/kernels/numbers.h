// Numbers, sixteen at a time: FP32 to compute with, and the formats they are kept in.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace baton {

using Vec = __m512;
using Lanes = __mmask16;

// What one lane of a product takes at a time: one FP32 number, or two neighbours in BF16.
using Unit = uint32_t;

constexpr long kLanes = 16;

struct Bf16 {
  uint16_t bits;
};

// Formats of numbers as baton/engine/native/library.py has them; FP16 is only read.
enum Kind { kFloat32 = 0, kBfloat16 = 1, kFloat16 = 2 };

inline long size_of(Kind kind) { return kind == kFloat32 ? 4 : 2; }

// The first `count` lanes; none below one, all from sixteen on.
inline Lanes lanes(long count) {
  if (count >= kLanes) return 0xffff;
  return count > 0 ? static_cast<Lanes>((1u << count) - 1) : 0;
}

inline long ceil_div(long value, long by) { return (value + by - 1) / by; }

template <class T>
struct Format;

template <>
struct Format<float> {
  static constexpr Kind kKind = kFloat32;
  static constexpr long kPerUnit = 1;

  static Vec load(const float* from, Lanes which) { return _mm512_maskz_loadu_ps(which, from); }
  static void store(float* to, Lanes which, Vec value) { _mm512_mask_storeu_ps(to, which, value); }
  static Vec rounded(Vec value) { return value; }
  static Vec multiply_add(Vec sum, __m512i a, __m512i b) {
    return _mm512_fmadd_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b), sum);
  }
};

template <>
struct Format<Bf16> {
  static constexpr Kind kKind = kBfloat16;
  static constexpr long kPerUnit = 2;

  static Vec widen(__m256i bits) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
  }
  static __m256i narrow(Vec value) { return reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(value)); }
  static Vec load(const Bf16* from, Lanes which) {
    return widen(_mm256_maskz_loadu_epi16(which, from));
  }
  static void store(Bf16* to, Lanes which, Vec value) {
    _mm256_mask_storeu_epi16(to, which, narrow(value));
  }
  // To the nearest number of the format, ties to even.
  static Vec rounded(Vec value) { return widen(narrow(value)); }
  static Vec multiply_add(Vec sum, __m512i a, __m512i b) {
    return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
  }
};

// Sixteen numbers of any format.
inline Vec load_any(const void* from, Kind kind, long at, Lanes which) {
  if (kind == kFloat32) return Format<float>::load(static_cast<const float*>(from) + at, which);
  if (kind == kBfloat16) return Format<Bf16>::load(static_cast<const Bf16*>(from) + at, which);
  const uint16_t* halves = static_cast<const uint16_t*>(from) + at;
  return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(which, halves));
}

// `count` numbers in another format; what they become.
template <class T>
const T* convert(const void* from, Kind kind, long count, T* to) {
  for (long at = 0; at < count; at += kLanes) {
    const Lanes inside = lanes(count - at);
    Format<T>::store(to + at, inside, load_any(from, kind, at, inside));
  }
  return to;
}

// e to the power of `x`, within one unit in the last place (tests/unit/test_native_kernels.py).
// Splits x into n ln 2 + r with |r| <= ln 2 / 2, and sums the Taylor series of r up to the seventh
// power, whose rest is below 2^-27. Infinity, zero, and NaN come out where they should.
inline Vec exponential(Vec x) {
  const Vec least = _mm512_set1_ps(-105.0f), most = _mm512_set1_ps(89.0f);
  x = _mm512_min_ps(most, _mm512_max_ps(least, x));  // the second operand wins if it is NaN
  const Vec n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504088896340736f)),
                                     _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  // ln 2 in two parts: the first has so few digits that its product with n is exact.
  Vec r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693145751953125f), x);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(1.42860682030941723e-6f), r);
  Vec sum = _mm512_set1_ps(1.0f / 5040);
  for (const float inverse_factorial :
       {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 1.0f / 2, 1.0f, 1.0f})
    sum = _mm512_fmadd_ps(sum, r, _mm512_set1_ps(inverse_factorial));
  return _mm512_scalef_ps(sum, n);
}

}  // namespace baton
