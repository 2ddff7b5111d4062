/* The kernels for x86 with AVX-512. Empty elsewhere. */
#if defined(__x86_64__)
#define AP_AVX512
#define AP_TARGET "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,bmi2"
#include "target_begin.h"

#include "body_casts.h"
#include "body_random.h"
#include "body_stats.h"
#include "body_steps.h"
#include "body_int8.h"
#include "body_proxy.h"

#define AP_TABLE ap_kernels_avx512
#define AP_TABLE_NAME "avx512"
#include "body_table.h"
#include "target_end.h"
#endif
