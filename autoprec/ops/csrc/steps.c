/* Optimizer steps over a list of parameters: one pass over memory, in chunks that threads share. */
#include <math.h>
#include <stddef.h>

#include "kernels.h"
#include "scales.h"

/* Elements per work item: its weights stay in the second-level cache until their int8 rows are written. */
#define CHUNK 16384
/* The same where rows are quantised: more of them, so that the maxima of columns are merged less often. */
#define ROWS_CHUNK (4 * CHUNK)

/* Elements of a step that moves twice what caches hold: most copies are gone before anybody reads them. */
#define STREAM_FROM (INT64_C(1) << 21)

typedef struct step_job step_job;
/* moves a part of a parameter; scalars belong to the thread */
typedef void update_part(const step_job *job, const ap_parameter *p, int64_t start, int64_t count, const ap_ends *ends,
                         const ap_adam_scalars *adam);

struct step_job {
    int64_t n;
    ap_parameter *parameters;
    const void *const *grads;
    const int8_t *grad_formats;
    update_part *update; /* NULL to write copies only */
    int is_streamed;
    const ap_adam_options *adam;
    ap_sgd_scalars sgd;
};

/* ---- work items ---- */

static int64_t chunk_size(const ap_parameter *p) {
    if (p->copy.format != AP_INT8 || p->cols == 0) return CHUNK;
    return (ROWS_CHUNK / p->cols > 1 ? ROWS_CHUNK / p->cols : 1) * p->cols; /* whole rows */
}

static int64_t update_chunks(const ap_parameter *p) {
    int64_t size = chunk_size(p);
    return (p->size + size - 1) / size;
}

static int64_t finish_chunks(const ap_parameter *p) {
    if (p->copy.format == AP_E4M3) return update_chunks(p);
    return p->copy.format == AP_INT8 && p->copy.transposed_values ? (p->rows + AP_STRIP - 1) / AP_STRIP : 0;
}

/* numbers the chunks of the list and returns how many there are */
static int64_t number_chunks(step_job *job, int64_t (*count)(const ap_parameter *)) {
    int64_t chunks = 0;
    for (int64_t i = 0; i < job->n; i++) {
        job->parameters[i].first_chunk = chunks;
        chunks += count(&job->parameters[i]);
    }
    return chunks;
}

/* the last parameter that begins at or before a chunk: those without chunks share their number with the next one */
static int64_t owner_of(const step_job *job, int64_t chunk, int64_t i) {
    while (i + 1 < job->n && job->parameters[i + 1].first_chunk <= chunk) i++;
    return i;
}

/* ---- the step of a chunk ---- */

static void set_adam_scalars(const ap_adam_options *o, double step, ap_adam_scalars *s) {
    s->lr = (float)o->lr;
    s->weight_decay = (float)o->weight_decay;
    s->keep = (float)(1.0 - o->lr * o->weight_decay);
    s->step_size = (float)(o->lr / (1.0 - pow(o->beta1, step)));
    s->one_minus_beta1 = (float)(1.0 - o->beta1);
    s->beta2 = (float)o->beta2;
    s->one_minus_beta2 = (float)(1.0 - o->beta2);
    s->bias_correction2_sqrt = (float)sqrt(1.0 - pow(o->beta2, step));
    s->inv_bias_correction2_sqrt = 1.0f / s->bias_correction2_sqrt;
    s->eps = (float)o->eps;
    s->grad_factor = (float)o->grad_factor;
    s->decoupled = (int)o->decoupled;
}

/* what a step reads and writes once, from an element on */
static ap_ends ends_at(const step_job *job, int64_t i, int64_t start) {
    const ap_copy *copy = &job->parameters[i].copy;
    int format = job->grad_formats[i], is_plain = copy->format == AP_BF16 || copy->format == AP_FP16;
    char *values = is_plain ? (char *)copy->values + 2 * start : NULL;
    int is_streamed = job->is_streamed && copy->format == AP_BF16 && (uintptr_t)values % 32 == 0;
    return (ap_ends){(const char *)job->grads[i] + start * ap_bytes(format), format, values, (int)copy->format,
                     is_streamed};
}

