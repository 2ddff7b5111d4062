/* Samples and labels of the proxy trainings: a fixed random network is the teacher. Included once per ISA. */

/* sums of four bytes each: nearly normal, mean 0 and variance 1 */
static void normals(ap_stream stream, int64_t n, uint32_t *words, float *x) {
    random_words(stream, n, words);
    for (int64_t i = 0; i < n; i += AP_LANES) {
        vu w = (vu)vf_load((const float *)(words + i)), pairs = (w & 0x00FF00FF) + ((w >> 8) & 0x00FF00FF);
        vi sum = (vi)((pairs & 0xFFFF) + (pairs >> 16));
        vf_store(x + i, (__builtin_convertvector(sum, vf) - 510.0f) * (1.0f / 147.8005413f));
    }
}

AP_INLINE float uniform_of(uint32_t word) { return (float)(word >> 8) * 0x1p-24f; }

static int32_t largest_of(const float *x, int n) {
    int best = 0;
    for (int i = 1; i < n; i++)
        if (x[i] > x[best]) best = i;
    return best;
}

/* the same of each of n rows of 16 */
static void label_rows(const float *sums, int64_t n, int classes, int32_t *labels) {
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) {
        float columns[256];
        transpose16(sums + i * 16, 16, columns, 16);
        for (int lane = 0; lane < 16; lane += AP_LANES) {
            vf largest = vf_load(columns + lane);
            vi best = vi_set(0);
            for (int c = 1; c < classes; c++) {
                vf other = vf_load(columns + 16 * c + lane);
                vi is_larger = other > largest;
                largest = vf_select(is_larger, other, largest);
                best = vi_select(is_larger, vi_set(c), best);
            }
            memcpy(labels + i + lane, &best, sizeof best);
        }
    }
    for (; i < n; i++) labels[i] = largest_of(sums + i * 16, classes);
}

/* what the teacher says about samples; sums [n, 16] are the logits */
static void teach(const ap_proxy *p, const float *x, int64_t n, float *sums, int32_t *labels) {
    const ap_proxy_node *input = &p->spec.nodes[0];
    int64_t width = p->spec.teacher_width, positions = input->positions;
    float *hidden = p->scratch, *pooled = hidden + positions * n * width;
    product in = {.m = n * positions, .n = width, .k = input->width, .a = x, .a_row = input->width, .a_col = 1,
                  .b = p->teacher_in, .b_row = width, .c = hidden, .c_row = width, .has_relu = 1};
    multiply(&in);
    const float *summary = hidden;
    if (positions > 1) {
        for (int64_t i = 0; i < n; i++)
            for (int64_t j = 0; j < width; j += AP_LANES) {
                vf sum = vf_set(0.0f);
                for (int64_t t = 0; t < positions; t++) sum += vf_load(hidden + (i * positions + t) * width + j);
                vf_store(pooled + i * width + j, sum);
            }
        summary = pooled;
    }
    product out = {.m = n, .n = 16, .k = width, .a = summary, .a_row = width, .a_col = 1, .b = p->teacher_out,
                   .b_row = 16, .c = sums, .c_row = 16, .bias = p->teacher_mean};
    multiply(&out);
    label_rows(sums, n, p->spec.classes, labels);
}

static void draw_input(ap_proxy *p, ap_stream stream, int64_t n, float *x) {
    int64_t width = p->spec.nodes[0].width, size = n * p->input_size;
    normals(stream, size, p->words, x);
    for (int64_t i = 0; i < size; i += width)
        for (int64_t j = 0; j < width; j += AP_LANES)
            vf_store(x + i + j, vf_load(x + i + j) * vf_load(p->feature_scale + j));
}

static void scale_row(float *x, int64_t n, float factor) {
    for (int64_t i = 0; i < n; i++) x[i] *= factor;
}

