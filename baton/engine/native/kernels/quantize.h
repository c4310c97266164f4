// Quantizes weights. baton/engine/quantization.py computes the same in torch, bit by bit.
#pragma once

#include <cmath>
#include <cstring>
#include <vector>

#include "quantized.h"

namespace baton {

constexpr const char* kNotFinite = "a weight is not finite";
constexpr const char* kTooLarge =
    "a weight is too large for int4, whose scales and minimums are in FP16 (at most 65504)";

// 32 weights of Int4 in a checkpoint, as GGUF's Q4_1 has them; scale and minimum are in FP16. Byte
// j has the code of weight j in its lower bits, and that of weight j + 16 in its upper bits.
struct Q4_1Block {
  uint16_t scale, minimum;
  uint8_t codes[Int4::kGroup / 2];
};

inline long row_bytes(Kind kind, long ins) {
  constexpr long kBlockBytes = sizeof(Q4_1Block);
  if (kind == kQ4_1Blocks) return ceil_div(ins, Int4::kGroup) * kBlockBytes;
  return ins * (kind == kFloat32 ? 4 : 2);
}

// A row of a matrix that is being packed; null stands for zeros.
struct WeightRow {
  const void* at = nullptr;
  Kind kind = kFloat32;
};

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

// Quantizes a group of a row: writes its codes and scale. Returns an error, or null.
template <class T>
inline const char* encode(Int8, const T* from, long count, int8_t* codes, Scaling& to) {
  float least, most;
  if (!min_max(from, count, least, most)) return kNotFinite;
  to.scale = std::max(most, -least) / Int8::kMost;
  for (long i = 0; i < count; i += kLanes) {
    const Lanes inside = lanes(count - i);
    const Vec x = Format<T>::load(from + i, inside);
    store_bytes(codes + i, inside, quantize(x, to.scale, -Int8::kMost, Int8::kMost));
  }
  return nullptr;
}

// The codes with the least squared error so far for a group of Int4.
struct Int4Fit {
  Vec weights[2], codes[2];
  float scale = 0, minimum = 0, error = INFINITY;

  // Takes this scale and minimum, rounded to FP16, if they are better.
  void attempt(float wanted_scale, float wanted_minimum) {
    const float own_scale = from_fp16(to_fp16(wanted_scale));
    const float own_minimum = from_fp16(to_fp16(wanted_minimum));
    Vec own[2], squares[2];
    for (int half = 0; half < 2; ++half) {
      const Vec above = weights[half] - broadcast(own_minimum);
      own[half] = quantize(above, own_scale, 0, Int4::kMost);
      const Vec off = weights[half] - (own[half] * broadcast(own_scale) + broadcast(own_minimum));
      squares[half] = off * off;
    }
    const float own_error = reduce_sum(squares[0] + squares[1]);
    if (!(own_error < error)) return;
    scale = own_scale, minimum = own_minimum, error = own_error;
    codes[0] = own[0], codes[1] = own[1];
  }

