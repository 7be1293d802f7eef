// The calls of a matrix rule's kernels. For module.cpp only.
#pragma once

#include <algorithm>
#include <cstring>
#include <tuple>
#include <vector>

#include "dispatch.h"
#include "kernels.h"
#include "layout.h"

namespace offloadtrain {
namespace {

// [Note: Waves] A matrix rule's bf16 direction goes to the front of its gradient's memory, and fp32
// weights over the bf16 update. Where one is fp32, bf16 element i lies in fp32 element i / 2. Elements
// [k, 2k) of the direction then overwrite the gradient's [k / 2, k), which were read before, and those
// of the weights the update's [2k, 4k): each such wave may run on all threads. The first elements, which
// meet themselves, are read from a copy.
struct Wave {
  std::int64_t lo, hi;
};

std::vector<Wave> waves_up(std::int64_t n, bool in_place) {
  if (!in_place) return {{0, n}};
  std::vector<Wave> waves{{0, std::min(n, kGrain)}};
  while (waves.back().hi < n) waves.push_back({waves.back().hi, std::min(2 * waves.back().hi, n)});
  return waves;
}

template <typename Body>
void run_wave(const Wave& wave, const Body& body) {
  running_pool()->run(wave.hi - wave.lo, kGrain, [&](std::int64_t lo, std::int64_t hi) {
    body(wave.lo + lo, wave.lo + hi);
  });
}

// What the first wave reads, if it meets itself.
template <typename T>
std::vector<T> first_elements(Address memory, std::int64_t n, bool in_place) {
  const T* first = at<const T>(memory);
  return in_place ? std::vector<T>(first, first + std::min(n, kGrain)) : std::vector<T>();
}

using BlendScalars = std::tuple<std::vector<float>, bool, bool, bool>;

Blend blend_of(const BlendScalars& scalars) {
  const auto& [numbers, towards_grad, towards_average, nesterov] = scalars;
  return {numbers.at(0), numbers.at(1), numbers.at(2), towards_grad, towards_average, nesterov};
}

// `body(gradient, run)` for all elements of the layout, in an order that lets `target` begin where
// `grad` does.
template <typename Body>
void blend_runs(const Grad& grad, Address target, std::int64_t n, const Layout& layout,
                const Seed& seed, const Body& body) {
  const auto [memory, dtype] = grad;
  const bool in_place = memory == target && static_cast<DType>(dtype) == DType::float32;
  const std::vector<float> first = first_elements<float>(memory, n, in_place);
  for (const Wave& wave : waves_up(n, in_place)) {
    const bool copied = in_place && wave.lo == 0;
    const Gradient g = copied ? Gradient{first.data(), DType::float32} : gradient(grad);
    run_wave(wave, [&](std::int64_t lo, std::int64_t hi) {
      each_run(layout, seed, lo, hi, [&](const Run& run) { body(g, run); });
    });
  }
}

void blend_fp32(Address average, const Grad& grad, Address target, std::int64_t n,
                const Layout& layout, const Seed& seed, const BlendScalars& scalars) {
  const Blend blend = blend_of(scalars);
  const Kernels* kernels = active;
  submit([=] {
    blend_runs(grad, target, n, layout, seed, [&](const Gradient& g, const Run& run) {
      kernels->blend_fp32(blend, at<float>(average), g, at<std::uint16_t>(target), run.lo, run.hi);
    });
  });
}

void blend_split16(Address average, const Grad& grad, Address target, std::int64_t n,
                   const Layout& layout, const Seed& seed, const BlendScalars& scalars) {
  const Blend blend = blend_of(scalars);
  const Kernels* kernels = active;
  submit([=] {
    blend_runs(grad, target, n, layout, seed, [&](const Gradient& g, const Run& run) {
      kernels->blend_split16(blend, at<std::uint16_t>(average), g, at<std::uint16_t>(target), run);
    });
  });
}

using Decays = std::tuple<float, std::vector<float>>;  // the factor, and each parameter's rate

// Zero what of [lo, hi) is no parameter's.
void zero_gaps(const Grad& memory, const Layout& layout, std::int64_t lo, std::int64_t hi) {
  const auto [address, dtype] = memory;
  const std::int64_t width = static_cast<DType>(dtype) == DType::float32 ? 4 : 2;
  char* bytes = at<char>(address);
  const auto zero = [&](std::int64_t from, std::int64_t to) {
    std::memset(bytes + from * width, 0, static_cast<std::size_t>((to - from) * width));
  };
  std::int64_t done = lo;
  each_slot(layout, lo, hi, [&](std::size_t, const Slot&, std::int64_t begin, std::int64_t end) {
    zero(done, begin);
    done = end;
  });
  zero(done, hi);
}

void subtract_fp32(Address master, Address update, const Grad& working, std::int64_t n,
                   const Layout& layout, const Decays& decays) {
  const Kernels* kernels = active;
  submit([=] {
    const auto [target, code] = working;
    const DType dtype = static_cast<DType>(code);
    const bool in_place = target == update && dtype == DType::float32;
    const std::vector<std::uint16_t> first = first_elements<std::uint16_t>(update, n, in_place);
    std::vector<Wave> waves = waves_up(n, in_place);
    std::reverse(waves.begin(), waves.end());
    for (const Wave& wave : waves) {
      const auto* source = in_place && wave.lo == 0 ? first.data() : at<const std::uint16_t>(update);
      run_wave(wave, [&, target = target](std::int64_t lo, std::int64_t hi) {
        each_slot(layout, lo, hi, [&](std::size_t number, const Slot&, std::int64_t begin, std::int64_t end) {
          const Decay decay = {std::get<0>(decays), -std::get<1>(decays)[number]};
          kernels->subtract_fp32(decay, at<float>(master), source, at<void>(target), dtype, begin, end);
        });
        if (dtype != DType::none) zero_gaps(working, layout, lo, hi);
      });
    }
  });
}

void subtract_split16(Address weight, Address low, Address update, std::int64_t n,
                      const Layout& layout, const Decays& decays) {
  const Kernels* kernels = active;
  submit([=] {
    running_pool()->run(n, kGrain, [&](std::int64_t lo, std::int64_t hi) {
      each_slot(layout, lo, hi, [&](std::size_t number, const Slot&, std::int64_t begin, std::int64_t end) {
        const Decay decay = {std::get<0>(decays), -std::get<1>(decays)[number]};
        kernels->subtract_split16(decay, at<std::uint16_t>(weight), at<std::int16_t>(low),
                                  at<const std::uint16_t>(update), begin, end);
      });
    });
  });
}

}  // namespace
}  // namespace offloadtrain
