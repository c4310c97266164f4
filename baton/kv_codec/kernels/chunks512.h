// Chunks of 64 bytes or words in AVX-512 registers; included by chunks.h.
#pragma once

struct Bytes64 {
    __m512i bytes;

    static Bytes64 load(const uint8_t* from) { return {_mm512_loadu_si512(from)}; }
    void store(uint8_t* to) const { _mm512_storeu_si512(to, bytes); }

    // Set bit i of words[j] to bit j of the code of byte i: min(byte - first, 7).
    void code(uint8_t first, uint64_t* words) const {
        const __m512i distance = _mm512_sub_epi8(bytes, _mm512_set1_epi8(char(first)));
        const __m512i codes = _mm512_min_epu8(distance, _mm512_set1_epi8(7));
        for (int bit = 0; bit < 3; ++bit)
            words[bit] = _mm512_test_epi8_mask(codes, _mm512_set1_epi8(char(1 << bit)));
    }

    // The reverse of code(). Bytes with code 7 must be replaced by expand().
    static Bytes64 decoded(const uint64_t* words, uint8_t first) {
        __m512i result = _mm512_set1_epi8(char(first));
        for (int bit = 0; bit < 3; ++bit)
            result = _mm512_mask_add_epi8(result, words[bit], result,
                                          _mm512_set1_epi8(char(1 << bit)));
        return {result};
    }

#ifdef __AVX512VBMI2__
    // Store the bytes whose bit is set in `which`, one after the other.
    void compress(uint64_t which, uint8_t* to) const {
        const int count = __builtin_popcountll(which);
        _mm512_mask_storeu_epi8(to, first_bits(count), _mm512_maskz_compress_epi8(which, bytes));
    }

    // Replace the bytes whose bit is set in `which` by those at `from`, in order. Reads as many.
    void expand(uint64_t which, const uint8_t* from) {
        const __m512i values =
            _mm512_maskz_loadu_epi8(first_bits(__builtin_popcountll(which)), from);
        bytes = _mm512_mask_expand_epi8(bytes, which, values);
    }

    static uint64_t first_bits(int count) { return _bzhi_u64(~0ull, unsigned(count)); }
#else
    void compress(uint64_t which, uint8_t* to) const {
        alignas(64) uint8_t all[64];
        store(all);
        for (; which; which &= which - 1) *to++ = all[__builtin_ctzll(which)];
    }

    void expand(uint64_t which, const uint8_t* from) {
        alignas(64) uint8_t all[64];
        if (!which) return;
        store(all);
        for (; which; which &= which - 1) all[__builtin_ctzll(which)] = *from++;
        bytes = _mm512_load_si512(all);
    }
#endif
};

// 64 words of 16 bits.
struct Words64 {
    __m512i low, high;

    Words64 rotated_left() const { return {rotated(low, 1), rotated(high, 1)}; }
    Words64 rotated_right() const { return {rotated(low, 15), rotated(high, 15)}; }

    Bytes64 high_bytes() const {
        return {packed(_mm512_srli_epi16(low, 8), _mm512_srli_epi16(high, 8))};
    }
    Bytes64 low_bytes() const {
        const __m512i mask = _mm512_set1_epi16(255);
        return {packed(_mm512_and_si512(low, mask), _mm512_and_si512(high, mask))};
    }

    static Words64 of(Bytes64 high_bytes, Bytes64 low_bytes) {
        // Unpacking works within the quarters of a register.
        const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
        const __m512i highs = _mm512_permutexvar_epi64(order, high_bytes.bytes);
        const __m512i lows = _mm512_permutexvar_epi64(order, low_bytes.bytes);
        return {_mm512_unpacklo_epi8(lows, highs), _mm512_unpackhi_epi8(lows, highs)};
    }

private:
    static __m512i rotated(__m512i words, unsigned bits) {
        return _mm512_or_si512(_mm512_slli_epi16(words, bits), _mm512_srli_epi16(words, 16 - bits));
    }
    static __m512i packed(__m512i low, __m512i high) {
        const __m512i order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
        return _mm512_permutexvar_epi64(order, _mm512_packus_epi16(low, high));
    }
};

inline __m512i every_second_word(int first) {
    const __m512i pairs = _mm512_setr_epi32(
        0x00020000, 0x00060004, 0x000a0008, 0x000e000c, 0x00120010, 0x00160014, 0x001a0018,
        0x001e001c, 0x00220020, 0x00260024, 0x002a0028, 0x002e002c, 0x00320030, 0x00360034,
        0x003a0038, 0x003e003c);
    return _mm512_add_epi16(pairs, _mm512_set1_epi16(short(first)));
}

template <bool FLOAT32>
inline Words64 load_upper(const uint8_t* from, uint8_t* low_halves) {
    if (!FLOAT32) return {_mm512_loadu_si512(from), _mm512_loadu_si512(from + 64)};
    __m512i upper[2];
    for (int half = 0; half < 2; ++half) {
        const __m512i first = _mm512_loadu_si512(from + half * 128);
        const __m512i second = _mm512_loadu_si512(from + half * 128 + 64);
        upper[half] = _mm512_permutex2var_epi16(first, every_second_word(1), second);
        if (low_halves)
            _mm512_storeu_si512(low_halves + half * 64,
                                _mm512_permutex2var_epi16(first, every_second_word(0), second));
    }
    return {upper[0], upper[1]};
}

template <bool FLOAT32>
inline void store_upper(Words64 words, const uint8_t* low_halves, uint8_t* to) {
    if (!FLOAT32) {
        _mm512_storeu_si512(to, words.low);
        _mm512_storeu_si512(to + 64, words.high);
        return;
    }
    const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
    for (int half = 0; half < 2; ++half) {
        const __m512i upper = _mm512_permutexvar_epi64(order, half ? words.high : words.low);
        const __m512i lower =
            _mm512_permutexvar_epi64(order, _mm512_loadu_si512(low_halves + half * 64));
        _mm512_storeu_si512(to + half * 128, _mm512_unpacklo_epi16(lower, upper));
        _mm512_storeu_si512(to + half * 128 + 64, _mm512_unpackhi_epi16(lower, upper));
    }
}
