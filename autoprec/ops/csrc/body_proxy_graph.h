/* Forward and backward of the proxy models. Included once per ISA. */

/* ---- units: products in a format ---- */

static void note(ap_proxy *p, int u, int tensor, float amax, float limit) {
    if (amax <= limit) return;
    ap_proxy_window *w = p->window;
    if (w->first_unit < 0) {
        w->first_unit = u;
        w->first_tensor = tensor;
    }
    w->overflows[u][tensor]++;
    p->is_found = 1;
}

/* errors of all probed formats on the first part of a tensor as it is stored */
static void probe(ap_proxy *p, int u, int tensor, const float *x, int64_t n, float scale, float mean, float amax) {
    float stored[AP_ERROR_SAMPLE];
    int64_t count = ap_min(n, AP_ERROR_SAMPLE);
    for (int64_t i = 0; i < count; i += AP_LANES)
        vf_store(stored + i, vf_fma(vf_load(x + i), vf_set(scale), vf_set(mean)));
    float centre = mean16(stored, count), power = 0.0f;
    sum16 square = {0};
    for (int64_t i = 0; i < count; i += 16)
        for (int j = 0; j < AP_BLOCK16; j++) {
            vf x0 = vf_load(stored + i + j * AP_LANES) - centre;
            square.lanes[j] = vf_fma(x0, x0, square.lanes[j]);
        }
    power = total16(&square);
    for (int f = 0; f < AP_PROXY_FORMATS; f++) {
        if (!(p->knobs->probed_formats >> f & 1)) continue;
        ap_proxy_rounding rounding = rounding_of(f, tensor == AP_TENSOR_GRADIENT);
        float limit = rounding.is_scaled ? 0x1.FEp127f : rounding.largest;
        float *error = &p->window->errors[u][tensor][f], *underflow = &p->window->underflow[u][tensor][f];
        if (!(amax <= limit)) {
            *error = AP_OVERFLOW_ERROR;
            *underflow = 0.0f;
        } else if (f == AP_PROXY_FP32 || power <= 0.0f) {
            *error = *underflow = 0.0f;
        } else {
            rounding_error e = measure(stored, count, rounding, factor_of(rounding, amax));
            *error = fminf(sqrtf(e.square / power), AP_OVERFLOW_ERROR);
            *underflow = e.nonzero > 0.0f ? e.flushed / e.nonzero : 0.0f;
            if (tensor == AP_TENSOR_WEIGHT) p->window->subnormal[u][f] = e.subnormal / fmaxf(e.nonzero, 1.0f);
        }
        if (tensor == AP_TENSOR_WEIGHT && f == AP_PROXY_FP32) p->window->subnormal[u][f] = 0.0f;
    }
}

/* rounds a tensor of a unit, or returns it as it is; counts what overflows */
static const float *in_format(ap_proxy *p, int u, int tensor, const float *x, int64_t n, float scale, float mean,
                              float *rounded, float *amax) {
    int format = p->knobs->formats[u];
    ap_proxy_rounding rounding = rounding_of(format, tensor == AP_TENSOR_GRADIENT);
    const float *y = x;
    if (format == AP_PROXY_FP32) {
        *amax = range_of(x, n, scale, mean);
    } else {
        *amax = round_tensor(x, n, scale, mean, rounding, rounded);
        y = rounded;
    }
    note(p, u, tensor, *amax, rounding.is_scaled ? 0x1.FEp127f : rounding.largest);
    if (p->is_probing) probe(p, u, tensor, x, n, scale, mean, *amax);
    return y;
}

static void round_weight(ap_proxy *p, int u, int is_transposed) {
    ap_proxy_unit *unit = &p->units[u];
    float amax;
    unit->used_weight = in_format(p, u, AP_TENSOR_WEIGHT, p->parameters + unit->weight, unit->in * unit->out,
                                  unit->weight_scale, 0.0f, unit->rounded_weight, &amax);
    p->window->weight_amax[u] = fmaxf(amax, p->window->weight_amax[u]);
    if (is_transposed)
        transpose(unit->used_weight, unit->out, unit->in, unit->out, unit->transposed, unit->in);
}

static void note_activation(ap_proxy *p, int u, float amax) {
    float *seen = &p->window->activation_amax[u][p->window->steps];
    *seen = !(amax <= *seen) ? amax : *seen; /* not known yet, or larger */
}