/* A 16-bit second moment is widened, moved and rounded in tiles that stay in the first-level cache. */
static void update_narrow_adam(const step_job *job, const ap_parameter *p, int64_t start, int64_t count, ap_ends ends,
                               const ap_adam_scalars *scalars) {
    const ap_kernels *kernels = ap_active();
    float moment[AP_TILE];
    uint32_t words[AP_TILE];
    for (int64_t stop = start + count; start < stop; start += AP_TILE) {
        int64_t n = ap_min(AP_TILE, stop - start);
        char *stored = (char *)p->exp_avg_sq + 2 * start;
        kernels->decode(stored, (int)p->moment_format, n, moment);
        kernels->adam(p->param + start, p->exp_avg + start, moment, n, &ends, scalars);
        kernels->random((ap_stream){job->adam->seed, job->adam->offset, p->element + (uint64_t)start}, n, words);
        /* inf would never come back down */
        kernels->encode(moment, n, 1.0f, (int)p->moment_format, 1, words, stored);
        ends.grad = (const char *)ends.grad + n * ap_bytes(ends.grad_format);
        if (ends.copy) ends.copy = (char *)ends.copy + 2 * n;
    }
}

static void update_adam(const step_job *job, const ap_parameter *p, int64_t start, int64_t count, const ap_ends *ends,
                        const ap_adam_scalars *scalars) {
    if (p->moment_format != AP_FP32) {
        update_narrow_adam(job, p, start, count, *ends, scalars);
    } else {
        float *moment = (float *)p->exp_avg_sq + start;
        ap_active()->adam(p->param + start, p->exp_avg + start, moment, count, ends, scalars);
    }
}

static void update_sgd(const step_job *job, const ap_parameter *p, int64_t start, int64_t count, const ap_ends *ends,
                       const ap_adam_scalars *unused) {
    (void)unused;
    ap_active()->sgd(p->param + start, p->exp_avg ? p->exp_avg + start : NULL, count, ends, &job->sgd);
}

static void write_rows(const ap_parameter *p, int64_t start, int64_t count) {
    const ap_kernels *kernels = ap_active();
    for (int64_t row = start / p->cols; row < (start + count) / p->cols; row++) {
        const float *x = p->param + row * p->cols;
        float scale = ap_scale(AP_INT8, kernels->amax(x, AP_FP32, p->cols));
        p->copy.scale[row] = scale;
        kernels->encode(x, p->cols, scale, AP_INT8, 0, NULL, (int8_t *)p->copy.values + row * p->cols);
    }
    for (int64_t col = 0; col < p->cols && p->copy.transposed_scale; col += AP_STRIP) {
        float amaxes[AP_STRIP];
        int64_t width = ap_min(AP_STRIP, p->cols - col);
        kernels->column_amax(p->param + start + col, count / p->cols, p->cols, width, amaxes);
        for (int64_t k = 0; k < width; k++) ap_raise(p->copy.transposed_scale + col + k, amaxes[k]);
    }
}

static void step_chunk(const step_job *job, int64_t i, int64_t start, int64_t count, const ap_adam_scalars *scalars) {
    const ap_kernels *kernels = ap_active();
    const ap_parameter *p = &job->parameters[i];
    int format = (int)p->copy.format;
    if (job->update) {
        ap_ends ends = ends_at(job, i, start);
        job->update(job, p, start, count, &ends, scalars);
    } else if (format == AP_BF16 || format == AP_FP16) {
        kernels->encode(p->param + start, count, 1.0f, format, 0, NULL, (uint16_t *)p->copy.values + start);
    }
    if (format == AP_E4M3) ap_raise(p->copy.scale, kernels->amax(p->param + start, AP_FP32, count));
    if (format == AP_INT8) write_rows(p, start, count);
}

static void step_chunks(void *context, int64_t begin, int64_t end) {
    const step_job *job = context;
    ap_adam_scalars scalars;
    float known_step = NAN;
    for (int64_t chunk = begin, i = 0; chunk < end; chunk++) {
        i = owner_of(job, chunk, i);
        const ap_parameter *p = &job->parameters[i];
        if (job->adam && *p->step != known_step) {
            known_step = *p->step;
            set_adam_scalars(job->adam, known_step, &scalars);
        }
        int64_t size = chunk_size(p), start = (chunk - p->first_chunk) * size;
        step_chunk(job, i, start, ap_min(size, p->size - start), &scalars);
    }
}

