// Products with matrices held in 4 bits, out[row] = x[row] weight^T + bias, for a few rows; and what unpacks a matrix.
//
// weight = scale (q - 8), or scale q - min where there are minima, with a scale and a minimum for each group of 128 or
// 32 inputs of an output. q - 8 is exact in 16 bits, products with x and their sums are float32 (mma), one sum a group:
//   out = bias + sum over groups of scale sum((q - 8) x) + (8 scale - min) sum(x), rounded once.
// A matrix is cut into tiles of 16 outputs (the rows of mma.m16n8k16) and units of UNIT inputs. The units form SLICES
// slices of the same length, each is added up by itself, then the slices in order: an order that the sizes of the matrix
// decide alone, so a row has the same bits whatever rows are beside it and whichever of these kernels computes it.
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

constexpr int SLICES = 8;
constexpr int SPLIT_THREADS = 32 * SLICES, SPLIT_STAGES = 2;
constexpr int WHOLE_WARPS = 4, WHOLE_THREADS = 32 * WHOLE_WARPS, WHOLE_STAGES = 4;
constexpr int TILE = 16;              // outputs
constexpr int UNIT = 128;             // inputs
constexpr int CHUNK = 32;             // inputs of two mma: lane t of four has 8t .. 8t + 7
constexpr int CHUNKS = UNIT / CHUNK;
constexpr int TILE_WORDS = 64;        // uint4 of a tile and unit
constexpr int ROW_VECTORS = UNIT / VECTOR;  // of a row of x in a unit
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

// Where vector i of a row of x lies in shared memory: the lanes that read two rows at once meet in no bank.
__device__ __forceinline__ int x_place(int row, int i) { return row * ROW_VECTORS + (i ^ row % 2 * 4); }

__device__ __forceinline__ uint32_t word_of(const uint4& words, int i) {
  return i == 0 ? words.x : i == 1 ? words.y : i == 2 ? words.z : words.w;
}

// The TILES tiles of a warp from first_tile on, with 8 x COLUMNS rows of x.
template <typename T, int TILES, int COLUMNS>
struct Tiles {
  static constexpr int ROWS = 8 * COLUMNS;
  using Sums = float[TILES][COLUMNS][4];

  const LinearQ4Params& p;
  const int lane, units, tiles, first_tile, first_row;
  const int scale_vectors, tile_vectors;  // uint4 of a tile's scales, and of a tile and unit with words and minima

  __device__ __forceinline__ Tiles(const LinearQ4Params& p, int first_tile)
      : p(p),
        lane(threadIdx.x % 32),
        units((p.inputs + UNIT - 1) / UNIT),
        tiles((p.outputs + TILE - 1) / TILE),
        first_tile(first_tile),
        first_row(blockIdx.y * ROWS),
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

  // Puts the sums to [ROWS, stride] in shared memory, outputs from `first` on.
  __device__ __forceinline__ void put(const Sums& total, float* shared, int stride, int first) const {
#pragma unroll
    for (int i = 0; i < TILES; i++)
#pragma unroll
      for (int j = 0; j < COLUMNS; j++)
#pragma unroll
        for (int k = 0; k < 4; k++)
          shared[(j * 8 + lane % 4 * 2 + k % 2) * stride + first + i * TILE + lane / 4 + k / 2 * 8] = total[i][j][k];
  }
};

// Writes outputs from `first` on, of sums [slices, ROWS, stride] in shared memory that are added in order.
template <typename T, int ROWS, int OUTPUTS>
__device__ __forceinline__ void write(const LinearQ4Params& p, int first, const float* shared, int stride, int slices) {
  for (int i = threadIdx.x; i < ROWS * OUTPUTS; i += blockDim.x) {
    const int row = blockIdx.y * ROWS + i / OUTPUTS, output = first + i % OUTPUTS;
    if (row >= p.rows || output >= p.outputs) continue;
    float sum = 0.0f;
    for (int slice = 0; slice < slices; slice++) sum += shared[(slice * ROWS + i / OUTPUTS) * stride + i % OUTPUTS];
    if (p.bias) sum += p.bias[output];
    static_cast<unsigned short*>(p.out)[row * p.stride + output] = static_cast<unsigned short>(T::pack(sum, 0.0f));
  }
}