static const float *round_gradient(ap_proxy *p, int u, const float *x, int64_t n) {
    float amax;
    const float *y = in_format(p, u, AP_TENSOR_GRADIENT, x, n, p->units[u].gradient_scale, 0.0f, p->rounded_grad, &amax);
    p->window->gradient_amax[u] = fmaxf(amax / p->loss_scale, p->window->gradient_amax[u]);
    return y;
}

/* sums over n rows; several vectors at once, since one waits for its own sum */
AP_INLINE void sum_rows(const float *x, int64_t n, int64_t row, float *y, int vectors, int accumulates) {
    vf sums[4];
    for (int v = 0; v < vectors; v++) sums[v] = accumulates ? vf_load(y + v * AP_LANES) : vf_set(0.0f);
    for (int64_t i = 0; i < n; i++)
        for (int v = 0; v < vectors; v++) sums[v] += vf_load(x + i * row + v * AP_LANES);
    for (int v = 0; v < vectors; v++) vf_store(y + v * AP_LANES, sums[v]);
}

/* gradients of the weight and bias of a unit from n rows of input and incoming gradient */
static void weight_gradients(ap_proxy *p, int u, const float *input, const float *grad, int64_t n, int accumulates) {
    ap_proxy_unit *unit = &p->units[u];
    if (unit->out == 16 && unit->in > 16 && !accumulates) { /* wide rows are added up faster than narrow ones */
        product turned = {.m = unit->out, .n = unit->in, .k = n, .a = grad, .a_row = 1, .a_col = unit->out, .b = input,
                          .b_row = unit->in, .c = p->scratch, .c_row = unit->in};
        multiply(&turned);
        transpose(p->scratch, unit->in, unit->out, unit->in, p->grads + unit->weight, unit->out);
    } else {
        product weight = {.m = unit->in, .n = unit->out, .k = n, .a = input, .a_row = 1, .a_col = unit->in, .b = grad,
                          .b_row = unit->out, .c = p->grads + unit->weight, .c_row = unit->out,
                          .accumulates = accumulates};
        multiply(&weight);
    }
    float *bias = p->grads + unit->bias;
    int64_t j = 0;
    for (; j + 4 * AP_LANES <= unit->out; j += 4 * AP_LANES) sum_rows(grad + j, n, unit->out, bias + j, 4, accumulates);
    for (; j < unit->out; j += AP_LANES) sum_rows(grad + j, n, unit->out, bias + j, 1, accumulates);
}

static void activate(float *x, int64_t n) {
    for (int64_t i = 0; i < n; i += AP_LANES) vf_store(x + i, vf_tanh(vf_load(x + i)));
}

/* gradient before a ReLU (1) or tanh (2) with output y, in place */
static void unactivate(float *grad, const float *y, int64_t n, int activation) {
    for (int64_t i = 0; i < n; i += AP_LANES) {
        vf value = vf_load(y + i), g = vf_load(grad + i);
        g = activation == 1 ? vf_select(value > 0.0f, g, vf_set(0.0f)) : g * (1.0f - value * value);
        vf_store(grad + i, g);
    }
}

static void linear_forward(ap_proxy *p, const ap_proxy_node *node, ap_proxy_place *place, int64_t batch, int is_plain) {
    ap_proxy_unit *unit = &p->units[node->unit];
    int64_t rows = batch * node->positions;
    const float *input = p->places[node->a].value, *weight = p->parameters + unit->weight;
    if (!is_plain) {
        float amax;
        round_weight(p, node->unit, p->places[node->a].has_grad);
        input = in_format(p, node->unit, AP_TENSOR_ACTIVATION, input, rows * unit->in, unit->activation_scale,
                          unit->mean, unit->rounded_input, &amax);
        note_activation(p, node->unit, amax);
        unit->used_input = input;
        weight = unit->used_weight;
    }
    product forward = {.m = rows, .n = unit->out, .k = unit->in, .a = input, .a_row = unit->in, .a_col = 1,
                       .b = weight, .b_row = unit->out, .c = place->value, .c_row = unit->out,
                       .bias = p->parameters + unit->bias, .has_relu = node->extra == 1};
    multiply(&forward);
    if (node->extra == 2) activate(place->value, rows * unit->out);
}

