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
  const uint32_t* words;  // these three as LinearQ4Params has them
  const float* scales;
  const float* mins;
  void* out;              // [outputs, inputs]
  int32_t inputs;         // a multiple of 8
  int32_t outputs;
  int32_t groups;
};

namespace {

constexpr int THREADS = 256;
constexpr int SLICES = THREADS / 32;  // warps of a block, each with a part of the inputs
constexpr int TILE = 16;              // outputs
constexpr int UNIT = 128;             // inputs
constexpr int CHUNK = 32;             // inputs of two mma: lane t of four has 8t .. 8t + 7
constexpr int CHUNKS = UNIT / CHUNK;
constexpr int TILE_WORDS = 64;        // uint4 of a tile and unit
constexpr int UNPACK_THREADS = 256;

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

// A block has TILES tiles and 8 x COLUMNS rows of x; each of its warps keeps STAGES - 1 units on the way.
template <typename T, int TILES, int COLUMNS>
struct Product {
  static constexpr int STAGES = TILES == 4 ? 2 : 4;
  static constexpr int AHEAD = COLUMNS == 1 ? 4 : COLUMNS == 2 ? 2 : 1;  // chunks of x in registers
  static constexpr int OUTPUTS = TILES * TILE, ROWS = 8 * COLUMNS;
  static constexpr int SUM_STRIDE = OUTPUTS + 4;  // of a row's sums in shared memory: no two lanes in one bank

  const LinearQ4Params& p;
  const int lane, slice, units, tiles, first_tile, first_row;
  const int scale_vectors, stage_vectors;  // uint4 of a tile's scales, and of a unit in the ring
  uint4* const ring;                       // [STAGES, TILES, words, scales, minima] of this warp
  uint4 x[AHEAD][COLUMNS];

  __device__ __forceinline__ Product(const LinearQ4Params& p, uint4* shared)
      : p(p),
        lane(threadIdx.x % 32),
        slice(threadIdx.x / 32),
        units((p.inputs + UNIT - 1) / UNIT),
        tiles((p.outputs + TILE - 1) / TILE),
        first_tile(blockIdx.x * TILES),
        first_row(blockIdx.y * ROWS),
        scale_vectors(p.groups * (TILE / 4)),
        stage_vectors(TILES * (TILE_WORDS + (p.mins ? 2 : 1) * scale_vectors)),
        ring(shared + slice * STAGES * stage_vectors) {}

