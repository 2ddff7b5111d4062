/* Finds copies that are no longer what their weights would give, by a few entries of each. */
#include <math.h>
#include <string.h>

#include "kernels.h"

/* the stream of random words that places are drawn from; no step gets there */
#define OFFSET (UINT64_C(1) << 63)
/* entries that are compared together: two words for each fill one group */
#define AT_ONCE (AP_GROUP / 2)

static int is_same(float a, float b) {
    uint32_t patterns[2];
    memcpy(&patterns[0], &a, 4);
    memcpy(&patterns[1], &b, 4);
    return patterns[0] == patterns[1] || (isnan(a) && isnan(b));
}

/* from where on a scaled weight would have had another scale: half a step beyond the largest value */
static float limit_of(int64_t format) { return format == AP_INT8 ? 127.5f : format == AP_E4M3 ? 464.0f : INFINITY; }

static int is_one_stale(const ap_parameter *p, const int64_t *places, int64_t count) {
    const ap_kernels *kernels = ap_active();
    const ap_copy *copy = &p->copy;
    int format = (int)copy->format, bytes = ap_bytes(format);
    float weights[AT_ONCE], limit = limit_of(format);
    char stored[2 * AT_ONCE], expected[2 * AT_ONCE];
    for (int64_t k = 0; k < count; k++) {
        float scale = format == AP_INT8 ? copy->scale[places[k] / p->cols] : format == AP_E4M3 ? *copy->scale : 1.0f;
        weights[k] = p->param[places[k]] * scale;
        if (limit < INFINITY && fabsf(weights[k]) >= limit) return 1;
        memcpy(stored + k * bytes, (const char *)copy->values + places[k] * bytes, (size_t)bytes);
    }
    kernels->encode(weights, count, 1.0f, format, format == AP_E4M3, NULL, expected);
    float found[AT_ONCE], wanted[AT_ONCE];
    kernels->decode(stored, format, count, found);
    kernels->decode(expected, format, count, wanted);
    for (int64_t k = 0; k < count; k++)
        if (!is_same(found[k], wanted[k])) return 1;
    return 0;
}

static int is_stale(const ap_parameter *p, uint64_t first_word, int64_t samples, uint64_t seed) {
    if (p->copy.format == AP_FP32 || !p->size) return 0;
    for (int64_t start = 0; start < samples; start += AT_ONCE) {
        int64_t count = ap_min(AT_ONCE, samples - start), places[AT_ONCE];
        uint32_t words[2 * AT_ONCE];
        ap_active()->random((ap_stream){seed, OFFSET, first_word + 2 * (uint64_t)start}, 2 * count, words);
        for (int64_t k = 0; k < count; k++) {
            uint64_t draw = (uint64_t)(words[2 * k] & 0x7FFFFFFF) << 32 | words[2 * k + 1];
            places[k] = (int64_t)(draw % (uint64_t)p->size);
        }
        if (is_one_stale(p, places, count)) return 1;
    }
    return 0;
}

int64_t ap_stale(int64_t n, const ap_parameter *parameters, int64_t samples, uint64_t seed) {
    for (int64_t i = 0; i < n; i++)
        if (is_stale(&parameters[i], 2 * (uint64_t)i * (uint64_t)samples, samples, seed)) return i;
    return -1;
}