  // Attempts the scale and minimum that suit the codes best: a linear regression.
  void refine() {
    const float count = Int4::kGroup, x = reduce_sum(codes[0] + codes[1]);
    const float y = reduce_sum(weights[0] + weights[1]);
    const float xx = reduce_sum(codes[0] * codes[0] + codes[1] * codes[1]);
    const float xy = reduce_sum(codes[0] * weights[0] + codes[1] * weights[1]);
    const float slope = (count * xy - x * y) / (count * xx - x * x);
    attempt(slope, (y - slope * x) / count);
  }
};

// As above, for Int4. A group that is shorter is filled up with its last weight.
template <class T>
inline const char* encode(Int4, const T* from, long count, int8_t* codes, Scaling& to) {
  const Lanes inside[2] = {lanes(count), lanes(count - kLanes)};
  const Vec last = broadcast(first_lane(Format<T>::load(from + count - 1, lanes(1))));
  Int4Fit fit;
  for (int half = 0; half < 2; ++half) {
    const Vec own = Format<T>::load(from + half * kLanes, inside[half]);
    fit.weights[half] = blend(inside[half], own, last);
    if (!all_finite(fit.weights[half])) return kNotFinite;
  }
  const float least = reduce_min(min_lanes(fit.weights[0], fit.weights[1]));
  const float most = reduce_max(max_lanes(fit.weights[0], fit.weights[1]));
  const float step = (most - least) / Int4::kMost;
  for (const float above : Int4::kCuts)
    for (const float below : Int4::kCuts) {
      const float low = least + above * step, high = most - below * step;
      fit.attempt((high - low) / Int4::kMost, low);
    }
  for (int round = 0; round < Int4::kRefinements; ++round) fit.refine();
  if (fit.error == INFINITY) return kTooLarge;
  to = {fit.scale, fit.minimum};
  for (int half = 0; half < 2; ++half)
    store_bytes(codes + half * kLanes, inside[half], fit.codes[half]);
  return nullptr;
}

// Takes the codes and the scale of a block as they are.
inline const char* take_block(const Q4_1Block& block, int8_t* codes, Scaling& to) {
  to = {from_fp16(block.scale), from_fp16(block.minimum)};
  if (!std::isfinite(to.scale) || !std::isfinite(to.minimum)) return kNotFinite;
  for (long i = 0; i < Int4::kGroup / 2; ++i) {
    codes[i] = block.codes[i] & 15;
    codes[Int4::kGroup / 2 + i] = block.codes[i] >> 4;
  }
  return nullptr;
}

// Quantizes one panel from rows of `ins` numbers in T, or in blocks for Int4. Returns an error, or
// null.
template <class Code, class T>
const char* encode_panel(const WeightRow rows[kColumns], long ins, uint8_t* panel) {
  const long lines = ins / 2, group = Code::group_of(lines);
  std::vector<int8_t> codes(kColumns * 2 * group);
  Scaling scalings[kColumns];
  std::memset(panel, 0, panel_bytes<Code>(lines));
  for (long first = 0; first < lines; first += group) {
    const long count = std::min(group, lines - first);
    for (long column = 0; column < kColumns; ++column) {
      const WeightRow& row = rows[column];
      int8_t* to = codes.data() + column * 2 * group;
      const char* error = nullptr;
      if (row.kind == kQ4_1Blocks)
        error =
            take_block(static_cast<const Q4_1Block*>(row.at)[first / group], to, scalings[column]);
      else if (row.at)
        error = encode(Code(), static_cast<const T*>(row.at) + 2 * first, 2 * count, to,
                       scalings[column]);
      if (error) return error;
    }
    for (long column = 0; column < kColumns; ++column)
      Code::put(panel, column, scalings[column]);
    panel += Code::kHeaderBytes;
    for (long line = 0; line < count; ++line, panel += Code::kLineBytes)
      for (long column = 0; column < kColumns; ++column)
        for (long parity = 0; parity < 2; ++parity)
          Code::put(panel, column, parity, codes[column * 2 * group + 2 * line + parity]);
  }
  return nullptr;
}

// Decodes a row of a panel.
template <class Code, class T>
void decode_row(const uint8_t* panel, long column, long ins, T* to) {
  const long lines = ins / 2, group = Code::group_of(lines);
  for (long first = 0; first < lines; first += group) {
    const Scaling own = Code::scaling(panel, column);
    panel += Code::kHeaderBytes;
    const long last = std::min(first + group, lines);
    for (long line = first; line < last; ++line, panel += Code::kLineBytes)
      for (long parity = 0; parity < 2; ++parity)
        Format<T>::store(to + 2 * line + parity, lanes(1),
                         broadcast(Code::code(panel, column, parity) * own.scale + own.minimum));
  }
}

}  // namespace baton
