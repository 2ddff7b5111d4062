/* Memory and life of the proxy trainings; what they compute is in body_proxy_*.h. */
#include <stdlib.h>
#include <string.h>

#include "proxy.h"

#define ALIGNMENT 64

/* ---- does a description make sense? ---- */

static int is_between(int64_t x, int64_t low, int64_t high) { return x >= low && x <= high; }

static int is_width(int64_t x) { return is_between(x, 16, 1024) && x % 16 == 0; }

static int is_square(int64_t x) {
    int64_t side = 1;
    while (side * side < x) side++;
    return side * side == x;
}

static int64_t patches_across(int64_t positions, int64_t stride) {
    int64_t side = 1;
    while (side * side < positions) side++;
    return (side - 1) / stride + 1;
}

static int is_node(const ap_proxy_spec *s, int i) {
    const ap_proxy_node *n = &s->nodes[i];
    if (!is_width(n->width) || !is_between(n->positions, 1, 64)) return 0;
    if (i == 0) return n->kind == AP_NODE_INPUT;
    if (!is_between(n->a, 0, i - 1)) return 0;
    const ap_proxy_node *a = &s->nodes[n->a];
    int is_alike = n->positions == a->positions && n->width == a->width;
    switch (n->kind) {
    case AP_NODE_LINEAR:
        return is_between(n->unit, 0, s->unit_count - 1) && n->positions == a->positions && is_between(n->extra, 0, 2);
    case AP_NODE_PATCHES: {
        if (!is_square(a->positions) || !is_between(n->extra, 1, 4)) return 0;
        int64_t across = patches_across(a->positions, n->extra);
        return n->width == 9 * a->width && n->positions == across * across;
    }
    case AP_NODE_MEAN: return n->positions == 1 && n->width == a->width;
    case AP_NODE_NORM: return is_alike;
    case AP_NODE_ATTENTION:
        return n->positions == a->positions && 3 * n->width == a->width && n->positions % 16 == 0 &&
               is_between(n->extra, 1, n->width / 16) && n->width % (16 * n->extra) == 0;
    case AP_NODE_ADD:
        return is_alike && is_between(n->b, 0, i - 1) && s->nodes[n->b].positions == n->positions &&
               s->nodes[n->b].width == n->width;
    case AP_NODE_RECURRENT:
        return is_between(n->unit, 0, s->unit_count - 1) && n->positions == 1 && n->width == a->width;
    default: return 0;
    }
}

static int is_spec(const ap_proxy_spec *s) {
    if (!is_between(s->node_count, 2, AP_PROXY_NODES) || !is_between(s->unit_count, 1, AP_PROXY_UNITS) ||
        !is_between(s->event_count, 0, AP_PROXY_EVENTS) || !is_between(s->max_batch, 1, 1024) ||
        !is_between(s->evaluation_samples, 1, 4096) || !is_width(s->teacher_width) ||
        !is_between(s->optimizer, AP_PROXY_SGD, AP_PROXY_ADAMW) || !is_between(s->classes, 2, 16))
        return 0;
    int owners[AP_PROXY_UNITS] = {0};
    for (int i = 0; i < s->node_count; i++) {
        if (!is_node(s, i)) return 0;
        int kind = s->nodes[i].kind;
        if (kind == AP_NODE_LINEAR || kind == AP_NODE_RECURRENT) owners[s->nodes[i].unit]++;
    }
    for (int u = 0; u < s->unit_count; u++)
        if (owners[u] != 1 || !(s->drift_steps[u] > 0.0f)) return 0;
    const ap_proxy_node *last = &s->nodes[s->node_count - 1];
    return last->kind == AP_NODE_LINEAR && last->positions == 1 && last->width >= s->classes && last->width <= 64;
}

/* ---- memory: measured and handed out by the same code ---- */

typedef struct {
    char *base;
    size_t used;
} arena;

