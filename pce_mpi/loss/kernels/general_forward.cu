// The record of every row with every option and in either arithmetic, each logit read once. Launched by cuda.py.
#include <exponential.cuh>
#include <record.cuh>
#include <weights.cuh>

constexpr int THREADS = 256;
constexpr int NONE = 0x7fffffff;

// What a thread knows: the class held apart, and sums over the others.
template <typename A>
struct Sums {
  Exponential<float, A> exponential;
  A held = -infinity<A>(), max = -infinity<A>();
  int held_at = NONE;  // the class, counted from the block's first
  double sum = 0.0;
  // The gaps are to the largest of the others so far, not scaled; `exp_gap` is relative to what the sum is.
  double weight = 0.0, weighted_gap = 0.0, exp_gap = 0.0;

  __device__ __forceinline__ explicit Sums(double scale) : exponential(scale) {}

  __device__ __forceinline__ void add(A x, int at, int target, const ClassWeights& weights, double scale,
                                      unsigned fields) {
    double u;
    if (fields & ARGMAX ? comes_first(x, at, held, held_at) : at == target) {
      // It changes places with the one that was held: none at first, which weighs nothing.
      const A joins = held;
      u = held_at == NONE ? 0.0 : weights[held_at];
      held = x;
      held_at = at;
      x = joins;
    } else {
      u = fields & WEIGHT ? weights[at] : 0.0;
    }
    if (x > max) {
      const double rise = static_cast<double>(x) - max;
      weighted_gap += times(weight, rise);
      exp_gap += times(sum, rise);
      max = x;
    }
    if (x > exponential.limit) {
      const Exponential<float, A> before = exponential;
      exponential.refer_to(x);
      if (sum != 0.0) {
        const double decay = exp(before.over(exponential, scale));
        sum *= decay;
        exp_gap *= decay;
      }
    }
    const double e = exponential(x);
    sum += e;
    if (fields & (WEIGHT | EXP_GAP)) {
      const double gap = x == -infinity<A>() ? infinity<double>() : max - static_cast<double>(x);
      weight += u;
      weighted_gap += times(u, gap);
      exp_gap += times(e, gap);
    }
  }

  // `first` is the number of the block's first class.
  __device__ __forceinline__ void store_in(Record& record, const ClassWeights& weights, double scale,
                                           int64 first) const {
    record = identity();
    record.held = held;
    record.max = max;
    record.weight = weight;
    record.weighted_gap = scale * weighted_gap;
    if (held_at != NONE) {
      record.held_weight = weights[held_at];
      record.argmax = first + held_at;
    }
    if (sum != 0.0) {
      const double factor = exp(exponential.over(record.max, scale));
      record.sum_exp = sum * factor;
      record.exp_gap = scale * exp_gap * factor;
    }
  }
};

// `fields` say whether the largest logit is held apart or the target, and which sums are asked for; `target_column` may
// be null. The softmax is of scale x, or of softcap tanh(slope x) unless softcap is 0.
template <typename T, typename A>
__global__ void __launch_bounds__(THREADS, 1024 / THREADS)
    fill_general_records(const T* logits, int64 pitch, int64 rows, int64 classes, int chunk, int lanes,
                         const int64* target_column, const double* weight, double scale, unsigned fields,
                         double* records, const void* probabilities, int kind, int64 probability_pitch, double keep,
                         double spread, double softcap, double slope, int64 class_start) {
  const Place place(rows, classes, chunk, lanes);
  const bool has_row = place.row < rows;
  const T* row = logits + (has_row ? place.row * pitch + place.first : 0);
  const Stretch<T> stretch(row, place.count);
  const int target = has_row && target_column != nullptr ? place.relative(target_column[place.row]) : -1;
  const ClassWeights weights{weight == nullptr ? nullptr : weight + place.first, probabilities, kind,
                             place.row * probability_pitch + place.first, keep, spread};
  Sums<A> sums(scale);

  for (int i = place.lane; i < stretch.body + stretch.edges; i += lanes) {
    const bool single = i >= stretch.body;
    int at = single ? stretch.edge_at(i - stretch.body) : stretch.vector_at(i);
    Vector v = single ? vector_of(row[at]) : load_constant(row + at);
#pragma unroll 1
    for (const int end = at + (single ? 1 : Storage<T>::width); at < end; ++at) {
      const T x = next<T>(v);
      sums.add(capped(static_cast<A>(number(x)), softcap, slope), at, target, weights, scale, fields);
    }
  }

  Record* own = own_record();
  sums.store_in(*own, weights, scale, class_start + place.first);
  merge_group(lanes, fields, scale);
  if (!has_row || place.lane != 0) return;
  if (target >= 0) own->target = capped(static_cast<A>(number(row[target])), softcap, slope);
  store(*own, records + (place.row * gridDim.y + blockIdx.y) * columns(fields), fields, scale);
}
