// Vectors of sixteen numbers, for the instruction set that this is compiled for; all other files
// use them. All instruction sets give the same bits, except for subnormal numbers.
#pragma once

#ifdef __AVX512F__
#include "vectors512.h"
#else
#include "vectors256.h"
#endif

namespace baton {

// The input of one lane of a product: one FP32 number, or two adjacent BF16 numbers.
using Unit = uint32_t;

constexpr long kLanes = 16;

// Whether products of BF16 numbers are computed by tiles (tiles.h).
#if defined(BATON_AMX) || defined(BATON_EMULATED_AMX)
constexpr bool kHasTiles = true;
#else
constexpr bool kHasTiles = false;
#endif

// Prefetches a cache line to a cache level; the numbers are those of the compiler's builtin.
constexpr int kFirstLevel = 3, kSecondLevel = 2;
template <int Level>
inline __attribute__((always_inline)) void prefetch(const void* line) {
  __builtin_prefetch(line, 0, Level);
}

inline long ceil_div(long value, long by) { return (value + by - 1) / by; }

// Rounds to the nearest FP16, ties to even; numbers that are too large become infinite.
inline uint16_t to_fp16(float value) { return _cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT); }
inline float from_fp16(uint16_t bits) { return _cvtsh_ss(bits); }

// sum + the products of both BF16 halves of each word, the upper ones first.
inline Vec add_pairs(Vec sum, Words a, Words b) {
#ifdef __AVX512BF16__
  return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
#else
  return fma(lower(a), lower(b), fma(upper(a), upper(b), sum));
#endif
}

}  // namespace baton
