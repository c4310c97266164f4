// The C interface for baton/engine/native/library.py, which documents the parameters.
//
// Sizes and addresses of weights are not checked; arguments that change from step to step (tables,
// tokens, lengths) are. A function that can fail returns an error message, or null.

#include "ceiling.h"
#include "decoder.h"
#include "sampler.h"

using namespace baton;

namespace {

template <class Action>
const char* guarded(Action action) {
  try {
    return action();
  } catch (const std::bad_alloc&) {
    return "out of memory";
  } catch (const std::exception&) {
    return "threads could not be started";
  }
}

template <class T>
const char* pack_as(Team& team, const Source& from, const Matrix<T>& matrix, void* to) {
  const long ins = matrix.ins;
  const bool converts = from.kind != Format<T>::kKind;
  const Aligned<T> scratch(converts ? team.size() * kColumns * ins : 1);
  std::atomic<bool> good{true};
  team.run([&](int thread) {
    T* own = converts ? scratch + thread * kColumns * ins : nullptr;
    if (!pack(team, from, matrix, own, to)) good = false;
  });
  return good ? nullptr : "a weight is not finite";
}

template <class T>
void multiply_as(Team& all, const void* x, long count, const Matrix<T>& matrix, void* to) {
  Team alone(1);
  Team& team = seconds_of(count, double(matrix.outs) * matrix.ins) < kWorthWaking ? alone : all;
  const Aligned<float> scratch(team.size() * kScratch);
  team.run([&](int thread) {
    float* own = scratch + thread * kScratch;
    T* place = static_cast<T*>(to);
    if (matrix.gated)
      product(team, static_cast<const T*>(x), count, matrix, own, Gate<T>{place, matrix.outs});
    else
      product(team, static_cast<const T*>(x), count, matrix, own, Keep<T>{place, matrix.outs});
  });
}

}  // namespace

extern "C" {

int64_t baton_shape_bytes() { return sizeof(Shape); }
int64_t baton_layer_bytes() { return sizeof(Layer); }
int64_t baton_batch_bytes() { return sizeof(Batch); }
int64_t baton_dials_bytes() { return sizeof(Dials); }

Team* baton_team(int64_t size) {
  try {
    return new Team(static_cast<int>(size));
  } catch (const std::exception&) {
    return nullptr;
  }
}

void baton_team_free(Team* team) { delete team; }

int64_t baton_packed_bytes(int64_t kind, int64_t coding, int64_t outs, int64_t ins, bool gated) {
  const Coding how = static_cast<Coding>(coding);
  if (kind == kBfloat16) return Matrix<Bf16>{nullptr, outs, ins, gated, how}.bytes();
  return Matrix<float>{nullptr, outs, ins, gated, how}.bytes();
}

const char* baton_pack(Team* team, int64_t kind, const void* const* parts, const int64_t* counts,
                       int64_t from_kind, int64_t coding, int64_t outs, int64_t ins, bool gated,
                       void* to) {
  return guarded([&]() -> const char* {
    const Source from{parts, counts, static_cast<Kind>(from_kind)};
    const Coding how = static_cast<Coding>(coding);
    if (kind == kBfloat16) return pack_as(*team, from, Matrix<Bf16>{to, outs, ins, gated, how}, to);
    return pack_as(*team, from, Matrix<float>{to, outs, ins, gated, how}, to);
  });
}

const char* baton_multiply(Team* team, int64_t kind, const void* x, int64_t count,
                           const void* packed, int64_t coding, int64_t outs, int64_t ins,
                           bool gated, void* to) {
  return guarded([&]() -> const char* {
    const Coding how = static_cast<Coding>(coding);
    if (kind == kBfloat16)
      multiply_as(*team, x, count, Matrix<Bf16>{packed, outs, ins, gated, how}, to);
    else
      multiply_as(*team, x, count, Matrix<float>{packed, outs, ins, gated, how}, to);
    return nullptr;
  });
}

void baton_exponential(const float* from, int64_t count, float* to) {
  for (long i = 0; i < count; i += kLanes) {
    const Lanes inside = lanes(count - i);
    store(to + i, inside, exponential(load(from + i, inside)));
  }
}

float baton_products_only(int64_t kind, int64_t steps) {
  return kind == kBfloat16 ? products_only<Bf16>(steps) : products_only<float>(steps);
}

int64_t baton_reads_only(const void* from, int64_t bytes) {
  return reads_only(static_cast<const Unit*>(from), bytes / 64);
}

Decoder* baton_decoder(Team* team, int64_t kind, const Shape* shape, void* pool, const float* cos,
                       const float* sin) {
  try {
    if (kind == kBfloat16) return new DecoderOf<Bf16>(*shape, pool, cos, sin, *team);
    return new DecoderOf<float>(*shape, pool, cos, sin, *team);
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
  return guarded([&] { return decoder->embed(tokens, count, x); });
}

const char* baton_run(Decoder* decoder, const Batch* batch, int64_t first, int64_t last, void* x,
                      void* normed) {
  return guarded([&] { return decoder->run(*batch, first, last, x, normed); });
}

const char* baton_attend(Decoder* decoder, const Batch* batch, int64_t layer, void* qkv, void* to) {
  return guarded([&] { return decoder->attend(*batch, layer, qkv, to); });
}

const char* baton_logits(Decoder* decoder, const void* x, int64_t count, float* to) {
  return guarded([&]() -> const char* {
    decoder->logits(x, count, to);
    return nullptr;
  });
}

Samplers* baton_samplers(Team* team, int64_t vocabulary) {
  try {
    return new Samplers(*team, vocabulary);
  } catch (const std::exception&) {
    return nullptr;
  }
}

void baton_samplers_free(Samplers* samplers) { delete samplers; }

const char* baton_choose(Samplers* samplers, const float* logits, int64_t count,
                         const Dials* dials, const int64_t* history, const int64_t* bias_tokens,
                         const double* biases, int64_t* tokens) {
  return guarded([&]() -> const char* {
    samplers->choose(logits, count, dials, {history, bias_tokens, biases}, tokens);
    return nullptr;
  });
}

}  // extern "C"
