/* Statistics of a list of tensors in one pass. */
#include <math.h>
#include <stdlib.h>

#include "kernels.h"

/* Partial sums are kept for chunks of this size and added in order, so the number of threads does not show. */
#define CHUNK 32768

typedef struct {
    int64_t n;
    const void *const *grads;
    const int64_t *sizes, *first_chunks;
    const int8_t *formats;
    const float *tiny, *tiny_lower;
    ap_sums *sums;
} stats_list;

static int64_t chunks_of(int64_t size) { return (size + CHUNK - 1) / CHUNK; }

static void measure_chunks(void *context, int64_t begin, int64_t end) {
    const stats_list *list = context;
    int64_t tensor = 0;
    for (int64_t chunk = begin; chunk < end; chunk++) {
        while (list->first_chunks[tensor + 1] <= chunk) tensor++;
        int64_t start = (chunk - list->first_chunks[tensor]) * CHUNK;
        int64_t count = ap_min(CHUNK, list->sizes[tensor] - start);
        float tiny[2] = {list->tiny[tensor], list->tiny_lower[tensor]};
        ap_sums sums = {0};
        const char *grad = (const char *)list->grads[tensor] + start * ap_bytes(list->formats[tensor]);
        ap_active()->stats(grad, list->formats[tensor], count, tiny, &sums);
        list->sums[chunk] = sums;
    }
}

static ap_sums sum_of(const ap_sums *parts, int64_t count) {
    ap_sums total = {0};
    for (int64_t i = 0; i < count; i++) {
        total.square_sum += parts[i].square_sum;
        total.amax = parts[i].amax > total.amax ? parts[i].amax : total.amax;
        total.nonfinite += parts[i].nonfinite;
        total.zero += parts[i].zero;
        total.below[0] += parts[i].below[0];
        total.below[1] += parts[i].below[1];
    }
    return total;
}

static float fraction_below(const ap_sums *sums, int which, float tiny, int64_t size) {
    int64_t nonzero = size - sums->zero - sums->nonfinite;
    int64_t small = tiny > 0 ? sums->below[which] - sums->zero : 0;
    return (float)small / (float)(nonzero < 1 ? 1 : nonzero);
}

static void fill_table(const stats_list *list, float *table) {
    int64_t n = list->n, nonfinite = 0;
    double square_sum = 0;
    for (int64_t i = 0; i < n; i++) {
        int64_t first = list->first_chunks[i];
        ap_sums sums = sum_of(list->sums + first, list->first_chunks[i + 1] - first);
        table[i] = sums.amax;
        table[n + i] = (float)sqrt(sums.square_sum);
        table[2 * n + i] = (float)sums.nonfinite;
        table[3 * n + i] = fraction_below(&sums, 0, list->tiny[i], list->sizes[i]);
        table[4 * n + i] = fraction_below(&sums, 1, list->tiny_lower[i], list->sizes[i]);
        square_sum += sums.square_sum;
        nonfinite += sums.nonfinite;
    }
    table[5 * n] = nonfinite ? INFINITY : (float)sqrt(square_sum);
}

int ap_grad_stats(int64_t n, const void *const *grads, const int64_t *sizes, const int8_t *formats, const float *tiny,
                  const float *tiny_lower, float *table, int threads) {
    int64_t chunks = 0, elements = 0;
    for (int64_t i = 0; i < n; i++) {
        chunks += chunks_of(sizes[i]);
        elements += sizes[i];
    }
    size_t sums_bytes = (size_t)chunks * sizeof(ap_sums);
    char *memory = malloc(sums_bytes + (size_t)(n + 1) * sizeof(int64_t));
    if (!memory) return -1;
    int64_t *first_chunks = (int64_t *)(memory + sums_bytes);
    first_chunks[0] = 0;
    for (int64_t i = 0; i < n; i++) first_chunks[i + 1] = first_chunks[i] + chunks_of(sizes[i]);
    stats_list list = {n, grads, sizes, first_chunks, formats, tiny, tiny_lower, (ap_sums *)memory};
    ap_parallel(chunks, ap_team(elements, threads), measure_chunks, &list);
    fill_table(&list, table);
    free(memory);
    return 0;
}
