// A step on split16 state.
#pragma once

#include "rule.h"
#include "stream.h"

namespace offloadtrain {
namespace {

template <typename Grad, typename Rule>
void split16_loop(const Rule& given, const Random& given_random, u32 element,
                  const Split16State& in, const Split16State& out,
                  const typename Grad::Storage* grad, i64 count) {
  const Rule rule = given;
  const Random random = given_random;
  const Split16State old = in, fresh = out;
  OT_INDEPENDENT
  for (i32 i = 0; i < static_cast<i32>(count); ++i) {
    const u32 bits = random.bits(element + static_cast<u32>(i));
    const Moments x = rule(Grad::load_canonical(grad[i]), Split::join(old.weight[i], old.low[i]),
                           BFloat16::load(old.exp_avg[i]), BFloat16::load(old.exp_avg_sq[i]));
    fresh.weight[i] = Split::weight(x.master);
    fresh.low[i] = Split::low(x.master);
    fresh.exp_avg[i] = BFloat16::store(x.exp_avg, bits & 0xffffu);
    fresh.exp_avg_sq[i] = BFloat16::store(x.exp_avg_sq, bits >> 16);
  }
}

Split16State at(const Split16State& state, i64 lo) {
  return {state.weight + lo, state.low + lo, state.exp_avg + lo, state.exp_avg_sq + lo};
}

template <typename Grad, typename Rule>
void split16_state(const Rule& rule, const Split16State& in, const Split16State& out,
                   const Gradient& grad, const Run& run) {
  const Random random(run.key);
  const auto* grads = values_of<Grad>(grad);
  const bool doubled = out.weight != in.weight;
  Output<u16> weight(out.weight, doubled), exp_avg(out.exp_avg, doubled);
  Output<u16> exp_avg_sq(out.exp_avg_sq, doubled);
  Output<i16> low(out.low, doubled);
  for (i64 i = run.lo; i < run.hi; i += kSlab) {
    const i64 count = run.hi - i < kSlab ? run.hi - i : kSlab;
    const u32 element = run.element + static_cast<u32>(i - run.lo);
    const Split16State target = {weight.at(i), low.at(i), exp_avg.at(i), exp_avg_sq.at(i)};
    split16_loop<Grad>(rule, random, element, at(in, i), target, grads + i, count);
    weight.done(i, count);
    low.done(i, count);
    exp_avg.done(i, count);
    exp_avg_sq.done(i, count);
  }
  if (doubled) finish_streaming();
}

template <typename Grad>
void split16_from(const Adam& adam, const Split16State& in, const Split16State& out,
                  const Gradient& grad, const Run& run) {
  with_rule(adam, [&](const auto& rule) { split16_state<Grad>(rule, in, out, grad, run); });
}

void adam_split16(const Adam& adam, const Split16State& in, const Split16State& out,
                  const Gradient& grad, const Run& run) {
  switch (grad.dtype) {
    case DType::float32: return split16_from<Float32>(adam, in, out, grad, run);
    case DType::bfloat16: return split16_from<BFloat16>(adam, in, out, grad, run);
    case DType::float16: return split16_from<Float16>(adam, in, out, grad, run);
    case DType::none: return;
  }
}

}  // namespace
}  // namespace offloadtrain
