/* One step of an optimizer on a range of fp32 numbers, in torch's order of operations, with a fused
 * multiply-add where its own fused kernels have one, so that both give the same bits. Included once per ISA.
 *
 * Gradients are widened and copies are rounded in the same loop: roots and divisions leave time for both. */

/* Elements that are asked for in advance. The processor's own prefetching stops at every page of every tensor. */
#define AP_AHEAD 128

/* x / divisor, correctly rounded like the division, which is several times slower: the quotient by the reciprocal is
 * corrected by its exact remainder (Markstein, 1990). Infinity has no remainder. */
AP_INLINE vf divide_by(vf x, float divisor, float reciprocal) {
    vf quotient = x * reciprocal, remainder = vf_fma(quotient, vf_set(-divisor), x);
    return vf_fma_if_less(x, INFINITY, remainder, vf_set(reciprocal), quotient);
}

AP_INLINE void prefetch(const float *x, int64_t i) { __builtin_prefetch(x + i + AP_AHEAD, 1); }

AP_INLINE vf load_grad(const ap_ends *ends, int format, int64_t i) {
    return (vf)ap_load_pattern(ends->grad, format, i);
}

AP_INLINE void store_copy(const ap_ends *ends, int format, int64_t i, vf x) {
    if (format == AP_BF16 && ends->is_streamed) {
        vu_stream_upper16((uint16_t *)ends->copy + i, ap_nearest_bf16((vu)x));
    } else if (format != AP_FP32) {
        encode_lanes(x, format, 0, 0, ends->copy, i);
    }
}

AP_INLINE vf adam_lanes(float *param, vf grad, float *exp_avg, float *exp_avg_sq, int is_coupled,
                        const ap_adam_scalars *s) {
    vf p = vf_load(param), m = vf_load(exp_avg), v = vf_load(exp_avg_sq);
    grad *= s->grad_factor;
    if (is_coupled) {
        grad = vf_fma(p, vf_set(s->weight_decay), grad);
    } else {
        p *= s->keep;
    }
    m = vf_fma(vf_set(s->one_minus_beta1), grad - m, m);
    v = vf_fma(s->one_minus_beta2 * grad, grad, v * s->beta2);
    vf denominator = divide_by(vf_sqrt(v), s->bias_correction2_sqrt, s->inv_bias_correction2_sqrt) + s->eps;
    p += -s->step_size * m / denominator;
    vf_store(param, p);
    vf_store(exp_avg, m);
    vf_store(exp_avg_sq, v);
    return p;
}

/* whole vectors; formats and is_coupled are known to the compiler */
AP_INLINE void adam_as(float *param, float *exp_avg, float *exp_avg_sq, int64_t n, ap_ends ends, int grad_format,
                       int copy_format, int is_coupled, ap_adam_scalars scalars) {
    for (int64_t i = 0; i < n; i += AP_LANES) {
        prefetch(param, i);
        prefetch(exp_avg, i);
        prefetch(exp_avg_sq, i);
        vf grad = load_grad(&ends, grad_format, i);
        store_copy(&ends, copy_format, i,
                   adam_lanes(param + i, grad, exp_avg + i, exp_avg_sq + i, is_coupled, &scalars));
    }
}

AP_INLINE vf sgd_lanes(float *param, vf grad, float *buffer, const ap_sgd_scalars *s) {
    vf p = vf_load(param);
    grad *= s->grad_factor;
    if (s->weight_decay != 0.0f) grad = vf_fma(p, vf_set(s->weight_decay), grad);
    if (buffer) {
        vf b = grad;
        if (!s->is_first) b = vf_fma(grad, vf_set(s->one_minus_dampening), vf_load(buffer) * s->momentum);
        vf_store(buffer, b);
        grad = s->nesterov ? vf_fma(b, vf_set(s->momentum), grad) : b;
    }
    p = vf_fma(grad, vf_set(-s->lr), p);
    vf_store(param, p);
    return p;
}

AP_INLINE void sgd_as(float *param, float *buffer, int64_t n, ap_ends ends, int grad_format, int copy_format,
                      ap_sgd_scalars scalars) {
    for (int64_t i = 0; i < n; i += AP_LANES) {
        prefetch(param, i);
        if (buffer) prefetch(buffer, i);
        vf grad = load_grad(&ends, grad_format, i);
        store_copy(&ends, copy_format, i, sgd_lanes(param + i, grad, buffer ? buffer + i : 0, &scalars));
    }
}

/* STEP(gradient's format, copy's format) for what `ends` says */
#define AP_WITH_COPY(STEP, GRAD)                                                                                       \
    if (!ends->copy) {                                                                                                 \
        STEP(GRAD, AP_FP32);                                                                                           \
    } else if (ends->copy_format == AP_BF16) {                                                                         \
        STEP(GRAD, AP_BF16);                                                                                           \
    } else {                                                                                                           \
        STEP(GRAD, AP_FP16);                                                                                           \
    }
