// Which elements of a bucket's flat buffers belong to which parameter, and their random bits. For
// module.cpp only.
#pragma once

#include <algorithm>
#include <cstdint>
#include <tuple>

#include "kernels.h"

namespace offloadtrain {
namespace {

using Address = std::uintptr_t;

template <typename T>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

// A row of a bucket's layout: elements [offset, offset + numel) are those of parameter `id` from its
// element `first` on.
struct Slot {
  std::int64_t offset, numel, id, first;
};
using Layout = std::tuple<Address, std::int64_t>;  // address and number of slots, by offset

std::uint64_t mix(std::uint64_t z) {  // the finaliser of SplitMix64 (Steele et al. 2014)
  z += 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

using Seed = std::tuple<std::uint64_t, std::int64_t>;  // of stochastic rounding, and the step

// Elements are counted in 32 bits: what lies above them is part of the key.
std::uint64_t key_of(const Seed& seed, std::int64_t id, std::int64_t element) {
  const std::uint64_t of_step = mix(mix(std::get<0>(seed)) + static_cast<std::uint64_t>(std::get<1>(seed)));
  return mix(mix(of_step + static_cast<std::uint64_t>(id)) + (static_cast<std::uint64_t>(element) >> 32));
}

// Calls `body(number, slot, begin, end)` for each parameter with elements [begin, end) in [lo, hi).
template <typename Body>
void each_slot(const Layout& layout, std::int64_t lo, std::int64_t hi, const Body& body) {
  const Slot* first = at<const Slot>(std::get<0>(layout));
  const Slot* last = first + std::get<1>(layout);
  const auto ends_before = [](const Slot& slot, std::int64_t at) { return slot.offset + slot.numel <= at; };
  for (const Slot* slot = std::lower_bound(first, last, lo, ends_before);
       slot != last && slot->offset < hi; ++slot) {
    const std::int64_t end = std::min(slot->offset + slot->numel, hi);
    body(static_cast<std::size_t>(slot - first), *slot, std::max(slot->offset, lo), end);
  }
}

// Calls `body(run)` for what of [lo, hi) belongs to parameters, cut where the key changes.
template <typename Body>
void each_run(const Layout& layout, const Seed& seed, std::int64_t lo, std::int64_t hi,
              const Body& body) {
  each_slot(layout, lo, hi, [&](std::size_t, const Slot& slot, std::int64_t begin, std::int64_t end) {
    while (begin < end) {
      const std::int64_t element = begin - slot.offset + slot.first;
      const std::int64_t next_window = ((element >> 32) + 1) * (std::int64_t{1} << 32);
      const std::int64_t window_end = slot.offset + next_window - slot.first;
      const std::int64_t stop = std::min(end, window_end);
      body(Run{begin, stop, key_of(seed, slot.id, element), static_cast<std::uint32_t>(element)});
      begin = stop;
    }
  });
}

}  // namespace
}  // namespace offloadtrain
