// A step on fp32 state, and rounding to 16 bits.
#pragma once

#include "rules.h"
#include "stream.h"

namespace offloadtrain {
namespace {

template <typename Grad, typename Rule>
OT_INLINE void fp32_loop(const Rule& given, const Fp32State& in, const Fp32State& out,
               const typename Grad::Storage* grad, i64 count) {
  const Rule rule = given;
  const float *master = in.master, *first = in.first, *second = in.second;
  float *new_master = out.master, *new_first = out.first, *new_second = out.second;
  OT_INDEPENDENT
  for (i64 i = 0; i < count; ++i) {
    float m = 0.0f, v = 0.0f;
    if constexpr (Rule::kMoments > 0) m = first[i];
    if constexpr (Rule::kMoments > 1) v = second[i];
    const Values x = whole_step(rule, Grad::load(grad[i]), master[i], m, v);
    if constexpr (Rule::kMoments > 0) new_first[i] = x.first;
    if constexpr (Rule::kMoments > 1) new_second[i] = x.second;
    new_master[i] = x.master;
  }
}

template <typename Target>
OT_INLINE void cast_loop(const float* source, typename Target::Storage* target, i64 count) {
  for (i64 i = 0; i < count; ++i) target[i] = Target::store(source[i]);
}

void cast_any(const float* source, void* targets, DType dtype, i64 lo, i64 count) {
  with_format(dtype, [&](auto target) {
    using Target = decltype(target);
    cast_loop<Target>(source, static_cast<typename Target::Storage*>(targets) + lo, count);
  });
}

Fp32State at(const Fp32State& state, i64 lo) {
  return {state.master + lo, shifted(state.first, lo), shifted(state.second, lo)};
}

// The new weights of a slab, from masters that the cache still holds. A second loop, because one that
// writes 16-bit weights beside the state ran at half the speed on some placements of the buffers
// (measured on Zen 5: exp_avg_sq 64 bytes off; the arithmetic alone did not mind).
class Emitter {
 public:
  Emitter(void* working, DType dtype, bool streamed)
      : working_(working), dtype_(dtype), streamed_(streamed && dtype > DType::float32) {}

  OT_INLINE void emit(const float* master, i64 lo, i64 count) {
    if (!streamed_ || count < kSlab) return cast_any(master, working_, dtype_, lo, count);
    cast_any(master, slab_, dtype_, 0, kSlab);
    stream<kSlab>(static_cast<u16*>(working_) + lo, slab_);
  }

 private:
  void* working_;
  DType dtype_;
  bool streamed_;
  alignas(64) u16 slab_[kSlab];
};

template <typename Rule, typename Grad>
OT_INLINE void prefetch(const Fp32State& state, const Grad* grad) {
  prefetch<kSlab>(state.master);
  if constexpr (Rule::kMoments > 0) prefetch<kSlab>(state.first);
  if constexpr (Rule::kMoments > 1) prefetch<kSlab>(state.second);
  prefetch<kSlab>(grad);
}

// The weights may go where the gradient was: its slab is read by then.
template <bool kDoubled, typename Grad, typename Rule>
void fp32_state(const Rule& given, const Fp32State& in, const Fp32State& out, const Gradient& grad,
                void* working, DType working_dtype, i64 lo, i64 hi) {
  const Rule rule = given;  // in registers: what is stored may be any memory
  const auto* grads = values_of<Grad>(grad);
  Output<kDoubled, float> master(out.master), first(out.first);
  Output<kDoubled, float> second(out.second);
  Emitter weights(working, working_dtype, working != grad.values);
  i64 i = lo;
  for (; i + kSlab <= hi; i += kSlab) {
    const Fp32State old = at(in, i), target = {master.at(i), first.at(i), second.at(i)};
    prefetch<Rule>(old, grads + i);
    fp32_loop<Grad>(rule, old, target, grads + i, kSlab);
    weights.emit(target.master, i, kSlab);
    master.done(i);
    if constexpr (Rule::kMoments > 0) first.done(i);
    if constexpr (Rule::kMoments > 1) second.done(i);
  }
  if (i < hi) {
    fp32_loop<Grad>(rule, at(in, i), at(out, i), grads + i, hi - i);
    weights.emit(out.master + i, i, hi - i);
  }
  finish_streaming();
}

void update_fp32(const Step& step, const Fp32State& in, const Fp32State& out, const Gradient& grad,
                 void* working, DType working_dtype, i64 lo, i64 hi) {
  with_rule(step, [&](const auto& rule) {
    with_format(grad.dtype, [&](auto format) {
      using Grad = decltype(format);
      if (in.master == out.master) {
        fp32_state<false, Grad>(rule, in, out, grad, working, working_dtype, lo, hi);
      } else {
        fp32_state<true, Grad>(rule, in, out, grad, working, working_dtype, lo, hi);
      }
    });
  });
}

void cast(const float* source, void* target, DType dtype, i64 lo, i64 hi) {
  cast_any(source + lo, target, dtype, lo, hi - lo);
}

}  // namespace
}  // namespace offloadtrain
