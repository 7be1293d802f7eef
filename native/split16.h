// A step on split16 state.
#pragma once

#include "rules.h"
#include "stream.h"

namespace offloadtrain {
namespace {

// One element of a word: its master, and its moments before they are cut to 16 bits.
struct Split16Element {
  u32 master, first, second;
};

template <int kElement, typename Rule>
OT_INLINE Split16Element split16_element(const Rule& rule, float g, u32 weight, u32 low, u32 first,
                                         u32 second, u32 random) {
  const float p = Split::join(upper_half<kElement>(weight), signed_half<kElement>(low));
  const float m = float_of(upper_half<kElement>(first)), v = float_of(upper_half<kElement>(second));
  const Values x = whole_step(rule, g, p, m, v);
  return {bits_of(x.master), BFloat16::rounding(x.first, random & 0xffffu),
          BFloat16::rounding(x.second, random >> 16)};
}

// Two elements at once: see [Note: Words of several elements].
template <typename Grad, typename Rule>
OT_INLINE void split16_loop(const Rule& given, const Random& given_random, u32 element,
                            const Split16State& in, const Split16State& out,
                            const typename Grad::Storage* grad, i32 pairs) {
  const Rule rule = given;
  const Random random = given_random;
  const Split16State old = in, fresh = out;
  OT_INDEPENDENT
  for (i32 i = 0; i < pairs; ++i) {
    const u32 weight = word_at(old.weight, i), low = word_at(old.low, i);
    u32 m = 0, v = 0;
    if constexpr (Rule::kMoments > 0) m = word_at(old.first, i);
    if constexpr (Rule::kMoments > 1) v = word_at(old.second, i);
    const u32 number = element + 2u * static_cast<u32>(i);
    const float g0 = Grad::template of_pair<0>(grad, i), g1 = Grad::template of_pair<1>(grad, i);
    const Split16Element a = split16_element<0>(rule, g0, weight, low, m, v, random.bits(number));
    const Split16Element b = split16_element<1>(rule, g1, weight, low, m, v, random.bits(number + 1u));
    set_word(fresh.weight, i, word_of_upper(Split::rounding(a.master), Split::rounding(b.master)));
    set_word(fresh.low, i, word_of_lower(a.master, b.master));
    if constexpr (Rule::kMoments > 0) set_word(fresh.first, i, word_of_upper(a.first, b.first));
    if constexpr (Rule::kMoments > 1) set_word(fresh.second, i, word_of_upper(a.second, b.second));
  }
}

Split16State at(const Split16State& state, i64 lo) {
  return {state.weight + lo, state.low + lo, shifted(state.first, lo), shifted(state.second, lo)};
}

template <int kMoments>
void copy(const Split16State& from, const Split16State& to, i64 count) {
  copy(from.weight, to.weight, count);
  copy(from.low, to.low, count);
  if constexpr (kMoments > 0) copy(from.first, to.first, count);
  if constexpr (kMoments > 1) copy(from.second, to.second, count);
}

template <typename Rule, typename Grad>
OT_INLINE void prefetch(const Split16State& state, const Grad* grad) {
  prefetch<kSlab>(state.weight);
  prefetch<kSlab>(state.low);
  if constexpr (Rule::kMoments > 0) prefetch<kSlab>(state.first);
  if constexpr (Rule::kMoments > 1) prefetch<kSlab>(state.second);
  prefetch<kSlab>(grad);
}

// Fewer elements than a slab, by way of one in the cache that is filled up with zeros.
template <typename Grad, typename Rule>
void split16_rest(const Rule& rule, const Random& random, u32 element, const Split16State& in,
                  const Split16State& out, const typename Grad::Storage* grad, i64 count) {
  u16 weight[kSlab] = {}, first[kSlab] = {}, second[kSlab] = {};
  i16 low[kSlab] = {};
  typename Grad::Storage grads[kSlab] = {};
  const Split16State slab = {weight, low, first, second};
  copy<Rule::kMoments>(in, slab, count);
  copy(grad, grads, count);
  split16_loop<Grad>(rule, random, element, slab, slab, grads, kSlab / 2);
  copy<Rule::kMoments>(slab, out, count);
}

template <bool kDoubled, typename Grad, typename Rule>
void split16_state(const Rule& given, const Split16State& in, const Split16State& out,
                   const Gradient& grad, const Run& run) {
  const Rule rule = given;  // in registers: what is stored may be any memory
  const Random random(run.key);
  const auto* grads = values_of<Grad>(grad);
  Output<kDoubled, u16> weight(out.weight), first(out.first);
  Output<kDoubled, u16> second(out.second);
  Output<kDoubled, i16> low(out.low);
  u32 element = run.element;
  i64 i = run.lo;
  for (; i + kSlab <= run.hi; i += kSlab, element += static_cast<u32>(kSlab)) {
    const Split16State old = at(in, i);
    prefetch<Rule>(old, grads + i);
    const Split16State target = {weight.at(i), low.at(i), first.at(i), second.at(i)};
    split16_loop<Grad>(rule, random, element, old, target, grads + i, kSlab / 2);
    weight.done(i);
    low.done(i);
    if constexpr (Rule::kMoments > 0) first.done(i);
    if constexpr (Rule::kMoments > 1) second.done(i);
  }
  if (i < run.hi) split16_rest<Grad>(rule, random, element, at(in, i), at(out, i), grads + i, run.hi - i);
  if (kDoubled) finish_streaming();
}

void update_split16(const Step& step, const Split16State& in, const Split16State& out,
                    const Gradient& grad, const Run& run) {
  with_rule(step, [&](const auto& rule) {
    with_format(grad.dtype, [&](auto format) {
      using Grad = decltype(format);
      if (in.weight == out.weight) return split16_state<false, Grad>(rule, in, out, grad, run);
      split16_state<true, Grad>(rule, in, out, grad, run);
    });
  });
}

}  // namespace
}  // namespace offloadtrain
