// Weights of 2, 4, 6 or 8 bits in groups of inputs with one float32 scale per output, and perhaps one minimum: Groups
// of kernels/ops.py says what a number is. A step is a group: scales, minima, then the numbers, 32 bits for some inputs
// of an output, the even ones in the lower half; 6 bits take a byte. gemm.cpp writes some steps as float32 panels and
// multiplies these, so that a product has the bits of the float32 weight; where the machine multiplies pairs of
// bfloat16, it does so for activations in bfloat16, by tiles where it has them (GroupTiles), else by VDPBF16PS
// (GroupPairs).
#pragma once
#include <array>
#include <type_traits>

#include "../tiles.h"
#include "float32.h"

// The panels that unpacked steps become; they lie in the first cache already.
struct Unpacked : Float32 {
  static constexpr bool PREFETCHED = false;
};

// What each number of 4 bits stands for: TABLES of kernels/formats.py, and integers.
struct Float4 {
  static constexpr char NAME[] = "float4";
  static constexpr float NUMBERS[] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6};
};
struct Iq4 {
  static constexpr char NAME[] = "iq4";
  static constexpr float NUMBERS[] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
};
struct Integers {
  static constexpr char NAME[] = "int";  // the bits follow
  static constexpr float NUMBERS[] = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
};

// The number that the lowest 4 bits of each word choose; the other bits may be any.
template <class Table>
static inline vf chosen(vu words) {
#if LANES == 16
  return (vf)_mm512_maskz_permutexvar_ps(0xffff, (__m512i)words, _mm512_loadu_ps(Table::NUMBERS));
#elif LANES == 8
  const __m256 lower = _mm256_permutevar8x32_ps(_mm256_loadu_ps(Table::NUMBERS), (__m256i)words);
  const __m256 upper = _mm256_permutevar8x32_ps(_mm256_loadu_ps(Table::NUMBERS + 8), (__m256i)words);
  return (vf)_mm256_blendv_ps(lower, upper, (__m256)(words << 28));  // by the sign
#else
  vf numbers;
  for (int lane = 0; lane < LANES; lane++) numbers[lane] = Table::NUMBERS[words[lane] & 15];
  return numbers;
#endif
}

template <class W>
struct GroupPairs;
template <class W>
struct GroupTiles;

// How a format multiplies activations in bfloat16. A table with numbers that bfloat16 would round is multiplied as float32.
template <class W, class Table>
struct GroupsForBfloat16 {
#ifdef PAIRS_OF_BFLOAT16
  static constexpr bool EXACT = [] {
    for (float number : Table::NUMBERS)
      if (__builtin_bit_cast(uint32_t, number) & 0xffff) return false;
    return true;
  }();
#ifdef TILES
  typedef std::conditional_t<EXACT, GroupTiles<W>, W> Type;
#else
  typedef std::conditional_t<EXACT, GroupPairs<W>, W> Type;
#endif
#else
  typedef W Type;
#endif
};

// The name that GroupFormat of kernels/formats.py has: int4-32-mins, float4-32.
constexpr std::array<char, 24> group_name(const char* table, int bits, int group, bool has_mins) {
  std::array<char, 24> name{};
  size_t at = 0;
  for (; *table; table++) name[at++] = *table;
  if (bits) name[at++] = char('0' + bits);
  name[at++] = '-';
  for (int place = 100; place; place /= 10)
    if (group >= place) name[at++] = char('0' + group / place % 10);
  if (has_mins)
    for (const char* end = "-mins"; *end; end++) name[at++] = *end;
  return name;
}

