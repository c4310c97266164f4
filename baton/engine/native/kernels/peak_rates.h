// Benchmarks of this core's limits: products without memory accesses, and reads without products.
#pragma once

#include "tiles.h"

namespace baton {

// Computes `steps` times 24 products of vectors that stay in registers, as the microkernel does.
// Returns the sum of all lanes, so that the compiler can't remove the products.
template <class T>
float peak_products(long steps) {
  constexpr long kSums = 6 * vectors_at_once(6);
  Vec sum[kSums];
  for (Vec& one : sum) one = zeros();
  const Words some = broadcast_word(0x3f803f80);  // 1 in each BF16 half, about 1 as FP32
  for (long step = 0; step < steps * 24 / kSums; ++step)
#pragma GCC unroll 24
    for (long i = 0; i < kSums; ++i) sum[i] = Format<T>::multiply_add(sum[i], some, some);
  Vec total = zeros();
  for (const Vec& one : sum) total = total + one;
  return reduce_sum(total);
}

// Computes `steps` times four products of tiles of ones, and returns one of the sums. There are tiles
// only where kHasTiles is true.
inline float peak_tile_products(long steps) {
  alignas(64) Unit words[kTileRows * kTileUnits];
  std::fill(words, words + kTileRows * kTileUnits, 0x3f803f80);  // 1 in each BF16 half
  const TileScope scope;
  for_constants<4>([](auto sum) { tile_zero<sum()>(); });
  for_constants<4>([&](auto tile) { tile_load<4 + tile()>(words, kTileUnits); });
  for (long step = 0; step < steps; ++step)
    for_constants<4>([](auto sum) { tile_multiply<sum(), 4 + sum() / 2, 6 + sum() % 2>(); });
  tile_store<3>(words, kTileUnits);
  return first_lane(as_numbers(load_words(words)));
}

// Reads `count` vectors sequentially.
inline int peak_reads(const Unit* from, long count) {
  Words sum[4] = {zero_words(), zero_words(), zero_words(), zero_words()};
  for (long i = 0; i + 4 <= count; i += 4)
    for (long j = 0; j < 4; ++j) {
      const Unit* place = from + (i + j) * kLanes;
      prefetch<kFirstLevel>(place + 64 * kLanes);
      sum[j] = xor_words(sum[j], load_words(place));
    }
  return reduce_sum(xor_words(xor_words(sum[0], sum[1]), xor_words(sum[2], sum[3])));
}

}  // namespace baton
