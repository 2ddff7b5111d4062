/* A vector of the native width and the few operations the kernels need. Included once per ISA.
 *
 * Arithmetic is written with the compiler's vector types, which gcc and clang lower to whatever the target has; only
 * what they have no operator for (fma, sqrt, wide products, half conversions) uses intrinsics. Every operation acts on
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
AP_INLINE vi vi_select(vi mask, vi a, vi b) { return (mask & a) | (~mask & b); }
AP_INLINE vu vu_select(vi mask, vu a, vu b) { return ((vu)mask & a) | (~(vu)mask & b); }
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

/* both halves of the 64-bit products of each lane with m */
AP_INLINE void vu_mul_wide(vu x, uint32_t m, vu *high, vu *low) {
#if defined(AP_AVX512)
    __m512i a = (__m512i)x, factor = _mm512_set1_epi32((int)m);
    __m512i even = _mm512_mul_epu32(a, factor), odd = _mm512_mul_epu32(_mm512_srli_epi64(a, 32), factor);
    *low = (vu)_mm512_mask_blend_epi32(0xAAAA, even, _mm512_slli_epi64(odd, 32));
    *high = (vu)_mm512_mask_blend_epi32(0xAAAA, _mm512_srli_epi64(even, 32), odd);
#elif defined(AP_AVX2)
    __m256i a = (__m256i)x, factor = _mm256_set1_epi32((int)m);
    __m256i even = _mm256_mul_epu32(a, factor), odd = _mm256_mul_epu32(_mm256_srli_epi64(a, 32), factor);
    *low = (vu)_mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xAA);
    *high = (vu)_mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xAA);
#else
    for (int lane = 0; lane < AP_LANES; lane++) {
        uint64_t product = (uint64_t)x[lane] * m;
        (*high)[lane] = (uint32_t)(product >> 32);
        (*low)[lane] = (uint32_t)product;
    }
#endif
}

AP_INLINE vu vu_load8(const void *p) {
    vu8 x;
    memcpy(&x, p, sizeof x);
    return __builtin_convertvector(x, vu);
}

AP_INLINE vu vu_load16(const void *p) {
    vu16 x;
    memcpy(&x, p, sizeof x);
    return __builtin_convertvector(x, vu);
}

AP_INLINE void vu_store8(void *p, vu x) {
    vu8 narrow = __builtin_convertvector(x, vu8);
    memcpy(p, &narrow, sizeof narrow);
}

AP_INLINE void vu_store16(void *p, vu x) {
    vu16 narrow = __builtin_convertvector(x, vu16);
    memcpy(p, &narrow, sizeof narrow);
}

#endif
