// Mixtures of experts: the products of rows, sorted by expert, with their expert's matrix.
//
// A block has a tile of ROWS pairs of one expert (routing.cu) and COLUMNS outputs. Gated, the matrix has the gates of all
// outputs above their ups; a tile then has half as many outputs, eight gates beside their eight ups, and activates them.
// Pieces of DEPTH inputs go through a ring of STAGES buffers in shared memory. A row's sums are added in the order of the
// inputs, whatever rows are beside it and however many a tile has.
// Grid: x, tiles of one expert after those of another, and for each COLUMNS outputs all tiles of an expert in turn, so
// that a part of a matrix is read from memory once.
#include "activations.cuh"
#include "tiles.cuh"

struct ExpertsParams {
  const void* x;         // [rows or pairs, inputs]
  const void* weights;   // [experts, outputs or 2 outputs, inputs]
  void* out;             // [pairs, outputs]
  const int32_t* order;  // [pairs] pairs by expert
  const int4* tiles;     // see routing.cu
  int32_t inputs;        // a multiple of 8
  int32_t outputs;       // a multiple of 8
  int32_t columns;       // tiles of outputs
  int32_t top_k;
  int32_t activation;  // gated: of activations.cuh, from rows to places in `order`; below zero: plain, from these to pairs
};

namespace {

constexpr int WARPS = 4, THREADS = WARPS * 32;
constexpr int DEPTH = 64, CHUNKS = DEPTH / VECTOR;  // inputs of a piece
constexpr int LINES = THREADS / CHUNKS;             // rows of a piece that all threads copy at once
constexpr int STEPS = DEPTH / 16, PARTS = STEPS - 1;

template <int ROWS>
struct Tile {
  static constexpr int COLUMNS = ROWS > 16 ? 128 : 64;
  static constexpr int STAGES = ROWS > 16 ? 3 : 5;
  static constexpr int WARPS_DOWN = ROWS > 16 ? 2 : 1, WARPS_ACROSS = WARPS / WARPS_DOWN;
  static constexpr int M_TILES = ROWS / WARPS_DOWN / 16, N_TILES = COLUMNS / WARPS_ACROSS / 8;  // of a warp
  static constexpr int STAGE = (ROWS + COLUMNS) * CHUNKS;
};

// What a block reads.
template <int ROWS>
struct Copies {
  static constexpr int OF_X = ROWS / LINES, OF_WEIGHTS = Tile<ROWS>::COLUMNS / LINES;

  const uint4* x;
  const uint4* weights;
  int step;          // vectors between rows of the matrix that a thread copies
  int rows[OF_X];    // of x; below zero: none
  int columns_left;  // how many of the thread's rows of the matrix are there
  int vectors, chunk, line;

  __device__ __forceinline__ Copies(const ExpertsParams& p, const int4& tile, int first, int column) {
    const bool gated = p.activation >= 0;
    vectors = p.inputs / VECTOR, chunk = threadIdx.x % CHUNKS, line = threadIdx.x / CHUNKS;
    x = static_cast<const uint4*>(p.x) + chunk;
    const int across = gated ? line / 16 * 8 + line % 8 : line, lines = gated ? LINES / 2 : LINES;
    const int64_t matrix = static_cast<int64_t>(tile.x) * (gated ? 2 : 1) * p.outputs;
    const int64_t row = matrix + column + across + (gated && line / 8 % 2 ? p.outputs : 0);
    weights = static_cast<const uint4*>(p.weights) + row * vectors + chunk;
    step = lines * vectors;
    columns_left = (p.outputs - column - across + lines - 1) / lines;
#pragma unroll
    for (int i = 0; i < OF_X; i++) {
      const int place = first + i * LINES + line;
      rows[i] = place >= tile.z ? -1 : gated ? p.order[place] / p.top_k : place;
    }
  }

