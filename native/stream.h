// Stores that go to memory without first fetching the line they overwrite. They pay where nothing
// of the line is in the cache: for memory that a step only writes.
#pragma once

#include "numbers.h"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace offloadtrain {
namespace {

// Elements that are computed in the cache before they are streamed out.
constexpr i64 kSlab = 256;

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

// `source` is aligned to 64 bytes. A target that is not aligned, and the rest, are plain copies.
template <typename T>
inline void stream(T* target, const T* source, i64 count) {
  i64 done = 0;
#if defined(__SSE2__)
  constexpr i64 per_line = Line::kBytes / static_cast<i64>(sizeof(T));
  if (reinterpret_cast<std::uintptr_t>(target) % Line::kBytes == 0) {
    for (; done + per_line <= count; done += per_line) {
      Line::copy(reinterpret_cast<char*>(target + done), reinterpret_cast<const char*>(source + done));
    }
  }
#endif
  __builtin_memcpy(target + done, source + done, static_cast<u64>(count - done) * sizeof(T));
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
template <typename T>
class Output {
 public:
  Output(T* target, bool streamed) : target_(target), streamed_(streamed) {}
  T* at(i64 lo) { return streamed_ ? slab_ : shifted(target_, lo); }
  void done(i64 lo, i64 count) const {
    if (streamed_) stream(target_ + lo, slab_, count);
  }

 private:
  T* target_;
  bool streamed_;
  alignas(64) T slab_[kSlab];
};

}  // namespace
}  // namespace offloadtrain
