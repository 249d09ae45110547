// Attention of chunks for heads of 256 numbers.
#include "attention_prefill_item.cuh"

KERNEL(attention_prefill_bf16_d256, AttentionParams, THREADS, prefill<bf16, 256>)
KERNEL(attention_prefill_f16_d256, AttentionParams, THREADS, prefill<f16, 256>)
