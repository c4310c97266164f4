// Quantizes weights. baton/engine/quantization.py computes the same in torch, bit by bit.
#pragma once

#include <cmath>
#include <cstring>
#include <vector>

#include "quantized.h"

namespace baton {

constexpr float kLeastNormal = 1.17549435e-38f;

// Returns the minimum and maximum of a part of a row and zero. False if a number is not finite.
template <class T>
inline bool min_max(const T* from, long count, float& least, float& most) {
  Vec low = zeros(), high = low;
  bool finite = true;
  for (long i = 0; i < count; i += kLanes) {
    const Vec x = Format<T>::load(from + i, lanes(count - i));
    low = min_lanes(x, low);
    high = max_lanes(x, high);
    finite &= all_finite(x);
  }
  least = reduce_min(low), most = reduce_max(high);
  return finite;
}

// Rounds x / scale to the nearest integers in [least, most], ties to even; 0 if the scale is 0.
inline Vec quantize(Vec x, float scale, int least, int most) {
  if (scale == 0) return zeros();
  const Vec whole = round_lanes(x / broadcast(scale));
  return min_lanes(broadcast(static_cast<float>(most)),
                   max_lanes(broadcast(static_cast<float>(least)), whole));
}

// Rounds to BF16, ties to even. Subnormal numbers become zero, as products treat them.
inline float nearest_bf16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  bits = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000;
  std::memcpy(&value, &bits, sizeof bits);
  return std::fabs(value) < kLeastNormal ? 0.0f : value;
}

// Quantizes a group of a row: writes its codes and scale. Returns false if a weight is not finite.
template <class T>
inline bool encode(Int8, const T* from, long count, int8_t* codes, float& scale) {
  float least, most;
  if (!min_max(from, count, least, most)) return false;
  scale = std::max(most, -least) / Int8::kMost;
  for (long i = 0; i < count; i += kLanes) {
    const Lanes inside = lanes(count - i);
    const Vec x = Format<T>::load(from + i, inside);
    store_bytes(codes + i, inside, quantize(x, scale, -Int8::kMost, Int8::kMost));
  }
  return true;
}

// As above, for Int4. Of a few candidate scales it takes the one with the least squared error. The
// candidates map the weight of largest magnitude to -8, or near it.
template <class T>
inline bool encode(Int4, const T* from, long count, int8_t* codes, float& scale) {
  const Lanes inside[2] = {lanes(count), lanes(count - kLanes)};
  float least, most, least_error = INFINITY;
  if (!min_max(from, count, least, most)) return false;
  const float end = most >= -least ? most : least;
  for (const float code : Int4::kEnds) {
    const float tried = nearest_bf16(end / code);
    Vec squares[2], found[2];
    for (int half = 0; half < 2; ++half) {
      const Vec x = Format<T>::load(from + half * kLanes, inside[half]);
      found[half] = quantize(x, tried, -8, 7);
      const Vec error = x - found[half] * broadcast(tried);
      squares[half] = error * error;
    }
    const float error = reduce_sum(squares[0] + squares[1]);
    if (!(error < least_error)) continue;
    scale = tried, least_error = error;
    for (int half = 0; half < 2; ++half) store_bytes(codes + half * kLanes, inside[half], found[half]);
  }
  return true;
}

// Quantizes one panel from rows of `ins` numbers; a null row is all zeros. Returns false if a
// weight is not finite.
template <class Code, class T>
bool encode_panel(const T* const rows[kColumns], long ins, uint8_t* panel) {
  const long lines = ins / 2, group = Code::group_of(lines);
  std::vector<int8_t> codes(kColumns * 2 * group);
  float scales[kColumns] = {};
  std::memset(panel, 0, panel_bytes<Code>(lines));
  for (long first = 0; first < lines; first += group) {
    const long count = std::min(group, lines - first);
    for (long column = 0; column < kColumns; ++column) {
      const T* row = rows[column];
      int8_t* to = codes.data() + column * 2 * group;
      if (row && !encode(Code(), row + 2 * first, 2 * count, to, scales[column])) return false;
    }
    for (long column = 0; column < kColumns; ++column)
      Code::put_scale(panel, column, scales[column]);
    panel += Code::kScaleBytes;
    for (long line = 0; line < count; ++line, panel += Code::kLineBytes)
      for (long column = 0; column < kColumns; ++column)
        for (long parity = 0; parity < 2; ++parity)
          Code::put(panel, column, parity, codes[column * 2 * group + 2 * line + parity]);
  }
  return true;
}

// Decodes a row of a panel.
template <class Code, class T>
void decode_row(const uint8_t* panel, long column, long ins, T* to) {
  const long lines = ins / 2, group = Code::group_of(lines);
  for (long first = 0; first < lines; first += group) {
    const float scale = Code::scale_of(panel, column);
    panel += Code::kScaleBytes;
    const long last = std::min(first + group, lines);
    for (long line = first; line < last; ++line, panel += Code::kLineBytes)
      for (long parity = 0; parity < 2; ++parity)
        Format<T>::store(to + 2 * line + parity, lanes(1),
                         broadcast(Code::code(panel, column, parity) * scale));
  }
}

}  // namespace baton
