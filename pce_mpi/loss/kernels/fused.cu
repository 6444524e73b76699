// Forward and backward at once, for rows that are not sharded: a row stays in the registers of a block, or of a cluster
// of blocks, and each logit is read once. Launched by cuda.py.
#include <row_gradient.cuh>
#include <row_softmax.cuh>

struct SharedStorage {
  // From each block of the cluster.
  double max[MAX_CLUSTER_SIZE], sum[MAX_CLUSTER_SIZE];
  // From the first thread, and then the first warp, to the other threads of the block.
  double target, row_max, factor, held_dx;
};

// The grid has BLOCKS blocks for each row. The gradient is that of slope (held (-log p_target) + z_loss logsumexp**2),
// and 0 in rows that are not valid. `out` may be the logits; otherwise its rows have the same alignment as theirs. If
// `out` is null, another kernel writes the gradient, and `factors` and `held_gradients` get its arguments.
template <typename T, int BLOCKS>
__global__ void CLUSTER_SIZE(BLOCKS) __launch_bounds__(FUSED_BLOCK_THREADS, RESIDENT_THREADS / FUSED_BLOCK_THREADS)
    fill_states_and_write_gradient(const T* logits, int64 pitch, int classes, T* out, int64 out_pitch,
                                    const int64* target_column, const double* slope, const double* held,
                                    const bool* valid, double scale, double z_loss, unsigned fields, double* states,
                                    double* factors, double* held_gradients) {
  constexpr int VECTORS = sizeof(T) == 2 ? FUSED_VECTORS_OF_2_BYTES : FUSED_VECTORS_OF_4_BYTES;
  const int threads = static_cast<int>(blockDim.x), thread = static_cast<int>(threadIdx.x);
  const int block = BLOCKS == 1 ? 0 : static_cast<int>(blockIdx.x % BLOCKS), stride = threads * BLOCKS;
  const int64 r = blockIdx.x / BLOCKS;
  const T* row = logits + r * pitch;
  const VectorizedSpan<T> span(row, classes);
  const int64 column = target_column[r];
  const int target = column >= 0 && column < classes ? static_cast<int>(column) : -1;
  if constexpr (BLOCKS > 1) cluster_arrive();  // waited for in step 4
  SharedStorage& shared = shared_memory<SharedStorage>();

  // Step 1: load the row into registers.
  Vector v[VECTORS];
  const int first = block * threads + thread;
#pragma unroll
  for (int i = 0; i < VECTORS; ++i)
    if (first + i * stride < span.vectors) v[i] = load_streaming(row + span.vector_start(first + i * stride));
  // The scalars at both ends go to the last block, which has the fewest vectors.
  const bool has_scalar = block == BLOCKS - 1 && thread < span.scalars;
  const int scalar_index = span.scalar_index(thread);
  const float scalar = has_scalar && scalar_index != target ? widen(row[scalar_index]) : -infinity<float>();
  // Every block reads the target now: in step 6 another block may overwrite it.
  if (thread == 0) shared.target = target < 0 ? -infinity<double>() : static_cast<double>(widen(row[target]));

  // Step 2: each thread's max, and its sum of exponentials, without the target.
  unsigned largest = Storage<T>::minus_inf;
#pragma unroll
  for (int i = 0; i < VECTORS; ++i) {
    if (first + i * stride >= span.vectors) v[i] = vector_of_minus_inf<T>();
    mask<T>(v[i], static_cast<unsigned>(target - span.vector_start(first + i * stride)));
    largest = max_into<T>(largest, v[i]);
  }
  float max = fmaxf(max_of_word<T>(largest), scalar);
  Exponential<T, float> exponential(scale);
  if (max > -infinity<float>()) exponential.set_reference(max);
  double sum = static_cast<double>(exponential(scalar));
#pragma unroll
  for (int i = 0; i < VECTORS; ++i) {
    if (first + i * stride < span.vectors) {
      float x[Storage<T>::width];
      unpack<T>(v[i], x);
      sum += static_cast<double>(exponential.sum_of(x));
    }
  }

  // Step 3: reduce over the block.
  reduce_sums(max, sum, exponential, scale, threads);

  // Step 4: all blocks of the cluster exchange their results.
  if constexpr (BLOCKS > 1) {
    cluster_wait();  // all blocks have started: their shared memory exists
    if (thread < BLOCKS) {
      store_in_cluster(&shared.max[block], thread, static_cast<double>(max));
      store_in_cluster(&shared.sum[block], thread, sum);
    }
    cluster_arrive();
    cluster_wait();
  } else if (thread == 0) {
    shared.max[0] = static_cast<double>(max);
    shared.sum[0] = sum;
  }

  // Step 5: the first warp of each block reduces over the cluster, and derives the state and the row's gradient.
  if (thread < WARP_SIZE) {
    __syncwarp();
    double row_max = shared.max[0], row_sum = 0.0;
    for (int i = 1; i < BLOCKS; ++i) row_max = max_or_nan(row_max, shared.max[i]);
#pragma unroll 1
    for (int i = 0; i < BLOCKS; ++i)
      if (shared.sum[i] != 0.0) row_sum += shared.sum[i] * exp(scale * (shared.max[i] - row_max));
    const RowSoftmax softmax(shared.target, row_max, row_sum, scale, z_loss != 0.0);
    const double common = z_loss != 0.0 ? 2.0 * z_loss * softmax.logsumexp : 0.0;
    const double factor = slope[r] * (held[r] + common) * softmax.normalizer;
    const double held_dx = slope[r] * (held[r] * softmax.held_minus_one + common * softmax.held_probability);
    if (thread == 0) {
      shared.row_max = row_max;
      shared.factor = RowGradient<ShortExponential<T>, float>(row_max, scale).rescaled(factor, row_max, scale);
      shared.held_dx = held_dx;
    }
    if (thread == 0 && block == 0) {
      State state = identity();
      state.held = shared.target;
      state.max = row_max;
      state.sum_exp = row_sum;
      state.held_weight = target < 0 ? 0.0 : held[r];
      store(state, states + r * num_fields(fields), fields, scale);
      if (out == nullptr) {
        factors[r] = factor;
        held_gradients[r] = held_dx;
      }
    }
  }
  if (out == nullptr) return;
  __syncthreads();

  // Step 6: write the gradient of the logits that are still in registers.
  RowGradient<ShortExponential<T>, float> gradient(shared.row_max, scale);
  gradient.factor = nearest_float(shared.factor);
  const float held_dx = nearest_float(shared.held_dx);
  const bool is_valid = valid[r];
  T* to = out + r * out_pitch;
#pragma unroll
  for (int i = 0; i < VECTORS; ++i) {
    const int at = span.vector_start(first + i * stride);
    if (first + i * stride < span.vectors) {
      const Vector dx = gradient_of<T>(v[i], gradient, static_cast<unsigned>(target - at), held_dx);
      store_streaming(to + at, is_valid ? dx : Vector{0, 0, 0, 0});
    }
  }
  if (has_scalar) {
    const float dx = scalar_index == target ? held_dx : gradient(widen(row[scalar_index]));
    to[scalar_index] = narrow<T>(is_valid ? dx : 0.0f);
  }
}
