// The functions of the library; baton/kv_codec/native_library.py declares them. Each encodes or
// decodes `count` blocks. Encoding writes the encoded sizes; decoding writes whether an encoding was
// valid. Return 0, or 1 if there is no memory.
#include <new>

#include "fp8.h"
#include "lossless.h"
#include "rotated.h"

typedef const uint8_t* const* Sources;
typedef uint8_t* const* Targets;

template <bool FLOAT32, int GROUP, int BITS>
static void encode_rotated(const RotatedLayout& layout, int64_t count, Sources blocks,
                           Targets targets, int64_t* sizes) {
    RotatedBlocks<FLOAT32, GROUP, BITS> coder(layout);
    for (int64_t i = 0; i < count; ++i) sizes[i] = coder.encode(blocks[i], targets[i]);
}

template <bool FLOAT32, int GROUP, int BITS>
static void decode_rotated(const RotatedLayout& layout, int64_t count, Sources sources,
                           const int64_t* sizes, Targets blocks, uint8_t* valid) {
    RotatedBlocks<FLOAT32, GROUP, BITS> coder(layout);
    for (int64_t i = 0; i < count; ++i) valid[i] = coder.decode(sources[i], sizes[i], blocks[i]);
}

// Call a function template with the dtype, group and bits of a layout.
#define WITH_BITS(FUNCTION, FLOAT32, GROUP, ...)             \
    (layout->bits == 4 ? FUNCTION<FLOAT32, GROUP, 4>(__VA_ARGS__) \
                       : FUNCTION<FLOAT32, GROUP, 2>(__VA_ARGS__))
#define WITH_GROUP(FUNCTION, FLOAT32, ...)                            \
    (layout->group == 128 ? WITH_BITS(FUNCTION, FLOAT32, 128, __VA_ARGS__) \
                          : WITH_BITS(FUNCTION, FLOAT32, 64, __VA_ARGS__))

extern "C" {

int64_t baton_lossless_layout_bytes() { return sizeof(LosslessLayout); }
int64_t baton_rotated_layout_bytes() { return sizeof(RotatedLayout); }
int64_t baton_fp8_layout_bytes() { return sizeof(Fp8Layout); }

int64_t baton_encode_lossless(const LosslessLayout* layout, int64_t count, Sources blocks,
                              Targets targets, int64_t* sizes) {
    for (int64_t i = 0; i < count; ++i)
        sizes[i] = layout->is_float32 ? encode_lossless<true>(*layout, blocks[i], targets[i])
                                      : encode_lossless<false>(*layout, blocks[i], targets[i]);
    return 0;
}

int64_t baton_decode_lossless(const LosslessLayout* layout, int64_t count, Sources sources,
                              const int64_t* sizes, Targets blocks, uint8_t* valid) {
    for (int64_t i = 0; i < count; ++i)
        valid[i] = layout->is_float32
                       ? decode_lossless<true>(*layout, sources[i], sizes[i], blocks[i])
                       : decode_lossless<false>(*layout, sources[i], sizes[i], blocks[i]);
    return 0;
}

int64_t baton_encode_fp8(const Fp8Layout* layout, int64_t count, Sources blocks, Targets targets,
                         int64_t* sizes) {
    for (int64_t i = 0; i < count; ++i)
        sizes[i] = layout->is_float32 ? encode_fp8<true>(*layout, blocks[i], targets[i])
                                      : encode_fp8<false>(*layout, blocks[i], targets[i]);
    return 0;
}

int64_t baton_decode_fp8(const Fp8Layout* layout, int64_t count, Sources sources,
                         const int64_t* sizes, Targets blocks, uint8_t* valid) {
    for (int64_t i = 0; i < count; ++i)
        valid[i] = layout->is_float32
                       ? decode_fp8<true>(*layout, sources[i], sizes[i], blocks[i])
                       : decode_fp8<false>(*layout, sources[i], sizes[i], blocks[i]);
    return 0;
}

int64_t baton_encode_rotated(const RotatedLayout* layout, int64_t count, Sources blocks,
                             Targets targets, int64_t* sizes) try {
    if (layout->is_float32)
        WITH_GROUP(encode_rotated, true, *layout, count, blocks, targets, sizes);
    else
        WITH_GROUP(encode_rotated, false, *layout, count, blocks, targets, sizes);
    return 0;
} catch (const std::bad_alloc&) {
    return 1;
}

int64_t baton_decode_rotated(const RotatedLayout* layout, int64_t count, Sources sources,
                             const int64_t* sizes, Targets blocks, uint8_t* valid) try {
    if (layout->is_float32)
        WITH_GROUP(decode_rotated, true, *layout, count, sources, sizes, blocks, valid);
    else
        WITH_GROUP(decode_rotated, false, *layout, count, sources, sizes, blocks, valid);
    return 0;
} catch (const std::bad_alloc&) {
    return 1;
}
}