/* noise in labels, outlier rows, and spikes: a quarter of the rows too large and with wrong labels */
static void disturb(ap_proxy *p, int64_t batch, float *x) {
    const ap_proxy_spec *spec = &p->spec;
    float spike = 0.0f;
    for (int e = 0; e < spec->event_count; e++) {
        const ap_proxy_event *event = &spec->events[e];
        int32_t since = p->step - event->start;
        if (event->kind == AP_EVENT_SPIKE && since >= 0 && since < event->length) spike = event->factor;
    }
    random_words((ap_stream){ap_proxy_seed(p), AP_STREAM_LABEL, 4 * p->next_sample}, 4 * batch, p->words);
    for (int64_t i = 0; i < batch; i++) {
        const uint32_t *word = p->words + 4 * i;
        int is_spiked = spike > 0.0f && i % 4 == 0;
        if (is_spiked || uniform_of(word[0]) < spec->label_noise)
            p->labels[i] = (int32_t)(word[1] % (uint32_t)spec->classes);
        if (is_spiked) scale_row(x + i * p->input_size, p->input_size, spike);
        if (uniform_of(word[2]) < spec->outlier_share)
            scale_row(x + i * p->input_size, p->input_size, spec->outlier_factor);
    }
}

static void draw_batch(ap_proxy *p, int64_t batch) {
    float *x = p->places[0].value;
    draw_input(p, (ap_stream){ap_proxy_seed(p), AP_STREAM_INPUT, p->next_sample * (uint64_t)p->input_size}, batch, x);
    teach(p, x, batch, p->rounded_grad, p->labels);
    disturb(p, batch, x);
    p->next_sample += (uint64_t)batch;
}

/* ---- the start of a training ---- */

static void draw_matrix(ap_proxy *p, int stream, uint64_t *element, int64_t n, float deviation, float *x) {
    for (int64_t i = 0; i < n; i += AP_TILE) {
        int64_t count = ap_min(AP_TILE, n - i);
        normals((ap_stream){ap_proxy_seed(p), (uint64_t)stream, *element}, count, p->words, x + i);
        *element += (uint64_t)count;
    }
    for (int64_t i = 0; i < n; i++) x[i] *= deviation;
}

static void proxy_begin(void *proxy) {
    ap_proxy *p = proxy;
    const ap_proxy_spec *spec = &p->spec;
    int64_t width = spec->nodes[0].width, hidden = spec->teacher_width, chunk = spec->max_batch;
    uint64_t element = 0;
    draw_matrix(p, AP_STREAM_TEACHER, &element, width, spec->feature_spread, p->feature_scale);
    for (int64_t i = 0; i < width; i++) p->feature_scale[i] = exp2f(p->feature_scale[i]);
    draw_matrix(p, AP_STREAM_TEACHER, &element, width * hidden, sqrtf(2.0f / (float)width), p->teacher_in);
    draw_matrix(p, AP_STREAM_TEACHER, &element, hidden * 16, sqrtf(1.0f / (float)hidden), p->teacher_out);
    for (int64_t done = 0; done < spec->evaluation_samples; done += chunk) {
        int64_t n = ap_min(chunk, spec->evaluation_samples - done);
        uint64_t first = (uint64_t)(done * p->input_size);
        draw_input(p, (ap_stream){ap_proxy_seed(p), AP_STREAM_EVALUATION, first}, n,
                   p->evaluation_input + done * p->input_size);
    }
    /* so that classes are about equally frequent */
    float *sums = p->rounded_grad;
    int64_t n = ap_min(chunk, spec->evaluation_samples);
    teach(p, p->evaluation_input, n, sums, p->labels);
    for (int c = 0; c < 16; c++) {
        float mean = 0.0f;
        for (int64_t i = 0; i < n; i++) mean += sums[i * 16 + c];
        p->teacher_mean[c] = -mean / (float)n;
    }
    for (int64_t done = 0; done < spec->evaluation_samples; done += chunk)
        teach(p, p->evaluation_input + done * p->input_size, ap_min(chunk, spec->evaluation_samples - done), sums,
              p->evaluation_labels + done);
    element = 0;
    for (int u = 0; u < spec->unit_count; u++) {
        ap_proxy_unit *unit = &p->units[u];
        int is_last = u == spec->nodes[spec->node_count - 1].unit; /* whose outputs start small */
        float deviation = sqrtf((is_last ? 0.05f : 2.0f) / (float)unit->in);
        draw_matrix(p, AP_STREAM_WEIGHT, &element, unit->in * unit->out, deviation, p->parameters + unit->weight);
    }
}
