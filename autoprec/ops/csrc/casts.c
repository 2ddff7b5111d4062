/* Casts of whole tensors: blocks, scales and threads. */
#include <stddef.h>

#include "kernels.h"
#include "scales.h"

#define CHUNK 16384

typedef struct {
    const void *x;
    int x_format;
    int64_t rows, cols, block_rows, block_cols;
    int format, saturate;
    const uint64_t *random;
    void *y;
    float *scales, *amaxes;
    float factor, *amax; /* of a tensor with a single block or none */
} cast_job;

static void encode_range(const cast_job *job, int64_t start, int64_t n, float factor) {
    float values[AP_TILE];
    uint32_t words[AP_TILE];
    const ap_kernels *kernels = ap_active();
    for (int64_t i = start; i < start + n; i += AP_TILE) {
        int64_t count = ap_min(AP_TILE, start + n - i);
        const float *x = (const float *)job->x + i;
        if (job->x_format != AP_FP32) {
            kernels->decode((const char *)job->x + i * ap_bytes(job->x_format), job->x_format, count, values);
            x = values;
        }
        if (job->random) kernels->random((ap_stream){job->random[0], job->random[1], (uint64_t)i}, count, words);
        kernels->encode(x, count, factor, job->format, job->saturate, job->random ? words : NULL,
                        (char *)job->y + i * ap_bytes(job->format));
    }
}

static float amax_of_range(const cast_job *job, int64_t start, int64_t n) {
    return ap_active()->amax((const char *)job->x + start * ap_bytes(job->x_format), job->x_format, n);
}

static void flat_amax(void *context, int64_t begin, int64_t end) {
    const cast_job *job = context;
    int64_t start = begin * CHUNK, stop = ap_min(end * CHUNK, job->rows * job->cols);
    ap_raise(job->amax, amax_of_range(job, start, stop - start));
}

static void flat_encode(void *context, int64_t begin, int64_t end) {
    const cast_job *job = context;
    int64_t size = job->rows * job->cols;
    for (int64_t chunk = begin; chunk < end; chunk++) {
        int64_t start = chunk * CHUNK, count = ap_min(CHUNK, size - start);
        if (job->amax && !job->scales) ap_raise(job->amax, amax_of_range(job, start, count));
        encode_range(job, start, count, job->factor);
    }
}

static void cast_block(void *context, int64_t begin, int64_t end) {
    const cast_job *job = context;
    int64_t across = (job->cols + job->block_cols - 1) / job->block_cols;
    for (int64_t block = begin; block < end; block++) {
        int64_t row = block / across * job->block_rows, col = block % across * job->block_cols;
        int64_t last = ap_min(row + job->block_rows, job->rows), width = ap_min(job->block_cols, job->cols - col);
        float amax = 0.0f;
        for (int64_t i = row; i < last; i++) ap_raise(&amax, amax_of_range(job, i * job->cols + col, width));
        float scale = ap_scale(job->format, amax);
        job->scales[block] = scale;
        if (job->amaxes) job->amaxes[block] = amax;
        for (int64_t i = row; i < last; i++) encode_range(job, i * job->cols + col, width, scale);
    }
}

void ap_cast(const void *x, int x_format, int64_t rows, int64_t cols, int64_t block_rows, int64_t block_cols,
             int format, int saturate, float factor, const uint64_t *random, void *y, float *scales, float *amaxes,
             int threads) {
    cast_job job = {.x = x, .x_format = x_format, .rows = rows, .cols = cols, .block_rows = block_rows,
                    .block_cols = block_cols, .format = format, .saturate = saturate, .random = random, .y = y,
                    .scales = scales, .amaxes = amaxes, .factor = factor};
    int64_t size = rows * cols, chunks = (size + CHUNK - 1) / CHUNK;
    int team = ap_team(size, threads);
    if (scales && (block_rows < rows || block_cols < cols)) {
        int64_t down = (rows + block_rows - 1) / block_rows, across = (cols + block_cols - 1) / block_cols;
        ap_parallel(down * across, team, cast_block, &job);
        return;
    }
    float amax = 0.0f;
    job.amax = scales || amaxes ? &amax : NULL;
    if (scales) {
        if (size) ap_parallel(chunks, team, flat_amax, &job);
        job.factor = *scales = ap_scale(format, amax);
    }
    if (size) ap_parallel(chunks, team, flat_encode, &job);
    if (amaxes) *amaxes = amax;
}

static void restore_rows(void *context, int64_t begin, int64_t end) {
    const cast_job *job = context;
    int64_t across = (job->cols + job->block_cols - 1) / job->block_cols;
    for (int64_t row = begin; row < end; row++)
        for (int64_t col = 0; col < job->cols; col += job->block_cols) {
            int64_t start = row * job->cols + col, width = ap_min(job->block_cols, job->cols - col);
            float scale = job->scales[row / job->block_rows * across + col / job->block_cols];
            float *y = (float *)job->y + start;
            ap_active()->decode((const char *)job->x + start * ap_bytes(job->x_format), job->x_format, width, y);
            for (int64_t i = 0; i < width; i++) y[i] /= scale;
        }
}

void ap_restore(const void *x, int x_format, int64_t rows, int64_t cols, int64_t block_rows, int64_t block_cols,
                float *scales, float *y, int threads) {
    cast_job job = {.x = x, .x_format = x_format, .rows = rows, .cols = cols, .block_rows = block_rows,
                    .block_cols = block_cols, .y = y, .scales = scales};
    ap_parallel(rows, ap_team(rows * cols, threads), restore_rows, &job);
}

typedef struct {
    const float *x;
    int64_t cols;
    const int64_t *exponent_bits, *mantissa_bits;
    const uint8_t *is_finite_only;
    float *y;
} fake_job;

static void fake_rows(void *context, int64_t begin, int64_t end) {
    const fake_job *job = context;
    for (int64_t row = begin; row < end; row++)
        ap_active()->round(job->x + row * job->cols, job->cols, (int)job->exponent_bits[row],
                           (int)job->mantissa_bits[row], job->is_finite_only[row], job->y + row * job->cols);
}

void ap_fake_cast(const float *x, int64_t rows, int64_t cols, const int64_t *exponent_bits,
                  const int64_t *mantissa_bits, const uint8_t *is_finite_only, float *y, int threads) {
    fake_job job = {x, cols, exponent_bits, mantissa_bits, is_finite_only, y};
    ap_parallel(rows, ap_team(rows * cols, threads), fake_rows, &job);
}

void ap_random(uint64_t seed, uint64_t offset, uint64_t first, int64_t n, uint32_t *words) {
    ap_active()->random((ap_stream){seed, offset, first}, n, words);
}
