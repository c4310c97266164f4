// Operations on single rows (tokens) of a step.
#pragma once

#include <cmath>
#include <cstring>

#include "paged_kv.h"

namespace baton {

// How a model's norms are computed: `offset` is added to the weights, and the result is rounded
// after the multiplication by the weight, or, unless `rounds_last`, also before it.
struct NormStyle {
  float epsilon, offset;
  bool rounds_last;
};

// RMSNorm (Zhang and Sennrich 2019), in FP32. `to` may be `from`.
template <class T>
inline void rms_norm(const T* from, const T* weight, T* to, long size, const NormStyle& style) {
  Vec squares = zeros();
  for (long i = 0; i < size; i += kLanes) {
    const Vec x = Format<T>::load(from + i, lanes(size - i));
    squares = fma(x, x, squares);
  }
  const float mean = reduce_sum(squares) / static_cast<float>(size);
  const Vec scale = broadcast(1.0f / std::sqrt(mean + style.epsilon));
  for (long i = 0; i < size; i += kLanes) {
    const Lanes inside = lanes(size - i);
    const Vec x = Format<T>::load(from + i, inside) * scale;
    const Vec by = Format<T>::load(weight + i, inside);
    const Vec y = style.rounds_last ? x * (by + broadcast(style.offset)) : Format<T>::rounded(x) * by;
    Format<T>::store(to + i, inside, y);
  }
}

// to += the norm of `from`, which is rounded before it is added.
template <class T>
inline void add_rms_norm(T* from, const T* weight, T* to, long size, const NormStyle& style) {
  rms_norm(from, weight, from, size, style);
  for (long i = 0; i < size; i += kLanes) {
    const Lanes inside = lanes(size - i);
    const Vec sum = Format<T>::load(to + i, inside) + Format<T>::load(from + i, inside);
    Format<T>::store(to + i, inside, sum);
  }
}

// Applies the rotary embedding (Su et al. 2021) to a head, in place; `cos` and `sin` are
// [size / 2]. Each product is rounded, as in transformers.
template <class T>
inline void apply_rope(T* head, const float* cos, const float* sin, long size) {
  const auto times = [](Vec a, Vec b) { return Format<T>::rounded(a * b); };
  const long half = size / 2;
  for (long i = 0; i < half; i += kLanes) {
    const Lanes inside = lanes(half - i);
    const Vec a = Format<T>::load(head + i, inside), b = Format<T>::load(head + half + i, inside);
    const Vec c = load(cos + i, inside), s = load(sin + i, inside);
    Format<T>::store(head + i, inside, times(a, c) - times(b, s));
    Format<T>::store(head + half + i, inside, times(b, c) + times(a, s));
  }
}

// The layout of a token's query, key and value heads, with the weights to normalise and the tables
// to rotate them.
template <class T>
struct HeadLayout {
  long heads, kv_heads, head_dim;
  const T* q_norm;  // null: none
  const T* k_norm;
  const float* cos;  // [positions][head_dim / 2]; null: heads are rotated already
  const float* sin;
  NormStyle norm_style;

  long width() const { return (heads + 2 * kv_heads) * head_dim; }

  // Normalises and rotates one token's queries and keys in place, and writes its keys and values to
  // its slot.
  void write_kv(T* qkv, long position, const Pages<T>& pages, long block, long offset) const {
    for (long head = 0; head < heads + kv_heads; ++head) {
      T* own = qkv + head * head_dim;
      const T* norm = head < heads ? q_norm : k_norm;
      if (norm) rms_norm(own, norm, own, head_dim, norm_style);
      const long first = position * (head_dim / 2);
      if (cos) apply_rope(own, cos + first, sin + first, head_dim);
    }
    const T* keys = qkv + heads * head_dim;
    const size_t size = sizeof(T) * kv_heads * head_dim;
    std::memcpy(pages.keys(block, offset, 0), keys, size);
    std::memcpy(pages.values(block, offset, 0), keys + kv_heads * head_dim, size);
  }
};

}  // namespace baton