static void linear_backward(ap_proxy *p, const ap_proxy_node *node, ap_proxy_place *place, int64_t batch) {
    ap_proxy_unit *unit = &p->units[node->unit];
    ap_proxy_place *source = &p->places[node->a];
    int64_t rows = batch * node->positions;
    if (node->extra) unactivate(place->grad, place->value, rows * unit->out, node->extra);
    const float *grad = round_gradient(p, node->unit, place->grad, rows * unit->out);
    weight_gradients(p, node->unit, unit->used_input, grad, rows, 0);
    if (!source->has_grad) return;
    product back = {.m = rows, .n = unit->in, .k = unit->out, .a = grad, .a_row = unit->out, .a_col = 1,
                    .b = unit->transposed, .b_row = unit->in, .c = source->grad, .c_row = unit->in,
                    .accumulates = source->consumers > 1};
    multiply(&back);
}

/* ---- the recurrent cell: states lie as [positions, batch, width] in `saved` ---- */

static void recurrent_forward(ap_proxy *p, const ap_proxy_node *node, ap_proxy_place *place, int64_t batch,
                              int is_plain) {
    ap_proxy_unit *unit = &p->units[node->unit];
    int64_t width = unit->out, size = batch * width, positions = p->spec.nodes[node->a].positions;
    const float *input = p->places[node->a].value;
    if (!is_plain) round_weight(p, node->unit, 1);
    for (int64_t t = 0; t < positions; t++) {
        float *state = place->saved + t * size;
        for (int64_t i = 0; i < batch; i++)
            copy_vectors(state + i * width, input + (i * positions + t) * width, width);
        if (t) {
            const float *before = state - size;
            if (!is_plain) {
                float amax;
                before = in_format(p, node->unit, AP_TENSOR_ACTIVATION, before, size, unit->activation_scale,
                                   unit->mean, unit->rounded_input + t * size, &amax);
                note_activation(p, node->unit, amax);
            }
            product step = {.m = batch, .n = width, .k = width, .a = before, .a_row = width, .a_col = 1,
                            .b = is_plain ? p->parameters + unit->weight : unit->used_weight, .b_row = width,
                            .c = state, .c_row = width, .accumulates = 1};
            multiply(&step);
        }
        for (int64_t i = 0; i < size; i += width) /* the bias */
            for (int64_t j = 0; j < width; j += AP_LANES)
                vf_store(state + i + j, vf_load(state + i + j) + vf_load(p->parameters + unit->bias + j));
        activate(state, size);
    }
    memcpy(place->value, place->saved + (positions - 1) * size, (size_t)size * 4);
}

static void recurrent_backward(ap_proxy *p, const ap_proxy_node *node, ap_proxy_place *place, int64_t batch) {
    ap_proxy_unit *unit = &p->units[node->unit];
    ap_proxy_place *source = &p->places[node->a];
    int64_t width = unit->out, size = batch * width, positions = p->spec.nodes[node->a].positions;
    int is_rounded = p->knobs->formats[node->unit] != AP_PROXY_FP32;
    memset(p->grads + unit->weight, 0, (size_t)(unit->in * unit->out) * 4);
    memset(p->grads + unit->bias, 0, (size_t)unit->out * 4);
    for (int64_t t = positions; t-- > 0;) {
        const float *state = place->saved + t * size;
        unactivate(place->grad, state, size, 2);
        for (int64_t i = 0; i < batch && source->has_grad; i++)
            copy_vectors(source->grad + (i * positions + t) * width, place->grad + i * width, width);
        if (t == 0) { /* no product came before the first state, but the bias did */
            for (int64_t i = 0; i < size; i += width)
                for (int64_t j = 0; j < width; j += AP_LANES) {
                    float *bias = p->grads + unit->bias + j;
                    vf_store(bias, vf_load(bias) + vf_load(place->grad + i + j));
                }
            return;
        }
        const float *grad = round_gradient(p, node->unit, place->grad, size);
        weight_gradients(p, node->unit, is_rounded ? unit->rounded_input + t * size : state - size, grad, batch, 1);
        product back = {.m = batch, .n = width, .k = width, .a = grad, .a_row = width, .a_col = 1,
                        .b = unit->transposed, .b_row = width, .c = place->grad, .c_row = width};
        if (grad == place->grad) { /* a product may not write what it reads */
            memcpy(p->rounded_grad, grad, (size_t)size * 4);
            back.a = p->rounded_grad;
        }
        multiply(&back);
    }
}

/* ---- nodes without weights ---- */

static int64_t side_of(int64_t positions) {
    int64_t side = 1;
    while (side * side < positions) side++;
    return side;
}

/* three pixels of a patch side by side: forward gathers, backward adds to where the numbers came from. line: the line of
 * the image, NULL for one outside */