static void *take(arena *a, int64_t count) {
    void *place = a->base ? a->base + a->used : NULL;
    a->used += ((size_t)count * 4 + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    return place;
}

static int64_t largest(int64_t a, int64_t b) { return a > b ? a : b; }

static void lay_out_units(ap_proxy *p, arena *a) {
    const ap_proxy_spec *s = &p->spec;
    p->parameter_count = 0;
    for (int i = 1; i < s->node_count; i++) {
        const ap_proxy_node *n = &s->nodes[i];
        if (n->kind != AP_NODE_LINEAR && n->kind != AP_NODE_RECURRENT) continue;
        ap_proxy_unit *unit = &p->units[n->unit];
        unit->in = s->nodes[n->a].width;
        unit->out = n->width;
        unit->rows = s->nodes[n->a].positions;
        unit->rounded_weight = take(a, unit->in * unit->out);
        unit->transposed = take(a, unit->in * unit->out);
        unit->rounded_input = take(a, s->max_batch * unit->rows * unit->in);
    }
    for (int u = 0; u < s->unit_count; u++) {
        ap_proxy_unit *unit = &p->units[u];
        unit->weight = p->parameter_count;
        unit->bias = unit->weight + unit->in * unit->out;
        p->parameter_count = unit->bias + unit->out;
    }
}

/* returns the largest number of values of a node */
static int64_t lay_out_nodes(ap_proxy *p, arena *a) {
    const ap_proxy_spec *s = &p->spec;
    int64_t most = 0;
    for (int i = 0; i < s->node_count; i++) p->places[i].consumers = p->places[i].has_grad = 0;
    for (int i = 0; i < s->node_count; i++) {
        const ap_proxy_node *n = &s->nodes[i];
        ap_proxy_place *place = &p->places[i];
        int64_t size = place->size = (int64_t)n->positions * n->width;
        place->has_grad = n->kind == AP_NODE_LINEAR || n->kind == AP_NODE_RECURRENT;
        if (i && p->places[n->a].has_grad) place->has_grad = 1;
        if (n->kind == AP_NODE_ADD && p->places[n->b].has_grad) place->has_grad = 1;
        if (i) p->places[n->a].consumers++;
        if (n->kind == AP_NODE_ADD) p->places[n->b].consumers++;
        place->value = take(a, s->max_batch * size);
        place->grad = take(a, s->max_batch * size);
        int64_t saved = n->kind == AP_NODE_NORM        ? n->positions
                        : n->kind == AP_NODE_ATTENTION ? (int64_t)n->extra * n->positions * n->positions
                        : n->kind == AP_NODE_RECURRENT ? (int64_t)s->nodes[n->a].positions * n->width
                                                       : 0;
        place->saved = take(a, s->max_batch * saved);
        most = largest(most, s->max_batch * size);
    }
    return most;
}

static void lay_out(ap_proxy *p, arena *a) {
    const ap_proxy_spec *s = &p->spec;
    const ap_proxy_node *input = &s->nodes[0];
    p->input_size = (int64_t)input->positions * input->width;
    lay_out_units(p, a);
    int64_t most = lay_out_nodes(p, a), batch = s->max_batch;
    p->parameters = take(a, p->parameter_count);
    p->grads = take(a, p->parameter_count);
    p->previous_grads = take(a, p->parameter_count);
    p->exp_avg = take(a, p->parameter_count);
    p->exp_avg_sq = take(a, p->parameter_count);
    p->teacher_in = take(a, input->width * s->teacher_width);
    p->teacher_out = take(a, s->teacher_width * 16);
    p->teacher_mean = take(a, 16);
    p->feature_scale = take(a, input->width);
    p->evaluation_input = take(a, s->evaluation_samples * p->input_size);
    p->evaluation_labels = take(a, s->evaluation_samples);
    p->labels = take(a, batch);
    p->rounded_grad = take(a, largest(most, batch * 16));
    p->words = take(a, largest(AP_TILE, batch * largest(p->input_size, 4)));
    /* of the teacher, and of attention over up to 64 positions */
    p->scratch = take(a, largest(batch * (input->positions + 1) * s->teacher_width, 64 * (1024 + 64)));
}

void *ap_proxy_create(const ap_proxy_spec *spec) {
    if (!is_spec(spec)) return NULL;
    ap_proxy *p = calloc(1, sizeof *p);
    if (!p) return NULL;
    p->spec = *spec;
    arena a = {0};
    lay_out(p, &a);
    p->memory = calloc(1, a.used + ALIGNMENT);
    if (!p->memory) {
        free(p);
        return NULL;
    }
    a = (arena){(char *)(((uintptr_t)p->memory + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT), 0};
    lay_out(p, &a);
    p->loss_scale = 1.0f;
    ap_active()->proxy_begin(p);
    return p;
}

void ap_proxy_free(void *proxy) {
    if (!proxy) return;
    free(((ap_proxy *)proxy)->memory);
    free(proxy);
}

/* ---- work ---- */

typedef struct {
    void *const *proxies;
    const ap_proxy_knobs *knobs;
    ap_proxy_window *windows;
} run_job;

static void run_proxies(void *context, int64_t begin, int64_t end) {
    const run_job *job = context;
    for (int64_t i = begin; i < end; i++)
        ap_active()->proxy_window(job->proxies[i], &job->knobs[i], &job->windows[i]);
}

void ap_proxy_run(int64_t n, void *const *proxies, const ap_proxy_knobs *knobs, ap_proxy_window *windows, int threads) {
    run_job job = {proxies, knobs, windows};
    ap_parallel(n, threads, run_proxies, &job);
}

int64_t ap_proxy_read(const void *proxy, int what, float *values) {
    const ap_proxy *p = proxy;
    const ap_proxy_place *logits = &p->places[p->spec.node_count - 1];
    const float *source = NULL;
    int64_t count = 0;
    switch (what) {
    case AP_PROXY_PARAMETERS: source = p->parameters, count = p->parameter_count; break;
    case AP_PROXY_GRADIENTS: source = p->grads, count = p->parameter_count; break;
    case AP_PROXY_INPUT: source = p->places[0].value, count = p->batch * p->input_size; break;
    case AP_PROXY_LOGITS: source = logits->value, count = p->batch * logits->size; break;
    case AP_PROXY_LABELS: count = p->batch; break;
    default: break;
    }
    for (int64_t i = 0; values && i < count; i++) values[i] = source ? source[i] : (float)p->labels[i];
    return count;
}

void ap_proxy_write_parameters(void *proxy, const float *values) {
    ap_proxy *p = proxy;
    memcpy(p->parameters, values, (size_t)p->parameter_count * 4);
}
