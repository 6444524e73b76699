// The kernels' `device.cuh` for the host: CUDA's threads as fibers of one thread, each with a stack of its own.
//
// A fiber runs until it has to wait for others: at a barrier of its block, or where a warp exchanges. So barriers,
// shuffles and shared memory do what they do on a GPU, one at a time.
#pragma once
#include <cmath>
#include <csetjmp>
#include <cstdint>
#include <cstring>
#include <ucontext.h>
#include <utility>
#include <vector>

#include <arithmetic.h>

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)

struct alignas(PCE_VECTOR_BYTES) Vector {
  unsigned word[4];
};

template <typename To, typename From>
To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From), "the same bits, read otherwise");
  To to;
  std::memcpy(&to, &from, sizeof(To));
  return to;
}

namespace host {

struct Dim {
  unsigned x = 1, y = 1, z = 1;
};

// Waits of a number of threads for each other; those that have ended count no more.
struct Barrier {
  int members = 0, arrived = 0;
  long generation = 0;
};

constexpr std::size_t STACK = 64 << 10, SHARED = 48 << 10;

struct Block {
  Dim index;
  std::vector<char> shared;
  Barrier barrier;
  std::vector<Barrier> warps;
  std::vector<unsigned> exchange;

  char* memory() { return shared.data() + (16 - reinterpret_cast<std::uintptr_t>(shared.data()) % 16) % 16; }
};

struct Fiber {
  ucontext_t start;
  jmp_buf state;
  bool started = false, ended = false;
  Dim thread;
};

inline Dim block_dim, grid_dim;
inline Block block;
inline Fiber* current = nullptr;
inline jmp_buf scheduler;
inline long progress = 0;
inline std::size_t shared_used = 0;
inline const char* failure = nullptr;  // why a launch was given up
inline void (*body)(void*) = nullptr;
inline void* body_arguments = nullptr;

inline void yield() {
  if (!_setjmp(current->state)) _longjmp(scheduler, 1);
}

[[noreturn]] inline void fail(const char* why) {
  failure = why;
  _longjmp(scheduler, 1);
}

inline void release(Barrier& barrier) {
  if (barrier.members == 0 || barrier.arrived < barrier.members) return;
  barrier.arrived = 0;
  ++barrier.generation;
  ++progress;
}

inline long arrive(Barrier& barrier) {
  const long generation = barrier.generation;
  ++barrier.arrived;
  release(barrier);
  return generation;
}

inline void wait(Barrier& barrier, long generation) {
  while (barrier.generation == generation) yield();
}

inline void fiber_main() {
  body(body_arguments);
  current->ended = true;
  ++progress;
  for (Barrier* barrier : {&block.barrier, &block.warps[current->thread.x / 32]}) {
    --barrier->members;
    release(*barrier);
  }
  _longjmp(scheduler, 1);
}

// Lets a fiber run until it waits or ends.
inline void resume(Fiber& fiber, char* stack) {
  current = &fiber;
  if (_setjmp(scheduler)) return;
  if (fiber.started) _longjmp(fiber.state, 1);
  fiber.started = true;
  getcontext(&fiber.start);
  fiber.start.uc_stack.ss_sp = stack;
  fiber.start.uc_stack.ss_size = STACK;
  fiber.start.uc_link = nullptr;
  makecontext(&fiber.start, fiber_main, 0);
  setcontext(&fiber.start);
}

// Runs one block, or as much of it as there is no failure. Each warp goes on for as long as it can, so that a barrier
// that is missing lets it run far ahead of the others.
inline void run_block(std::vector<Fiber>& fibers, char* stacks) {
  for (bool all_ended = false; !all_ended;) {
    const long at_first = progress;
    all_ended = true;
    for (std::size_t warp = 0; warp < fibers.size(); warp += 32) {
      long before;
      do {
        before = progress;
        for (std::size_t i = warp; i < warp + 32; ++i) {
          if (!fibers[i].ended) resume(fibers[i], stacks + i * STACK);
          if (failure != nullptr) return;
        }
      } while (progress != before);
      for (std::size_t i = warp; i < warp + 32; ++i) all_ended = all_ended && fibers[i].ended;
    }
    if (!all_ended && progress == at_first) failure = "threads wait for each other for ever";
    if (failure != nullptr) return;
  }
}

inline const char* launch(Dim grid, Dim threads_of_block) {
  failure = nullptr;
  grid_dim = grid;
  block_dim = threads_of_block;
  const unsigned threads = block_dim.x;
  static std::size_t has = 0;
  static char* stacks = nullptr;  // not filled: most of a stack is never touched
  if (has < threads) {
    delete[] stacks;
    stacks = new char[(has = threads) * STACK];
  }
  std::vector<Fiber> fibers(threads);
  for (unsigned y = 0; y < grid.y; ++y)
    for (unsigned x = 0; x < grid.x; ++x) {
      block = Block();
      block.index = Dim{x, y, 0};
      block.barrier.members = threads;
      block.warps.assign((threads + 31) / 32, Barrier());
      block.exchange.assign(threads, 0);
      // What a block finds in its shared memory is nothing to count on.
      block.shared.assign(SHARED + 16, char(0xff));
      for (unsigned t = 0; t < threads; ++t) {
        fibers[t].started = fibers[t].ended = false;
        fibers[t].thread = Dim{t, 0, 0};
        ++block.warps[t / 32].members;
      }
      run_block(fibers, stacks);
      if (failure != nullptr) return failure;
    }
  return nullptr;
}

template <typename... P, std::size_t... I>
void apply(void (*kernel)(P...), void** arguments, std::index_sequence<I...>) {
  kernel(*static_cast<std::remove_cv_t<P>*>(arguments[I])...);
}

template <typename... P>
const char* call(void (*kernel)(P...), void** arguments, Dim grid, Dim threads_of_block) {
  struct Bound {
    void (*kernel)(P...);
    void** arguments;
  } bound{kernel, arguments};
  body_arguments = &bound;
  body = [](void* pointer) {
    const Bound& bound = *static_cast<Bound*>(pointer);
    apply(bound.kernel, bound.arguments, std::index_sequence_for<P...>());
  };
  return launch(grid, threads_of_block);
}

// sizeof each parameter, so that a launch can be checked against the kernel.
template <typename... P>
int sizes(void (*)(P...), int* size) {
  int count = 0;
  ((size[count++] = sizeof(P)), ...);
  return count;
}

}  // namespace host

