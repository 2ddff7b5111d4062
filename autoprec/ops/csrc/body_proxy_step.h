/* One step and one window of a proxy training. Included once per ISA. */

AP_INLINE float proxy_unknown(void) { return as_float(0x7FC00000); }

/* ranges of the units in this step */
static void set_ranges(ap_proxy *p) {
    const ap_proxy_spec *spec = &p->spec;
    uint32_t words[AP_PROXY_UNITS];
    random_words((ap_stream){ap_proxy_seed(p), AP_STREAM_DRIFT, (uint64_t)p->step * AP_PROXY_UNITS}, AP_PROXY_UNITS,
                 words);
    for (int u = 0; u < spec->unit_count; u++) {
        float unsettled = expf(-(float)p->step / spec->drift_steps[u]);
        float drift = unsettled * (spec->drift_bits[u] + spec->drift_noise[u] * (2.0f * uniform_of(words[u]) - 1.0f));
        float bits[2] = {spec->activation_bits[u] + drift, spec->gradient_bits[u] + drift};
        for (int e = 0; e < spec->event_count; e++) {
            const ap_proxy_event *event = &spec->events[e];
            int32_t since = p->step - event->start;
            if (event->kind == AP_EVENT_SPIKE || event->unit != u || since < 0 || since >= event->length) continue;
            bits[event->kind == AP_EVENT_GRADIENT] += event->factor;
        }
        ap_proxy_unit *unit = &p->units[u]; /* whole powers of two: a change of range changes no bit in fp32 */
        unit->activation_scale = ldexpf(1.0f, (int)rintf(bits[0]));
        unit->weight_scale = ldexpf(1.0f, (int)rintf(spec->weight_bits[u]));
        unit->gradient_scale = ldexpf(1.0f, (int)rintf(bits[1]));
        unit->mean = spec->activation_mean[u] * unit->activation_scale;
    }
}

/* cross entropy of a sample; the gradient times `factor` goes to grad where it is not NULL */
static float entropy_row(const float *logits, int label, int64_t batch, int64_t width, int classes, float factor,
                         float *grad) {
    float row[64], largest = logits[largest_of(logits, classes)];
    for (int64_t j = 0; j < width; j += AP_LANES) vf_store(row + j, vf_exp(vf_load(logits + j) - largest));
    for (int64_t j = classes; j < width; j++) row[j] = 0.0f;
    float total = mean16(row, width) * (float)width;
    if (grad) {
        float inverse = factor / ((float)batch * total);
        for (int64_t j = 0; j < width; j += AP_LANES) vf_store(grad + j, vf_load(row + j) * inverse);
    }
    return logf(total) - (logits[label] - largest);
}

/* the same of 16 samples with 16 logits each */
static void entropy_rows(const float *logits, const int32_t *labels, int64_t batch, int classes, float factor,
                         float *grad, float entropy[16]) {
    float columns[256], totals[16], most[16];
    transpose16(logits, 16, columns, 16);
    for (int lane = 0; lane < 16; lane += AP_LANES) {
        float *column = columns + lane;
        vf largest = largest_down(column, classes, 16);
        for (int i = 0; i < 16; i++)
            vf_store(column + 16 * i, i < classes ? vf_exp(vf_load(column + 16 * i) - largest) : vf_set(0.0f));
        vf total = total_down(column, 16, 16) / 16.0f * 16.0f, inverse = factor / ((float)batch * total);
        vf_store(totals + lane, total);
        vf_store(most + lane, largest);
        for (int i = 0; i < classes && grad; i++) vf_store(column + 16 * i, vf_load(column + 16 * i) * inverse);
    }
    if (grad) transpose16(columns, 16, grad, 16);
    for (int i = 0; i < 16; i++) entropy[i] = logf(totals[i]) - (logits[16 * i + labels[i]] - most[i]);
}

/* mean cross entropy over the batch; the gradient times `factor` goes to grad where it is not NULL */
static float cross_entropy(const float *logits, const int32_t *labels, int64_t batch, int64_t width, int classes,
                           float factor, float *grad) {
    double sum = 0.0;
    int64_t i = 0;
    for (; width == 16 && i + 16 <= batch; i += 16) {
        float entropy[16];
        entropy_rows(logits + i * 16, labels + i, batch, classes, factor, grad ? grad + i * 16 : 0, entropy);
        for (int lane = 0; lane < 16; lane++) sum += entropy[lane];
    }
    for (; i < batch; i++)
        sum += entropy_row(logits + i * width, labels[i], batch, width, classes, factor, grad ? grad + i * width : 0);
    for (i = 0; i < batch && grad; i++) grad[i * width + labels[i]] -= factor / (float)batch;
    return (float)(sum / (double)batch);
}

