// What only a GPU has, in PTX where CUDA C++ has no word for it: so that no header of CUDA's is needed to compile.
#pragma once

// 16 bytes of logits, as they are stored.
struct alignas(16) Vector {
  unsigned word[4];
};

template <typename To, typename From>
__device__ __forceinline__ To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From), "the same bits, read otherwise");
  To to;
  memcpy(&to, &from, sizeof(To));
  return to;
}

// For memory that no thread writes to while the kernel runs.
__device__ __forceinline__ Vector load_constant(const void* address) {
  Vector v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3])
               : "l"(address));
  return v;
}

// For memory that the same thread may write to later.
__device__ __forceinline__ Vector load_streaming(const void* address) {
  Vector v;
  asm volatile("ld.global.cs.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3])
               : "l"(address)
               : "memory");
  return v;
}

__device__ __forceinline__ void store_streaming(void* address, Vector v) {
  asm volatile("st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(v.word[0]), "r"(v.word[1]),
               "r"(v.word[2]), "r"(v.word[3])
               : "memory");
}

// The two float16 in a word; the first is in the lower half.
__device__ __forceinline__ float float_of_half(unsigned short bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}

__device__ __forceinline__ unsigned halves_of_floats(float first, float second) {
  unsigned word;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(second), "f"(first));
  return word;
}

__device__ __forceinline__ unsigned bfloat16s_of_floats(float first, float second) {
  unsigned word;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(second), "f"(first));
  return word;
}

// The larger ones of two pairs; a number where the other is nan.
__device__ __forceinline__ unsigned maximum_of_halves(unsigned a, unsigned b) {
  unsigned larger;
  asm("max.f16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
  return larger;
}

__device__ __forceinline__ unsigned maximum_of_bfloat16s(unsigned a, unsigned b) {
  unsigned larger;
  asm("max.bf16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
  return larger;
}

// The larger one, or the nan.
__device__ __forceinline__ float maximum_or_nan(float a, float b) {
  float larger;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
  return larger;
}

// 2**x to about 2**-22 of itself.
__device__ __forceinline__ float approximate_exp2(float x) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
  return power;
}

// CuPy compiles with -ftz=true, which makes 0 of float32 below 2**-126. Entries of a gradient may be as small: these two
// keep them.
__device__ __forceinline__ float product(float a, float b) {
  float c;
  asm("mul.rn.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
  return c;
}

__device__ __forceinline__ float nearest_float(double x) {
  float y;
  asm("cvt.rn.f32.f64 %0, %1;" : "=f"(y) : "d"(x));
  return y;
}

// One T for each block.
template <typename T>
__device__ __forceinline__ T& shared_memory() {
  __shared__ alignas(16) char memory[sizeof(T)];
  return *reinterpret_cast<T*>(memory);
}

__device__ __forceinline__ unsigned exchanged_in_warp(unsigned word, int other_lanes) {
  return __shfl_xor_sync(0xffffffffu, word, other_lanes);
}

#if __CUDA_ARCH__ >= 900
#define BLOCKS_IN_CLUSTER(blocks) __cluster_dims__(blocks, 1, 1)
#else
#define BLOCKS_IN_CLUSTER(blocks)  // there are no clusters, and no kernels for them
#endif

// Every thread of the cluster arrives; after the wait, all have, and what they stored before can be read.
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive;" ::: "memory"); }

__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait;" ::: "memory"); }

// Store to the place in the shared memory of another block of the cluster that `address` is in this block's.
__device__ __forceinline__ void store_in_cluster(double* address, unsigned block, double value) {
  unsigned own = static_cast<unsigned>(__cvta_generic_to_shared(address)), remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(own), "r"(block));
  asm volatile("st.shared::cluster.f64 [%0], %1;" ::"r"(remote), "d"(value) : "memory");
}
