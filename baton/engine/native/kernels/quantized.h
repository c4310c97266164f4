// Quantized weights: their layout in memory, and products with them.
//
// A weight is a small integer, its code, times a scale, plus a minimum in Int4. A panel of 64
// outputs is cut along its depth into groups that share a scale per output. A group has first a
// header, its 64 scales (and 64 minimums), then its lines, each with the codes of two adjacent
// depths. Codes are exact in BF16 and FP32, so a tile multiplies by the codes themselves, and then
// the sums of a group by its scales. The minimums are multiplied by the sum of the group's numbers
// in a row.
#pragma once

#include <cstring>
#include <type_traits>

#include "matmul_tile.h"

namespace baton {

// The values must equal those in baton/engine/native/library.py.
enum Coding : int64_t { kPlain = 0, kInt8 = 1, kInt4 = 2 };

// Units of depth in a line: one pair in BF16, two numbers in FP32.
template <class T>
constexpr long kUnitsOfLine = 2 / Format<T>::kPerUnit;

// What the codes of a group stand for: scale * code + minimum.
struct Scaling {
  float scale = 0, minimum = 0;
};

// Codes from -127 to 127, and one scale per output: the row's largest weight divided by 127. For
// each vector of outputs, a line has 16 bytes for the even depth, then 16 for the odd one.
struct Int8 {
  static constexpr long kLineBytes = 2 * kColumns;
  static constexpr long kHeaderBytes = sizeof(float) * kColumns;
  static constexpr int kMost = 127;

  static long group_of(long lines) { return std::max(lines, 1l); }

  static Vec scale(const uint8_t* header, long v) {
    return load(reinterpret_cast<const float*>(header) + v * kLanes);
  }

  static Vec numbers(const uint8_t* line, long v, long parity) {
    return load_bytes(line + (2 * v + parity) * kLanes);
  }

  template <class T>
  static Words column(const uint8_t* line, long v, long part) {
    if (kUnitsOfLine<T> == 2) return as_words(numbers(line, v, part));
    return pack_bf16_pairs(numbers(line, v, 0), numbers(line, v, 1));
  }

  static int code(const uint8_t* line, long column, long parity) {
    return static_cast<int8_t>(line[place(column, parity)]);
  }
  static void put(uint8_t* line, long column, long parity, int code) {
    line[place(column, parity)] = static_cast<uint8_t>(code);
  }
  static Scaling scaling(const uint8_t* header, long column) {
    return {reinterpret_cast<const float*>(header)[column], 0};
  }
  static void put(uint8_t* header, long column, Scaling scaling) {
    reinterpret_cast<float*>(header)[column] = scaling.scale;
  }

 private:
  static long place(long column, long parity) {
    return column / kLanes * 2 * kLanes + parity * kLanes + column % kLanes;
  }
};

// Codes from 0 to 15, and a scale and a minimum in FP16 for every 32 of an output. A line is a
// vector: word 2 c + parity has in its bits 4 v to 4 v + 3 the code of output 16 v + c.
struct Int4 {
  static constexpr long kLineBytes = kColumns;
  static constexpr long kHeaderBytes = 2 * sizeof(uint16_t) * kColumns;
  static constexpr long kGroup = 32;
  static constexpr int kMost = 15;
  // The ends of a group's range are its extremes, or so many steps closer to each other. The best
  // of these candidates is refined.
  static constexpr float kCuts[] = {0, 0.5f};
  static constexpr int kRefinements = 2;

  static long group_of(long) { return kGroup / 2; }

  static Vec scale(const uint8_t* header, long v) {
    return load_fp16(reinterpret_cast<const uint16_t*>(header) + v * kLanes, kAllLanes);
  }
  static Vec minimum(const uint8_t* header, long v) { return scale(header, kColumns / kLanes + v); }

  template <class T>
  static Words column(const uint8_t* line, long v, long part) {
    const Words words = load_words(line);
    if (kUnitsOfLine<T> == 2)
      return as_words(nibbles(words, static_cast<unsigned>(16 * part + 4 * v)));
    return pairs_of_nibbles(words, static_cast<unsigned>(4 * v));
  }

