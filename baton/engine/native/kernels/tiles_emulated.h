// Tiles in memory, with the results of AMX bit by bit, for processors without it. The functions are
// documented in tiles_amx.h.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "vectors.h"

namespace baton {

struct EmulatedTile {
  alignas(64) Unit rows[16][16];
};

struct EmulatedTiles {
  EmulatedTile tiles[8];
  int scopes = 0;

  EmulatedTile& operator[](int tile) {
    if (!scopes) {  // the processor would stop the process, too
      std::fputs("a tile is used on a thread that has not configured its tiles\n", stderr);
      std::abort();
    }
    return tiles[tile];
  }
};

inline EmulatedTiles& emulated_tiles() {
  static thread_local EmulatedTiles own;
  return own;
}

class TileScope {
 public:
  TileScope() { count(1); }
  ~TileScope() { count(-1); }

  TileScope(const TileScope&) = delete;
  TileScope& operator=(const TileScope&) = delete;

 private:
  static void count(int change) {
    if (kHasTiles) emulated_tiles().scopes += change;
  }
};

template <int Tile>
inline void tile_zero() {
  std::memset(emulated_tiles()[Tile].rows, 0, sizeof(EmulatedTile));
}

template <int Tile>
inline void tile_load(const void* from, long stride) {
  EmulatedTile& tile = emulated_tiles()[Tile];
  for (long row = 0; row < 16; ++row)
    store_words(tile.rows[row], load_words(static_cast<const Unit*>(from) + row * stride));
}

template <int Tile>
inline void tile_store(void* to, long stride) {
  const EmulatedTile& tile = emulated_tiles()[Tile];
  for (long row = 0; row < 16; ++row)
    store_words(static_cast<Unit*>(to) + row * stride, load_words(tile.rows[row]));
}

// Computes each sum as AMX does (Intel's manual, TDPBF16PS): from zero, a chain of fused
// multiply-adds over the even depths and one over the odd depths; both are added; and that is added
// to the sum so far. The caller must let subnormal numbers count as zero.
//
// Not inlined, so that the compiler can't move the arithmetic past the change of that mode.
inline __attribute__((noinline)) void emulate_product(EmulatedTile& sums, const EmulatedTile& rows,
                                                      const EmulatedTile& columns) {
  constexpr long kAtOnce = 4;
  for (long first = 0; first < 16; first += kAtOnce) {
    Vec even[kAtOnce], odd[kAtOnce];
    for (long r = 0; r < kAtOnce; ++r) even[r] = odd[r] = zeros();
    for (long k = 0; k < 16; ++k) {
      const Words pairs = load_words(columns.rows[k]);
      const Vec even_column = lower(pairs), odd_column = upper(pairs);
#pragma GCC unroll 4
      for (long r = 0; r < kAtOnce; ++r) {
        const Words own = broadcast_word(rows.rows[first + r][k]);
        even[r] = fma(lower(own), even_column, even[r]);
        odd[r] = fma(upper(own), odd_column, odd[r]);
      }
    }
    for (long r = 0; r < kAtOnce; ++r) {
      const Vec before = as_numbers(load_words(sums.rows[first + r]));
      store_words(sums.rows[first + r], as_words(before + (even[r] + odd[r])));
    }
  }
}

template <int Sums, int Rows, int Columns>
inline void tile_multiply() {
  constexpr unsigned kFlushToZero = 0x8000, kSubnormalsAreZero = 0x40;
  EmulatedTiles& tiles = emulated_tiles();
  const unsigned before = _mm_getcsr();
  _mm_setcsr(before | kFlushToZero | kSubnormalsAreZero);
  emulate_product(tiles[Sums], tiles[Rows], tiles[Columns]);
  _mm_setcsr(before);
}

}  // namespace baton