template <int BITS, int GROUP, bool HAS_MINS, class TABLE = Integers>
struct Groups {
  typedef TABLE Table;
  typedef typename GroupsForBfloat16<Groups, Table>::Type ForBfloat16;
  static constexpr bool MINS = HAS_MINS, TABLED = !std::is_same_v<Table, Integers>;
  static_assert(!TABLED || (BITS == 4 && !MINS));
  static constexpr auto TEXT = group_name(Table::NAME, TABLED ? 0 : BITS, GROUP, MINS);
  static constexpr const char* NAME = TEXT.data();
  static_assert(((BITS == 2 && MINS) || BITS == 4 || BITS == 6 || BITS == 8) && (GROUP == 16 || GROUP % 32 == 0));
  typedef float Input;
  static constexpr int SCALE_BYTES = (MINS ? 2 : 1) * WIDTH * 4;
  static constexpr int BITS_EACH = BITS, HELD = BITS == 6 ? 8 : BITS, NUMBERS = 32 / HELD;  // of a word
  static constexpr int DEPTH = GROUP, BYTES = SCALE_BYTES + GROUP * WIDTH * HELD / 8;
  static constexpr int PIECE = GROUP < 32 ? GROUP : 32;  // unpacked together
  static constexpr bool SCALED = false, ROUNDS = false, GROUPED = true, TILED = false, PAIRED = false;
  static constexpr float MIDDLE = TABLED ? 0 : 1 << (BITS - 1);  // what a number without minimum is above its value

  // Where a word has the i-th of its inputs.
  static constexpr int shift(int i) { return i % 2 * 16 + i / 2 * HELD; }

  // Scales of half `h` of a step, and what is added besides.
  static void load_scale(const char* step, int h, vf& scale, vf& below) {
    const float* scales = reinterpret_cast<const float*>(step) + h * LANES;
    scale = load(scales);
    below = MINS ? -load(scales + WIDTH) : splat(-MIDDLE);
  }

  // The numbers of inputs first .. first + PIECE of a step, [PIECE][WIDTH].
  static void unpack_piece(const char* step, int64_t first, float* out) {
    const char* words_at = step + SCALE_BYTES + first * WIDTH * HELD / 8;
#pragma GCC unroll 2
    for (int h = 0; h < 2; h++) {
      vf scale, below;
      load_scale(step, h, scale, below);
      for (int word = 0; word < PIECE / NUMBERS; word++) {
        vu words;
        memcpy(&words, words_at + (word * 2 + h) * LANES * 4, sizeof words);
        __builtin_prefetch(words_at + (word * 2 + h) * LANES * 4 + AHEAD);
#pragma GCC unroll 8
        for (int i = 0; i < NUMBERS; i++)
          store(out + (word * NUMBERS + i) * WIDTH + h * LANES, value(words >> shift(i), scale, below));
      }
    }
  }

  // `place`: of an output in its panel. `count` numbers, GROUP at most; those behind them are zero.
  static void pack(char* step, int64_t place, const uint8_t* numbers, int64_t count, float scale, float min) {
    float* scales = reinterpret_cast<float*>(step) + place;
    scales[0] = scale;
    if (MINS) scales[WIDTH] = min;
    for (int first = 0; first < GROUP; first += NUMBERS) {
      uint32_t word = 0;
      for (int i = 0; i < NUMBERS; i++)
        word |= uint32_t(first + i < count ? numbers[first + i] : MINS ? 0 : int(MIDDLE)) << shift(i);
      memcpy(step + SCALE_BYTES + (first / NUMBERS * WIDTH + place) * 4, &word, 4);
    }
  }

  // One output of a step, [DEPTH].
  static void unpack(const char* step, int64_t place, float* numbers) {
    const float* scales = reinterpret_cast<const float*>(step) + place;
    for (int i = 0; i < GROUP; i++) {
      uint32_t word;
      memcpy(&word, step + SCALE_BYTES + (i / NUMBERS * WIDTH + place) * 4, 4);
      const uint32_t number = word >> shift(i % NUMBERS) & ((1 << BITS) - 1);
      const float q = TABLED ? Table::NUMBERS[number] : float(number);
      numbers[i] = MINS ? q * scales[0] - scales[WIDTH] : (q - MIDDLE) * scales[0];
    }
  }