  // Starts the copies of a piece, or one of PARTS parts of them.
  __device__ __forceinline__ void start(uint4* stage, int piece, int part = -1) const {
    const int at = swizzled<DEPTH>(line, chunk), from = piece * CHUNKS;
    const bool there = from + chunk < vectors;
#pragma unroll
    for (int i = 0; i < OF_X + OF_WEIGHTS; i++) {
      if (part >= 0 && i % PARTS != part) continue;
      const int row = i < OF_X ? rows[i < OF_X ? i : 0] : i - OF_X;
      const bool has_row = i < OF_X ? row >= 0 : row < columns_left;
      const uint4* source = i < OF_X ? x + static_cast<int64_t>(max(row, 0)) * vectors + from : weights + (row * step + from);
      cp_async_16(stage + at + i * LINES * CHUNKS, source, there && has_row);
    }
  }
};

template <typename T, int ROWS>
struct Sums {
  static constexpr int M_TILES = Tile<ROWS>::M_TILES, N_TILES = Tile<ROWS>::N_TILES;

  float of[M_TILES][N_TILES][4] = {};

  static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }
  static __device__ __forceinline__ int first_row() { return threadIdx.x / 32 / Tile<ROWS>::WARPS_ACROSS * M_TILES * 16; }
  static __device__ __forceinline__ int first_tile() { return threadIdx.x / 32 % Tile<ROWS>::WARPS_ACROSS * N_TILES; }

  // The operands of 16 inputs.
  struct Operands {
    uint32_t x[M_TILES][4], weights[N_TILES / 2][4];
  };

  static __device__ __forceinline__ void read(Operands& to, const uint4* stage, int step) {
    const int x = swizzled<DEPTH>(lane() % 16, lane() / 16) + first_row() * CHUNKS;
    const int weight = swizzled<DEPTH>(lane() % 8 + lane() / 16 * 8, lane() / 8 % 2) + (ROWS + first_tile() * 8) * CHUNKS;
#pragma unroll
    for (int m = 0; m < M_TILES; m++) ldmatrix_x4(to.x[m], stage + behind<DEPTH>(x, 2 * step) + m * 16 * CHUNKS);
#pragma unroll
    for (int n = 0; n < N_TILES / 2; n++)
      ldmatrix_x4(to.weights[n], stage + behind<DEPTH>(weight, 2 * step) + n * 16 * CHUNKS);
  }

  __device__ __forceinline__ void add(const Operands& operands) {
#pragma unroll
    for (int n = 0; n < N_TILES / 2; n++)
#pragma unroll
      for (int m = 0; m < M_TILES; m++) {
        mma<T>(of[m][2 * n], operands.x[m], operands.weights[n][0], operands.weights[n][1]);
        mma<T>(of[m][2 * n + 1], operands.x[m], operands.weights[n][2], operands.weights[n][3]);
      }
  }

  // Calls write(place, half of the rows, m tile) for each of the lane's rows that are there.
  template <typename Write>
  static __device__ __forceinline__ void each_row(int first, int end, Write write) {
#pragma unroll
    for (int m = 0; m < M_TILES; m++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int place = first + first_row() + m * 16 + half * 8 + lane() / 4;
        if (place < end) write(place, half, m);
      }
  }

  template <int kind>
  __device__ __forceinline__ void write_activated(const ExpertsParams& p, int first, int end, int column) const {
    column += first_tile() * 4 + lane() % 4 * 2;
    each_row(first, end, [&](int place, int half, int m) {
      T* to = static_cast<T*>(p.out) + static_cast<int64_t>(place) * p.outputs + column;
#pragma unroll
      for (int n = 0; n < N_TILES / 2; n++) {
        const float(&gate)[4] = of[m][2 * n], (&up)[4] = of[m][2 * n + 1];
        if (column + n * 8 < p.outputs)
          *reinterpret_cast<uint32_t*>(to + n * 8) = T::pack(activated<kind>(gate[2 * half]) * up[2 * half],
                                                             activated<kind>(gate[2 * half + 1]) * up[2 * half + 1]);
      }
    });
  }

