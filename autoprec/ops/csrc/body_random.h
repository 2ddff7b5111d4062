/* Philox 4x32-10 (Salmon et al., SC 2011). Included once per ISA.
 *
 * Of each group of 64 elements, element i gets word i / 16 of the block with counter 16 * group + i % 16. */

/* 64-bit lanes whose upper halves are left as they come: products read the lower ones only */
#define AP_WIDE (AP_LANES / 2)
typedef uint64_t vw __attribute__((vector_size(8 * AP_WIDE)));

AP_INLINE vw vw_product(vw x, uint32_t m) {
#if defined(AP_AVX512)
    return (vw)_mm512_mul_epu32((__m512i)x, _mm512_set1_epi64(m));
#elif defined(AP_AVX2)
    return (vw)_mm256_mul_epu32((__m256i)x, _mm256_set1_epi64x(m));
#else
    return (x & 0xFFFFFFFFu) * m;
#endif
}

/* the lower halves */
AP_INLINE void store_words(uint32_t *words, vw x) {
#if defined(AP_AVX512)
    _mm256_storeu_si256((__m256i *)words, _mm512_cvtepi64_epi32((__m512i)x));
#elif defined(AP_AVX2)
    __m256i lower = _mm256_permutevar8x32_epi32((__m256i)x, _mm256_setr_epi32(0, 2, 4, 6, 0, 2, 4, 6));
    _mm_storeu_si128((__m128i *)words, _mm256_castsi256_si128(lower));
#else
    for (int lane = 0; lane < AP_WIDE; lane++) words[lane] = (uint32_t)x[lane];
#endif
}

AP_INLINE void random_blocks(ap_stream stream, uint64_t counter, uint32_t *words) {
    uint32_t k0 = (uint32_t)stream.seed, k1 = (uint32_t)(stream.seed >> 32);
    vw x0 = (vw){0} + counter, x1 = x0 >> 32; /* counters of a group share their upper bits */
    vw x2 = (vw){0} + (uint32_t)stream.offset, x3 = (vw){0} + (stream.offset >> 32);
    static const uint64_t lanes[8] = {0, 1, 2, 3, 4, 5, 6, 7};
    vw lane;
    memcpy(&lane, lanes, sizeof lane);
    x0 += lane;
    for (int round = 0; round < 10; round++) {
        vw product0 = vw_product(x0, 0xD2511F53u), product2 = vw_product(x2, 0xCD9E8D57u);
        x0 = (product2 >> 32) ^ x1 ^ k0;
        x1 = product2;
        x2 = (product0 >> 32) ^ x3 ^ k1;
        x3 = product0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    store_words(words, x0);
    store_words(words + 16, x1);
    store_words(words + 32, x2);
    store_words(words + 48, x3);
}

AP_INLINE void random_group(ap_stream stream, uint64_t group, uint32_t *words) {
    for (int first = 0; first < 16; first += AP_WIDE)
        random_blocks(stream, 16 * group + (uint64_t)first, words + first);
}

static void random_words(ap_stream stream, int64_t n, uint32_t *words) {
    for (int64_t i = 0; i < n;) {
        uint64_t element = stream.element + (uint64_t)i;
        int64_t skipped = (int64_t)(element % AP_GROUP);
        int64_t count = ap_min(AP_GROUP - skipped, n - i);
        if (count == AP_GROUP) {
            random_group(stream, element / AP_GROUP, words + i);
        } else {
            uint32_t group[AP_GROUP];
            random_group(stream, element / AP_GROUP, group);
            memcpy(words + i, group + skipped, (size_t)count * 4);
        }
        i += count;
    }
}
