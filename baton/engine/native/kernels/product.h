// Products with a weight matrix, packed so that a tile reads it from one end to the other.
#pragma once

#include <type_traits>

#include "encode.h"
#include "team.h"

namespace baton {

constexpr long kRowBlock = 192;    // rows that share a panel while it is in the cache
constexpr long kHalf = kColumns / 2;
constexpr long kScratch = (kRowBlock + kDepthBlock) * kColumns;  // sums, and what codes stand for

// Units that memory is asked for in advance: 4 KiB by rows so few that nothing but memory takes
// time, and a block of depth by more, which work on one while the next is on its way: to the second
// level, since the first is full of the one at hand.
constexpr long kAheadOfFew = 16 * kColumns;
constexpr long kAheadOfMany = kDepthBlock * kColumns;

// W[outs][ins] as panels of 64 outputs, each [ins / kPerUnit][64] units; the last one is filled
// up with zeros. Of a `gated` pair (gate below which up stands, `outs` rows each), a panel has 32
// rows of the gate and the same 32 of up. Where weights are kept as codes, a panel has those.
template <class T>
struct Matrix {
  const void* packed;
  long outs, ins;
  bool gated = false;
  Coding coding = kPlain;

  long num_panels() const { return ceil_div(outs, gated ? kHalf : kColumns); }
  long depth() const { return ins / Format<T>::kPerUnit; }
  long panel_bytes() const {
    if (coding == kInt8) return baton::panel_bytes<Int8>(ins / 2);
    if (coding == kInt4) return baton::panel_bytes<Int4>(ins / 2);
    return depth() * kColumns * static_cast<long>(sizeof(Unit));
  }
  long bytes() const { return num_panels() * panel_bytes(); }
  const uint8_t* panel(long index) const {
    return static_cast<const uint8_t*>(packed) + index * panel_bytes();
  }
  // The row of W in this place, or -1 where zeros are.
  long row_at(long panel, long column) const {
    if (!gated) return panel * kColumns + column < outs ? panel * kColumns + column : -1;
    const long row = panel * kHalf + column % kHalf;
    if (row >= outs) return -1;
    return column < kHalf ? row : outs + row;
  }
};

// What a matrix is packed from: parts [counts[i]][ins] that lie one below the other, each anywhere.
struct Source {
  const void* const* parts;
  const int64_t* counts;
  Kind kind;

