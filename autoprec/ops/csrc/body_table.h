/* The table of one ISA's kernels. Included once per ISA. */
const ap_kernels AP_TABLE = {
    .name = AP_TABLE_NAME,
    .stats = stats,
    .amax = amax,
    .decode = decode,
    .encode = encode,
    .round = round_values,
    .random = random_words,
    .adam = adam,
    .sgd = sgd,
    .column_amax = column_amax,
    .transpose_tile = transpose_tile,
    .dequantize = dequantize,
    .proxy_begin = proxy_begin,
    .proxy_window = proxy_window,
};