static float median_norm(const ap_proxy *p) {
    int n = p->norm_count < AP_PROXY_MEDIAN ? p->norm_count : AP_PROXY_MEDIAN;
    float sorted[AP_PROXY_MEDIAN];
    if (!n) return proxy_unknown();
    for (int i = 0; i < n; i++) {
        int at = i;
        for (; at && sorted[at - 1] > p->norms[i]; at--) sorted[at] = sorted[at - 1];
        sorted[at] = p->norms[i];
    }
    return n % 2 ? sorted[n / 2] : 0.5f * (sorted[n / 2 - 1] + sorted[n / 2]);
}

/* norms of the units; returns the global norm or inf. factor: what gradients are multiplied by here */
static float take_norms(ap_proxy *p, float factor) {
    static const float UNCOUNTED[2] = {0.0f, 0.0f};
    double square = 0.0;
    int is_finite = 1;
    for (int u = 0; u < p->spec.unit_count; u++) {
        const ap_proxy_unit *unit = &p->units[u];
        ap_sums sums = {0};
        stats(p->grads + unit->weight, AP_FP32, unit->in * unit->out + unit->out, UNCOUNTED, &sums);
        is_finite &= sums.nonfinite == 0;
        square += sums.square_sum;
        p->window->gradient_norm[u][p->window->steps] = (float)sqrt(sums.square_sum) / p->loss_scale;
    }
    return is_finite ? (float)(sqrt(square) / factor) : INFINITY;
}

/* products of this gradient with the one before: what they have in common is not noise */
static void compare_gradients(ap_proxy *p, float norm, float factor) {
    if (p->previous_factor > 0.0f) {
        double dot = dot16(p->grads, p->previous_grads, p->parameter_count);
        p->dot_sum += dot / ((double)factor * p->previous_factor);
        p->square_sum += (double)norm * norm;
        p->dot_count++;
    }
    p->previous_factor = factor;
}

static void update(ap_proxy *p, float lr, float grad_factor) {
    const ap_proxy_spec *spec = &p->spec;
    const float *grads = p->grads;
    ap_ends ends = {.grad = grads, .grad_format = AP_FP32, .copy_format = AP_BF16};
    int step = ++p->applied;
    if (spec->optimizer == AP_PROXY_SGD) {
        ap_sgd_scalars s = {lr, spec->weight_decay, spec->beta1, 1.0f, grad_factor, 0, step == 1};
        sgd(p->parameters, p->exp_avg, p->parameter_count, &ends, &s);
        return;
    }
    ap_adam_scalars s = {
        .lr = lr,
        .weight_decay = spec->weight_decay,
        .keep = 1.0f - lr * spec->weight_decay,
        .step_size = (float)((double)lr / (1.0 - pow((double)spec->beta1, step))),
        .one_minus_beta1 = 1.0f - spec->beta1,
        .beta2 = spec->beta2,
        .one_minus_beta2 = 1.0f - spec->beta2,
        .bias_correction2_sqrt = (float)sqrt(1.0 - pow((double)spec->beta2, step)),
        .eps = spec->eps,
        .grad_factor = grad_factor,
        .decoupled = spec->optimizer == AP_PROXY_ADAMW,
    };
    s.inv_bias_correction2_sqrt = 1.0f / s.bias_correction2_sqrt;
    adam(p->parameters, p->exp_avg, p->exp_avg_sq, p->parameter_count, &ends, &s);
}

static void apply(ap_proxy *p, float norm, float factor, float lr) {
    float median = median_norm(p), limit = p->knobs->clip_multiplier * median, clip = 1.0f;
    if (norm > limit) { /* without a median there is no limit yet */
        clip = limit / norm;
        p->window->clipped++;
    }
    p->window->clip_threshold = limit * p->spec.loss_factor;
    p->norms[p->norm_count++ % AP_PROXY_MEDIAN] = norm;
    if (p->norm_count == 2 * AP_PROXY_MEDIAN) p->norm_count = AP_PROXY_MEDIAN;
    compare_gradients(p, norm, factor);
    update(p, lr, clip / factor);
    if (p->knobs->growth_interval && ++p->growth_tracker >= p->knobs->growth_interval) {
        p->growth_tracker = 0;
        p->loss_scale = fminf(p->loss_scale * 2.0f, 0x1p24f);
    }
}

