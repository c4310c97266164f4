// The C interface for baton/engine/native/library.py, which documents the parameters.
//
// Sizes and addresses of weights are not checked; arguments that change from step to step (tables,
// tokens, lengths) are. A function that can fail returns an error message, or null.

#include "peak_rates.h"
#include "decoder.h"
#include "sampler.h"

using namespace baton;

namespace {

template <class Action>
const char* catch_errors(Action action) {
  try {
    return action();
  } catch (const std::bad_alloc&) {
    return "out of memory";
  } catch (const std::exception&) {
    return "threads could not be started";
  }
}

template <class T>
const char* pack_as(ThreadPool& threads, const WeightSource& from, const Matrix<T>& matrix,
                    void* to) {
  const long size = kColumns * matrix.ins;
  const AlignedBuffer<T> scratch(threads.size() * size);
  std::atomic<const char*> error{nullptr};
  threads.run([&](int thread) {
    const char* found = pack(threads, from, matrix, scratch + thread * size, to);
    if (found) error = found;
  });
  return error;
}

template <class T>
void multiply_as(ThreadPool& all, const void* x, long count, const Matrix<T>& matrix, void* to) {
  ThreadPool single(1);
  ThreadPool& threads =
      seconds_of(count, double(matrix.outs) * matrix.ins) < kWorthWaking ? single : all;
  const long size = whole_tiles(scratch_size<T>(count, matrix.ins));
  const AlignedBuffer<float> scratch(threads.size() * size);
  threads.run([&](int thread) {
    const TileScope tiles;
    float* own = scratch + thread * size;
    T* place = static_cast<T*>(to);
    if (matrix.gated)
      matmul(threads, static_cast<const T*>(x), count, matrix, own,
             StoreGated<T>{place, matrix.outs});
    else
      matmul(threads, static_cast<const T*>(x), count, matrix, own,
             StoreOutput<T>{place, matrix.outs});
  });
}

void map_lanes(const float* from, long count, float* to, Vec (*function)(Vec)) {
  for (long i = 0; i < count; i += kLanes) {
    const Lanes inside = lanes(count - i);
    store(to + i, inside, function(load(from + i, inside)));
  }
}

}  // namespace

extern "C" {

int64_t baton_shape_bytes() { return sizeof(Shape); }
int64_t baton_layer_bytes() { return sizeof(Layer); }
int64_t baton_batch_bytes() { return sizeof(Batch); }
int64_t baton_lora_layer_bytes() { return sizeof(LoraLayer); }
int64_t baton_lora_segment_bytes() { return sizeof(LoraSegment); }
int64_t baton_sampling_row_bytes() { return sizeof(SamplingRow); }

ThreadPool* baton_thread_pool(int64_t size) {
  try {
    return new ThreadPool(static_cast<int>(size));
  } catch (const std::exception&) {
    return nullptr;
  }
}

void baton_thread_pool_use(ThreadPool* threads, int64_t size) {
  threads->use(static_cast<int>(size));
}

void baton_thread_pool_free(ThreadPool* threads) { delete threads; }

int64_t baton_packed_bytes(int64_t kind, int64_t coding, int64_t outs, int64_t ins, bool gated) {
  const Coding how = static_cast<Coding>(coding);
  if (kind == kBfloat16) return Matrix<Bf16>{nullptr, outs, ins, gated, how}.bytes();
  return Matrix<float>{nullptr, outs, ins, gated, how}.bytes();
}

const char* baton_pack(ThreadPool* threads, int64_t kind, const void* const* parts,
                       const int64_t* counts, const int64_t* kinds, int64_t coding, int64_t outs,
                       int64_t ins, bool gated, void* to) {
  return catch_errors([&]() -> const char* {
    const WeightSource from{parts, counts, kinds};
    const Coding how = static_cast<Coding>(coding);
    if (kind == kBfloat16)
      return pack_as(*threads, from, Matrix<Bf16>{to, outs, ins, gated, how}, to);
    return pack_as(*threads, from, Matrix<float>{to, outs, ins, gated, how}, to);
  });
}

const char* baton_multiply(ThreadPool* threads, int64_t kind, const void* x, int64_t count,
                           const void* packed, int64_t coding, int64_t outs, int64_t ins,
                           bool gated, void* to) {
  return catch_errors([&]() -> const char* {
    const Coding how = static_cast<Coding>(coding);
    if (kind == kBfloat16)
      multiply_as(*threads, x, count, Matrix<Bf16>{packed, outs, ins, gated, how}, to);
    else
      multiply_as(*threads, x, count, Matrix<float>{packed, outs, ins, gated, how}, to);
    return nullptr;
  });
}

void baton_exponential(const float* from, int64_t count, float* to) {
  map_lanes(from, count, to, exp_lanes);
}

void baton_power_of_two(const float* from, int64_t count, float* to) {
  map_lanes(from, count, to, exp2_lanes);
}

float baton_peak_products(int64_t kind, int64_t steps) {
  return kind == kBfloat16 ? peak_products<Bf16>(steps) : peak_products<float>(steps);
}

float baton_peak_tile_products(int64_t steps) { return kHasTiles ? peak_tile_products(steps) : 0; }

int64_t baton_peak_reads(const void* from, int64_t bytes) {
  return peak_reads(static_cast<const Unit*>(from), bytes / 64);
}

Decoder* baton_decoder(ThreadPool* threads, int64_t kind, const Shape* shape, void* pool) {
  try {
    if (kind == kBfloat16) return new DecoderOf<Bf16>(*shape, pool, *threads);
    return new DecoderOf<float>(*shape, pool, *threads);
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

void baton_decoder_free(Decoder* decoder) { delete decoder; }

void baton_set_layer(Decoder* decoder, int64_t index, const Layer* layer) {
  decoder->set_layer(index, *layer);
}

void baton_set_head(Decoder* decoder, const void* norm, const void* head, int64_t coding) {
  decoder->set_head(norm, head, static_cast<Coding>(coding));
}

const char* baton_embed(Decoder* decoder, const int64_t* tokens, int64_t count, void* x) {
  return catch_errors([&] { return decoder->embed(tokens, count, x); });
}

const char* baton_run(Decoder* decoder, const Batch* batch, const LoraSegment* segments,
                      int64_t num_segments, int64_t first, int64_t last, void* x, void* normed) {
  const LoraSegments lora{segments, num_segments};
  return catch_errors([&] { return decoder->run(*batch, lora, first, last, x, normed); });
}

const char* baton_attend(Decoder* decoder, const Batch* batch, int64_t layer, void* qkv, void* to) {
  return catch_errors([&] { return decoder->attend(*batch, layer, qkv, to); });
}

const char* baton_logits(Decoder* decoder, const void* x, int64_t count, float* to) {
  return catch_errors([&]() -> const char* {
    decoder->logits(x, count, to);
    return nullptr;
  });
}

Samplers* baton_samplers(ThreadPool* threads, int64_t vocabulary) {
  try {
    return new Samplers(*threads, vocabulary);
  } catch (const std::exception&) {
    return nullptr;
  }
}

void baton_samplers_free(Samplers* samplers) { delete samplers; }

const char* baton_sample(Samplers* samplers, const float* logits, int64_t count,
                         const SamplingRow* rows, const int64_t* history,
                         const int64_t* bias_tokens, const double* biases, int64_t* tokens) {
  return catch_errors([&]() -> const char* {
    samplers->sample(logits, count, rows, {history, bias_tokens, biases}, tokens);
    return nullptr;
  });
}

}  // extern "C"
