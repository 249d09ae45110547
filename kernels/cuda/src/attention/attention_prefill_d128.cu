// Attention of chunks for heads of 128 numbers.
#include "attention_prefill_item.cuh"

KERNEL(attention_prefill_bf16_d128, AttentionParams, THREADS, prefill<bf16, 128>)
KERNEL(attention_prefill_f16_d128, AttentionParams, THREADS, prefill<f16, 128>)
KERNEL(attention_prefill_fp8_bf16_d128, AttentionParams, THREADS, prefill<bf16, 128, true>)
KERNEL(attention_prefill_fp8_f16_d128, AttentionParams, THREADS, prefill<f16, 128, true>)
