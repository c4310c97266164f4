// Low-rank additions to the products of a layer (LoRA, Hu et al. 2021), for some rows of a step.
#pragma once

#include "matmul.h"

namespace baton {

// The addition x A^T B^T to a product with a matrix [outs][ins]: A [rank][ins] and B [outs][rank],
// packed. `a` is null if nothing is added.
struct LowRank {
  const void *a, *b;
  int64_t rank;
};

// An adapter's additions to the matrices of one layer.
struct LoraLayer {
  LowRank qkv, output, gate_up, down;
};

// Tokens [first, first + count) of a step use the adapter with these layers.
struct LoraSegment {
  int64_t first, count;
  const LoraLayer* layers;
};

// The segments of a step, in order of their tokens.
struct LoraSegments {
  const LoraSegment* segments = nullptr;
  long count = 0;

  const LoraSegment* begin() const { return segments; }
  const LoraSegment* end() const { return segments + count; }

  // Returns an error message if a segment is not within the step's tokens, else null.
  const char* fault(long num_tokens) const {
    long last = 0;
    for (const LoraSegment& segment : *this) {
      if (segment.first < last || segment.count < 1) return "adapters' tokens overlap";
      last = segment.first + segment.count;
      if (last > num_tokens) return "an adapter has tokens that are not in the batch";
    }
    return nullptr;
  }

  long num_tokens() const {
    long sum = 0;
    for (const LoraSegment& segment : *this) sum += segment.count;
    return sum;
  }

  bool change(long layer, LowRank LoraLayer::*part) const {
    for (const LoraSegment& segment : *this)
      if ((segment.layers[layer].*part).a) return true;
    return false;
  }

  long max_rank(long num_layers) const {
    long rank = 0;
    for (const LoraSegment& segment : *this)
      for (long layer = 0; layer < num_layers; ++layer) {
        const LoraLayer& own = segment.layers[layer];
        for (const LowRank* pair : {&own.qkv, &own.output, &own.gate_up, &own.down})
          if (pair->a) rank = std::max<long>(rank, pair->rank);
      }
    return rank;
  }
};

// The additions to one product: those of the token with index `indexes[token]`, each [outs]. The
// index of a token without an adapter is -1.
template <class T>
struct Deltas {
  const T* values;
  const int32_t* indexes;
  long outs;

  const T* of(long token) const {
    return indexes[token] < 0 ? nullptr : values + indexes[token] * outs;
  }
};

// Adds the deltas to the sums of a product before `finish` stores them. They are rounded where
// peft's modules do: the product, then its sum with the addition. (A bias is added after that.)
template <class T, class Finish>
struct AddDeltas {
  Deltas<T> deltas;
  bool gated;
  Finish finish;

  void operator()(long row, long panel, const float* sums) const {
    const T* delta = deltas.of(row);
    if (!delta) return finish(row, panel, sums);
    alignas(64) float changed[kColumns];
    for (long c = 0; c < kColumns; c += kLanes) {
      const bool is_up = gated && c >= kHalf;
      const long at = gated ? panel * kHalf + c % kHalf : panel * kColumns + c;
      const long outs = gated ? deltas.outs / 2 : deltas.outs;
      const Lanes inside = lanes(outs - at);
      Vec value = Format<T>::rounded(load(sums + c));
      if (inside) value = value + Format<T>::load(delta + (is_up ? outs : 0) + at, inside);
      store(changed + c, value);
    }
    finish(row, panel, changed);
  }
};

// Computes a product for each segment, all of them at once. `product` returns the rows, the matrix
// and the place of the result for a segment; segments without the matrix are left out.
template <class T>
struct SegmentProduct {
  const T* x;
  Matrix<T> matrix;
  T* to;
};

template <class T, class GetProduct>
void matmul_segments(ThreadPool& threads, const LoraSegments& segments, float* scratch,
                     GetProduct&& product) {
  long total = 0;
  for (const LoraSegment& segment : segments) {
    const SegmentProduct<T> own = product(segment);
    if (own.x) total += Tasks<T>(segment.count, own.matrix).count();
  }
  threads.parallel_for(total, [&](long task) {
    for (const LoraSegment& segment : segments) {
      const SegmentProduct<T> own = product(segment);
      if (!own.x) continue;
      const Tasks<T> tasks(segment.count, own.matrix);
      long packed_block = -1;
      if (task < tasks.count())
        return matmul_task(own.x, own.matrix, tasks, task, packed_block, scratch,
                           StoreOutput<T>{own.to, own.matrix.outs});
      task -= tasks.count();
    }
  });
}

}  // namespace baton