  // Starts the copy of a unit, and closes a group of copies in any case. A tile behind the last is that one again.
  __device__ __forceinline__ void fetch(int unit, int slot) const {
    if (unit < units) {
      uint4* to = ring + slot * stage_vectors;
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
    cp_async_commit();
  }

  // Reads the lane's part of a chunk of x: 8 inputs of row lane / 4 of each eight; zeros where there are none.
  __device__ __forceinline__ void read_x(uint4 (&into)[COLUMNS], int unit, int chunk) const {
    const int input = unit * UNIT + chunk * CHUNK + lane % 4 * VECTOR;
#pragma unroll
    for (int j = 0; j < COLUMNS; j++) {
      const int row = first_row + j * 8 + lane / 4;
      into[j] = make_uint4(0, 0, 0, 0);
      if (row < p.rows && input < p.inputs)
        into[j] = vector_at(p.x, (static_cast<int64_t>(row) * p.inputs + input) / VECTOR);
    }
  }

  __device__ __forceinline__ void run(float (&total)[TILES][COLUMNS][4]) {
#pragma unroll
    for (int stage = 0; stage < STAGES - 1; stage++) fetch(slice + stage * SLICES, stage);
#pragma unroll
    for (int chunk = 0; chunk < AHEAD; chunk++) read_x(x[chunk], slice, chunk);
    int slot = 0;
    for (int unit = slice; unit < units; unit += SLICES) {
      cp_async_wait<STAGES - 2>();
      __syncwarp();  // the unit is there for all lanes, and all have read the one before
      fetch(unit + (STAGES - 1) * SLICES, slot == 0 ? STAGES - 1 : slot - 1);
      add_unit(ring + slot * stage_vectors, unit, total);
      slot = slot + 1 == STAGES ? 0 : slot + 1;
    }
  }

  __device__ __forceinline__ void add_unit(const uint4* from, int unit, float (&total)[TILES][COLUMNS][4]) {
    const int tile_vectors = stage_vectors / TILES;
    float sums[TILES][COLUMNS][4] = {}, x_sums[COLUMNS][4] = {};
    const uint32_t ones[4] = {Numbers<T>::ONES, Numbers<T>::ONES, Numbers<T>::ONES, Numbers<T>::ONES};
#pragma unroll
    for (int v = 0; v < 2; v++) {
      uint4 words[TILES];
#pragma unroll
      for (int i = 0; i < TILES; i++) words[i] = from[i * tile_vectors + v * 32 + lane];
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int chunk = 2 * v + half;
        uint4 now[COLUMNS];
#pragma unroll
        for (int j = 0; j < COLUMNS; j++) now[j] = x[chunk % AHEAD][j];
        const bool here = chunk + AHEAD < CHUNKS;
        read_x(x[chunk % AHEAD], here ? unit : unit + SLICES, (chunk + AHEAD) % CHUNKS);
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
              Numbers<T>::mma(sums[i][j], a, word_of(now[j], pair), word_of(now[j], pair + 1));
          }
          if (!p.mins) continue;
#pragma unroll
          for (int j = 0; j < COLUMNS; j++)
            Numbers<T>::mma(x_sums[j], ones, word_of(now[j], pair), word_of(now[j], pair + 1));
        }
        if (p.groups == CHUNKS || chunk + 1 == CHUNKS)
          add_group(from + (p.groups == 1 ? 0 : chunk) * (TILE / 4), sums, x_sums, total);
      }
    }
  }

  // Adds the sums of a group times its scales; they begin anew.
  __device__ __forceinline__ void add_group(const uint4* from, float (&sums)[TILES][COLUMNS][4],
                                            float (&x_sums)[COLUMNS][4], float (&total)[TILES][COLUMNS][4]) const {
#pragma unroll
    for (int i = 0; i < TILES; i++) {
      const float* scales = reinterpret_cast<const float*>(from + i * (stage_vectors / TILES) + TILE_WORDS) + lane / 4;
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

  // Adds the warps' sums in order, then the bias, and writes the block's outputs. The ring is read no more.
  __device__ __forceinline__ void write(const float (&total)[TILES][COLUMNS][4], float* shared) const {
    cp_async_wait<0>();
    __syncthreads();
    float* own = shared + slice * ROWS * SUM_STRIDE;
#pragma unroll
    for (int i = 0; i < TILES; i++)
#pragma unroll
      for (int j = 0; j < COLUMNS; j++)
#pragma unroll
        for (int k = 0; k < 4; k++)
          own[(j * 8 + lane % 4 * 2 + k % 2) * SUM_STRIDE + i * TILE + lane / 4 + k / 2 * 8] = total[i][j][k];
    __syncthreads();
    for (int i = threadIdx.x; i < ROWS * OUTPUTS; i += THREADS) {
      const int row = first_row + i / OUTPUTS, output = first_tile * TILE + i % OUTPUTS;
      if (row >= p.rows || output >= p.outputs) continue;
      float sum = 0.0f;
#pragma unroll
      for (int from = 0; from < SLICES; from++)
        sum += shared[(from * ROWS + i / OUTPUTS) * SUM_STRIDE + i % OUTPUTS];
      if (p.bias) sum += p.bias[output];
      static_cast<unsigned short*>(p.out)[row * p.stride + output] = static_cast<unsigned short>(T::pack(sum, 0.0f));
    }
  }
};

template <typename T, int TILES, int COLUMNS>
__device__ __forceinline__ void linear_q4(const LinearQ4Params& p) {
  DYNAMIC_SHARED(uint4, shared);
  Product<T, TILES, COLUMNS> product(p, shared);
  float total[TILES][COLUMNS][4] = {};
  product.run(total);
  product.write(total, reinterpret_cast<float*>(shared));
}

// Writes the weights, each rounded once: a thread has the 8 numbers of a word.
template <typename T>
__device__ __forceinline__ void unpack_q4(const UnpackQ4Params& p) {
  const int output = blockIdx.x, vectors = p.inputs / VECTOR, vector = blockIdx.y * UNPACK_THREADS + threadIdx.x;
  if (vector >= vectors) return;
  const int units = (p.inputs + UNIT - 1) / UNIT, unit = vector / (UNIT / VECTOR), chunk = vector / 4 % 4;
  const int in_tile = output % TILE, lane = in_tile % 8 * 4 + vector % 4;
  const int64_t at = static_cast<int64_t>(output / TILE) * units + unit;
  const uint32_t word = p.words[(at * TILE_WORDS + chunk / 2 * 32 + lane) * 4 + chunk % 2 * 2 + in_tile / 8];
  const int64_t group = (at * p.groups + (p.groups == 1 ? 0 : chunk)) * TILE + in_tile;
  const float scale = p.scales[group];
  float weights[VECTOR];
#pragma unroll
  for (int i = 0; i < VECTOR; i++) {
    const float number = static_cast<float>(word >> 4 * (i / 2 + i % 2 * 4) & 15u);
    weights[i] = p.mins ? fmaf(scale, number, -p.mins[group]) : scale * (number - 8.0f);
  }
  vector_at(p.out, static_cast<int64_t>(output) * vectors + vector) = pack<T>(weights);
}

}  // namespace

RESIDENT_KERNEL(linear_q4_t1c1_bf16, LinearQ4Params, THREADS, 4, linear_q4<bf16, 1, 1>)
RESIDENT_KERNEL(linear_q4_t1c1_f16, LinearQ4Params, THREADS, 4, linear_q4<f16, 1, 1>)
RESIDENT_KERNEL(linear_q4_t2c1_bf16, LinearQ4Params, THREADS, 3, linear_q4<bf16, 2, 1>)
RESIDENT_KERNEL(linear_q4_t2c1_f16, LinearQ4Params, THREADS, 3, linear_q4<f16, 2, 1>)
RESIDENT_KERNEL(linear_q4_t2c2_bf16, LinearQ4Params, THREADS, 2, linear_q4<bf16, 2, 2>)
RESIDENT_KERNEL(linear_q4_t2c2_f16, LinearQ4Params, THREADS, 2, linear_q4<f16, 2, 2>)
RESIDENT_KERNEL(linear_q4_t4c4_bf16, LinearQ4Params, THREADS, 1, linear_q4<bf16, 4, 4>)
RESIDENT_KERNEL(linear_q4_t4c4_f16, LinearQ4Params, THREADS, 1, linear_q4<f16, 4, 4>)
KERNEL(unpack_q4_bf16, UnpackQ4Params, UNPACK_THREADS, unpack_q4<bf16>)
KERNEL(unpack_q4_f16, UnpackQ4Params, UNPACK_THREADS, unpack_q4<f16>)
