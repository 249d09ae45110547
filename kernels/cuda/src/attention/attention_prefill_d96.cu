// Attention of chunks for heads of 96 numbers.
#include "attention_prefill_item.cuh"

KERNEL(attention_prefill_bf16_d96, AttentionParams, THREADS, prefill<bf16, 96>)
KERNEL(attention_prefill_f16_d96, AttentionParams, THREADS, prefill<f16, 96>)
