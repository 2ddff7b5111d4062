/* One step of an optimizer on a range of fp32 numbers, in torch's order of operations, with a fused
 * multiply-add where its own fused kernels have one, so that both give the same bits. Included once per ISA. */

/* x / divisor, correctly rounded like the division, which is several times slower: the quotient by the reciprocal is
 * corrected by its exact remainder (Markstein, 1990). Infinity has no remainder. */
AP_INLINE vf divide_by(vf x, float divisor, float reciprocal) {
    vf quotient = x * reciprocal, remainder = vf_fma(quotient, vf_set(-divisor), x);
    return vf_select(x < INFINITY, vf_fma(remainder, vf_set(reciprocal), quotient), quotient);
}

AP_INLINE void adam_lanes(float *param, vf grad, float *exp_avg, float *exp_avg_sq, const ap_adam_scalars *s) {
    vf p = vf_load(param), m = vf_load(exp_avg), v = vf_load(exp_avg_sq);
    grad *= s->grad_factor;
    if (s->decoupled) {
        p *= s->keep;
    } else if (s->weight_decay != 0.0f) {
        grad = vf_fma(p, vf_set(s->weight_decay), grad);
    }
    m = vf_fma(vf_set(s->one_minus_beta1), grad - m, m);
    v = vf_fma(s->one_minus_beta2 * grad, grad, v * s->beta2);
    vf denominator = divide_by(vf_sqrt(v), s->bias_correction2_sqrt, s->inv_bias_correction2_sqrt) + s->eps;
    vf_store(param, p + -s->step_size * m / denominator);
    vf_store(exp_avg, m);
    vf_store(exp_avg_sq, v);
}

static void adam(float *param, const float *grad, float *exp_avg, float *exp_avg_sq, int64_t n,
                 const ap_adam_scalars *s) {
    int64_t i = 0;
    for (; i + AP_LANES <= n; i += AP_LANES) adam_lanes(param + i, vf_load(grad + i), exp_avg + i, exp_avg_sq + i, s);
    if (i == n) return;
    float rest[4][AP_LANES] = {{0}};
    size_t bytes = (size_t)(n - i) * 4;
    memcpy(rest[0], param + i, bytes);
    memcpy(rest[1], grad + i, bytes);
    memcpy(rest[2], exp_avg + i, bytes);
    memcpy(rest[3], exp_avg_sq + i, bytes);
    adam_lanes(rest[0], vf_load(rest[1]), rest[2], rest[3], s);
    memcpy(param + i, rest[0], bytes);
    memcpy(exp_avg + i, rest[2], bytes);
    memcpy(exp_avg_sq + i, rest[3], bytes);
}

AP_INLINE void sgd_lanes(float *param, vf grad, float *buffer, const ap_sgd_scalars *s) {
    vf p = vf_load(param);
    grad *= s->grad_factor;
    if (s->weight_decay != 0.0f) grad = vf_fma(p, vf_set(s->weight_decay), grad);
    if (buffer) {
        vf b = grad;
        if (!s->is_first) b = vf_fma(grad, vf_set(s->one_minus_dampening), vf_load(buffer) * s->momentum);
        vf_store(buffer, b);
        grad = s->nesterov ? vf_fma(b, vf_set(s->momentum), grad) : b;
    }
    vf_store(param, vf_fma(grad, vf_set(-s->lr), p));
}

static void sgd(float *param, const float *grad, float *buffer, int64_t n, const ap_sgd_scalars *s) {
    int64_t i = 0;
    for (; i + AP_LANES <= n; i += AP_LANES)
        sgd_lanes(param + i, vf_load(grad + i), buffer ? buffer + i : 0, s);
    if (i == n) return;
    float rest[3][AP_LANES] = {{0}};
    size_t bytes = (size_t)(n - i) * 4;
    memcpy(rest[0], param + i, bytes);
    memcpy(rest[1], grad + i, bytes);
    if (buffer) memcpy(rest[2], buffer + i, bytes);
    sgd_lanes(rest[0], vf_load(rest[1]), buffer ? rest[2] : 0, s);
    memcpy(param + i, rest[0], bytes);
    if (buffer) memcpy(buffer + i, rest[2], bytes);
}
