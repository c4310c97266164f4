// A dense decoder on packed weights and the paged KV pool: all layers of a step in one call.
#pragma once

#include <memory>
#include <vector>

#include "attention.h"
#include "lora.h"
#include "matmul.h"
#include "token_ops.h"

namespace baton {

struct Shape {
  int64_t layers, hidden, heads, kv_heads, head_dim, intermediate, vocabulary, positions;
  int64_t num_blocks, block_tokens, layers_per_block, num_groups;
  double epsilon, score_scale;
  double norm_offset;
  int64_t norms_round_last, activation;  // see NormStyle and Activation
};

// One layer's weights. A null pointer means that the layer does not have them; without `gate_up` it
// has no dense feed-forward. `cos` and `sin` [positions][head_dim / 2] rotate its queries and keys.
// `coding` is the format of its matrices, and `window` is zero if it has none. Its KV is in the blocks
// of `group`, in which it is the layer with the index `place`.
struct Layer {
  const void *input_norm, *post_norm;
  const void *qkv, *qkv_bias, *output;
  const void *q_norm, *k_norm;
  const void *gate_up, *down;
  const void *output_bias, *gate_up_bias, *down_bias;
  const void *sinks, *attention_output_norm, *feed_forward_output_norm;
  const float *cos, *sin;
  int64_t coding, window, group, place;
};

class Decoder {
 public:
  virtual ~Decoder() = default;
  virtual void set_layer(long index, const Layer& layer) = 0;
  virtual void set_head(const void* norm, const void* head, Coding coding) = 0;
  // The next three return an error message if the arguments are invalid, else null.
  virtual const char* embed(const int64_t* tokens, long count, void* x) = 0;
  virtual const char* run(const Batch& batch, const LoraSegments& lora, long first, long last,
                          void* x, void* normed) = 0;
  virtual const char* attend(const Batch& batch, long layer, void* qkv, void* to) = 0;
  virtual void logits(const void* x, long count, float* to) = 0;
};

template <class T>
class DecoderOf : public Decoder {
 public:
  DecoderOf(const Shape& shape, void* pool, ThreadPool& threads)
      : shape_(shape),
        threads_(threads),
        pool_(static_cast<T*>(pool)),
        layers_(shape.layers) {
    for (int thread = 0; thread < threads.max_size(); ++thread) {
      attention_.push_back(std::make_unique<Attention<T>>(shape.heads, shape.kv_heads, shape.head_dim,
                                                          static_cast<float>(shape.score_scale)));
      scratch_.push_back(std::make_unique<AlignedBuffer<float>>(scratch_size<T>(
          kTileRowBlock, std::max({shape.hidden, attended_width(), shape.intermediate}))));
    }
  }

  void set_layer(long index, const Layer& layer) override { layers_[index] = layer; }

  void set_head(const void* norm, const void* head, Coding coding) override {
    norm_ = static_cast<const T*>(norm);
    head_ = Matrix<T>{head, shape_.vocabulary, shape_.hidden, false, coding};
  }

  const char* embed(const int64_t* tokens, long count, void* x) override {
    for (long i = 0; i < count; ++i)
      if (tokens[i] < 0 || tokens[i] >= shape_.vocabulary) return "a token is not in the vocabulary";
    pick_threads(seconds_of_layers(count, shape_.layers)).wake();
    ThreadPool& threads =
        pick_threads(count * 1e-6 * shape_.hidden / 512);  // each unit is in another cache line
    threads.run([&](int) {
      threads.parallel_for(count, [&](long i) {
        unpack_row(head_, tokens[i], static_cast<T*>(x) + i * shape_.hidden);
      });
    });
    return nullptr;
  }

  // Computes layers [first, last) over x [num_tokens][hidden], in place, with the adapters of
  // `lora`. If the last layer has no dense feed-forward, `normed` gets the input of its experts.
  const char* run(const Batch& batch, const LoraSegments& lora, long first, long last, void* x,
                  void* normed) override {
    if (first < 0 || last > shape_.layers) return "there is no such layer";
    if (const char* fault = check(batch)) return fault;
    if (const char* fault = lora.fault(batch.num_tokens())) return fault;
    Step step = begin(batch, last - first);
    if (lora.count) reserve_lora(step, lora);
    step.threads->run([&](int thread) {
      const TileScope tiles;
      for (long index = first; index < last; ++index) {
        const Layer& layer = layers_[index];
        attention_block(step, index, thread, static_cast<T*>(x));
        T* to = layer.gate_up ? step.normed : static_cast<T*>(normed);
        norm(step, static_cast<T*>(x), layer.post_norm, to);
        if (layer.gate_up) feed_forward(step, index, thread, static_cast<T*>(x));
      }
    });
    return nullptr;
  }