static void proxy_step(ap_proxy *p, float lr) {
    const ap_proxy_knobs *knobs = p->knobs;
    ap_proxy_window *w = p->window;
    int64_t batch = p->batch = knobs->batch;
    int last = p->spec.node_count - 1, at = w->steps;
    float factor = p->loss_scale * p->spec.loss_factor;
    p->is_found = 0;
    w->loss_scales[at] = p->loss_scale;
    set_ranges(p);
    draw_batch(p, batch);
    forward(p, batch, 0);
    ap_proxy_place *logits = &p->places[last];
    float loss = cross_entropy(logits->value, p->labels, batch, p->spec.nodes[last].width, p->spec.classes, factor,
                               logits->grad);
    float *spare = p->previous_grads;
    p->previous_grads = p->grads;
    p->grads = spare;
    backward(p, batch);
    float norm = take_norms(p, factor);
    w->losses[at] = loss * p->spec.loss_factor;
    w->norms[at] = norm * p->spec.loss_factor;
    if (p->is_found || !(norm < INFINITY) || !(fabsf(loss) < INFINITY)) {
        w->skipped++;
        w->norms[at] = proxy_unknown();
        p->growth_tracker = 0;
        p->previous_factor = 0.0f;
        p->loss_scale = fmaxf(p->loss_scale * 0.5f, 1.0f);
    } else {
        apply(p, norm, factor, lr);
    }
    p->step++;
    w->steps++;
}

static float proxy_evaluate(ap_proxy *p) {
    int last = p->spec.node_count - 1, total = p->spec.evaluation_samples;
    double sum = 0.0;
    float *input = p->places[0].value;
    for (int done = 0; done < total; done += p->spec.max_batch) {
        int64_t n = ap_min(p->spec.max_batch, total - done);
        p->places[0].value = p->evaluation_input + done * p->input_size;
        forward(p, n, 1);
        sum += (double)n * cross_entropy(p->places[last].value, p->evaluation_labels + done, n,
                                         p->spec.nodes[last].width, p->spec.classes, 0.0f, 0);
    }
    p->places[0].value = input;
    return (float)(sum / total);
}

static void fill_unknown(float *x, int64_t n) {
    for (int64_t i = 0; i < n; i++) x[i] = proxy_unknown();
}

static void clear_window(ap_proxy_window *w) {
    memset(w, 0, sizeof *w);
    w->first_unit = w->first_tensor = -1;
    w->evaluation_loss = w->noise_scale = w->median_norm = proxy_unknown();
    w->clip_threshold = INFINITY;
    fill_unknown(w->losses, 3 * AP_PROXY_STEPS);
    fill_unknown(&w->activation_amax[0][0], 2 * AP_PROXY_UNITS * AP_PROXY_STEPS);
    fill_unknown(&w->errors[0][0][0], (6 + 1) * AP_PROXY_UNITS * AP_PROXY_FORMATS);
}

static void proxy_window(void *proxy, const void *knobs_of, void *window) {
    ap_proxy *p = proxy;
    const ap_proxy_knobs *knobs = knobs_of;
    ap_proxy_window *w = window;
    clear_window(w);
    p->knobs = knobs;
    p->window = w;
    if (knobs->loss_scale > 0.0f) p->loss_scale = knobs->loss_scale;
    p->dot_sum = p->square_sum = 0.0;
    p->dot_count = 0;
    for (int s = 0; s < knobs->steps; s++) {
        float part = knobs->steps > 1 ? (float)s / (float)knobs->steps : 0.0f;
        p->is_probing = s == knobs->steps - 1 && knobs->probed_formats;
        proxy_step(p, knobs->lr_begin + part * (knobs->lr_end - knobs->lr_begin));
    }
    if (knobs->is_evaluated) w->evaluation_loss = proxy_evaluate(p);
    w->loss_scale = p->loss_scale;
    w->growth_tracker = p->growth_tracker;
    w->total_steps = p->step;
    w->median_norm = median_norm(p) * p->spec.loss_factor;
    if (p->dot_count && p->dot_sum > 0.0)
        w->noise_scale = (float)(p->batch * fmax(p->square_sum - p->dot_sum, 0.0) / p->dot_sum);
    p->knobs = 0;
    p->window = 0;
}