AP_INLINE void pass_pixels(float *line, int64_t first, int64_t side, int64_t width, float *patch, int is_backward) {
    for (int64_t x = first; x < first + 3; x++, patch += width) {
        float *pixel = line && x >= 0 && x < side ? line + x * width : 0;
        for (int64_t j = 0; j < width; j += AP_LANES) {
            if (!is_backward) {
                vf_store(patch + j, pixel ? vf_load(pixel + j) : vf_set(0.0f));
            } else if (pixel) {
                vf_store(pixel + j, vf_load(pixel + j) + vf_load(patch + j));
            }
        }
    }
}

/* the patches of one sample */
AP_INLINE void pass_image(int64_t side, int64_t stride, int64_t width, float *image, float *patches, int is_backward) {
    for (int64_t top = -1; top < side - 1; top += stride)
        for (int64_t left = -1; left < side - 1; left += stride)
            for (int64_t y = top; y < top + 3; y++, patches += 3 * width)
                pass_pixels(y >= 0 && y < side ? image + y * side * width : 0, left, side, width, patches, is_backward);
}

static void pass_patches(ap_proxy *p, const ap_proxy_node *node, ap_proxy_place *place, int64_t batch, int is_backward) {
    const ap_proxy_node *from = &p->spec.nodes[node->a];
    ap_proxy_place *source = &p->places[node->a];
    int64_t side = side_of(from->positions);
    if (is_backward && source->consumers == 1) memset(source->grad, 0, (size_t)(batch * source->size) * 4);
    for (int64_t i = 0; i < batch; i++) {
        int64_t from_at = i * source->size, at = i * place->size;
        if (is_backward) {
            pass_image(side, node->extra, from->width, source->grad + from_at, place->grad + at, 1);
        } else {
            pass_image(side, node->extra, from->width, source->value + from_at, place->value + at, 0);
        }
    }
}

AP_INLINE void give(float *to, vf x, const ap_proxy_place *source) {
    vf_store(to, source->consumers > 1 ? vf_load(to) + x : x);
}

static void mean_forward(ap_proxy *p, const ap_proxy_node *node, ap_proxy_place *place, int64_t batch) {
    int64_t width = node->width, positions = p->spec.nodes[node->a].positions;
    const float *x = p->places[node->a].value;
    for (int64_t i = 0; i < batch; i++)
        for (int64_t j = 0; j < width; j += AP_LANES) {
            vf sum = vf_set(0.0f);
            for (int64_t t = 0; t < positions; t++) sum += vf_load(x + (i * positions + t) * width + j);
            vf_store(place->value + i * width + j, sum * (1.0f / (float)positions));
        }
}

static void mean_backward(ap_proxy *p, const ap_proxy_node *node, ap_proxy_place *place, int64_t batch) {
    int64_t width = node->width, positions = p->spec.nodes[node->a].positions;
    ap_proxy_place *source = &p->places[node->a];
    for (int64_t i = 0; i < batch * positions; i++)
        for (int64_t j = 0; j < width; j += AP_LANES) {
            vf grad = vf_load(place->grad + i / positions * width + j) * (1.0f / (float)positions);
            give(source->grad + i * width + j, grad, source);
        }
}

static void norm_row(const float *x, int64_t width, float *y, float *inverse) {
    float mean = mean16(x, width);
    for (int64_t j = 0; j < width; j += AP_LANES) vf_store(y + j, vf_load(x + j) - mean);
    *inverse = 1.0f / sqrtf(dot16(y, y, width) / (float)width + 1e-5f);
    for (int64_t j = 0; j < width; j += AP_LANES) vf_store(y + j, vf_load(y + j) * *inverse);
}

/* 16 rows of 16 at once */
static void norm_rows(const float *x, float *y, float *inverse) {
    float columns[256];
    transpose16(x, 16, columns, 16);
    for (int lane = 0; lane < 16; lane += AP_LANES) {
        float *column = columns + lane;
        vf mean = total_down(column, 16, 16) / 16.0f;
        for (int i = 0; i < 256; i += 16) vf_store(column + i, vf_load(column + i) - mean);
        vf factor = 1.0f / vf_sqrt(dot_down(column, column, 16, 16) / 16.0f + 1e-5f);
        vf_store(inverse + lane, factor);
        for (int i = 0; i < 256; i += 16) vf_store(column + i, vf_load(column + i) * factor);
    }
    transpose16(columns, 16, y, 16);
}