  // Computes attention alone: writes the keys and values of `qkv`, which are already rotated.
  const char* attend(const Batch& batch, long layer, void* qkv, void* to) override {
    if (layer < 0 || layer >= shape_.layers) return "there is no such layer";
    if (const char* fault = check(batch)) return fault;
    const Step step = begin(batch, shape_.layers);
    step.threads->run([&](int thread) {
      const TileScope tiles;
      write_kv(step, heads(Layer{}), pages(layer), static_cast<T*>(qkv));
      run_attention(step, layer, thread, static_cast<T*>(qkv), static_cast<T*>(to));
    });
    return nullptr;
  }

  // Computes logits [count][vocabulary] in FP32 of x [count][hidden].
  void logits(const void* x, long count, float* to) override {
    Step step = reserve(count);
    step.threads = &pick_threads(seconds_of(count, double(shape_.vocabulary) * shape_.hidden));
    step.threads->run([&](int thread) {
      const TileScope tiles;
      norm(step, static_cast<const T*>(x), norm_, step.normed);
      matmul(*step.threads, step.normed, count, head_, *scratch_[thread],
             StoreLogits<T>{to, shape_.vocabulary});
    });
  }

 private:
  // A step's batch, its attention tiles, and buffers for the results between matrix products.
  struct Step {
    const Batch* batch = nullptr;
    ThreadPool* threads = nullptr;
    long count = 0;
    std::vector<int32_t> rows;
    std::vector<QueryTile> tiles;
    T *normed, *qkv, *attended, *gated;
    LoraSegments lora;
    std::vector<int32_t> lora_indexes;  // of tokens, in `deltas` and `shrunk`; -1: no adapter
    T *shrunk = nullptr, *deltas = nullptr;
    long max_rank = 0;
  };

  long attended_width() const { return shape_.heads * shape_.head_dim; }
  long qkv_width() const { return (shape_.heads + 2 * shape_.kv_heads) * shape_.head_dim; }

  const char* check(const Batch& batch) const {
    return batch.fault(shape_.num_blocks, shape_.block_tokens, shape_.positions,
                       shape_.num_groups);
  }

  // All threads, or the caller's thread alone if the work is too short to wake the others.
  ThreadPool& pick_threads(double seconds) {
    return seconds < kWorthWaking ? single_thread_ : threads_;
  }

  double seconds_of_layers(long count, long layers) const {
    return layers * seconds_of(count, shape_.hidden * (qkv_width() + attended_width() +
                                                       3.0 * shape_.intermediate));
  }

  Step begin(const Batch& batch, long layers) {
    Step step = reserve(batch.num_tokens());
    double keys = 0;
    for (long row = 0; row < batch.num_rows; ++row)
      keys += double(batch.context(row)) * batch.count(row);
    const double attention_seconds = keys * 2 * attended_width() / 100e9;
    step.threads =
        &pick_threads(seconds_of_layers(step.count, layers) + layers * attention_seconds);
    step.batch = &batch;
    step.rows = batch.rows_of_tokens();
    step.tiles =
        query_tiles(batch, shape_.heads / shape_.kv_heads, shape_.kv_heads, step.threads->size());
    return step;
  }

  // Returns a step with buffers for `count` tokens. The memory is kept from step to step, and grows
  // when a step has more tokens than any before.
  Step reserve(long count) {
    const long width = shape_.hidden + qkv_width() + attended_width() + shape_.intermediate;
    if (count > capacity_) {
      buffer_.reset();
      capacity_ = 0;
      buffer_ = std::make_unique<AlignedBuffer<T>>(count * width);
      capacity_ = count;
    }
    Step step;
    step.count = count;
    step.normed = *buffer_;
    step.qkv = step.normed + count * shape_.hidden;
    step.attended = step.qkv + count * qkv_width();
    step.gated = step.attended + count * attended_width();
    return step;
  }

