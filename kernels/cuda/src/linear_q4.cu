// Products with matrices held in 4 bits, out[row] = x[row] weight^T + bias, for a few rows; and what unpacks a matrix.
//
// weight = scale (q - 8), or scale q - min where there are minima, with a scale and a minimum for each group of 128 or
// 32 inputs of an output. q - 8 is exact in 16 bits, products with x and their sums are float32 (mma), one sum a group:
//   out = bias + sum over groups of scale sum((q - 8) x) + (8 scale - min) sum(x), rounded once.
// A matrix is cut into tiles of 16 outputs (the rows of mma.m16n8k16) and units of UNIT inputs. Warp w of a block adds up
// units w, w + SLICES, ..., then the warps' sums are added in order: an order that the sizes of the matrix decide alone,
// so a row has the same bits whatever rows are beside it and whichever of these kernels computes it.
#include "numbers.cuh"

struct LinearQ4Params {
  const void* x;         // [rows, inputs]
  const uint4* words;    // [tiles, units, 2, 32 lanes]: see Lane
  const float* scales;   // [tiles, units, groups, TILE]
  const float* mins;     // as scales, or null
  const float* bias;     // [outputs], or null
  void* out;             // [rows, stride]
  int64_t stride;        // numbers from a row of out to the next
  int32_t rows;
  int32_t inputs;        // a multiple of 8
  int32_t outputs;
  int32_t groups;        // of a unit: 1 or 4
};

struct UnpackQ4Params {
  const uint4* words;  // these three as LinearQ4Params has them
  const float* scales;
  const float* mins;
  void* out;           // [outputs, inputs]
  int32_t inputs;      // a multiple of 8
  int32_t outputs;
  int32_t groups;
};

namespace {

constexpr int SLICES = 8;  // warps of a block
constexpr int THREADS = 32 * SLICES;
constexpr int STAGES = 2;  // units in the ring of a warp
constexpr int TILE = 16;              // outputs
constexpr int UNIT = 128;             // inputs
constexpr int CHUNK = 32;             // inputs of two mma: lane t of four has 8t .. 8t + 7
constexpr int CHUNKS = UNIT / CHUNK;
constexpr int TILE_WORDS = 64;        // uint4 of a tile and unit
constexpr int ROW_VECTORS = UNIT / VECTOR;  // of a row of x in a unit
constexpr int UNPACK_THREADS = 256, UNPACK_UNITS = UNPACK_THREADS / TILE_WORDS;

// Lane. With g = lane / 4 and t = lane % 4 a word holds inputs 8t .. 8t + 7 of a chunk and of one output: numbers i and
// i + 4 of it are inputs 8t + 2i and 8t + 2i + 1, a pair of the fragments of mma. The uint4 number v of a lane has output
// g of chunk 2v, output g + 8 of it, and the same of chunk 2v + 1.

template <typename T>
struct Numbers;
template <>
struct Numbers<bf16> {
  static constexpr uint32_t BASE = 0x43004300, MINUS_BASE = 0xc308c308, ONES = 0x3f803f80;  // 128, -136, 1
  static __device__ __forceinline__ uint32_t fma(uint32_t a, uint32_t b, uint32_t c) { return fma_bf16x2(a, b, c); }
  static __device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    mma_bf16(d, a, b0, b1);
  }
};
template <>
struct Numbers<f16> {
  static constexpr uint32_t BASE = 0x64006400, MINUS_BASE = 0xe408e408, ONES = 0x3c003c00;  // 1024, -1032, 1
  static __device__ __forceinline__ uint32_t fma(uint32_t a, uint32_t b, uint32_t c) { return fma_f16x2(a, b, c); }
  static __device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    mma_f16(d, a, b0, b1);
  }
};

// The numbers `pair` and `pair` + 4 of a word, less 8, in two halves: q added to a power of two that leaves its last
// digit worth 1, then the power and 8 taken away, both exact.
template <typename T>
__device__ __forceinline__ uint32_t pair_of(uint32_t word, int pair) {
  const uint32_t raised = (word >> 4 * pair & 0x000f000fu) | Numbers<T>::BASE;
  return Numbers<T>::fma(raised, Numbers<T>::ONES, Numbers<T>::MINUS_BASE);
}

__device__ __forceinline__ uint32_t word_of(const uint4& words, int i) {
  return i == 0 ? words.x : i == 1 ? words.y : i == 2 ? words.z : words.w;
}

