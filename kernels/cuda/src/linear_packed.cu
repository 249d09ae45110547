// Products with matrices in 4 bits or fp8, out[row] = x[row] weight^T + bias, for a few rows; and what unpacks one.
//
// In 4 bits weight = scale (q - 8), or scale q - min where there are minima; in fp8 weight = scale c, with c a number
// of e4m3fn. There is a scale, and a minimum, for each group of 128 or 32 inputs of an output. n = q - 8 or c is exact
// in 16 bits, products with x and their sums are float32 (mma), one sum a group:
//   out = bias + sum over groups of scale sum(n x) + (8 scale - min) sum(x), rounded once.
// A matrix is cut into tiles of 16 outputs (the rows of mma.m16n8k16) and units of UNIT inputs. Warp w of a block adds
// up units w, w + SLICES, ..., then the warps' sums are added in order: an order that the sizes of the matrix decide
// alone, so a row has the same bits whatever rows are beside it and whichever of these kernels computes it.
#include "fp8.cuh"

struct LinearPackedParams {
  const void* x;         // [rows, inputs]
  const uint4* words;    // [tiles, units, VECTORS, 32 lanes]: see Int4 and Fp8
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

struct UnpackParams {
  const uint4* words;  // these three as LinearPackedParams has them
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
constexpr int ROW_VECTORS = UNIT / VECTOR;  // of a row of x in a unit
constexpr int UNPACK_THREADS = 256;

template <typename T>
struct Numbers;
template <>
struct Numbers<bf16> {
  static constexpr uint32_t BASE = 0x43004300, MINUS_BASE = 0xc308c308, ONES = 0x3f803f80;  // 128, -136, 1
  static constexpr uint32_t FROM_FIELDS = 0x7b807b80;                                       // 2^120
  static __device__ __forceinline__ uint32_t fma(uint32_t a, uint32_t b, uint32_t c) { return fma_bf16x2(a, b, c); }
  static __device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    mma_bf16(d, a, b0, b1);
  }
};
template <>
struct Numbers<f16> {
  static constexpr uint32_t BASE = 0x64006400, MINUS_BASE = 0xe408e408, ONES = 0x3c003c00;  // 1024, -1032, 1
  static constexpr uint32_t FROM_FIELDS = 0x5c005c00;                                       // 2^8
  static __device__ __forceinline__ uint32_t fma(uint32_t a, uint32_t b, uint32_t c) { return fma_f16x2(a, b, c); }
  static __device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    mma_f16(d, a, b0, b1);
  }
};

__device__ __forceinline__ uint32_t word_of(const uint4& words, int i) {
  return i == 0 ? words.x : i == 1 ? words.y : i == 2 ? words.z : words.w;
}

// How numbers lie in the words. With g = lane / 4 and t = lane % 4 a lane has inputs 8t .. 8t + 7 of a chunk, of
// outputs g and g + 8. Its pair i is of inputs 8t + 2i and 8t + 2i + 1, an operand of mma. A format has
//   VECTORS, CHUNKS_OF_VECTOR  uint4 of a lane in a tile and unit, and chunks that each of them holds
//   HAS_MINS, ZERO             whether there may be minima, and what is taken away where there are none
//   operands<T>(words, i, step)    pairs 2 step and 2 step + 1 of chunk i of a uint4, as the weights of a product
//   numbers(words, i, half, into)  all of chunk i of output g + 8 half, in the order of the inputs

// Numbers i and i + 4 of a word are pair i. The uint4 number v has output g of chunk 2v, output g + 8 of it, and the
// same of chunk 2v + 1.
struct Int4 {
  static constexpr int VECTORS = 2, CHUNKS_OF_VECTOR = 2;
  static constexpr bool HAS_MINS = true;
  static constexpr float ZERO = 8.0f;

