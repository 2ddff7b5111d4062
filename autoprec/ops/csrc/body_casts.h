/* Casts between fp32 and every format, and rounding in place. Included once per ISA. */
#include "round.h"

#define AP_INT8_MAX 127.0f

/* int8 as 32-bit integers; NaN becomes 0 */
AP_INLINE vi to_int8(vf x, const vu *random) {
    x = vf_clamp(x, AP_INT8_MAX);
    /* adding 1.5 * 2**23 leaves the nearest integer, ties to even, in the low bits */
    vi nearest = (vi)(x + 12582912.0f) - 0x4B400000;
    if (!random) return nearest;
    vf whole = __builtin_convertvector(nearest, vf);
    vi below = nearest + (vi)(whole > x);
    vf uniform = __builtin_convertvector((vi)(*random >> 8), vf) * 0x1p-24f;
    return below - (vi)(uniform < x - __builtin_convertvector(below, vf));
}

AP_INLINE void store_code(void *y, int format, int64_t i, vu code) {
    switch (ap_bytes(format)) {
    case 1: vu_store8((uint8_t *)y + i, code); break;
    case 2: vu_store16((uint16_t *)y + i, code); break;
    default: vf_store((float *)y + i, (vf)(code << 13));
    }
}

AP_INLINE void encode_lanes(vf x, int format, int saturate, const vu *random, void *y, int64_t i) {
    vu pattern = (vu)x;
    if (format == AP_INT8) {
        store_code(y, format, i, (vu)to_int8(x, random));
    } else if (format == AP_BF16 && !saturate && !random) {
        vu_store_upper16((uint16_t *)y + i, ap_nearest_bf16(pattern));
    } else if (format == AP_BF16 && saturate && random) {
        vu_store16((uint16_t *)y + i, ap_stochastic_bf16(pattern, *random));
#if defined(AP_AVX512)
    } else if (format == AP_FP16 && !saturate && !random) {
        __m256i half = _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT);
        _mm256_storeu_si256((__m256i *)((uint16_t *)y + i), half);
#elif defined(AP_AVX2)
    } else if (format == AP_FP16 && !saturate && !random) {
        _mm_storeu_si128((__m128i *)((uint16_t *)y + i), _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT));
#endif
    } else {
        int bits = format == AP_TF32 ? 19 : 8 * ap_bytes(format);
        vu code = ap_to_code(pattern, ap_format_of(format), saturate, random);
        store_code(y, format, i, ap_with_sign(code, pattern, bits));
    }
}

AP_INLINE void encode_as(const float *x, int64_t n, float factor, int format, int saturate, const uint32_t *random,
                         void *y) {
    int64_t i = 0;
    for (; i + AP_LANES <= n; i += AP_LANES) {
        vu words = random ? (vu)vf_load((const float *)(random + i)) : vu_set(0);
        encode_lanes(vf_load(x + i) * factor, format, saturate, random ? &words : 0, y, i);
    }
    if (i == n) return;
    float rest[AP_LANES] = {0}, codes[AP_LANES];
    vu words = vu_set(0);
    memcpy(rest, x + i, (size_t)(n - i) * 4);
    if (random) memcpy(&words, random + i, (size_t)(n - i) * 4);
    encode_lanes(vf_load(rest) * factor, format, saturate, random ? &words : 0, codes, 0);
    memcpy((char *)y + i * ap_bytes(format), codes, (size_t)(n - i) * (size_t)ap_bytes(format));
}

AP_INLINE void encode_format(const float *x, int64_t n, float factor, int format, int saturate, const uint32_t *random,
                             void *y) {
    if (random && saturate) {
        encode_as(x, n, factor, format, 1, random, y);
    } else if (random) {
        encode_as(x, n, factor, format, 0, random, y);
    } else if (saturate) {
        encode_as(x, n, factor, format, 1, 0, y);
    } else {
        encode_as(x, n, factor, format, 0, 0, y);
    }
}

static void encode(const float *x, int64_t n, float factor, int format, int saturate, const uint32_t *random, void *y) {
    switch (format) {
    case AP_BF16: encode_format(x, n, factor, AP_BF16, saturate, random, y); break;
    case AP_FP16: encode_format(x, n, factor, AP_FP16, saturate, random, y); break;
    case AP_E4M3: encode_format(x, n, factor, AP_E4M3, saturate, random, y); break;
    case AP_E5M2: encode_format(x, n, factor, AP_E5M2, saturate, random, y); break;
    case AP_INT8: encode_as(x, n, factor, AP_INT8, 0, random, y); break;
    default: encode_format(x, n, factor, AP_TF32, saturate, random, y);
    }
}

AP_INLINE void decode_as(const void *x, int format, int64_t n, float *y) {
    int64_t i = 0;
    for (; i + AP_LANES <= n; i += AP_LANES) vf_store(y + i, (vf)ap_load_pattern(x, format, i));
    if (i == n) return;
    float rest[AP_LANES] = {0};
    memcpy(rest, (const char *)x + i * ap_bytes(format), (size_t)(n - i) * (size_t)ap_bytes(format));
    vf_store(rest, (vf)ap_load_pattern(rest, format, 0));
    memcpy(y + i, rest, (size_t)(n - i) * 4);
}

static void decode(const void *x, int format, int64_t n, float *y) {
    switch (format) {
    case AP_BF16: decode_as(x, AP_BF16, n, y); break;
    case AP_FP16: decode_as(x, AP_FP16, n, y); break;
    case AP_E4M3: decode_as(x, AP_E4M3, n, y); break;
    case AP_E5M2: decode_as(x, AP_E5M2, n, y); break;
    case AP_INT8: decode_as(x, AP_INT8, n, y); break;
    default: decode_as(x, AP_FP32, n, y);
    }
}

AP_INLINE vf round_lanes(vf x, ap_format f) {
    vu pattern = (vu)x, code = ap_to_code(pattern, f, 0, 0);
    return (vf)(ap_from_code(code, f) | (pattern & AP_SIGN));
}

static void round_values(const float *x, int64_t n, int exponent_bits, int mantissa_bits, int is_finite_only,
                         float *y) {
    if (exponent_bits == 8 && mantissa_bits == 23) {
        memcpy(y, x, (size_t)n * 4);
        return;
    }
    ap_format f = ap_make_format(exponent_bits, mantissa_bits, is_finite_only);
    int64_t i = 0;
    for (; i + AP_LANES <= n; i += AP_LANES) vf_store(y + i, round_lanes(vf_load(x + i), f));
    if (i == n) return;
    float rest[AP_LANES] = {0};
    memcpy(rest, x + i, (size_t)(n - i) * 4);
    vf_store(rest, round_lanes(vf_load(rest), f));
    memcpy(y + i, rest, (size_t)(n - i) * 4);
}