// The TILES tiles of a warp from first_tile on, with 8 x COLUMNS rows of x.
template <typename T, int TILES, int COLUMNS>
struct Tiles {
  static constexpr int ROWS = 8 * COLUMNS;
  using Sums = float[TILES][COLUMNS][4];

  const LinearQ4Params& p;
  const int lane, units, tiles, first_tile;
  const int scale_vectors, tile_vectors;  // uint4 of a tile's scales, and of a tile and unit with words and minima

  __device__ __forceinline__ Tiles(const LinearQ4Params& p, int first_tile)
      : p(p),
        lane(threadIdx.x % 32),
        units((p.inputs + UNIT - 1) / UNIT),
        tiles((p.outputs + TILE - 1) / TILE),
        first_tile(first_tile),
        scale_vectors(p.groups * (TILE / 4)),
        tile_vectors(TILE_WORDS + (p.mins ? 2 : 1) * scale_vectors) {}

  // Starts to copy a unit to [TILES, words, scales, minima]. A tile behind the last is that one again.
  __device__ __forceinline__ void fetch(uint4* to, int unit) const {
#pragma unroll
    for (int i = 0; i < TILES; i++) {
      const int64_t at = static_cast<int64_t>(min(first_tile + i, tiles - 1)) * units + unit;
#pragma unroll
      for (int v = 0; v < 2; v++) cp_async_16(to + v * 32 + lane, p.words + at * TILE_WORDS + v * 32 + lane, true);
      to += TILE_WORDS;
      const int64_t scales = at * scale_vectors + lane;
      if (lane < scale_vectors) cp_async_16(to + lane, reinterpret_cast<const uint4*>(p.scales) + scales, true);
      to += scale_vectors;
      if (!p.mins) continue;
      if (lane < scale_vectors) cp_async_16(to + lane, reinterpret_cast<const uint4*>(p.mins) + scales, true);
      to += scale_vectors;
    }
  }

  // Adds a unit's products to the total. read_x(chunk, x): the lane's part of a chunk, 8 inputs of row lane / 4 of each
  // eight; called once for each chunk, in order.
  template <typename ReadX>
  __device__ __forceinline__ void add_unit(const uint4* from, const ReadX& read_x, Sums& total) const {
    Sums sums = {};
    float x_sums[COLUMNS][4] = {};
    const uint32_t ones[4] = {Numbers<T>::ONES, Numbers<T>::ONES, Numbers<T>::ONES, Numbers<T>::ONES};
#pragma unroll
    for (int v = 0; v < 2; v++) {
      uint4 words[TILES];
#pragma unroll
      for (int i = 0; i < TILES; i++) words[i] = from[i * tile_vectors + v * 32 + lane];
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int chunk = 2 * v + half;
        uint4 x[COLUMNS];
        read_x(chunk, x);
#pragma unroll
        for (int step = 0; step < 2; step++) {
          const int pair = 2 * step;
#pragma unroll
          for (int i = 0; i < TILES; i++) {
            const uint32_t upper = word_of(words[i], 2 * half), lower = word_of(words[i], 2 * half + 1);
            const uint32_t a[4] = {pair_of<T>(upper, pair), pair_of<T>(lower, pair), pair_of<T>(upper, pair + 1),
                                   pair_of<T>(lower, pair + 1)};
#pragma unroll
            for (int j = 0; j < COLUMNS; j++)
              Numbers<T>::mma(sums[i][j], a, word_of(x[j], pair), word_of(x[j], pair + 1));
          }
          if (!p.mins) continue;
#pragma unroll
          for (int j = 0; j < COLUMNS; j++)
            Numbers<T>::mma(x_sums[j], ones, word_of(x[j], pair), word_of(x[j], pair + 1));
        }
        if (p.groups == CHUNKS || chunk + 1 == CHUNKS)
          add_group(from + (p.groups == 1 ? 0 : chunk) * (TILE / 4), sums, x_sums, total);
      }
    }
  }

  // Adds the sums of a group times its scales; they begin anew.
  __device__ __forceinline__ void add_group(const uint4* from, Sums& sums, float (&x_sums)[COLUMNS][4],
                                            Sums& total) const {
#pragma unroll
    for (int i = 0; i < TILES; i++) {
      const float* scales = reinterpret_cast<const float*>(from + i * tile_vectors + TILE_WORDS) + lane / 4;
      const float upper = scales[0], lower = scales[8];
#pragma unroll
      for (int j = 0; j < COLUMNS; j++)
#pragma unroll
        for (int k = 0; k < 4; k++) {
          total[i][j][k] = fmaf(k < 2 ? upper : lower, sums[i][j][k], total[i][j][k]);
          sums[i][j][k] = 0.0f;
        }
      if (!p.mins) continue;
      const float* mins = scales + 4 * scale_vectors;
      const float upper_shift = fmaf(8.0f, upper, -mins[0]), lower_shift = fmaf(8.0f, lower, -mins[8]);
#pragma unroll
      for (int j = 0; j < COLUMNS; j++)
#pragma unroll
        for (int k = 0; k < 4; k++)
          total[i][j][k] = fmaf(k < 2 ? upper_shift : lower_shift, x_sums[j][k], total[i][j][k]);
    }
#pragma unroll
    for (int j = 0; j < COLUMNS; j++)
#pragma unroll
      for (int k = 0; k < 4; k++) x_sums[j][k] = 0.0f;
  }

  // Puts the sums to [ROWS, stride] in shared memory.
  __device__ __forceinline__ void put(const Sums& total, float* shared, int stride) const {
#pragma unroll
    for (int i = 0; i < TILES; i++)
#pragma unroll
      for (int j = 0; j < COLUMNS; j++)
#pragma unroll
        for (int k = 0; k < 4; k++)
          shared[(j * 8 + lane % 4 * 2 + k % 2) * stride + i * TILE + lane / 4 + k / 2 * 8] = total[i][j][k];
  }
};

