/* From here to target_end.h functions may use the instructions named by AP_TARGET. */
#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target(AP_TARGET))), apply_to = function)
#else
#pragma GCC push_options
#define AP_PRAGMA(x) _Pragma(#x)
#define AP_GCC_TARGET(names) AP_PRAGMA(GCC target names)
AP_GCC_TARGET((AP_TARGET))
#endif
