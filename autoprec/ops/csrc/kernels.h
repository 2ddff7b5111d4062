/* What each ISA provides: single-threaded kernels on short contiguous ranges. Lists and threads are elsewhere. */
#ifndef AP_KERNELS_H
#define AP_KERNELS_H

#include <stdint.h>

#include "ap_ops.h"

/* Elements that are worked on while they stay in the first-level cache; a multiple of AP_GROUP. */
#define AP_TILE 512
/* Philox words come in groups of this many elements. */
#define AP_GROUP 64

static inline int ap_bytes(int64_t format) {
    return format == AP_FP32 || format == AP_TF32 ? 4 : format == AP_BF16 || format == AP_FP16 ? 2 : 1;
}

static inline int64_t ap_min(int64_t a, int64_t b) { return a < b ? a : b; }

/* Sums of one range; those of several ranges are added in the order of the ranges. */
typedef struct {
    double square_sum; /* of the finite entries */
    float amax;        /* of the finite entries */
    int64_t nonfinite, zero, below[2];
} ap_sums;

/* Rows and columns that are quantised and transposed together. */
#define AP_STRIP 64

/* Where a tile starts in the stream of random words. */
typedef struct {
    uint64_t seed, offset, element;
} ap_stream;

typedef struct {
    float lr, weight_decay, step_size, keep; /* keep: 1 - lr * weight_decay, for the decoupled form */
    float one_minus_beta1, beta2, one_minus_beta2, bias_correction2_sqrt, inv_bias_correction2_sqrt, eps;
    float grad_factor;
    int decoupled;
} ap_adam_scalars;

typedef struct {
    float lr, weight_decay, momentum, one_minus_dampening, grad_factor;
    int nesterov, is_first;
} ap_sgd_scalars;

/* What a step reads and writes once, in any of three dtypes; state and weights are in fp32. */
typedef struct {
    const void *grad;
    int grad_format;
    void *copy;      /* of the weights, NULL for none */
    int copy_format; /* AP_BF16 or AP_FP16 */
    int is_streamed; /* the copy goes past the caches where that is possible; it is aligned to 32 bytes */
} ap_ends;

typedef struct {
    const char *name;
    /* adds to sums; tiny[0] <= 0 leaves out the counts of zeros and small entries */
    void (*stats)(const void *x, int format, int64_t n, const float tiny[2], ap_sums *sums);
    /* largest magnitude, NaN if an entry is NaN */
    float (*amax)(const void *x, int format, int64_t n);
    void (*decode)(const void *x, int format, int64_t n, float *y);
    /* from fp32, times factor; random: a word for each element or NULL for the nearest value */
    void (*encode)(const float *x, int64_t n, float factor, int format, int saturate, const uint32_t *random, void *y);
    /* rounds to any format and stays in fp32 */
    void (*round)(const float *x, int64_t n, int exponent_bits, int mantissa_bits, int is_finite_only, float *y);
    void (*random)(ap_stream stream, int64_t n, uint32_t *words);
    void (*adam)(float *param, float *exp_avg, float *exp_avg_sq, int64_t n, const ap_ends *ends,
                 const ap_adam_scalars *scalars);
    /* buffer may be NULL */
    void (*sgd)(float *param, float *buffer, int64_t n, const ap_ends *ends, const ap_sgd_scalars *scalars);
    /* largest magnitude of each of up to AP_STRIP columns */
    void (*column_amax)(const float *x, int64_t rows, int64_t stride, int64_t cols, float *amaxes);
    /* int8 values of up to AP_STRIP rows and columns, transposed: those of a column, times its scale, side by side */
    void (*transpose_tile)(const float *x, int64_t rows, int64_t stride, int64_t cols, const float *scales,
                           int8_t *values, int64_t values_stride);
    void (*dequantize)(const int32_t *sums, int64_t n, float inv_scale, const float *inv_scales, const float *bias,
                       uint16_t *y);
    /* of a proxy training: draws data and first weights; runs a window (proxy.h) */
    void (*proxy_begin)(void *proxy);
    void (*proxy_window)(void *proxy, const void *knobs, void *window);
} ap_kernels;

extern const ap_kernels ap_kernels_scalar, ap_kernels_avx2, ap_kernels_avx512;

/* the kernels in use */
const ap_kernels *ap_active(void);

/* Threads worth starting for this many elements. */
int ap_team(int64_t elements, int threads);

/* Calls body(context, begin, end) on equal shares of [0, items), on up to `threads` threads. */
void ap_parallel(int64_t items, int threads, void (*body)(void *context, int64_t begin, int64_t end), void *context);

#endif