  static constexpr int AHEAD = 4096;  // bytes of a panel that are fetched before they are unpacked

  // The lowest BITS of each word as a weight. q * scale is exact where there is a minimum, so one rounding is left.
  static vf value(vu words, vf scale, vf below) {
    if (TABLED || (LANES == 16 && BITS == 4 && !MINS)) return chosen<Table>(words) * scale;
    const vf q = __builtin_convertvector((vi)(words & ((1u << BITS) - 1)), vf);
    return MINS ? fused(q, scale, below) : (q + below) * scale;
  }
};

#ifdef PAIRS_OF_BFLOAT16
// How steps of Groups of any depth are multiplied by activations in bfloat16, in pairs. Numbers are exact in bfloat16; scale
// and minimum count once a group, in float32. So no weight is rounded.
template <int BITS, bool HAS_MINS, class Table>
struct Pairs {
  typedef bf16 Input;
  typedef Groups<BITS, 32, HAS_MINS, Table> Step;
  static constexpr bool GROUPED = true, MINS = HAS_MINS, PREFETCHED = true;
  static constexpr int SCALE_BYTES = Step::SCALE_BYTES, NUMBERS = Step::NUMBERS, EACH = NUMBERS / 2;  // pairs of a word

  static int64_t bytes(int64_t depth) { return SCALE_BYTES + depth * WIDTH * Step::HELD / 8; }
  static void load_scale(const char* step, int h, vf& scale, vf& below) { Step::load_scale(step, h, scale, below); }

  // The i-th pair of inputs of each word.
  static vu pair(vu words, int i) {
    if (BITS <= 6) return chosen(words >> i * Step::HELD);
    return halves(number(words, i), number(words >> 16, i));
  }

  // The i-th pair of the even inputs of each word, or of the odd ones. The earlier input is in the upper half, which
  // chain_pair multiplies first.
  static vu chained(vu words, int odd, int i) {
    if (BITS <= 4) {
      const int at = odd * 0x02020202;  // one half of each word twice
      const __m512i bytes = _mm512_set4_epi32(0x0d0c0d0c + at, 0x09080908 + at, 0x05040504 + at, 0x01000100 + at);
      const __m512i half = _mm512_shuffle_epi8((__m512i)words, bytes);
      const __m512i shifts = _mm512_set1_epi32(2 * BITS * i << 16 | (2 * i + 1) * BITS);
      return chosen((vu)_mm512_maskz_srlv_epi16(~0u, half, shifts));
    }
    if (BITS == 6) {
      const int at = odd * 0x00020002;
      const __m512i bytes = _mm512_set4_epi32(0x000c000d + at, 0x00080009 + at, 0x00040005 + at, 0x00000001 + at);
      return chosen((vu)_mm512_shuffle_epi8((__m512i)words, bytes));
    }
    words >>= odd * 16;
    return halves(number(words, 1), number(words, 0));
  }

 private:
  static constexpr float ZERO = MINS ? 0 : Step::MIDDLE;

  // The number of at most 4 bits that the lowest 5 bits of each half choose, or that of 6 bits that the lowest 6 choose.
  static vu chosen(vu words) {
    __m512i table[TABLE.size() / 32];
    memcpy(table, TABLE.data(), sizeof table);
    if constexpr (BITS == 6) return (vu)_mm512_permutex2var_epi16(table[0], (__m512i)words, table[1]);
    return (vu)_mm512_maskz_permutexvar_epi16(~0u, (__m512i)words, table[0]);
  }

