// Chunks of 64 bytes or words in AVX2 registers; included by chunks.h.
#pragma once

struct Bytes64 {
    __m256i halves[2];

    static Bytes64 load(const uint8_t* from) {
        return {{_mm256_loadu_si256((const __m256i*)from),
                 _mm256_loadu_si256((const __m256i*)(from + 32))}};
    }
    void store(uint8_t* to) const {
        _mm256_storeu_si256((__m256i*)to, halves[0]);
        _mm256_storeu_si256((__m256i*)(to + 32), halves[1]);
    }

    // Set bit i of words[j] to bit j of the code of byte i: min(byte - first, 7).
    void code(uint8_t first, uint64_t* words) const {
        for (int bit = 0; bit < 3; ++bit) words[bit] = 0;
        for (int half = 0; half < 2; ++half) {
            const __m256i distance = _mm256_sub_epi8(halves[half], _mm256_set1_epi8(char(first)));
            const __m256i codes = _mm256_min_epu8(distance, _mm256_set1_epi8(7));
            for (int bit = 0; bit < 3; ++bit) {
                const int mask = _mm256_movemask_epi8(_mm256_slli_epi16(codes, 7 - bit));
                words[bit] |= uint64_t(uint32_t(mask)) << (32 * half);
            }
        }
    }

    // The reverse of code(). Bytes with code 7 must be replaced by expand().
    static Bytes64 decoded(const uint64_t* words, uint8_t first) {
        Bytes64 result;
        for (int half = 0; half < 2; ++half) {
            __m256i sum = _mm256_set1_epi8(char(first));
            for (int bit = 0; bit < 3; ++bit) {
                const __m256i is_set = spread(uint32_t(words[bit] >> (32 * half)));
                const __m256i value = _mm256_set1_epi8(char(1 << bit));
                sum = _mm256_add_epi8(sum, _mm256_and_si256(is_set, value));
            }
            result.halves[half] = sum;
        }
        return result;
    }

    // Store the bytes whose bit is set in `which`, one after the other.
    void compress(uint64_t which, uint8_t* to) const {
        alignas(64) uint8_t all[64];
        if (!which) return;
        store(all);
        for (; which; which &= which - 1) *to++ = all[__builtin_ctzll(which)];
    }

    // Replace the bytes whose bit is set in `which` by those at `from`, in order. Reads as many.
    void expand(uint64_t which, const uint8_t* from) {
        alignas(64) uint8_t all[64];
        if (!which) return;
        store(all);
        for (; which; which &= which - 1) all[__builtin_ctzll(which)] = *from++;
        *this = load(all);
    }

private:
    // Return 255 in each byte whose bit is set, and 0 in the others.
    static __m256i spread(uint32_t bits) {
        const __m256i places = _mm256_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2,
                                                2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3);
        const __m256i masks = _mm256_set1_epi64x(int64_t(0x8040201008040201));
        const __m256i bytes = _mm256_shuffle_epi8(_mm256_set1_epi32(int(bits)), places);
        return _mm256_cmpeq_epi8(_mm256_and_si256(bytes, masks), masks);
    }
};

// 64 words of 16 bits.
struct Words64 {
    __m256i quarters[4];

    Words64 rotated_left() const { return rotated(1); }
    Words64 rotated_right() const { return rotated(15); }

    Bytes64 high_bytes() const {
        Bytes64 result;
        for (int half = 0; half < 2; ++half)
            result.halves[half] = packed(_mm256_srli_epi16(quarters[2 * half], 8),
                                         _mm256_srli_epi16(quarters[2 * half + 1], 8));
        return result;
    }
    Bytes64 low_bytes() const {
        const __m256i mask = _mm256_set1_epi16(255);
        Bytes64 result;
        for (int half = 0; half < 2; ++half)
            result.halves[half] = packed(_mm256_and_si256(quarters[2 * half], mask),
                                         _mm256_and_si256(quarters[2 * half + 1], mask));
        return result;
    }

    static Words64 of(Bytes64 high_bytes, Bytes64 low_bytes) {
        Words64 result;
        for (int half = 0; half < 2; ++half) {
            // Unpacking works within the halves of a register.
            const __m256i highs = _mm256_permute4x64_epi64(high_bytes.halves[half], 0xd8);
            const __m256i lows = _mm256_permute4x64_epi64(low_bytes.halves[half], 0xd8);
            result.quarters[2 * half] = _mm256_unpacklo_epi8(lows, highs);
            result.quarters[2 * half + 1] = _mm256_unpackhi_epi8(lows, highs);
        }
        return result;
    }

private:
    Words64 rotated(int bits) const {
        Words64 result;
        for (int i = 0; i < 4; ++i)
            result.quarters[i] = _mm256_or_si256(_mm256_slli_epi16(quarters[i], bits),
                                                 _mm256_srli_epi16(quarters[i], 16 - bits));
        return result;
    }
    static __m256i packed(__m256i low, __m256i high) {
        return _mm256_permute4x64_epi64(_mm256_packus_epi16(low, high), 0xd8);
    }
};

template <bool FLOAT32>
inline Words64 load_upper(const uint8_t* from, uint8_t* low_halves) {
    Words64 result;
    for (int i = 0; i < 4; ++i) {
        if (!FLOAT32) {
            result.quarters[i] = _mm256_loadu_si256((const __m256i*)(from + i * 32));
            continue;
        }
        const __m256i first = _mm256_loadu_si256((const __m256i*)(from + i * 64));
        const __m256i second = _mm256_loadu_si256((const __m256i*)(from + i * 64 + 32));
        const __m256i mask = _mm256_set1_epi32(0xffff);
        const __m256i upper =
            _mm256_packus_epi32(_mm256_srli_epi32(first, 16), _mm256_srli_epi32(second, 16));
        const __m256i lower =
            _mm256_packus_epi32(_mm256_and_si256(first, mask), _mm256_and_si256(second, mask));
        result.quarters[i] = _mm256_permute4x64_epi64(upper, 0xd8);
        if (low_halves)
            _mm256_storeu_si256((__m256i*)(low_halves + i * 32),
                                _mm256_permute4x64_epi64(lower, 0xd8));
    }
    return result;
}

template <bool FLOAT32>
inline void store_upper(Words64 words, const uint8_t* low_halves, uint8_t* to) {
    for (int i = 0; i < 4; ++i) {
        if (!FLOAT32) {
            _mm256_storeu_si256((__m256i*)(to + i * 32), words.quarters[i]);
            continue;
        }
        const __m256i lower = _mm256_permute4x64_epi64(
            _mm256_loadu_si256((const __m256i*)(low_halves + i * 32)), 0xd8);
        const __m256i upper = _mm256_permute4x64_epi64(words.quarters[i], 0xd8);
        _mm256_storeu_si256((__m256i*)(to + i * 64), _mm256_unpacklo_epi16(lower, upper));
        _mm256_storeu_si256((__m256i*)(to + i * 64 + 32), _mm256_unpackhi_epi16(lower, upper));
    }
}
