// Weights in fewer bits: how they lie in memory, and how a tile gets them back.
//
// A weight is a small whole number, its code, times a scale. A panel of 64 outputs is cut along its
// depth into groups that share a scale per output: first the group's 64 scales, then its lines, each
// with the codes of two neighbours of the depth. Codes are exact in BF16 as in FP32, so a tile
// multiplies by them as they are, and the sums of a group by its scale.
#pragma once

#include <cstring>
#include <type_traits>

#include "tile.h"

namespace baton {

// The numbers are those of baton/engine/native/library.py.
enum Coding : int64_t { kPlain = 0, kInt8 = 1, kInt4 = 2 };

// Units of depth in a line: one pair in BF16, two numbers in FP32.
template <class T>
constexpr long kUnitsOfLine = 2 / Format<T>::kPerUnit;

// Units in BF16 of 16 outputs, from whole numbers that BF16 can hold.
inline __m512i pair_up(Vec even, Vec odd) {
  // Bytes 2 and 3 of the even ones go below those of the odd ones: the upper half of a number in
  // FP32 is that number in BF16, where its lower half is zero.
  const __m512i upper_half = _mm512_set4_epi32(0x0f0e0f0e, 0x0b0a0b0a, 0x07060706, 0x03020302);
  return _mm512_mask_shuffle_epi8(_mm512_castps_si512(odd), 0x3333333333333333,
                                  _mm512_castps_si512(even), upper_half);
}

// Codes from -127 to 127, and one scale per output: the row's largest weight by 127. Of each vector
// of outputs a line has 16 bytes of the even ones, then of the odd ones.
struct Int8 {
  static constexpr long kLineBytes = 2 * kColumns;
  static constexpr long kScaleBytes = sizeof(float) * kColumns;
  static constexpr int kMost = 127;

  static long group_of(long lines) { return std::max(lines, 1l); }

  static Vec scale(const uint8_t* scales, long v) {
    return _mm512_loadu_ps(reinterpret_cast<const float*>(scales) + v * kLanes);
  }

  static Vec numbers(const uint8_t* line, long v, long parity) {
    const auto* bytes = reinterpret_cast<const __m128i*>(line) + 2 * v + parity;
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(bytes)));
  }

  template <class T>
  static __m512i column(const uint8_t* line, long v, long part) {
    if (kUnitsOfLine<T> == 2) return _mm512_castps_si512(numbers(line, v, part));
    return pair_up(numbers(line, v, 0), numbers(line, v, 1));
  }

  static int code(const uint8_t* line, long column, long parity) {
    return static_cast<int8_t>(line[place(column, parity)]);
  }
  static void put(uint8_t* line, long column, long parity, int code) {
    line[place(column, parity)] = static_cast<uint8_t>(code);
  }
  static float scale_of(const uint8_t* scales, long column) {
    float scale;
    std::memcpy(&scale, scales + column * sizeof scale, sizeof scale);
    return scale;
  }
  static void put_scale(uint8_t* scales, long column, float scale) {
    std::memcpy(scales + column * sizeof scale, &scale, sizeof scale);
  }

 private:
  static long place(long column, long parity) {
    return column / kLanes * 2 * kLanes + parity * kLanes + column % kLanes;
  }
};

// Codes from -8 to 7, and a scale in BF16 for every 32 of an output. A line is a vector: word
// 2 c + parity has in its bits 4 v to 4 v + 3 the code, plus 8, of output 16 v + c.
struct Int4 {
  static constexpr long kLineBytes = kColumns;
  static constexpr long kScaleBytes = sizeof(Bf16) * kColumns;
  static constexpr long kGroup = 32;
  static constexpr float kEnds[] = {-8, -7, -7.5f, -8.5f};  // tried for a group's largest weight

  static long group_of(long) { return kGroup / 2; }

  static Vec scale(const uint8_t* scales, long v) {
    return Format<Bf16>::load(reinterpret_cast<const Bf16*>(scales) + v * kLanes, lanes(kLanes));
  }

  // Looked up by their bits; those above the lowest four (or five) are not looked at, and where
  // there is a fifth, the table has everything twice.
  template <class T>
  static __m512i column(const uint8_t* line, long v, long part) {
    const __m512i words = _mm512_loadu_si512(line);
    if (kUnitsOfLine<T> == 2) {
      const __m512i index = _mm512_srli_epi32(words, static_cast<unsigned>(16 * part + 4 * v));
      return _mm512_castps_si512(_mm512_permutexvar_ps(index, singles()));
    }
    return _mm512_permutexvar_epi16(_mm512_srli_epi16(words, static_cast<unsigned>(4 * v)), halves());
  }

  static int code(const uint8_t* line, long column, long parity) {
    return (line[place(column, parity)] >> shift(column) & 15) - 8;
  }
  static void put(uint8_t* line, long column, long parity, int code) {
    uint8_t& byte = line[place(column, parity)];
    byte = static_cast<uint8_t>((byte & ~(15 << shift(column))) | (code + 8) << shift(column));
  }
  static float scale_of(const uint8_t* scales, long column) {
    uint32_t bits = 0;
    std::memcpy(reinterpret_cast<uint8_t*>(&bits) + 2, scales + column * sizeof(Bf16), 2);
    float scale;
    std::memcpy(&scale, &bits, sizeof scale);
    return scale;
  }
  static void put_scale(uint8_t* scales, long column, float scale) {
    std::memcpy(scales + column * sizeof(Bf16), reinterpret_cast<const uint8_t*>(&scale) + 2, 2);
  }

