/* A vector of the native width and the few operations the kernels need. Included once per ISA.
 *
 * Arithmetic is written with the compiler's vector types, which gcc and clang lower to whatever the target has; only
 * what they have no operator for (fma, sqrt, minima, half conversions) uses intrinsics. Every operation acts on
 * single lanes, so results do not depend on the width. */
#ifndef AP_VEC_H
#define AP_VEC_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(AP_AVX2) || defined(AP_AVX512)
#include <immintrin.h>
#endif

#if defined(AP_AVX512)
#define AP_LANES 16
#elif defined(AP_AVX2)
#define AP_LANES 8
#else
#define AP_LANES 4
#endif

#define AP_INLINE static inline __attribute__((always_inline, unused))

typedef float vf __attribute__((vector_size(4 * AP_LANES)));
typedef int32_t vi __attribute__((vector_size(4 * AP_LANES)));
typedef uint32_t vu __attribute__((vector_size(4 * AP_LANES)));
typedef uint16_t vu16 __attribute__((vector_size(2 * AP_LANES)));
typedef uint8_t vu8 __attribute__((vector_size(AP_LANES)));

AP_INLINE vf vf_set(float x) { return (vf){0} + x; }
AP_INLINE vi vi_set(int32_t x) { return (vi){0} + x; }
AP_INLINE vu vu_set(uint32_t x) { return (vu){0} + x; }

AP_INLINE vf vf_load(const float *p) {
    vf x;
    memcpy(&x, p, sizeof x);
    return x;
}

AP_INLINE void vf_store(float *p, vf x) { memcpy(p, &x, sizeof x); }

/* lanes where mask is set from a, the others from b */
AP_INLINE vi vi_select(vi mask, vi a, vi b) {
#if defined(AP_AVX512)
    return (vi)_mm512_mask_mov_epi32((__m512i)b, _mm512_movepi32_mask((__m512i)mask), (__m512i)a);
#elif defined(AP_AVX2)
    return (vi)_mm256_blendv_epi8((__m256i)b, (__m256i)a, (__m256i)mask);
#else
    return (mask & a) | (~mask & b);
#endif
}

AP_INLINE vf vf_select(vi mask, vf a, vf b) { return (vf)vi_select(mask, (vi)a, (vi)b); }

AP_INLINE vi vi_max(vi a, vi b) {
#if defined(AP_AVX512)
    return (vi)_mm512_max_epi32((__m512i)a, (__m512i)b);
#elif defined(AP_AVX2)
    return (vi)_mm256_max_epi32((__m256i)a, (__m256i)b);
#else
    return vi_select(a > b, a, b);
#endif
}

AP_INLINE vi vi_min(vi a, vi b) {
#if defined(AP_AVX512)
    return (vi)_mm512_min_epi32((__m512i)a, (__m512i)b);
#elif defined(AP_AVX2)
    return (vi)_mm256_min_epi32((__m256i)a, (__m256i)b);
#else
    return vi_select(a < b, a, b);
#endif
}

/* clamped to [-limit, limit], NaN to 0 */
AP_INLINE vf vf_clamp(vf x, float limit) {
#if defined(AP_AVX512)
    __m512 number = _mm512_maskz_mov_ps(_mm512_cmp_ps_mask((__m512)x, (__m512)x, _CMP_ORD_Q), (__m512)x);
    return (vf)_mm512_max_ps(_mm512_min_ps(number, _mm512_set1_ps(limit)), _mm512_set1_ps(-limit));
#else
    x = vf_select(x == x, x, vf_set(0.0f));
    x = vf_select(x > limit, vf_set(limit), x);
    return vf_select(x < -limit, vf_set(-limit), x);
#endif
}

/* x in the lanes where a < b, y in the others; AVX-512 compares into masks, which gcc otherwise turns into vectors */
AP_INLINE vi vi_if_less(vi a, vi b, vi x, vi y) {
#if defined(AP_AVX512)
    return (vi)_mm512_mask_mov_epi32((__m512i)y, _mm512_cmplt_epi32_mask((__m512i)a, (__m512i)b), (__m512i)x);
#else
    return vi_select(a < b, x, y);
#endif
}

/* count + 1 in the lanes where a < b */
AP_INLINE vi vi_count_less(vi count, vi a, vi b) {
#if defined(AP_AVX512)
    return (vi)_mm512_mask_add_epi32((__m512i)count, _mm512_cmplt_epi32_mask((__m512i)a, (__m512i)b), (__m512i)count,
                                     _mm512_set1_epi32(1));
#else
    return count - (a < b);
#endif
}

AP_INLINE vf vf_fma(vf a, vf b, vf c) {
#if defined(AP_AVX512)
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(AP_AVX2)
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    for (int lane = 0; lane < AP_LANES; lane++) a[lane] = fmaf(a[lane], b[lane], c[lane]);
    return a;
#endif
}

/* a * b + c in the lanes where x < limit, c in the others */
AP_INLINE vf vf_fma_if_less(vf x, float limit, vf a, vf b, vf c) {
#if defined(AP_AVX512)
    __mmask16 less = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(limit), _CMP_LT_OQ);
    return (vf)_mm512_mask3_fmadd_ps((__m512)a, (__m512)b, (__m512)c, less);