  // A pair less 8, in two halves: q added to a power of two that leaves its last digit worth 1, then the power and 8
  // taken away, both exact.
  template <typename T>
  static __device__ __forceinline__ uint32_t pair_of(uint32_t word, int pair) {
    const uint32_t raised = (word >> 4 * pair & 0x000f000fu) | Numbers<T>::BASE;
    return Numbers<T>::fma(raised, Numbers<T>::ONES, Numbers<T>::MINUS_BASE);
  }

  template <typename T>
  static __device__ __forceinline__ void operands(const uint4& words, int i, int step, uint32_t (&into)[4]) {
    const uint32_t upper = word_of(words, 2 * i), lower = word_of(words, 2 * i + 1);
    into[0] = pair_of<T>(upper, 2 * step), into[1] = pair_of<T>(lower, 2 * step);
    into[2] = pair_of<T>(upper, 2 * step + 1), into[3] = pair_of<T>(lower, 2 * step + 1);
  }

  static __device__ __forceinline__ void numbers(const uint4& words, int i, int half, float (&into)[VECTOR]) {
    const uint32_t word = word_of(words, 2 * i + half);
#pragma unroll
    for (int k = 0; k < VECTOR; k++) into[k] = static_cast<float>(word >> 4 * (k / 2 + k % 2 * 4) & 15u);
  }
};

// A word has two pairs: the first in the upper bytes of its halves, the second in the lower ones. The uint4 number v
// has output g of chunk v in two words, then output g + 8.
struct Fp8 {
  static constexpr int VECTORS = 4, CHUNKS_OF_VECTOR = 1;
  static constexpr bool HAS_MINS = false;
  static constexpr float ZERO = 0.0f;

  // A pair in two halves: exact, as numbers of e4m3 are normal ones of both types.
  template <typename T>
  static __device__ __forceinline__ uint32_t pair_of(uint32_t word, int pair) {
    return Numbers<T>::fma(fields<T>(pair == 0 ? word : word << 8), Numbers<T>::FROM_FIELDS, 0u);
  }

  template <typename T>
  static __device__ __forceinline__ void operands(const uint4& words, int, int step, uint32_t (&into)[4]) {
    const uint32_t upper = word_of(words, step), lower = word_of(words, 2 + step);
    into[0] = pair_of<T>(upper, 0), into[1] = pair_of<T>(lower, 0);
    into[2] = pair_of<T>(upper, 1), into[3] = pair_of<T>(lower, 1);
  }

  static __device__ __forceinline__ void numbers(const uint4& words, int, int half, float (&into)[VECTOR]) {
#pragma unroll
    for (int pair = 0; pair < VECTOR / 2; pair++) {
      const uint32_t word = word_of(words, 2 * half + pair / 2);
      decode(pair % 2 == 0 ? word : word << 8, into[2 * pair], into[2 * pair + 1]);
      into[2 * pair] *= 256.0f, into[2 * pair + 1] *= 256.0f;
    }
  }
};

template <typename Format>
constexpr int UNIT_WORDS = 32 * Format::VECTORS;  // uint4 of a tile and unit

// The TILES tiles of a warp from first_tile on, with 8 x COLUMNS rows of x.
template <typename Format, typename T, int TILES, int COLUMNS>
struct Tiles {
  static constexpr int TILE_WORDS = UNIT_WORDS<Format>;
  static constexpr int ROWS = 8 * COLUMNS;
  using Sums = float[TILES][COLUMNS][4];

  const LinearPackedParams& p;
  const int lane, units, tiles, first_tile;
  const int scale_vectors, tile_vectors;  // uint4 of a tile's scales, and of a tile and unit with words and minima

  __device__ __forceinline__ Tiles(const LinearPackedParams& p, int first_tile)
      : p(p),
        lane(threadIdx.x % 32),
        units((p.inputs + UNIT - 1) / UNIT),
        tiles((p.outputs + TILE - 1) / TILE),
        first_tile(first_tile),
        scale_vectors(p.groups * (TILE / 4)),
        tile_vectors(TILE_WORDS + (has_mins() ? 2 : 1) * scale_vectors) {}

  __device__ __forceinline__ bool has_mins() const { return Format::HAS_MINS && p.mins; }