 private:
  static long place(long column, long parity) {
    return column % kLanes * 4 + parity * 2 + column / kLanes / 2;
  }
  static int shift(long column) { return static_cast<int>(column / kLanes % 2 * 4); }

  static Vec singles() {
    return _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
  }
  static __m512i halves() {
    const __m512i bits = _mm512_srli_epi32(_mm512_castps_si512(singles()), 16);
    const __m512i once = _mm512_castsi256_si512(_mm512_cvtepi32_epi16(bits));
    return _mm512_shuffle_i64x2(once, once, 0x44);
  }
};

// Bytes of a panel whose depth has so many lines.
template <class Code>
long panel_bytes(long lines) {
  return ceil_div(lines, Code::group_of(lines)) * Code::kScaleBytes + lines * Code::kLineBytes;
}

// sums[R][64] = rows[R][...] * the panel. Sums of a group run over its depth in order, then they
// are scaled and added to those of the groups before it.
template <class T, class Code, long R>
inline __attribute__((always_inline)) void multiply_coded_few(const Unit* rows, long row_stride,
                                                              const uint8_t* panel, long lines,
                                                              float* sums) {
  constexpr long kVectors = kColumns / kLanes, kUnits = kUnitsOfLine<T>;
  constexpr long kAhead = 4096;  // bytes, as a plain product of few rows has it
  const long group = Code::group_of(lines);
  for (long first = 0; first < lines; first += group) {
    const uint8_t* scales = panel;
    panel += Code::kScaleBytes;
    Vec sum[R][kVectors];
#pragma GCC unroll 6
    for (long r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (long v = 0; v < kVectors; ++v) sum[r][v] = _mm512_setzero_ps();
    const long last = std::min(first + group, lines);
    for (long line = first; line < last; ++line, panel += Code::kLineBytes) {
#pragma GCC unroll 2
      for (long at = 0; at < Code::kLineBytes; at += 64) _mm_prefetch(panel + kAhead + at, _MM_HINT_T0);
#pragma GCC unroll 2
      for (long part = 0; part < kUnits; ++part)
#pragma GCC unroll 4
        for (long v = 0; v < kVectors; ++v) {
          const __m512i column = Code::template column<T>(panel, v, part);
#pragma GCC unroll 6
          for (long r = 0; r < R; ++r) {
            const Unit own = rows[r * row_stride + line * kUnits + part];
            sum[r][v] = Format<T>::multiply_add(
                sum[r][v], _mm512_set1_epi32(static_cast<int>(own)), column);
          }
        }
    }
#pragma GCC unroll 4
    for (long v = 0; v < kVectors; ++v) {
      const Vec scale = Code::scale(scales, v);
#pragma GCC unroll 6
      for (long r = 0; r < R; ++r) {
        float* to = sums + r * kColumns + v * kLanes;
        const Vec scaled = first ? _mm512_fmadd_ps(scale, sum[r][v], _mm512_loadu_ps(to))
                                 : _mm512_mul_ps(scale, sum[r][v]);
        _mm512_storeu_ps(to, scaled);
      }
    }
  }
}

// The same in Int8 for many rows, which share what is unpacked into `columns`, a block of depth at a
// time: bit by bit the same, since a sum still runs over the whole depth before it is scaled.
template <class T>
void multiply_int8_many(long num_rows, const Unit* rows, long row_stride, const uint8_t* panel,
                        long lines, float* sums, Unit* columns) {
  constexpr long kUnits = kUnitsOfLine<T>, kBlock = kDepthBlock / kUnits;
  const uint8_t* scales = panel;
  panel += Int8::kScaleBytes;
  for (long first = 0; first < lines; first += kBlock) {
    const long count = std::min(kBlock, lines - first);
    Unit* to = columns;
    for (long line = 0; line < count; ++line, panel += Int8::kLineBytes)
      for (long part = 0; part < kUnits; ++part)
        for (long v = 0; v < kColumns / kLanes; ++v, to += kLanes)
          _mm512_storeu_si512(to, Int8::column<T>(panel, v, part));
    multiply<T>(num_rows, rows + first * kUnits, row_stride, columns, kColumns, count * kUnits, sums,
                kColumns, first == 0);
  }
  for (long i = 0; i < num_rows * kColumns; i += kLanes) {
    const Vec scale = Int8::scale(scales, i % kColumns / kLanes);
    _mm512_storeu_ps(sums + i, _mm512_mul_ps(scale, _mm512_loadu_ps(sums + i)));
  }
}

// From so many rows on unpacking for all of them takes less than doing so for each few. Codes of
// Int4 are looked up in registers in less time than it takes to write them down and read them.
constexpr long kManyRows = 48;

// sums[num_rows][64] of a panel of codes, whose depth has so many units. `columns` has room for a
// block of depth.
template <class T, class Code>
void multiply_coded(long num_rows, const Unit* rows, const uint8_t* panel, long depth, float* sums,
                    Unit* columns) {
  const long lines = depth / kUnitsOfLine<T>;
  if (std::is_same<Code, Int8>::value && num_rows >= kManyRows)
    return multiply_int8_many<T>(num_rows, rows, depth, panel, lines, sums, columns);
  for (long first = 0; first < num_rows; first += kRowsAtOnce) {
    const auto few = [&](auto count) {
      multiply_coded_few<T, Code, decltype(count)::value>(rows + first * depth, depth, panel, lines,
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
