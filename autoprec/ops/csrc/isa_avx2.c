/* The kernels for x86 with AVX2, FMA and F16C. Empty elsewhere. */
#if defined(__x86_64__)
#define AP_AVX2
#define AP_TARGET "avx2,fma,f16c,bmi2"
#include "target_begin.h"

#include "body_casts.h"
#include "body_random.h"
#include "body_stats.h"
#include "body_steps.h"
#include "body_int8.h"
#include "body_proxy.h"

#define AP_TABLE ap_kernels_avx2
#define AP_TABLE_NAME "avx2"
#include "body_table.h"
#include "target_end.h"
#endif
