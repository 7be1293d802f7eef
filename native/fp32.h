// A step on fp32 state, and rounding to 16 bits.
#pragma once

#include "rule.h"
#include "stream.h"

namespace offloadtrain {
namespace {

template <typename Grad, typename Rule>
void fp32_loop(const Rule& given, const Fp32State& in, const Fp32State& out,
               const typename Grad::Storage* grad, i64 count) {
  const Rule rule = given;
  const float *master = in.master, *exp_avg = in.exp_avg, *exp_avg_sq = in.exp_avg_sq;
  float *new_master = out.master, *new_exp_avg = out.exp_avg, *new_exp_avg_sq = out.exp_avg_sq;
  OT_INDEPENDENT
  for (i64 i = 0; i < count; ++i) {
    const Moments x = rule(Grad::load(grad[i]), master[i], exp_avg[i], exp_avg_sq[i]);
    new_exp_avg[i] = x.exp_avg;
    new_exp_avg_sq[i] = x.exp_avg_sq;
    new_master[i] = x.master;
  }
}

template <typename Target>
void cast_loop(const float* source, typename Target::Storage* target, i64 count) {
  for (i64 i = 0; i < count; ++i) target[i] = Target::store(source[i]);
}

void cast_any(const float* source, void* targets, DType dtype, i64 lo, i64 count) {
  switch (dtype) {
    case DType::float32: return cast_loop<Float32>(source, static_cast<float*>(targets) + lo, count);
    case DType::bfloat16: return cast_loop<BFloat16>(source, static_cast<u16*>(targets) + lo, count);
    case DType::float16: return cast_loop<Float16>(source, static_cast<u16*>(targets) + lo, count);
    case DType::none: return;
  }
}

Fp32State at(const Fp32State& state, i64 lo) {
  return {state.master + lo, state.exp_avg + lo, state.exp_avg_sq + lo};
}

// The new weights of a slab, from masters that the cache still holds. A second loop, because one that
// writes 16-bit weights beside the state ran at half the speed on some placements of the buffers
// (measured on Zen 5: exp_avg_sq 64 bytes off; the arithmetic alone did not mind).
class Emitter {
 public:
  Emitter(void* working, DType dtype, bool streamed)
      : working_(working), dtype_(dtype), streamed_(streamed && dtype > DType::float32) {}

  void emit(const float* master, i64 lo, i64 count) {
    if (!streamed_) return cast_any(master, working_, dtype_, lo, count);
    cast_any(master, slab_, dtype_, 0, count);
    stream(static_cast<u16*>(working_) + lo, slab_, count);
  }

 private:
  void* working_;
  DType dtype_;
  bool streamed_;
  alignas(64) u16 slab_[kSlab];
};

// The weights may go where the gradient was: its slab is read by then.
template <typename Grad, typename Rule>
void fp32_state(const Rule& rule, const Fp32State& in, const Fp32State& out, const Gradient& grad,
                void* working, DType working_dtype, i64 lo, i64 hi) {
  const auto* grads = values_of<Grad>(grad);
  const bool doubled = out.master != in.master;
  Output<float> master(out.master, doubled), exp_avg(out.exp_avg, doubled);
  Output<float> exp_avg_sq(out.exp_avg_sq, doubled);
  Emitter weights(working, working_dtype, working != grad.values);
  for (i64 i = lo; i < hi; i += kSlab) {
    const i64 count = hi - i < kSlab ? hi - i : kSlab;
    const Fp32State target = {master.at(i), exp_avg.at(i), exp_avg_sq.at(i)};
    fp32_loop<Grad>(rule, at(in, i), target, grads + i, count);
    weights.emit(target.master, i, count);
    master.done(i, count);
    exp_avg.done(i, count);
    exp_avg_sq.done(i, count);
  }
  finish_streaming();
}

template <typename Grad>
void fp32_from(const Adam& adam, const Fp32State& in, const Fp32State& out, const Gradient& grad,
               void* working, DType working_dtype, i64 lo, i64 hi) {
  with_rule(adam, [&](const auto& rule) {
    fp32_state<Grad>(rule, in, out, grad, working, working_dtype, lo, hi);
  });
}

void adam_fp32(const Adam& adam, const Fp32State& in, const Fp32State& out, const Gradient& grad,
               void* working, DType working_dtype, i64 lo, i64 hi) {
  switch (grad.dtype) {
    case DType::float32: return fp32_from<Float32>(adam, in, out, grad, working, working_dtype, lo, hi);
    case DType::bfloat16: return fp32_from<BFloat16>(adam, in, out, grad, working, working_dtype, lo, hi);
    case DType::float16: return fp32_from<Float16>(adam, in, out, grad, working, working_dtype, lo, hi);
    case DType::none: return;
  }
}

void cast(const float* source, void* target, DType dtype, i64 lo, i64 hi) {
  cast_any(source + lo, target, dtype, lo, hi - lo);
}

}  // namespace
}  // namespace offloadtrain