  // Adds the adapters to a step, with buffers for x A^T and x A^T B^T of the tokens that have one.
  void reserve_lora(Step& step, const LoraSegments& lora) {
    step.lora = lora;
    step.max_rank = lora.max_rank(shape_.layers);
    step.lora_indexes.assign(step.count, -1);
    long index = 0;
    for (const LoraSegment& segment : lora)
      for (long i = 0; i < segment.count; ++i)
        step.lora_indexes[segment.first + i] = static_cast<int32_t>(index++);
    const long outs = std::max({qkv_width(), 2 * shape_.intermediate, shape_.hidden});
    const long size = index * (step.max_rank + outs);
    if (size > lora_capacity_) {
      lora_buffer_.reset();
      lora_capacity_ = 0;
      lora_buffer_ = std::make_unique<AlignedBuffer<T>>(size);
      lora_capacity_ = size;
    }
    step.shrunk = *lora_buffer_;
    step.deltas = step.shrunk + index * step.max_rank;
  }

  Pages<T> pages(long layer) const {
    const long part = shape_.block_tokens * shape_.kv_heads * shape_.head_dim;
    return {pool_ + layers_[layer].place * 2 * part,
            shape_.block_tokens,
            shape_.layers_per_block * 2 * part,
            shape_.kv_heads,
            shape_.head_dim,
            layers_[layer].group};
  }

  NormStyle norm_style() const {
    return {static_cast<float>(shape_.epsilon), static_cast<float>(shape_.norm_offset),
            shape_.norms_round_last != 0};
  }

  HeadLayout<T> heads(const Layer& layer) const {
    return {shape_.heads,
            shape_.kv_heads,
            shape_.head_dim,
            static_cast<const T*>(layer.q_norm),
            static_cast<const T*>(layer.k_norm),
            layer.cos,
            layer.sin,
            norm_style()};
  }

  // The parts of a layer; all threads of the pool call each of them.

  void attention_block(const Step& step, long index, int thread, T* x) {
    const Layer& layer = layers_[index];
    const Coding coding = static_cast<Coding>(layer.coding);
    const Matrix<T> qkv{layer.qkv, qkv_width(), shape_.hidden, false, coding};
    const Matrix<T> output{layer.output, shape_.hidden, attended_width(), false, coding};
    norm(step, x, layer.input_norm, step.normed);
    project(step, index, &LoraLayer::qkv, thread, step.normed, qkv,
            StoreOutput<T>{step.qkv, qkv_width(), static_cast<const T*>(layer.qkv_bias)});
    write_kv(step, heads(layer), pages(index), step.qkv);
    run_attention(step, index, thread, step.qkv, step.attended);
    add_product(step, index, &LoraLayer::output, thread, step.attended, output, layer.output_bias,
                layer.attention_output_norm, x);
  }

  void feed_forward(const Step& step, long index, int thread, T* x) {
    const Layer& layer = layers_[index];
    const Coding coding = static_cast<Coding>(layer.coding);
    const Matrix<T> gate_up{layer.gate_up, shape_.intermediate, shape_.hidden, true, coding};
    const Matrix<T> down{layer.down, shape_.hidden, shape_.intermediate, false, coding};
    project(step, index, &LoraLayer::gate_up, thread, step.normed, gate_up,
            StoreGated<T>{step.gated, shape_.intermediate, static_cast<Activation>(shape_.activation),
                          static_cast<const T*>(layer.gate_up_bias)});
    add_product(step, index, &LoraLayer::down, thread, step.gated, down, layer.down_bias,
                layer.feed_forward_output_norm, x);
  }

  // Adds the product `from` * W (+ bias) to x [num_tokens][hidden], after `norm` if there is one.
  void add_product(const Step& step, long index, LowRank LoraLayer::*part, int thread, const T* from,
                   const Matrix<T>& matrix, const void* bias, const void* norm, T* x) {
    const T* added = static_cast<const T*>(bias);
    if (!norm)
      return project(step, index, part, thread, from, matrix,
                     AddToResidual<T>{x, shape_.hidden, added});
    project(step, index, part, thread, from, matrix,
            StoreOutput<T>{step.normed, shape_.hidden, added});
    const long size = shape_.hidden;
    step.threads->parallel_for(step.count, [&](long i) {
      add_rms_norm(step.normed + i * size, static_cast<const T*>(norm), x + i * size, size,
                   norm_style());
    });
  }

