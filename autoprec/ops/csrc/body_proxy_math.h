/* Products, rounding and elementary functions of the proxy trainings. Included once per ISA.
 *
 * Sums go to 16 lanes in one order whatever the width of a vector, so that all ISAs give the same bits. Lengths are
 * multiples of 16. */
#include <float.h>

#define AP_BLOCK16 (16 / AP_LANES)
#define AP_ERROR_SAMPLE 1024
#define AP_OVERFLOW_ERROR 2.0f

/* ---- sums ---- */

typedef struct {
    vf lanes[AP_BLOCK16];
} sum16;

AP_INLINE float total16(const sum16 *s) {
    float lanes[16], sum = 0.0f;
    memcpy(lanes, s->lanes, sizeof lanes);
    for (int i = 0; i < 8; i++) sum += lanes[i] + lanes[i + 8];
    return sum;
}

static float dot16(const float *a, const float *b, int64_t n) {
    sum16 s = {0};
    for (int64_t i = 0; i < n; i += 16)
        for (int j = 0; j < AP_BLOCK16; j++)
            s.lanes[j] = vf_fma(vf_load(a + i + j * AP_LANES), vf_load(b + i + j * AP_LANES), s.lanes[j]);
    return total16(&s);
}

static float mean16(const float *x, int64_t n) {
    sum16 s = {0};
    for (int64_t i = 0; i < n; i += 16)
        for (int j = 0; j < AP_BLOCK16; j++) s.lanes[j] += vf_load(x + i + j * AP_LANES);
    return total16(&s) / (float)n;
}

/* The same sums of columns instead of rows, one in each lane: where rows are short, their sums take longer than their
 * numbers. x: the first of n rows, `row` numbers apart. */
AP_INLINE vf total_down(const float *x, int64_t n, int64_t row) {
    vf sum = vf_set(0.0f);
    for (int lane = 0; lane < 8; lane++) {
        vf low = vf_set(0.0f), high = low;
        for (int64_t i = lane; i < n; i += 16) {
            low += vf_load(x + i * row);
            high += vf_load(x + (i + 8) * row);
        }
        sum += low + high;
    }
    return sum;
}

AP_INLINE vf dot_down(const float *a, const float *b, int64_t n, int64_t row) {
    vf sum = vf_set(0.0f);
    for (int lane = 0; lane < 8; lane++) {
        vf low = vf_set(0.0f), high = low;
        for (int64_t i = lane; i < n; i += 16) {
            low = vf_fma(vf_load(a + i * row), vf_load(b + i * row), low);
            high = vf_fma(vf_load(a + (i + 8) * row), vf_load(b + (i + 8) * row), high);
        }
        sum += low + high;
    }
    return sum;
}

/* largest of the first n numbers of each column, as largest_of finds it */
AP_INLINE vf largest_down(const float *x, int64_t n, int64_t row) {
    vf largest = vf_load(x);
    for (int64_t i = 1; i < n; i++) {
        vf other = vf_load(x + i * row);
        largest = vf_select(other > largest, other, largest);
    }
    return largest;
}

AP_INLINE void copy_vectors(float *to, const float *from, int64_t n) {
    for (int64_t i = 0; i < n; i += AP_LANES) vf_store(to + i, vf_load(from + i));
}

/* ---- products ---- */

typedef struct {
    int64_t m, n, k;
    const float *a;
    int64_t a_row, a_col; /* strides */
    const float *b;
    int64_t b_row;
    float *c;
    int64_t c_row;
    const float *bias; /* [n] or NULL */
    int accumulates, has_relu;
} product;

AP_INLINE void product_block(const product *p, int64_t i, int64_t j, int rows, int vectors) {
    vf sums[8][4];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++) {
            const float *c = p->c + (i + r) * p->c_row + j + v * AP_LANES;
            sums[r][v] = p->accumulates ? vf_load(c) : p->bias ? vf_load(p->bias + j + v * AP_LANES) : vf_set(0.0f);
        }
    const float *a = p->a + i * p->a_row, *b = p->b + j;
    for (int64_t k = 0; k < p->k; k++, a += p->a_col, b += p->b_row) {
        vf columns[4];
        for (int v = 0; v < vectors; v++) columns[v] = vf_load(b + v * AP_LANES);
        for (int r = 0; r < rows; r++) {
            vf row = vf_set(a[r * p->a_row]);
            for (int v = 0; v < vectors; v++) sums[r][v] = vf_fma(row, columns[v], sums[r][v]);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++) {
            vf x = sums[r][v];
            if (p->has_relu) x = vf_select(x < 0.0f, vf_set(0.0f), x);
            vf_store(p->c + (i + r) * p->c_row + j + v * AP_LANES, x);
        }
}