#else
    return vf_select(x < limit, vf_fma(a, b, c), c);
#endif
}

AP_INLINE vf vf_sqrt(vf x) {
#if defined(AP_AVX512)
    return (vf)_mm512_sqrt_ps((__m512)x);
#elif defined(AP_AVX2)
    return (vf)_mm256_sqrt_ps((__m256)x);
#else
    for (int lane = 0; lane < AP_LANES; lane++) x[lane] = sqrtf(x[lane]);
    return x;
#endif
}

/* the same for unsigned numbers */
AP_INLINE vi vi_count_below(vi count, vu a, vu b) {
#if defined(AP_AVX512)
    return (vi)_mm512_mask_add_epi32((__m512i)count, _mm512_cmplt_epu32_mask((__m512i)a, (__m512i)b), (__m512i)count,
                                     _mm512_set1_epi32(1));
#else
    return count - (vi)(a < b);
#endif
}

/* Narrow loads and stores. gcc takes the vectors apart where it is left to convert them itself. */
AP_INLINE vu vu_load8(const void *p) {
#if defined(AP_AVX512)
    return (vu)_mm512_cvtepu8_epi32(_mm_loadu_si128(p));
#elif defined(AP_AVX2)
    return (vu)_mm256_cvtepu8_epi32(_mm_loadu_si64(p));
#else
    vu8 x;
    memcpy(&x, p, sizeof x);
    return __builtin_convertvector(x, vu);
#endif
}

AP_INLINE vu vu_load16(const void *p) {
#if defined(AP_AVX512)
    return (vu)_mm512_cvtepu16_epi32(_mm256_loadu_si256(p));
#elif defined(AP_AVX2)
    return (vu)_mm256_cvtepu16_epi32(_mm_loadu_si128(p));
#else
    vu16 x;
    memcpy(&x, p, sizeof x);
    return __builtin_convertvector(x, vu);
#endif
}

/* 16 bits into the upper half of each lane, zeros below */
AP_INLINE vu vu_load_upper16(const void *p) {
#if defined(AP_AVX512)
    /* from 32 on: zeros of the second operand */
    const __m512i places = _mm512_set_epi16(15, 32, 14, 32, 13, 32, 12, 32, 11, 32, 10, 32, 9, 32, 8, 32, 7, 32, 6, 32,
                                            5, 32, 4, 32, 3, 32, 2, 32, 1, 32, 0, 32);
    __m512i x = _mm512_castsi256_si512(_mm256_loadu_si256(p));
    return (vu)_mm512_permutex2var_epi16(x, places, _mm512_setzero_si512());
#else
    return vu_load16(p) << 16;
#endif
}

/* the low 16 bits of each lane */
AP_INLINE void vu_store16(void *p, vu x) {
#if defined(AP_AVX512)
    _mm256_storeu_si256(p, _mm512_cvtepi32_epi16((__m512i)x));
#elif defined(AP_AVX2)
    __m256i low = (__m256i)(x & 0xFFFF), pairs = _mm256_packus_epi32(low, low);
    _mm_storeu_si128(p, _mm256_castsi256_si128(_mm256_permute4x64_epi64(pairs, 0x08)));
#else
    vu16 narrow = __builtin_convertvector(x, vu16);
    memcpy(p, &narrow, sizeof narrow);
#endif
}

#if defined(AP_AVX512)
AP_INLINE __m256i vu_upper16(vu x) {
    const __m512i odd = _mm512_set_epi16(31, 31, 31, 31, 31, 31, 31, 31, 31, 31, 31, 31, 31, 31, 31, 31, 31, 29, 27, 25,
                                         23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
    return _mm512_castsi512_si256(_mm512_permutexvar_epi16(odd, (__m512i)x));
}
#endif

/* the upper 16 bits of each lane */
AP_INLINE void vu_store_upper16(void *p, vu x) {
#if defined(AP_AVX512)
    _mm256_storeu_si256(p, vu_upper16(x));
#else
    vu_store16(p, x >> 16);
#endif
}

/* the same past the caches, to an aligned address; ap_fence has to follow before other threads read */
AP_INLINE void vu_stream_upper16(void *p, vu x) {
#if defined(AP_AVX512)
    _mm256_stream_si256(p, vu_upper16(x));
#else
    vu_store_upper16(p, x);
#endif
}

AP_INLINE void ap_fence(void) {
#if defined(AP_AVX512)
    _mm_sfence();
#endif
}

/* the low 8 bits of each lane */
AP_INLINE void vu_store8(void *p, vu x) {
#if defined(AP_AVX512)
    _mm_storeu_si128(p, _mm512_cvtepi32_epi8((__m512i)x));
#elif defined(AP_AVX2)
    __m256i low = (__m256i)(x & 0xFF), pairs = _mm256_permute4x64_epi64(_mm256_packus_epi32(low, low), 0x08);
    __m128i halves = _mm256_castsi256_si128(pairs);
    _mm_storeu_si64(p, _mm_packus_epi16(halves, halves));
#else
    vu8 narrow = __builtin_convertvector(x, vu8);
    memcpy(p, &narrow, sizeof narrow);
#endif
}

#endif