/* ---- copies that need the whole weight first ---- */

static void finish_copies(void *context, int64_t begin, int64_t end) {
    const step_job *job = context;
    const ap_kernels *kernels = ap_active();
    for (int64_t chunk = begin, i = 0; chunk < end; chunk++) {
        i = owner_of(job, chunk, i);
        const ap_parameter *p = &job->parameters[i];
        int64_t index = chunk - p->first_chunk;
        if (p->copy.format == AP_E4M3) {
            int64_t start = index * CHUNK;
            kernels->encode(p->param + start, ap_min(CHUNK, p->size - start), *p->copy.scale, AP_E4M3, 1, NULL,
                            (uint8_t *)p->copy.values + start);
        } else {
            int64_t row = index * AP_STRIP, rows = ap_min(AP_STRIP, p->rows - row);
            for (int64_t col = 0; col < p->cols; col += AP_STRIP)
                kernels->transpose_tile(p->param + row * p->cols + col, rows, p->cols, ap_min(AP_STRIP, p->cols - col),
                                        p->copy.transposed_scale + col,
                                        p->copy.transposed_values + col * p->rows + row, p->rows);
        }
    }
}

/* Scales of whole tensors and of columns hold the amax until it is complete; rows without entries have none to come. */
static void begin_copy(const ap_parameter *p) {
    const ap_copy *copy = &p->copy;
    if (copy->format == AP_E4M3) *copy->scale = 0.0f;
    if (copy->format != AP_INT8) return;
    for (int64_t i = 0; i < p->cols && copy->transposed_scale; i++) copy->transposed_scale[i] = 0.0f;
    for (int64_t i = 0; i < p->rows && !p->size; i++) copy->scale[i] = ap_scale(AP_INT8, 0.0f);
}

static void complete_scales(const ap_parameter *p) {
    const ap_copy *copy = &p->copy;
    if (copy->format == AP_E4M3) *copy->scale = ap_scale(AP_E4M3, *copy->scale);
    if (copy->format != AP_INT8) return;
    for (int64_t i = 0; i < p->cols && copy->transposed_scale; i++)
        copy->transposed_scale[i] = ap_scale(AP_INT8, copy->transposed_scale[i]);
}

static void run(step_job *job, int threads) {
    int64_t elements = 0;
    for (int64_t i = 0; i < job->n; i++) {
        elements += job->parameters[i].size;
        begin_copy(&job->parameters[i]);
    }
    job->is_streamed = elements >= STREAM_FROM;
    int team = ap_team(elements, threads);
    ap_parallel(number_chunks(job, update_chunks), team, step_chunks, job);
    for (int64_t i = 0; i < job->n; i++) complete_scales(&job->parameters[i]);
    int64_t chunks = number_chunks(job, finish_chunks);
    if (chunks) ap_parallel(chunks, team, finish_copies, job);
}

void ap_adam(int64_t n, ap_parameter *parameters, const void *const *grads, const int8_t *grad_formats,
             const ap_adam_options *options, int threads) {
    step_job job = {.n = n, .parameters = parameters, .grads = grads, .grad_formats = grad_formats,
                    .update = update_adam, .adam = options};
    for (int64_t i = 0; i < n; i++) *parameters[i].step += 1.0f;
    run(&job, threads);
}

void ap_sgd(int64_t n, ap_parameter *parameters, const void *const *grads, const int8_t *grad_formats,
            const ap_sgd_options *o, int threads) {
    step_job job = {.n = n, .parameters = parameters, .grads = grads, .grad_formats = grad_formats,
                    .update = update_sgd};
    job.sgd = (ap_sgd_scalars){(float)o->lr, (float)o->weight_decay, (float)o->momentum, (float)(1.0 - o->dampening),
                               (float)o->grad_factor, (int)o->nesterov, (int)o->is_first};
    run(&job, threads);
}

void ap_refresh(int64_t n, ap_parameter *parameters, int threads) {
    step_job job = {.n = n, .parameters = parameters};
    run(&job, threads);
}
