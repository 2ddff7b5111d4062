/* Rounding between fp32 and shorter binary formats in integer arithmetic on the fp32 pattern.
 *
 * A code is the format's own bit pattern without the sign: exponent field, then mantissa field. */
#ifndef AP_ROUND_H
#define AP_ROUND_H

#include "kernels.h"
#include "vec.h"

#define AP_MAGNITUDE 0x7FFFFFFFu
#define AP_SIGN 0x80000000u
#define AP_INF 0x7F800000u

typedef struct {
    int mantissa_bits;
    int min_exponent; /* fp32's exponent field of the smallest normal number */
    uint32_t max_code, inf_code, nan_code; /* without infinity inf_code is max_code */
} ap_format;

AP_INLINE ap_format ap_make_format(int exponent_bits, int mantissa_bits, int is_finite_only) {
    uint32_t top = ((1u << exponent_bits) - 1) << mantissa_bits, quiet = 1u << (mantissa_bits - 1);
    int min_exponent = 129 - (1 << (exponent_bits - 1));
    if (is_finite_only) {
        uint32_t last = top | ((1u << mantissa_bits) - 1);
        return (ap_format){mantissa_bits, min_exponent, last - 1, last - 1, last};
    }
    return (ap_format){mantissa_bits, min_exponent, top - 1, top, top | quiet};
}

AP_INLINE ap_format ap_format_of(int format) {
    switch (format) {
    case AP_BF16: return ap_make_format(8, 7, 0);
    case AP_FP16: return ap_make_format(5, 10, 0);
    case AP_E4M3: return ap_make_format(4, 3, 1);
    case AP_E5M2: return ap_make_format(5, 2, 0);
    default: return ap_make_format(8, 10, 0);
    }
}

/* the nearest multiple of 2**dropped, ties to even, in units of 2**dropped */
AP_INLINE vi ap_nearest(vi significand, vi dropped) {
    dropped = vi_min(dropped, vi_set(25)); /* from there on every 24-bit significand rounds to zero */
    vi half_below = (vi_set(1) << (dropped - 1)) - 1;
    return (significand + half_below + ((significand >> dropped) & 1)) >> dropped;
}

/* one of the two multiples around it, each as likely as it is near */
AP_INLINE vi ap_stochastic(vi significand, vi dropped, vu random) {
    vi left = vi_max(32 - dropped, vi_set(0)), right = vi_min(vi_max(dropped - 32, vi_set(0)), vi_set(31));
    vi fraction = vi_if_less(dropped, vi_set(33), (vi)((vu)significand << (vu)left), significand >> right);
    return vi_count_below(significand >> vi_min(dropped, vi_set(31)), random, (vu)fraction);
}

/* code of the magnitude of an fp32 pattern */
AP_INLINE vu ap_to_code(vu pattern, ap_format f, int saturate, const vu *random) {
    vi magnitude = (vi)(pattern & AP_MAGNITUDE), exponent = magnitude >> 23;
    vi significand = vi_if_less(vi_set(0), exponent, (magnitude & 0x7FFFFF) | 0x800000, magnitude);
    exponent = vi_max(exponent, vi_set(1));
    vi dropped = 23 - f.mantissa_bits + vi_max(f.min_exponent - exponent, vi_set(0));
    vi quotient = random ? ap_stochastic(significand, dropped, *random) : ap_nearest(significand, dropped);
    vi code = ((vi_max(exponent, vi_set(f.min_exponent)) - f.min_exponent) << f.mantissa_bits) + quotient;
    vi past_max = vi_set((int32_t)(saturate ? f.max_code : f.inf_code));
    code = vi_if_less(vi_set((int32_t)f.max_code), code, past_max, code);
    return (vu)vi_if_less(vi_set((int32_t)AP_INF), magnitude, vi_set((int32_t)f.nan_code), code);
}