  // Starts to copy a unit to [TILES, words, scales, minima]. A tile behind the last is that one again.
  __device__ __forceinline__ void fetch(uint4* to, int unit) const {
#pragma unroll
    for (int i = 0; i < TILES; i++) {
      const int64_t at = static_cast<int64_t>(min(first_tile + i, tiles - 1)) * units + unit;
#pragma unroll
      for (int v = 0; v < Format::VECTORS; v++)
        cp_async_16(to + v * 32 + lane, p.words + at * TILE_WORDS + v * 32 + lane, true);
      to += TILE_WORDS;
      const int64_t scales = at * scale_vectors + lane;
      if (lane < scale_vectors) cp_async_16(to + lane, reinterpret_cast<const uint4*>(p.scales) + scales, true);
      to += scale_vectors;
      if (!has_mins()) continue;
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
    for (int v = 0; v < Format::VECTORS; v++) {
      uint4 words[TILES];
#pragma unroll
      for (int i = 0; i < TILES; i++) words[i] = from[i * tile_vectors + v * 32 + lane];
#pragma unroll
      for (int part = 0; part < Format::CHUNKS_OF_VECTOR; part++) {
        const int chunk = v * Format::CHUNKS_OF_VECTOR + part;
        uint4 x[COLUMNS];
        read_x(chunk, x);
#pragma unroll
        for (int step = 0; step < 2; step++) {
          const int pair = 2 * step;
#pragma unroll
          for (int i = 0; i < TILES; i++) {
            uint32_t a[4];
            Format::template operands<T>(words[i], part, step, a);
#pragma unroll
            for (int j = 0; j < COLUMNS; j++)
              Numbers<T>::mma(sums[i][j], a, word_of(x[j], pair), word_of(x[j], pair + 1));
          }
          if (!has_mins()) continue;
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
      if (!has_mins()) continue;
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

template <typename Format, typename T, int TILES, int COLUMNS>
__device__ __forceinline__ void linear_packed(const LinearPackedParams& p) {
  using Part = Tiles<Format, T, TILES, COLUMNS>;
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

// Writes the weights, each rounded once: a thread has a uint4 of two outputs. Grid: x tiles, y a few units.
template <typename Format, typename T>
__device__ __forceinline__ void unpack_all(const UnpackParams& p) {
  constexpr int WORDS = UNIT_WORDS<Format>;
  const int vectors = p.inputs / VECTOR, units = (p.inputs + UNIT - 1) / UNIT;
  const int unit = blockIdx.y * (UNPACK_THREADS / WORDS) + threadIdx.x / WORDS;
  const int v = threadIdx.x / 32 % Format::VECTORS, lane = threadIdx.x % 32;
  if (unit >= units) return;
  const int64_t at = static_cast<int64_t>(blockIdx.x) * units + unit;
  const uint4 words = p.words[at * WORDS + v * 32 + lane];
  const bool has_mins = Format::HAS_MINS && p.mins;
#pragma unroll
  for (int i = 0; i < 2 * Format::CHUNKS_OF_VECTOR; i++) {
    const int chunk = v * Format::CHUNKS_OF_VECTOR + i / 2, in_tile = lane / 4 + i % 2 * 8;
    const int output = blockIdx.x * TILE + in_tile, vector = unit * ROW_VECTORS + chunk * (CHUNK / VECTOR) + lane % 4;
    if (output >= p.outputs || vector >= vectors) continue;
    const int64_t group = (at * p.groups + (p.groups == 1 ? 0 : chunk)) * TILE + in_tile;
    const float scale = p.scales[group], least = has_mins ? p.mins[group] : 0.0f;
    float weights[VECTOR];
    Format::numbers(words, i / 2, i % 2, weights);
#pragma unroll
    for (int k = 0; k < VECTOR; k++)
      weights[k] = has_mins ? fmaf(scale, weights[k], -least) : scale * (weights[k] - Format::ZERO);
    vector_at(p.out, static_cast<int64_t>(output) * vectors + vector) = pack<T>(weights);
  }
}

}  // namespace

RESIDENT_KERNEL(linear_q4_t1c1_bf16, LinearPackedParams, THREADS, 4, linear_packed<Int4, bf16, 1, 1>)
RESIDENT_KERNEL(linear_q4_t1c1_f16, LinearPackedParams, THREADS, 4, linear_packed<Int4, f16, 1, 1>)
RESIDENT_KERNEL(linear_q4_t2c1_bf16, LinearPackedParams, THREADS, 3, linear_packed<Int4, bf16, 2, 1>)
RESIDENT_KERNEL(linear_q4_t2c1_f16, LinearPackedParams, THREADS, 3, linear_packed<Int4, f16, 2, 1>)
RESIDENT_KERNEL(linear_q4_t1c2_bf16, LinearPackedParams, THREADS, 3, linear_packed<Int4, bf16, 1, 2>)
RESIDENT_KERNEL(linear_q4_t1c2_f16, LinearPackedParams, THREADS, 3, linear_packed<Int4, f16, 1, 2>)
RESIDENT_KERNEL(linear_q4_t2c2_bf16, LinearPackedParams, THREADS, 2, linear_packed<Int4, bf16, 2, 2>)
RESIDENT_KERNEL(linear_q4_t2c2_f16, LinearPackedParams, THREADS, 2, linear_packed<Int4, f16, 2, 2>)
RESIDENT_KERNEL(linear_q4_t4c4_bf16, LinearPackedParams, THREADS, 1, linear_packed<Int4, bf16, 4, 4>)
RESIDENT_KERNEL(linear_q4_t4c4_f16, LinearPackedParams, THREADS, 1, linear_packed<Int4, f16, 4, 4>)
KERNEL(unpack_q4_bf16, UnpackParams, UNPACK_THREADS, unpack_all<Int4, bf16>)
KERNEL(unpack_q4_f16, UnpackParams, UNPACK_THREADS, unpack_all<Int4, f16>)
RESIDENT_KERNEL(linear_fp8_t1c1_bf16, LinearPackedParams, THREADS, 4, linear_packed<Fp8, bf16, 1, 1>)
RESIDENT_KERNEL(linear_fp8_t1c1_f16, LinearPackedParams, THREADS, 4, linear_packed<Fp8, f16, 1, 1>)
RESIDENT_KERNEL(linear_fp8_t2c1_bf16, LinearPackedParams, THREADS, 3, linear_packed<Fp8, bf16, 2, 1>)
RESIDENT_KERNEL(linear_fp8_t2c1_f16, LinearPackedParams, THREADS, 3, linear_packed<Fp8, f16, 2, 1>)
RESIDENT_KERNEL(linear_fp8_t1c2_bf16, LinearPackedParams, THREADS, 3, linear_packed<Fp8, bf16, 1, 2>)
RESIDENT_KERNEL(linear_fp8_t1c2_f16, LinearPackedParams, THREADS, 3, linear_packed<Fp8, f16, 1, 2>)
RESIDENT_KERNEL(linear_fp8_t2c2_bf16, LinearPackedParams, THREADS, 2, linear_packed<Fp8, bf16, 2, 2>)
RESIDENT_KERNEL(linear_fp8_t2c2_f16, LinearPackedParams, THREADS, 2, linear_packed<Fp8, f16, 2, 2>)
RESIDENT_KERNEL(linear_fp8_t2c4_bf16, LinearPackedParams, THREADS, 1, linear_packed<Fp8, bf16, 2, 4>)
RESIDENT_KERNEL(linear_fp8_t2c4_f16, LinearPackedParams, THREADS, 1, linear_packed<Fp8, f16, 2, 4>)
KERNEL(unpack_fp8_bf16, UnpackParams, UNPACK_THREADS, unpack_all<Fp8, bf16>)
KERNEL(unpack_fp8_f16, UnpackParams, UNPACK_THREADS, unpack_all<Fp8, f16>)
