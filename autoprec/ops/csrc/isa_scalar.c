/* The kernels for any machine with a C compiler. */
#include "body_casts.h"
#include "body_random.h"
#include "body_stats.h"
#include "body_steps.h"
#include "body_int8.h"
#include "body_proxy.h"

#define AP_TABLE ap_kernels_scalar
#define AP_TABLE_NAME "scalar"
#include "body_table.h"
