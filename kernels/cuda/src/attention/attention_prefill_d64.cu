// Attention of chunks for heads of 64 numbers.
#include "attention_prefill_item.cuh"

RESIDENT_KERNEL(attention_prefill_bf16_d64, AttentionParams, THREADS, 3, prefill<bf16, 64>)
RESIDENT_KERNEL(attention_prefill_f16_d64, AttentionParams, THREADS, 3, prefill<f16, 64>)
KERNEL(attention_prefill_fp8_bf16_d64, AttentionParams, THREADS, prefill<bf16, 64, true>)
KERNEL(attention_prefill_fp8_f16_d64, AttentionParams, THREADS, prefill<f16, 64, true>)
