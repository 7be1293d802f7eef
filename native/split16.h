// A step on split16 state.
#pragma once

#include "rules.h"
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
    float m = 0.0f, v = 0.0f;
    if constexpr (Rule::kMoments > 0) m = BFloat16::load(old.first[i]);
    if constexpr (Rule::kMoments > 1) v = BFloat16::load(old.second[i]);
    const float p = Split::join(old.weight[i], old.low[i]);
    const Values x = rule(Grad::load_canonical(grad[i]), p, m, v);
    fresh.weight[i] = Split::weight(x.master);
    fresh.low[i] = Split::low(x.master);
    const u32 bits = random.bits(element + static_cast<u32>(i));
    if constexpr (Rule::kMoments > 0) fresh.first[i] = BFloat16::store(x.first, bits & 0xffffu);
    if constexpr (Rule::kMoments > 1) fresh.second[i] = BFloat16::store(x.second, bits >> 16);
  }
}

Split16State at(const Split16State& state, i64 lo) {
  return {state.weight + lo, state.low + lo, shifted(state.first, lo), shifted(state.second, lo)};
}

template <typename Grad, typename Rule>
void split16_state(const Rule& rule, const Split16State& in, const Split16State& out,
                   const Gradient& grad, const Run& run) {
  const Random random(run.key);
  const auto* grads = values_of<Grad>(grad);
  const bool doubled = out.weight != in.weight;
  Output<u16> weight(out.weight, doubled), first(out.first, doubled);
  Output<u16> second(out.second, doubled);
  Output<i16> low(out.low, doubled);
  for (i64 i = run.lo; i < run.hi; i += kSlab) {
    const i64 count = run.hi - i < kSlab ? run.hi - i : kSlab;
    const u32 element = run.element + static_cast<u32>(i - run.lo);
    const Split16State target = {weight.at(i), low.at(i), first.at(i), second.at(i)};
    split16_loop<Grad>(rule, random, element, at(in, i), target, grads + i, count);
    weight.done(i, count);
    low.done(i, count);
    if constexpr (Rule::kMoments > 0) first.done(i, count);
    if constexpr (Rule::kMoments > 1) second.done(i, count);
  }
  if (doubled) finish_streaming();
}

void update_split16(const Step& step, const Split16State& in, const Split16State& out,
                    const Gradient& grad, const Run& run) {
  with_rule(step, [&](const auto& rule) {
    with_format(grad.dtype, [&](auto format) {
      split16_state<decltype(format)>(rule, in, out, grad, run);
    });
  });
}

}  // namespace
}  // namespace offloadtrain
