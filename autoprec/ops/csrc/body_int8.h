/* The parts of int8 matmuls around the matmul itself. Included once per ISA. */

typedef uint8_t bytes16 __attribute__((vector_size(16)));

/* 16 x 16 bytes; four rounds of interleaving row i with row i + 8 */
AP_INLINE void transpose16(bytes16 rows[16]) {
    for (int round = 0; round < 4; round++) {
        bytes16 next[16];
        for (int i = 0; i < 8; i++) {
            next[2 * i] = __builtin_shufflevector(rows[i], rows[i + 8], 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6,
                                                  22, 7, 23);
            next[2 * i + 1] = __builtin_shufflevector(rows[i], rows[i + 8], 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13,
                                                      29, 14, 30, 15, 31);
        }
        memcpy(rows, next, sizeof next);
    }
}

/* scale of an int8 row or column, NaN if it holds an entry that is not finite */
AP_INLINE float int8_scale(float amax) {
    if (!(amax < INFINITY)) return NAN;
    return AP_INT8_MAX / (amax < 1e-12f ? 1e-12f : amax);
}

#define AP_STRIP 64

static void column_scales(const float *x, int64_t rows, int64_t stride, int64_t cols, float scales[AP_STRIP]) {
    int32_t largest[AP_STRIP] = {0};
    for (int64_t row = 0; row < rows; row++)
        for (int64_t col = 0; col < cols; col++) {
            int32_t magnitude = as_pattern(x[row * stride + col]) & 0x7FFFFFFF;
            largest[col] = magnitude > largest[col] ? magnitude : largest[col];
        }
    for (int64_t col = 0; col < cols; col++) scales[col] = int8_scale(as_float(largest[col]));
}

static void transpose_rows(const float *x, int64_t rows, int64_t stride, int64_t cols, int8_t *values, float *scales) {
    float padded[AP_STRIP] = {0};
    column_scales(x, rows, stride, cols, padded);
    memcpy(scales, padded, (size_t)cols * 4);
    for (int64_t first = 0; first < rows; first += 16) {
        int64_t count = rows - first < 16 ? rows - first : 16;
        uint8_t tile[16][AP_STRIP] = {{0}};
        for (int64_t row = 0; row < count; row++) {
            float line[AP_STRIP] = {0};
            memcpy(line, x + (first + row) * stride, (size_t)cols * 4);
            for (int col = 0; col < AP_STRIP; col += AP_LANES) {
                vf scaled = vf_load(line + col) * vf_load(padded + col);
                vu_store8(tile[row] + col, (vu)to_int8(scaled, 0));
            }
        }
        for (int64_t col = 0; col < cols; col += 16) {
            bytes16 block[16];
            for (int row = 0; row < 16; row++) memcpy(&block[row], tile[row] + col, 16);
            transpose16(block);
            for (int64_t k = 0; k < 16 && col + k < cols; k++)
                memcpy(values + (col + k) * rows + first, &block[k], (size_t)count);
        }
    }
}

AP_INLINE vf dequantized(const int32_t *sums, float inv_scale, const float *inv_scales, const float *bias) {
    vi integers;
    memcpy(&integers, sums, sizeof integers);
    vf y = __builtin_convertvector(integers, vf) * inv_scale * vf_load(inv_scales);
    return bias ? y + vf_load(bias) : y;
}

static void dequantize(const int32_t *sums, int64_t n, float inv_scale, const float *inv_scales, const float *bias,
                       uint16_t *y) {
    int64_t i = 0;
    for (; i + AP_LANES <= n; i += AP_LANES) {
        vf values = dequantized(sums + i, inv_scale, inv_scales + i, bias ? bias + i : 0);
        vu_store16(y + i, ap_nearest_bf16((vu)values));
    }
    for (; i < n; i++) {
        float value = (float)sums[i] * inv_scale * inv_scales[i];
        vu pattern = vu_set((uint32_t)as_pattern(bias ? value + bias[i] : value));
        y[i] = (uint16_t)ap_nearest_bf16(pattern)[0];
    }
}