AP_INLINE void product_columns(const product *p, int64_t j, int rows, int vectors) {
    int64_t i = 0;
    for (; i + rows <= p->m; i += rows) product_block(p, i, j, rows, vectors);
    for (; i < p->m; i++) product_block(p, i, j, 1, vectors);
}

static void multiply(const product *p) {
    int64_t j = 0;
#if defined(AP_AVX512)
    for (; j + 4 * AP_LANES <= p->n; j += 4 * AP_LANES) product_columns(p, j, 4, 4);
    for (; j + 2 * AP_LANES <= p->n; j += 2 * AP_LANES) product_columns(p, j, 8, 2);
    for (; j < p->n; j += AP_LANES) product_columns(p, j, 8, 1);
#else
    for (; j < p->n; j += 2 * AP_LANES) product_columns(p, j, 4, 2);
#endif
}

/* y[j][i] = x[i][j] of 16 rows and columns, `x_row` and `y_row` numbers apart */
#if defined(AP_AVX512)
AP_INLINE void transpose16(const float *x, int64_t x_row, float *y, int64_t y_row) {
    __m512 r[16], t[16];
    for (int i = 0; i < 16; i++) r[i] = _mm512_loadu_ps(x + i * x_row);
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) { /* column c of four rows in lanes c % 4, c % 4 + 4, ... of vector i + c % 4 */
        r[i] = (__m512)_mm512_unpacklo_pd((__m512d)t[i], (__m512d)t[i + 2]);
        r[i + 1] = (__m512)_mm512_unpackhi_pd((__m512d)t[i], (__m512d)t[i + 2]);
        r[i + 2] = (__m512)_mm512_unpacklo_pd((__m512d)t[i + 1], (__m512d)t[i + 3]);
        r[i + 3] = (__m512)_mm512_unpackhi_pd((__m512d)t[i + 1], (__m512d)t[i + 3]);
    }
    for (int c = 0; c < 4; c++) {
        __m512 even0 = _mm512_shuffle_f32x4(r[c], r[c + 4], 0x88), odd0 = _mm512_shuffle_f32x4(r[c], r[c + 4], 0xDD);
        __m512 even1 = _mm512_shuffle_f32x4(r[c + 8], r[c + 12], 0x88);
        __m512 odd1 = _mm512_shuffle_f32x4(r[c + 8], r[c + 12], 0xDD);
        _mm512_storeu_ps(y + c * y_row, _mm512_shuffle_f32x4(even0, even1, 0x88));
        _mm512_storeu_ps(y + (c + 4) * y_row, _mm512_shuffle_f32x4(odd0, odd1, 0x88));
        _mm512_storeu_ps(y + (c + 8) * y_row, _mm512_shuffle_f32x4(even0, even1, 0xDD));
        _mm512_storeu_ps(y + (c + 12) * y_row, _mm512_shuffle_f32x4(odd0, odd1, 0xDD));
    }
}
#else
AP_INLINE void transpose16(const float *x, int64_t x_row, float *y, int64_t y_row) {
    for (int j = 0; j < 16; j++)
        for (int i = 0; i < 16; i++) y[j * y_row + i] = x[i * x_row + j];
}
#endif

/* the same of any whole number of such blocks */
static void transpose(const float *x, int64_t x_row, int64_t rows, int64_t cols, float *y, int64_t y_row) {
    for (int64_t j = 0; j < cols; j += 16)
        for (int64_t i = 0; i < rows; i += 16) transpose16(x + i * x_row + j, x_row, y + j * y_row + i, y_row);
}

/* ---- elementary functions ---- */

AP_INLINE vf vf_exp(vf x) {
    x = vf_select(x < -87.0f, vf_set(-87.0f), x);
    x = vf_select(x > 87.0f, vf_set(87.0f), x);
    vf shifted = vf_fma(x, vf_set(1.44269504f), vf_set(12582912.0f)), whole = shifted - 12582912.0f;
    vf r = vf_fma(whole, vf_set(-0.693359375f), x);
    r = vf_fma(whole, vf_set(2.12194440e-4f), r);
    vf y = vf_set(1.9875691500e-4f);
    y = vf_fma(y, r, vf_set(1.3981999507e-3f));
    y = vf_fma(y, r, vf_set(8.3334519073e-3f));
    y = vf_fma(y, r, vf_set(4.1665795894e-2f));
    y = vf_fma(y, r, vf_set(1.6666665459e-1f));
    y = vf_fma(y, r, vf_set(5.0000001201e-1f));
    y = vf_fma(y, r * r, r) + 1.0f;
    vi power = ((vi)shifted - 0x4B400000 + 127) << 23;
    return y * (vf)power;
}

