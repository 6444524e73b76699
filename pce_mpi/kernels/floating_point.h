// The state of the floating-point unit: its rounding, its treatment of subnormal numbers, and its traps.
//
// A process may be in any state: libraries that were linked with -ffast-math change it when they are loaded. The loops
// need the standard one. A compiler may move arithmetic past a change of state, unless the arithmetic is in a function
// that it does not see.
#pragma once

#include <stdint.h>
#if defined(__x86_64__)
#include <immintrin.h>
#elif !defined(__aarch64__)
#include <fenv.h>
#endif

namespace pce {
namespace {

#if defined(__x86_64__)
typedef unsigned FloatingPoint;
inline FloatingPoint floating_point() { return _mm_getcsr(); }
inline void set_floating_point(FloatingPoint state) { _mm_setcsr(state); }
inline void set_standard_floating_point() { set_floating_point(0x1f80); }
#elif defined(__aarch64__)
typedef uint64_t FloatingPoint;
inline FloatingPoint floating_point() {
    FloatingPoint state;
    asm volatile("mrs %0, fpcr" : "=r"(state)::"memory");
    return state;
}
inline void set_floating_point(FloatingPoint state) { asm volatile("msr fpcr, %0" ::"r"(state) : "memory"); }
inline void set_standard_floating_point() { set_floating_point(0); }
#else
typedef fenv_t FloatingPoint;
inline FloatingPoint floating_point() {
    FloatingPoint state;
    fegetenv(&state);
    return state;
}
inline void set_floating_point(const FloatingPoint &state) { fesetenv(&state); }
inline void set_standard_floating_point() { fesetenv(FE_DFL_ENV); }
#endif

}  // namespace
}  // namespace pce