  static int code(const uint8_t* line, long column, long parity) {
    return line[place(column, parity)] >> shift(column) & 15;
  }
  static void put(uint8_t* line, long column, long parity, int code) {
    uint8_t& byte = line[place(column, parity)];
    byte = static_cast<uint8_t>((byte & ~(15 << shift(column))) | code << shift(column));
  }
  static Scaling scaling(const uint8_t* header, long column) {
    const auto* numbers = reinterpret_cast<const uint16_t*>(header);
    return {from_fp16(numbers[column]), from_fp16(numbers[kColumns + column])};
  }
  static void put(uint8_t* header, long column, Scaling scaling) {
    auto* numbers = reinterpret_cast<uint16_t*>(header);
    numbers[column] = to_fp16(scaling.scale);
    numbers[kColumns + column] = to_fp16(scaling.minimum);
  }

 private:
  static long place(long column, long parity) {
    return column % kLanes * 4 + parity * 2 + column / kLanes / 2;
  }
  static int shift(long column) { return static_cast<int>(column / kLanes % 2 * 4); }
};

template <class Code>
constexpr bool kHasMinimums = std::is_same<Code, Int4>::value;

// Returns the bytes of a panel with this number of lines.
template <class Code>
long panel_bytes(long lines) {
  return ceil_div(lines, Code::group_of(lines)) * Code::kHeaderBytes + lines * Code::kLineBytes;
}

// Returns the number of Int4 groups in rows of `depth` units.
template <class T>
long num_groups(long depth) {
  return ceil_div(depth * Format<T>::kPerUnit, Int4::kGroup);
}

// Sums the numbers of each Int4 group of rows[num_rows][depth], to sums[num_rows][num_groups].
template <class T>
void sum_groups(const Unit* rows, long num_rows, long depth, float* sums) {
  constexpr long kUnits = Int4::kGroup / Format<T>::kPerUnit;
  const Words ones = broadcast_word(Format<T>::kOnes);
  for (const Unit* row = rows; row < rows + num_rows * depth; row += depth)
    for (long first = 0; first < depth; first += kUnits) {
      Vec sum = zeros();
      for (long at = first; at < first + kUnits; at += kLanes)
        sum = Format<T>::multiply_add(sum, ones, load_words(row + at, lanes(depth - at)));
      *sums++ = reduce_sum(sum);
    }
}

// sums[R][64] = rows[R][...] * the panel. Sums of a group run over its depth in order; then they
// are scaled and added to those of the previous groups, and so are the minimums of Int4 times
// group_sums[R][num_groups].
template <class T, class Code, long R>
inline __attribute__((always_inline)) void multiply_coded_few(const Unit* rows, long row_stride,
                                                              const uint8_t* panel, long lines,
                                                              const float* group_sums,
                                                              float* sums) {
  constexpr long kVectors = vectors_at_once(R), kUnits = kUnitsOfLine<T>;
  constexpr long kAhead = 4096;  // prefetch distance in bytes, as in a plain product of few rows
  const long group = Code::group_of(lines), groups = ceil_div(lines, group);
  for (long first = 0; first < lines; first += group, ++group_sums) {
    const uint8_t* header = panel;
    const uint8_t* codes = panel + Code::kHeaderBytes;
    const long count = std::min(group, lines - first);
    for (long at = 0; at < Code::kHeaderBytes; at += 64)
      prefetch<kFirstLevel>(header + kAhead + at);
    for (long part = 0; part < kColumns / kLanes; part += kVectors) {
      Vec sum[R][kVectors];
#pragma GCC unroll 6
      for (long r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (long v = 0; v < kVectors; ++v) sum[r][v] = zeros();
      for (long line = 0; line < count; ++line) {
        const uint8_t* own_codes = codes + line * Code::kLineBytes;
#pragma GCC unroll 2
        for (long at = 0; at < Code::kLineBytes; at += 64)
          prefetch<kFirstLevel>(own_codes + kAhead + at);
#pragma GCC unroll 2
        for (long unit = 0; unit < kUnits; ++unit)
#pragma GCC unroll 4
          for (long v = 0; v < kVectors; ++v) {
            const Words column = Code::template column<T>(own_codes, part + v, unit);
#pragma GCC unroll 6
            for (long r = 0; r < R; ++r) {
              const Unit own = rows[r * row_stride + (first + line) * kUnits + unit];
              sum[r][v] = Format<T>::multiply_add(sum[r][v], broadcast_word(own), column);
            }
          }
      }
#pragma GCC unroll 4
      for (long v = 0; v < kVectors; ++v) {
        const Vec scale = Code::scale(header, part + v);
        Vec minimum = zeros();
        if constexpr (kHasMinimums<Code>) minimum = Code::minimum(header, part + v);
#pragma GCC unroll 6
        for (long r = 0; r < R; ++r) {
          float* to = sums + r * kColumns + (part + v) * kLanes;
          Vec total = first ? fma(scale, sum[r][v], load(to)) : scale * sum[r][v];
          if constexpr (kHasMinimums<Code>)
            total = fma(minimum, broadcast(group_sums[r * groups]), total);
          store(to, total);
        }
      }
    }
    panel = codes + count * Code::kLineBytes;
  }
}

// Decodes `count` lines of Int8 to `to`, 64 units for each unit of depth; returns the line after
// them.
template <class T>
const uint8_t* decode_int8(const uint8_t* line, long count, Unit* to) {
  for (; count > 0; --count, line += Int8::kLineBytes)
    for (long part = 0; part < kUnitsOfLine<T>; ++part)
      for (long v = 0; v < kColumns / kLanes; ++v, to += kLanes)
        store_words(to, Int8::column<T>(line, v, part));
  return line;
}

// Multiplies sums[num_rows][64] by the scales of an Int8 panel.
inline void scale_int8(const uint8_t* panel, long num_rows, float* sums) {
  for (long i = 0; i < num_rows * kColumns; i += kLanes)
    store(sums + i, Int8::scale(panel, i % kColumns / kLanes) * load(sums + i));
}

// As above, in Int8 for many rows, which share the weights decoded to `columns`, a block of
// depth at a time. The bits are the same, as a sum still runs over the whole depth before it is
// scaled.
template <class T>
void multiply_int8_many(long num_rows, const Unit* rows, long row_stride, const uint8_t* panel,
                        long lines, float* sums, Unit* columns) {
  constexpr long kUnits = kUnitsOfLine<T>, kBlock = kDepthBlock / kUnits;
  const uint8_t* line = panel + Int8::kHeaderBytes;
  for (long first = 0; first < lines; first += kBlock) {
    const long count = std::min(kBlock, lines - first);
    line = decode_int8<T>(line, count, columns);
    multiply<T>(num_rows, rows + first * kUnits, row_stride, columns, kColumns, count * kUnits, sums,
                kColumns, first == 0);
  }
  scale_int8(panel, num_rows, sums);
}

// From this number of rows on, decoding Int8 once for all rows is faster than for every few rows.
// Int4 codes are always looked up in registers: that is faster than storing and reading them.
constexpr long kManyRows = 48;

// Computes sums[num_rows][64] for a panel of codes of `depth` units. `columns` must hold a block of
// depth; `group_sums` are those of the rows, for Int4.
template <class T, class Code>
void multiply_coded(long num_rows, const Unit* rows, const uint8_t* panel, long depth,
                    const float* group_sums, float* sums, Unit* columns) {
  const long lines = depth / kUnitsOfLine<T>;
  if (std::is_same<Code, Int8>::value && num_rows >= kManyRows)
    return multiply_int8_many<T>(num_rows, rows, depth, panel, lines, sums, columns);
  for (long first = 0; first < num_rows; first += kRowsAtOnce) {
    const auto few = [&](auto count) {
      multiply_coded_few<T, Code, decltype(count)::value>(
          rows + first * depth, depth, panel, lines, group_sums + first * num_groups<T>(depth),
          sums + first * kColumns);
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

}  // namespace baton
