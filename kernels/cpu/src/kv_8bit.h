// Keys and values in 8 bits (Pool::codes): how a token is held, and how its tile becomes one of a plain pool.
//
// The head_dim numbers of a token and KV head, of K or of V, have a scale and codes (codes.h). What these stand for is
// rounded once more to bfloat16 in a pool of that dtype: attention over them is attention over a plain pool that holds
// these numbers.
//
// A tile of 16 tokens has its codes first, then 16 scales:
//   K  [head_stride][16]
//   V  [16][head_stride]
#pragma once
#include "codes.h"
#include "kv.h"

// Calls `with` with an object of the pool's code.
template <typename F>
static inline auto with_code(const Pool& p, F with) {
  return p.codes == FP8_CODES ? with(Fp8Code()) : with(Int8Code());
}

// Where the codes and the scale of the token at `offset` of a part lie, and the distance between its codes.
struct CodeLane {
  int8_t* codes;
  float* scale;
  int64_t step;
};
static inline CodeLane code_lane(const Pool& p, char* part, bool is_value, int64_t offset) {
  char* tile = part + offset / TILE * tile_bytes(p);
  float* scales = reinterpret_cast<float*>(tile + TILE * p.head_stride);
  int8_t* codes = reinterpret_cast<int8_t*>(tile);
  const int64_t place = offset % TILE;
  if (is_value) return {codes + place * p.head_stride, scales + place, 1};
  return {codes + place, scales + place, TILE};
}

// Rounds `head_stride` numbers, the padding's zeros with them, into a part; `codes`: memory for as many.
template <typename Code>
static inline void write_codes(const Pool& p, char* part, bool is_value, int64_t offset, const float* x,
                               int8_t* codes) {
  const CodeLane lane = code_lane(p, part, is_value, offset);
  *lane.scale = code_scale(x, p.head_stride, Code::MAX);
  encode<Code>(x, *lane.scale, p.head_stride, codes);
  if (is_value) {
    memcpy(lane.codes, codes, p.head_stride);
    return;
  }
  for (int64_t d = 0; d < p.head_stride; d++) lane.codes[d * TILE] = codes[d];
}

// Two vectors as bfloat16, side by side in 32-bit words; a NaN of code_scale stays NaN.
static inline vu bfloat16_words(vf low, vf high) {
  const vu l = (vu)low, h = (vu)high;
  return (l + 0x7fff + (l >> 16 & 1)) >> 16 | ((h + 0x7fff + (h >> 16 & 1)) & 0xffff0000u);
}
static inline void store_words(char* p, vu words) { memcpy(p, &words, sizeof words); }

// A tile of K and one of V as a plain pool of T holds them. `ahead`: a tile that will be wanted soon.
template <typename T, typename Code>
static inline void widen_k(const char* tile, const char* ahead, int64_t stride, char* out) {
  const int8_t* codes = reinterpret_cast<const int8_t*>(tile);
  const float* scales = reinterpret_cast<const float*>(codes + TILE * stride);
  vf scale[TILE / LANES];
  for (int c = 0; c < TILE / LANES; c++) scale[c] = load(scales + c * LANES);
  for (int64_t at = 0; at < TILE * stride; at += TILE * 4) {
    __builtin_prefetch(ahead + at);
    for (int64_t d = at; d < at + TILE * 4; d += TILE * 2)
      for (int c = 0; c < TILE / LANES; c++) {
        const vf even = Code::decode(codes + d + c * LANES) * scale[c];
        const vf odd = Code::decode(codes + d + TILE + c * LANES) * scale[c];
        if constexpr (sizeof(T) == 4) {
          store(reinterpret_cast<float*>(out) + d + c * LANES, even);
          store(reinterpret_cast<float*>(out) + d + TILE + c * LANES, odd);
        } else {
          store_words(out + (d / 2 + c * LANES) * 4, bfloat16_words(even, odd));
        }
      }
  }
  __builtin_prefetch(ahead + TILE * stride);
}

template <typename T, typename Code>
static inline void widen_v(const char* tile, const char* ahead, int64_t stride, char* out) {
  const int8_t* codes = reinterpret_cast<const int8_t*>(tile);
  const float* scales = reinterpret_cast<const float*>(codes + TILE * stride);
  for (int64_t at = 0; at < TILE * stride; at += 64) __builtin_prefetch(ahead + at);
  __builtin_prefetch(ahead + TILE * stride);
  for (int j = 0; j < TILE; j += 2, codes += 2 * stride) {
    const vf scale = splat(scales[j]), next_scale = splat(scales[j + 1]);
    for (int64_t i = 0; i < stride; i += LANES) {
      const vf first = Code::decode(codes + i) * scale;
      const vf second = Code::decode(codes + stride + i) * next_scale;
      if constexpr (sizeof(T) == 4) {
        store(reinterpret_cast<float*>(out) + j * stride + i, first);
        store(reinterpret_cast<float*>(out) + (j + 1) * stride + i, second);
      } else {
        store_words(out + (j / 2 * stride + i) * 4, bfloat16_words(first, second));
      }
    }
  }
}
