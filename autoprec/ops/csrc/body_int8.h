/* The parts of int8 matmuls around the matmul itself. Included once per ISA. */

typedef uint8_t bytes16 __attribute__((vector_size(16)));

#if defined(__clang__)
#define AP_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define AP_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (bytes16){__VA_ARGS__})
#endif

/* rows i and i + 8 become rows 2 i and 2 i + 1 with their bytes taking turns; four times this transposes 16 x 16 bytes */
AP_INLINE void interleave(const bytes16 in[16], bytes16 out[16]) {
    for (int i = 0; i < 8; i++) {
        out[2 * i] = AP_SHUFFLE(in[i], in[i + 8], 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
        out[2 * i + 1] = AP_SHUFFLE(in[i], in[i + 8], 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
    }
}

/* scale of an int8 row or column, NaN if it holds an entry that is not finite */
AP_INLINE float int8_scale(float amax) {
    if (!(amax < INFINITY)) return NAN;
    return AP_INT8_MAX / (amax < 1e-12f ? 1e-12f : amax);
}

#define AP_STRIP 64

/* 64 columns of one row; what lies past the matrix reads as zero */
AP_INLINE void load_line(const float *x, int64_t cols, float line[AP_STRIP]) {
    if (cols == AP_STRIP) {
        memcpy(line, x, AP_STRIP * sizeof(float));
    } else {
        memset(line, 0, AP_STRIP * sizeof(float));
        memcpy(line, x, (size_t)cols * sizeof(float));
    }
}

static void column_scales(const float *x, int64_t rows, int64_t stride, int64_t cols, float scales[AP_STRIP]) {
    vi largest[AP_STRIP / AP_LANES] = {{0}};
    for (int64_t row = 0; row < rows; row++) {
        float line[AP_STRIP];
        load_line(x + row * stride, cols, line);
        for (int k = 0; k < AP_STRIP / AP_LANES; k++)
            largest[k] = vi_max(largest[k], (vi)((vu)vf_load(line + k * AP_LANES) & AP_MAGNITUDE));
    }
    for (int k = 0; k < AP_STRIP; k++) scales[k] = int8_scale(as_float(largest[k / AP_LANES][k % AP_LANES]));
}

/* a tile of int8 rows, transposed */
AP_INLINE void transpose_tile(uint8_t rows[AP_STRIP][AP_STRIP], uint8_t cols[AP_STRIP][AP_STRIP]) {
    for (int row = 0; row < AP_STRIP; row += 16)
        for (int col = 0; col < AP_STRIP; col += 16) {
            bytes16 block[16], other[16];
            for (int k = 0; k < 16; k++) memcpy(&block[k], rows[row + k] + col, 16);
            interleave(block, other);
            interleave(other, block);
            interleave(block, other);
            interleave(other, block);
            for (int k = 0; k < 16; k++) memcpy(cols[col + k] + row, &block[k], 16);
        }
}

static void transpose_rows(const float *x, int64_t rows, int64_t stride, int64_t cols, int8_t *values, float *scales) {
    float padded[AP_STRIP];
    column_scales(x, rows, stride, cols, padded);
    memcpy(scales, padded, (size_t)cols * sizeof(float));
    for (int64_t first = 0; first < rows; first += AP_STRIP) {
        int64_t count = rows - first < AP_STRIP ? rows - first : AP_STRIP;
        uint8_t tile[AP_STRIP][AP_STRIP], transposed[AP_STRIP][AP_STRIP];
        for (int64_t row = 0; row < count; row++) {
            float line[AP_STRIP];
            load_line(x + (first + row) * stride, cols, line);
            for (int k = 0; k < AP_STRIP; k += AP_LANES)
                vu_store8(tile[row] + k, (vu)to_int8(vf_load(line + k) * vf_load(padded + k), 0));
        }
        if (count < AP_STRIP) memset(tile[count], 0, (size_t)(AP_STRIP - count) * AP_STRIP);
        transpose_tile(tile, transposed);
        for (int64_t col = 0; col < cols; col++) {
            if (count == AP_STRIP) {
                memcpy(values + col * rows + first, transposed[col], AP_STRIP);
            } else {
                memcpy(values + col * rows + first, transposed[col], (size_t)count);
            }
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