AP_INLINE vf vf_tanh(vf x) { return 1.0f - 2.0f / (vf_exp(x + x) + 1.0f); }

/* ---- rounding ---- */

/* how a tensor is rounded: one of the csrc formats, or the narrower two that only proxies have */
enum { ROUND_NOT, ROUND_BF16, ROUND_FP16, ROUND_E4M3, ROUND_E5M2, ROUND_INT8, ROUND_E2M1, ROUND_INT4 };

typedef struct {
    int rounding, is_scaled;
    float largest, tiny;
} ap_proxy_rounding;

static ap_proxy_rounding rounding_of(int format, int is_gradient) {
    static const ap_proxy_rounding BF16 = {ROUND_BF16, 0, 0x1.FEp127f, 0x1p-126f};
    static const ap_proxy_rounding E5M2 = {ROUND_E5M2, 1, 57344.0f, 0x1p-14f};
    switch (format) {
    case AP_PROXY_BF16: return BF16;
    case AP_PROXY_FP16: return (ap_proxy_rounding){ROUND_FP16, 0, 65504.0f, 0x1p-14f};
    case AP_PROXY_FP8_UNSCALED:
        return is_gradient ? (ap_proxy_rounding){ROUND_E5M2, 0, 57344.0f, 0x1p-14f}
                           : (ap_proxy_rounding){ROUND_E4M3, 0, 448.0f, 0x1p-6f};
    case AP_PROXY_FP8: return is_gradient ? E5M2 : (ap_proxy_rounding){ROUND_E4M3, 1, 448.0f, 0x1p-6f};
    case AP_PROXY_INT8: return is_gradient ? BF16 : (ap_proxy_rounding){ROUND_INT8, 1, 127.0f, 1.0f};
    case AP_PROXY_FP4: return is_gradient ? E5M2 : (ap_proxy_rounding){ROUND_E2M1, 1, 6.0f, 1.0f};
    case AP_PROXY_INT4: return is_gradient ? BF16 : (ap_proxy_rounding){ROUND_INT4, 1, 7.0f, 1.0f};
    default: return (ap_proxy_rounding){ROUND_NOT, 0, FLT_MAX, FLT_MIN};
    }
}

/* The nearest value of a format, ties to even, as round.h finds it, in the few operations that it takes where the value
 * stays in fp32: adding a power of two so large that its last bit is the format's. Saturating: what overflows is counted,
 * and tensors behind it keep the range that they have; so is a NaN. */
AP_INLINE vf round_code(vf x, ap_format f, float largest) {
    vi magnitude = vi_min((vi)((vu)x & AP_MAGNITUDE), vi_set(as_pattern(largest)));
    vi exponent = vi_max(magnitude & (int32_t)AP_INF, vi_set(f.min_exponent << 23));
    vf coarse = (vf)(exponent + ((23 - f.mantissa_bits) << 23));
    return (vf)((vu)(((vf)magnitude + coarse) - coarse) | ((vu)x & AP_SIGN));
}

AP_INLINE vf round_whole(vf x, float limit) { return (vf_clamp(x, limit) + 12582912.0f) - 12582912.0f; }

AP_INLINE vf round_vector(vf x, int rounding) {
    switch (rounding) {
    case ROUND_BF16: return (vf)(ap_nearest_bf16((vu)x) & 0xFFFF0000u);
    case ROUND_FP16:
#if defined(AP_AVX512)
        return (vf)_mm512_cvtph_ps(_mm512_cvtps_ph((__m512)vf_clamp(x, 65504.0f), _MM_FROUND_TO_NEAREST_INT));
#elif defined(AP_AVX2)
        return (vf)_mm256_cvtph_ps(_mm256_cvtps_ph((__m256)vf_clamp(x, 65504.0f), _MM_FROUND_TO_NEAREST_INT));
#else
        return round_code(x, ap_format_of(AP_FP16), 65504.0f);
#endif
    case ROUND_E4M3: return round_code(x, ap_format_of(AP_E4M3), 448.0f);
    case ROUND_E5M2: return round_code(x, ap_format_of(AP_E5M2), 57344.0f);
    case ROUND_INT8: return round_whole(x, AP_INT8_MAX);
    case ROUND_E2M1: return round_code(x, (ap_format){1, 127, 7, 7, 7}, 6.0f);
    case ROUND_INT4: return round_whole(x, 7.0f);
    default: return x;
    }
}

