// The kernels, in plain C++. This file is compiled once per instruction set, with
//   -ffp-contract=off           a multiply-add is fused where it is written so, and nowhere else:
//                               the same bits from every instruction set
//   -fno-math-errno -fno-trapping-math   or the loops do not vectorise
// and OT_TABLE naming the table; all else has internal linkage (see numbers.h).
#include "kernels.h"

#include "fp32.h"
#include "gradients.h"
#include "int8.h"
#include "masters.h"
#include "matrices.h"
#include "split16.h"

namespace offloadtrain {
namespace {

// The limit to compare with.
OT_INLINE void traffic_loop(const Fp32State& state, const u16* grad, u16* working, i64 count) {
  float *master = state.master, *first = state.first, *second = state.second;
  OT_INDEPENDENT
  for (i64 i = 0; i < count; ++i) {
    master[i] = master[i] * 0.999f;
    first[i] = first[i] * 0.999f;
    second[i] = second[i] * 0.999f;
    working[i] = static_cast<u16>(grad[i] ^ 1u);
  }
}

void traffic(const Fp32State& state, const u16* grad, u16* working, i64 lo, i64 hi) {
  Output<true, u16> weights(working);
  i64 i = lo;
  for (; i + kSlab <= hi; i += kSlab) {
    prefetch<Adam<false>>(at(state, i), grad + i);
    traffic_loop(at(state, i), grad + i, weights.at(i), kSlab);
    weights.done(i);
  }
  traffic_loop(at(state, i), grad + i, working + i, hi - i);
  finish_streaming();
}

}  // namespace

extern const Kernels OT_TABLE;
const Kernels OT_TABLE = {OT_NAME,    update_fp32, update_split16, update_int8,
                          accumulate, cast,        segment,        traffic,
                          encode_split16, encode_int8, decode_split16, decode_int8,
                          blend_fp32, blend_split16, subtract_fp32, subtract_split16};

}  // namespace offloadtrain