  const void* row(long row, long ins) const {
    long part = 0;
    for (; row >= counts[part]; ++part) row -= counts[part];
    return static_cast<const char*>(parts[part]) + row * ins * size_of(kind);
  }
};

// False if weights are to be codes, and one is not finite.
template <class T>
bool pack_panel(const T* const rows[kColumns], const Matrix<T>& matrix, uint8_t* to) {
  if (matrix.coding == kInt8) return encode_panel<Int8>(rows, matrix.ins, to);
  if (matrix.coding == kInt4) return encode_panel<Int4>(rows, matrix.ins, to);
  stand_up(reinterpret_cast<const Unit* const*>(rows), matrix.depth(), reinterpret_cast<Unit*>(to));
  return true;
}

// `scratch` is the thread's own, [64][ins], for rows that come in another format; else null. False
// as of a panel.
template <class T>
bool pack(Team& team, const Source& from, const Matrix<T>& matrix, T* scratch, void* to) {
  bool good = true;
  team.each(matrix.num_panels(), [&](long panel) {
    const T* rows[kColumns];
    for (long column = 0; column < kColumns; ++column) {
      const long row = matrix.row_at(panel, column);
      const void* place = row < 0 ? nullptr : from.row(row, matrix.ins);
      rows[column] = place && scratch
                         ? convert(place, from.kind, matrix.ins, scratch + column * matrix.ins)
                         : static_cast<const T*>(place);
    }
    if (!pack_panel(rows, matrix, static_cast<uint8_t*>(to) + panel * matrix.panel_bytes()))
      good = false;
  });
  return good;
}

// A row of W as it was, or as its codes have it, from a matrix that is not gated: the embedding,
// where the head is tied.
template <class T>
void unpack_row(const Matrix<T>& matrix, long row, T* to) {
  const uint8_t* panel = matrix.panel(row / kColumns);
  const long column = row % kColumns;
  if (matrix.coding == kInt8) return decode_row<Int8>(panel, column, matrix.ins, to);
  if (matrix.coding == kInt4) return decode_row<Int4>(panel, column, matrix.ins, to);
  const Unit* from = reinterpret_cast<const Unit*>(panel) + column;
  for (long step = 0; step < matrix.depth(); ++step)
    reinterpret_cast<Unit*>(to)[step] = from[step * kColumns];
}

// sums[num_rows][64] of a panel. `columns` has room for a block of depth.
template <class T>
void multiply_panel(long num_rows, const Unit* rows, const Matrix<T>& matrix, const uint8_t* panel,
                    float* sums, Unit* columns) {
  if (matrix.coding == kInt8)
    return multiply_coded<T, Int8>(num_rows, rows, panel, matrix.depth(), sums, columns);
  if (matrix.coding == kInt4)
    return multiply_coded<T, Int4>(num_rows, rows, panel, matrix.depth(), sums, columns);
  const Unit* units = reinterpret_cast<const Unit*>(panel);
  const long depth = matrix.depth();
  if (num_rows <= kRowsAtOnce && vectors_at_once(num_rows) * kLanes == kColumns)
    return multiply<T, kAheadOfFew>(num_rows, rows, depth, units, kColumns, depth, sums, kColumns,
                                    true);
  for (long step = 0; step < depth; step += kDepthBlock)
    multiply<T, kAheadOfMany>(num_rows, rows + step, depth, units + step * kColumns, kColumns,
                              std::min(kDepthBlock, depth - step), sums, kColumns, step == 0);
}

// finish(row, panel, sums) for every row and panel of x[num_rows][ins] * W transposed, by all
// threads of the team. `sums` are 64; `scratch` is the thread's own, of kScratch.
template <class T, class Finish>
void product(Team& team, const T* x, long num_rows, const Matrix<T>& matrix, float* scratch,
             Finish&& finish) {
  const long blocks = ceil_div(num_rows, kRowBlock), depth = matrix.depth();
  team.each(matrix.num_panels() * blocks, [&](long task) {
    const long panel = task / blocks, first = task % blocks * kRowBlock;
    const long count = std::min(kRowBlock, num_rows - first);
    const Unit* rows = reinterpret_cast<const Unit*>(x) + first * depth;
    Unit* columns = reinterpret_cast<Unit*>(scratch + kRowBlock * kColumns);
    multiply_panel(count, rows, matrix, matrix.panel(panel), scratch, columns);
    for (long row = 0; row < count; ++row) finish(first + row, panel, scratch + row * kColumns);
  });
}

// What becomes of 64 sums. Each rounds where transformers' modules do.

// to[row] = sums (+ bias).
template <class T>
struct Keep {
  T* to;
  long outs;
  const T* bias = nullptr;

  void operator()(long row, long panel, const float* sums) const {
    for (long c = 0; c < kColumns; c += kLanes) {
      const long at = panel * kColumns + c;
      const Lanes inside = lanes(outs - at);
      if (!inside) return;
      Vec value = load(sums + c);
      if (bias) value = value + Format<T>::load(bias + at, inside);
      Format<T>::store(to + row * outs + at, inside, value);
    }
  }
};

// to[row] += sums: the residual.
template <class T>
struct Add {
  T* to;
  long outs;

  void operator()(long row, long panel, const float* sums) const {
    for (long c = 0; c < kColumns; c += kLanes) {
      const long at = panel * kColumns + c;
      const Lanes inside = lanes(outs - at);
      if (!inside) return;
      T* place = to + row * outs + at;
      const Vec value = Format<T>::rounded(load(sums + c));
      Format<T>::store(place, inside, Format<T>::load(place, inside) + value);
    }
  }
};

// to[row] = sums in FP32, rounded as the run's format has them: logits.
template <class T>
struct Widen {
  float* to;
  long outs;

  void operator()(long row, long panel, const float* sums) const {
    for (long c = 0; c < kColumns; c += kLanes) {
      const long at = panel * kColumns + c;
      const Vec value = Format<T>::rounded(load(sums + c));
      store(to + row * outs + at, lanes(outs - at), value);
    }
  }
};

// to[row] = SiLU(gate) * up, of a gated matrix.
template <class T>
struct Gate {
  T* to;
  long outs;

  void operator()(long row, long panel, const float* sums) const {
    const Vec one = every(1.0f);
    for (long c = 0; c < kHalf; c += kLanes) {
      const long at = panel * kHalf + c;
      const Lanes inside = lanes(outs - at);
      if (!inside) return;
      const Vec gate = Format<T>::rounded(load(sums + c));
      const Vec up = Format<T>::rounded(load(sums + kHalf + c));
      const Vec below = one + exponential(zeros() - gate);
      const Vec silu = Format<T>::rounded(gate / below);
      Format<T>::store(to + row * outs + at, inside, silu * up);
    }
  }
};

}  // namespace baton