  // Multiplies all tokens with one of the layer's matrices, adds what the adapters add to this
  // product, and calls `finish`. Tokens without an adapter get the same bits as without adapters.
  template <class Finish>
  void project(const Step& step, long index, LowRank LoraLayer::*part, int thread, const T* x,
               const Matrix<T>& matrix, const Finish& finish) {
    float* scratch = *scratch_[thread];
    if (!step.lora.change(index, part))
      return matmul(*step.threads, x, step.count, matrix, scratch, finish);
    const long outs = matrix.gated ? 2 * matrix.outs : matrix.outs;
    compute_deltas(step, index, part, scratch, x, matrix.ins, outs);
    const Deltas<T> deltas{step.deltas, step.lora_indexes.data(), outs};
    matmul(*step.threads, x, step.count, matrix, scratch,
           AddDeltas<T, Finish>{deltas, matrix.gated, finish});
  }

  // Writes what each adapter adds to a product to step.deltas: zeros, if it adds nothing.
  void compute_deltas(const Step& step, long index, LowRank LoraLayer::*part, float* scratch,
                      const T* x, long ins, long outs) {
    const auto shrunk = [&](const LoraSegment& segment) {
      return step.shrunk + step.lora_indexes[segment.first] * step.max_rank;
    };
    const auto deltas = [&](const LoraSegment& segment) {
      return step.deltas + step.lora_indexes[segment.first] * outs;
    };
    matmul_segments<T>(*step.threads, step.lora, scratch, [&](const LoraSegment& segment) {
      const LowRank& pair = segment.layers[index].*part;
      return SegmentProduct<T>{pair.a ? x + segment.first * ins : nullptr,
                               Matrix<T>{pair.a, pair.rank, ins}, shrunk(segment)};
    });
    matmul_segments<T>(*step.threads, step.lora, scratch, [&](const LoraSegment& segment) {
      const LowRank& pair = segment.layers[index].*part;
      return SegmentProduct<T>{pair.a ? shrunk(segment) : nullptr, Matrix<T>{pair.b, outs, pair.rank},
                               deltas(segment)};
    });
    step.threads->parallel_for(step.lora.count, [&](long task) {
      const LoraSegment& segment = step.lora.segments[task];
      if (!(segment.layers[index].*part).a)
        std::memset(deltas(segment), 0, sizeof(T) * segment.count * outs);
    });
  }

  void norm(const Step& step, const T* x, const void* weight, T* to) {
    const long size = shape_.hidden;
    step.threads->parallel_for(step.count, [&](long i) {
      rms_norm(x + i * size, static_cast<const T*>(weight), to + i * size, size,
               norm_style());
    });
  }

  void write_kv(const Step& step, const HeadLayout<T>& heads, const Pages<T>& pages, T* qkv) {
    const Batch& batch = *step.batch;
    step.threads->parallel_for(step.count, [&](long i) {
      const long row = step.rows[i], position = batch.starts[row] + i - batch.offsets[row];
      const long block = batch.table(row, pages.group)[position / shape_.block_tokens];
      heads.write_kv(qkv + i * heads.width(), position, pages, block,
                     position % shape_.block_tokens);
    });
  }

  void run_attention(const Step& step, long index, int thread, const T* qkv, T* to) {
    const Pages<T> pages = this->pages(index);
    const Layer& layer = layers_[index];
    const AttentionRule<T> rule{layer.window ? layer.window : kNoWindow,
                                static_cast<const T*>(layer.sinks)};
    const long count = static_cast<long>(step.tiles.size()), size = step.threads->size();
    step.threads->parallel_for(count, [&](long task) {
      const QueryTile* next = task + size < count ? &step.tiles[task + size] : nullptr;
      attention_[thread]->attend(*step.batch, step.tiles[task], next, pages, rule, qkv, to);
    });
  }

  const Shape shape_;
  ThreadPool& threads_;
  ThreadPool single_thread_{1};
  T* const pool_;
  std::vector<Layer> layers_;
  const T* norm_ = nullptr;
  Matrix<T> head_{nullptr, 0, 0};
  std::vector<std::unique_ptr<Attention<T>>> attention_;
  std::vector<std::unique_ptr<AlignedBuffer<float>>> scratch_;
  std::unique_ptr<AlignedBuffer<T>> buffer_;
  long capacity_ = 0;
  std::unique_ptr<AlignedBuffer<T>> lora_buffer_;
  long lora_capacity_ = 0;
};

}  // namespace baton
