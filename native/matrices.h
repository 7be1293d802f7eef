// The host's part of Muon: the moving average of gradients with the direction that the device gets,
// and the masters that lose what it gives back. A slab of either is computed in the cache in fp32, and
// then rounded in a second loop (see Emitter).
#pragma once

#include "fp32.h"
#include "split16.h"

namespace offloadtrain {
namespace {

// torch's lerp: from `base`, the nearer end.
struct Blended {
  float average, direction;
  static Blended of(const Blend& b, float g, float old) {
    const float average = __builtin_fmaf(b.weight, g - old, b.towards_grad ? g : old);
    const float base = b.towards_average ? average : g;
    const float ahead = __builtin_fmaf(b.nesterov_weight, average - g, base);
    return {average, b.nesterov ? ahead : average};
  }
};

template <typename Grad>
void blend_fp32_as(const Blend& given, float* average, const Gradient& grad, u16* target, i64 lo,
                   i64 hi) {
  const Blend blend = given;
  alignas(64) float direction[kSlab];
  for (i64 begin = lo; begin < hi; begin += kSlab) {
    const i64 count = hi - begin < kSlab ? hi - begin : kSlab;
    const auto* grads = values_of<Grad>(grad) + begin;
    float* averages = average + begin;
    OT_INDEPENDENT
    for (i64 i = 0; i < count; ++i) {
      const Blended x = Blended::of(blend, Grad::load(grads[i]) * blend.grad_scale, averages[i]);
      averages[i] = x.average;
      direction[i] = x.direction;
    }
    cast_loop<BFloat16>(direction, target + begin, count);
  }
}

void blend_fp32(const Blend& blend, float* average, const Gradient& grad, u16* target, i64 lo, i64 hi) {
  with_format(grad.dtype, [&](auto format) {
    blend_fp32_as<decltype(format)>(blend, average, grad, target, lo, hi);
  });
}

template <typename Grad>
void blend_split16_as(const Blend& given, u16* average, const Gradient& grad, u16* target,
                      const Run& run) {
  const Blend blend = given;
  const Random random(run.key);
  alignas(64) float direction[kSlab];
  for (i64 begin = run.lo; begin < run.hi; begin += kSlab) {
    const i64 count = run.hi - begin < kSlab ? run.hi - begin : kSlab;
    const u32 element = run.element + static_cast<u32>(begin - run.lo);
    const auto* grads = values_of<Grad>(grad) + begin;
    u16* averages = average + begin;
    OT_INDEPENDENT
    for (i32 i = 0; i < static_cast<i32>(count); ++i) {
      const float g = Grad::load_canonical(grads[i]) * blend.grad_scale;
      const Blended x = Blended::of(blend, g, BFloat16::load(averages[i]));
      const u32 bits = random.bits(element + static_cast<u32>(i));
      averages[i] = BFloat16::store(x.average, bits & 0xffffu);
      direction[i] = x.direction;
    }
    cast_loop<BFloat16>(direction, target + begin, count);
  }
}

void blend_split16(const Blend& blend, u16* average, const Gradient& grad, u16* target,
                   const Run& run) {
  with_format(grad.dtype, [&](auto format) {
    blend_split16_as<decltype(format)>(blend, average, grad, target, run);
  });
}

// `working` null: none wanted.
void subtract_fp32(const Decay& given, float* master, const u16* update, void* working,
                   DType working_dtype, i64 lo, i64 hi) {
  const Decay decay = given;
  for (i64 begin = lo; begin < hi; begin += kSlab) {
    const i64 count = hi - begin < kSlab ? hi - begin : kSlab;
    float* masters = master + begin;
    const u16* updates = update + begin;
    OT_INDEPENDENT
    for (i64 i = 0; i < count; ++i) {
      const float kept = masters[i] * decay.factor;
      masters[i] = __builtin_fmaf(BFloat16::load(updates[i]), decay.negative_rate, kept);
    }
    cast_any(masters, working, working_dtype, begin, count);
  }
}

void subtract_split16(const Decay& given, u16* weight, i16* low, const u16* update, i64 lo, i64 hi) {
  const Decay decay = given;
  OT_INDEPENDENT
  for (i64 i = lo; i < hi; ++i) {
    const float kept = Split::join(weight[i], low[i]) * decay.factor;
    const float p = canonical(__builtin_fmaf(BFloat16::load(update[i]), decay.negative_rate, kept));
    weight[i] = Split::weight(p);
    low[i] = Split::low(p);
  }
}

}  // namespace
}  // namespace offloadtrain
