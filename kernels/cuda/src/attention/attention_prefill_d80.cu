// Attention of chunks for heads of 80 numbers.
#include "attention_prefill_item.cuh"

KERNEL(attention_prefill_bf16_d80, AttentionParams, THREADS, prefill<bf16, 80>)
KERNEL(attention_prefill_f16_d80, AttentionParams, THREADS, prefill<f16, 80>)
