// What CuPy's own kernels take from CUDA, beside what those of the package do (`device.cuh` for the host); precompiled.
#pragma once
#include <device.cuh>
#include <algorithm>
#include <cassert>
#include <cstddef>
#include <initializer_list>
#include <type_traits>
#include <xmmintrin.h>

#define __host__
#define __noinline__
#define __constant__ static
#define __shared__ static
#define __syncwarp(...) warp_barrier()

using std::abs, std::isfinite, std::isinf, std::isnan, std::max, std::min, std::ptrdiff_t, std::signbit, std::size_t;

inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline int __popcll(unsigned long long v) { return __builtin_popcountll(v); }
inline int __clz(unsigned v) { return v ? __builtin_clz(v) : 32; }
inline int __clzll(unsigned long long v) { return v ? __builtin_clzll(v) : 64; }
inline long long __double_as_longlong(double v) { return bit_cast<long long>(v); }
inline double __longlong_as_double(long long v) { return bit_cast<double>(v); }
inline int __float_as_int(float v) { return bit_cast<int>(v); }
inline float __int_as_float(int v) { return bit_cast<float>(v); }
inline double rsqrt(double v) { return 1 / std::sqrt(v); }
template <typename T>
T __ldg(const T* address) {
  return *address;
}

// Each thread shows a number of up to 8 bytes to its warp, and takes that of lane `from`.
template <typename T>
T exchanged(T value, int from) {
  static unsigned long long shown[1024];
  std::memcpy(&shown[threadIdx.x], &value, sizeof(T));
  warp_barrier();
  std::memcpy(&value, &shown[threadIdx.x / 32 * 32 + from], sizeof(T));
  warp_barrier();
  return value;
}
template <typename T>
T __shfl_sync(unsigned, T value, int lane, int = 32) {
  return exchanged(value, lane % 32);
}
template <typename T>
T __shfl_up_sync(unsigned, T value, unsigned by, int = 32) {
  const int lane = threadIdx.x % 32;
  return exchanged(value, lane < int(by) ? lane : lane - by);
}
template <typename T>
T __shfl_xor_sync(unsigned, T value, int mask, int = 32) {
  return exchanged(value, threadIdx.x % 32 ^ mask);
}

namespace cupy_on_cpu {

inline void* dynamic_shared_memory() {
  alignas(16) static char memory[64 << 10];
  return memory;
}

// As under -ftz=true: subnormal float32 numbers count as 0, operands and results. float64 beside them suffers too.
struct Flushing {
  unsigned before = _mm_getcsr();
  Flushing() { _mm_setcsr(before | 0x8040); }
  ~Flushing() { _mm_setcsr(before); }
};

// Threads that never meet need no fibers: they run one after the other.
template <typename... P>
const char* in_turn(void (*kernel)(P...), void** arguments, host::Dim grid, host::Dim threads) {
  host::Fiber fiber;
  host::current = &fiber;
  host::grid_dim = grid;
  host::block_dim = threads;
  for (unsigned y = 0; y < grid.y; ++y)
    for (unsigned x = 0; x < grid.x; ++x) {
      host::block.index = {x, y, 0};
      for (fiber.thread = {0, 0, 0}; fiber.thread.x < threads.x; ++fiber.thread.x)
        host::apply(kernel, arguments, std::index_sequence_for<P...>());
    }
  return nullptr;
}

template <bool meet, bool flushes, typename... P>
const char* launch(void (*kernel)(P...), void** arguments, host::Dim grid, host::Dim threads) {
  Flushing* flushing = flushes ? new Flushing : nullptr;
  const char* failure = (meet ? host::call<P...> : in_turn<P...>)(kernel, arguments, grid, threads);
  delete flushing;
  return failure;
}

}  // namespace cupy_on_cpu

#include <cupy/complex.cuh>
#include <cupy/carray.cuh>
#include <cupy/atomics.cuh>
#include <cupy/float16.cuh>
#include <cupy/bfloat16.cuh>
