// The weight formats: one format is one file of formats/ and its name in the list below; those of Groups have a list in
// formats/groups.h.
//
// A format is a struct of constants and inline functions. gemm_kernel.h multiplies with them; gemm.cpp packs, unpacks
// and makes a row of its table of functions from each. A packed weight is panels of WIDTH outputs, a panel is steps of
// DEPTH inputs, a step is two halves of BYTES / 2, one for each LANES outputs; scales of blocks of DEPTH inputs lie in
// the step. A format has:
//
//   NAME          what Ops.pack_linear of kernels/ops.py calls it
//   Input         the type that activations are read as: float or bf16
//   DEPTH, BYTES  inputs and bytes of a step of a panel
//   SCALED        whether each output has a float32 scale besides: `scale` finds it, finished sums are multiplied by it
//   Register      half a step, as `load_weights` brings it from memory
//   PARTS, part   the vectors of factors that it holds, the i-th for the i-th input of the step; an input of bf16 pairs
//                 has one part for both
//   add           sums plus one part times one row's activations
//   pack, unpack  the DEPTH numbers of one output of a panel in a step; `inverse` is 1 / scale. Zeros must give zeros
//   PREFETCHED    whether the kernel fetches weights that are needed soon
//   ForBfloat16   the struct that multiplies bfloat16 activations: itself, or one with the same packed form
//   TILED         whether gemm_tiles.h multiplies it. Such a format needs no Register, PARTS, part, add and PREFETCHED; it
//                 has IN_PLACE, whether tiles read the packed form as it is, or else unpack_pairs
//   ROUNDS        whether activations are rounded to 8 bits and sums are integers, as of W8A8, which is packed from Groups
//   GROUPED       whether it is packed from Groups (kernels/ops.py). Such a format is multiplied as float32: instead of
//                 Register, PARTS, part, add and PREFETCHED it has unpack_piece, load_scale and value
//   PAIRED        of a GROUPED format: whether it is multiplied in pairs of bfloat16 instead, by its Kernel
#pragma once
#include "formats/bfloat16.h"
#include "formats/float32.h"
#include "formats/groups.h"
#include "formats/int8.h"
#include "formats/w8a8.h"

// A format's place is its number in LinearArgs and EmbedArgs; Python asks for the names (orcinus_weight_format).
template <class... G>
Formats<Float32, Bfloat16, Int8, G..., W8A8> with_groups(Formats<G...>);
typedef decltype(with_groups(GroupFormats{})) WeightFormats;
