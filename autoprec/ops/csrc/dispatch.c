/* Which kernels run, and on how many threads. */
#include <string.h>

#include "kernels.h"

#if defined(_OPENMP)
#include <omp.h>
#endif

/* elements that take about as long as starting a team */
#define AP_WORTH_A_THREAD 32768

static const ap_kernels *selected;

static const ap_kernels *find(const char *isa) {
    const ap_kernels *found[3];
    int count = 0;
#if defined(__x86_64__)
    __builtin_cpu_init();
    int has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    int has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                     __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (has_avx512) found[count++] = &ap_kernels_avx512;
    if (has_avx2) found[count++] = &ap_kernels_avx2;
#endif
    found[count++] = &ap_kernels_scalar;
    if (!isa) return found[0];
    for (int i = 0; i < count; i++)
        if (!strcmp(found[i]->name, isa)) return found[i];
    return NULL;
}

int ap_abi_version(void) { return AP_ABI_VERSION; }

int ap_select(const char *isa) {
    const ap_kernels *kernels = find(isa);
    if (kernels) selected = kernels;
    return kernels ? 0 : -1;
}

const ap_kernels *ap_active(void) {
    if (!selected) selected = find(NULL);
    return selected;
}

const char *ap_selected(void) { return ap_active()->name; }

int ap_team(int64_t elements, int threads) {
    int64_t most = elements / AP_WORTH_A_THREAD;
    return most < 1 ? 1 : most < threads ? (int)most : threads;
}

void ap_parallel(int64_t items, int threads, void (*body)(void *context, int64_t begin, int64_t end), void *context) {
#if defined(_OPENMP)
    if (threads > items) threads = (int)items;
    if (threads > 1) {
#pragma omp parallel num_threads(threads)
        {
            /* the runtime may give fewer than asked for */
            int64_t thread = omp_get_thread_num(), team = omp_get_num_threads();
            body(context, items * thread / team, items * (thread + 1) / team);
        }
        return;
    }
#else
    (void)threads;
#endif
    body(context, 0, items);
}