// Units of a slice; the last ones may have fewer, or none.
__device__ __forceinline__ int units_of_slice(int units) { return (units + SLICES - 1) / SLICES; }

// For a few rows: all warps of a block have the same tiles, and a slice of the inputs each. x comes straight into
// registers: no two warps read the same.
template <typename T, int TILES, int COLUMNS>
__device__ __forceinline__ void linear_q4_split(const LinearQ4Params& p) {
  using Part = Tiles<T, TILES, COLUMNS>;
  constexpr int STAGES = SPLIT_STAGES, OUTPUTS = TILES * TILE;
  constexpr int STRIDE = OUTPUTS + 4;  // no two lanes in one bank
  constexpr int AHEAD = 2;             // chunks of x in registers
  DYNAMIC_SHARED(uint4, shared);
  const Part part(p, blockIdx.x * TILES);
  const int slice = threadIdx.x / 32, many = units_of_slice(part.units);
  const int first = slice * many, end = min(first + many, part.units);
  const int stage_vectors = TILES * part.tile_vectors;
  uint4* const ring = shared + slice * STAGES * stage_vectors;
  const auto read_x = [&](int unit, int chunk, uint4(&into)[COLUMNS]) {
    const int input = unit * UNIT + chunk * CHUNK + part.lane % 4 * VECTOR;
#pragma unroll
    for (int j = 0; j < COLUMNS; j++) {
      const int row = part.first_row + j * 8 + part.lane / 4;
      into[j] = make_uint4(0, 0, 0, 0);
      if (row < p.rows && input < p.inputs)
        into[j] = vector_at(p.x, (static_cast<int64_t>(row) * p.inputs + input) / VECTOR);
    }
  };
  const auto fetch = [&](int unit, int slot) {
    if (unit < end) part.fetch(ring + slot * stage_vectors, unit);
    cp_async_commit();
  };
  uint4 ahead[AHEAD][COLUMNS];
#pragma unroll
  for (int stage = 0; stage < STAGES - 1; stage++) fetch(first + stage, stage);
#pragma unroll
  for (int chunk = 0; chunk < AHEAD; chunk++) read_x(first, chunk, ahead[chunk]);
  typename Part::Sums total = {};
  int slot = 0;
  for (int unit = first; unit < end; unit++) {
    cp_async_wait<STAGES - 2>();
    __syncwarp();  // the unit is there for all lanes, and all have read the one before
    fetch(unit + STAGES - 1, slot == 0 ? STAGES - 1 : slot - 1);
    const auto next_x = [&](int chunk, uint4(&x)[COLUMNS]) {
#pragma unroll
      for (int j = 0; j < COLUMNS; j++) x[j] = ahead[chunk % AHEAD][j];
      read_x(chunk + AHEAD < CHUNKS ? unit : unit + 1, (chunk + AHEAD) % CHUNKS, ahead[chunk % AHEAD]);
    };
    part.add_unit(ring + slot * stage_vectors, next_x, total);
    slot = slot + 1 == STAGES ? 0 : slot + 1;
  }
  cp_async_wait<0>();
  __syncthreads();  // the rings are read no more
  float* sums = reinterpret_cast<float*>(shared);
  part.put(total, sums + slice * Part::ROWS * STRIDE, STRIDE, 0);
  __syncthreads();
  write<T, Part::ROWS, OUTPUTS>(p, blockIdx.x * OUTPUTS, sums, STRIDE, SLICES);
}