/* fp32 pattern of the magnitude of a code */
AP_INLINE vu ap_from_code(vu code, ap_format f) {
    vu normal = (code << (23 - f.mantissa_bits)) + ((uint32_t)(f.min_exponent - 1) << 23);
    if (f.min_exponent > 1) {
        float quantum = ldexpf(1.0f, f.min_exponent - 127 - f.mantissa_bits);
        vf subnormal = __builtin_convertvector((vi)code, vf) * quantum;
        normal = (vu)vi_if_less((vi)code, vi_set(1 << f.mantissa_bits), (vi)subnormal, (vi)normal);
    }
    vi top = vi_if_less(vi_set((int32_t)f.inf_code), (vi)code, vi_set(0x7FC00000), vi_set((int32_t)AP_INF));
    return (vu)vi_if_less(vi_set((int32_t)f.max_code), (vi)code, top, (vi)normal);
}

/* the code of every lane with its sign in the bit above */
AP_INLINE vu ap_with_sign(vu code, vu pattern, int bits) { return code | ((pattern & AP_SIGN) >> (32 - bits)); }

/* bf16 patterns of the nearest values in the upper halves; the common case of ap_to_code in few operations */
AP_INLINE vu ap_nearest_bf16(vu pattern) {
#if defined(AP_AVX512)
    __m512i x = (__m512i)pattern;
    __mmask16 odd = _mm512_test_epi32_mask(x, _mm512_set1_epi32(0x10000));
    __mmask16 nan = _mm512_cmp_ps_mask((__m512)x, (__m512)x, _CMP_UNORD_Q);
    __m512i half = _mm512_mask_blend_epi32(odd, _mm512_set1_epi32(0x7FFF), _mm512_set1_epi32(0x8000));
    __m512 rounded = (__m512)_mm512_add_epi32(x, half);
    return (vu)_mm512_mask_add_ps(rounded, nan, (__m512)x, (__m512)x); /* a sum makes a NaN quiet */
#else
    vi quiet = (vi)(pattern | 0x400000), rounded = (vi)(pattern + 0x7FFF + ((pattern >> 16) & 1));
    return (vu)vi_if_less(vi_set((int32_t)AP_INF), (vi)(pattern & AP_MAGNITUDE), quiet, rounded);
#endif
}

/* bf16 patterns around the values, never infinite; what ap_to_code gives, saturating and with random words */
AP_INLINE vu ap_stochastic_bf16(vu pattern, vu random) {
    vi magnitude = (vi)(pattern & AP_MAGNITUDE);
    vi code = vi_count_less(magnitude >> 16, (vi)(random >> 16), magnitude & 0xFFFF);
    code = vi_min(code, vi_set(0x7F7F));
    code = vi_if_less(vi_set((int32_t)AP_INF), magnitude, vi_set(0x7FC0), code);
    return (vu)code | ((pattern & AP_SIGN) >> 16);
}

AP_INLINE vu ap_load_pattern(const void *x, int format, int64_t i) {
    switch (format) {
    case AP_BF16: return vu_load_upper16((const uint16_t *)x + i);
    case AP_FP16: {
#if defined(AP_AVX512)
        return (vu)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)((const uint16_t *)x + i)));
#elif defined(AP_AVX2)
        return (vu)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)((const uint16_t *)x + i)));
#else
        vu half = vu_load16((const uint16_t *)x + i);
        return ap_from_code(half & 0x7FFF, ap_format_of(AP_FP16)) | ((half & 0x8000) << 16);
#endif
    }
    case AP_E4M3:
    case AP_E5M2: {
        vu code = vu_load8((const uint8_t *)x + i);
        return ap_from_code(code & 0x7F, ap_format_of(format)) | ((code & 0x80) << 24);
    }
    case AP_INT8: {
        vi value = (vi)(vu_load8((const uint8_t *)x + i) << 24) >> 24;
        return (vu)__builtin_convertvector(value, vf);
    }
    default: return (vu)vf_load((const float *)x + i);
    }
}

#endif
