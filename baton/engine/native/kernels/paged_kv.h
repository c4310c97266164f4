// The paged KV pool, [num_blocks][layers_per_block][2][block_tokens][kv_heads][head_dim], and the
// batch of a step. Layers are divided into groups, each of which has its own blocks.
#pragma once

#include <cstdint>
#include <vector>

#include "number_formats.h"

namespace baton {

// One layer of the pool. `group` is the layer's group, whose block tables lead to its blocks.
template <class T>
struct Pages {
  T* layer;
  long block_tokens, block_stride;  // distance between two blocks, in elements
  long kv_heads, head_dim, group;

  T* keys(long block, long offset, long head) const {
    return layer + block * block_stride + (offset * kv_heads + head) * head_dim;
  }
  T* values(long block, long offset, long head) const {
    return keys(block, offset, head) + block_tokens * kv_heads * head_dim;
  }
};

// The packed rows of a step: row r owns tokens [offsets[r], offsets[r + 1]), has starts[r] tokens
// in the pool before them, and finds position p of group g in block
// tables[g][r][p / block_tokens]. Its tokens attend to the first windows[r][0] tokens of the context
// and to the last windows[r][1], their own included; if `windows` is null, to all.
struct Batch {
  int64_t num_rows;
  const int64_t* starts;
  const int64_t* offsets;
  const int64_t* tables;
  int64_t table_stride, num_groups;
  const int64_t* windows;

  long num_tokens() const { return offsets[num_rows]; }
  long count(long row) const { return offsets[row + 1] - offsets[row]; }
  long context(long row) const { return starts[row] + count(row); }
  const int64_t* table(long row, long group) const {
    return tables + (group * num_rows + row) * table_stride;
  }

  // Returns an error message if this batch would cause an access outside of the pool, else null.
  const char* fault(long num_blocks, long block_tokens, long max_positions,
                    long wanted_groups) const {
    if (num_rows < 1) return "the batch has no rows";
    if (num_groups != wanted_groups) return "the batch has block tables of another number of groups";
    if (offsets[0] != 0) return "offsets don't begin with 0";
    for (long row = 0; row < num_rows; ++row) {
      if (count(row) < 1) return "a row has no tokens";
      if (starts[row] < 0) return "a row starts before 0";
      if (windows && (windows[2 * row] < 0 || windows[2 * row + 1] < 1))
        return "a row has an invalid window";
      if (context(row) > max_positions) return "a context is longer than there are positions";
      const long used = ceil_div(context(row), block_tokens);
      if (used > table_stride) return "a block table is shorter than its context";
      for (long group = 0; group < num_groups; ++group)
        for (long i = 0; i < used; ++i)
          if (const long block = table(row, group)[i]; block < 0 || block >= num_blocks)
            return "a block is not in the pool";
    }
    return nullptr;
  }

  std::vector<int32_t> rows_of_tokens() const {
    std::vector<int32_t> rows(num_tokens());
    for (long row = 0; row < num_rows; ++row)
      std::fill(rows.begin() + offsets[row], rows.begin() + offsets[row + 1], int32_t(row));
    return rows;
  }
};

}  // namespace baton
