/* The proxy trainings. Included once per ISA, after casts, random words, statistics and steps. */
#include "proxy.h"

#include "body_proxy_math.h"

#include "body_proxy_data.h"

#include "body_proxy_graph.h"

#include "body_proxy_step.h"