static void norm_forward(ap_proxy *p, const ap_proxy_node *node, ap_proxy_place *place, int64_t batch) {
    const float *x = p->places[node->a].value;
    int64_t width = node->width, rows = batch * node->positions, i = 0;
    if (width == 16)
        for (; i + 16 <= rows; i += 16) norm_rows(x + i * 16, place->value + i * 16, place->saved + i);
    for (; i < rows; i++) norm_row(x + i * width, width, place->value + i * width, place->saved + i);
}

/* means of gradients and along the outputs of 16 rows of 16 */
static void norm_sums(const float *grad, const float *y, float *mean, float *along) {
    float grads[256], values[256];
    transpose16(grad, 16, grads, 16);
    transpose16(y, 16, values, 16);
    for (int lane = 0; lane < 16; lane += AP_LANES) {
        vf_store(mean + lane, total_down(grads + lane, 16, 16) / 16.0f);
        vf_store(along + lane, dot_down(grads + lane, values + lane, 16, 16) / 16.0f);
    }
}

static void norm_backward(ap_proxy *p, const ap_proxy_node *node, ap_proxy_place *place, int64_t batch) {
    ap_proxy_place *source = &p->places[node->a];
    int64_t width = node->width, rows = batch * node->positions;
    float means[16], alongs[16];
    for (int64_t i = 0; i < rows; i++) {
        const float *y = place->value + i * width, *grad = place->grad + i * width;
        int is_together = width == 16 && i / 16 * 16 + 16 <= rows;
        if (is_together && i % 16 == 0) norm_sums(grad, y, means, alongs);
        float mean = is_together ? means[i % 16] : mean16(grad, width);
        float along = is_together ? alongs[i % 16] : dot16(grad, y, width) / (float)width;
        for (int64_t j = 0; j < width; j += AP_LANES) {
            vf x = (vf_load(grad + j) - mean - vf_load(y + j) * along) * place->saved[i];
            give(source->grad + i * width + j, x, source);
        }
    }
}

static void add_forward(ap_proxy *p, const ap_proxy_node *node, ap_proxy_place *place, int64_t batch) {
    const float *a = p->places[node->a].value, *b = p->places[node->b].value;
    for (int64_t i = 0; i < batch * place->size; i += AP_LANES)
        vf_store(place->value + i, vf_load(a + i) + vf_load(b + i));
}

static void add_backward(ap_proxy *p, const ap_proxy_node *node, ap_proxy_place *place, int64_t batch) {
    ap_proxy_place *sources[2] = {&p->places[node->a], &p->places[node->b]};
    for (int s = 0; s < 2; s++)
        for (int64_t i = 0; i < batch * place->size && sources[s]->has_grad; i += AP_LANES)
            give(sources[s]->grad + i, vf_load(place->grad + i), sources[s]);
}

/* ---- attention: [positions, 3 width] -> [positions, width]; weights [keys, queries] are kept in `saved` ---- */

/* of columns */
static void softmax_down(float *x, int64_t n, float factor) {
    for (int64_t j = 0; j < n; j += AP_LANES) {
        float *column = x + j;
        vf largest = largest_down(column, n, n);
        for (int64_t i = 0; i < n; i++)
            vf_store(column + i * n, vf_exp((vf_load(column + i * n) - largest) * factor));
        vf inverse = 1.0f / (total_down(column, n, n) / (float)n * (float)n);
        for (int64_t i = 0; i < n; i++) vf_store(column + i * n, vf_load(column + i * n) * inverse);
    }
}

/* its gradient, in place of that of the weights */
static void unsoftmax_down(float *grad, const float *weights, int64_t n, float factor) {
    for (int64_t j = 0; j < n; j += AP_LANES) {
        vf along = dot_down(grad + j, weights + j, n, n);
        for (int64_t i = j; i < n * n; i += n)
            vf_store(grad + i, (vf_load(grad + i) - along) * vf_load(weights + i) * factor);
    }
}

