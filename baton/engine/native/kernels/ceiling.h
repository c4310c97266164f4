// What this core could do at most: products without memory, and memory without products.
#pragma once

#include "tile.h"

namespace baton {

// `steps` times 24 products of vectors that stay in registers, as the microkernel has them; the
// sum of all lanes, so that nothing can be left out.
template <class T>
float products_only(long steps) {
  constexpr long kSums = 24;
  Vec sum[kSums];
  for (Vec& one : sum) one = _mm512_setzero_ps();
  const __m512i some = _mm512_set1_epi32(0x3f803f80);  // ones in BF16, about one in FP32
  for (long step = 0; step < steps; ++step)
#pragma GCC unroll 24
    for (long i = 0; i < kSums; ++i) sum[i] = Format<T>::multiply_add(sum[i], some, some);
  Vec total = _mm512_setzero_ps();
  for (const Vec& one : sum) total = _mm512_add_ps(total, one);
  return _mm512_reduce_add_ps(total);
}

// Reads `count` vectors, one after the other.
inline int reads_only(const __m512i* from, long count) {
  __m512i sum[4] = {};
  for (long i = 0; i + 4 <= count; i += 4)
    for (long j = 0; j < 4; ++j) {
      _mm_prefetch(from + i + j + 64, _MM_HINT_T0);
      sum[j] = _mm512_xor_si512(sum[j], _mm512_load_si512(from + i + j));
    }
  return _mm512_reduce_add_epi32(
      _mm512_xor_si512(_mm512_xor_si512(sum[0], sum[1]), _mm512_xor_si512(sum[2], sum[3])));
}

}  // namespace baton
