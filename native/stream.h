// Stores that go to memory without first fetching the line they overwrite. They pay where nothing
// of the line is in the cache: for memory that a step only writes.
#pragma once

#include "numbers.h"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace offloadtrain {
namespace {

// Elements that are computed at once, in the cache: a line of 16-bit elements, two of fp32.
constexpr i64 kSlab = 32;

// [Note: Prefetching] Each slab asks for the lines of a later one, although the hardware prefetches
// too: into the second-level cache, and arithmetic leaves a CPU too little room to run ahead into it.
// Measured on a 2.5 GHz Xeon, one thread: 0.90 of the time of fp32 at any distance from 256 to 1,024
// elements; lines of slabs of 256 elements at once, which occupy the buffers that loads need, gain nothing.
constexpr i64 kAhead = 512;

template <i64 kCount, typename T>
OT_INLINE void prefetch(const T* memory) {
  // As a number: it may lie beyond the memory's end, where a prefetch does nothing.
  const std::uintptr_t first = reinterpret_cast<std::uintptr_t>(memory) + kAhead * sizeof(T);
  for (std::uintptr_t at = first; at < first + kCount * sizeof(T); at += 64) {
    __builtin_prefetch(reinterpret_cast<const void*>(at), 0, 3);
  }
}

#if defined(__AVX512F__)
struct Line {
  static constexpr i64 kBytes = 64;
  static void copy(char* target, const char* source) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(target), _mm512_load_si512(source));
  }
};
#elif defined(__AVX2__)
struct Line {
  static constexpr i64 kBytes = 32;
  static void copy(char* target, const char* source) {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(target),
                        _mm256_load_si256(reinterpret_cast<const __m256i*>(source)));
  }
};
#elif defined(__SSE2__)
struct Line {
  static constexpr i64 kBytes = 16;
  static void copy(char* target, const char* source) {
    _mm_stream_si128(reinterpret_cast<__m128i*>(target),
                     _mm_load_si128(reinterpret_cast<const __m128i*>(source)));
  }
};
#endif

template <typename T>
inline void copy(const T* source, T* target, i64 count) {
  __builtin_memcpy(target, source, static_cast<u64>(count) * sizeof(T));
}

// `source` is aligned to 64 bytes. To a target that is not aligned these are plain copies.
template <i64 kCount, typename T>
OT_INLINE void stream(T* target, const T* source) {
  constexpr i64 bytes = kCount * static_cast<i64>(sizeof(T));
#if defined(__SSE2__)
  if (bytes % Line::kBytes == 0 && reinterpret_cast<std::uintptr_t>(target) % Line::kBytes == 0) {
    for (i64 at = 0; at < bytes; at += Line::kBytes) {
      Line::copy(reinterpret_cast<char*>(target) + at, reinterpret_cast<const char*>(source) + at);
    }
    return;
  }
#endif
  copy(source, target, kCount);
}

// Streamed stores are not ordered with others: the thread that reads them next must find them.
inline void finish_streaming() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

// A moment that a rule does not have is null, and stays so.
template <typename T>
inline T* shifted(T* memory, i64 elements) {
  return memory ? memory + elements : nullptr;
}

// One output of a loop, slab by slab: in place, or by way of a buffer that is streamed out.
template <bool kStreamed, typename T, i64 kCount = kSlab>
class Output {
 public:
  explicit Output(T* target) : target_(target) {}
  OT_INLINE T* at(i64 lo) { return kStreamed ? slab_ : shifted(target_, lo); }
  OT_INLINE void done(i64 lo) const {
    if constexpr (kStreamed) stream<kCount>(target_ + lo, slab_);
  }

 private:
  T* target_;
  alignas(64) T slab_[kStreamed ? kCount : 1];
};

}  // namespace
}  // namespace offloadtrain
