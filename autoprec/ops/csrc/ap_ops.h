/* The C ABI of autoprec.ops. Plain pointers and sizes: no torch, no Python, callable through ctypes.
 *
 * Every function is safe to call from several threads at once (on other data) and gives the same bits for the same
 * input whatever the number of threads and whichever ISA runs. Ranges must not overlap. Those that return int need
 * memory for intermediate results and return -1 if there is none, with nothing written. */
#ifndef AP_OPS_H
#define AP_OPS_H

#include <stdint.h>

#if defined(_WIN32)
#define AP_EXPORT __declspec(dllexport)
#else
#define AP_EXPORT __attribute__((visibility("default")))
#endif

/* changes whenever a signature or a struct does */
#define AP_ABI_VERSION 3

enum { AP_FP32 = 0, AP_BF16 = 1, AP_FP16 = 2, AP_E4M3 = 3, AP_E5M2 = 4, AP_INT8 = 5, AP_TF32 = 6 };

/* What a step writes besides the weight. Unused pointers are NULL. */
typedef struct {
    int64_t format;            /* AP_BF16, AP_FP16, AP_E4M3 or AP_INT8 */
    void *values;              /* shape of the weight */
    float *scale;              /* e4m3: [1]; int8: [rows] */
    int8_t *transposed_values; /* int8: [cols, rows] or NULL */
    float *transposed_scale;   /* int8: [cols] */
} ap_copy;

/* One parameter of a step. Everything is contiguous in the same order. */
typedef struct {
    float *param;
    float *exp_avg;   /* Adam: first moment; SGD: momentum buffer or NULL */
    void *exp_avg_sq; /* Adam only */
    float *step;      /* Adam only: counts applied steps */
    int64_t size, rows, cols; /* rows and cols matter for int8 copies only */
    int64_t moment_format;    /* of exp_avg_sq: AP_FP32, AP_BF16 or AP_FP16 */
    uint64_t element;         /* place of the first element in the stream of random words */
    int64_t first_chunk;      /* for the use of the functions that take a list of these */
    ap_copy copy;             /* format AP_FP32 for none */
} ap_parameter;

typedef struct {
    double lr, beta1, beta2, eps, weight_decay, grad_factor;
    int64_t decoupled; /* AdamW */
    uint64_t seed, offset; /* of the random bits for a 16-bit second moment */
} ap_adam_options;

typedef struct {
    double lr, momentum, dampening, weight_decay, grad_factor;
    int64_t nesterov, is_first;
} ap_sgd_options;

AP_EXPORT int ap_abi_version(void);

/* Picks the kernels by name ("scalar", "avx2", "avx512"), or the best ones for NULL; 0 if the machine has them. */
AP_EXPORT int ap_select(const char *isa);
AP_EXPORT const char *ap_selected(void);

/* Columns of `table`, each [n]: amax, norm, nonfinite count, underflow fraction below tiny, the same below tiny_lower.
 * Then one more float: the norm over all tensors, inf if an entry is not finite. */
AP_EXPORT int ap_grad_stats(int64_t n, const void *const *grads, const int64_t *sizes, const int8_t *formats,
                             const float *tiny, const float *tiny_lower, float *table, int threads);

AP_EXPORT void ap_adam(int64_t n, ap_parameter *parameters, const void *const *grads, const int8_t *grad_formats,
                       const ap_adam_options *options, int threads);
AP_EXPORT void ap_sgd(int64_t n, ap_parameter *parameters, const void *const *grads, const int8_t *grad_formats,
                      const ap_sgd_options *options, int threads);

/* Rounds a matrix to a format. With scales != NULL each block of block_rows x block_cols gets its own scale, format
 * maximum / amax, in row-major order of the blocks; else everything is multiplied by factor. amaxes has the shape of
 * scales, or one entry without them; it may be NULL. random: seed and offset or NULL. */
AP_EXPORT void ap_cast(const void *x, int x_format, int64_t rows, int64_t cols, int64_t block_rows, int64_t block_cols,
                       int format, int saturate, float factor, const uint64_t *random, void *y, float *scales,
                       float *amaxes, int threads);
/* Back to fp32: y = x / scale. */
AP_EXPORT void ap_restore(const void *x, int x_format, int64_t rows, int64_t cols, int64_t block_rows,
                          int64_t block_cols, float *scales, float *y, int threads);
/* Writes what a step would write for a weight that it did not change. */
AP_EXPORT void ap_refresh(int64_t n, ap_parameter *parameters, int threads);
/* The first parameter whose copy is not what its weight gives in one of `samples` entries, -1 if there is none. Scaled
 * copies are compared under the scale that they have. */
AP_EXPORT int64_t ap_stale(int64_t n, const ap_parameter *parameters, int64_t samples, uint64_t seed);
AP_EXPORT void ap_fake_cast(const float *x, int64_t rows, int64_t cols, const int64_t *exponent_bits,
                            const int64_t *mantissa_bits, const uint8_t *is_finite_only, float *y, int threads);
/* y = bf16(sums / x_scale / w_scale + bias); sums [rows, cols], bias may be NULL. */
AP_EXPORT int ap_dequantize(const int32_t *sums, int64_t rows, int64_t cols, const float *x_scale,
                             const float *w_scale, const float *bias, void *y, int threads);
AP_EXPORT void ap_random(uint64_t seed, uint64_t offset, uint64_t first, int64_t n, uint32_t *words);

#endif
