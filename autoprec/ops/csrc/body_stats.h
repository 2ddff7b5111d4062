/* Statistics of one range. Included once per ISA.
 *
 * Squares go to AP_SUMS float sums, which are added up in double every AP_BLOCK entries. Which entry goes to which sum
 * depends neither on the width of a vector nor on the format, so that all ISAs add in one order and a gradient has the
 * same norm in bf16 as after a cast to fp32. */

#define AP_SUMS 64
#define AP_BLOCK 2048
#define AP_VECTORS (AP_SUMS / AP_LANES)

/* largest magnitudes of a range whose squares neither overflow nor vanish in a sum of AP_BLOCK of them */
static const float LEAST = 0x1p-50f, MOST = 0x1p50f;

typedef struct {
    vf squares[AP_VECTORS];
    vi largest, zero, below[2];
} vector_sums;

AP_INLINE float as_float(int32_t pattern) {
    float x;
    memcpy(&x, &pattern, 4);
    return x;
}

AP_INLINE int32_t as_pattern(float x) {
    int32_t pattern;
    memcpy(&pattern, &x, 4);
    return pattern;
}

AP_INLINE int32_t lanes_max(vi x) {
    int32_t largest = 0;
    for (int lane = 0; lane < AP_LANES; lane++) largest = x[lane] > largest ? x[lane] : largest;
    return largest;
}

AP_INLINE int64_t lanes_sum(vi x) {
    int64_t sum = 0;
    for (int lane = 0; lane < AP_LANES; lane++) sum += x[lane];
    return sum;
}

AP_INLINE void add_lanes(vector_sums *v, int slot, vu pattern, const int32_t tiny[2], int has_counts) {
    vi magnitude = (vi)(pattern & AP_MAGNITUDE);
    v->squares[slot] += (vf)magnitude * (vf)magnitude;
    v->largest = vi_max(v->largest, magnitude);
    if (has_counts) {
        v->zero = vi_count_less(v->zero, magnitude, vi_set(1));
        v->below[0] = vi_count_less(v->below[0], magnitude, vi_set(tiny[0]));
        v->below[1] = vi_count_less(v->below[1], magnitude, vi_set(tiny[1]));
    }
}

AP_INLINE void add_row(vector_sums *v, const void *x, int format, const int32_t tiny[2], int has_counts) {
    for (int slot = 0; slot < AP_VECTORS; slot++)
        add_lanes(v, slot, ap_load_pattern(x, format, slot * AP_LANES), tiny, has_counts);
}

AP_INLINE double take_squares(vector_sums *v) {
    float sums[AP_SUMS];
    memcpy(sums, v->squares, sizeof sums);
    memset(v->squares, 0, sizeof v->squares);
    for (int width = AP_SUMS / 2; width > 8; width /= 2)
        for (int i = 0; i < width; i++) sums[i] += sums[i + width];
    double total = 0;
    for (int i = 0; i < 16; i++) total += sums[i];
    return total;
}

/* in double and entry by entry, for ranges with entries that are not finite, very large, or all very small */
static void add_carefully(const void *x, int format, int64_t n, ap_sums *sums) {
    float values[AP_LANES];
    for (int64_t i = 0; i < n; i++) {
        if (i % AP_LANES == 0) {
            int64_t rest = ap_min(AP_LANES, n - i);
            decode((const char *)x + i * ap_bytes(format), format, rest, values);
        }
        float size = fabsf(values[i % AP_LANES]);
        if (as_pattern(size) >= (int32_t)AP_INF) {
            sums->nonfinite++;
        } else {
            sums->square_sum += (double)size * size;
            sums->amax = size > sums->amax ? size : sums->amax;
        }
    }
}

AP_INLINE void stats_as(const void *x, int format, int64_t n, const int32_t tiny[2], int has_counts, ap_sums *sums) {
    const char *bytes = x;
    vector_sums v = {0};
    double square_sum = 0;
    int64_t i = 0, padding = 0;
    while (i + AP_SUMS <= n) {
        int64_t stop = ap_min(i + AP_BLOCK, n);
        for (; i + AP_SUMS <= stop; i += AP_SUMS) add_row(&v, bytes + i * ap_bytes(format), format, tiny, has_counts);
        square_sum += take_squares(&v);
    }
    if (i < n) {
        float rest[AP_SUMS] = {0};
        padding = AP_SUMS - (n - i);
        memcpy(rest, bytes + i * ap_bytes(format), (size_t)(n - i) * (size_t)ap_bytes(format));
        add_row(&v, rest, format, tiny, has_counts);
        square_sum += take_squares(&v);
    }
    float amax = as_float(lanes_max(v.largest));
    if (amax == 0.0f || (amax >= LEAST && amax <= MOST)) {
        sums->square_sum += square_sum;
        sums->amax = amax > sums->amax ? amax : sums->amax;
    } else {
        add_carefully(x, format, n, sums);
    }
    if (has_counts) {
        sums->zero += lanes_sum(v.zero) - padding;
        /* zeros are below every positive limit, nothing is below a limit of zero */
        for (int k = 0; k < 2; k++) sums->below[k] += lanes_sum(v.below[k]) - (tiny[k] > 0 ? padding : 0);
    }
}

AP_INLINE void stats_counted(const void *x, int format, int64_t n, const int32_t tiny[2], ap_sums *sums) {
    if (tiny[0] > 0 || tiny[1] > 0) {
        stats_as(x, format, n, tiny, 1, sums);
    } else {
        stats_as(x, format, n, tiny, 0, sums);
    }
}

static void stats(const void *x, int format, int64_t n, const float tiny[2], ap_sums *sums) {
    int32_t limits[2] = {as_pattern(tiny[0]), as_pattern(tiny[1])};
    switch (format) {
    case AP_BF16: stats_counted(x, AP_BF16, n, limits, sums); break;
    case AP_FP16: stats_counted(x, AP_FP16, n, limits, sums); break;
    default: stats_counted(x, AP_FP32, n, limits, sums);
    }
}

AP_INLINE float amax_as(const void *x, int format, int64_t n) {
    vi largest = vi_set(0);
    int64_t i = 0;
    for (; i + AP_LANES <= n; i += AP_LANES)
        largest = vi_max(largest, (vi)(ap_load_pattern(x, format, i) & AP_MAGNITUDE));
    if (i < n) {
        float rest[AP_LANES] = {0};
        memcpy(rest, (const char *)x + i * ap_bytes(format), (size_t)(n - i) * (size_t)ap_bytes(format));
        largest = vi_max(largest, (vi)(ap_load_pattern(rest, format, 0) & AP_MAGNITUDE));
    }
    return as_float(lanes_max(largest));
}

static float amax(const void *x, int format, int64_t n) {
    switch (format) {
    case AP_BF16: return amax_as(x, AP_BF16, n);
    case AP_FP16: return amax_as(x, AP_FP16, n);
    default: return amax_as(x, AP_FP32, n);
    }
}
