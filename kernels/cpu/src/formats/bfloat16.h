// Weights in bfloat16. A step is a pair of inputs; both numbers of an output lie together in 32 bits.
#pragma once
#include "../tiles.h"
#include "panel.h"

#ifdef TILES
struct Bfloat16Tiles;
#endif
#ifdef PAIRS_OF_BFLOAT16
struct Bfloat16Pairs;
#else
typedef struct Bfloat16 Bfloat16Pairs;
#endif

struct Bfloat16 {
  typedef float Input;
  typedef vu Register;
  static constexpr const char* NAME = "bfloat16";
  static constexpr int DEPTH = 2, BYTES = 4 * WIDTH, PARTS = 2;
  static constexpr bool SCALED = false, ROUNDS = false, GROUPED = false, TILED = false, PREFETCHED = true;
#ifdef TILES
  typedef Bfloat16Tiles ForBfloat16;
#else
  typedef Bfloat16Pairs ForBfloat16;
#endif

  static Register load_weights(const char* p) {
    vu v;
    memcpy(&v, p, sizeof v);
    return v;
  }
  static vf part(Register w, int i) { return (vf)(i == 0 ? w << 16 : w & 0xffff0000u); }
  static vf add(const float* x, vf w, vf sum) { return fused(splat(*x), w, sum); }

  static void pack(char* step, int64_t column, const float* numbers, float) {
    bf16* pair = reinterpret_cast<bf16*>(step) + 2 * column;
    for (int i = 0; i < 2; i++) pair[i] = narrow(numbers[i]);
  }
  static void unpack(const char* step, int64_t column, float* numbers) {
    const bf16* pair = reinterpret_cast<const bf16*>(step) + 2 * column;
    for (int i = 0; i < 2; i++) numbers[i] = widen(pair[i]);
  }
};

#ifdef TILES
// The same packed form, multiplied by tiles.
struct Bfloat16Tiles : Bfloat16 {
  typedef bf16 Input;
  static constexpr bool TILED = true, IN_PLACE = true;
};
#endif

#ifdef PAIRS_OF_BFLOAT16
// The same packed form, multiplied as it is.
struct Bfloat16Pairs : Bfloat16 {
  typedef bf16 Input;
  static constexpr int PARTS = 1;

  static Register part(Register w, int) { return w; }
  static vf add(const bf16* x, Register w, vf sum) { return dot_pair(x, w, sum); }
};
#endif
