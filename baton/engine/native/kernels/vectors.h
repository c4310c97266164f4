// Sixteen numbers at a time, by whatever instructions this is compiled for: what all else is
// written in. The same bits come out of all of them, but for numbers below the least normal one.
#pragma once

#ifdef __AVX512F__
#include "vectors512.h"
#else
#include "vectors256.h"
#endif

namespace baton {

// What one lane of a product takes at a time: one FP32 number, or two neighbours in BF16.
using Unit = uint32_t;

constexpr long kLanes = 16;

// Has a line of memory brought to a level of the cache, in the numbers of the compilers' builtin.
constexpr int kFirstLevel = 3, kSecondLevel = 2;
template <int Level>
inline __attribute__((always_inline)) void fetch(const void* line) {
  __builtin_prefetch(line, 0, Level);
}

inline long ceil_div(long value, long by) { return (value + by - 1) / by; }

// sum + the products of both halves of each word, in BF16: the upper ones first.
inline Vec add_pairs(Vec sum, Words a, Words b) {
#ifdef __AVX512BF16__
  return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
#else
  return fma(lower(a), lower(b), fma(upper(a), upper(b), sum));
#endif
}

}  // namespace baton
