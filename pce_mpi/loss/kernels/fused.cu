// The record and the gradient of rows that are whole, each logit read once: a row stays in the registers of a block, or
// of a cluster of blocks that tell each other their sums. Launched by cuda.py.
#include <row_gradient.cuh>
#include <row_softmax.cuh>

constexpr int THREADS = 512;

// What the blocks of a cluster tell each other, and what a block's first warp tells the others.
struct Told {
  double max[8], sum[8];
  double target, row_max, factor, at_held;
};

// BLOCKS for each row; a thread keeps up to VECTORS vectors. dx is the gradient of
// slope (held (-log p_target) + z_loss logsumexp**2), 0 in rows that are not valid. `out` may be the logits, and its
// rows lie as theirs do relative to multiples of 16 bytes. If it is null, what another kernel needs goes to `factors`
// and `held_gradients`.
template <typename T, int BLOCKS>
__global__ void BLOCKS_IN_CLUSTER(BLOCKS) __launch_bounds__(THREADS, 1024 / THREADS)
    fill_records_and_write_gradient(const T* logits, int64 pitch, int classes, T* out, int64 out_pitch,
                                    const int64* target_column, const double* slope, const double* held,
                                    const bool* valid, double scale, double z_loss, unsigned fields, double* records,
                                    double* factors, double* held_gradients) {
  constexpr int VECTORS = sizeof(T) == 2 ? 4 : 6;
  const int threads = static_cast<int>(blockDim.x), thread = static_cast<int>(threadIdx.x);
  const int block = BLOCKS == 1 ? 0 : static_cast<int>(blockIdx.x % BLOCKS), stride = threads * BLOCKS;
  const int64 r = blockIdx.x / BLOCKS;
  const T* row = logits + r * pitch;
  const Stretch<T> stretch(row, classes);
  const int64 column = target_column[r];
  const int target = column >= 0 && column < classes ? static_cast<int>(column) : -1;
  if constexpr (BLOCKS > 1) cluster_arrive();
  Told& told = shared_memory<Told>();

  Vector v[VECTORS];
  const int first = block * threads + thread;
#pragma unroll
  for (int i = 0; i < VECTORS; ++i)
    if (first + i * stride < stretch.body) v[i] = load_streaming(row + stretch.vector_at(first + i * stride));
  // Single classes go to the last block, which has fewest vectors.
  const bool has_edge = block == BLOCKS - 1 && thread < stretch.edges;
  const int edge_at = stretch.edge_at(thread);
  const float edge = has_edge && edge_at != target ? number(row[edge_at]) : -infinity<float>();
  // Now, as another block may be the one to write there.
  if (thread == 0) told.target = target < 0 ? -infinity<double>() : static_cast<double>(number(row[target]));

  unsigned largest = Storage<T>::lowest;
#pragma unroll
  for (int i = 0; i < VECTORS; ++i) {
    if (first + i * stride >= stretch.body) v[i] = vector_of_lowest<T>();
    mask<T>(v[i], static_cast<unsigned>(target - stretch.vector_at(first + i * stride)));
    largest = larger<T>(largest, v[i]);
  }
  float max = fmaxf(largest_of<T>(largest), edge);
  Exponential<T, float> exponential(scale);
  if (max > -infinity<float>()) exponential.refer_to(max);
  double sum = static_cast<double>(exponential(edge));
#pragma unroll
  for (int i = 0; i < VECTORS; ++i) {
    if (first + i * stride < stretch.body) {
      float x[Storage<T>::width];
      unpack<T>(v[i], x);
      sum += static_cast<double>(exponential.sum_of(x));
    }
  }
  reduce_sums(max, sum, exponential, scale, threads);

  if constexpr (BLOCKS > 1) {
    cluster_wait();  // all blocks are there, and take what they are told
    if (thread < BLOCKS) {
      store_in_cluster(&told.max[block], thread, static_cast<double>(max));
      store_in_cluster(&told.sum[block], thread, sum);
    }
    cluster_arrive();
    cluster_wait();
  } else if (thread == 0) {
    told.max[0] = static_cast<double>(max);
    told.sum[0] = sum;
  }
  if (thread < 32) {
    __syncwarp();
    double row_max = told.max[0], row_sum = 0.0;
    for (int i = 1; i < BLOCKS; ++i) row_max = larger_or_nan(row_max, told.max[i]);
#pragma unroll 1
    for (int i = 0; i < BLOCKS; ++i)
      if (told.sum[i] != 0.0) row_sum += told.sum[i] * exp(scale * (told.max[i] - row_max));
    const RowSoftmax softmax(told.target, row_max, row_sum, scale, z_loss != 0.0);
    const double common = z_loss != 0.0 ? 2.0 * z_loss * softmax.logsumexp : 0.0;
    const double factor = slope[r] * (held[r] + common) * softmax.normalizer;
    const double at_held = slope[r] * (held[r] * softmax.held_minus_one + common * softmax.held_probability);
    if (thread == 0) {
      told.row_max = row_max;
      told.factor = RowGradient<ShortExponential<T>, float>(row_max, scale).relative(factor, row_max, scale);
      told.at_held = at_held;
    }
    if (thread == 0 && block == 0) {
      Record record = identity();
      record.held = told.target;
      record.max = row_max;
      record.sum_exp = row_sum;
      record.held_weight = target < 0 ? 0.0 : held[r];
      store(record, records + r * columns(fields), fields, scale);
      if (out == nullptr) {
        factors[r] = factor;
        held_gradients[r] = at_held;
      }
    }
  }
  if (out == nullptr) return;
  __syncthreads();

  RowGradient<ShortExponential<T>, float> gradient(told.row_max, scale);
  gradient.factor = nearest_float(told.factor);
  const float at_held = nearest_float(told.at_held);
  const bool counts = valid[r];
  T* to = out + r * out_pitch;
#pragma unroll
  for (int i = 0; i < VECTORS; ++i) {
    const int at = stretch.vector_at(first + i * stride);
    if (first + i * stride < stretch.body) {
      const Vector dx = gradient_of<T>(v[i], gradient, static_cast<unsigned>(target - at), at_held);
      store_streaming(to + at, counts ? dx : Vector{0, 0, 0, 0});
    }
  }
  if (has_edge) {
    const float dx = edge_at == target ? at_held : gradient(number(row[edge_at]));
    to[edge_at] = rounded<T>(counts ? dx : 0.0f);
  }
}