static void attention_forward(ap_proxy *p, const ap_proxy_node *node, ap_proxy_place *place, int64_t batch) {
    int64_t width = node->width, positions = node->positions, depth = width / node->extra, row = 3 * width;
    float *queries = p->scratch;
    for (int64_t i = 0; i < batch * node->extra; i++) {
        int64_t sample = i / node->extra, head = i % node->extra * depth;
        const float *q = p->places[node->a].value + sample * positions * row + head, *k = q + width, *v = k + width;
        float *weights = place->saved + i * positions * positions;
        transpose(q, row, positions, depth, queries, positions);
        product scores = {.m = positions, .n = positions, .k = depth, .a = k, .a_row = row, .a_col = 1, .b = queries,
                          .b_row = positions, .c = weights, .c_row = positions};
        multiply(&scores);
        softmax_down(weights, positions, 1.0f / sqrtf((float)depth));
        product mixed = {.m = positions, .n = depth, .k = positions, .a = weights, .a_row = 1, .a_col = positions,
                         .b = v, .b_row = row, .c = place->value + sample * place->size + head, .c_row = width};
        multiply(&mixed);
    }
}

static void attention_backward(ap_proxy *p, const ap_proxy_node *node, ap_proxy_place *place, int64_t batch) {
    int64_t width = node->width, positions = node->positions, depth = width / node->extra, row = 3 * width;
    ap_proxy_place *source = &p->places[node->a];
    float *grads = p->scratch, *scores = grads + depth * positions, factor = 1.0f / sqrtf((float)depth);
    for (int64_t i = 0; i < batch * node->extra; i++) {
        int64_t sample = i / node->extra, head = i % node->extra * depth, at = sample * positions * row + head;
        const float *q = source->value + at, *k = q + width, *v = k + width;
        const float *weights = place->saved + i * positions * positions, *grad = place->grad + sample * place->size + head;
        transpose(grad, width, positions, depth, grads, positions);
        product to_weights = {.m = positions, .n = positions, .k = depth, .a = v, .a_row = row, .a_col = 1,
                              .b = grads, .b_row = positions, .c = scores, .c_row = positions};
        multiply(&to_weights);
        unsoftmax_down(scores, weights, positions, factor);
        float *to = source->grad + at;
        product parts[3] = {
            {.m = positions, .n = depth, .k = positions, .a = scores, .a_row = 1, .a_col = positions, .b = k},
            {.m = positions, .n = depth, .k = positions, .a = scores, .a_row = positions, .a_col = 1, .b = q},
            {.m = positions, .n = depth, .k = positions, .a = weights, .a_row = positions, .a_col = 1, .b = grad},
        };
        for (int part = 0; part < 3; part++) {
            parts[part].b_row = part == 2 ? width : row;
            parts[part].c = to + part * width;
            parts[part].c_row = row;
            parts[part].accumulates = source->consumers > 1;
            multiply(&parts[part]);
        }
    }
}

/* ---- the whole graph ---- */

static void forward(ap_proxy *p, int64_t batch, int is_plain) {
    for (int i = 1; i < p->spec.node_count; i++) {
        const ap_proxy_node *node = &p->spec.nodes[i];
        ap_proxy_place *place = &p->places[i];
        switch (node->kind) {
        case AP_NODE_LINEAR: linear_forward(p, node, place, batch, is_plain); break;
        case AP_NODE_PATCHES: pass_patches(p, node, place, batch, 0); break;
        case AP_NODE_MEAN: mean_forward(p, node, place, batch); break;
        case AP_NODE_NORM: norm_forward(p, node, place, batch); break;
        case AP_NODE_ATTENTION: attention_forward(p, node, place, batch); break;
        case AP_NODE_ADD: add_forward(p, node, place, batch); break;
        default: recurrent_forward(p, node, place, batch, is_plain);
        }
    }
}

static void backward(ap_proxy *p, int64_t batch) {
    for (int i = 1; i < p->spec.node_count - 1; i++)
        if (p->places[i].consumers > 1) memset(p->places[i].grad, 0, (size_t)(batch * p->places[i].size) * 4);
    for (int i = p->spec.node_count - 1; i > 0; i--) {
        const ap_proxy_node *node = &p->spec.nodes[i];
        ap_proxy_place *place = &p->places[i];
        if (node->kind == AP_NODE_LINEAR) linear_backward(p, node, place, batch);
        if (node->kind == AP_NODE_RECURRENT) recurrent_backward(p, node, place, batch);
        if (node->kind == AP_NODE_ADD) add_backward(p, node, place, batch);
        if (!p->places[node->a].has_grad) continue;
        switch (node->kind) {
        case AP_NODE_PATCHES: pass_patches(p, node, place, batch, 1); break;
        case AP_NODE_MEAN: mean_backward(p, node, place, batch); break;
        case AP_NODE_NORM: norm_backward(p, node, place, batch); break;
        case AP_NODE_ATTENTION: attention_backward(p, node, place, batch); break;
        default: break;
        }
    }
}