template <typename T, int TILES, int COLUMNS>
__device__ __forceinline__ void linear_q4(const LinearQ4Params& p) {
  using Part = Tiles<T, TILES, COLUMNS>;
  constexpr int OUTPUTS = TILES * TILE, ROWS = Part::ROWS;
  constexpr int STRIDE = OUTPUTS + 4;                             // no two lanes in one bank
  constexpr int AHEAD = COLUMNS == 1 ? 4 : COLUMNS == 2 ? 2 : 1;  // chunks of x in registers
  DYNAMIC_SHARED(uint4, shared);
  const Part part(p, blockIdx.x * TILES);
  const int slice = threadIdx.x / 32, stage_vectors = TILES * part.tile_vectors;
  uint4* const ring = shared + slice * STAGES * stage_vectors;
  const auto fetch = [&](int unit, int slot) {
    if (unit < part.units) part.fetch(ring + slot * stage_vectors, unit);
    cp_async_commit();
  };
  // Straight into registers: no two warps read the same. Zeros where there is no row or no input.
  const auto read_x = [&](int unit, int chunk, uint4(&into)[COLUMNS]) {
    const int input = unit * UNIT + chunk * CHUNK + part.lane % 4 * VECTOR;
#pragma unroll
    for (int j = 0; j < COLUMNS; j++) {
      const int row = blockIdx.y * ROWS + j * 8 + part.lane / 4;
      into[j] = make_uint4(0, 0, 0, 0);
      if (row < p.rows && input < p.inputs)
        into[j] = vector_at(p.x, (static_cast<int64_t>(row) * p.inputs + input) / VECTOR);
    }
  };
  uint4 ahead[AHEAD][COLUMNS];
#pragma unroll
  for (int stage = 0; stage < STAGES - 1; stage++) fetch(slice + stage * SLICES, stage);
#pragma unroll
  for (int chunk = 0; chunk < AHEAD; chunk++) read_x(slice, chunk, ahead[chunk]);
  typename Part::Sums total = {};
  int slot = 0;
  for (int unit = slice; unit < part.units; unit += SLICES) {
    cp_async_wait<STAGES - 2>();
    __syncwarp();  // the unit is there for all lanes, and all have read the one before
    fetch(unit + (STAGES - 1) * SLICES, slot == 0 ? STAGES - 1 : slot - 1);
    const auto next_x = [&](int chunk, uint4(&x)[COLUMNS]) {
#pragma unroll
      for (int j = 0; j < COLUMNS; j++) x[j] = ahead[chunk % AHEAD][j];
      read_x(chunk + AHEAD < CHUNKS ? unit : unit + SLICES, (chunk + AHEAD) % CHUNKS, ahead[chunk % AHEAD]);
    };
    part.add_unit(ring + slot * stage_vectors, next_x, total);
    slot = slot + 1 == STAGES ? 0 : slot + 1;
  }
  cp_async_wait<0>();
  __syncthreads();  // the rings are read no more
  float* sums = reinterpret_cast<float*>(shared);
  part.put(total, sums + slice * ROWS * STRIDE, STRIDE);
  __syncthreads();
  for (int i = threadIdx.x; i < ROWS * OUTPUTS; i += THREADS) {
    const int row = blockIdx.y * ROWS + i / OUTPUTS, output = blockIdx.x * OUTPUTS + i % OUTPUTS;
    if (row >= p.rows || output >= p.outputs) continue;
    float sum = 0.0f;
#pragma unroll
    for (int from = 0; from < SLICES; from++) sum += sums[(from * ROWS + i / OUTPUTS) * STRIDE + i % OUTPUTS];
    if (p.bias) sum += p.bias[output];
    static_cast<unsigned short*>(p.out)[row * p.stride + output] = static_cast<unsigned short>(T::pack(sum, 0.0f));
  }
}