/* largest magnitude of x * scale + mean; a NaN is larger than everything */
static float range_of(const float *x, int64_t n, float scale, float mean) {
    vi largest = vi_set(0);
    for (int64_t i = 0; i < n; i += AP_LANES)
        largest = vi_max(largest, (vi)((vu)vf_fma(vf_load(x + i), vf_set(scale), vf_set(mean)) & AP_MAGNITUDE));
    return as_float(lanes_max(largest));
}

AP_INLINE float round_tensor_as(const float *x, int64_t n, float scale, float mean, int rounding, float factor, float *y) {
    float inv_factor = 1.0f / factor, inv_scale = 1.0f / scale;
    int is_scaled = factor != 1.0f;
    vi largest = vi_set(0);
    for (int64_t i = 0; i < n; i += AP_LANES) {
        vf stored = vf_fma(vf_load(x + i), vf_set(scale), vf_set(mean));
        largest = vi_max(largest, (vi)((vu)stored & AP_MAGNITUDE));
        vf rounded = is_scaled ? round_vector(stored * factor, rounding) * inv_factor : round_vector(stored, rounding);
        vf_store(y + i, (rounded - mean) * inv_scale);
    }
    return as_float(lanes_max(largest));
}

#define AP_WITH_ROUNDING(CALL)                                                                                         \
    switch (rounding.rounding) {                                                                                       \
    case ROUND_BF16: return CALL(ROUND_BF16);                                                                          \
    case ROUND_FP16: return CALL(ROUND_FP16);                                                                          \
    case ROUND_E4M3: return CALL(ROUND_E4M3);                                                                          \
    case ROUND_E5M2: return CALL(ROUND_E5M2);                                                                          \
    case ROUND_INT8: return CALL(ROUND_INT8);                                                                          \
    case ROUND_E2M1: return CALL(ROUND_E2M1);                                                                          \
    default: return CALL(ROUND_INT4);                                                                                  \
    }

AP_INLINE float factor_of(ap_proxy_rounding rounding, float amax) {
    return rounding.is_scaled ? rounding.largest / (amax > 1e-12f && amax < INFINITY ? amax : 1e-12f) : 1.0f;
}

/* rounds x as it is stored, x * scale + mean, and maps back; returns the amax of what is stored */
static float round_tensor(const float *x, int64_t n, float scale, float mean, ap_proxy_rounding rounding, float *y) {
    float factor = rounding.is_scaled ? factor_of(rounding, range_of(x, n, scale, mean)) : 1.0f;
#define AP_ROUND(CODE) round_tensor_as(x, n, scale, mean, CODE, factor, y)
    AP_WITH_ROUNDING(AP_ROUND)
#undef AP_ROUND
}

/* ---- what another format would do ---- */

typedef struct {
    float square, flushed, subnormal, nonzero;
} rounding_error;

AP_INLINE rounding_error measure_as(const float *x, int64_t n, float tiny, int rounding, float factor) {
    sum16 square = {0};
    vi flushed = vi_set(0), subnormal = vi_set(0), zero = vi_set(0);
    for (int64_t i = 0; i < n; i += 16)
        for (int j = 0; j < AP_BLOCK16; j++) {
            vf stored = vf_load(x + i + j * AP_LANES), scaled = stored * factor;
            vf rounded = round_vector(scaled, rounding), error = rounded * (1.0f / factor) - stored;
            square.lanes[j] = vf_fma(error, error, square.lanes[j]);
            vf size = (vf)((vu)scaled & AP_MAGNITUDE);
            zero -= stored == 0.0f;
            flushed -= rounded == 0.0f;
            subnormal -= size < tiny;
        }
    float zeros = (float)lanes_sum(zero);
    return (rounding_error){total16(&square), (float)lanes_sum(flushed) - zeros, (float)lanes_sum(subnormal) - zeros,
                            (float)n - zeros};
}

static rounding_error measure(const float *x, int64_t n, ap_proxy_rounding rounding, float factor) {
#define AP_MEASURE(CODE) measure_as(x, n, rounding.tiny, CODE, factor)
    AP_WITH_ROUNDING(AP_MEASURE)
#undef AP_MEASURE
}
