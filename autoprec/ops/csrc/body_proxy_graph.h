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

static void round_weight(ap_proxy *p, int u) {
    ap_proxy_unit *unit = &p->units[u];
    float amax;
    unit->used_weight = in_format(p, u, AP_TENSOR_WEIGHT, p->parameters + unit->weight, unit->in * unit->out,
                                  unit->weight_scale, 0.0f, unit->rounded_weight, &amax);
    p->window->weight_amax[u] = fmaxf(amax, p->window->weight_amax[u]);
    transpose(unit->used_weight, unit->in, unit->out, unit->transposed);
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

/* gradients of the weight and bias of a unit from n rows of input and incoming gradient */
static void weight_gradients(ap_proxy *p, int u, const float *input, const float *grad, int64_t n, int accumulates) {
    ap_proxy_unit *unit = &p->units[u];
    product weight = {.m = unit->in, .n = unit->out, .k = n, .a = input, .a_row = 1, .a_col = unit->in, .b = grad,
                      .b_row = unit->out, .c = p->grads + unit->weight, .c_row = unit->out, .accumulates = accumulates};
    multiply(&weight);
    float *bias = p->grads + unit->bias;
    for (int64_t j = 0; j < unit->out; j += AP_LANES) {
        vf sum = accumulates ? vf_load(bias + j) : vf_set(0.0f);
        for (int64_t i = 0; i < n; i++) sum += vf_load(grad + i * unit->out + j);
        vf_store(bias + j, sum);
    }
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
        round_weight(p, node->unit);
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
    if (!is_plain) round_weight(p, node->unit);
    for (int64_t t = 0; t < positions; t++) {
        float *state = place->saved + t * size;
        for (int64_t i = 0; i < batch; i++)
            memcpy(state + i * width, input + (i * positions + t) * width, (size_t)width * 4);
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
            memcpy(source->grad + (i * positions + t) * width, place->grad + i * width, (size_t)width * 4);
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

/* walks over the patches of one sample: forward gathers, backward adds to where the numbers came from */
static void walk_patches(const ap_proxy_node *from, const ap_proxy_node *node, float *image, float *patches,
                         int is_backward) {
    int64_t side = side_of(from->positions), across = side_of(node->positions), width = from->width;
    for (int64_t position = 0; position < node->positions; position++)
        for (int64_t k = 0; k < 9; k++, patches += width) {
            int64_t y = position / across * node->extra + k / 3 - 1, x = position % across * node->extra + k % 3 - 1;
            if (y < 0 || x < 0 || y >= side || x >= side) {
                if (!is_backward) memset(patches, 0, (size_t)width * 4);
                continue;
            }
            float *pixel = image + (y * side + x) * width;
            if (!is_backward) {
                memcpy(patches, pixel, (size_t)width * 4);
                continue;
            }
            for (int64_t j = 0; j < width; j += AP_LANES) vf_store(pixel + j, vf_load(pixel + j) + vf_load(patches + j));
        }
}

static void pass_patches(ap_proxy *p, const ap_proxy_node *node, ap_proxy_place *place, int64_t batch, int is_backward) {
    const ap_proxy_node *from = &p->spec.nodes[node->a];
    ap_proxy_place *source = &p->places[node->a];
    if (is_backward && source->consumers == 1) memset(source->grad, 0, (size_t)(batch * source->size) * 4);
    float *image = is_backward ? source->grad : source->value, *patches = is_backward ? place->grad : place->value;
    for (int64_t i = 0; i < batch; i++)
        walk_patches(from, node, image + i * source->size, patches + i * place->size, is_backward);
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

static void norm_forward(ap_proxy *p, const ap_proxy_node *node, ap_proxy_place *place, int64_t batch) {
    const float *x = p->places[node->a].value;
    int64_t width = node->width;
    for (int64_t i = 0; i < batch * node->positions; i++, x += width) {
        float *y = place->value + i * width, mean = mean16(x, width);
        for (int64_t j = 0; j < width; j += AP_LANES) vf_store(y + j, vf_load(x + j) - mean);
        float inverse = place->saved[i] = 1.0f / sqrtf(dot16(y, y, width) / (float)width + 1e-5f);
        for (int64_t j = 0; j < width; j += AP_LANES) vf_store(y + j, vf_load(y + j) * inverse);
    }
}

static void norm_backward(ap_proxy *p, const ap_proxy_node *node, ap_proxy_place *place, int64_t batch) {
    ap_proxy_place *source = &p->places[node->a];
    int64_t width = node->width;
    for (int64_t i = 0; i < batch * node->positions; i++) {
        const float *y = place->value + i * width, *grad = place->grad + i * width;
        float mean = mean16(grad, width), along = dot16(grad, y, width) / (float)width;
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

/* ---- attention: [positions, 3 width] -> [positions, width]; weights are kept in `saved` ---- */

static void softmax_row(float *x, int64_t n, float factor) {
    float largest = x[largest_of(x, (int)n)];
    for (int64_t j = 0; j < n; j += AP_LANES) vf_store(x + j, vf_exp((vf_load(x + j) - largest) * factor));
    float inverse = 1.0f / (mean16(x, n) * (float)n);
    for (int64_t j = 0; j < n; j += AP_LANES) vf_store(x + j, vf_load(x + j) * inverse);
}

static void attention_forward(ap_proxy *p, const ap_proxy_node *node, ap_proxy_place *place, int64_t batch) {
    int64_t width = node->width, positions = node->positions, depth = width / node->extra, row = 3 * width;
    float *keys = p->scratch;
    for (int64_t i = 0; i < batch * node->extra; i++) {
        int64_t sample = i / node->extra, head = i % node->extra * depth;
        const float *q = p->places[node->a].value + sample * positions * row + head, *k = q + width, *v = k + width;
        float *weights = place->saved + i * positions * positions;
        for (int64_t t = 0; t < positions; t++)
            for (int64_t d = 0; d < depth; d++) keys[d * positions + t] = k[t * row + d];
        product scores = {.m = positions, .n = positions, .k = depth, .a = q, .a_row = row, .a_col = 1, .b = keys,
                          .b_row = positions, .c = weights, .c_row = positions};
        multiply(&scores);
        for (int64_t t = 0; t < positions; t++)
            softmax_row(weights + t * positions, positions, 1.0f / sqrtf((float)depth));
        product mixed = {.m = positions, .n = depth, .k = positions, .a = weights, .a_row = positions, .a_col = 1,
                         .b = v, .b_row = row, .c = place->value + sample * place->size + head, .c_row = width};
        multiply(&mixed);
    }
}

static void attention_backward(ap_proxy *p, const ap_proxy_node *node, ap_proxy_place *place, int64_t batch) {
    int64_t width = node->width, positions = node->positions, depth = width / node->extra, row = 3 * width;
    ap_proxy_place *source = &p->places[node->a];
    float *values = p->scratch, *scores = values + depth * positions, factor = 1.0f / sqrtf((float)depth);
    for (int64_t i = 0; i < batch * node->extra; i++) {
        int64_t sample = i / node->extra, head = i % node->extra * depth, at = sample * positions * row + head;
        const float *q = source->value + at, *k = q + width, *v = k + width;
        const float *weights = place->saved + i * positions * positions, *grad = place->grad + sample * place->size + head;
        for (int64_t t = 0; t < positions; t++)
            for (int64_t d = 0; d < depth; d++) values[d * positions + t] = v[t * row + d];
        product to_weights = {.m = positions, .n = positions, .k = depth, .a = grad, .a_row = width, .a_col = 1,
                              .b = values, .b_row = positions, .c = scores, .c_row = positions};
        multiply(&to_weights);
        for (int64_t t = 0; t < positions; t++) {
            float *s = scores + t * positions;
            const float *w = weights + t * positions;
            float along = dot16(s, w, positions);
            for (int64_t j = 0; j < positions; j += AP_LANES)
                vf_store(s + j, (vf_load(s + j) - along) * vf_load(w + j) * factor);
        }
        float *to = source->grad + at;
        product parts[3] = {
            {.m = positions, .n = depth, .k = positions, .a = scores, .a_row = positions, .a_col = 1, .b = k},
            {.m = positions, .n = depth, .k = positions, .a = scores, .a_row = 1, .a_col = positions, .b = q},
            {.m = positions, .n = depth, .k = positions, .a = weights, .a_row = 1, .a_col = positions, .b = grad},
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