#define threadIdx (host::current->thread)
#define blockIdx (host::block.index)
#define blockDim (host::block_dim)
#define gridDim (host::grid_dim)

inline long long clock64() {
  static long long cycles = 0;
  return cycles += 1000;
}

inline void __syncthreads() {
  host::Barrier& barrier = host::block.barrier;
  host::wait(barrier, host::arrive(barrier));
}

inline void warp_barrier() {
  host::Barrier& barrier = host::block.warps[threadIdx.x / 32];
  host::wait(barrier, host::arrive(barrier));
}

inline void __syncwarp() { warp_barrier(); }

inline unsigned shuffle_xor(unsigned word, int lane_mask) {
  std::vector<unsigned>& exchange = host::block.exchange;
  exchange[threadIdx.x] = word;
  warp_barrier();
  const unsigned other = exchange[threadIdx.x ^ lane_mask];
  warp_barrier();
  return other;
}

template <typename T>
T& shared_memory() {
  static const std::size_t offset = [] {
    const std::size_t at = host::shared_used;
    host::shared_used += (sizeof(T) + 15) / 16 * 16;
    if (host::shared_used > host::SHARED) host::fail("more shared memory than a block has");
    return at;
  }();
  return *reinterpret_cast<T*>(host::block.memory() + offset);
}

inline void check_alignment(const void* address) {
  if (reinterpret_cast<std::uintptr_t>(address) % 16) host::fail("a vector at an address that 16 does not divide");
}

inline Vector load_constant(const void* address) {
  check_alignment(address);
  Vector v;
  std::memcpy(&v, address, sizeof v);
  return v;
}
inline Vector load_streaming(const void* address) { return load_constant(address); }
inline void store_streaming(void* address, Vector v) {
  check_alignment(address);
  std::memcpy(address, &v, sizeof v);
}

inline float float_of_half(unsigned short bits) { return bit_cast<_Float16>(bits); }
inline unsigned half_of_float(float x) { return bit_cast<unsigned short>(static_cast<_Float16>(x)); }
inline unsigned halves_of_floats(float first, float second) {
  return half_of_float(first) | half_of_float(second) << 16;
}

inline unsigned bfloat16_of_float(float x) {
  const unsigned bits = bit_cast<unsigned>(x);
  if (x != x) return 0x7fff;
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline unsigned bfloat16s_of_floats(float first, float second) {
  return bfloat16_of_float(first) | bfloat16_of_float(second) << 16;
}

template <typename Number>
unsigned maximum_of_pairs(unsigned a, unsigned b, Number number) {
  const auto larger = [&](unsigned p, unsigned q) { return number(p) >= number(q) || number(p) != number(p) ? p : q; };
  return larger(a & 0xffff, b & 0xffff) | larger(a >> 16, b >> 16) << 16;
}
inline unsigned maximum_of_halves(unsigned a, unsigned b) {
  return maximum_of_pairs(a, b, [](unsigned x) { return float_of_half(static_cast<unsigned short>(x)); });
}
inline unsigned maximum_of_bfloat16s(unsigned a, unsigned b) {
  return maximum_of_pairs(a, b, [](unsigned x) { return bit_cast<float>(x << 16); });
}

inline float size_of(float v) { return std::fabs(v); }
inline float smaller_size(float a, float b) { return a != a ? a : b != b ? b : std::fmin(a, size_of(b)); }
inline unsigned smaller_sizes_of_bfloat16s(unsigned a, unsigned b) {
  const auto number = [](unsigned bits) { return bit_cast<float>(bits << 16); };
  const auto smaller = [&](unsigned p, unsigned q) { return bfloat16_of_float(smaller_size(number(p), number(q))); };
  return smaller(a & 0xffff, b & 0xffff) | smaller(a >> 16, b >> 16) << 16;
}
inline bool same(float a, float b) { return a == b || (a != a && b != b); }

inline double truncated(double v) { return std::trunc(v); }
inline double __fma_rn(double a, double b, double c) { return std::fma(a, b, c); }

inline float maximum_or_nan(float a, float b) { return a != a ? a : b != b ? b : a > b ? a : b; }

inline std::uint64_t shifted_right(std::uint64_t v, unsigned by) { return by < 64 ? v >> by : 0; }
