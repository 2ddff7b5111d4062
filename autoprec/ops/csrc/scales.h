/* Scales into the range of a format, and a maximum that threads share. */
#ifndef AP_SCALES_H
#define AP_SCALES_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "ap_ops.h"

/* the smallest amax that a scale is computed from; keeps scales of zeros finite */
#define AP_AMAX_FLOOR 1e-12

static inline double ap_largest(int format) {
    switch (format) {
    case AP_BF16: return 0x1.FEp127;
    case AP_FP16: return 65504.0;
    case AP_E4M3: return 448.0;
    case AP_E5M2: return 57344.0;
    default: return 0x1.FFCp127; /* tf32 */
    }
}

static inline float ap_scale(int format, float amax) {
    if (format == AP_INT8) {
        if (!(amax < INFINITY)) return NAN; /* such a row has no int8 values, so the scale carries it */
        return 127.0f / (amax < (float)AP_AMAX_FLOOR ? (float)AP_AMAX_FLOOR : amax);
    }
    double wide = amax < AP_AMAX_FLOOR ? AP_AMAX_FLOOR : amax;
    return (float)(ap_largest(format) / wide);
}

/* amaxes compare as the integers of their patterns, NaN above all others */
static inline void ap_raise(float *shared, float amax) {
    int32_t pattern, known;
    memcpy(&pattern, &amax, 4);
    __atomic_load((int32_t *)shared, &known, __ATOMIC_RELAXED);
    while (known < pattern &&
           !__atomic_compare_exchange((int32_t *)shared, &known, &pattern, 1, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
}

#endif
