// Tiles in the registers of AMX. The instructions are written as assembly, because the compilers'
// intrinsics don't tell them that memory is read.
#pragma once

#include "vectors.h"

namespace baton {

// Configures this thread's tiles: each has sixteen rows of sixteen units. Every thread needs a
// scope around its products, and a short one: a thread with tiles in use takes longer to be
// switched. At the end the tiles are configured as before (usually not at all), because other
// libraries use the tiles of the threads that call us, too. The process must have been given the
// permission to use tiles (baton/engine/native/processor.py).
class TileScope {
 public:
  TileScope() {
    asm volatile("sttilecfg %0" : "=m"(before_));
    Configuration ours;
    for (int tile = 0; tile < kTiles; ++tile) ours.row_bytes[tile] = 64, ours.rows[tile] = 16;
    asm volatile("ldtilecfg %0" ::"m"(ours));
  }
  ~TileScope() { asm volatile("ldtilecfg %0" ::"m"(before_)); }

  TileScope(const TileScope&) = delete;
  TileScope& operator=(const TileScope&) = delete;

 private:
  static constexpr int kTiles = 8;

  struct alignas(64) Configuration {
    uint8_t palette = 1, first_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
  };
  Configuration before_;
};

template <int Tile>
inline void tile_zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(Tile));
}

// Loads sixteen rows of sixteen units; `stride` is the distance between two rows in units.
template <int Tile>
inline void tile_load(const void* from, long stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride * 4), "i"(Tile) : "memory");
}

template <int Tile>
inline void tile_store(void* to, long stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride * 4), "i"(Tile) : "memory");
}

// Adds rows times columns to the sums. A row's unit and a column's have two BF16 numbers each.
template <int Sums, int Rows, int Columns>
inline void tile_multiply() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(Sums), "i"(Rows), "i"(Columns));
}

}  // namespace baton
