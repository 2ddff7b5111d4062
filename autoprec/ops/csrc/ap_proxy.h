/* The C ABI of the proxy trainings behind autoprec.envs: small models that train in chosen formats.
 *
 * Every member is 32 bits wide, so that a struct is the same array of numbers in every language. */
#ifndef AP_PROXY_H
#define AP_PROXY_H

#include <stdint.h>

#include "ap_ops.h"

enum { AP_PROXY_UNITS = 16, AP_PROXY_NODES = 48, AP_PROXY_EVENTS = 8, AP_PROXY_STEPS = 16, AP_PROXY_FORMATS = 8 };

/* Formats of a unit. Narrow ones with scaling divide by the amax of the tensor first. Gradients: fp8 and fp4 take e5m2,
 * integers take bf16. */
enum {
    AP_PROXY_FP32 = 0,
    AP_PROXY_BF16 = 1,
    AP_PROXY_FP16 = 2,
    AP_PROXY_FP8_UNSCALED = 3,
    AP_PROXY_FP8 = 4,
    AP_PROXY_INT8 = 5,
    AP_PROXY_FP4 = 6,
    AP_PROXY_INT4 = 7
};

/* What a node computes from node a (and b). Node 0 is the input. Widths are multiples of 16. */
enum {
    AP_NODE_INPUT = 0,
    AP_NODE_LINEAR = 1,    /* unit; extra: 1 for ReLU, 2 for tanh on top */
    AP_NODE_PATCHES = 2,   /* 3 x 3 patches of a square image, padded by zeros; extra: stride */
    AP_NODE_MEAN = 3,      /* over positions */
    AP_NODE_NORM = 4,      /* layer norm without weights */
    AP_NODE_ATTENTION = 5, /* of queries, keys and values side by side; extra: heads */
    AP_NODE_ADD = 6,       /* a + b */
    AP_NODE_RECURRENT = 7  /* h' = tanh(a + h W), unit; gives the last h */
};

enum { AP_PROXY_SGD = 0, AP_PROXY_ADAM = 1, AP_PROXY_ADAMW = 2 };
enum { AP_EVENT_ACTIVATION = 1, AP_EVENT_GRADIENT = 2, AP_EVENT_SPIKE = 3 };
enum { AP_TENSOR_ACTIVATION = 0, AP_TENSOR_WEIGHT = 1, AP_TENSOR_GRADIENT = 2 };

typedef struct {
    int32_t kind, a, b, unit, positions, width, extra;
} ap_proxy_node;

/* From step `start` on, for `length` steps. factor: bits of range, or of a spike the factor of a quarter of the rows. */
typedef struct {
    int32_t kind, unit, start, length;
    float factor;
} ap_proxy_event;

typedef struct {
    uint32_t seed_low, seed_high;
    int32_t node_count, unit_count, event_count, classes, max_batch, evaluation_samples, teacher_width, optimizer;
    float label_noise, outlier_share, outlier_factor, feature_spread, loss_factor;
    float beta1, beta2, eps, weight_decay; /* beta1: momentum of SGD */
    ap_proxy_node nodes[AP_PROXY_NODES];
    /* A tensor of a unit is rounded as x * 2**bits, activations with a mean added. Ranges drift: bits start `drift_bits`
     * and `drift_noise` (uniform, each step) away and settle with time constant `drift_steps`. */
    float activation_bits[AP_PROXY_UNITS], weight_bits[AP_PROXY_UNITS], gradient_bits[AP_PROXY_UNITS];
    float activation_mean[AP_PROXY_UNITS];
    float drift_bits[AP_PROXY_UNITS], drift_noise[AP_PROXY_UNITS], drift_steps[AP_PROXY_UNITS];
    ap_proxy_event events[AP_PROXY_EVENTS];
} ap_proxy_spec;

/* What holds during one window of steps. */
typedef struct {
    int32_t steps, batch, is_evaluated;
    int32_t probed_formats;  /* bit f: measure the error of format f in the last step */
    int32_t growth_interval; /* clean steps until the loss scale doubles, 0 for never */
    float lr_begin, lr_end;
    float clip_multiplier;   /* of the running median norm, inf for off */
    float loss_scale;        /* 0 keeps what is there; it halves at every skipped step */
    int32_t formats[AP_PROXY_UNITS];
} ap_proxy_knobs;

/* What was seen in a window. NaN: not known. Gradients are unscaled; ranges are those of the rounded tensors. */
typedef struct {
    int32_t steps, skipped, clipped, growth_tracker, total_steps;
    int32_t first_unit, first_tensor; /* the first overflow of the window, -1 for none */
    float loss_scale, evaluation_loss, noise_scale, median_norm, clip_threshold;
    float losses[AP_PROXY_STEPS], norms[AP_PROXY_STEPS], loss_scales[AP_PROXY_STEPS];
    float activation_amax[AP_PROXY_UNITS][AP_PROXY_STEPS], gradient_norm[AP_PROXY_UNITS][AP_PROXY_STEPS];
    float gradient_amax[AP_PROXY_UNITS], weight_amax[AP_PROXY_UNITS];
    int32_t overflows[AP_PROXY_UNITS][3];
    /* of the last probe: error relative to the centred tensor, 2 where it overflows; share flushed to zero; share of
     * weights below the smallest normal number */
    float errors[AP_PROXY_UNITS][3][AP_PROXY_FORMATS];
    float underflow[AP_PROXY_UNITS][3][AP_PROXY_FORMATS];
    float subnormal[AP_PROXY_UNITS][AP_PROXY_FORMATS];
} ap_proxy_window;

enum { AP_PROXY_PARAMETERS = 0, AP_PROXY_GRADIENTS = 1, AP_PROXY_INPUT = 2, AP_PROXY_LABELS = 3, AP_PROXY_LOGITS = 4 };

/* NULL without memory, or if the description makes no sense. */
AP_EXPORT void *ap_proxy_create(const ap_proxy_spec *spec);
AP_EXPORT void ap_proxy_free(void *proxy);
/* Runs one window of each of n trainings. Windows are written in full. */
AP_EXPORT void ap_proxy_run(int64_t n, void *const *proxies, const ap_proxy_knobs *knobs, ap_proxy_window *windows,
                            int threads);
/* Copies numbers of a proxy, as they are after the last step, and returns how many there are; values may be NULL. */
AP_EXPORT int64_t ap_proxy_read(const void *proxy, int what, float *values);
AP_EXPORT void ap_proxy_write_parameters(void *proxy, const float *values);

#endif
