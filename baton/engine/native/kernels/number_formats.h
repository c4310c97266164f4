// The number formats of weights and activations, and functions in FP32.
#pragma once

#include <initializer_list>

#include "vectors.h"

namespace baton {

struct Bf16 {
  uint16_t bits;
};

// The values must equal those in baton/engine/native/library.py; FP16 and blocks are only read.
enum Kind { kFloat32 = 0, kBfloat16 = 1, kFloat16 = 2, kQ4_1Blocks = 3 };

template <class T>
struct Format;

inline Vec exp_lanes(Vec x);
inline Vec exp2_lanes(Vec x);
inline Vec small_exp2_lanes(Vec x);

template <>
struct Format<float> {
  static constexpr Kind kKind = kFloat32;
  static constexpr long kPerUnit = 1;
  static constexpr uint32_t kOnes = 0x3f800000;  // a unit of ones

  static Vec load(const float* from, Lanes which) { return baton::load(from, which); }
  static void store(float* to, Lanes which, Vec value) { baton::store(to, which, value); }
  // Stores 32 numbers.
  static void store_two(float* to, Vec first, Vec second) {
    baton::store(to, first);
    baton::store(to + kLanes, second);
  }
  static Vec rounded(Vec value) { return value; }
  static Vec multiply_add(Vec sum, Words a, Words b) {
    return fma(as_numbers(a), as_numbers(b), sum);
  }
  // power(kLogarithm * x) is e to the power of x.
  static constexpr float kLogarithm = 1;
  static Vec power(Vec x) { return exp_lanes(x); }
  // The same, if its argument is at most 128; otherwise the result is any number.
  static Vec small_power(Vec x) { return exp_lanes(x); }
};

template <>
struct Format<Bf16> {
  static constexpr Kind kKind = kBfloat16;
  static constexpr long kPerUnit = 2;
  static constexpr uint32_t kOnes = 0x3f803f80;

  static Vec load(const Bf16* from, Lanes which) { return load_bf16(from, which); }
  static void store(Bf16* to, Lanes which, Vec value) { store_bf16(to, which, value); }
  static void store_two(Bf16* to, Vec first, Vec second) { store_bf16(to, first, second); }
  // Rounds to the nearest BF16, ties to even.
  static Vec rounded(Vec value) { return nearest_bf16(value); }
  static Vec multiply_add(Vec sum, Words a, Words b) { return add_pairs(sum, a, b); }
  // As above, with as much precision as results in BF16 need.
  static constexpr float kLogarithm = 1.44269504088896340736f;  // of e to base 2
  static Vec power(Vec x) { return exp2_lanes(x); }
  static Vec small_power(Vec x) { return small_exp2_lanes(x); }
};

// Loads sixteen numbers of any format.
inline Vec load_any(const void* from, Kind kind, long at, Lanes which) {
  if (kind == kFloat32) return load(static_cast<const float*>(from) + at, which);
  if (kind == kBfloat16) return load_bf16(static_cast<const Bf16*>(from) + at, which);
  return load_fp16(static_cast<const uint16_t*>(from) + at, which);
}

// Converts `count` numbers to another format in `to`, and returns `to`.
template <class T>
const T* convert(const void* from, Kind kind, long count, T* to) {
  for (long at = 0; at < count; at += kLanes) {
    const Lanes inside = lanes(count - at);
    Format<T>::store(to + at, inside, load_any(from, kind, at, inside));
  }
  return to;
}

// e to the power of `x`, within one unit in the last place (tests/unit/baton/engine/native/test_native_kernels.py).
// Splits x into n ln 2 + r with |r| <= ln 2 / 2, and sums the Taylor series of r up to the seventh
// power; the remainder is below 2^-27. Infinity, zero and NaN are handled correctly.
inline Vec exp_lanes(Vec x) {
  x = min_lanes(broadcast(89.0f), max_lanes(broadcast(-105.0f), x));
  const Vec n = round_lanes(x * broadcast(1.44269504088896340736f));
  // ln 2 in two parts: the first has so few digits that its product with n is exact.
  Vec r = fnma(n, broadcast(0.693145751953125f), x);
  r = fnma(n, broadcast(1.42860682030941723e-6f), r);
  Vec sum = broadcast(1.0f / 5040);
  for (const float inverse_factorial :
       {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 1.0f / 2, 1.0f, 1.0f})
    sum = fma(sum, r, broadcast(inverse_factorial));
  return times_power_of_two(sum, n);
}

// 2 to the power of `x`, within 2^-22 of the result (tests/unit/baton/engine/native/test_native_kernels.py). Results
// below 2^-126 are 2^-126, since some processors compute subnormal numbers a hundred times as slowly
// as others. Splits x into its floor and the fraction r, and sums the polynomial with the smallest
// relative error of those that are 1 at zero.
inline Vec exp2_lanes(Vec x) { return small_exp2_lanes(min_lanes(broadcast(128.0f), x)); }

// The same, if x is at most 128; otherwise the result is any number.
inline Vec small_exp2_lanes(Vec x) {
  x = max_lanes(broadcast(-126.0f), x);
  const Vec r = fraction(x);
  Vec sum = broadcast(0.0018671316793188453f);
  for (const float coefficient : {0.009017026983201504f, 0.05579991638660431f, 0.24016444385051727f,
                                  0.6931512951850891f, 1.0f})
    sum = fma(sum, r, broadcast(coefficient));
  return times_power_of_floor(sum, x);
}

}  // namespace baton