  __device__ __forceinline__ void write_plain(const ExpertsParams& p, int first, int end, int column) const {
    column += first_tile() * 8 + lane() % 4 * 2;
    each_row(first, end, [&](int place, int half, int m) {
      T* to = static_cast<T*>(p.out) + static_cast<int64_t>(p.order[place]) * p.outputs + column;
#pragma unroll
      for (int n = 0; n < N_TILES; n++)
        if (column + n * 8 < p.outputs)
          *reinterpret_cast<uint32_t*>(to + n * 8) = T::pack(of[m][n][2 * half], of[m][n][2 * half + 1]);
    });
  }

  __device__ __forceinline__ void write(const ExpertsParams& p, int first, int end, int column) const {
    switch (p.activation) {
      case SILU: return write_activated<SILU>(p, first, end, column);
      case GELU: return write_activated<GELU>(p, first, end, column);
      case GELU_TANH: return write_activated<GELU_TANH>(p, first, end, column);
      case RELU: return write_activated<RELU>(p, first, end, column);
      default: return write_plain(p, first, end, column);
    }
  }
};

template <typename T, int ROWS>
__device__ __forceinline__ void multiply(const ExpertsParams& p) {
  DYNAMIC_SHARED(uint4, stages);
  constexpr int STAGES = Tile<ROWS>::STAGES, STAGE = Tile<ROWS>::STAGE;
  const int4 tile = p.tiles[blockIdx.x / p.columns];
  if (tile.x < 0) return;
  const int tiles = (tile.z - tile.y + ROWS - 1) / ROWS, i = blockIdx.x - tile.w * p.columns;
  const int first = tile.y + i % tiles * ROWS, outputs = p.activation < 0 ? Tile<ROWS>::COLUMNS : Tile<ROWS>::COLUMNS / 2;
  const int column = i / tiles * outputs, pieces = (p.inputs + DEPTH - 1) / DEPTH;
  const Copies<ROWS> copies(p, tile, first, column);
#pragma unroll
  for (int piece = 0; piece < STAGES; piece++) {
    if (piece < pieces) copies.start(stages + piece * STAGE, piece);
    cp_async_commit();
  }
  Sums<T, ROWS> sums;
  typename Sums<T, ROWS>::Operands operands[2];  // those of the next 16 inputs are read before these are multiplied
  cp_async_wait<STAGES - 1>();
  __syncthreads();
  sums.read(operands[0], stages, 0);
  int before = STAGES - 1, now = 0;  // buffers
  for (int piece = 0; piece < pieces; piece++) {
    const int next = now + 1 < STAGES ? now + 1 : 0, refill = piece + STAGES - 1;
#pragma unroll
    for (int step = 0; step < STEPS - 1; step++) {
      sums.read(operands[(step + 1) % 2], stages + now * STAGE, step + 1);
      if (piece > 0 && refill < pieces) copies.start(stages + before * STAGE, refill, step);
      sums.add(operands[step % 2]);
    }
    cp_async_commit();
    cp_async_wait<STAGES - 2>();
    __syncthreads();  // all have read this piece, and the next one is there
    if (piece + 1 < pieces) sums.read(operands[0], stages + next * STAGE, 0);
    sums.add(operands[(STEPS - 1) % 2]);
    before = now, now = next;
  }
  sums.write(p, first, tile.z, column);
}

}  // namespace

KERNEL(experts_r16_bf16, ExpertsParams, THREADS, multiply<bf16, 16>)
KERNEL(experts_r64_bf16, ExpertsParams, THREADS, multiply<bf16, 64>)
KERNEL(experts_r128_bf16, ExpertsParams, THREADS, multiply<bf16, 128>)
KERNEL(experts_r16_f16, ExpertsParams, THREADS, multiply<f16, 16>)
KERNEL(experts_r64_f16, ExpertsParams, THREADS, multiply<f16, 64>)
KERNEL(experts_r128_f16, ExpertsParams, THREADS, multiply<f16, 128>)