// Writes the weights, each rounded once: a thread has 32 of them, of two outputs. Grid: x tiles, y a few units.
template <typename T>
__device__ __forceinline__ void unpack_q4(const UnpackQ4Params& p) {
  const int vectors = p.inputs / VECTOR, units = (p.inputs + UNIT - 1) / UNIT;
  const int unit = blockIdx.y * UNPACK_UNITS + threadIdx.x / TILE_WORDS;
  const int v = threadIdx.x / 32 % 2, lane = threadIdx.x % 32;
  if (unit >= units) return;
  const int64_t at = static_cast<int64_t>(blockIdx.x) * units + unit;
  const uint4 words = p.words[at * TILE_WORDS + v * 32 + lane];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int chunk = 2 * v + i / 2, in_tile = lane / 4 + i % 2 * 8;
    const int output = blockIdx.x * TILE + in_tile, vector = unit * ROW_VECTORS + chunk * (CHUNK / VECTOR) + lane % 4;
    if (output >= p.outputs || vector >= vectors) continue;
    const int64_t group = (at * p.groups + (p.groups == 1 ? 0 : chunk)) * TILE + in_tile;
    const uint32_t word = word_of(words, i);
    const float scale = p.scales[group], least = p.mins ? p.mins[group] : 0.0f;
    float weights[VECTOR];
#pragma unroll
    for (int k = 0; k < VECTOR; k++) {
      const float number = static_cast<float>(word >> 4 * (k / 2 + k % 2 * 4) & 15u);
      weights[k] = p.mins ? fmaf(scale, number, -least) : scale * (number - 8.0f);
    }
    vector_at(p.out, static_cast<int64_t>(output) * vectors + vector) = pack<T>(weights);
  }
}

}  // namespace

RESIDENT_KERNEL(linear_q4_t1c1_bf16, LinearQ4Params, THREADS, 4, linear_q4<bf16, 1, 1>)
RESIDENT_KERNEL(linear_q4_t1c1_f16, LinearQ4Params, THREADS, 4, linear_q4<f16, 1, 1>)
RESIDENT_KERNEL(linear_q4_t2c1_bf16, LinearQ4Params, THREADS, 3, linear_q4<bf16, 2, 1>)
RESIDENT_KERNEL(linear_q4_t2c1_f16, LinearQ4Params, THREADS, 3, linear_q4<f16, 2, 1>)
RESIDENT_KERNEL(linear_q4_t1c2_bf16, LinearQ4Params, THREADS, 3, linear_q4<bf16, 1, 2>)
RESIDENT_KERNEL(linear_q4_t1c2_f16, LinearQ4Params, THREADS, 3, linear_q4<f16, 1, 2>)
RESIDENT_KERNEL(linear_q4_t2c2_bf16, LinearQ4Params, THREADS, 2, linear_q4<bf16, 2, 2>)
RESIDENT_KERNEL(linear_q4_t2c2_f16, LinearQ4Params, THREADS, 2, linear_q4<f16, 2, 2>)
RESIDENT_KERNEL(linear_q4_t4c4_bf16, LinearQ4Params, THREADS, 1, linear_q4<bf16, 4, 4>)
RESIDENT_KERNEL(linear_q4_t4c4_f16, LinearQ4Params, THREADS, 1, linear_q4<f16, 4, 4>)
KERNEL(unpack_q4_bf16, UnpackQ4Params, UNPACK_THREADS, unpack_q4<bf16>)
KERNEL(unpack_q4_f16, UnpackQ4Params, UNPACK_THREADS, unpack_q4<f16>)