  // The number of the lowest 8 bits or of the next 8. A float32 of 2^23 and a little more has its lowest bits for the
  // former, one of 2^15 its next 8 for the latter. What is left is exact in the upper half.
  static vu number(vu words, int i) {
    if (i == 0) return (vu)((vf)((words & 0xff) | 0x4b000000) - (8388608 + ZERO));
    return (vu)((vf)((words & 0xff00) | 0x47000000) - (32768 + ZERO));
  }
  // The upper halves of both.
  static vu halves(vu lower, vu upper) {
    const __m512i bytes = _mm512_set4_epi32(0x0f0e0f0e, 0x0b0a0b0a, 0x07060706, 0x03020302);
    return (vu)_mm512_mask_shuffle_epi8((__m512i)upper, 0x3333333333333333, (__m512i)lower, bytes);
  }

  static constexpr auto TABLE = [] {
    std::array<bf16, BITS == 6 ? 64 : 32> table{};
    for (size_t i = 0; i < table.size(); i++) {
      const float number = Step::TABLED ? Table::NUMBERS[i % 16] : i % (1 << BITS) - ZERO;
      table[i] = __builtin_bit_cast(uint32_t, number) >> 16;
    }
    return table;
  }();
};

// Such steps with their words unpacked: scales, minima where the format has them, and pairs of inputs, [depth / 2][WIDTH].
struct UnpackedPairs {
  typedef bf16 Input;
  static constexpr bool GROUPED = true, PREFETCHED = false;
  static constexpr bool MINS = true;  // has room for them
  static constexpr int SCALE_BYTES = 2 * WIDTH * 4, NUMBERS = 2, EACH = 1;
  static constexpr int AHEAD = 2048;  // bytes of a panel that are fetched before they are unpacked

  static constexpr int64_t bytes(int64_t depth) { return SCALE_BYTES + depth / 2 * WIDTH * 4; }
  static void load_scale(const char* step, int h, vf& scale, vf& below) {
    Groups<4, 32, true>::load_scale(step, h, scale, below);
  }
  static vu pair(vu words, int) { return words; }

  template <class P>
  static void unpack(const char* step, int64_t depth, char* out) {
    memcpy(out, step, P::SCALE_BYTES);
    for (int at = 0; at < P::SCALE_BYTES; at += 64) __builtin_prefetch(step + AHEAD + at);
    step += P::SCALE_BYTES, out += SCALE_BYTES;
    for (int64_t word = 0; word < depth / P::NUMBERS; word++, out += P::EACH * WIDTH * 4)
      for (int h = 0; h < 2; h++, step += LANES * 4) {
        vu words;
        memcpy(&words, step, sizeof words);
        __builtin_prefetch(step + AHEAD);
#pragma GCC unroll 4
        for (int i = 0; i < P::EACH; i++) {
          const vu both = P::pair(words, i);
          memcpy(out + (i * 2 + h) * LANES * 4, &both, sizeof both);
        }
      }
  }
};

// The same packed form for activations in bfloat16.
template <class W>
struct GroupPairs : W {
  typedef bf16 Input;
  typedef Pairs<W::BITS_EACH, W::MINS, typename W::Table> Kernel;
  static constexpr bool PAIRED = true;
};
#endif

#ifdef TILES
// The same: some groups at a time become UnpackedPairs, which tiles multiply (GroupTileKernel). A lone row is multiplied
// in the same order without tiles (chained_kernel).
template <class W>
struct GroupTiles : GroupPairs<W> {
  static constexpr bool PAIRED = false, TILED = true, IN_PLACE = false;
};
#endif

// The list that formats.h takes. A line is bits, inputs of a group, whether it has minima, and the table of its numbers.
typedef Formats<Groups<2, 16, true>, Groups<4, 16, false>, Groups<4, 32, false>, Groups<4, 32, true>,
                Groups<4, 128, false>, Groups<4, 128, true>, Groups<6, 16, false>, Groups<6, 32, false>,
                Groups<6, 32, true>, Groups<8, 32, false>, Groups<8, 32, true>, Groups<8, 128, false>,
                Groups<8, 128, true>, Groups<4, 32, false, Float4>, Groups<4, 32, false, Iq4>>
    GroupFormats;
