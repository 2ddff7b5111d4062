/* What follows an int8 matmul. */
#include <stdlib.h>

#include "kernels.h"

typedef struct {
    const int32_t *sums;
    int64_t cols;
    const float *x_scale, *inv_scales, *bias;
    uint16_t *y;
} dequantize_job;

static void dequantize_rows(void *context, int64_t begin, int64_t end) {
    const dequantize_job *job = context;
    for (int64_t row = begin; row < end; row++)
        ap_active()->dequantize(job->sums + row * job->cols, job->cols, 1.0f / job->x_scale[row], job->inv_scales,
                                job->bias, job->y + row * job->cols);
}

int ap_dequantize(const int32_t *sums, int64_t rows, int64_t cols, const float *x_scale, const float *w_scale,
                  const float *bias, void *y, int threads) {
    float *inv_scales = malloc((size_t)(cols + 1) * sizeof(float));
    if (!inv_scales) return -1;
    for (int64_t i = 0; i < cols; i++) inv_scales[i] = 1.0f / w_scale[i];
    dequantize_job job = {sums, cols, x_scale, inv_scales, bias, y};
    ap_parallel(rows, ap_team(rows * cols, threads), dequantize_rows, &job);
    free(inv_scales);
    return 0;
}