#define AP_WITH_FORMATS(STEP)                                                                                          \
    if (ends->grad_format == AP_FP32) {                                                                                \
        AP_WITH_COPY(STEP, AP_FP32)                                                                                    \
    } else if (ends->grad_format == AP_BF16) {                                                                         \
        AP_WITH_COPY(STEP, AP_BF16)                                                                                    \
    } else {                                                                                                           \
        AP_WITH_COPY(STEP, AP_FP16)                                                                                    \
    }

static void adam_vectors(float *param, float *exp_avg, float *exp_avg_sq, int64_t n, const ap_ends *ends,
                         const ap_adam_scalars *s) {
#define AP_DECOUPLED(GRAD, COPY) adam_as(param, exp_avg, exp_avg_sq, n, *ends, GRAD, COPY, 0, *s)
#define AP_COUPLED(GRAD, COPY) adam_as(param, exp_avg, exp_avg_sq, n, *ends, GRAD, COPY, 1, *s)
    if (s->decoupled || s->weight_decay == 0.0f) {
        AP_WITH_FORMATS(AP_DECOUPLED)
    } else {
        AP_WITH_FORMATS(AP_COUPLED)
    }
#undef AP_DECOUPLED
#undef AP_COUPLED
    if (ends->is_streamed) ap_fence();
}

static void sgd_vectors(float *param, float *buffer, int64_t n, const ap_ends *ends, const ap_sgd_scalars *s) {
#define AP_SGD(GRAD, COPY) sgd_as(param, buffer, n, *ends, GRAD, COPY, *s)
    AP_WITH_FORMATS(AP_SGD)
#undef AP_SGD
    if (ends->is_streamed) ap_fence();
}

/* What is left over from whole vectors goes through one of its own. */
typedef struct {
    float param[AP_LANES], exp_avg[AP_LANES], exp_avg_sq[AP_LANES], grad[AP_LANES], copy[AP_LANES];
} vectors_of_rest;

AP_INLINE ap_ends begin_rest(vectors_of_rest *rest, const ap_ends *ends, int64_t i, int64_t count) {
    int64_t bytes = ap_bytes(ends->grad_format);
    memset(rest, 0, sizeof *rest);
    memcpy(rest->grad, (const char *)ends->grad + i * bytes, (size_t)(count * bytes));
    return (ap_ends){rest->grad, ends->grad_format, ends->copy ? rest->copy : 0, ends->copy_format, 0};
}

AP_INLINE void end_rest(const vectors_of_rest *rest, const ap_ends *ends, int64_t i, int64_t count) {
    if (ends->copy) memcpy((uint16_t *)ends->copy + i, rest->copy, (size_t)count * 2);
}

static void adam(float *param, float *exp_avg, float *exp_avg_sq, int64_t n, const ap_ends *ends,
                 const ap_adam_scalars *scalars) {
    int64_t i = n - n % AP_LANES;
    adam_vectors(param, exp_avg, exp_avg_sq, i, ends, scalars);
    if (i == n) return;
    size_t bytes = (size_t)(n - i) * 4;
    vectors_of_rest rest;
    ap_ends rest_ends = begin_rest(&rest, ends, i, n - i);
    memcpy(rest.param, param + i, bytes);
    memcpy(rest.exp_avg, exp_avg + i, bytes);
    memcpy(rest.exp_avg_sq, exp_avg_sq + i, bytes);
    adam_vectors(rest.param, rest.exp_avg, rest.exp_avg_sq, AP_LANES, &rest_ends, scalars);
    memcpy(param + i, rest.param, bytes);
    memcpy(exp_avg + i, rest.exp_avg, bytes);
    memcpy(exp_avg_sq + i, rest.exp_avg_sq, bytes);
    end_rest(&rest, ends, i, n - i);
}

static void sgd(float *param, float *buffer, int64_t n, const ap_ends *ends, const ap_sgd_scalars *scalars) {
    int64_t i = n - n % AP_LANES;
    sgd_vectors(param, buffer, i, ends, scalars);
    if (i == n) return;
    size_t bytes = (size_t)(n - i) * 4;
    vectors_of_rest rest;
    ap_ends rest_ends = begin_rest(&rest, ends, i, n - i);
    memcpy(rest.param, param + i, bytes);
    if (buffer) memcpy(rest.exp_avg, buffer + i, bytes);
    sgd_vectors(rest.param, buffer ? rest.exp_avg : 0, AP_LANES, &rest_ends, scalars);
    memcpy(param + i, rest.param, bytes);
    if (buffer) memcpy(buffer + i, rest.exp_avg, bytes);
    end_rest(&rest, ends, i, n - i);
}
