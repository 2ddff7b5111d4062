/* One proxy training as the kernels see it. */
#ifndef AP_PROXY_STATE_H
#define AP_PROXY_STATE_H

#include "ap_proxy.h"
#include "kernels.h"

/* Norms that the running median is taken of. */
#define AP_PROXY_MEDIAN 33

typedef struct {
    int64_t in, out, weight, bias; /* the latter two: places in the parameters */
    int64_t rows;                  /* of the input, per sample */
    float *rounded_weight, *transposed, *rounded_input;
    const float *used_weight, *used_input;
    float activation_scale, weight_scale, gradient_scale, mean; /* in this step */
} ap_proxy_unit;

typedef struct {
    int64_t size; /* per sample */
    float *value, *grad, *saved;
    int has_grad, consumers;
} ap_proxy_place;

typedef struct {
    ap_proxy_spec spec;
    int64_t input_size, parameter_count, memory_step;
    ap_proxy_unit units[AP_PROXY_UNITS];
    ap_proxy_place places[AP_PROXY_NODES];
    float *parameters, *grads, *previous_grads, *exp_avg, *exp_avg_sq;
    float *teacher_in, *teacher_out, *teacher_mean, *feature_scale;
    float *evaluation_input, *scratch, *rounded_grad;
    int32_t *evaluation_labels, *labels;
    uint32_t *words;
    float norms[AP_PROXY_MEDIAN];
    int32_t norm_count, step, applied, growth_tracker, batch;
    uint64_t next_sample;
    float loss_scale, previous_factor;
    double dot_sum, square_sum; /* over the window */
    int32_t dot_count, is_found, is_probing;
    const ap_proxy_knobs *knobs;
    ap_proxy_window *window;
    void *memory;
} ap_proxy;

static inline uint64_t ap_proxy_seed(const ap_proxy *p) {
    return (uint64_t)p->spec.seed_high << 32 | p->spec.seed_low;
}

/* streams of random words of a proxy */
enum { AP_STREAM_INPUT = 1, AP_STREAM_LABEL, AP_STREAM_WEIGHT, AP_STREAM_TEACHER, AP_STREAM_EVALUATION, AP_STREAM_DRIFT };

#endif