// For more rows: each warp of a block has tiles of its own and all inputs, slice by slice, and x is shared.
template <typename T, int TILES, int COLUMNS>
__device__ __forceinline__ void linear_q4_whole(const LinearQ4Params& p) {
  using Part = Tiles<T, TILES, COLUMNS>;
  constexpr int STAGES = WHOLE_STAGES, OUTPUTS = WHOLE_WARPS * TILES * TILE, STRIDE = OUTPUTS + 4;
  constexpr int X_VECTORS = Part::ROWS * ROW_VECTORS;
  DYNAMIC_SHARED(uint4, shared);
  const int warp = threadIdx.x / 32;
  const Part part(p, (blockIdx.x * WHOLE_WARPS + warp) * TILES);
  const int many = units_of_slice(part.units), warp_vectors = TILES * part.tile_vectors;
  const int stage_vectors = X_VECTORS + WHOLE_WARPS * warp_vectors;
  const auto fetch = [&](int unit, int slot) {
    if (unit < part.units) {
      uint4* to = shared + slot * stage_vectors;
#pragma unroll
      for (int i = threadIdx.x; i < X_VECTORS; i += WHOLE_THREADS) {
        const int row = part.first_row + i / ROW_VECTORS, input = unit * UNIT + i % ROW_VECTORS * VECTOR;
        const bool valid = row < p.rows && input < p.inputs;
        const int64_t at = valid ? (static_cast<int64_t>(row) * p.inputs + input) / VECTOR : 0;
        cp_async_16(to + x_place(i / ROW_VECTORS, i % ROW_VECTORS), static_cast<const uint4*>(p.x) + at, valid);
      }
      part.fetch(to + X_VECTORS + warp * warp_vectors, unit);
    }
    cp_async_commit();
  };
#pragma unroll
  for (int stage = 0; stage < STAGES - 1; stage++) fetch(stage, stage);
  typename Part::Sums total = {}, sums = {};
  int slot = 0, left = many;
  for (int unit = 0; unit < part.units; unit++) {
    cp_async_wait<STAGES - 2>();
    __syncthreads();  // the unit is there for all warps, and all have read the one before
    fetch(unit + STAGES - 1, slot == 0 ? STAGES - 1 : slot - 1);
    const uint4* from = shared + slot * stage_vectors;
    const auto next_x = [&](int chunk, uint4(&x)[COLUMNS]) {
#pragma unroll
      for (int j = 0; j < COLUMNS; j++)
        x[j] = from[x_place(j * 8 + part.lane / 4, chunk * (CHUNK / VECTOR) + part.lane % 4)];
    };
    part.add_unit(from + X_VECTORS + warp * warp_vectors, next_x, sums);
    slot = slot + 1 == STAGES ? 0 : slot + 1;
    if (--left && unit + 1 < part.units) continue;
    left = many;
#pragma unroll
    for (int i = 0; i < TILES; i++)
#pragma unroll
      for (int j = 0; j < COLUMNS; j++)
#pragma unroll
        for (int k = 0; k < 4; k++) {
          total[i][j][k] += sums[i][j][k];
          sums[i][j][k] = 0.0f;
        }
  }
  cp_async_wait<0>();
  __syncthreads();  // the ring is read no more
  float* results = reinterpret_cast<float*>(shared);
  part.put(total, results, STRIDE, warp * TILES * TILE);
  __syncthreads();
  write<T, Part::ROWS, OUTPUTS>(p, blockIdx.x * OUTPUTS, results, STRIDE, 1);
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

RESIDENT_KERNEL(linear_q4_split_t2c1_bf16, LinearQ4Params, SPLIT_THREADS, 4, linear_q4_split<bf16, 2, 1>)
RESIDENT_KERNEL(linear_q4_split_t2c1_f16, LinearQ4Params, SPLIT_THREADS, 4, linear_q4_split<f16, 2, 1>)
RESIDENT_KERNEL(linear_q4_split_t2c2_bf16, LinearQ4Params, SPLIT_THREADS, 2, linear_q4_split<bf16, 2, 2>)
RESIDENT_KERNEL(linear_q4_split_t2c2_f16, LinearQ4Params, SPLIT_THREADS, 2, linear_q4_split<f16, 2, 2>)
RESIDENT_KERNEL(linear_q4_whole_t1c4_bf16, LinearQ4Params, WHOLE_THREADS, 3, linear_q4_whole<bf16, 1, 4>)
RESIDENT_KERNEL(linear_q4_whole_t1c4_f16, LinearQ4Params, WHOLE_THREADS, 3, linear_q4_whole<f16, 1, 4>)
RESIDENT_KERNEL(linear_q4_whole_t2c4_bf16, LinearQ4Params, WHOLE_THREADS, 2, linear_q4_whole<bf16, 2, 4>)
RESIDENT_KERNEL(linear_q4_whole_t2c4_f16, LinearQ4Params, WHOLE_THREADS, 2, linear_q4_whole<f16, 2, 4>)
KERNEL(unpack_q4_bf16, UnpackQ4Params, UNPACK_THREADS, unpack_q4<bf16>)
KERNEL(unpack_q4_f16, UnpackQ4Params, UNPACK_THREADS, unpack_q4<f16>)
