/* The parts of int8 matmuls around the matmul itself. Included once per ISA. */

typedef uint8_t bytes16 __attribute__((vector_size(16)));

#if defined(__clang__)
#define AP_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define AP_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (bytes16){__VA_ARGS__})
#endif

/* Rows i and i + 8 become rows 2 i and 2 i + 1 with their bytes taking turns; four times over, 16 x 16 bytes are
 * transposed. */
AP_INLINE void interleave(const bytes16 in[16], bytes16 out[16]) {
    for (int i = 0; i < 8; i++) {
        out[2 * i] = AP_SHUFFLE(in[i], in[i + 8], 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
        out[2 * i + 1] = AP_SHUFFLE(in[i], in[i + 8], 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
    }
}

/* one row of a tile: in place if it is whole, else from a copy in which zeros follow */
AP_INLINE const float *whole_line(const float *x, int64_t cols, float copy[AP_STRIP]) {
    if (cols == AP_STRIP) return x;
    memset(copy, 0, AP_STRIP * sizeof(float));
    memcpy(copy, x, (size_t)cols * sizeof(float));
    return copy;
}

static void column_amax(const float *x, int64_t rows, int64_t stride, int64_t cols, float *amaxes) {
    vi largest[AP_STRIP / AP_LANES] = {{0}};
    for (int64_t row = 0; row < rows; row++) {
        float copy[AP_STRIP];
        const float *line = whole_line(x + row * stride, cols, copy);
        for (int k = 0; k < AP_STRIP / AP_LANES; k++)
            largest[k] = vi_max(largest[k], (vi)((vu)vf_load(line + k * AP_LANES) & AP_MAGNITUDE));
    }
    memcpy(amaxes, largest, (size_t)cols * sizeof(float));
}

AP_INLINE void transpose_bytes(uint8_t rows[AP_STRIP][AP_STRIP], uint8_t cols[AP_STRIP][AP_STRIP]) {
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

static void transpose_tile(const float *x, int64_t rows, int64_t stride, int64_t cols, const float *scales,
                           int8_t *values, int64_t values_stride) {
    uint8_t tile[AP_STRIP][AP_STRIP], transposed[AP_STRIP][AP_STRIP];
    float scales_copy[AP_STRIP], copy[AP_STRIP];
    scales = whole_line(scales, cols, scales_copy);
    for (int64_t row = 0; row < rows; row++) {
        const float *line = whole_line(x + row * stride, cols, copy);
        for (int k = 0; k < AP_STRIP; k += AP_LANES)
            vu_store8(tile[row] + k, (vu)to_int8(vf_load(line + k) * vf_load(scales + k), 0));
    }
    if (rows < AP_STRIP) memset(tile[rows], 0, (size_t)(AP_STRIP - rows) * AP_STRIP);
    transpose_bytes(tile, transposed);
    for (int64_t col = 0; col < cols; col++) {
        if (rows == AP_STRIP) {
            memcpy(values + col * values_stride, transposed[col], AP_STRIP);
        } else {
            memcpy(values + col * values_stride, transposed[col], (size_t)rows);
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
        vu_store_upper16(y + i, ap_nearest_bf16((vu)values));
    }
    for (; i < n; i++) {
        float value = (float)sums[i] * inv_scale * inv_scales[i];
        vu pattern = vu_set((uint32_t)as_pattern(bias ? value + bias[i] : value));
        y[i] = (uint16_t)(ap_nearest_bf16(pattern)[0] >> 16);
    }
}
