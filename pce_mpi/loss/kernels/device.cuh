// Loads, conversions, shuffles and clusters of the GPU. In PTX where CUDA C++ would need one of CUDA's headers: NVRTC
// alone can compile the kernels.
#pragma once

// The logits that one instruction loads or stores. The PTX below moves four words.
struct alignas(PCE_VECTOR_BYTES) Vector {
  unsigned word[4];
};
static_assert(sizeof(Vector) == PCE_VECTOR_BYTES, "a vector is four words");

template <typename To, typename From>
__device__ __forceinline__ To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From), "the types differ in size");
  To to;
  memcpy(&to, &from, sizeof(To));
  return to;
}

// From memory that no thread writes to while the kernel runs.
__device__ __forceinline__ Vector load_constant(const void* address) {
  Vector v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3])
               : "l"(address));
  return v;
}

// From memory that this thread may write to later.
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

// A word holds two float16 or bfloat16; the first one is in the lower half.
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

// The maxima of two pairs; if one number is nan, the other one.
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

// The maximum; nan if one of them is.
__device__ __forceinline__ float maximum_or_nan(float a, float b) {
  float larger;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
  return larger;
}

// 2**x with a relative error of about 2**-22.
__device__ __forceinline__ float approximate_exp2(float x) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
  return power;
}

// CuPy compiles with -ftz=true, which flushes float32 below 2**-126 to 0. Gradients may be smaller than that: these two
// functions keep subnormal results.
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

// One T in the shared memory of each block.
template <typename T>
__device__ __forceinline__ T& shared_memory() {
  __shared__ alignas(16) char memory[sizeof(T)];
  return *reinterpret_cast<T*>(memory);
}

__device__ __forceinline__ unsigned shuffle_xor(unsigned word, int lane_mask) {
  return __shfl_xor_sync(0xffffffffu, word, lane_mask);
}

#if __CUDA_ARCH__ >= PCE_CLUSTER_CAPABILITY * 10
#define CLUSTER_SIZE(blocks) __cluster_dims__(blocks, 1, 1)
#else
#define CLUSTER_SIZE(blocks)  // this GPU has no clusters, and no kernel that needs one is compiled for it
#endif

// A barrier of the cluster in two halves. After the wait, every thread sees what the others stored before they arrived.
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive;" ::: "memory"); }

__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait;" ::: "memory"); }

// Store to the shared memory of another block of the cluster. `address` is the same variable in this block's.
__device__ __forceinline__ void store_in_cluster(double* address, unsigned block, double value) {
  unsigned own = static_cast<unsigned>(__cvta_generic_to_shared(address)), remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(own), "r"(block));
  asm volatile("st.shared::cluster.f64 [%0], %1;" ::"r"(remote), "d"(value) : "memory");
}
