// The product of a few rows and 64 columns: what both the weights and attention are made of.
#pragma once

#include <algorithm>

#include "numbers.h"

namespace baton {

constexpr long kColumns = 64;    // of a tile: four vectors
constexpr long kRowsAtOnce = 6;  // 24 sums, 4 vectors of columns and one of the row fit 32 registers
constexpr long kDepthBlock = 64;  // units of depth, whose 64 columns take half the first-level cache
constexpr long kNear = 32 * kColumns;  // units: what is asked for farther ahead waits one level below

// sums[R][64] = rows[R][depth] * columns[depth][64], added to what is there unless `fresh`.
//
// `depth` counts units; of a row they lie side by side. Every sum runs over the depth in its
// order, whatever R is, so that a row's result has the same bits in any company. Memory is asked for
// `Ahead` units before they are used (0: not at all), since its own guess stops at each page's end.
template <class T, long R, long Ahead>
inline __attribute__((always_inline)) void multiply_few(const Unit* rows, long row_stride,
                                                        const Unit* columns, long column_stride,
                                                        long depth, float* sums, long sums_stride,
                                                        bool fresh) {
  constexpr long kVectors = kColumns / kLanes;
  constexpr auto kPlace = Ahead > kNear ? _MM_HINT_T1 : _MM_HINT_T0;
  Vec sum[R][kVectors];
#pragma GCC unroll 6
  for (long r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (long v = 0; v < kVectors; ++v)
      sum[r][v] = fresh ? _mm512_setzero_ps() : _mm512_loadu_ps(sums + r * sums_stride + v * kLanes);
  for (long step = 0; step < depth; ++step) {
    const Unit* line = columns + step * column_stride;
    __m512i column[kVectors];
#pragma GCC unroll 4
    for (long v = 0; v < kVectors; ++v) {
      column[v] = _mm512_loadu_si512(line + v * kLanes);
      if (Ahead) _mm_prefetch(line + Ahead + v * kLanes, kPlace);
    }
#pragma GCC unroll 6
    for (long r = 0; r < R; ++r) {
      const __m512i own = _mm512_set1_epi32(static_cast<int>(rows[r * row_stride + step]));
#pragma GCC unroll 4
      for (long v = 0; v < kVectors; ++v)
        sum[r][v] = Format<T>::multiply_add(sum[r][v], own, column[v]);
    }
  }
#pragma GCC unroll 6
  for (long r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (long v = 0; v < kVectors; ++v)
      _mm512_storeu_ps(sums + r * sums_stride + v * kLanes, sum[r][v]);
}

// The same for any number of rows. The first few ask for memory, for all of them.
template <class T, long Ahead = 0>
void multiply(long num_rows, const Unit* rows, long row_stride, const Unit* columns,
              long column_stride, long depth, float* sums, long sums_stride, bool fresh) {
  for (long first = 0; first < num_rows; first += kRowsAtOnce) {
    const Unit* some = rows + first * row_stride;
    float* theirs = sums + first * sums_stride;
    const auto few = [&](auto count) {
      constexpr long kCount = decltype(count)::value;
      if (first == 0)
        multiply_few<T, kCount, Ahead>(some, row_stride, columns, column_stride, depth, theirs,
                                       sums_stride, fresh);
      else
        multiply_few<T, kCount, 0>(some, row_stride, columns, column_stride, depth, theirs,
                                   sums_stride, fresh);
    };
    switch (std::min(kRowsAtOnce, num_rows - first)) {
      case 1: few(std::integral_constant<long, 1>()); break;
      case 2: few(std::integral_constant<long, 2>()); break;
      case 3: few(std::integral_constant<long, 3>()); break;
      case 4: few(std::integral_constant<long, 4>()); break;
      case 5: few(std::integral_constant<long, 5>()); break;
      default: few(std::integral_constant<long, 6>());
    }
  }
}

// Sixteen rows of sixteen units become sixteen columns, in three rounds of pairs, fours and eights.
inline void transpose(__m512i block[kLanes]) {
  __m512i pairs[kLanes], fours[kLanes];
  for (int i = 0; i < 16; i += 2) {
    pairs[i] = _mm512_unpacklo_epi32(block[i], block[i + 1]);
    pairs[i + 1] = _mm512_unpackhi_epi32(block[i], block[i + 1]);
  }
  // fours[4 g + j], lane group q: unit 4 q + j of rows 4 g to 4 g + 3.
  for (int g = 0; g < 16; g += 4) {
    fours[g] = _mm512_unpacklo_epi64(pairs[g], pairs[g + 2]);
    fours[g + 1] = _mm512_unpackhi_epi64(pairs[g], pairs[g + 2]);
    fours[g + 2] = _mm512_unpacklo_epi64(pairs[g + 1], pairs[g + 3]);
    fours[g + 3] = _mm512_unpackhi_epi64(pairs[g + 1], pairs[g + 3]);
  }
  for (int j = 0; j < 4; ++j) {
    const __m512i low = _mm512_shuffle_i32x4(fours[j], fours[4 + j], 0x44);
    const __m512i high = _mm512_shuffle_i32x4(fours[j], fours[4 + j], 0xee);
    const __m512i low2 = _mm512_shuffle_i32x4(fours[8 + j], fours[12 + j], 0x44);
    const __m512i high2 = _mm512_shuffle_i32x4(fours[8 + j], fours[12 + j], 0xee);
    block[j] = _mm512_shuffle_i32x4(low, low2, 0x88);
    block[4 + j] = _mm512_shuffle_i32x4(low, low2, 0xdd);
    block[8 + j] = _mm512_shuffle_i32x4(high, high2, 0x88);
    block[12 + j] = _mm512_shuffle_i32x4(high, high2, 0xdd);
  }
}

// columns[depth][64] from 64 rows of `depth` units; a row that is null gives zeros. Meanwhile the
// rows `coming` next are fetched, bit by bit: a core waits for few lines at a time.
inline void stand_up(const Unit* const rows[kColumns], long depth, Unit* columns,
                     const Unit* const* coming = nullptr) {
  for (long first = 0; first < kColumns; first += kLanes)
    for (long step = 0; step < depth; step += kLanes) {
      const Lanes inside = lanes(depth - step);
      __m512i block[kLanes];
#pragma GCC unroll 16
      for (long r = 0; r < kLanes; ++r) {
        const Unit* row = rows[first + r];
        block[r] = row ? _mm512_maskz_loadu_epi32(inside, row + step) : _mm512_setzero_si512();
        if (coming && coming[first + r]) _mm_prefetch(coming[first + r] + step, _MM_HINT_T1);
      }
      transpose(block);
      const long count = std::min(kLanes, depth - step);
      for (long s = 0; s < count; ++s)
        _mm512_storeu_si512(columns + (step + s) * kColumns + first, block[s]);
    }
}

}  // namespace baton
